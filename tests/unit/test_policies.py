"""The contract of every policy: the protocol, the rules common to learners, the credit for rewards."""

import random
from math import prod

import numpy as np
import pytest

from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policies import POLICIES, Action, PolicyState, StopPolicy, discretiser, make_policy
from feather_sglang.scheduling.policies.estimates import NEW_CELL, lead, learn

ADD, STOP = Action.ADD, Action.STOP
LEARNERS = ("bandit", "qlearning")


def states(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        group = rng.randrange(3)
        yield PolicyState(rng.randrange(300), rng.randrange(60), rng.randrange(90), (group, {0, group}))


def answers(policy, seed, count, machine=lambda action: 100.0 if action is ADD else 150.0):
    """Decisions over random states, one reward each three decisions."""
    taken = []
    for i, state in enumerate(states(seed, count)):
        taken.append(policy.decide(state))
        if i % 3 == 2:
            policy.observe(machine(taken[-1]) * (1 + (i % 7) / 100))
    return taken


def teach(policy, state, add, stop, times=30):
    """Give ADD and STOP in `state` these throughputs, whichever the policy chooses."""
    for _ in range(times):
        policy.observe(add if policy.decide(state) is ADD else stop)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_the_protocol(name, tmp_path):
    policy = make_policy(name, seed=1)
    assert isinstance(policy, StopPolicy)
    assert policy.name == name
    taken = answers(policy, 1, 500)
    assert set(taken) <= {ADD, STOP}
    policy.decide(next(states(1, 1)))
    policy.cancel()
    policy.end_episode()
    stats = policy.stats()
    assert stats["decisions"] == stats["adds"] + stats["stops"] == 501
    assert all(isinstance(value, (int, float)) for value in stats.values())
    policy.save(tmp_path / "policy.json")
    policy.load(tmp_path / "policy.json")


@pytest.mark.parametrize("name", POLICIES)
def test_an_empty_batch_is_never_stopped(name):
    policy = make_policy(name)
    assert all(policy.decide(s._replace(batch_size=0)) is ADD for s in states(2, 300))


@pytest.mark.parametrize("name", POLICIES)
def test_same_seed_and_inputs_give_the_same_decisions(name):
    assert answers(make_policy(name, seed=5), 3, 3000) == answers(make_policy(name, seed=5), 3, 3000)


def test_another_seed_explores_otherwise():
    assert answers(make_policy("qlearning", seed=5), 3, 3000) != answers(make_policy("qlearning", seed=6), 3, 3000)


def test_unknown_policy_lists_the_choices():
    with pytest.raises(FeatherError, match="unknown policy 'greedy': choose one of heuristic, bandit, qlearning, alw"):
        make_policy("greedy")


@pytest.mark.parametrize(
    "name, params, message",
    [
        (
            "bandit",
            {"gamma": 0.5},
            "bandit has no parameter 'gamma': its parameters are c, window, discount, margin, t",
        ),
        ("always-add", {"c": 1}, "always-add has no parameter 'c': its parameters are none"),
        ("bandit", {"c": -1}, "c=-1 must lie between 0 and 10"),
        ("bandit", {"c": float("nan")}, "c=nan must lie between"),
        ("qlearning", {"gamma": 1}, "gamma=1 must lie between 0 and 0.999"),
        ("qlearning", {"alpha": "fast"}, "alpha='fast' must be a number"),
        ("heuristic", {"max_loss": 1.5}, "max_loss=1.5 must be an integer"),
        ("heuristic", {"max_loss": True}, "max_loss=True must be an integer"),
    ],
)
def test_a_wrong_parameter_is_one_clear_line(name, params, message):
    with pytest.raises(FeatherError) as error:
        make_policy(name, **params)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "batch, loss, peers, action",
    [
        (500, 0, 0, ADD),  # free
        (500, -3, 0, ADD),
        (0, 80, 0, ADD),  # nothing to protect
        (7, 16, 0, ADD),  # small batch: more loss tolerated
        (7, 17, 0, STOP),
        (8, 16, 0, STOP),
        (8, 2, 0, ADD),  # within the threshold
        (8, 3, 7, STOP),
        (8, 3, 8, ADD),  # many peers: a little more
        (8, 4, 100, ADD),
        (8, 5, 100, STOP),
    ],
)
def test_heuristic_rules(batch, loss, peers, action):
    assert make_policy("heuristic").decide(PolicyState(batch, loss, peers)) is action


