"""Routers, and replicas in lock-step with one: here each serves its requests one after the other."""

from __future__ import annotations

import heapq
import random
from multiprocessing import Pipe
from threading import Thread
from types import SimpleNamespace

import pytest

from feather_sglang.replay.replicas import Replica, RoutedArrivals, route
from feather_sglang.replay.routers import BALANCE_ABS, BALANCE_REL, CACHE_THRESHOLD, ROUTERS
from feather_sglang.replay.traces import Trace, TraceRequest

BLOCK = 100


def request(number, *blocks, tokens=None, due=0.0, after=None, think=0.0):
    return TraceRequest(number, due, tokens or BLOCK * len(blocks), 1, blocks, after, think)


@pytest.fixture(params=sorted(ROUTERS))
def router_name(request):
    return request.param


def router(name):
    return ROUTERS[name](Trace("t", BLOCK, []))


# Choices -----------------------------------------------------------------------------------------------------------


def test_round_robin_takes_each_in_turn():
    one = router("round-robin")
    assert [one.choose(request(0, 7), [9, 0, 5]) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_shortest_queue_takes_the_least_loaded_and_the_first_of_several():
    one = router("shortest-queue")
    assert [one.choose(request(0, 7), loads) for loads in ([3, 1, 2], [2, 1, 1], [0, 0, 0])] == [1, 1, 0]


def test_cache_aware_sends_a_prefix_where_it_was_first():
    one = router("cache-aware")
    assert one.choose(request(0, 1, 2), [0, 0, 0]) == 0
    assert one.choose(request(1, 3, 4), [1, 0, 0]) == 1
    assert one.choose(request(2, 5, 6), [1, 1, 0]) == 2
    assert [one.choose(request(3, first, 9), [5, 5, 0]) for first in (1, 3, 5)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("tokens", "goes"), [(int(BLOCK / CACHE_THRESHOLD) - 1, 0), (int(BLOCK / CACHE_THRESHOLD) + 1, 1)]
)
def test_cache_aware_needs_a_share_of_the_prompt(tokens, goes):
    one = router("cache-aware")
    assert one.choose(request(0, 1), [0, 0]) == 0
    blocks = range(10, 10 - (-tokens // BLOCK) - 1)
    assert one.choose(request(1, 1, *blocks, tokens=tokens), [1, 0]) == goes


def test_cache_aware_counts_what_a_shorter_prompt_left_of_a_block():
    one = router("cache-aware")
    one.choose(request(0, 1, tokens=20), [0, 0])
    assert one.choose(request(1, 1, tokens=90), [1, 0]) == 1  # 20 of its 90 tokens
    assert one.choose(request(2, 1, tokens=60), [1, 0]) == 0  # 20 of 60


def test_cache_aware_goes_to_the_shortest_queue_where_both_bounds_of_balance_are_passed():
    least = int(BALANCE_ABS / (BALANCE_REL - 1))  # from there on the other bound is the wider one
    for loads, goes in (
        ([BALANCE_ABS, 0], 0),
        ([BALANCE_ABS + 1, 0], 1),
        ([2 * least + BALANCE_ABS + 1, 2 * least], 0),
        ([int(2 * least * BALANCE_REL) + 1, 2 * least], 1),
    ):
        one = router("cache-aware")
        one.choose(request(0, 1, 2), [0, 0])
        assert one.choose(request(1, 1, 3), loads) == goes, loads


def test_cache_aware_keeps_to_the_first_also_after_balancing():
    one = router("cache-aware")
    one.choose(request(0, 1, 2), [0, 0])
    one.choose(request(1, 1, 3), [BALANCE_ABS + 1, 0])  # replica 1 has block 1 as well, and block 3 alone
    assert one.choose(request(2, 1, 4), [1, 0]) == 0
    assert one.choose(request(3, 1, 3, 5), [0, 1]) == 1


# Lock-step ---------------------------------------------------------------------------------------------------------


def service(one):
    return one.input_length / 1000


def replica(trace, link, served):
    """A server that answers its requests one after the other, and notes when each was due and when it ended."""
    arrivals, queue, now = RoutedArrivals(trace, link), [], 0.0
    while not arrivals.over or queue:
        queue += arrivals.until(now)
        if queue:
            due, one = queue.pop(0)
            now += service(one)
            served[one.request_id] = (due, now)
            arrivals.ended(one.request_id, now)
        elif (moment := arrivals.before(float("inf"))) is not None:
            now = max(now, moment)
    link.send("done")


def served_in_lock_step(name, trace, count):
    served = [{} for _ in range(count)]
    links = [Pipe() for _ in range(count)]
    threads = [Thread(target=replica, args=(trace, there, one)) for (_, there), one in zip(links, served, strict=True)]
    for thread in threads:
        thread.start()
    route(SimpleNamespace(trace=trace, router=name), [Replica(here) for here, _ in links], lambda done: None)
    for thread in threads:
        thread.join()
    return served


def served_event_by_event(name, trace, count):
    """The same by one list of events; of two at the same time, an end is before an arrival."""
    one_router, served, loads, free = ROUTERS[name](trace), [{} for _ in range(count)], [0] * count, [0.0] * count
    events = [(r.arrival_s, 1, r.request_id, None) for r in trace.requests if r.after is None]
    heapq.heapify(events)
    while events:
        at, arrives, number, place = heapq.heappop(events)
        one = trace.requests[number]
        if not arrives:
            loads[place] -= 1
            for later in trace.requests:
                if later.after == number:
                    heapq.heappush(events, (at + later.think_s, 1, later.request_id, None))
            continue
        place = one_router.choose(one, loads)
        loads[place] += 1
        free[place] = max(free[place], at) + service(one)
        served[place][number] = (at, free[place])
        heapq.heappush(events, (free[place], 0, number, place))
    return served


def traffic(seed, talks, count=60):
    draw = random.Random(seed)
    requests, due = [], 0.0
    for number in range(count):
        due += draw.expovariate(8)
        after = draw.randrange(number) if talks and number and draw.random() < 0.6 else None
        think = draw.choice((0.0, 0.01, 2.0)) if after is not None else 0.0
        blocks = (draw.randrange(4), *range(100 * number + 10, 100 * number + 10 + draw.randrange(3)))
        requests.append(
            request(number, *blocks, due=due, after=after, think=think, tokens=BLOCK * len(blocks) - number)
        )
    return Trace("t", BLOCK, requests)


@pytest.mark.parametrize("talks", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_lock_step_serves_as_one_list_of_events_does(router_name, talks, count):
    for seed in range(6):
        trace = traffic(seed, talks)
        served = served_in_lock_step(router_name, trace, count)
        assert served == served_event_by_event(router_name, trace, count)
        assert sum(map(len, served)) == len(trace.requests)
