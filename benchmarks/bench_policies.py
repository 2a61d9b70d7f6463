"""Time of a stop policy's decision on the scheduler's hot path.

    python benchmarks/bench_policies.py [--json FILE]

Times ``decide`` over 4,096 prepared states (a quarter of them free additions), ``observe`` for the decisions of a
round of 16, and a policy file's round trip, for each policy after 20,000 decisions of training; best of 7 repeats.

One core of an AMD EPYC, Python 3.11:

policy        decide us  observe us   save us   load us  file KiB
heuristic          0.13        0.07       402        26       0.2
bandit             0.73        8.75      1475       866      21.5
qlearning          0.65        3.27      1736      1118      29.5
always-add         0.05        0.07       474        18       0.1
oracle             0.32        0.07       472        19       0.1
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from feather_sglang.scheduling.policies import POLICIES, PolicyState, StopPolicy, make_policy

COUNT, ROUND, REPEATS = 4096, 16, 7


def make_states(seed: int = 0) -> list[PolicyState]:
    """States as a busy server shows them, lossy but for a quarter."""
    rng = random.Random(seed)
    return [
        PolicyState(rng.randint(1, 512), rng.choice((0, 1, 20, 78)), rng.randint(0, 300), (1, (1,)))
        for _ in range(COUNT)
    ]


def best(run: Callable[[], None], calls: int) -> float:
    """Least time per call over the repeats, microseconds."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) / calls * 1e6


def measure(policy: StopPolicy, states: list[PolicyState]) -> dict[str, float]:
    """Figures of one policy, microseconds (file: KiB)."""
    rng = random.Random(1)
    for i in range(20_000):
        policy.decide(states[i % COUNT])
        if i % ROUND == 0:
            policy.observe(rng.uniform(900.0, 1100.0))

    def decide() -> None:
        for state in states:
            policy.decide(state)

    observing = 0.0

    def rounds() -> None:
        nonlocal observing
        spent = 0.0
        for i in range(0, COUNT, ROUND):
            for state in states[i : i + ROUND]:
                policy.decide(state)
            start = time.perf_counter()
            policy.observe(1000.0)
            spent += time.perf_counter() - start
        observing = min(observing or spent, spent)

    decided = best(decide, COUNT)
    best(rounds, COUNT)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.json"
        save = best(lambda: policy.save(path), 1)
        load = best(lambda: policy.load(path), 1)
        size = path.stat().st_size / 1024
    observed = observing / (COUNT / ROUND) * 1e6
    return {"decide_us": decided, "observe_us": observed, "save_us": save, "load_us": load, "file_kib": size}


def main() -> None:
    """Print the table; write it as JSON if asked."""
    parser = argparse.ArgumentParser(description="Time the stop policies.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    args = parser.parse_args()
    states = make_states()
    figures = {name: measure(make_policy(name, seed=1), states) for name in POLICIES}
    print(f"{'policy':<12}{'decide us':>11}{'observe us':>12}{'save us':>10}{'load us':>10}{'file KiB':>10}")
    for name, row in figures.items():
        print(
            f"{name:<12}{row['decide_us']:>11.2f}{row['observe_us']:>12.2f}"
            f"{row['save_us']:>10.0f}{row['load_us']:>10.0f}{row['file_kib']:>10.1f}"
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
