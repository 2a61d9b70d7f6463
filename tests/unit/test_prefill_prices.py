"""What prefill takes, found again from steps that were timed."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feather_sglang.scheduling.meters.prefill_prices import Load, PrefillFit, PrefillPrices, Prices

# New tokens, and what is cached, of each prompt of a step.
VARIED = [[(8192, 0)], [(256, 4096)], [(20, 10_000)] * 13, [(512, 0), (300, 2000)], [(1024, 30_000)], [(64, 0)]]


def load_of(prompts):
    load = Load()
    for prompt in prompts:
        load = load.plus(*prompt)
    return load


def note(fit, load, seconds, waited=None):
    """A step is timed; None: nobody knows how long the engine waited for its result."""
    fit.add(load if isinstance(load, Load) else Load(load))
    fit.waited(waited)
    fit.took(seconds)


def fitted(steps, prices):
    fit = PrefillFit()
    for prompts in steps:
        note(fit, load_of(prompts), prices.step(load_of(prompts)))
    return fit.prices


@settings(max_examples=60)
@given(
    st.sampled_from([0.0, 0.002, 0.02]),
    st.floats(1e-5, 1e-4),
    st.sampled_from([0.0, 1e-9, 1e-8]),
    st.sampled_from([0.0, 1e-7, 1e-6]),
)
def test_prices_are_found_again(fixed, token, pair, prefix):
    true = Prices(fixed, token, pair, prefix)
    found = fitted(VARIED * 8, true)
    for prompts in VARIED:
        one = load_of(prompts[:1])
        assert found.gpu.step(one) == pytest.approx(true.step(one), rel=0.02)


def test_before_the_first_step_nothing_is_known():
    assert PrefillFit().prices is None


def test_of_steps_that_are_all_alike_a_larger_one_is_said_to_take_the_most_that_it_may():
    true = Prices(0.018, 2.5e-5)
    found = fitted([[(256, 0)]] * 9, true)
    assert found.gpu.fixed == pytest.approx(0, abs=1e-9) and found.gpu.pair == found.gpu.prefix == 0
    assert found.step(Load(256)) == pytest.approx(true.step(Load(256))) and found.trusted == 512


@pytest.mark.parametrize("true", [Prices(fixed=0.018), Prices(token=2.5e-5)])
def test_of_steps_that_differ_no_more_is_assumed_than_they_tell(true):
    found = fitted(VARIED * 3, true)
    assert found.gpu == pytest.approx(true, rel=1e-3, abs=1e-9) and found.host == Prices()


def test_where_a_launch_fills_short_steps_a_long_one_is_said_to_take_no_less_than_the_fastest_did():
    """Hundreds of short steps take what a launch takes, and the fit finds that their tokens cost nothing."""
    draw, fit, launch, token = random.Random(0), PrefillFit(), 0.028, 2.6e-5
    for tokens in (8192, 8192, 1024, 1024):
        note(fit, tokens, max(launch, token * tokens))
    seemed = 0
    for _ in range(1000):
        tokens = draw.choice((64, 256, 300))
        note(fit, tokens, launch * draw.lognormvariate(0, 0.15))
        found = fit.prices
        seemed = max(seemed, found.gpu.tokens(0.04, 0, Load()))
        assert found.tokens(0.04, 0) <= 1.3 * 0.04 / token and found.step(Load(8192)) >= 0.7 * 8192 * token
    assert seemed > 8192  # what the prices alone would have let run


def test_a_step_that_was_seen_too_early_does_not_set_the_pace():
    fit = PrefillFit()
    for tokens, seconds in [(1500, 0.045)] * 20 + [(1500, 1e-5), (8192, 1e-5), (8192, 0.246)]:
        note(fit, tokens, seconds)
        assert fit.prices.pace in (0.0, pytest.approx(3e-5, rel=0.01))


def test_short_steps_tell_no_pace_as_they_may_take_what_a_launch_takes():
    """Else where only they were seen, nobody would find out that longer ones take no more time."""
    fit = PrefillFit()
    for _ in range(40):
        note(fit, 256, 0.03)
    assert fit.prices.pace == 0 and fit.prices.trusted == 512


def test_where_no_token_takes_time_all_fit():
    free = Prices(fixed=0.01)
    assert free.tokens(0.011, 0, Load()) > 8192 and free.tokens(0.009, 0, Load()) == 0


def test_steps_that_were_timed_together_count_as_so_many():
    true, fit = Prices(0.018, 2.5e-5), PrefillFit()
    for number in range(40):
        steps = [512] * (1 + number % 3) + [100 * (number % 7)] * (number % 2)
        for tokens in steps[:-1]:
            fit.add(Load(tokens))
        note(fit, steps[-1], sum(true.step(Load(tokens)) for tokens in steps))
    gpu = fit.prices.gpu
    assert gpu.fixed == pytest.approx(0.018, rel=0.01) and gpu.token == pytest.approx(2.5e-5, rel=0.02)


@pytest.mark.parametrize("waited", [None, 0.0])
def test_what_all_steps_take_longer_of_late_is_in_the_next_ones_price(waited):
    """Other steps' part in the time between two decode steps changes faster than the prices."""
    fit = PrefillFit()
    for number in range(130):
        for tokens in (512, 1024):
            note(fit, tokens, (0.005 if number < 100 else 0.015) + 2.5e-5 * tokens, waited)
    assert fit.prices.step(Load(512)) == pytest.approx(0.015 + 2.5e-5 * 512, rel=0.03)


