"""The Chunked Hash Tree beside the paper's C++ (table 5.1) and SGLang's lpm and dfs-weight (figure 5.9).

Also what each operation costs against the queue's length. No GPU needed; 40 s::

    python benchmarks/bench_cht.py [--quick] [--no-sglang] [--json cht.json] [--plot cht.png]

Figures of a run: docs/lab/costs.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cht_measure import (
    LOOKUPS_PER_REQUEST,
    PAPER_CALLS,
    PAPER_US,
    MixedPrompts,
    Prompts,
    measure_calls,
    measure_rounds,
    measure_scaling,
)
from rich import box
from rich.console import Console
from rich.table import Table

from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import check_target, replace_text
from feather_sglang.report import plots

LENGTHS = (1_000, 2_000, 5_000, 10_000, 20_000)  # tokens, the prefix lengths of figure 5.9
SIZES = (100, 1_000, 10_000)  # waiting requests
MAX_RATIO = 1.2  # of the costs at the two sizes
PLOTS = (".png", ".pdf", ".svg")
MIN_SPEEDUP, PAPER_SPEEDUP = 100.0, 1_000.0  # over each stock policy at the longest prefix


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables and the verdicts, write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="PATH", type=Path, help="write every figure as JSON")
    parser.add_argument("--plot", metavar="PATH", type=Path, help="draw both comparisons: a .png, .pdf or .svg file")
    parser.add_argument(
        "--quick", action="store_true", help="fewer requests, for a first look; no verdict on figure 5.9"
    )
    parser.add_argument("--no-sglang", action="store_true", help="leave SGLang's policies out")
    args = parser.parse_args(argv)
    for path, what in ((args.json, "figures"), (args.plot, "plot")):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise FeatherError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
        check_target(path, what)
    if args.plot is not None and args.plot.suffix not in PLOTS:
        raise FeatherError(f"--plot {args.plot}: must end in one of {', '.join(PLOTS)}")
    stock: Any = None if args.no_sglang else _stock_policies()
    console = Console()
    results: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "quick": args.quick,
        "sglang": None if stock is None else stock.StockPolicies.version,
    }
    caches: list[str] = []

    def build(prefixes: Any, prompts: Any) -> Any:
        peers = stock.StockPolicies(prefixes, prompts)
        caches.append(peers.cache_name)
        return peers

    with console.status("table 5.1 ..."):
        passes = [measure_calls(requests=500 if args.quick else PAPER_CALLS["insert"]) for _ in range(3)]
        results["calls"] = min(passes, key=lambda calls: sum(calls[name]["mean_us"] for name in PAPER_US))
    with console.status("cost against the queue's length ..."):
        blocks, cycles = (5, 300) if args.quick else (15, 1_000)
        results["scaling"] = measure_scaling(SIZES, Prompts, blocks, cycles)
        results["scaling_mixed"] = measure_scaling(SIZES, MixedPrompts, blocks, cycles)
    results["waiting"] = 200 if args.quick else 2_000
    results["rounds"] = {}
    for tokens in LENGTHS:
        with console.status(f"figure 5.9: {tokens:,} tokens ..."):
            results["rounds"][str(tokens)] = measure_rounds(
                tokens,
                results["waiting"],
                repeats=3 if args.quick else 7,
                stock=build if stock else None,
                policies=stock.STOCK_POLICIES if stock else (),
            )
    results["cache"] = caches[0] if caches else None
    results["verdicts"] = verdicts(results)
    _print(console, results)
    if args.json:
        replace_text(args.json, json.dumps(results, indent=2) + "\n", "figures")
    if args.plot:
        _plot(results, args.plot)
    return 0


def verdicts(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each target with what was measured and whether it was reached."""
    calls, scaling = results["calls"], results["scaling"]
    found = [
        _verdict(f"{name} at most the paper's {paper:.1f} us", calls[name]["mean_us"], "us", paper)
        for name, paper in PAPER_US.items()
    ]
    worst = max(scaling, key=lambda name: scaling[name]["ratio"])
    target = f"every operation at {SIZES[-1]:,} waiting at most {MAX_RATIO}x its cost at {SIZES[0]}; dearest: {worst}"
    found.append(_verdict(target, scaling[worst]["ratio"], "x", MAX_RATIO))
    if results["sglang"] and not results["quick"]:
        longest = results["rounds"][str(LENGTHS[-1])]
        for policy in _policies(longest):
            speedup = longest[f"{policy}_us"] / longest["feather_us"]
            target = f"a round at {LENGTHS[-1]:,} tokens at least {MIN_SPEEDUP:.0f}x cheaper than {policy}"
            found.append(_verdict(target, speedup, "x", MIN_SPEEDUP, at_least=True))
            found[-1]["paper_reached"] = speedup >= PAPER_SPEEDUP
    return found


def _verdict(target: str, measured: float, unit: str, bound: float, at_least: bool = False) -> dict[str, Any]:
    reached = measured >= bound if at_least else measured <= bound
    return {"target": target, "measured": measured, "unit": unit, "bound": bound, "reached": reached}


