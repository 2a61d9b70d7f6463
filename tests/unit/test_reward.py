"""Decode throughput: only time between two decode steps counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.scheduling.meters.decode import DecodeMeter


def feed(meter, *steps):
    """Steps as (time, tokens): no tokens means a prefill step."""
    for now, tokens in steps:
        meter.step(now, tokens or 0, tokens is not None)


def test_decode_steps_after_a_decode_step_count():
    meter = DecodeMeter()
    feed(meter, (10.0, 8), (10.5, 8), (11.0, 6))
    assert meter.take() == pytest.approx((8 + 6) / 1.0)


def test_nothing_measured_is_none():
    meter = DecodeMeter()
    assert meter.take() is None
    feed(meter, (1.0, 8))
    assert meter.take() is None


def test_take_starts_a_new_measurement_that_continues_the_last_step():
    meter = DecodeMeter()
    feed(meter, (0.0, 4), (1.0, 4))
    assert meter.take() == 4.0
    assert meter.take() is None
    feed(meter, (1.5, 4))
    assert meter.take() == 8.0


def test_prefill_time_does_not_enter():
    """A prefill of three seconds between decode steps of a second each."""
    meter = DecodeMeter()
    feed(meter, (0.0, 5), (1.0, 5), (4.0, None), (5.0, 7), (6.0, 7))
    assert meter.take() == pytest.approx((5 + 7) / 2.0)


def test_alternating_prefill_and_decode_measures_nothing():
    meter = DecodeMeter()
    feed(meter, *[(float(t), 5 if t % 2 else None) for t in range(20)])
    assert meter.take() is None


@given(st.lists(st.tuples(st.floats(0.001, 2.0), st.integers(0, 300), st.booleans()), min_size=2, max_size=40))
def test_results_one_step_late_measure_the_same(steps):
    """A result is seen some constant time after its step ended: the time between two results stays the step's."""
    direct, late = DecodeMeter(), DecodeMeter()
    now = 0.0
    for duration, tokens, is_decode in steps:
        now += duration
        direct.step(now, tokens, is_decode)
        late.step(now + 0.75, tokens, is_decode)
    one, other = direct.take(), late.take()
    assert (one is None and other is None) or one == pytest.approx(other)


@given(st.lists(st.tuples(st.floats(0.001, 2.0), st.integers(0, 300), st.booleans()), max_size=40))
def test_the_rate_is_tokens_over_pure_decode_time(steps):
    meter, now, seconds, tokens, previous = DecodeMeter(), 0.0, 0.0, 0, False
    for duration, count, is_decode in steps:
        now += duration
        meter.step(now, count, is_decode)
        if is_decode and previous:
            seconds, tokens = seconds + duration, tokens + count
        previous = is_decode
    assert meter.take() == (pytest.approx(tokens / seconds) if seconds else None)


def test_restart_ignores_the_step_in_flight():
    """With overlap, the step launched before the batch changed arrives after it: it is not the new batch's."""
    meter = DecodeMeter()
    feed(meter, (0.0, 100), (1.0, 100))
    meter.restart(in_flight=1)
    feed(meter, (2.0, 100))  # launched before
    assert meter.take() is None
    feed(meter, (3.0, 10), (4.0, 10))
    assert meter.take() == 10.0


def test_restart_forgets_idle_time():
    meter = DecodeMeter()
    feed(meter, (0.0, 4), (1.0, 4))
    meter.restart()
    feed(meter, (100.0, 4), (101.0, 4))
    assert meter.take() == 4.0


def test_a_clock_that_steps_back_measures_nothing():
    meter = DecodeMeter()
    feed(meter, (5.0, 4), (4.0, 4), (5.0, 4))
    assert meter.take() == 4.0


def test_tokens_in_no_time_wait_for_time():
    meter = DecodeMeter()
    feed(meter, (1.0, 4), (1.0, 4))
    assert meter.take() is None
    feed(meter, (2.0, 4))
    assert meter.take() == 8.0
