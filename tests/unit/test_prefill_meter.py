"""The prefill meter: time of a token in a large step, of a small step beyond its tokens, and of context."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.scheduling.meters.prefill import LEAST_TOKENS, Gap, PrefillMeter

DECODE = 0.5  # seconds of a decode step that follows another


def metered(*steps, chunk_tokens=None, decode=DECODE):
    """Steps as (time, prompt tokens) or (time, prompt tokens, pairs); None is an idle spell."""
    meter = PrefillMeter(chunk_tokens)
    for step in steps:
        if step is None:
            meter.idle()
        else:
            now, tokens, *pairs = step
            meter.step(now, tokens, *(pairs or [0.0]), decode)
    return meter


def measured(*steps, **more):
    return metered(*steps, **more).seconds_per_token


def fixed(*steps, **more):
    return metered(*steps, **more).fixed_seconds


# Where nobody decodes ---------------------------------------------------------------------------------------------


def test_a_step_takes_the_time_since_the_result_before():
    assert measured((10.0, 2000), (12.0, 4000)) == pytest.approx(5e-4)
    assert measured((10.0, 2000), (12.0, 4000), (14.0, 2000)) == pytest.approx(5e-4 + 5e-4 / 64)


def test_nothing_is_measured_before_two_results():
    assert measured() is None
    assert measured((5.0, 8000)) is None


def test_decode_and_small_prefill_are_not_measured():
    small = LEAST_TOKENS - 1
    assert measured((0.0, small), (1.0, small), (2.0, small)) is None
    assert measured((0.0, 0), (1.0, 0), (2.0, small), (3.0, 0)) is None
    assert measured((5.0, small), (7.0, LEAST_TOKENS)) == pytest.approx(2.0 / LEAST_TOKENS)


@pytest.mark.parametrize(
    ("chunk_tokens", "least"),
    [(8192, LEAST_TOKENS), (2048, 1024), (512, 256), (128, 64), (1, 1), (0, 1024), (-1, 1024), (None, 1024)],
)
def test_where_chunks_are_small_half_a_chunk_is_measured(chunk_tokens, least):
    """A whole one may never come: decode tokens of mixed chunks count, too."""
    assert measured((0.0, 2000), (5.0, least - 1), chunk_tokens=chunk_tokens) is None
    assert measured((0.0, 2000), (2.0, least), chunk_tokens=chunk_tokens) == pytest.approx(2.0 / least)


def test_idle_time_is_nobodys():
    assert measured((0.0, 2000), None, (500.0, 2000)) is None
    assert measured(None, (0.0, 2000), (2.0, 2000), None, (500.0, 2000)) == pytest.approx(1e-3)


@pytest.mark.parametrize("before", [(), ((0.0, 0), (2.0, 0), None)])
def test_after_idling_a_step_takes_the_time_since_its_launch(before):
    meter = metered(*before)
    meter.begin(500.0)
    meter.step(504.0, 2000)
    assert meter.seconds_per_token == pytest.approx(2e-3)
    meter.step(504.5, 100)
    assert meter.fixed_seconds == pytest.approx(0.3)


def test_a_launch_while_something_runs_changes_nothing():
    meter = metered((10.0, 2000))
    meter.begin(11.0)
    meter.step(12.0, 2000)
    assert meter.seconds_per_token == pytest.approx(1e-3)


def test_a_clock_that_stands_still_or_steps_back_measures_nothing():
    assert measured((5.0, 2000), (5.0, 2000), (4.0, 2000)) is None
    assert measured((5.0, 2000), (4.0, 2000), (6.0, 2000)) == pytest.approx(1e-3)


def test_the_mean_follows_the_machine():
    steps = [(float(t), 2000) for t in range(100)]
    assert measured(*steps) == pytest.approx(5e-4)
    assert measured(*steps, (103.0, 2000)) == pytest.approx(5e-4, rel=0.2)  # one slow step says little
    slower = [(100.0 + 3 * t, 2000) for t in range(500)]
    assert measured(*steps, *slower) == pytest.approx(1.5e-3, rel=0.01)


# Between decode steps ---------------------------------------------------------------------------------------------


def test_prefill_after_a_decode_step_takes_the_time_to_the_next_one_but_for_that():
    assert measured((10.0, 0), (12.0, 2000)) is None  # nothing is known before the decode step that follows
    assert measured((10.0, 0), (12.0, 2000), (12.5, 0)) == pytest.approx(1e-3)
    assert measured((10.0, 0), (11.0, 2000), (13.0, 3000), (15.5, 0)) == pytest.approx(1e-3)  # both as one


def test_the_decode_step_that_ends_it_tells_what_lay_between():
    meter = metered((10.0, 0), (11.0, 2000, 3e5), (13.0, 3000, 5e5))
    assert meter.step(15.5, 0, 0.0, DECODE) == Gap(5.5, 2, 5000, 8e5)
    assert meter.step(16.0, 0, 0.0, DECODE) is None  # nothing did


def test_only_decode_steps_end_a_gap():
    meter = PrefillMeter()
    assert meter.step(0.0, 2000) is None and meter.step(1.0, 2000) is None
    assert meter.step(2.0, 0) is None and meter.step(3.0, 2000) is None


def test_what_a_decode_step_takes_must_be_known_unless_the_steps_are_large():
    small = ((0.0, 2000), (2.0, 2000), (2.5, 0), (3.0, 100), (3.5, 0))
    assert fixed(*small, decode=None) is None
    assert fixed(*small, decode=0.4) == pytest.approx(0.6 - 0.1)
    assert measured((0.0, 0), (2.0, 2000), (2.5, 0), decode=None) == pytest.approx(2.5 / 2000)
    two = ((0.0, 0), (2.0, 2000), (2.1, 10), (2.5, 0))  # a small one among them
    assert measured(*two, decode=None) is None


def test_a_gap_no_longer_than_a_decode_step_measures_nothing():
    assert measured((0.0, 0), (0.1, 2000), (DECODE, 0)) is None
    assert measured((0.0, 0), (0.1, 2000), (0.0, 0)) is None
    meter = metered((1.0, 0), (0.5, 2000))
    assert meter.step(0.7, 0, 0.0, 0.1) is None  # the clock was set back


def test_after_idling_no_gap_is_open():
    meter = metered((0.0, 0), (1.0, 2000), None)
    assert meter.step(500.0, 0, 0.0, DECODE) is None and meter.seconds_per_token is None
    meter.step(502.0, 2000)
    assert meter.step(502.5, 0, 0.0, DECODE) == Gap(2.5, 1, 2000, 0.0)


# A machine, and what is measured of it ----------------------------------------------------------------------------

runs = st.lists(
    st.tuples(st.booleans(), st.integers(1, 3 * LEAST_TOKENS), st.integers(0, 50_000)), min_size=1, max_size=60
)
prices = st.tuples(st.floats(1e-5, 1e-3), st.sampled_from([0.0, 1e-9, 1e-8]), st.floats(1e-3, 0.2))


def results(steps, bare, pair, decode):
    """Of steps as (is it a decode step, tokens, context): (time, tokens, pairs), one decode step first."""
    now, made = 0.0, [(0.0, 0, 0.0)]
    for decodes, tokens, context in steps:
        pairs = 0.0 if decodes else tokens * (context + tokens / 2)
        now += decode if decodes else bare * tokens + pair * pairs
        made.append((now, 0 if decodes else tokens, pairs))
    return made


@given(runs, prices)
def test_true_prices_are_measured(steps, true):
    """Whatever order decode and prefill come in, once two contexts differ enough."""
    bare, pair, decode = true
    known = [(True, 1, 0), (False, 2000, 0), (True, 1, 0), (False, 2000, 50_000), (True, 1, 0)]
    meter = metered(*results([*known, *steps, (True, 1, 0)], bare, pair, decode), decode=decode)
    assert meter.bare_seconds == pytest.approx(bare, rel=1e-3)
    assert meter.pair_seconds == pytest.approx(pair, rel=1e-3, abs=bare * 1e-7)


@given(runs, prices)
def test_the_mean_lies_among_the_large_gaps(steps, true):
    made = results([*steps, (True, 1, 0)], *true)
    large, since, tokens, count = [], 0.0, 0, 0
    for now, new, _ in made[1:]:
        if new:
            tokens, count = tokens + new, count + 1
            continue
        if count and tokens >= LEAST_TOKENS * count:
            large.append((now - since - true[-1]) / tokens)
        since, tokens, count = now, 0, 0
    found = measured(*made, decode=true[-1])
    assert (found is None) == (not large)
    assert not large or min(large) * 0.999 <= found <= max(large) * 1.001


@given(runs, prices, st.data())
def test_results_that_are_seen_late_measure_the_same(steps, true, data):
    """An engine that overlaps looks for a result after it has launched the step that follows.

    All decode results are late by the same, and those of prefill by whatever it is, up to the next result.
    """
    made, late = results([*steps, (True, 1, 0)], *true), data.draw(st.floats(0, 0.5))
    meter, prompt, gaps = PrefillMeter(), PrefillMeter(), []
    for place, (now, tokens, pairs) in enumerate(made):
        seen = now + late if not tokens else min(now + data.draw(st.floats(0, 0.5)), made[place + 1][0] + late)
        gaps.append((meter.step(seen, tokens, pairs, true[-1]), prompt.step(now, tokens, pairs, true[-1])))
    for found, expected in gaps:
        assert (found is None) == (expected is None)
        if found is not None:
            assert found[1:] == expected[1:] and found.seconds == pytest.approx(expected.seconds)
    for name in ("seconds_per_token", "fixed_seconds", "bare_seconds", "pair_seconds"):
        found, expected = getattr(meter, name), getattr(prompt, name)
        assert found == (None if expected is None else pytest.approx(expected, rel=1e-3, abs=1e-7)), name


@given(st.lists(st.floats(0, 1), min_size=2, max_size=40), st.floats(1e-5, 1e-3))
def test_however_late_each_decode_result_is_seen_the_sum_of_the_gaps_is_the_time_that_passed(late, bare):
    meter, now, first, gaps = PrefillMeter(), 0.0, None, []
    for lateness in late:
        first = now + lateness if first is None else first
        gap = meter.step(now + lateness, 0, 0.0, 0.01)
        gaps += [] if gap is None else [gap.seconds]
        last = now + lateness
        now += bare * 2000 + 1.0
        meter.step(now, 2000, 0.0)
    assert sum(gaps) == pytest.approx(last - first, abs=1e-9)


# What a step takes however few its tokens -------------------------------------------------------------------------

LARGE = (0.0, 2000), (2.0, 2000)  # a millisecond a token


def test_a_small_step_takes_a_fixed_time_and_that_of_its_tokens():
    assert fixed(*LARGE, (2.3, 200)) == pytest.approx(0.1)
    assert fixed(*LARGE, (2.5, 1)) == pytest.approx(0.499)
    meter = metered(*LARGE, (2.3, 200))
    assert meter.seconds_per_token == pytest.approx(1e-3)  # a small step says nothing about it


def test_small_steps_between_decode_steps_share_what_they_took():
    gap = (3.0, 0), (3.3, 100), (3.7, 100), (4.2, 0)
    assert fixed(*LARGE, *gap) == pytest.approx((1.2 - DECODE - 0.2) / 2)


def test_before_a_large_step_all_of_a_small_one_is_its_fixed_time():
    """What its tokens take is not known."""
    assert fixed((0.0, 100), (0.25, 100)) == pytest.approx(0.25)


def test_the_fixed_time_is_unknown_before_a_small_step():
    assert fixed() is None
    assert fixed(*LARGE) is None
    assert fixed(*LARGE, (2.5, 0), (4.5, 2000), (5.0, 0)) is None  # decode, and a large one
    assert fixed((0.0, 100)) is None  # since when, nobody knows
    assert fixed(*LARGE, None, (9.0, 100)) is None  # since when, nobody knows
    assert fixed(*LARGE, (2.0, 100), (1.0, 100)) is None  # a clock that stands still, or steps back


def test_where_chunks_are_small_only_less_than_half_of_one_is_a_small_step():
    steps = (0.0, 1), (0.2, 200), (0.5, 100)
    assert fixed(*steps) == pytest.approx(0.2 + 0.1 / 64)  # both are small
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


@given(st.lists(st.tuples(st.floats(0.001, 2.0), st.integers(1, 3 * LEAST_TOKENS)), max_size=40))
def test_the_mean_fixed_time_lies_among_the_small_steps(steps):
    now, made, small = 0.0, [(0.0, 1)], []
    for duration, tokens in steps:
        made.append((now := now + duration, tokens))
        small += [duration] if tokens < LEAST_TOKENS else []
    found = fixed(*made)
    assert (found is None) == (not small)
    assert not small or 0 <= found <= max(small) * 1.001
