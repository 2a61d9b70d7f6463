"""Assignments of units to processors and their makespan: list scheduling, dealing, PackInfer's groups, the optimum.

Shares no code with the product. ``python tests/oracles/makespan.py`` prints how far each is from the least.
"""

import random
from statistics import mean


def listed(lengths, processors):
    """Loads when every unit, in the order given, goes to the least loaded processor: what asking queues do."""
    loads = [0] * processors
    for length in lengths:
        loads[loads.index(min(loads))] += length
    return loads


def dealt(lengths, processors):
    """Loads when units go to processors in turn."""
    return [sum(lengths[first::processors]) for first in range(processors)]


def paper_groups(lengths, capacity):
    """PackInfer's algorithm 1, part 1: the groups of effective lengths, longest first onto the least loaded group.

    One that would hold more than the capacity then is not feasible: its request has a group of its own.
    """
    groups = [[] for _ in range(-(-sum(lengths) // capacity))]
    for length in sorted(lengths, reverse=True):
        least = min(groups, key=sum)
        if sum(least) + length <= capacity:
            least.append(length)
        else:
            groups.append([length])
    return groups


def least_makespan(lengths, processors):
    """The least largest load of all assignments, by branch and bound."""
    lengths = sorted(lengths, reverse=True)
    best = max(listed(lengths, processors), default=0)
    floor = max(-(-sum(lengths) // processors), lengths[0] if lengths else 0)

    def place(index, loads):
        nonlocal best
        if index == len(lengths):
            best = max(loads)
            return
        for load in set(loads):  # equal loads are alike
            if best == floor:
                return
            if load + lengths[index] < best:
                at = loads.index(load)
                place(index + 1, [*loads[:at], load + lengths[index], *loads[at + 1 :]])

    place(0, [0] * processors)
    return best


def bound(processors):
    """Graham's, of longest first: no larger load over the least one."""
    return 4 / 3 - 1 / (3 * processors)


def draw(kind, rng):
    """Up to ten lengths, longest first: unlike ones, the nodes of a small tree, or equal ones."""
    if kind == "log-normal":
        lengths = [max(1, round(rng.lognormvariate(6, 1.2))) for _ in range(rng.randint(2, 10))]
    elif kind == "trees":
        counts = [rng.randint(1, 2), rng.randint(2, 3), rng.randint(2, 5)]
        lengths = [tokens for count in counts for tokens in [rng.randint(16, 1024)] * count]
    else:
        lengths = [rng.randint(1, 5000)] * rng.randint(2, 10)
    return sorted(lengths, reverse=True)


def main(cases=3000):
    rng = random.Random(0)
    print(f"{cases} cases a kind: up to 10 units on 4 processors, largest load over the least")
    for kind in ("log-normal", "trees", "equal"):
        drawn = [draw(kind, rng) for _ in range(cases)]
        least = [least_makespan(lengths, 4) for lengths in drawn]
        for name, rule in (("longest first, to whoever is free", listed), ("longest first, in turn", dealt)):
            over = [max(rule(lengths, 4)) / best - 1 for lengths, best in zip(drawn, least, strict=True)]
            print(f"{kind:12} {name:36} mean {mean(over):6.2%}  worst {max(over):6.1%}")


if __name__ == "__main__":
    main()
