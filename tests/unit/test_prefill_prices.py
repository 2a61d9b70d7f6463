"""What prefill takes, found again from steps that were timed."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feather_sglang.scheduling.meters.prefill_prices import PrefillFit, PrefillPrices

# New tokens, and what is cached, of each prompt of a step.
VARIED = [[(8192, 0)], [(256, 4096)], [(20, 10_000)] * 13, [(512, 0), (300, 2000)], [(1024, 30_000)], [(64, 0)]]


def fitted(steps, prices):
    fit = PrefillFit()
    for prompts in steps:
        tokens, cached = (sum(column) for column in zip(*prompts, strict=True))
        pairs = sum(new * (old + new / 2) for new, old in prompts)
        seconds = prices.fixed + prices.token * tokens + prices.pair * pairs + prices.prefix * cached
        fit.add(tokens, pairs, cached)
        fit.took(seconds)
    return fit.prices


@settings(max_examples=60)
@given(
    st.sampled_from([0.0, 0.002, 0.02]),
    st.floats(1e-5, 1e-4),
    st.sampled_from([0.0, 1e-9, 1e-8]),
    st.sampled_from([0.0, 1e-7, 1e-6]),
)
def test_prices_are_found_again(fixed, token, pair, prefix):
    true = PrefillPrices(fixed, token, pair, prefix)
    found = fitted(VARIED * 8, true)
    for prompts in VARIED:
        for new, old in prompts[:1]:
            assert found.fixed + found.seconds(new, old) == pytest.approx(true.fixed + true.seconds(new, old), rel=0.02)


def test_before_the_first_step_nothing_is_known():
    assert PrefillFit().prices is None


def test_of_steps_that_are_all_alike_a_larger_one_is_said_to_take_the_most_that_it_may():
    true = PrefillPrices(0.018, 2.5e-5, 0.0)
    found = fitted([[(256, 0)]] * 9, true)
    assert found.fixed == pytest.approx(0, abs=1e-9) and found.pair == found.prefix == 0 and found.trusted == 512
    assert found.seconds(256, 0) == pytest.approx(true.fixed + true.seconds(256, 0))


@pytest.mark.parametrize("true", [PrefillPrices(0.018, 0.0, 0.0), PrefillPrices(0.0, 2.5e-5, 0.0)])
def test_of_steps_that_differ_no_more_is_assumed_than_they_tell(true):
    found = fitted(VARIED * 3, true)
    assert found[:4] == pytest.approx(true[:4], rel=1e-3, abs=1e-9)


def test_where_a_launch_fills_short_steps_a_long_one_is_said_to_take_no_less_than_the_fastest_did():
    """Hundreds of short steps take what a launch takes, and the fit finds that their tokens cost nothing."""
    draw, fit, launch, token = random.Random(0), PrefillFit(), 0.028, 2.6e-5
    for tokens in (8192, 8192, 1024, 1024):
        fit.add(tokens, 0.0, 0)
        fit.took(max(launch, token * tokens))
    seemed = 0
    for _ in range(1000):
        tokens = draw.choice((64, 256, 300))
        fit.add(tokens, 0.0, 0)
        fit.took(launch * draw.lognormvariate(0, 0.15))
        found = fit.prices
        seemed = max(seemed, found.tokens(0.04 - found.fixed, 0))
        assert found.most(0.04) <= 1.3 * 0.04 / token and found.step(0.0, 8192) >= 0.7 * 8192 * token
    assert seemed > 8192  # what the prices alone would have let run


def test_a_step_that_was_seen_too_early_does_not_set_the_pace():
    fit = PrefillFit()
    for tokens, seconds in [(1500, 0.045)] * 20 + [(1500, 1e-5), (8192, 1e-5), (8192, 0.246)]:
        fit.add(tokens, 0.0, 0)
        fit.took(seconds)
        assert fit.prices.pace in (0.0, pytest.approx(3e-5, rel=0.01))


def test_short_steps_tell_no_pace_as_they_may_take_what_a_launch_takes():
    """Else where only they were seen, nobody would find out that longer ones take no more time."""
    fit = PrefillFit()
    for _ in range(40):
        fit.add(256, 0.0, 0)
        fit.took(0.03)
    assert fit.prices.pace == 0 and fit.prices.most(0.03) == fit.prices.trusted == 512


def test_where_no_token_takes_time_all_fit():
    free = PrefillPrices(0.01, 0.0, 0.0)
    assert free.tokens(0.001, 0) > 8192 and free.tokens(-0.001, 0) == 0


def test_steps_that_were_timed_together_count_as_so_many():
    true, fit = PrefillPrices(0.018, 2.5e-5, 0.0), PrefillFit()
    for number in range(40):
        steps = [512] * (1 + number % 3) + [100 * (number % 7)] * (number % 2)
        for tokens in steps:
            fit.add(tokens, 0.0, 0)
        fit.took(sum(true.fixed + true.token * tokens for tokens in steps))
    assert fit.prices.fixed == pytest.approx(0.018, rel=0.01) and fit.prices.token == pytest.approx(2.5e-5, rel=0.02)


def test_what_all_steps_take_longer_of_late_is_in_the_next_ones_price():
    """Other steps' part in the time between two decode steps changes faster than the prices."""
    fit = PrefillFit()
    for number in range(130):
        for tokens in (512, 1024):
            fit.add(tokens, 0.0, 0)
            fit.took((0.005 if number < 100 else 0.015) + 2.5e-5 * tokens)
    assert fit.prices.fixed + fit.prices.seconds(512, 0) == pytest.approx(0.015 + 2.5e-5 * 512, rel=0.03)


