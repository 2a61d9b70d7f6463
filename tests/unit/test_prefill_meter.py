"""Time per token of prefill, of which only what a large step took counts, and what a small one takes beyond it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.scheduling.meters.prefill import LEAST_TOKENS, PrefillMeter


def metered(*steps, chunk_tokens=None):
    """Steps as (time, prompt tokens); None is an idle spell."""
    meter = PrefillMeter(chunk_tokens)
    for step in steps:
        meter.idle() if step is None else meter.step(*step)
    return meter


def measured(*steps, chunk_tokens=None):
    return metered(*steps, chunk_tokens=chunk_tokens).seconds_per_token


def fixed(*steps, chunk_tokens=None):
    return metered(*steps, chunk_tokens=chunk_tokens).fixed_seconds


def test_a_step_takes_the_time_since_the_result_before():
    assert measured((10.0, 0), (12.0, 2000)) == pytest.approx(1e-3)
    assert measured((10.0, 2000), (12.0, 4000)) == pytest.approx(5e-4)


def test_nothing_is_measured_before_two_results():
    assert measured() is None
    assert measured((5.0, 8000)) is None


def test_decode_and_small_prefill_are_not_measured():
    small = LEAST_TOKENS - 1
    assert measured((0.0, 0), (1.0, 0), (2.0, small), (3.0, 0)) is None
    assert measured((0.0, 0), (5.0, small), (7.0, LEAST_TOKENS)) == pytest.approx(2.0 / LEAST_TOKENS)


@pytest.mark.parametrize(
    ("chunk_tokens", "least"),
    [(8192, LEAST_TOKENS), (2048, 1024), (512, 256), (128, 64), (1, 1), (0, 1024), (-1, 1024), (None, 1024)],
)
def test_where_chunks_are_small_half_a_chunk_is_measured(chunk_tokens, least):
    """A whole one may never come: decode tokens of mixed chunks count, too."""
    assert measured((0.0, 0), (5.0, 0), chunk_tokens=chunk_tokens) is None
    assert measured((0.0, 0), (5.0, least - 1), chunk_tokens=chunk_tokens) is None
    assert measured((0.0, 0), (2.0, least), chunk_tokens=chunk_tokens) == pytest.approx(2.0 / least)


def test_idle_time_is_nobodys():
    assert measured((0.0, 2000), None, (500.0, 2000)) is None
    assert measured((0.0, 0), (2.0, 2000), None, (500.0, 2000)) == pytest.approx(1e-3)
    assert measured(None, (0.0, 0), (2.0, 2000)) == pytest.approx(1e-3)


@pytest.mark.parametrize("before", [(), ((0.0, 0), (2.0, 0), None)])
def test_after_idling_a_step_takes_the_time_since_its_launch(before):
    meter = metered(*before)
    meter.begin(500.0)
    meter.step(504.0, 2000)
    assert meter.seconds_per_token == pytest.approx(2e-3)
    meter.step(504.5, 100)
    assert meter.fixed_seconds == pytest.approx(0.3)


def test_a_launch_while_something_runs_changes_nothing():
    meter = metered((10.0, 0))
    meter.begin(11.0)
    meter.step(12.0, 2000)
    assert meter.seconds_per_token == pytest.approx(1e-3)


def test_a_clock_that_stands_still_or_steps_back_measures_nothing():
    assert measured((5.0, 0), (5.0, 2000), (4.0, 2000)) is None
    assert measured((5.0, 0), (4.0, 2000), (6.0, 2000)) == pytest.approx(1e-3)


def test_the_mean_follows_the_machine():
    steps = [(float(t), 2000) for t in range(100)]
    assert measured(*steps) == pytest.approx(5e-4)
    assert measured(*steps, (103.0, 2000)) == pytest.approx(5e-4, rel=0.2)  # one slow step says little
    slower = [(100.0 + 3 * t, 2000) for t in range(500)]
    assert measured(*steps, *slower) == pytest.approx(1.5e-3, rel=0.01)


steps = st.lists(st.tuples(st.floats(0.001, 2.0), st.integers(0, 3 * LEAST_TOKENS)), max_size=40)


@given(steps)
def test_the_mean_lies_among_the_large_steps(steps):
    now, made = 0.0, [(0.0, 0)]
    for duration, tokens in steps:
        made.append((now := now + duration, tokens))
    large = [duration / tokens for duration, tokens in steps if tokens >= LEAST_TOKENS]
    found = measured(*made)
    assert (found is None) == (not large)
    assert not large or min(large) * 0.999 <= found <= max(large) * 1.001


@given(steps)
def test_results_that_arrive_late_measure_the_same(steps):
    now, made = 0.0, []
    for duration, tokens in steps:
        made.append((now := now + duration, tokens))
    one, other = measured(*made), measured(*[(when + 0.75, tokens) for when, tokens in made])
    assert (one is None and other is None) or one == pytest.approx(other)


# What a step takes however few its tokens -------------------------------------------------------------------------

LARGE = (0.0, 0), (2.0, 2000)  # a millisecond a token


def test_a_small_step_takes_a_fixed_time_and_that_of_its_tokens():
    assert fixed(*LARGE, (2.3, 200)) == pytest.approx(0.1)
    assert fixed(*LARGE, (2.5, 1)) == pytest.approx(0.499)
    meter = metered(*LARGE, (2.3, 200))
    assert meter.seconds_per_token == pytest.approx(1e-3)  # a small step says nothing about it


def test_the_fixed_time_is_unknown_before_a_small_step_after_a_large_one():
    assert fixed() is None
    assert fixed(*LARGE) is None
    assert fixed(*LARGE, (2.5, 0), (4.5, 2000)) is None  # decode, and a large one
    assert fixed((0.0, 0), (1.0, 100), (2.0, 100)) is None  # what a token takes is not known
    assert fixed(*LARGE, None, (9.0, 100)) is None  # since when, nobody knows
    assert fixed(*LARGE, (2.0, 100), (1.0, 100)) is None  # a clock that stands still, or steps back


def test_where_chunks_are_small_only_less_than_half_of_one_is_a_small_step():
    steps = (0.0, 0), (0.2, 200), (0.5, 100)
    assert fixed(*steps) is None
    assert fixed(*steps, chunk_tokens=400) == pytest.approx(0.2)
    assert fixed(*steps, chunk_tokens=200) is None


def test_no_step_takes_less_than_its_tokens():
    assert fixed(*LARGE, (2.1, 200)) == 0
    assert fixed(*LARGE, (2.1, 200), (2.9, 160)) == pytest.approx(0.64 / 64)


def test_the_mean_fixed_time_follows_the_machine():
    steps = [*LARGE, *((2.0 + 0.5 * t, 100) for t in range(1, 100))]
    assert fixed(*steps) == pytest.approx(0.4)
    assert fixed(*steps, (steps[-1][0] + 5.1, 100)) == pytest.approx(0.4 + 4.6 / 64)
    slower = [(steps[-1][0] + t, 100) for t in range(1, 500)]
    assert fixed(*steps, *slower) == pytest.approx(0.9, rel=0.01)


@given(steps)
def test_the_mean_fixed_time_lies_among_the_small_steps(steps):
    now, made, small, known = 0.0, [(0.0, 0)], [], False
    for duration, tokens in steps:
        made.append((now := now + duration, tokens))
        known = known or tokens >= LEAST_TOKENS
        small += [duration] if known and 0 < tokens < LEAST_TOKENS else []
    found = fixed(*made)
    assert (found is None) == (not small)
    assert not small or 0 <= found <= max(small) * 1.001
