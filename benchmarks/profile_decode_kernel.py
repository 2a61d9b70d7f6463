"""Run one case in a loop for Nsight Compute, and print its counters as a small table.

    export PYTHONPATH=kernels
    ncu --clock-control none --nvtx --nvtx-include measured/ --csv \\
        --metrics "$(python benchmarks/profile_decode_kernel.py --metrics)" \\
        python benchmarks/profile_decode_kernel.py --tree 3 --heads 64/8 --system feather --runs 2 > counters.csv
    python benchmarks/profile_decode_kernel.py --parse counters.csv

Only the kernels of the measured runs are in the NVTX range. ncu flushes the caches before every kernel unless it is
given ``--cache-control none``: its times are those of a cold L2, and without launches in parallel.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from statistics import median

from decode_cases import grid, parse_heads, tree_case

from feather_kernels.trees import PAT_TREES

METRICS = {  # ncu's name: (column, factor, format); bytes and times come in the unit that the CSV names
    "gpu__time_duration.sum": ("us", 1e6, "{:.1f}"),
    "dram__bytes_read.sum": ("DRAM read MB", 1e-6, "{:.1f}"),
    "dram__bytes_write.sum": ("written MB", 1e-6, "{:.1f}"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("DRAM %", 1, "{:.0f}"),
    "lts__t_sector_hit_rate.pct": ("L2 hit %", 1, "{:.0f}"),
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": ("tensor %", 1, "{:.0f}"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("occupancy %", 1, "{:.0f}"),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("SM %", 1, "{:.0f}"),
    "launch__registers_per_thread": ("registers", 1, "{:.0f}"),
    "launch__waves_per_multiprocessor": ("waves", 1, "{:.2f}"),
}
UNITS = {
    "nsecond": 1e-9, "ns": 1e-9, "usecond": 1e-6, "us": 1e-6, "msecond": 1e-3, "ms": 1e-3, "second": 1.0, "s": 1.0,
    "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
}  # fmt: skip


def counted(text: str, metrics: Collection[str]) -> Iterator[tuple[dict[str, str], float | None]]:
    """The rows of ncu's CSV that hold one of the metrics, each with its value in SI units; None for "n/a".

    Raises
    ------
    ValueError
        No CSV among what ncu printed.
    """
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise ValueError("no CSV of ncu in this file: run ncu with --csv, and look at its messages")
    for row in csv.DictReader(line for line in lines[first:] if line.startswith('"')):
        if row.get("Metric Name") not in metrics:
            continue
        try:
            value = float(row["Metric Value"].replace(",", "")) * UNITS.get(row["Metric Unit"], 1.0)
        except ValueError:
            value = math.nan
        yield row, value if math.isfinite(value) else None


def parse(text: str) -> str:
    """ncu's CSV as a table: a line a kernel, medians over its launches."""
    values: dict[tuple[str, str, str], dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row, value in counted(text, METRICS):
        if value is not None:
            kernel = row["Kernel Name"], row.get("Grid Size", ""), row.get("Block Size", "")
            values[kernel][row["Metric Name"]][row["ID"]] = value
    rows = [["kernel", "n", "grid", "block", *(column for column, _, _ in METRICS.values())]]
    for (name, blocks, threads), metrics in values.items():
        launches = max(len(launch) for launch in metrics.values())
        cells = [short(name), str(launches), product(blocks), product(threads)]
        for metric, (_, factor, form) in METRICS.items():
            measured = metrics.get(metric)
            cells.append(form.format(median(measured.values()) * factor) if measured else "-")
        rows.append(cells)
    return grid(rows)


def short(kernel: str, most: int = 40) -> str:
    """A kernel's name without namespaces, return type and arguments."""
    name = kernel.split("(")[0].split("<")[0].split("::")[-1].split()[-1]
    arguments = kernel[kernel.find("<") : kernel.find(">") + 1] if "<" in kernel else ""
    return (name + arguments)[:most]


def product(size: str) -> str:
    """``"(132, 1, 1)"`` as ``"132"``."""
    numbers = [number.strip() for number in size.strip("() ").split(",")]
    return "x".join(number for number in numbers if number not in ("", "1")) or "1"


def run(tree: int, heads: str, page_size: int, system: str, runs: int, seed: int) -> None:
    """The case's system, twice to warm up and then ``runs`` times."""
    import torch
    from decode_systems import Pools, Unavailable, choose_systems

    case = tree_case(PAT_TREES[tree - 1], parse_heads(heads), page_size, seed=seed)
    (set_up,) = choose_systems(system).values()
    inputs = Pools(Pools.elements(case), torch.float16, seed=seed).inputs(case)
    try:
        ready = set_up(inputs)
    except Unavailable as error:
        raise SystemExit(f"{system}: {error}") from None
    for _ in range(2):
        ready.call()
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push("measured")
    for _ in range(runs):
        ready.call()
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_pop()
    print(
        f"tree {tree} ({case.name}), {case.heads} heads, page size {page_size}, {system}: floor "
        f"{case.floor() * 1e6:.1f} us, {case.kv_bytes / 1e6:.1f} MB of unique KV, {case.flop / 1e9:.1f} GFLOP"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=int, default=3, help=f"1 to {len(PAT_TREES)} (default: %(default)s)")
    parser.add_argument("--heads", default="64/8", help="query/KV heads (default: %(default)s)")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--system", default="feather", help="one of bench_decode_kernel.py's (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", action="store_true", help="print ncu's names of the counters, and end")
    parser.add_argument("--parse", type=Path, metavar="CSV", help="print the table of a CSV of ncu, and end")
    options = parser.parse_args(argv)
    if options.metrics:
        print(",".join(METRICS))
    elif options.parse:
        print(parse(options.parse.read_text(errors="replace")))
    elif not 1 <= options.tree <= len(PAT_TREES):
        parser.error(f"--tree {options.tree}: give 1 to {len(PAT_TREES)}")
    else:
        run(options.tree, options.heads, options.page_size, options.system, options.runs, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
