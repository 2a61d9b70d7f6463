"""Teaching a learner by whole passes: its table then behaves like the best rule, in every state."""

import random

import pytest

from feather_sglang.policies import Action, PolicyState, make_policy
from feather_sglang.policies.discretiser import Discretiser
from feather_sglang.policies.rehearsal import FIRST_RULES, NEVER, Rehearsal, Rule, neighbours, teach


def states(count=300):
    rng = random.Random(5)
    return [
        PolicyState(2 ** rng.randrange(11) + rng.randrange(3), rng.randrange(60), 2 ** rng.randrange(9), rng.random())
        for _ in range(count)
    ]


@pytest.mark.parametrize("learner", ["bandit", "qlearning"])
@pytest.mark.parametrize("features", ["paper", "headroom"])
@pytest.mark.parametrize("best", [*FIRST_RULES, Rule(64, 8)])
def test_the_table_behaves_like_the_best_rule(learner, features, best):
    policy = make_policy(learner, features=features)
    rules = [*FIRST_RULES, *neighbours(best), best]
    for rule in random.Random(1).sample(rules, len(rules)):
        teach(policy, rule, 1000.0 + 100.0 * (rule == best))
    policy.explore = False
    for state in states():
        assert policy.decide(state) is best.action(state), state


def test_a_lead_within_the_margin_is_none():
    policy = make_policy("bandit")
    teach(policy, NEVER, 1000.0)
    teach(policy, Rule(1), 1015.0)
    policy.explore = False
    assert {policy.decide(state) for state in states()} == {Action.ADD}


def test_a_rule_stops_only_where_prefix_is_lost():
    policy = Rehearsal(Rule(8, 4))
    answers = [
        (PolicyState(8, 1, 4), Action.STOP),
        (PolicyState(7, 1, 4), Action.ADD),
        (PolicyState(8, 0, 4), Action.ADD),
        (PolicyState(8, 1, 3), Action.ADD),
    ]
    assert [policy.decide(state) for state, _ in answers] == [answer for _, answer in answers]
    assert (policy.stops, policy.adds) == (1, 3)


@pytest.mark.parametrize("features", ["paper", "headroom"])
def test_every_key_has_one_corner(features):
    discretiser = Discretiser(features)
    assert [key for key, _ in discretiser.corners()] == list(range(discretiser.states))


def test_neighbours_change_one_thing_and_keep_to_the_bins():
    assert neighbours(Rule(32)) == [Rule(16), Rule(64), Rule(32, 8)]
    assert all(rule.batch & (rule.batch - 1) == 0 for first in FIRST_RULES for rule in neighbours(first))
