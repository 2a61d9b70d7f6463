"""The planner: how long a plan takes, what each strategy moves, and how far `profit` is from the optimum.

No GPU needed::

    PYTHONPATH=kernels python benchmarks/bench_plan.py [--json plan.json] [--quick]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from feather_kernels.forest import Forest
from feather_kernels.pack import STRATEGIES
from feather_kernels.plan import Planner, make_plan
from feather_kernels.trees import PAT_TREES, parse_tree, random_forest, tree_forest

HEADS: dict[str, Any] = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
LEVELS = ((1,), (1, 64), (1, 8, 64), (1, 4, 16, 64), (1, 4, 8, 16, 64), (1, 2, 4, 8, 16, 64))  # of shared nodes
Row = dict[str, Any]


def batch(queries: int, levels: int, node_tokens: int = 128) -> Forest:
    """``queries`` tails below ``levels - 1`` shared levels; no more nodes than leave every node two requests."""
    shared = [min(nodes, queries // 2) for nodes in LEVELS[levels - 2]] if levels > 1 else []
    return tree_forest([*shared, queries], [node_tokens] * (len(shared) + 1))


def timed(planner: Planner, forest: Forest, repeats: int) -> tuple[float, float]:
    """Median and 99th percentile of one ``plan`` call, in us; the forest is in memory, its plan is not."""
    times = np.empty(repeats)
    for i in range(-20, repeats):
        fresh = Forest(forest.parent, forest.length, forest.request_node, forest.seq_len, forest.row_offset)
        start = time.perf_counter()
        planner.plan(fresh)
        times[i] = time.perf_counter() - start
    return float(np.median(times) * 1e6), float(np.percentile(times, 99) * 1e6)


def plan_times(repeats: int) -> list[Row]:
    rows = []
    planner = Planner(**HEADS, max_requests=1024)
    for queries in (64, 128, 256, 512, 1024):
        for levels in range(1, 7):
            median, p99 = timed(planner, batch(queries, levels), repeats)
            rows.append({"queries": queries, "levels": levels, "median_us": median, "p99_us": p99})
    return rows


def strategy_times(repeats: int) -> list[Row]:
    """512 queries in 6 levels by strategy, as the KV of every node grows."""
    rows = []
    for strategy in STRATEGIES:
        planner = Planner(**HEADS, max_requests=1024, strategy=strategy)
        for tokens in (32, 256, 2048, 16384):
            median, p99 = timed(planner, batch(512, 6, tokens), repeats)
            rows.append({"strategy": strategy, "kv": 6 * tokens, "median_us": median, "p99_us": p99})
    return rows


def tree_traffic() -> list[Row]:
    """Bytes of the model, all KV heads, on PAT's trees."""
    rows = []
    for name in PAT_TREES:
        forest = tree_forest(*parse_tree(name))
        plans = {strategy: make_plan(forest, strategy=strategy, **HEADS) for strategy in STRATEGIES}
        rows.append({"tree": name, **{strategy: plan.traffic.total for strategy, plan in plans.items()}})
    return rows


def gaps(forests: Sequence[Forest], profit_factor: float | None) -> Row:
    """How much more `profit` moves than the optimum, as a share of it."""
    gap = []
    for forest in forests:
        best = make_plan(forest, strategy="optimal", **HEADS).traffic.total
        gap.append(make_plan(forest, strategy="profit", profit_factor=profit_factor, **HEADS).traffic.total / best - 1)
    rule = "byte model" if profit_factor is None else f"{profit_factor:g} s >= L"
    return {"rule": rule, "forests": len(gap), "mean": float(np.mean(gap)), "max": float(np.max(gap))}


def optimality(count: int) -> list[Row]:
    rng = np.random.default_rng(0)
    trees = [tree_forest(*parse_tree(name)) for name in PAT_TREES]
    small = [random_forest(rng, int(rng.integers(2, 200)), max_node_tokens=256) for _ in range(count)]
    large = [random_forest(rng, int(rng.integers(2, 200)), max_node_tokens=4096) for _ in range(count)]
    kinds = {"PAT's 20 trees": trees, "random, nodes up to 256": small, "random, nodes up to 4096": large}
    return [{"set": kind, **gaps(some, factor)} for kind, some in kinds.items() for factor in (None, 4)]


def show(title: str, rows: list[Row]) -> None:
    """A table of rows with equal keys."""
    cells = [list(rows[0])] + [[_text(key, value) for key, value in row.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for line in cells:
        first, *rest = (
            text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *rest]))


def _text(key: str, value: Any) -> str:
    if key in STRATEGIES:
        return f"{value / 1e6:.1f}"
    if key in ("mean", "max"):
        return f"{value:.2%}"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write all figures here")
    parser.add_argument("--quick", action="store_true", help="few repeats, for a first look")
    options = parser.parse_args(arguments)
    repeats, count = (30, 20) if options.quick else (1000, 500)
    tables = {
        "plan_time": ("Plan time by queries and levels, strategy time, 128 tokens a node", plan_times(repeats)),
        "kv_length": ("Plan time by strategy and KV tokens a query: 512 queries, 6 levels", strategy_times(repeats)),
        "traffic": ("Traffic of the model on PAT's trees, MB a layer at 32/8 heads of 128", tree_traffic()),
        "gap": ("How far profit is from the optimum of the traffic model", optimality(count)),
    }
    for title, rows in tables.values():
        show(title, rows)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({key: rows for key, (_, rows) in tables.items()}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