def _policies(row: dict[str, float]) -> list[str]:
    """Return the stock policies that a row of figure 5.9 holds."""
    own = {"insert_us", "decide_us", "feather_us", "feather_worst_us"}
    return [name.removesuffix("_us") for name in row if name not in own]


def _stock_policies() -> Any:
    """Return the adapter's module for the installed SGLang."""
    if importlib.util.find_spec("sglang") is None:
        raise FeatherError("SGLang is not installed; install it, or leave it out with --no-sglang")
    from feather_sglang.adapter import cpu_shims

    cpu_shims.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's imports name every device that this machine lacks
        return importlib.import_module("stock_policies")


def _print(console: Console, results: dict[str, Any]) -> None:
    calls = results["calls"]
    table = _table("Table 5.1: 5,000 tokens a request; paper: C++", "operation calls mean_us median_us paper_us ratio")
    for name in (*PAPER_US, "fresh", "repeated"):
        row, paper = calls[name], PAPER_US.get(name)
        label = name if paper else f"  {name} find_best"
        against = (f"{paper:.1f}", f"{paper / row['mean_us']:.1f}x") if paper else ("", "")
        table.add_row(label, f"{row['calls']:,}", f"{row['mean_us']:.2f}", f"{row['median_us']:.2f}", *against)
    console.print(table)

    title = "Microseconds (median) against the number waiting;\nright: two-level prompts of mixed lengths"
    table = _table(title, " ".join(["operation", *[*map(str, SIZES), "ratio"] * 2]))
    for name in results["scaling"]:
        cells = []
        for row in (results["scaling"][name], results["scaling_mixed"][name]):
            cells += [*(f"{row[str(size)]:.2f}" for size in SIZES), f"{row['ratio']:.2f}x"]
        table.add_row(name, *cells)
    console.print(table)

    policies = _policies(next(iter(results["rounds"].values())))
    title = f"Figure 5.9: a scheduling round with {results['waiting']:,} waiting"
    if results["sglang"]:
        title += f"\nSGLang {results['sglang']}, {results['cache']}"
    table = _table(title, "tokens feather_us worst_us " + " ".join(f"{p}_ms feather_x worst_x" for p in policies))
    for tokens, row in results["rounds"].items():
        cells = [f"{row['feather_us']:.1f}", f"{row['feather_worst_us']:.1f}"]
        for policy in policies:
            cost = row[f"{policy}_us"]
            cells.append(f"{cost / 1e3:.1f}")
            cells += [f"{cost / row[own]:,.0f}" for own in ("feather_us", "feather_worst_us")]
        table.add_row(f"{int(tokens):,}", *cells)
    console.print(table)
    console.print(f"feather: one insertion spread over {LOOKUPS_PER_REQUEST:.3f} rounds; worst: one in every round.")

    for verdict in results["verdicts"]:
        word = "[green]reached[/green]" if verdict["reached"] else "[red]missed[/red] "
        note = "" if "paper_reached" not in verdict else f" (1,000x {'too' if verdict['paper_reached'] else 'not'})"
        line = f"{word} {verdict['target']}: {verdict['measured']:,.2f} {verdict['unit']}{note}"
        console.print(line, highlight=False, soft_wrap=True)


def _table(title: str, columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns.split()):
        table.add_column(column.replace("_", "\n"), justify="right" if place else "left", no_wrap=True)
    return table


def _plot(results: dict[str, Any], path: Path) -> None:
    """Draw table 5.1 as bars and figure 5.9 as lines, both on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bars, lines) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    names = list(PAPER_US)
    series: tuple[tuple[float, str, Callable[[str], float]], ...] = (
        (-0.2, "paper, C++", PAPER_US.__getitem__),
        (0.2, "feather, Python", lambda name: results["calls"][name]["mean_us"]),
    )
    for shift, label, value in series:
        drawn = bars.bar([place + shift for place in range(len(names))], [value(n) for n in names], 0.4, label=label)
        bars.bar_label(drawn, fmt="%.1f", fontsize=8)
    bars.set_xticks(range(len(names)), names)
    bars.set(yscale="log", ylabel="mean time of a call (us)", title="Table 5.1: 5,000 requests of 5,000 tokens")
    bars.legend()

    rounds = results["rounds"]
    lengths = [int(tokens) for tokens in rounds]
    for policy in _policies(next(iter(rounds.values()))):
        lines.plot(lengths, [row[f"{policy}_us"] for row in rounds.values()], marker="o", label=f"SGLang {policy}")
    lines.plot(lengths, [r["feather_worst_us"] for r in rounds.values()], "--", marker="s", label="feather, worst")
    lines.plot(lengths, [row["feather_us"] for row in rounds.values()], marker="s", label="feather")
    title = f"Figure 5.9: {results['waiting']:,} waiting"
    lines.set_title(title + (f", SGLang {results['sglang']}" if results["sglang"] else ""))
    lines.set(xscale="log", yscale="log", xlabel="prompt length (tokens)", ylabel="scheduling round (us)")
    lines.set_xticks(lengths, [f"{length // 1000}K" for length in lengths])
    lines.grid(alpha=0.3)
    lines.legend()
    figure.tight_layout()
    plots.save(figure, path)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FeatherError as error:
        sys.exit(f"bench_cht: {error}")
