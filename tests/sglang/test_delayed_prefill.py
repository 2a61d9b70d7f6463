"""Delayed prefill inside the installed SGLang: delayed rounds, and the requests that are never delayed."""

from dataclasses import replace

import pytest
from harness import OverlapServer, Server

from effort import newest_is_enough
from feather_sglang.adapter.scheduler import guard
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policies import make_policy

DECODE, FIXED, TOKEN = 0.01, 0.05, 1e-4  # seconds of a decode step; of a prefill step, and of each token in it


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Checked after every step, on a clock; it has timed prefill."""
    monkeypatch.setenv("FEATHER_DEBUG_CHECK", "1")
    made = []

    def make(pace=1.0, policy="feather-bandit", kind=Server, timed=True, **overrides):
        monkeypatch.setenv("FEATHER_OPTIONS", f'{{"pace": {pace}}}')
        one = kind(tmp_path, policy, **overrides)
        made.append(one)
        run_on_clock(one)
        if timed:
            one.feather.meters.prefill.seconds_per_token, one.feather.meters.prefill.fixed_seconds = TOKEN, FIXED
        return one

    yield make
    for one in made:
        one.close()


def run_on_clock(one):
    one.now, one.prefills = 0.0, 0
    one.feather.clock = lambda: one.now
    forward = one.scheduler.run_batch

    def run_batch(batch, *args, **kwargs):
        decodes = batch.forward_mode.is_decode()
        one.prefills += not decodes
        one.now += DECODE if decodes else FIXED + TOKEN * sum(batch.extend_lens)
        return forward(batch, *args, **kwargs)

    one.scheduler.run_batch = run_batch


def submit(one, *names, outputs=200):
    for name in names:
        assert one.submit(name, [7] * 130 + [20 + int(name[1:])] * 4, max_new_tokens=outputs)


def run(one, *names, **more):
    """Submit and step until all of them decode."""
    submit(one, *names, **more)
    while not all(one.requests[name].output_ids for name in names):
        one.step()


def waiting(one):
    return {req.rid for req in one.scheduler.waiting_queue}


def modes(one, steps):
    return ["decode" if one.step().forward_mode.is_decode() else "prefill" for _ in range(steps)]


def test_a_held_round_decodes_on_and_leaves_the_batch_open(server):
    one = server()
    run(one, "r0", "r1", "r2", "r3")
    assert one.prefills == 1
    submit(one, "a0")
    while (one.now + FIXED) ** 2 / one.now / 2 < 4 * FIXED:  # the four were admitted at 0
        held = one.feather.admission.delayed_rounds
        assert modes(one, 1) == ["decode"] and waiting(one) == {"a0"}
        assert one.feather.admission.delayed_rounds == held + 1 and not one.scheduler.running_batch.batch_is_full
    assert one.feather.admission.delayed_rounds > 4
    assert modes(one, 1) == ["prefill"] and not waiting(one)
    one.drain()
    one.assert_nothing_left()
    assert all(len(tokens) == 200 for tokens in one.outputs().values())


def serve_singles(one):
    """One beside eight every third step."""
    run(one, *(f"r{i}" for i in range(8)), outputs=120)
    before = one.prefills
    for i in range(30):
        submit(one, f"a{i}", outputs=5 + i % 7)
        for _ in range(3):
            one.step()
    one.drain()
    one.assert_nothing_left()
    assert [len(one.requests[f"a{i}"].output_ids) for i in range(30)] == [5 + i % 7 for i in range(30)]
    assert all(len(one.requests[f"r{i}"].output_ids) == 120 for i in range(8))
    return one.prefills - before


@pytest.mark.parametrize("kind", [Server, OverlapServer])
def test_those_who_arrive_singly_share_prefill_steps_and_all_finish(server, kind):
    paced, plain = serve_singles(server(kind=kind)), serve_singles(server(0, kind=kind))
    assert 3 <= paced < 0.6 * plain


@newest_is_enough
@pytest.mark.parametrize("kind", [Server, OverlapServer])
def test_one_long_prompt_on_an_idle_server_is_enough_to_know_what_prefill_takes(server, kind):
    one = server(kind=kind, timed=False, chunked_prefill_size=256)
    assert one.feather.meters.prefill.seconds_per_token is None
    one.now = 100.0
    run(one, "r0")
    one.step()
    took = FIXED + 134 * TOKEN, FIXED + 134 * TOKEN + DECODE  # of the later, a result is seen a step late
    assert took[0] <= 134 * one.feather.meters.prefill.seconds_per_token * 1.0001 <= took[1] * 1.001
    modes(one, 3)  # what a decode step takes is known by then
    submit(one, "r1")
    one.drain()
    assert one.feather.meters.prefill.fixed_seconds > 0
    serve_singles(one)
    assert one.feather.admission.delayed_rounds > 10


@newest_is_enough
def test_unless_told_otherwise_those_who_wait_gather_where_they_can(server):
    """And where nothing can be held, that is no reason not to start."""
    assert server("null", paced=True).feather.admission.prefill_delay.bound == 0.1
    assert server('"auto"', paced=True, policy="feather-heuristic").feather.admission.prefill_delay.bound == 0.1
    assert server("null", paced=True, policy="feather-order").feather.admission.prefill_delay is None
    mixed = server("null", paced=True, enable_mixed_chunk=True, chunked_prefill_size=128)
    assert mixed.feather.admission.prefill_delay is None
    mixed.feather.meters.prefill.fixed_seconds = 100.0
    run(mixed, "r0", "r1", outputs=20)
    submit(mixed, "a0", outputs=2)
    mixed.drain()
    mixed.assert_nothing_left()
    assert mixed.feather.admission.delayed_rounds == 0


@newest_is_enough
def test_by_default_those_who_arrive_singly_share_prefill_steps(server):
    paced, plain = serve_singles(server("null", paced=True)), serve_singles(server(0))
    assert 3 <= paced < 0.8 * plain


@newest_is_enough
def test_off_is_off(server):
    one = server(0)
    assert one.feather.admission.prefill_delay is None
    serve_singles(one)
    assert one.feather.admission.delayed_rounds == 0


@newest_is_enough
def test_nothing_is_held_until_a_small_prefill_was_timed(server):
    one = server(timed=False)
    assert one.submit("large", [9] * 1500, max_new_tokens=100) and one.submit("other", [8] * 1500, max_new_tokens=100)
    modes(one, 4)
    submit(one, "a0")
    assert modes(one, 2) == ["prefill", "decode"] and one.feather.admission.delayed_rounds == 0
    meter = one.feather.meters.prefill
    assert meter.fixed_seconds == pytest.approx(FIXED, rel=0.1)
    submit(one, "a1")
    assert modes(one, 1) == ["decode"] and one.feather.admission.delayed_rounds == 1
    one.drain()
    one.assert_nothing_left()


def test_a_prompt_in_chunks_is_not_held_up(server):
    one = server(pace=100.0, chunked_prefill_size=128)
    one.feather.meters.prefill.fixed_seconds = 100.0
    run(one, "r0", "r1", "r2", "r3", outputs=60)
    assert one.submit("long", [9] * 1000, max_new_tokens=2)
    one.now += 100.0
    one.step()
    assert one.scheduler.chunked_req.rid == "long" and one.feather.admission.delayed_rounds == 0
    submit(one, "a0", outputs=2)
    found = []
    while one.scheduler.chunked_req is not None:
        found += modes(one, 1)
        assert one.feather.admission.delayed_rounds == 0
    assert found == ["prefill"] * 7 and not waiting(one)  # the last chunk left room for it
    submit(one, "a1", outputs=2)
    assert modes(one, 2) == ["decode"] * 2 and waiting(one) == {"a1"} and one.feather.admission.delayed_rounds == 2
    one.drain()
    one.assert_nothing_left()


@newest_is_enough
def test_the_reward_after_held_rounds_is_over_all_of_them(server):
    one = server()
    policy = one.feather.admission.policy = make_policy("always-add")
    rewards, policy.observe = [], lambda reward: rewards.append(reward)
    run(one, "r0", "r1", "r2", "r3")
    submit(one, "a0")
    one.step()
    begin = one.now
    for extra in (0.0, 0.03, 0.02, 0.01):
        one.now += extra  # steps of different length
        one.step()
    assert one.feather.admission.delayed_rounds == 5 and not rewards
    seconds, one.feather.admission.prefill_delay.bound = one.now - begin, 0.0
    one.step()
    assert rewards == [pytest.approx(4 * 4 / seconds)]
    one.drain()


@newest_is_enough
@pytest.mark.parametrize(("first_rank", "holds"), [(FIXED, True), (None, False)])
def test_the_fixed_cost_is_the_first_ranks(server, monkeypatch, first_rank, holds):
    one = server()
    run(one, "r0", "r1", "r2", "r3")
    own = None if first_rank else FIXED
    one.feather.meters.prefill.fixed_seconds = own

    def readings(mine):
        assert (mine.now, mine.prefill_seconds, mine.fixed_seconds) == (one.now, TOKEN, own)
        return replace(mine, fixed_seconds=first_rank)

    monkeypatch.setattr(one.feather.meters.agreement, "readings", readings)
    submit(one, "a0")
    assert modes(one, 1) == ["decode" if holds else "prefill"] and one.feather.admission.round.delayed is holds
    one.drain()


def test_what_pacing_cannot_go_with_ends_start_up(server, monkeypatch):
    with pytest.raises(FeatherError, match=r"^--schedule-policy feather-order leaves admission to SGLang, .*drop it$"):
        server(policy="feather-order")
    with pytest.raises(FeatherError, match=r"^--feather-pace .*--enable-mixed-chunk"):
        server(enable_mixed_chunk=True, chunked_prefill_size=128)
    assert server(0, enable_mixed_chunk=True, chunked_prefill_size=128).feather.admission.prefill_delay is None
    assert server(0, policy="feather-order").feather.admission.prefill_delay is None


def test_a_failure_while_a_round_is_held_is_served_as_fcfs(server, monkeypatch):
    one = server()
    run(one, "r0", "r1", "r2", "r3", outputs=20)
    counter = guard.failure_counter()
    before = counter._value.get()

    def fail(*args):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(one.feather.admission.prefill_delay, "delays", fail)
    monkeypatch.setenv("FEATHER_DEBUG_CHECK", "0")
    one.scheduler.__dict__.pop("get_next_batch_to_run", None)  # its check would say that feather failed
    submit(one, "a0", outputs=20)
    one.drain()
    assert one.feather.failed and counter._value.get() == before + 1
    assert all(len(tokens) == 20 for tokens in one.outputs().values())
