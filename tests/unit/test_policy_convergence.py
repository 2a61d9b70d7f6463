"""Both learners on small analytic machines with a known optimum, and their cost where STOP never pays.

Two environments. *Rounds*: each round forms one batch from two prefix groups, A and B, and is measured once; the one
decision that is not free is whether B's first request joins A's batch (the rest of B then costs nothing more).
*Server*: requests stay for some fifty steps, others take their place, and every candidate costs some shared prefix.
"""

import random
from itertools import product
from statistics import mean

import pytest

from effort import samples
from feather_sglang.scheduling.policies import Action, PolicyState, make_policy

pytestmark = pytest.mark.slow

LEARNERS = ("bandit", "qlearning")
SEEDS = range(samples(20, 5))
A_SIZES, B_SIZES = range(8, 64), range(9, 65)  # three batch-size bins, three bins of peers
PREFIX = 40  # chunks that A shares and B does not


def halved(batch, mixed):
    """Throughput saturates; a mixed batch runs at half of it: STOP is right in every state."""
    return batch / (1 + batch / 4) * (0.5 if mixed else 1.0)


def unmixed(batch, mixed):
    """As `halved`, but mixing is free."""
    return batch / (1 + batch / 4)


def growing(batch, mixed):
    """As `halved` while homogeneous; mixing doubles it. No machine does this: it is the opposite lesson."""
    return batch / (1 + batch / 4) * (2.0 if mixed else 1.0)


def indifferent(batch, mixed):
    """Throughput grows with the batch whatever the mix: ADD is right in every state."""
    return batch / (1 + batch / 64)


def crossing(batch, mixed):
    """Mixing doubles the cost of a row: right for a small batch to bear, wrong for a large one."""
    return batch / (32 + batch * (2 if mixed else 1))


def decide_at(policy, a, b):
    return policy.decide(PolicyState(a, PREFIX, b - 1))


def play_round(policy, machine, rng, noise=0.05):
    """One batch: all of A, then B if the policy says so. Returns the action and the share of the best throughput."""
    a, b = rng.choice(A_SIZES), rng.choice(B_SIZES)
    action = decide_at(policy, a, b)
    got = machine(a + b, True) if action is Action.ADD else machine(a, False)
    policy.observe(got * (1 + rng.gauss(0, noise)))
    return action, got / max(machine(a + b, True), machine(a, False))


def train(policy, machine, seed, rounds=2000):
    rng = random.Random(seed)
    return [play_round(policy, machine, rng) for _ in range(rounds)]


def best_by_state(machine, clear):
    """The right action for each cell of the table whose two actions differ by more than `clear`, with its members."""
    bins = [(range(8, 16), range(16, 32), range(32, 64)), (range(9, 17), range(17, 33), range(33, 65))]
    for members in product(*bins):
        add = mean(machine(a + b, True) for a, b in product(*members))
        stop = mean(machine(a, False) for a, _ in product(*members))
        if abs(add - stop) > clear * max(add, stop):
            yield Action.ADD if add > stop else Action.STOP, members


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize(
    "machine, right", [(halved, {Action.STOP}), (indifferent, {Action.ADD}), (crossing, set(Action))]
)
def test_every_seed_finds_the_known_optimum_in_every_state(name, machine, right):
    best = list(best_by_state(machine, clear=0.2))
    assert {action for action, _ in best} == right
    for seed in SEEDS:
        policy = make_policy(name, seed=seed)
        train(policy, machine, seed)
        policy.explore = False
        for action, members in best:
            wrong = [(a, b) for a, b in product(*members) if decide_at(policy, a, b) is not action]
            assert not wrong, f"seed {seed}: not {action} at {wrong[0]}"


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("machine", [halved, indifferent])
def test_exploration_costs_little_in_the_end(name, machine):
    for seed in SEEDS:
        late = train(make_policy(name, seed=seed), machine, seed)[1000:]
        assert mean(share for _, share in late) > 0.99, f"seed {seed}"


@pytest.mark.parametrize("name", LEARNERS)
def test_when_mixing_becomes_dear_the_learner_follows(name):
    """ADD is what it does all the time, so it notices at once (paper 5.3.6)."""
    for seed in SEEDS:
        policy = make_policy(name, seed=seed)
        train(policy, unmixed, seed)
        late = train(policy, halved, seed + 1, rounds=4000)[-500:]
        assert mean(action is Action.STOP for action, _ in late) > 0.8, f"seed {seed}"


def test_when_mixing_becomes_cheap_a_forgetful_bandit_follows():
    """Nothing but new tries of ADD can show it, and how often those come is a parameter."""
    for seed in SEEDS:
        policy = make_policy("bandit", seed=seed, discount=0.98)
        before = train(policy, halved, seed)[-500:]
        late = train(policy, growing, seed + 1, rounds=6000)[-500:]
        assert mean(action is Action.STOP for action, _ in before) > 0.8, f"seed {seed}"
        assert mean(action is Action.ADD for action, _ in late) > 0.8, f"seed {seed}"


def serve(policy, machine, seed, noise, steps=10_000, capacity=64):
    """A saturated server. Returns tokens/s and the share of STOPs in the second half.

    An always-add policy keeps the batch at `capacity` there.
    """
    rng = random.Random(seed)
    running, tokens, seconds, answers = [], 0, 0.0, []
    for step in range(steps):
        late = step >= steps // 2
        running = [end for end in running if end > step]
        while len(running) < capacity:
            action = policy.decide(PolicyState(len(running), rng.randint(1, 100), rng.randint(0, 40)))
            if late:
                answers.append(action)
            if action is Action.STOP:
                break
            running.append(step + rng.randint(25, 75))
        rate = machine(len(running), True)
        if late:
            tokens += len(running)
            seconds += len(running) / rate
        policy.observe(rate * (1 + rng.gauss(0, noise)))
    return tokens / seconds, answers.count(Action.STOP) / len(answers)


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("noise", [0.05, 0.15])
def test_no_regret_where_stop_never_pays(name, noise):
    """The harsh case: no addition is free, throughput nearly ties at each single step, and rewards are noisy."""
    for seed in SEEDS:
        throughput, stops = serve(make_policy(name, seed=seed), indifferent, seed, noise)
        assert stops < 0.01, f"seed {seed}"
        assert throughput >= 0.99 * indifferent(64, True), f"seed {seed}"


@pytest.mark.parametrize("name", LEARNERS)
def test_the_share_of_stop_keeps_falling_where_it_never_pays(name):
    for seed in range(2):
        _, stops = serve(make_policy(name, seed=seed), indifferent, seed, 0.1, steps=60_000)
        assert stops < 0.005, f"seed {seed}"