def test_heuristic_thresholds_are_parameters():
    policy = make_policy("heuristic", small_batch=3, small_batch_loss=5, max_loss=1, many_peers=2, many_peers_loss=4)
    table = [((2, 5, 0), ADD), ((3, 5, 0), STOP), ((3, 1, 0), ADD), ((3, 4, 1), STOP), ((3, 4, 2), ADD)]
    assert [policy.decide(PolicyState(*state)) for state, _ in table] == [action for _, action in table]


def test_oracle_keeps_a_batch_to_one_group():
    policy = make_policy("oracle")
    assert policy.decide(PolicyState(3, 50, 0, group=("a", {"a"}))) is ADD
    assert policy.decide(PolicyState(3, 0, 9, group=("b", {"a"}))) is STOP
    assert policy.decide(PolicyState(3, 0, 9, group=("a", {"a", "b"}))) is STOP
    with pytest.raises(ValueError, match=r"state\.group"):
        policy.decide(PolicyState(3, 0, 9))


def test_always_add_does():
    policy = make_policy("always-add")
    assert set(answers(policy, 1, 500)) == {ADD}


@pytest.mark.parametrize("name", LEARNERS)
def test_a_free_addition_is_always_add_and_never_learnt(name):
    policy = make_policy(name)
    for batch in range(1, 2000):
        assert policy.decide(PolicyState(batch, 0, batch % 50)) is ADD
        policy.observe(1.0)
    assert policy.stats()["states"] == 0 and policy.stats()["trials"] == 0


@pytest.mark.parametrize("name", LEARNERS)
def test_stop_is_not_tried_before_add_was_measured(name):
    for seed in range(20):
        policy, state = make_policy(name, seed=seed), PolicyState(20, 40, 10)
        for _ in range(200):
            policy.observe(100.0)
        assert all(policy.decide(state) is ADD for _ in range(50))
        policy.observe(100.0)
        taken = []
        for _ in range(50):
            taken.append(policy.decide(state))
            policy.observe(100.0)
        assert STOP in taken


@pytest.mark.parametrize("name", LEARNERS)
def test_a_trial_stops_in_every_state_until_it_has_lost_too_much(name):
    policy, state, other = make_policy(name), PolicyState(20, 40, 10), PolicyState(200, 5, 100)
    while policy.stats()["trials"] == 0:
        policy.decide(state)
        policy.observe(100.0)
    lost = 0
    while policy.decide(other) is STOP:
        policy.observe(60.0)
        lost += 1
    assert lost == 3  # 1.1 rewards' worth of throughput, of 1 allowed and next to nothing earned
    policy.observe(100.0)
    assert policy.decide(state) is ADD


@pytest.mark.parametrize("name", LEARNERS)
def test_a_tie_goes_to_add(name):
    """Equal throughput, to within the margin of two percent, is no reason to keep a request waiting."""
    policy, state = make_policy(name), PolicyState(20, 40, 10)
    teach(policy, state, add=100.0, stop=101.5, times=500)
    policy.explore = False
    assert policy.decide(state) is ADD


@pytest.mark.parametrize("name", LEARNERS)
def test_a_frozen_policy_is_greedy_and_learns_nothing(name):
    policy, state = make_policy(name, seed=4), PolicyState(20, 40, 10)
    teach(policy, state, add=100.0, stop=200.0, times=500)
    policy.explore = False
    before = policy.stats()
    for _ in range(200):
        assert policy.decide(state) is STOP
        policy.observe(1.0)
        assert policy.decide(PolicyState(200, 1, 0)) is ADD  # never seen
        policy.observe(1000.0)
    after = policy.stats()
    assert {k: after[k] for k in ("rewards", "states", "trials")} == {
        k: before[k] for k in ("rewards", "states", "trials")
    }


