"""Learners with the real tree and batch builder, on a small simulated server.

Five prefix groups share the server, requests arrive faster than they are served, and each stays for 200 steps. A row
outside the batch's largest group costs `foreign` times what a row inside costs. What STOP is worth then shows only
after the requests of the other groups have finished: a single STOP changes nothing.
"""

import random
from array import array
from collections import Counter
from statistics import mean

import pytest

from feather_sglang.batch_builder import BatchBuilder
from feather_sglang.cht import ChunkedHashTree
from feather_sglang.policies import make_policy

GROUPS, REQUESTS, RATE, STEPS, CAPACITY = 5, 3000, 100.0, 200, 256
LEARNERS = ("bandit", "qlearning")


def replay(policy, foreign, seed):
    """Serve all requests once; returns tokens/s."""
    rng = random.Random(seed)
    prefixes = [array("q", [group] * 64 * 20) for group in range(GROUPS)]
    builder = BatchBuilder(
        ChunkedHashTree(64, seed=1), policy, max_wait=1e9, max_wait_rounds=10**9, group_of=lambda request: request[0]
    )
    policy.end_episode()
    clock = arrival = 0.0
    arrived = step = tokens = 0
    ends, reward = {}, None
    while ends or arrived < REQUESTS:
        for request in [r for r, end in ends.items() if end <= step]:
            builder.leave_batch(request)
            del ends[request]
        while arrival <= clock and arrived < REQUESTS:
            request = (rng.randrange(GROUPS), arrived)
            builder.arrive(request, prefixes[request[0]] + array("q", [arrived + 10]))
            arrived += 1
            arrival += rng.expovariate(RATE)
        builder.begin_round(clock, reward)
        while len(ends) < CAPACITY and (request := builder.propose(len(ends), 1.0)) is not None:
            builder.admitted(request)
            ends[request] = step + STEPS
        builder.end_round()
        step += 1
        if not ends:
            clock, reward = max(clock, arrival), None
            continue
        main = max(Counter(group for group, _ in ends).values())
        seconds = (1 + 0.02 * (main + foreign * (len(ends) - main))) / 100 * (1 + rng.gauss(0, 0.03))
        clock += seconds
        reward = len(ends) / seconds
        tokens += len(ends)
    return tokens / clock


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("foreign", [1.5, 2.0])
def test_a_learner_makes_mixed_batches_homogeneous_where_that_pays(name, foreign):
    """In its first passes over three thousand requests it wins most of what an oracle wins."""
    always = replay(make_policy("always-add"), foreign, 0)
    oracle = replay(make_policy("oracle"), foreign, 0)
    assert oracle > 1.2 * always
    for seed in range(3):
        policy = make_policy(name, seed=seed)
        learnt = mean(replay(policy, foreign, 10 * seed + i) for i in range(3))
        assert learnt > always + 0.7 * (oracle - always), f"seed {seed}"


@pytest.mark.parametrize("name", LEARNERS)
def test_a_learner_costs_nothing_where_mixing_is_free(name):
    ratios = []
    for seed in range(2):
        policy = make_policy(name, seed=seed)
        for i in range(3):
            always = replay(make_policy("always-add"), 1.0, 10 * seed + i)
            ratios.append(replay(policy, 1.0, 10 * seed + i) / always)
    assert mean(ratios) > 0.995
    assert min(ratios) > 0.985
