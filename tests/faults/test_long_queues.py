"""A hundred thousand waiting requests: the time of a round, and the memory of each request."""

from __future__ import annotations

import time
import tracemalloc
from array import array

from feather_sglang.scheduling.admission.admission import Admission
from feather_sglang.scheduling.admission.deferrals import PrefixBatching
from feather_sglang.scheduling.admission.gate import PrefillDelay
from feather_sglang.scheduling.admission.types import Batch
from feather_sglang.scheduling.meters.readings import Readings
from feather_sglang.scheduling.policies import make_policy
from feather_sglang.scheduling.tree.cht import ChunkedHashTree

MANY, FEW, ROUNDS = 100_000, 1_000, 60


def queue(requests: int) -> Admission:
    """So many requests of twenty prefixes, each with a few tokens of its own."""
    admission = Admission(
        ChunkedHashTree(64, seed=1), make_policy("bandit", seed=0), prefix_batching=PrefixBatching(100_000),
        prefill_delay=PrefillDelay(0.1, 1 / 3),
    )  # fmt: skip
    prefixes = [[group] * 128 for group in range(20)]
    for number in range(requests):
        admission.arrived(number, array("q", [*prefixes[number % 20], number]), most_tokens=8)
    return admission


def seconds_per_round(admission: Admission) -> float:
    """Of rounds in each of which four of a batch of 64 finish and as many join."""
    running: list[int] = []

    def one_round(now: float) -> None:
        admission.open_round(Readings(now, 100.0, 1e-4, 0.01))
        while len(running) < 64 and (rid := admission.propose(Batch(len(running), True))) is not None:
            admission.admitted(rid, 128)
            running.append(rid)
        admission.close_round()
        admission.row_order(running)
        for rid in running[:4]:
            admission.finished(rid)
        del running[:4]

    one_round(0.0)
    begun = time.process_time()
    for number in range(1, ROUNDS + 1):
        one_round(number * 0.03)
    return (time.process_time() - begun) / ROUNDS


def test_a_round_costs_little_more_than_with_a_thousand():
    few, many = (min(seconds_per_round(queue(count)) for _ in range(turns)) for count, turns in ((FEW, 3), (MANY, 1)))
    print(f"seconds a round: {few:.6f} with {FEW} waiting, {many:.6f} with {MANY}")
    assert many < 4 * few + 1e-3


def test_a_request_that_waits_takes_a_kilobyte_and_a_second_burst_no_more_than_the_first():
    requests, held = 4000, []
    tracemalloc.start()
    try:
        admission = queue(0)
        for burst in range(3):
            for number in range(requests):
                admission.arrived((burst, number), array("q", [*[number % 20] * 128, number]), most_tokens=8)
            held.append(tracemalloc.get_traced_memory()[0])
            for number in range(requests):
                admission.aborted((burst, number))
            admission.open_round(Readings(burst * 1000.0))
            admission.close_round()
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    print(f"bytes a request: {held[0] / requests:.0f}; left of all: {left / requests:.0f}")
    assert held[0] / requests < 2000 and left < 0.6 * held[0]
    assert max(held) < 1.05 * held[0]
    assert len(admission.tree) == 0 and not admission.state.fairness.arrivals