@pytest.mark.parametrize("name", LEARNERS)
def test_a_reward_is_credited_to_all_decisions_since_the_previous_one_and_to_no_other(name):
    first, second, third = PolicyState(10, 40, 10), PolicyState(20, 40, 10), PolicyState(40, 40, 10)
    policy = make_policy(name, **({"gamma": 0} if name == "qlearning" else {}))
    policy.decide(first)
    policy.decide(second)
    policy.decide(second)
    policy.observe(100.0)
    policy.decide(third)
    policy.observe(300.0)
    policy.observe(900.0)
    cells = [policy.table[discretiser.key_of(s)] for s in (first, second, third)]
    assert [cell[:2] for cell in cells] == [[100.0, 1.0], [100.0, 1.0], [300.0, 1.0]]


@pytest.mark.parametrize("name", LEARNERS)
def test_a_cancelled_decision_and_an_ended_episode_learn_nothing(name):
    policy, state = make_policy(name), PolicyState(10, 40, 10)
    policy.decide(state)
    policy.cancel()
    policy.cancel()  # nothing left to take back
    policy.observe(100.0)
    policy.decide(state)
    policy.end_episode()
    policy.observe(100.0)
    policy.decide(state)
    policy.decide(PolicyState(10, 0, 10))
    policy.cancel()  # takes back the free addition, not the one before it
    assert policy.table[discretiser.key_of(state)] == [0.0] * 5
    policy.observe(100.0)
    policy.end_episode()
    assert policy.table[discretiser.key_of(state)][:2] == [100.0, 1.0]


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -1.0])
def test_a_reward_that_is_no_throughput_is_refused(name, reward):
    policy, state = make_policy(name), PolicyState(10, 40, 10)
    policy.decide(state)
    with pytest.raises(ValueError, match="finite throughput"):
        policy.observe(reward)
    assert policy.table[discretiser.key_of(state)] == [0.0] * 5


@pytest.mark.parametrize("name", LEARNERS)
def test_a_reward_of_nothing_does_not_break_a_policy(name):
    policy, state = make_policy(name), PolicyState(10, 40, 10)
    teach(policy, state, add=0.0, stop=0.0)
    assert policy.decide(state) in (ADD, STOP)


@pytest.mark.parametrize("name", LEARNERS)
def test_decisions_without_rewards_take_no_memory(name):
    policy = make_policy(name)
    for state in states(1, 20_000):
        policy.decide(state)
    assert len(policy._waiting) <= 2 * prod(discretiser.SHAPE)
    assert len(policy._waiting) == len(policy.table)  # only ADD is taken before the first reward


@pytest.mark.parametrize("name", LEARNERS)
def test_the_unit_of_the_reward_does_not_matter(name):
    """`c` and the margin are shares of throughput: tokens/s or tokens/h give the same decisions."""

    def machine(scale):
        return lambda action: scale * (100.0 if action is ADD else 99.0)

    assert answers(make_policy(name), 3, 3000, machine(1.0)) == answers(make_policy(name), 3, 3000, machine(1024.0))


@pytest.mark.parametrize("name", LEARNERS)
def test_the_end_of_an_episode_ends_a_trial(name):
    policy, state = make_policy(name), PolicyState(20, 40, 10)
    while policy.stats()["trials"] == 0:
        policy.decide(state)
        policy.observe(100.0)
    assert policy.decide(state) is STOP
    policy.end_episode()
    assert policy.decide(state) is ADD


