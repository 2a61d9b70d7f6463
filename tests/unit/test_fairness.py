"""The ceiling on waits: when a request is overdue, and that it is served beside better candidates."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.scheduling.admission.fairness import Fairness
from feather_sglang.scheduling.policies import Action
from oracles.rounds import builder, open_round, propose, run_round
from oracles.scripted import Scripted


def arrive(b, *names):
    """A request's first letter is its prompt; upper case is urgent."""
    for name in names:
        b.arrived(name, array("q", [ord(name[0])] * 40), priority=0 if name[0].isupper() else 5)


# When -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("now", "rounds"), [(8.0, 1), (2.0, 4)])
def test_late_by_the_clock_or_by_rounds(now, rounds):
    fairness = Fairness(6.0, 4)
    fairness.open_round(2.0)
    fairness.arrive("r", 0)
    assert not fairness.is_overdue("r") and fairness.waited("r") == 0.0
    for _ in range(rounds - 1):
        fairness.open_round(2.0)
    assert not fairness.is_overdue("r")
    fairness.open_round(now)
    assert fairness.is_overdue("r")


def test_a_priority_that_nobody_has_any_more_is_forgotten():
    """Clients may send the time as their priority."""
    fairness = Fairness(6.0, 4)
    for name in range(100):
        fairness.arrive(name, name)
        if name % 2:
            fairness.admit(name)
            fairness.wait_again(name)
        fairness.admit(name)
        fairness.forget(name, waiting=False)
    fairness.arrive("r", 7)
    fairness.forget("r", waiting=True)
    assert fairness._waiting.first is None and fairness._present.first is None and not fairness.arrivals


def test_overtaken_by_as_many_as_were_ahead_and_as_urgent():
    fairness = Fairness(6.0, 4)
    fairness.open_round(0.0)
    for name, priority in (("a", 5), ("b", 9), ("c", 5), ("r", 5), ("urgent", 0)):
        fairness.arrive(name, priority)
    assert [fairness.arrivals[name].ahead for name in ("a", "b", "c", "r", "urgent")] == [0, 1, 1, 2, 0]
    for count in range(4):  # its own turn is after two
        assert not fairness.is_overtaken("r")
        fairness.arrive(count, 5)
        fairness.admit(count)
    assert fairness.is_overtaken("r") and fairness.is_overtaken("urgent")


def test_who_left_or_runs_is_ahead_of_nobody_and_who_is_back_is():
    fairness = Fairness(6.0, 4)
    fairness.open_round(0.0)
    for name in "abcd":
        fairness.arrive(name, 5)
    fairness.forget("a", waiting=True)
    fairness.admit("b")
    fairness.admit("c")
    fairness.forget("c", waiting=False)
    fairness.arrive("e", 5)
    assert fairness.arrivals["e"].ahead == 1  # d
    fairness.wait_again("b")
    fairness.arrive("f", 5)
    assert fairness.arrivals["f"].ahead == 3 and set(fairness.arrivals) == set("bdef")


# What it does to admission ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bound", "order"), [(10.0, "yyyyxxxxzzzz"), (1e9, "xxxxyyyyzzzz")])
def test_where_everybody_is_late_the_order_is_still_the_trees(bound, order):
    """Nobody was ahead of the y: they are next at once, then match the batch as well as the x; eight pass the z."""
    b = builder(max_wait=bound)
    arrive(b, "x0")
    assert run_round(b, slots=1) == ["x0"]
    arrive(b, *(f"{group}{i}" for group in "yzx" for i in range(1, 5)))
    assert run_round(b, slots=0) == []
    assert run_round(b, now=60.0, slots=99) == [f"{group}{i % 4 + 1}" for i, group in enumerate(order)]
    assert b.overdue_admissions == (12 if bound == 10.0 else 0)


def test_the_policy_is_not_asked_while_somebody_is_overdue():
    policy = Scripted(*[Action.STOP] * 9)
    b = builder(policy, max_wait=10.0)
    arrive(b, "x0", "y0")
    assert run_round(b, slots=1) == ["x0"]
    arrive(b, "z0")
    assert run_round(b, now=9.0, slots=9) == [] and len(policy.states) == 1
    assert run_round(b, now=10.0, slots=9) == ["y0"] and len(policy.states) == 2  # then about z0, which is not late
    assert run_round(b, now=18.0, slots=9) == [] and len(policy.states) == 3
    assert run_round(b, now=19.0, slots=9) == ["z0"] and len(policy.states) == 3
    assert b.overdue_admissions == 2


def test_a_late_one_is_not_held_back_by_those_of_a_less_urgent_class():
    b = builder(max_wait=10.0)
    arrive(b, "A0", *(f"b{i}" for i in range(30)))
    assert run_round(b, slots=1) == ["A0"]
    arrive(b, "S0")
    turns = []
    for step in range(1, 20):
        arrive(b, f"A{step}")
        turns += run_round(b, now=float(step), slots=1)
    assert turns.index("S0") == 10  # as soon as it is late: no urgent one was ahead of it


def test_only_who_was_proposed_for_somebodys_lateness_counts():
    b = builder(max_wait=10.0)
    arrive(b, "x0")
    run_round(b, slots=0)
    open_round(b, 10.0, None)
    assert propose(b, 0) == "x0"  # the scheduler then has no room for it
    b.close_round()
    assert b.overdue_admissions == 0
    b.state.fairness.max_wait = 100.0  # an operator switches
    assert run_round(b, now=11.0, slots=1) == ["x0"] and b.overdue_admissions == 0


@given(st.lists(st.text("abcd", max_size=4), min_size=1, max_size=40), st.integers(0, 8))
def test_nobody_waits_for_longer_than_twice_the_turns_of_those_before(arrivals, rounds):
    """One place a round, groups that come and go: when each request is admitted, against a bound by plain counting."""
    b = builder(max_wait=1e9, max_wait_rounds=rounds)
    seen: list[str] = []  # in order of arrival
    due: dict[str, int] = {}  # admissions before its own at most, from what was known when it came
    admitted: list[str] = []
    step = 0
    while step < len(arrivals) or b.tree.waiting:
        waiting = [name for name in seen if name in b.tree.waiting]
        for group in arrivals[step] if step < len(arrivals) else "":
            name = f"{group}{len(seen)}"
            older = max((due[other] for other in waiting), default=0)
            late = len(admitted) + rounds  # one a round, at most
            due[name] = max(late, len(admitted) + 2 * len(waiting), older) + 1
            seen.append(name)
            waiting.append(name)
            arrive(b, name)
        admitted += run_round(b, now=float(step), slots=1)
        if len(b.tree.active) > 3:
            b.finished(sorted(b.tree.active)[step % 3])
        step += 1
    assert sorted(admitted) == sorted(seen)
    for name in seen:
        assert admitted.index(name) <= due[name]


def test_who_is_retracted_or_leaves_the_queue_is_counted_so():
    b = builder()
    arrive(b, "x0", "y0", "z0")
    assert run_round(b, slots=1) == ["x0"]
    b.retracted("x0", array("q", [5] * 50))
    b.aborted("z0")
    arrive(b, "u0", "v0")
    b.aborted("u0")  # before a round has seen it
    run_round(b, slots=0)
    assert b.state.fairness.arrivals["v0"].ahead == 2 and set(b.state.fairness.arrivals) == {"x0", "y0", "v0"}
    assert run_round(b, slots=2) == ["y0", "v0"]  # shorter than x0 is by now
    b.finished("y0")
    arrive(b, "w0")
    run_round(b, slots=0)
    assert b.state.fairness.arrivals["w0"].ahead == 1 and "y0" not in b.state.fairness.arrivals
