"""Measure whether copying scattered KV into one contiguous buffer pays (PackInfer 3.2).

    PYTHONPATH=kernels python benchmarks/bench_kv_layout.py --json layout.json
    PYTHONPATH=kernels python benchmarks/bench_kv_layout.py --from layout.json

Decode attention of one layer with the batch's pages in order, prefixes first (``contiguous``), and at random places of
a layer's pool (``scattered``), back to back and with L2 flushed; all take turns. The copy that a consolidation makes is
timed by PyTorch's ``index_select``, and at best takes what the bytes need at the rate of a large copy. It pays after as
many decode steps as its time is times what a step gains, which is that of the flushed runs, as other layers come
between. Bandwidths are of bytes read and bytes written, of gathers of the whole pool in a random order of its pages.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_decode_kernel import CHECKED, TOLERANCE, prepare, write
from decode_cases import Case, Heads, grid, parse_heads
from finished import read_finished

from feather_kernels.errors import PlanError
from feather_kernels.trees import PAT_TREES, forest_table, named_forest

# PAT's, and tails of unlike length that share nothing.
BATCHES = (*PAT_TREES, "16_100~10000", "64_500~4000", "192_100~10000")
PAGES = (1, 16, 64)
POOL_TOKENS = 700_000  # a layer's share of an H200: 100 GB over 36 layers of 8 KV heads
LAYOUTS = ("contiguous", "scattered")
HEAD_DIM = 128
NOISE = 0.005  # of a run's time: no gain is seen below


def placed(name: str, heads: Heads, page_size: int, layout: str, pool_tokens: int, seed: int = 0) -> Case:
    """The batch of a name, its pages at the pool's start, or at random places of it."""
    forest = named_forest(name, page_size)
    table, used = forest_table(forest, page_size)
    pages = max(used, -(-pool_tokens // page_size))
    if layout == "scattered":
        places = np.random.default_rng(seed).permutation(pages)[:used].astype(np.int32)
        table = np.where(table < 0, table, places[table])
    return Case(name, forest, table, pages, heads, page_size)


def pages_in_order(case: Case) -> np.ndarray:
    """int64: the batch's pages, each once, in the order of their first reader: what a consolidation copies."""
    used = case.table[case.table >= 0].astype(np.int64)
    _, first = np.unique(used, return_index=True)
    return used[np.sort(first)]


def gather(cache: Any, page_size: int, pages: Any) -> Any:
    """A call that copies pages of K or V, (slots, heads, head_dim), next to each other."""
    import torch

    rows = cache.view(len(cache) // page_size, -1)
    out = torch.empty(len(pages), rows.shape[1], dtype=cache.dtype, device=cache.device)
    return lambda: torch.index_select(rows, 0, pages, out=out)


def measure(name: str, page_size: int, chosen: dict[str, Any], pools: Any, flush: Any, options: Any) -> dict[str, Any]:
    """One batch at one page size, as a record of the JSON file."""
    import torch
    from decode_systems import reference
    from decode_timing import Captured, measure_in_turn

    captured, results = {}, {}
    for layout in LAYOUTS:
        case = placed(name, options.heads, page_size, layout, options.pool_tokens, options.seed)
        inputs = pools.inputs(case)
        sample = sorted({index * (case.n_requests - 1) // (CHECKED - 1) for index in range(CHECKED)})
        checked = reference(inputs, sample), sample
        for system, set_up in chosen.items():
            key = f"{system} {layout}"
            ready, results[key] = prepare(system, set_up, inputs, checked, TOLERANCE[options.dtype])
            if ready is not None:
                captured[key] = ready
    pages = torch.from_numpy(pages_in_order(case)).to(inputs.k.device)  # scattered
    copies = [gather(cache, page_size, pages) for cache in (inputs.k, inputs.v)]
    captured["copy"], results["copy"] = Captured(lambda: [copy() for copy in copies][-1]), {}
    for key, times in measure_in_turn(captured, options.repeats, flush).items():
        results[key] |= times.summary()
    return {
        "name": name, "page_size": page_size, "heads": str(options.heads), "kv_bytes": case.kv_bytes, "runs": results,
    }  # fmt: skip


def gathers(pools: Any, options: Any, bandwidth: float) -> dict[str, float]:
    """GB/s of a copy of the pool by pages in random order, and of one in order; read and written bytes counted."""
    import torch
    from decode_timing import Captured, Times, measure_in_turn

    draw, captured = torch.Generator().manual_seed(options.seed), {}
    width = options.heads.kv * HEAD_DIM
    for page_size in options.pages:
        count = options.pool_tokens // page_size
        cache = pools.k[: count * page_size * width].view(count * page_size, options.heads.kv, HEAD_DIM)
        pages = torch.randperm(count, generator=draw).to(cache.device)
        captured[f"page {page_size}"] = Captured(gather(cache, page_size, pages))
    times: dict[str, Times] = measure_in_turn(captured, options.repeats, None)
    moved = 2 * options.pool_tokens * width * pools.k.element_size()
    rates = {name: moved / (some.summary()["warm_us"] * 1e-6) / 1e9 for name, some in times.items()}
    return rates | {"contiguous": bandwidth / 1e9}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure; the JSON file's content."""
    import torch
    from decode_systems import Pools, systems_on_gpu
    from decode_timing import Flush, copy_bandwidth, machine

    chosen, dtype = systems_on_gpu(options.systems), getattr(torch, options.dtype)
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    cases, left_out = [], []
    for page_size in options.pages:
        for name in options.batches:
            try:
                cases.append(
                    (name, page_size, placed(name, options.heads, page_size, "contiguous", options.pool_tokens))
                )
            except PlanError as error:
                left_out.append(f"{name} p{page_size}: {error}")
            except ValueError:
                raise SystemExit(
                    f"--batches {name}: give nodes and tokens of each level, such as 5,32_1000,100"
                ) from None
    if not cases:
        raise SystemExit(f"--batches: no batch at these page sizes: {'; '.join(left_out)}")
    pools, flush = Pools(max(Pools.elements(case) for *_, case in cases), dtype, seed=options.seed), Flush()
    command, when = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), time.strftime("%Y-%m-%d %H:%M:%S")
    content: dict[str, Any] = {
        "machine": machine() | {"command": command, "when": when, "copy_bandwidth": bandwidth, "dtype": options.dtype},
        "gathers": gathers(pools, options, bandwidth), "records": [], "left_out": left_out,
    }  # fmt: skip
    for name, page_size, _ in cases:
        content["records"].append(measure(name, page_size, chosen, pools, flush, options))
        torch.cuda.empty_cache()
    return content


def lost(record: dict[str, Any], system: str, kind: str) -> float | None:
    """The share of its time that scattered pages cost a system; None where either was not measured."""
    times = [record["runs"].get(f"{system} {layout}", {}).get(f"{kind}_us") for layout in LAYOUTS]
    return None if None in times else times[1] / times[0] - 1


def steps_to_pay(record: dict[str, Any], copy_us: float) -> float:
    """Decode steps after which a copy of so many us has paid; infinite where nothing is gained."""
    share = lost(record, "feather", "flushed")
    if share is None or share < NOISE:
        return math.inf
    return copy_us / (share * record["runs"]["feather contiguous"]["flushed_us"])


def best_copy_us(record: dict[str, Any], content: dict[str, Any]) -> float:
    """Each byte read and written at the rate of a large copy."""
    return 2 * record["kv_bytes"] / content["machine"]["copy_bandwidth"] * 1e6


def report(content: dict[str, Any]) -> str:
    """The tables of a run, as text."""
    records = content["records"]
    systems = list(dict.fromkeys(run.rpartition(" ")[0] for record in records for run in record["runs"] if " " in run))
    heads = [f"{system}: {kind}" for system in systems for kind in ("warm", "flushed")]
    rows = [["batch", "page", "us", "GB/s", *heads, "copy us", "at best", "pays after", "at best"]]
    for record in records:
        runs = record["runs"]
        us = runs.get("feather scattered", {}).get("flushed_us")
        shares = [lost(record, system, kind) for system in systems for kind in ("warm", "flushed")]
        copies = runs["copy"]["flushed_us"], best_copy_us(record, content)
        rows.append([
            record["name"], str(record["page_size"]), f"{us:.1f}" if us else "-",
            f"{record['kv_bytes'] / us / 1e3:.0f}" if us else "-",
            *("-" if share is None else f"{share:+.1%}" for share in shares), *(f"{copy:.0f}" for copy in copies),
            *(f"{steps:.0f}" if math.isfinite(steps := steps_to_pay(record, copy)) else "never" for copy in copies),
        ])  # fmt: skip
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in content["gathers"].items())
    lines = [
        f"gather, GB/s: {rates}",
        "us and GB/s of scattered pages, flushed; then what they cost each system",
        grid(rows),
    ]
    for page_size in sorted({record["page_size"] for record in records}):
        mine = [record for record in records if record["page_size"] == page_size]
        means = []
        for system in systems:
            ratios = [1 + share for record in mine if (share := lost(record, system, "flushed")) is not None]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) - 1
                means.append(f"{system} {mean:+.1%}, at worst {max(ratios) - 1:+.1%}")
        least = min(steps_to_pay(record, best_copy_us(record, content)) for record in mine)
        pays = f"after {least:.0f} steps" if math.isfinite(least) else "never"
        lines.append(f"page {page_size}: scattered pages cost {'; '.join(means)}; a copy at its best pays {pays}")
    return "\n".join([*lines, *(f"left out: {line}" for line in content["left_out"])])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", default=BATCHES, metavar="NAME", help=f"(default: {' '.join(BATCHES)})")
    parser.add_argument("--pages", nargs="+", type=int, default=PAGES, help="page sizes (default: 1 16 64)")
    parser.add_argument("--heads", default="32/8", help="query/KV heads (default: %(default)s)")
    parser.add_argument("--pool-tokens", type=int, default=POOL_TOKENS, help="of a layer's pool (default: %(default)s)")
    parser.add_argument("--systems", default="feather,fa3-planned", help="names (default: %(default)s)")
    parser.add_argument("--dtype", default="float16", choices=tuple(TOLERANCE))
    parser.add_argument("--repeats", type=int, default=10, help="rounds of measuring (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--from", dest="source", type=Path, metavar="JSON", help="report a finished run; no GPU needed")
    options = parser.parse_args(arguments)
    try:
        options.heads = parse_heads(options.heads)
    except ValueError as error:
        parser.error(str(error))
    if any(page < 1 or page & (page - 1) for page in options.pages):
        parser.error(f"--pages {options.pages}: give powers of two")
    for flag, given in (("--pool-tokens", options.pool_tokens), ("--repeats", options.repeats)):
        if given < 1:
            parser.error(f"{flag} {given}: give at least 1")
    content = read_finished(options.source, "machine", "gathers") if options.source else run(options)
    write(options.json, content)
    print(report(content))
    return int(any("error" in run for record in content["records"] for run in record["runs"].values()))


if __name__ == "__main__":
    sys.exit(main())
