"""What prefill takes, found again from steps that were timed."""

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
        fit.step(seconds, tokens, pairs, cached)
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


def test_steps_that_are_all_alike_say_what_they_take_and_no_more():
    true = PrefillPrices(0.018, 2.5e-5, 0.0)
    found = fitted([[(256, 0)]] * 9, true)
    assert found.fixed == found.pair == found.prefix == 0
    assert found.seconds(256, 0) == pytest.approx(true.fixed + true.seconds(256, 0))


def test_the_fit_follows_the_machine():
    before, after = PrefillPrices(0.018, 2.5e-5, 1e-9, 1e-7), PrefillPrices(0.002, 5e-5, 4e-9, 0.0)
    fit = PrefillFit()
    for prices in (before, after):
        for _ in range(100):
            for prompts in VARIED:
                new, old = (sum(column) for column in zip(*prompts, strict=True))
                pairs = sum(n * (o + n / 2) for n, o in prompts)
                fit.step(prices.fixed + prices.token * new + prices.pair * pairs + prices.prefix * old, new, pairs, old)
    assert fit.prices.token == pytest.approx(5e-5, rel=0.02) and fit.prices.fixed == pytest.approx(0.002, rel=0.05)


def test_what_was_seen_is_trusted_twice_over_and_fades():
    fit = PrefillFit()
    fit.step(0.2, 8192, 0.0, 0)
    assert fit.prices.trusted == 2 * 8192
    for _ in range(400):
        fit.step(0.02, 256, 0.0, 0)
    assert fit.prices.trusted == 2 * 256


@given(
    st.lists(
        st.tuples(st.floats(1e-4, 9.0), st.integers(1, 9000), st.floats(0, 9000), st.integers(0, 9000)),
        min_size=1,
        max_size=30,
    )
)
def test_nothing_takes_less_than_no_time_and_a_token_some(steps):
    fit = PrefillFit()
    for seconds, tokens, context, cached in steps:
        fit.step(seconds, tokens, context * tokens, cached)
        found = fit.prices
        assert found.token > 0 and min(found) >= 0 and np.isfinite(found).all()
