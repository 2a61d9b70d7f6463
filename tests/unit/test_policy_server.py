"""Learners with the real tree and batch builder, on a small simulated server.

Five prefix groups share the server, requests arrive faster than they are served, and each stays for 200 steps. A row
outside the batch's largest group costs `foreign` times what a row inside costs. What STOP is worth then shows only
after the requests of the other groups have finished: a single STOP changes nothing.
"""

import random
from array import array
from collections import deque
from functools import cache
from statistics import mean

import pytest

from effort import samples
from feather_sglang.scheduling.admission.admission import Admission
from feather_sglang.scheduling.policies import make_policy
from feather_sglang.scheduling.tree.cht import ChunkedHashTree
from oracles.rounds import admit, open_round, propose

pytestmark = pytest.mark.slow

GROUPS, REQUESTS, RATE, STEPS, CAPACITY = 5, 3000, 100.0, 200, 256
LEARNERS = ("bandit", "qlearning")


def replay(policy, foreign, seed):
    """Serve all requests once; returns tokens/s."""
    rng = random.Random(seed)
    prefixes = [array("q", [group] * 64 * 20) for group in range(GROUPS)]
    builder = Admission(ChunkedHashTree(64, seed=1), policy, max_wait=1e9, max_wait_rounds=10**9)
    builder.consult(policy, lambda request: request[0])
    policy.end_episode()
    policy.explore = True  # which the builder of the replay before ended without: its queue was empty
    clock = arrival = 0.0
    arrived = step = tokens = 0
    running, rows, reward = deque(), [0] * GROUPS, None  # with the step at which each ends, the first to end in front
    while running or arrived < REQUESTS:
        while running and running[0][1] <= step:
            request, _ = running.popleft()
            rows[request[0]] -= 1
            builder.finished(request)
        while arrival <= clock and arrived < REQUESTS:
            request = (rng.randrange(GROUPS), arrived)
            builder.arrived(request, prefixes[request[0]] + array("q", [arrived + 10]))
            arrived += 1
            arrival += rng.expovariate(RATE)
        open_round(builder, clock, reward)
        while len(running) < CAPACITY and (request := propose(builder, len(running))) is not None:
            admit(builder, request)
            running.append((request, step + STEPS))
            rows[request[0]] += 1
        builder.close_round()
        step += 1
        batch, main = len(running), max(rows)
        if not batch:
            clock, reward = max(clock, arrival), None
            continue
        seconds = (1 + 0.02 * (main + foreign * (batch - main))) / 100 * (1 + rng.gauss(0, 0.03))
        clock += seconds
        reward = batch / seconds
        tokens += batch
    return tokens / clock


@cache
def without_learning(name, foreign, seed):
    return replay(make_policy(name), foreign, seed)


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("foreign", [1.5, 2.0])
def test_a_learner_makes_mixed_batches_homogeneous_where_that_pays(name, foreign):
    """In its first passes over three thousand requests it wins most of what an oracle wins."""
    always = without_learning("always-add", foreign, 0)
    oracle = without_learning("oracle", foreign, 0)
    assert oracle > 1.2 * always
    for seed in range(samples(3, 1)):
        policy = make_policy(name, seed=seed)
        learnt = mean(replay(policy, foreign, 10 * seed + i) for i in range(3))
        assert learnt > always + 0.7 * (oracle - always), f"seed {seed}"


@pytest.mark.parametrize("name", LEARNERS)
def test_a_learner_costs_nothing_where_mixing_is_free(name):
    ratios = []
    for seed in range(samples(2, 1)):
        policy = make_policy(name, seed=seed)
        for i in range(3):
            always = without_learning("always-add", 1.0, 10 * seed + i)
            ratios.append(replay(policy, 1.0, 10 * seed + i) / always)
    assert mean(ratios) > 0.995
    assert min(ratios) > 0.985
