"""The replay's k-lpm baseline, on SGLang's own queue and prefix cache."""

import math
import random

import pytest
from harness import Server

from feather_sglang.adapter.scheduler.k_lpm import KLpm, interleaved

CACHED = {100: 64, 101: 48, 102: 40}  # first token of a group: tokens of its prefix that the cache holds
TWINS = range(103, 107)  # of each of these two wait, sharing 50 tokens that the cache does not hold


@pytest.fixture
def queue(tmp_path):
    """A scheduler on which 150 requests wait, more than lpm orders, and what each has in the cache, by age."""
    one = Server(tmp_path, "lpm")
    for group, length in CACHED.items():
        one.submit(f"cached {group}", [group] * length, max_new_tokens=1)
    one.drain()
    draw = random.Random(0)
    groups = [*TWINS, *TWINS, *(draw.choice([0, *CACHED]) for _ in range(142))]
    draw.shuffle(groups)
    matches, seen = {}, set()
    for number, group in enumerate(groups):
        rid = f"{number:03}"
        own = [200 + number] * 4
        one.submit(rid, [group] * (50 if group in TWINS else CACHED.get(group, 0)) + own)
        # A second twin comes after whoever has nothing in the cache.
        matches[rid] = -1 if group in seen and group in TWINS else CACHED.get(group, 0)
        seen.add(group)
    yield one.scheduler, matches
    one.close()


def oracle(matches, k, served=0):
    left, order = list(matches), []
    while left:
        age_or_match = (lambda rid: 0) if (served + len(order)) % k == 0 else matches.__getitem__
        order.append(max(left, key=age_or_match))  # of equals the oldest
        left.remove(order[-1])
    return order


@pytest.mark.parametrize("k", [1, 2, 4, 7, math.inf])
def test_every_kth_is_the_oldest_and_the_others_match_longest(queue, k):
    scheduler, matches = queue
    ordered = KLpm(scheduler.policy, k)
    served = 0
    for admitted in (0, 1, 6, 0):  # the queue stays as it was ordered
        ordered(scheduler.waiting_queue, scheduler.running_batch, processed_tokens=0)
        assert [req.rid for req in scheduler.waiting_queue] == oracle(matches, k, served)
        assert k > 1 or list(matches) == oracle(matches, k)
        for req in scheduler.waiting_queue[:admitted]:
            del matches[req.rid]
        del scheduler.waiting_queue[:admitted]
        served += admitted


def test_k_is_four_and_without_a_bound_all_but_the_oldest_are_as_under_lpm(queue):
    scheduler, matches = queue
    KLpm(scheduler.policy)(scheduler.waiting_queue)
    assert [req.rid for req in scheduler.waiting_queue] == oracle(matches, 4)
    few = sorted(scheduler.waiting_queue, key=lambda req: req.rid)[:120]
    lpm, ours = list(few), list(reversed(few))
    scheduler.policy.calc_priority(lpm)
    KLpm(scheduler.policy, math.inf)(ours)
    assert ours[0] is few[0]
    assert ours[1:] == [req for req in lpm if req is not few[0]]


def test_a_queue_of_none_or_one():
    assert interleaved([], 4) == [] and interleaved([0], 4) == [0]