@pytest.mark.parametrize("waited", [None, 0.0])
@pytest.mark.parametrize("before", [1, 60])
@pytest.mark.parametrize("seen_late", [1e-6, 1e-3])
def test_one_step_that_was_seen_to_take_hardly_any_time_does_not_make_prefill_cheap(before, seen_late, waited):
    """An engine that is held up after one step finds the next one's result there already."""
    fit = PrefillFit()
    for number in range(before + 20):
        tokens = 256 + 97 * (number % 16)
        seconds = seen_late if number == before else 0.005 + 2.5e-5 * tokens
        note(fit, Load().plus(tokens, 0), seconds, waited)
    assert 0.9 * 0.0306 <= fit.prices.step(Load().plus(1024, 0)) <= 2 * 0.0306


# The host and the GPU ----------------------------------------------------------------------------------------------

LAUNCH, SHARE = 0.03, Prices(fixed=0.002, token=2.5e-5, pair=1e-9)


def run(fit, load, launch=LAUNCH):
    """A step on a machine whose host launches it while the GPU computes it."""
    seconds = max(launch, SHARE.step(load))
    note(fit, load, seconds, seconds - launch)


def test_what_the_engine_waits_for_results_tells_the_host_from_the_gpu():
    draw, fit = random.Random(0), PrefillFit()
    for _ in range(300):
        run(fit, Load().plus(draw.choice((20, 256, 700, 2000, 3000, 4000)), draw.choice((0, 5000))))
    found = fit.prices
    assert found.launch == pytest.approx(LAUNCH, rel=0.02) and found.host.token == found.host.prefix == 0
    for tokens in (256, 1100, 2000, 4000):
        load = Load().plus(tokens, 0)
        assert found.step(load) == pytest.approx(max(LAUNCH, SHARE.step(load)), rel=0.05)


def test_a_step_for_which_the_engine_did_not_wait_took_the_gpu_no_longer():
    """Else short steps that are all alike, and once were slow, would never be found to leave the GPU idle."""
    fit = PrefillFit()
    note(fit, 256, 0.2, 0.17)
    assert fit.prices.gpu.step(Load(256)) == pytest.approx(0.2)
    tokens = 256
    for _ in range(400):
        tokens = max(256, min(fit.prices.tokens(0.04, 0), int(fit.prices.trusted), 8192))
        run(fit, Load(tokens))
    assert SHARE.step(Load(tokens)) == pytest.approx(0.04, rel=0.1)


def test_of_steps_that_are_all_alike_the_host_takes_as_long_for_a_longer_one():
    fit = PrefillFit()
    for _ in range(20):
        run(fit, Load(256))
    assert fit.prices.host == pytest.approx(Prices(LAUNCH)) and fit.prices.gpu == Prices()
    assert fit.prices.tokens(0.04, 0) == fit.prices.beside(LAUNCH, 0) > fit.prices.trusted == 512  # twice what was seen


def test_an_engine_that_computes_what_it_launches_pays_for_tokens():
    draw, fit = random.Random(0), PrefillFit()
    for _ in range(100):
        load = Load(draw.choice((256, 512, 2000)))
        note(fit, load, SHARE.step(load), 0.0)
    assert fit.prices.step(Load(4000)) == pytest.approx(SHARE.step(Load(4000)), rel=0.05)


def test_the_host_is_known_where_the_engine_always_waits():
    """A step that it was held up in once is not what launching takes for good."""
    fit = PrefillFit()
    note(fit, 1000, 0.1, 0.0)
    for _ in range(300):
        note(fit, 1000, 0.025, 0.04)
    assert fit.prices.launch <= 0.005


# What comes and goes -----------------------------------------------------------------------------------------------


def test_time_without_a_step_says_nothing():
    fit = PrefillFit()
    fit.took(3.0)
    fit.add(Load(256))
    fit.drop()
    fit.took(3.0)
    fit.add(Load(256))
    fit.took(0.0)
    fit.took(3.0)
    assert fit.prices is None


def test_waiting_before_a_step_is_no_part_of_it():
    fit = PrefillFit()
    fit.waited(3.0)
    fit.drop()
    note(fit, 256, 0.03, 0.0)
    assert fit.prices.launch == pytest.approx(0.03) and fit.prices.gpu == Prices()


def test_the_fit_follows_the_machine():
    before, after = Prices(0.018, 2.5e-5, 1e-9, 1e-7), Prices(0.002, 5e-5, 4e-9, 0.0)
    fit = PrefillFit()
    for prices in (before, after):
        for _ in range(300):
            for prompts in VARIED:
                note(fit, load_of(prompts), prices.step(load_of(prompts)))
    gpu = fit.prices.gpu
    assert gpu.token == pytest.approx(5e-5, rel=0.02) and 0.002 <= gpu.fixed <= 0.0026


def test_what_was_seen_is_trusted_twice_over_and_fades():
    fit = PrefillFit()
    note(fit, 8192, 0.2)
    assert fit.prices.trusted == 2 * 8192
    for _ in range(1200):
        note(fit, 256, 0.02)
    assert fit.prices.trusted == 2 * 256


@given(
    st.lists(
        st.tuples(
            st.floats(1e-4, 9.0),
            st.integers(1, 9000),
            st.floats(0, 9000),
            st.integers(0, 9000),
            st.one_of(st.none(), st.floats(0, 10)),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_nothing_takes_less_than_no_time_and_a_step_some(steps):
    fit = PrefillFit()
    for seconds, tokens, context, cached, waited in steps:
        note(fit, Load(tokens, context * tokens, cached), seconds, waited)
        found = fit.prices
        assert found.trusted > 0 and min(found.numbers) >= 0 and np.isfinite(found.numbers).all()
        assert max(*found.gpu, *found.host) > 0 and PrefillPrices.of(found.numbers) == found


def test_what_is_not_known_is_no_price():
    assert PrefillPrices.of((None,) * len(PrefillPrices(Prices()).numbers)) is None
