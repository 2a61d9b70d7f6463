"""The clocks of a replayed server: whatever is launched and answered, each does one thing at a time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.simulation.host_time import NO_HOST_TIME, HostTime
from feather_sglang.simulation.timeline import Timeline

SECONDS = st.floats(0, 0.5)
STEPS = st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=40)  # spend, then a launch's three
FRONT = st.builds(
    HostTime,
    front_request=SECONDS,
    front_token=st.floats(0, 1e-4),
    front_piece=SECONDS,
    hop_in=SECONDS,
    hop_out=SECONDS,
)
# The scheduler works, waits, launches, sends a piece; or a client sends a prompt a while after the one before.
ACTS = st.lists(st.tuples(st.sampled_from(("spend", "wait", "launch", "answer", "arrive")), SECONDS), max_size=60)


@given(STEPS)
def test_the_gpu_computes_one_step_at_a_time_after_its_launch(steps):
    time, spans = Timeline(NO_HOST_TIME), []
    for spent, prepare, launch, compute in steps:
        time.spend(spent)
        begun = time.now
        ready = time.launch(prepare, launch, compute)
        assert time.now == pytest.approx(begun + prepare + launch)  # no launch waits for the GPU
        first = begun + prepare  # when its first kernel can run
        assert ready >= time.now and ready >= first + compute - 1e-9
        spans.append((ready - compute, ready))
    for (_, ended), (started, _) in pairwise(spans):
        assert started >= ended - 1e-9
    assert time.gpu == spans[-1][1]
    assert time.gpu_busy == pytest.approx(sum(step[-1] for step in steps))
    assert time.gpu_busy <= time.gpu + 1e-9


@given(STEPS)
def test_the_gpu_idles_no_longer_than_the_host_makes_it(steps):
    """A step starts when it can: as soon as its first kernel is launched and the step before is computed."""
    time = Timeline(NO_HOST_TIME)
    for spent, prepare, launch, compute in steps:
        time.spend(spent)
        can = max(time.now + prepare, time.gpu)
        ready = time.launch(prepare, launch, compute)
        assert ready == pytest.approx(max(can + compute, time.now))


@given(st.lists(SECONDS, min_size=1, max_size=40))
def test_without_a_host_steps_take_what_they_are_computed_in(computes):
    time = Timeline(NO_HOST_TIME)
    for compute in computes:
        time.launch(0.0, 0.0, compute)
    assert time.now == 0.0 and time.gpu == time.gpu_busy == sum(computes)
    time.wait(time.gpu)
    assert time.now == sum(computes)


@given(FRONT, ACTS)
def test_no_clock_goes_backwards(host, acts):
    time, due, seen = Timeline(host), 0.0, {"door": 0.0, "client": 0.0}
    for act, amount in acts:
        now, gpu = time.now, time.gpu
        if act == "spend":
            time.spend(amount)
        elif act == "wait":
            time.wait(time.now + amount - 0.25)
        elif act == "launch":
            time.launch(amount, amount, amount)
        elif act == "answer":
            has = time.answer()
            assert has >= time.now + host.front_piece + host.hop_out - 1e-9 and has >= seen["client"]
            seen["client"] = has
        else:
            due += amount
            there = time.arrive(due, 100)
            assert there >= due + host.front_request + 100 * host.front_token + host.hop_in - 1e-9
            assert there >= seen["door"]
            seen["door"] = there
        assert time.now >= now and time.gpu >= gpu
        if act in ("answer", "arrive"):
            assert time.now == now  # the front end is a thread of its own


def test_the_front_end_does_one_thing_at_a_time():
    time = Timeline(HostTime(front_request=0.01, front_token=1e-5, front_piece=0.002, hop_in=0.1, hop_out=0.2))
    assert time.arrive(1.0, 1000) == pytest.approx(1.0 + 0.02 + 0.1)
    assert time.arrive(1.0, 0) == pytest.approx(1.0 + 0.02 + 0.01 + 0.1)  # behind the first; on their ways together
    time.wait(1.0)
    assert time.answer() == pytest.approx(1.03 + 0.002 + 0.2)  # behind both
    assert time.answer() == pytest.approx(1.03 + 0.004 + 0.2)
    time.wait(9.0)
    assert time.answer() == pytest.approx(9.0 + 0.002 + 0.2)  # it was idle


def test_a_launch_that_outlasts_its_step_ends_it():
    time = Timeline(NO_HOST_TIME)
    assert time.launch(0.1, 0.5, 0.2) == time.now == pytest.approx(0.6)
    # Behind a long step the launch is hidden.
    time.launch(0.0, 0.0, 2.0)
    assert time.launch(0.1, 0.5, 0.2) == pytest.approx(2.8) and time.now == pytest.approx(1.2)


def test_waiting_for_what_has_been_takes_no_time():
    time = Timeline(NO_HOST_TIME)
    time.spend(2.0)
    time.wait(1.0)
    assert time.now == 2.0
    time.wait(3.0)
    assert time.now == 3.0


def test_it_begins_again():
    time = Timeline(HostTime(front_piece=1.0))
    time.launch(1.0, 1.0, 5.0)
    time.answer()
    time.restart()
    assert (time.now, time.gpu, time.gpu_busy) == (0.0, 0.0, 0.0)
    assert time.answer() == 1.0