@pytest.mark.parametrize("before", [1, 60])
@pytest.mark.parametrize("seen_late", [1e-6, 1e-3])
def test_one_step_that_was_seen_to_take_hardly_any_time_does_not_make_prefill_cheap(before, seen_late):
    """An engine that is held up after one step finds the next one's result there already."""
    fit = PrefillFit()
    for number in range(before + 20):
        tokens = 256 + 97 * (number % 16)
        fit.add(tokens, tokens * tokens / 2, 0)
        fit.took(seen_late if number == before else 0.005 + 2.5e-5 * tokens)
    assert 0.9 * 0.0306 <= fit.prices.fixed + fit.prices.seconds(1024, 0) <= 2 * 0.0306


def test_time_without_a_step_says_nothing():
    fit = PrefillFit()
    fit.took(3.0)
    fit.add(256, 0.0, 0)
    fit.drop()
    fit.took(3.0)
    fit.add(256, 0.0, 0)
    fit.took(0.0)
    fit.took(3.0)
    assert fit.prices is None


def test_the_fit_follows_the_machine():
    before, after = PrefillPrices(0.018, 2.5e-5, 1e-9, 1e-7), PrefillPrices(0.002, 5e-5, 4e-9, 0.0)
    fit = PrefillFit()
    for prices in (before, after):
        for _ in range(300):
            for prompts in VARIED:
                new, old = (sum(column) for column in zip(*prompts, strict=True))
                pairs = sum(n * (o + n / 2) for n, o in prompts)
                fit.add(new, pairs, old)
                fit.took(prices.fixed + prices.token * new + prices.pair * pairs + prices.prefix * old)
    assert fit.prices.token == pytest.approx(5e-5, rel=0.02) and 0.002 <= fit.prices.fixed <= 0.0026


def test_what_was_seen_is_trusted_twice_over_and_fades():
    fit = PrefillFit()
    fit.add(8192, 0.0, 0)
    fit.took(0.2)
    assert fit.prices.trusted == 2 * 8192
    for _ in range(1200):
        fit.add(256, 0.0, 0)
        fit.took(0.02)
    assert fit.prices.trusted == 2 * 256


@given(
    st.lists(
        st.tuples(st.floats(1e-4, 9.0), st.integers(1, 9000), st.floats(0, 9000), st.integers(0, 9000)),
        min_size=1,
        max_size=30,
    )
)
def test_nothing_takes_less_than_no_time_and_a_step_some(steps):
    fit = PrefillFit()
    for seconds, tokens, context, cached in steps:
        fit.add(tokens, context * tokens, cached)
        fit.took(seconds)
        found = fit.prices
        assert found.trusted > 0 and min(found) >= 0 and max(found[:-1]) > 0 and np.isfinite(found).all()
