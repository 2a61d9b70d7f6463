"""Prefixes that wait for more requests: preconditions, the two bounds, and what is learnt about the load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.scheduling.admission.deferrals import (
    LEAST_TOKENS,
    MIN_SHARE_RATE,
    RECOMPUTE_PROBABILITY,
    STEP_TOKENS,
    PrefixBatching,
)


def gathering(pool=10_000, often=1.0, output=100.0, seconds=1e-3):
    made = PrefixBatching(pool)
    made.share_rate, made.output_tokens, made.seconds_per_token = often, output, seconds
    return made


# The rule -------------------------------------------------------------------------------------------------------


def test_a_lone_one_waits_beside_a_large_batch_and_many_do_not():
    rule = gathering()
    assert rule.waits(2000, together=1, waited=0.0, running=64)
    assert not rule.waits(2000, together=16, waited=0.0, running=64)
    assert not rule.waits(2000, together=1, waited=0.0, running=4)
    assert not rule.waits(2000, together=1, waited=0.0, running=0)


def test_the_border_is_where_steps_saved_outweigh_a_prefix_computed_again():
    """Each of those together saves STEP_TOKENS / running of a step, for as many steps as it has tokens."""
    rule = gathering(output=100.0)
    together = next(n for n in range(1, 100) if not rule.waits(2000, n, 0.0, 64))
    assert (together - 1) * 100 * STEP_TOKENS / 64 < RECOMPUTE_PROBABILITY * 2000 <= together * 100 * STEP_TOKENS / 64
    assert not gathering(output=1000.0).waits(2000, 1, 0.0, 64)  # long outputs: the place in the batch is worth more


@pytest.mark.parametrize("seconds", [None, 0.0])
def test_nothing_waits_before_prefill_is_measured(seconds):
    assert not gathering(seconds=seconds).waits(100_000, together=1, waited=0.0, running=1000)


def test_a_short_prefix_does_not_wait():
    rule = gathering(output=1.0)
    assert not rule.waits(LEAST_TOKENS - 1, together=1, waited=0.0, running=10_000)
    assert rule.waits(LEAST_TOKENS, together=1, waited=0.0, running=10_000)


@pytest.mark.parametrize(("together", "seconds"), [(1, 1e-3), (2, 1e-3), (1, 1e-5)])
def test_those_who_wait_lose_no_more_time_than_the_prefill_costs_those_who_run(together, seconds):
    rule = gathering(output=10.0, seconds=seconds)
    bound = 64 * 2000 * seconds / together
    assert rule.waits(2000, together, 0.99 * bound, 64)
    assert not rule.waits(2000, together, 1.001 * bound, 64)


cases = {
    "rule": st.builds(gathering, output=st.floats(1, 2000), seconds=st.floats(1e-7, 1e-2)),
    "missing": st.integers(LEAST_TOKENS, 100_000),
    "together": st.integers(1, 50),
    "waited": st.floats(0, 1000),
    "running": st.integers(0, 2000),
}


@given(**cases, more=st.integers(0, 50))
def test_more_together_never_begin_to_wait(rule, missing, together, waited, running, more):
    assert rule.waits(missing, together, waited, running) >= rule.waits(missing, together + more, waited, running)


@given(**cases, longer=st.floats(0, 1000))
def test_nobody_begins_to_wait_for_having_waited(rule, missing, together, waited, running, longer):
    assert rule.waits(missing, together, waited, running) >= rule.waits(missing, together, waited + longer, running)


@given(**cases, more=st.integers(0, 2000), longer=st.integers(0, 100_000))
def test_a_larger_batch_or_a_longer_prefix_never_ends_a_wait(rule, missing, together, waited, running, more, longer):
    waits = rule.waits(missing, together, waited, running)
    assert rule.waits(missing, together, waited, running + more) >= waits
    assert rule.waits(missing + longer, together, waited, running) >= waits


# Short memory ---------------------------------------------------------------------------------------------------


def test_memory_is_short_where_demand_exceeds_the_pool():
    rule = gathering(pool=10_000, output=100.0)
    assert not rule.short(8_000, running=40)  # each has half of its output on average
    assert rule.short(8_001, running=40) and rule.short(8_000, running=41)
    assert not rule.short(0, running=0)


def test_where_nothing_gathers_memory_is_never_called_short():
    rule = gathering(often=0.0)
    assert not rule.short(10**9, running=1000)
    for _ in range(10):
        rule.arrived(8, met=True)
    rule.arrived(8, met=None)  # has no prefix to be computed: says nothing
    assert 0 < rule.share_rate < MIN_SHARE_RATE and not rule.short(10**9, running=1000)
    for _ in range(10):
        rule.arrived(8, met=True)
    assert rule.share_rate >= MIN_SHARE_RATE and rule.short(10**9, running=0)
    for _ in range(30):
        rule.arrived(8, met=False)
    assert not rule.short(10**9, running=1000)


@given(st.lists(st.sampled_from([True, False, None]), max_size=300))
def test_the_share_that_met_another_is_a_share(arrivals):
    rule = PrefixBatching(1000)
    for met in arrivals:
        rule.arrived(8, met)
        assert 0 <= rule.share_rate <= 1
    if set(arrivals) <= {False, None}:
        assert rule.share_rate == 0


# Output length --------------------------------------------------------------------------------------------------


def test_outputs_are_as_long_as_allowed_until_the_first_has_finished():
    rule = PrefixBatching(1000)
    assert rule.output_tokens == 0
    rule.arrived(500, None)
    assert rule.output_tokens == 500
    rule.arrived(1000, True)
    assert 500 < rule.output_tokens < 1000
    rule.finished(40)
    assert rule.output_tokens == 40  # what was allowed is forgotten
    rule.arrived(10_000, None)
    assert rule.output_tokens == 40
    rule.finished(80)
    assert 40 < rule.output_tokens < 80


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=100))
def test_the_mean_output_lies_among_the_outputs(outputs):
    rule = PrefixBatching(1000)
    for tokens in outputs:
        rule.finished(tokens)
    assert min(outputs) - 1e-6 <= rule.output_tokens <= max(outputs) + 1e-6


def test_the_mean_output_follows_the_load():
    rule = PrefixBatching(1000)
    rule.finished(10)
    for _ in range(500):
        rule.finished(1000)
    assert rule.output_tokens == pytest.approx(1000, rel=0.01)
