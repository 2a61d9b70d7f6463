"""The planner: time of a plan, bytes that strategies move, distance of `profit` from the optimum, and by modelled time
a comparison of splits and the loss while a plan is kept.

No GPU needed::

    PYTHONPATH=kernels python benchmarks/bench_plan.py [--json plan.json] [--quick]
    PYTHONPATH=kernels python benchmarks/bench_plan.py --tables splits regrouping [--traces FOLDER]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from plan_batches import batch_sets
from plan_model import drift, model

from feather_kernels.forest import Forest
from feather_kernels.pack import STRATEGIES
from feather_kernels.plan import PackPlan, Planner, make_plan
from feather_kernels.trees import PAT_TREES, named_forest, parse_tree, random_forest, tree_forest

HEADS: dict[str, Any] = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
LEVELS = ((1,), (1, 64), (1, 8, 64), (1, 4, 16, 64), (1, 4, 8, 16, 64), (1, 2, 4, 8, 16, 64))  # of shared nodes
MEASURED = Path(__file__).parents[1] / "docs" / "measured" / "decode_h200_serving.json"
Row = dict[str, Any]
TITLES = {
    "plan_time": "Plan time by queries and levels, strategy time, 128 tokens a node",
    "kv_length": "Plan time by strategy and KV tokens a query: 512 queries, 6 levels",
    "traffic": "Traffic of the model on PAT's trees, MB a layer at 32/8 heads of 128",
    "gap": "How far profit is from the optimum of the traffic model",
    "splits": "Modelled time over that of rounds (plan_model.py), and us to plan the set's largest batch.\n"
    "balanced and mean leave unlike tails to single warps, which cost more than the model knows",
    "agreement": "The model beside measured times of rounds and balanced (docs/measured/decode_h200_serving.json)",
    "regrouping": "Steps that a plan is kept, medians, and how much longer it takes meanwhile than a new one",
}


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


CAPACITIES = (1024, 2048, 4096, 8192, 16384)  # token-heads
REGROUPED_AT = 8192  # PackInfer's example of C
MOST_STEPS = 1000  # that a plan is followed for
POINTS = 9  # at which it is looked at


def split_times(sets: dict[str, list[Forest]], repeats: int) -> list[Row]:
    """Modelled time of each split over that of `rounds`.

    ``rounds, or groups`` cuts at the capacity only where a processor's share of the batch exceeds it.
    """
    rows = []
    for kind, forests in sets.items():
        rounds = [make_plan(forest, **HEADS) for forest in forests]
        shares = np.array([plan.tokens_read * plan.options.num_kv_heads / plan.options.n_sm for plan in rounds])
        modelled = list(map(model, rounds))
        times = np.array([one.us for one in modelled])
        largest = max(forests, key=lambda forest: forest.n_requests)
        splits: dict[str, Row] = {"rounds": {}, "balanced": {"split": "balanced"}, "mean": {"split": "mean"}}
        splits |= {f"groups {capacity}": {"split": "groups", "group_capacity": capacity} for capacity in CAPACITIES}
        for name, split in splits.items():
            over = np.array([model(make_plan(forest, **split, **HEADS)).us for forest in forests]) / times
            plan_us = timed(Planner(**HEADS, max_requests=1024, **split), largest, repeats)[0]
            rows.append({"set": kind, "split": name, **spread_of(over), "plan_us": plan_us})
            if capacity := split.get("group_capacity"):
                either = np.where(shares > capacity, over, 1.0)
                rows.append({"set": kind, "split": f"rounds, or {name}", **spread_of(either), "plan_us": plan_us})
        even = np.array([one.even_us for one in modelled]) / times
        rows.append({"set": kind, "split": "rounds, spread evenly", **spread_of(even), "plan_us": "-"})
    return rows


def agreement() -> list[Row]:
    """Modelled over measured us at the median, and how well they agree in what `balanced` takes over `rounds`."""
    kinds = {"rounds": "feather", "balanced": "feather-balanced"}
    logs = []
    for record in json.loads(MEASURED.read_text())["records"]:
        query, kv = map(int, record["heads"].split("/"))
        heads = {"num_qo_heads": query, "num_kv_heads": kv, "head_dim": 128}
        plans = {split: make_plan(named_forest(record["name"]), split=split, **heads) for split in kinds}
        measured = {split: record["systems"][system]["warm_us"] for split, system in kinds.items()}
        logs.append([np.log([model(plans[split]).us, measured[split]]) for split in kinds])
    rounds, balanced = np.moveaxis(np.array(logs), 1, 0)
    share = float(np.exp(np.median(rounds[:, 0] - rounds[:, 1])))
    together = float(np.corrcoef((balanced - rounds).T)[0, 1])
    return [{"rows": len(logs), "modelled / measured": f"{share:.2f}", "correlation of logs": f"{together:.2f}"}]


def spread_of(over: Any) -> Row:
    """Geometric mean, least and largest."""
    return {"over rounds": float(np.exp(np.mean(np.log(over)))), "least": float(over.min()), "most": float(over.max())}


def kept_steps(plan: PackPlan) -> int:
    """Steps that the plan holds for by `PackPlan.valid_for`, when every request grows by a token in each."""
    lens = plan.forest.seq_len
    return bisect_right(range(1, MOST_STEPS + 1), False, key=lambda step: not plan.valid_for(lens + step)[0])


def loss(forest: Forest, plan: PackPlan, steps: int) -> float:
    """How much longer the plan takes than a new one, in the mean over so many steps."""
    lost = []
    for step in sorted(set(np.linspace(0, steps, POINTS).astype(int).tolist())):
        grown = forest.with_seq_len(forest.seq_len + step)
        lost.append(model(plan, grown.seq_len).us / model(make_plan(grown, **HEADS)).us - 1)
    return float(np.mean(lost))


def regrouping(sets: dict[str, list[Forest]]) -> list[Row]:
    """What is lost while a plan is kept, by our rule and by PackInfer's: until t * dL >= C / 2 (equation 4)."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for kind, forests in sets.items():
        for forest in forests:
            plan = make_plan(forest, **HEADS)
            kept = kept_steps(plan)
            by_drift = min(kept, -(-REGROUPED_AT // (2 * max(1, drift(plan)))))
            row = kept, by_drift, loss(forest, plan, kept), loss(forest, plan, by_drift)
            found.setdefault(kind, []).append(row)
    found["all"] = [row for some in found.values() for row in some]
    rows = []
    for kind, some in found.items():
        kept_at, drift_at, ours, theirs = map(np.array, zip(*some, strict=True))
        rows.append(
            {"set": kind, "kept": float(np.median(kept_at)), "by eq. 4": float(np.median(drift_at))}
            | {"mean": float(ours.mean()), "max": float(ours.max()), "mean by eq. 4": float(theirs.mean())}
        )
    return rows


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
    if key in ("mean", "max", "mean by eq. 4"):
        return f"{value:.2%}"
    if key in ("over rounds", "least", "most"):
        return f"{value:.3f}"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write all figures here")
    parser.add_argument("--quick", action="store_true", help="few repeats, for a first look")
    parser.add_argument("--tables", nargs="+", default=list(TITLES), choices=list(TITLES), help="(default: all)")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="holds the two public traces")
    options = parser.parse_args(arguments)
    repeats, count = (30, 20) if options.quick else (1000, 500)
    tables: dict[str, Callable[[], list[Row]]] = {
        "plan_time": lambda: plan_times(repeats),
        "kv_length": lambda: strategy_times(repeats),
        "traffic": tree_traffic,
        "gap": lambda: optimality(count),
        "splits": lambda: split_times(batch_sets(options.traces), repeats),
        "agreement": agreement,
        "regrouping": lambda: regrouping(batch_sets(options.traces)),
    }
    made = {name: tables[name]() for name in options.tables}
    for name, rows in made.items():
        show(TITLES[name], rows)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(made, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
