"""How much prefill runs between two tokens: within the bound where the load allows it, as much as it must where not."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.admission.work import Work
from feather_sglang.scheduling.meters.prefill import Gap
from feather_sglang.scheduling.meters.readings import Readings
from feather_sglang.scheduling.prefill_bound.prefill_bound import (
    FIRST_TOKENS,
    LONGEST,
    TOLD_EVERY,
    UNKNOWN_OWN,
    OwnTime,
    PrefillBound,
    tokens_for,
)
from feather_sglang.scheduling.prefill_bound.prefill_bound import plan as work_of
from feather_sglang.scheduling.prefill_bound.promise import PATIENCE, SAFETY, Promise
from feather_sglang.slo import parse
from oracles.rounds import builder

bounds = st.floats(0.005, 1.0)
owns = st.floats(0.001, 0.2)
prices = st.floats(1e-6, 1e-3)
patiences = st.floats(0.5, PATIENCE)
waitings = st.one_of(st.floats(0, 1e6), st.just(inf))


# The plan ---------------------------------------------------------------------------------------------------------


def plan(bound, waiting, patience, own, price):
    """Work of a gap, and its seconds."""
    work = work_of(bound, waiting, patience, own, price)
    return work, own + price * work


def test_what_the_bound_leaves_is_computed():
    work, gap = plan(bound=0.1, waiting=500.0, patience=2.0, own=0.02, price=1e-4)
    assert work == pytest.approx(800) and gap == pytest.approx(0.1)


def test_what_would_not_be_computed_within_the_patience_is_computed_beyond_the_bound():
    work, gap = plan(bound=0.1, waiting=18_000.0, patience=2.0, own=0.02, price=1e-4)
    assert gap == pytest.approx(0.2) and work == pytest.approx(1800)
    assert 18_000 * gap / work == pytest.approx(2.0)  # so long it takes to compute all of it


@given(bounds, waitings, patiences, owns, prices)
def test_the_gap_is_its_own_part_and_that_of_its_work(bound, waiting, patience, own, price):
    work, gap = plan(bound, waiting, patience, own, price)
    assert work >= 0 and gap == pytest.approx(own + work * price)
    assert gap <= max(bound, LONGEST * own) * (1 + 1e-9)


shares = st.floats(0, 0.99)


@given(bounds, shares, patiences, st.floats(0, 0.5), prices)
def test_the_bound_holds_where_it_keeps_up(bound, load, patience, own_share, price):
    """In gaps of the bound all that waits is computed within the patience."""
    own = own_share * bound
    waiting = load * patience / bound * (bound - own) / price
    assert plan(bound, waiting, patience, own, price)[1] == pytest.approx(bound)


@given(bounds, waitings, patiences, owns, prices)
def test_where_it_does_not_keep_up_all_that_waits_is_computed_within_the_patience_or_the_gap_is_the_longest(
    bound, waiting, patience, own, price
):
    work, gap = plan(bound, waiting, patience, own, price)
    if gap > max(bound, 2 * own) * (1 + 1e-9):
        in_time = waiting * gap / work if waiting < inf else inf
        # No longer than it must be, either.
        assert in_time == pytest.approx(patience) or (in_time >= patience and gap == pytest.approx(LONGEST * own))


@given(bounds, st.lists(waitings, min_size=2, max_size=2), patiences, owns, prices)
def test_where_more_waits_no_less_is_computed(bound, waiting, patience, own, price):
    less, more = (plan(bound, one, patience, own, price)[0] for one in sorted(waiting))
    assert less <= more * (1 + 1e-9)


@given(st.lists(bounds, min_size=2, max_size=2), waitings, patiences, owns, prices)
def test_where_the_bound_is_looser_no_less_is_computed(bound, waiting, patience, own, price):
    tight, loose = (plan(one, waiting, patience, own, price)[0] for one in sorted(bound))
    assert tight <= loose * (1 + 1e-9)


@given(bounds, patiences, owns, prices)
def test_under_overload_the_interruptions_take_a_twentieth_of_the_time(bound, patience, own, price):
    _, gap = plan(bound, inf, patience, own, price)
    assert own / gap <= (1 + 1e-9) / LONGEST
    assert gap == pytest.approx(max(bound, LONGEST * own))  # and the gaps are no longer than that takes


@given(bounds, waitings, patiences, st.floats(0.5, 100.0), prices)
@example(0.05, 0.0, 2.0, 1.0, 1e-4)
def test_a_bound_that_leaves_less_to_prefill_than_a_gaps_own_part_gives_way(bound, waiting, patience, factor, price):
    """And no further than it must."""
    own = factor * bound
    work, gap = plan(bound, waiting, patience, own, price)
    assert gap >= bound * (1 - 1e-9) and work * price >= own * (1 - 1e-9)
    assert plan(bound, 0.0, patience, own, price)[1] == pytest.approx(2 * own)


def served(bound, patience, own, price, load, bursts):
    """Work flows into a queue at a share of the rate that the longest gaps can serve, and bursts of it come at once.

    Bursts are in seconds of prefill; returns what waits after each gap, in seconds of prefill, too.
    """
    rate = load * (1 - 1 / LONGEST) / price  # of work, a second
    waiting, waited = 0.0, []
    for burst in bursts:
        waiting += burst / price
        for _ in range(30):
            work, gap = plan(bound, waiting, patience, own, price)
            done = min(work, waiting)
            waiting += rate * (own + price * done if done < work else gap) - done
            waited.append(waiting * price)
    return waited


@given(bounds, patiences, owns, prices, st.floats(0.1, 1.0))
def test_no_queue_grows_that_the_engine_could_serve(bound, patience, own, price, load):
    """What waits stays below the patience, and what a single gap adds."""
    waited = served(bound, patience, own, price, load, [0.0] * 40)
    assert max(waited) <= patience + max(bound, LONGEST * own)


@given(bounds, patiences, owns, prices, st.floats(0.1, 0.8), st.floats(0.0, 10.0))
def test_a_queue_that_a_burst_has_left_shrinks_to_that(bound, patience, own, price, load, burst):
    waited = served(bound, patience, own, price, load, [burst] + [0.0] * 200)
    assert max(waited) <= burst + patience + max(bound, LONGEST * own)
    assert waited[-1] <= patience + max(bound, LONGEST * own)


# Tokens of so much work -------------------------------------------------------------------------------------------


@given(st.floats(0, 1e6), st.integers(0, 200_000), st.sampled_from([0.0, 1e-6, 1e-4, 1e-2]))
def test_so_many_tokens_are_so_much_work(work, context, pair_tokens):
    counted = Work(None)
    counted.pair_tokens = pair_tokens
    tokens = tokens_for(work, context, pair_tokens)
    assert counted.of_prompt(tokens, context + tokens) == pytest.approx(work)
    assert 0 <= tokens <= work * (1 + 1e-9)


def test_without_attention_a_token_is_a_token():
    assert tokens_for(800.0, 50_000, 0.0) == pytest.approx(800)
    assert tokens_for(0.0, 50_000, 1e-4) == 0


# What lies between beyond what is computed ------------------------------------------------------------------------


def test_a_gap_has_its_own_part_beside_its_tokens_and_their_context():
    own = OwnTime()
    own.note(Gap(0.5, 1, 1000, 1e6), None, 0.0, 0.0)
    assert own.seconds is None  # prices are not known yet
    own.note(Gap(0.5, 1, 1000, 1e6), 3e-4, 1e-7, 0.0)
    assert own.seconds == pytest.approx(0.1)
    own.note(Gap(0.9, 1, 1000, 1e6), 3e-4, 1e-7, 0.0)
    assert 0.1 < own.seconds < 0.2


def test_no_gap_takes_less_than_nothing():
    own = OwnTime()
    own.note(Gap(0.1, 1, 1000, 0.0), 3e-4, 0.0, 0.0)
    assert own.seconds == 0


@given(st.floats(0, 1), st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 5)), min_size=1, max_size=30), prices)
def test_it_is_the_same_whatever_is_computed(own, gaps, price):
    found, fixed = OwnTime(), own / 3
    for new, steps in gaps:
        found.note(Gap(own + (steps - 1) * fixed + price * new, steps, new, 0.0), price, 0.0, fixed)
    assert found.seconds == pytest.approx(own, abs=1e-9)


def test_it_follows_a_batch_that_grew():
    own = OwnTime()
    own.note(Gap(0.01, 1, 0, 0.0), 1e-4, 0.0, 0.0)
    for _ in range(24):
        own.note(Gap(0.1, 1, 0, 0.0), 1e-4, 0.0, 0.0)
    assert own.seconds == pytest.approx(0.1, rel=0.05)


# What waits -------------------------------------------------------------------------------------------------------


def test_what_waits_is_what_is_to_be_computed_of_all_prompts():
    one = builder()
    assert one.waiting_work(0) == 0
    one.arrived("a", [1] * 100)
    one.arrived("b", [2] * 5000, cached_tokens=4960)
    assert one.waiting_work(1000) == 140
    one.state.work.pair_tokens = 0.01  # the more context, the more work
    assert one.waiting_work(1000) == pytest.approx(100 + 0.01 * 100 * 50 + 40 + 0.01 * 40 * 4980)
    one.aborted("a")
    assert one.waiting_work(1000) == pytest.approx(40 + 0.01 * 40 * 4980)


def test_what_does_not_fit_into_memory_waits_for_ever():
    one = builder()
    one.arrived("a", [1] * 100)
    assert one.waiting_work(100) == 100 and one.waiting_work(99) == inf
    one.arrived("b", [2] * 100)
    assert one.waiting_work(100) == inf


def test_a_queue_too_long_to_be_looked_at_is_overload():
    one = builder()
    for number in range(256):
        one.arrived(number, [number] * 2)
    assert one.waiting_work(10**6) == 512
    one.arrived("last", [9] * 2)
    assert one.waiting_work(10**6) == inf


# What is promised -------------------------------------------------------------------------------------------------


def test_a_bound_is_aimed_at_as_it_was_named():
    assert Promise(tbt=0.05).between_tokens(None) == 0.05
    assert Promise(tbt=0.05).between_tokens(0.01) == 0.05


def test_of_a_promise_something_is_kept_in_hand():
    assert Promise(parse("ttft=2,tbt=50")).between_tokens(None) == pytest.approx(SAFETY * 0.05)
    assert 0.5 < SAFETY < 1


def test_a_relative_promise_follows_the_shortest_decode_step():
    promise = Promise(parse("ttft=10x,tbt=5x"))
    assert promise.between_tokens(None) is None
    assert promise.between_tokens(0.02) == pytest.approx(SAFETY * 0.1)


def test_of_both_the_bound_between_tokens_is_the_named_one():
    promise = Promise(parse("ttft=2,tbt=50"), tbt=0.2)
    assert promise.between_tokens(None) == 0.2 and promise.patience() == 1.0


@pytest.mark.parametrize(
    ("text", "seconds"), [("ttft=2,tbt=50", 1.0), ("ttft=60,tbt=50", PATIENCE), ("ttft=10x,tbt=5x", PATIENCE)]
)
def test_the_patience_is_half_of_a_bound_on_the_first_token_at_the_most(text, seconds):
    assert Promise(parse(text)).patience() == seconds
    assert Promise(tbt=0.05).patience() == PATIENCE


def test_the_patience_of_a_relative_bound_is_half_of_it_for_those_who_wait():
    promise = Promise(parse("ttft=10x,tbt=5x"))
    assert promise.patience(0.02) == pytest.approx(0.1) and promise.patience(10.0) == PATIENCE
    assert promise.patience(inf) == PATIENCE
    assert Promise(parse("ttft=2,tbt=50")).patience(0.02) == 1.0 and Promise(tbt=0.05).patience(0.02) == PATIENCE


@pytest.mark.parametrize("text", ["ttft=2", "tbt=50", "tpot=50", "ttft=2,tpot=50"])
def test_half_a_promise_is_none(text):
    with pytest.raises(FeatherError, match=f"^--feather-slo {text}: give both bounds, ttft and tbt$"):
        Promise(parse(text))


def test_a_mean_gap_is_not_promised():
    with pytest.raises(FeatherError, match=r"a server cannot promise tpot; leave it out$"):
        Promise(parse("ttft=2,tbt=50,tpot=50"))


# A server's bound -------------------------------------------------------------------------------------------------

OWN, PRICE = 0.01, 1e-4


class Told:
    """A bound of 50 ms in rounds, and its log lines."""

    def __init__(self, promise=None):
        self.lines = []
        self.bound = PrefillBound(promise or Promise(tbt=0.05), self.lines.append)

    def round(self, now, waiting=0.0, requests=1, **readings):
        known = Readings(now, **{"bare_seconds": PRICE, "own_seconds": OWN, "least_decode_seconds": 0.008, **readings})
        assert self.bound.look(known)
        work = self.bound.work(waiting, requests)
        self.bound.launched(work)
        self.bound.begin_gap()
        self.bound.tell_in_force(now)
        return work


def test_a_server_without_a_bound_has_none_until_a_decode_step_was_timed():
    bound = PrefillBound(Promise(parse("ttft=10x,tbt=5x")))
    assert not bound.look(Readings(0.0)) and bound.asked is None and bound.in_force is None
    assert bound.look(Readings(0.0, least_decode_seconds=0.01))
    assert bound.asked == pytest.approx(SAFETY * 0.05)
    assert bound.look(Readings(0.0, least_decode_seconds=0.008)) and bound.asked == pytest.approx(SAFETY * 0.04)


def test_it_plans_by_what_was_measured_and_waits():
    told = Told()
    assert told.round(0.0) == pytest.approx((0.05 - OWN) / PRICE)
    assert told.round(0.0, own_seconds=0.02) == pytest.approx(0.03 / PRICE)
    assert told.round(0.0, bare_seconds=2e-4) == pytest.approx(0.04 / 2e-4)
    assert told.round(0.0, waiting=inf) == pytest.approx((LONGEST - 1) * OWN / PRICE)
    assert Told().round(0.0, bare_seconds=None) == FIRST_TOKENS
    # The shorter the patience, the more of what waits is computed at once.
    assert told.round(0.0, waiting=18_000.0) == pytest.approx(900)
    hurried = Told(Promise(parse("ttft=3.8,tbt=50"), tbt=0.05))
    assert hurried.round(0.0, waiting=18_000.0) == pytest.approx(1800)


def test_before_a_gap_was_timed_its_own_part_is_a_part_of_the_bound():
    assert Told().round(0.0, own_seconds=None) == pytest.approx((1 - UNKNOWN_OWN) * 0.05 / PRICE)


def test_before_anything_was_timed_a_decode_step_follows_each_small_step():
    bound = PrefillBound(Promise(tbt=0.05))
    assert bound.look(Readings(0.0, own_seconds=0.5)) and bound.work(inf, 1) == FIRST_TOKENS
    bound.launched(100.0)
    assert bound.look(Readings(0.0)) and bound.work(inf, 1) == 0
    bound.begin_gap()
    assert bound.work(inf, 1) == FIRST_TOKENS


@given(bounds, waitings, owns, prices, st.floats(0, 0.1), st.lists(st.floats(0.01, 1.5), min_size=1, max_size=20))
def test_steps_of_a_gap_add_up_to_what_it_may_be(bound, waiting, own, price, fixed, shares):
    """However little each of them computes; what a further step takes is counted."""
    one = PrefillBound(Promise(tbt=bound))
    assert one.look(Readings(0.0, bare_seconds=price, own_seconds=own, fixed_seconds=fixed))
    planned, gap = one.work(waiting, 1), own
    for step, share in enumerate(shares):
        left = one.work(waiting, 1)
        if not left:
            assert gap + min(fixed, own) >= own + planned * price / 2 * (1 - 1e-9)
            break
        assert left >= planned / 2
        work = min(share, 1.0) * left
        gap += price * work + (min(fixed, own) if step else 0.0)
        one.launched(work)
        assert gap <= (own + planned * price) * (1 + 1e-9)
    one.tell_in_force(0.0)
    assert one.in_force == pytest.approx(max(bound, gap))
    one.begin_gap()
    assert one.work(waiting, 1) == planned


def test_where_it_is_not_known_what_a_further_step_takes_it_is_taken_for_the_first_one():
    one = PrefillBound(Promise(tbt=0.05))
    assert one.look(Readings(0.0, bare_seconds=PRICE, own_seconds=OWN))
    one.launched(100.0)
    assert one.work(0.0, 0) == pytest.approx((0.05 - 2 * OWN) / PRICE - 100)


def test_a_relative_bound_on_the_first_token_is_as_patient_as_short_prompts_are():
    patient, hurried = Told(Promise(parse("ttft=10x,tbt=5x"))), Told(Promise(parse("ttft=10x,tbt=5x")))
    assert patient.round(0.0, 2000.0, requests=1) == patient.round(0.0, 0.0)
    # Twenty prompts that would take 20 ms each, if they were alone: all of them within 100 ms, as far as that goes.
    assert hurried.round(0.0, 2000.0, requests=20) == pytest.approx((LONGEST - 1) * OWN / PRICE)
    assert hurried.round(0.0, 800.0, requests=8) == pytest.approx(800 * OWN / (0.1 - 0.08))


def test_what_is_in_force_is_the_longest_gap_of_a_period():
    told, bound = (one := Told()), one.bound
    assert bound.in_force is None
    told.round(0.0)
    assert bound.asked == 0.05 and bound.in_force == pytest.approx(0.05)
    told.round(1.0, inf)
    assert bound.in_force == pytest.approx(LONGEST * OWN)
    told.round(2.0)
    assert bound.in_force == pytest.approx(LONGEST * OWN)  # users may have waited so long
    told.round(TOLD_EVERY + 1)
    assert bound.in_force == pytest.approx(LONGEST * OWN)  # of the period that has just ended
    told.round(2 * TOLD_EVERY + 2)
    assert bound.in_force == pytest.approx(0.05)


def test_one_line_says_that_it_gives_way_and_one_that_it_holds_again():
    told = Told()
    for tenth in range(1000):
        told.round(tenth / 10, inf if 200 <= tenth < 500 else 0.0)
    gives_way, holds = told.lines
    assert "50 ms" in gives_way and "200 ms" in gives_way
    assert "50 ms" in holds and "200 ms" not in holds


def test_nothing_is_said_where_it_holds():
    told = Told()
    for tenth in range(1000):
        told.round(tenth / 10, waiting=1000.0)
    assert told.lines == [] and told.bound.in_force == pytest.approx(0.05)


@given(st.lists(st.tuples(st.floats(0, 3 * TOLD_EVERY), st.sampled_from([0.0, 1000.0, 1e5, inf])), max_size=60))
def test_lines_alternate_and_there_is_time_between_them(rounds):
    told, now, when = Told(), 0.0, []
    for seconds, waiting in rounds:
        now += seconds
        told.round(now, waiting)
        when += [now] * (len(told.lines) - len(when))
    assert all(later - earlier >= TOLD_EVERY for earlier, later in pairwise(when))
    for place, line in enumerate(told.lines):
        assert ("holds again" in line) == (place % 2 == 1), told.lines


def test_a_clock_that_is_set_back_does_not_silence_it():
    told = Told()
    told.round(1e6)
    for second in range(40):
        told.round(float(second), inf)
    assert len(told.lines) == 1 and told.bound.in_force == pytest.approx(LONGEST * OWN)
    told.round(100.0)
    told.round(100.0 + TOLD_EVERY)
    assert len(told.lines) == 2


def test_a_bound_that_no_step_can_keep_is_told_and_prefill_goes_on():
    told = Told()
    for second in range(30):
        assert told.round(float(second), own_seconds=0.06) * PRICE >= 0.06
    assert len(told.lines) == 1 and "does not allow the bound of 50 ms" in told.lines[0]
