"""Delayed prefill: the rule, and delayed rounds of a batch builder."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.scheduling.admission.deferrals import PrefixBatching
from feather_sglang.scheduling.admission.gate import PrefillDelay
from feather_sglang.scheduling.policies import Action, make_policy
from oracles import rounds
from oracles.rounds import admit, defers, open_round, propose
from oracles.scripted import Scripted

FIXED = 0.01


def pacing(bound=1.0, admitted=0.0):
    made = PrefillDelay(bound)
    made.admitted(admitted)
    return made


# The rule -------------------------------------------------------------------------------------------------------


def test_it_holds_until_those_who_wait_have_waited_as_long_as_a_step_costs_those_who_run():
    """A step later, 4 x 1.25 requests have waited 0.025 s on average: as long as 12.5 wait for a step of 0.01 s."""
    rule = pacing(admitted=7.0)
    assert rule.delays(7.0, waiting=4, running=20, fixed_seconds=FIXED)
    assert rule.delays(7.0399, waiting=4, running=13, fixed_seconds=FIXED)
    assert not rule.delays(7.0401, waiting=4, running=12, fixed_seconds=FIXED)
    assert not rule.delays(7.0399, waiting=5, running=13, fixed_seconds=FIXED)
    assert not rule.delays(7.0399, waiting=4, running=12, fixed_seconds=FIXED)


def test_the_interval_is_the_one_that_costs_least():
    """Arrivals at a steady rate: what all wait for in a second, by the interval between prefill steps."""
    rate, running = 50.0, 40

    def cost(interval):
        return rate * interval / 2 + running * FIXED / interval

    rule = pacing(bound=10.0)
    found = next(t / 1e4 for t in range(1, 10**5) if not rule.delays(t / 1e4, rate * t / 1e4, running, FIXED))
    best = min((t / 1e4 for t in range(1, 10**4)), key=cost)
    assert found + FIXED == pytest.approx(best, abs=2e-4)  # the next chance would be too late
    assert cost(found) < 1.005 * cost(best)


def test_a_burst_is_not_interrupted_for_a_step():
    """As many came during a prefill step as run: they will be more when it is asked again."""
    rule = pacing()
    assert not rule.delays(FIXED, waiting=18, running=16, fixed_seconds=FIXED)
    assert rule.delays(FIXED, waiting=7, running=16, fixed_seconds=FIXED)


def test_the_bound():
    for bound in (0.1, 3.0):
        rule = pacing(bound)
        assert rule.delays(0.999 * bound, waiting=1, running=10**6, fixed_seconds=FIXED)
        assert not rule.delays(bound, waiting=1, running=10**6, fixed_seconds=FIXED)
    assert not pacing(bound=0).delays(0.0, waiting=1, running=10**6, fixed_seconds=FIXED)


def test_nothing_is_held_without_a_reason():
    assert not PrefillDelay(1.0).delays(0.0, waiting=1, running=10**6, fixed_seconds=FIXED)  # nobody was ever admitted
    rule = pacing(admitted=5.0)
    assert rule.delays(5.0, waiting=1, running=1, fixed_seconds=FIXED)
    assert not rule.delays(5.0, waiting=0, running=1, fixed_seconds=FIXED)
    assert not rule.delays(5.0, waiting=1, running=0, fixed_seconds=FIXED)
    assert not rule.delays(5.0, waiting=1, running=1, fixed_seconds=None)
    assert not rule.delays(5.0, waiting=1, running=1, fixed_seconds=0.0)
    assert not rule.delays(4.9, waiting=1, running=1, fixed_seconds=FIXED)  # a clock that was set back


cases = {
    "since": st.floats(0, 10),
    "waiting": st.integers(0, 500),
    "running": st.integers(0, 500),
    "fixed": st.floats(0, 0.1),
}


@given(**cases, longer=st.floats(0, 10), more=st.integers(0, 100), fewer=st.integers(0, 100))
def test_who_is_let_go_is_not_held_again_for_having_waited_or_for_company(
    since, waiting, running, fixed, longer, more, fewer
):
    rule = pacing()
    if waiting and not rule.delays(since, waiting, running, fixed):
        assert not rule.delays(since + longer, waiting + more, max(0, running - fewer), fixed)


# The share ------------------------------------------------------------------------------------------------------


def served(rate, share, seconds=20.0):
    """Arrivals at a steady rate beside 100 that run: (largest wait after a while, prefill steps a second)."""
    rule = PrefillDelay(0.1, share)
    longest, steps, came, now = 0.0, 0, [], 0.0
    arrivals = iter([n / rate for n in range(int(rate * seconds))])
    coming = next(arrivals)
    while now < seconds - 1:
        while coming <= now:
            came.append(coming)
            coming = next(arrivals)
        if came and not rule.delays(now, len(came), 100, FIXED):
            for _ in came:
                rule.admitted(now)
            longest, steps = max(longest, now - came[0]), steps + 1
            came.clear()
            now += FIXED
        now += 0.001
    return longest, steps / now


def test_nobody_is_delayed_where_requests_come_seldom():
    """A step for each of 20 a second would take a fifth of the time."""
    longest, steps = served(rate=20.0, share=1 / 3)
    assert longest <= FIXED + 0.002 and steps == pytest.approx(20, rel=0.05)
    assert served(rate=20.0, share=0.0)[0] > 0.05


def test_where_they_come_often_they_share_steps():
    longest, steps = served(rate=60.0, share=1 / 3)
    assert steps < 13 and longest <= 0.1 + 0.002
    assert served(rate=60.0, share=1.0)[1] > 40  # and without a delay


def test_what_was_long_ago_does_not_count():
    rule = PrefillDelay(100.0, 1 / 3)
    for _ in range(50):
        rule.admitted(0.0)
    assert rule.delays(0.1, 1, 10**6, FIXED)
    assert not rule.delays(0.5, 1, 10**6, FIXED)


# Rounds of a builder --------------------------------------------------------------------------------------------


def builder(policy=None, bound=1.0, **options):
    return rounds.builder(policy, prefill_delay=PrefillDelay(bound), **options)


def run_round(b, now, fixed=FIXED, **options):
    return rounds.run_round(b, now, fixed=fixed, **options)


def tokens(name):
    """Those of the same first letter share four chunks."""
    return array("q", [ord(name[0])] * 8 + [ord(c) for c in name])


def arrive(b, *names):
    for name in names:
        b.arrived(name, tokens(name))


def running(b, count=20, now=0.0):
    """A batch of so many, admitted at that time."""
    arrive(b, *(f"r{i}" for i in range(count)))
    assert len(run_round(b, now)) == count
    return b


def test_who_arrives_singly_is_admitted_together():
    b = running(builder())
    found = []
    for step in range(1, 11):
        arrive(b, f"n{step}")
        found.append(len(run_round(b, now=step * 0.02)))
    # 20 x 0.01 s: a step later, 3.5 x 0.07 / 2 is less and 4.5 x 0.09 / 2 more; then 24 x 0.01 s, which 5.5 reach
    assert found == [0, 0, 0, 4, 0, 0, 0, 0, 5, 0]
    assert b.delayed_rounds == b.stats()["delayed_rounds"] == 8
    assert b.state.fairness.round == b.stats()["rounds"] == 11


def test_the_interval_begins_with_the_round_in_which_somebody_was_admitted():
    b = running(builder(), now=5.0)
    run_round(b, now=5.5)  # nobody waits: says nothing
    b.close_round()  # SGLang closes a round that it has not opened
    arrive(b, "a")
    assert run_round(b, now=5.37) == []
    assert run_round(b, now=5.39) == ["a"]
    arrive(b, "b")
    assert run_round(b, now=5.42) == []


def test_nothing_is_held_without_pacing_or_with_a_bound_of_none():
    for b in (rounds.builder(), builder(bound=0.0)):
        running(b)
        arrive(b, "a")
        assert run_round(b, now=0.001) == ["a"] and b.delayed_rounds == 0 and not b.round.delayed


def test_nothing_is_held_where_nothing_runs():
    b = running(builder(), count=2)
    b.finished("r0")
    arrive(b, "a")
    assert run_round(b, now=0.001) == []
    b.finished("r1")
    assert run_round(b, now=0.002) == ["a"]


def test_nothing_is_held_before_the_fixed_cost_is_known():
    b = running(builder())
    arrive(b, "a", "b")
    assert run_round(b, now=0.001) == []
    assert run_round(b, now=0.002, fixed=None) == ["a", "b"]


def test_nothing_is_held_while_a_prompt_is_computed_in_chunks():
    b = running(builder())
    arrive(b, "a")
    assert run_round(b, now=0.001) == []
    assert run_round(b, now=0.002, pending=100) == ["a"] and b.delayed_rounds == 1


def test_nothing_is_held_while_a_retracted_one_waits():
    b = running(builder())
    b.retracted("r3", tokens("r3"))
    arrive(b, "a")
    assert run_round(b, now=0.001, slots=1) == ["r3"]
    assert run_round(b, now=0.002) == []
    b.retracted("r5", tokens("r5"))
    b.aborted("r5")  # aborted
    assert run_round(b, now=0.003) == []


@pytest.mark.parametrize("bounds", [{"max_wait": 0.05}, {"max_wait_rounds": 5}])
def test_nothing_is_held_while_somebody_is_overdue(bounds):
    b = running(builder(**{"max_wait": 1e9, **bounds}))
    arrive(b, "a")
    assert [run_round(b, now=0.01 * i) for i in range(1, 6)] == [[]] * 5
    arrive(b, "b")
    assert run_round(b, now=0.061) == ["a", "b"] and b.overdue_admissions == 1


def test_an_overdue_one_of_a_less_urgent_class_does_not_end_the_pace():
    b = running(builder(max_wait=0.05))
    b.arrived("background", tokens("background"), priority=9)
    assert run_round(b, now=0.01) == []
    arrive(b, "urgent")
    assert run_round(b, now=0.07) == [] and b.delayed_rounds == 2
    b.aborted("urgent")
    assert run_round(b, now=0.08) == ["background"]


def test_who_becomes_overdue_in_a_held_round_is_proposed():
    """Preempted, say: it is as old as it was."""
    b = running(builder(max_wait=0.05), now=0.0)
    arrive(b, "a")
    assert run_round(b, now=0.01) == []
    b.aborted("a")
    arrive(b, "b")
    open_round(b, 0.05, None, None, FIXED)
    assert b.round.delayed and propose(b, 20) is None
    b.retracted("r3", tokens("r3"))
    assert propose(b, 19) == "r3"
    admit(b, "r3")
    assert propose(b, 20) is None
    b.close_round()


def test_those_who_wait_for_a_prefix_that_is_computed_do_not_count():
    b = running(builder())
    for i in range(6):
        b.arrived(i, array("q", [9] * 600) + array("q", [i] * 4))
    open_round(b, 1.0, None, None, FIXED)
    assert propose(b, 20) == 0
    admit(b, 0, 0)
    assert propose(b, 21) is None and set(b.state.deferrals.in_flight) == {0}
    b.close_round()
    arrive(b, "a")
    # Of six who wait one can be proposed: about 1 x 0.4 / 2 is less than 21 x 0.01, 6 x 0.4 / 2 is not.
    assert run_round(b, now=1.39) == [] and b.delayed_rounds == 1
    b.aborted("a")
    assert run_round(b, now=1.39) == [] and b.delayed_rounds == 1  # nobody is left to be held
    b.computed(0)
    assert run_round(b, now=1.39) == [1, 2, 3, 4, 5]


class AlwaysShort(PrefixBatching):
    def short(self, demand_tokens, running):
        return True

    def waits(self, missing_tokens, together, waited, running):
        return True


def test_postponed_requests_are_not_counted_either():
    b = running(builder(prefix_batching=AlwaysShort(0), max_wait=1e9))
    b.arrived("lone", array("q", [9] * 600))
    open_round(b, 0.5, None, None, FIXED)
    assert propose(b, 20) == "lone" and defers(b, "lone", 0, 600, 10**9)
    b.close_round()
    assert run_round(b, now=0.6) == [] and b.delayed_rounds == 0
    arrive(b, "a")
    assert run_round(b, now=0.1) == [] and b.delayed_rounds == 1
    assert run_round(b, now=0.5) == ["a"]


def test_a_held_round_teaches_nothing_and_the_reward_after_it_is_due():
    policy = Scripted()
    b = running(builder(policy))
    told = len(policy.states)
    policy.answers = [Action.ADD, Action.STOP]
    arrive(b, "a")
    assert run_round(b, now=0.1, reward=500.0) == []
    assert (len(policy.states), policy.rewards, policy.cancelled) == (told, [], 0)
    assert run_round(b, now=0.6, reward=700.0) == ["a"]
    assert policy.rewards == [700.0] and len(policy.states) == told + 1
    arrive(b, "b")
    assert run_round(b, now=2.0, reward=800.0) == [] and not b.round.delayed and b.stopping.stops == 1
    assert run_round(b, now=2.001, reward=900.0) == ["b"]  # nobody was admitted since 0.6
    assert policy.rewards == [700.0, 800.0, 900.0]


@pytest.mark.parametrize("kind", ["bandit", "qlearning"])
def test_a_learner_is_the_same_after_held_rounds(kind):
    b = running(builder(make_policy(kind, seed=0)))
    arrive(b, "a", "b")
    run_round(b, now=2.0, reward=900.0)
    before = b.policy._export(), b.policy.stats()
    for i in range(1, 20):
        arrive(b, f"n{i}")
        assert run_round(b, now=2.0 + 1e-4 * i, reward=1000.0 * i) == [] and b.round.delayed
    assert (b.policy._export(), b.policy.stats()) == before


def test_a_clock_that_begins_anew_holds_nobody():
    """A replay that trains serves the trace several times."""
    b = running(builder(), now=500.0)
    arrive(b, "a")
    assert run_round(b, now=0.0) == ["a"]
    arrive(b, "b")
    assert run_round(b, now=0.001) == []


steps = st.lists(
    st.tuples(st.floats(0.001, 0.3), st.integers(0, 4), st.integers(0, 3), st.sampled_from([None, 0.0, 0.002, 0.1])),
    min_size=1,
    max_size=40,
)


@given(steps, st.sampled_from([0.05, 0.2, 1.0]))
def test_nobody_waits_longer_than_the_bound_and_a_round(steps, bound):
    """With room for all under a policy that never stops: without pacing everybody is admitted in the next round."""
    b = builder(bound=bound)
    now, before, number, seen, last = 0.0, 0.0, 0, {}, None
    for seconds, arrivals, departures, fixed in steps:
        before, now = now, now + seconds
        for r in sorted(b.tree.active)[:departures]:
            b.finished(r)
        for _ in range(arrivals):
            number += 1
            arrive(b, f"{'abc'[number % 3]}{number}")
        for r in b.tree.waiting:
            seen.setdefault(r, now)
        held = b.delayed_rounds
        empty = not b.tree.active
        admitted = run_round(b, now, fixed=fixed)
        if b.delayed_rounds > held:
            assert not admitted and not empty and fixed and now - last < bound and b.tree.waiting
        else:
            assert not b.tree.waiting
        for r in admitted:
            assert now - seen.pop(r) <= bound + (now - before)
        last = now if admitted else last
    for r in list(b.tree.active):
        b.finished(r)
    run_round(b, now + 1e-3)
    assert not b.tree.waiting