@pytest.mark.parametrize(
    "rewards, proven",
    [
        ([100, 100, 100, 100], True),
        ([80, 120, 80, 120], False),  # the same mean, but 125 is hardly beyond what ADD itself shows
        ([80, 120] * 10, True),
    ],
)
def test_stop_is_proven_by_three_standard_errors(rewards, proven):
    cell = list(NEW_CELL)
    for reward in rewards:
        learn(cell, 0, reward, 1.0, 100.0)
        learn(cell, 1, 1.25 * reward, 1.0, 100.0)
    gain, answer = lead(cell, 0.02)
    assert gain == pytest.approx(0.18)
    assert answer is proven


def test_rewards_weigh_as_told_and_spread_is_around_each_actions_mean():
    cell = list(NEW_CELL)
    for weight, reward in ((1.0, 10.0), (0.5, 40.0), (0.0, 1e9)):
        learn(cell, 1, reward, weight, 100.0)
    assert cell[:4] == pytest.approx([0.0, 0.0, 20.0, 1.5])
    assert cell[4] == pytest.approx((1.0 * 10**2 + 0.5 * 20**2) / 1.5)


def test_q_learning_credits_what_follows():
    """ADD gives more at once, but the state it leads to is poor; a bandit falls for it, far-sighted Q does not."""
    rich, poor = PolicyState(20, 40, 10), PolicyState(20, 1, 10)

    def play(policy):
        where = rich
        for _ in range(3000):
            action = policy.decide(where)
            if where is rich:
                policy.observe(120.0 if action is ADD else 100.0)
                where = poor if action is ADD else rich
            else:  # whatever is done there, two poor rewards pass before the batch is rich again
                policy.observe(20.0)
                policy.observe(20.0)
                where = rich
        policy.explore = False
        return policy.decide(rich)

    assert play(make_policy("bandit")) is ADD
    assert play(make_policy("qlearning", gamma=0.8)) is STOP


def test_q_learning_closes_a_long_run_of_rewards_without_a_decision():
    policy, state = make_policy("qlearning", gamma=0.5), PolicyState(20, 40, 10)
    policy.decide(state)
    for reward in [300.0] + 50 * [100.0]:
        policy.observe(reward)
    value = policy.table[discretiser.key_of(state)][0]
    assert value == pytest.approx(200.0, rel=0.01)  # half the first reward, half all later ones


def test_exploration_decays_to_its_floor_in_each_state_by_itself():
    policy = make_policy("qlearning", eps_min=0.01, eps_decay=0.5, trial=1)
    visited, fresh = PolicyState(20, 40, 10), PolicyState(200, 40, 10)
    teach(policy, visited, add=100.0, stop=10.0, times=40_000)
    explored = policy.stats()["trials"]
    assert 40 < explored < 160  # some 20,000 chances, rests between trials apart, at a rate of 0.01 / 2
    teach(policy, fresh, add=100.0, stop=10.0, times=600)
    assert policy.stats()["trials"] > explored  # a state met late still gets its exploration


def test_rewards_may_be_numpy_numbers():
    policy = make_policy("bandit")
    policy.decide(PolicyState(20, 40, 10))
    policy.observe(np.float64(5.0))
    assert type(policy.table[discretiser.key_of(PolicyState(20, 40, 10))][0]) is float


def test_a_bandit_gives_an_unlucky_first_trial_another_chance():
    """The upper confidence bound, not chance, brings STOP back; without exploration it never returns."""

    def learnt(**params):
        policy, state, trials = make_policy("bandit", trial=1, **params), PolicyState(20, 40, 10), 0
        for _ in range(1500):
            stop = policy.decide(state) is STOP
            trials += stop
            policy.observe((92.0 if trials == 1 else 150.0) if stop else 100.0)
        policy.explore = False
        return policy.decide(state)

    assert learnt() is STOP
    assert learnt(c=0.001) is ADD


def test_a_bandit_without_exploration_never_stops_untaught():
    policy = make_policy("bandit", c=0)
    assert set(answers(policy, 1, 2000)) == {ADD}
