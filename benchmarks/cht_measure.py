"""Cost of an operation and of a scheduling round of the Chunked Hash Tree, beside SGLang's policies."""

from __future__ import annotations

import gc
import random
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from time import perf_counter_ns
from typing import Any, Protocol, TypeVar

from feather_sglang.scheduling.tree.cht import ChunkedHashTree

# Table 5.1 of the paper: 5,000 requests of 5,000 tokens, in C++.
PAPER_CALLS = {"insert": 5_000, "add_to_batch": 5_000, "finish": 5_000, "find_best": 26_405}
PAPER_US = {"insert": 153.714, "add_to_batch": 11.143, "finish": 38.952, "find_best": 6.641}
LOOKUPS_PER_REQUEST = PAPER_CALLS["find_best"] / PAPER_CALLS["insert"]
OWN_TOKENS = 20  # unique tokens at the end of every prompt

T = TypeVar("T")


class StockRounds(Protocol):
    """The part of ``stock_policies.StockPolicies`` that is measured here."""

    def run_round(self, policy: str) -> Any:
        """Hold one admission round."""
        ...


class Laps:
    """Times single calls, by name, in nanoseconds."""

    def __init__(self) -> None:
        self.times: dict[str, list[int]] = defaultdict(list)

    def __call__(self, name: str, function: Callable[..., T], *arguments: object) -> T:
        """Call a function, note its time, and return its result."""
        start = perf_counter_ns()
        result = function(*arguments)
        self.times[name].append(perf_counter_ns() - start)
        return result

    def median_us(self) -> dict[str, float]:
        """Return the median time of each name, microseconds."""
        return {name: median(times) / 1e3 for name, times in self.times.items()}


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Keep collections of other people's objects out of the times."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Prompts:
    """Prompts of `tokens` tokens in `groups` prefix groups; all but the last 20 tokens are a group's own prefix."""

    def __init__(self, tokens: int = 5_000, groups: int = 5, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.prefixes = [self._draw(max(0, tokens - OWN_TOKENS)) for _ in range(groups)]
        self._own = min(tokens, OWN_TOKENS)
        self._made = 0

    def make(self) -> array[int]:
        """Return the next prompt, an ``array("q")`` as SGLang holds it; groups take turns."""
        self._made += 1
        return self.prefixes[self._made % len(self.prefixes)] + self._draw(self._own)

    def _draw(self, tokens: int) -> array[int]:
        return array("q", self._random.choices(range(32_000), k=tokens))


class MixedPrompts(Prompts):
    """Two levels and many lengths: 20 groups of 640 tokens, 20 subgroups of 640 more in each, 1 to 2,000 own tokens."""

    def __init__(self) -> None:
        super().__init__(tokens=640 + OWN_TOKENS, groups=20)
        self._seconds = [[self._draw(640) for _ in range(20)] for _ in self.prefixes]

    def make(self) -> array[int]:
        """Return the next prompt, of a random subgroup and length."""
        group, sub = self._random.randrange(20), self._random.randrange(20)
        return self.prefixes[group] + self._seconds[group][sub] + self._draw(self._random.randint(1, 2_000))


def measure_calls(requests: int = PAPER_CALLS["insert"], tokens: int = 5_000, batch: int = 256) -> dict[str, Any]:
    """Measure the workload of table 5.1: the same calls, as many of each.

    Requests arrive twice as fast as they are admitted, so the queue grows to half of them and then drains. Every change
    is followed by a `find_best`, the dearest moment for it; the rest of the paper's lookups repeat the last one.

    Returns
    -------
    dict
        Per operation ``calls``, ``mean_us`` (the paper's statistic) and ``median_us``; ``find_best`` also apart as
        ``fresh`` (first after a change) and ``repeated``.
    """
    prompts = Prompts(tokens)
    arrivals = deque((number, prompts.make()) for number in range(requests))
    repeats = round(requests * LOOKUPS_PER_REQUEST) - 3 * requests
    tree, laps, running, admitted = ChunkedHashTree(), Laps(), deque[int](), 0

    def change(name: str, *arguments: object) -> None:
        laps(name, getattr(tree, name), *arguments)
        laps("fresh", tree.find_best)

    with garbage_collection_off():
        while arrivals or tree.waiting:
            for _ in range(min(2, len(arrivals))):
                change("insert", *arrivals.popleft())
            best = tree.find_best()
            assert best is not None
            change("add_to_batch", best.request_id)
            running.append(best.request_id)
            if len(running) > batch:
                change("finish", running.popleft())
            admitted += 1
            for _ in range(admitted * repeats // requests - (admitted - 1) * repeats // requests):
                laps("repeated", tree.find_best)
        while running:
            change("finish", running.popleft())
    laps.times["find_best"] = laps.times["fresh"] + laps.times["repeated"]
    return {
        name: {"calls": len(times), "mean_us": fmean(times) / 1e3, "median_us": median(times) / 1e3}
        for name, times in laps.times.items()
    }


class SteadyQueue:
    """A tree in which a fixed number of requests wait while others come, run and go; all groups run throughout."""

    def __init__(self, waiting: int, prompts: Prompts, active: int = 64) -> None:
        self.tree, self._prompts, self._next = ChunkedHashTree(), prompts, 0
        self._running = deque(range(1, active + 1))
        for _ in range(active + waiting):
            self.tree.insert(self._id(), prompts.make())
        for number in self._running:
            self.tree.add_to_batch(number)

    def _id(self) -> int:
        self._next += 1
        return self._next

    def every_operation(self, laps: Laps) -> None:
        """Time each operation once or twice; as many wait and run after it as before."""
        tree: Any = self.tree
        for _ in range(2):
            laps("insert", tree.insert, self._id(), self._prompts.make())
        best = laps("find_best", tree.find_best)
        laps("add_to_batch", tree.add_to_batch, best.request_id)
        self._running.append(best.request_id)
        laps("finish", tree.finish, self._running.popleft())
        best = laps("find_best", tree.find_best)
        laps("hold", tree.hold, best.request_id)
        laps("requeue", tree.requeue, best.request_id)
        oldest = laps("oldest", tree.oldest)
        laps("candidate", tree.candidate, oldest)
        laps("missing_count", tree.missing_count, oldest)
        laps("remove", tree.remove, oldest)

    def scheduling_round(self, laps: Laps) -> None:
        """Time one round: a request comes (apart), the best is admitted, the next is looked at, one finishes."""
        laps("insert", self.tree.insert, self._id(), self._prompts.make())
        laps("decide", self._decide)

    def _decide(self) -> None:
        best: Any = self.tree.find_best()
        self.tree.add_to_batch(best.request_id)
        self._running.append(best.request_id)
        self.tree.find_best()
        self.tree.finish(self._running.popleft())


def measure_scaling(
    sizes: Sequence[int] = (100, 1_000, 10_000), prompts: type[Prompts] = Prompts, blocks: int = 15, cycles: int = 1_000
) -> dict[str, dict[str, float]]:
    """Measure every operation with `sizes` requests waiting, in alternating blocks of many cycles.

    Returns
    -------
    dict
        Per operation: its median time in us for each size (by the size as a string), and ``ratio``, the median over
        the blocks of the last size's median time over the first's. Two blocks compared ran next to each other.
    """
    queues = {size: SteadyQueue(size, prompts()) for size in sizes}
    measured: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    with garbage_collection_off():
        for block in range(blocks + 1):
            for size in sizes if block % 2 else reversed(sizes):
                laps = Laps()
                for _ in range(cycles):
                    queues[size].every_operation(laps)
                if block:  # the first block warms up
                    measured[size].append(laps.median_us())
    result = {}
    for name in measured[sizes[0]][0]:
        times = {size: [block[name] for block in measured[size]] for size in sizes}
        result[name] = {str(size): median(times[size]) for size in sizes}
        ratios = [last / first for first, last in zip(times[sizes[0]], times[sizes[-1]], strict=True)]
        result[name]["ratio"] = median(ratios)
    return result


def measure_rounds(
    tokens: int,
    waiting: int = 2_000,
    repeats: int = 7,
    stock: Callable[[Sequence[array[int]], Sequence[array[int]]], StockRounds] | None = None,
    policies: Sequence[str] = (),
) -> dict[str, float]:
    """Measure a scheduling round with `waiting` requests of `tokens` tokens, feather's and the stock policies' in turn.

    A round of a stock policy is one `calc_priority` over the queue. A round of feather is a lookup, an admission, the
    lookup that ends the round, and a finish. Each request pays one insertion; it is spread over 5.281 rounds, the
    lookups per request of table 5.1 (``feather_us``), or charged to one (``feather_worst_us``), as where every round
    sees one arrival.

    Returns
    -------
    dict
        Medians: ``insert_us``, ``decide_us``, ``feather_us``, ``feather_worst_us``. And one ``<policy>_us`` each, the
        *least* of the repeats: other work on the machine falls into a round of 100 ms, hardly ever into one of 10 us.
    """
    prompts = Prompts(tokens)
    queue = SteadyQueue(waiting, prompts)
    peers = stock(prompts.prefixes, [prompts.make() for _ in range(waiting)]) if stock else None
    measured: dict[str, list[float]] = defaultdict(list)
    with garbage_collection_off():
        for repeat in range(repeats + 1):
            laps = Laps()
            for _ in range(100):
                queue.scheduling_round(laps)
            times = {f"{name}_us": value for name, value in laps.median_us().items()}
            if peers is not None:
                times.update({f"{policy}_us": peers.run_round(policy).seconds * 1e6 for policy in policies})
            if repeat:  # the first warms up
                for name, value in times.items():
                    measured[name].append(value)
    stock_times = {f"{policy}_us" for policy in policies}
    result = {name: (min if name in stock_times else median)(values) for name, values in measured.items()}
    result["feather_us"] = result["decide_us"] + result["insert_us"] / LOOKUPS_PER_REQUEST
    result["feather_worst_us"] = result["decide_us"] + result["insert_us"]
    return result
