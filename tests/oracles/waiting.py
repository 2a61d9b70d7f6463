"""Workers that take units of work in order, some of which wait for the results of others: does all work get done?

Shares no code and no data structure with the product.
"""

from collections import deque
from typing import NamedTuple


class Unit(NamedTuple):
    gives: frozenset  # results, of any kind
    wants: frozenset


def stuck(queues, first_queues, hands, rng, dealt=()):
    """Units that are never done, of those in `queues`; none if every worker comes to its end.

    Parameters
    ----------
    queues : list of lists of Unit
        Served one after the other, each from its start.
    first_queues : list of int
        Of each worker: the queue that it begins with.
    hands : list of int
        Of each worker: how many units it may take before it has done the first of them.
    rng : numpy.random.Generator
        Says who acts next, each at a speed of his own.
    dealt : collection of int
        Queues whose units are dealt out in turn to the workers that do not begin behind them; there must be one.
    """
    left = []
    for index, queue in enumerate(queues):
        left.append([deque() if index in dealt else deque(queue)] * len(hands))
        takers = [worker for worker, first in enumerate(first_queues) if first <= index and index in dealt]
        for turn, worker in enumerate(takers):
            left[index][worker] = deque(queue[turn :: len(takers)])
    held = [deque() for _ in hands]
    place, given = list(first_queues), set()
    speed = rng.exponential(size=len(hands)) + 0.01
    while True:
        able = []
        for worker, hand in enumerate(held):
            while place[worker] < len(left) and not left[place[worker]][worker]:
                place[worker] += 1
            if place[worker] < len(left) and len(hand) < hands[worker]:
                able.append((worker, True))
            if hand and hand[0].wants <= given:
                able.append((worker, False))
        if not able:
            waiting = sum(sum(map(len, {id(some): some for some in queue}.values())) for queue in left)
            return waiting + sum(map(len, held))
        weight = speed[[worker for worker, _ in able]]
        worker, takes = able[rng.choice(len(able), p=weight / weight.sum())]
        if takes:
            held[worker].append(left[place[worker]][worker].popleft())
        else:
            given |= held[worker].popleft().gives
