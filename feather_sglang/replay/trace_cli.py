"""``feather trace``: make a request trace, import one, or say what one is like."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import check_new
from feather_sglang.replay import trace_import, workloads
from feather_sglang.replay.given import check_positive, flag, given
from feather_sglang.replay.trace_facts import Lengths, TraceFacts, describe
from feather_sglang.replay.traces import MOONCAKE_BLOCK, Trace, load_trace, save_trace
from feather_sglang.replay.traffic import TRAFFIC


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``make``, ``import`` and ``inspect``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    make = actions.add_parser(
        "make",
        help="write a synthetic trace",
        description="Write a synthetic trace in Mooncake's JSON lines: the paper's workload unless told otherwise.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_make(make)
    importing = actions.add_parser(
        "import",
        help="make a trace of another's trace or log",
        description="Write a trace of what a published trace, a benchmark or a log tells. What the "
        "file lacks is made up, and the output says so.",
    )
    trace_import.add_arguments(importing)
    inspect = actions.add_parser(
        "inspect", help="describe a trace", description="Describe a trace: load, lengths, sharing."
    )
    inspect.add_argument("file", type=Path, help="trace in Mooncake's JSON lines")
    inspect.add_argument("--requests", type=int, metavar="N", help="only the first N requests")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.add_argument(
        "--block-size", type=int, default=MOONCAKE_BLOCK, help="tokens per hash id where the file does not say (512)"
    )


def _add_make(make: argparse.ArgumentParser) -> None:
    make.add_argument("--out", required=True, type=Path, metavar="FILE", help="file to write")
    make.add_argument("--overwrite", action="store_true", help="replace the file named by --out")
    make.add_argument("--traffic", choices=tuple(TRAFFIC), help="traffic of this shape instead (with --seed only)")
    workloads.add_arguments(make)
    make.add_argument("--unique-tokens", type=int, default=20, help="tokens of a prompt behind its prefix")
    make.add_argument("--requests", type=int, default=1000, help="number of requests")
    make.add_argument("--jitter", type=float, default=0.0, help="spread of unique and output lengths, 0 to 1")
    make.add_argument("--prompt-tokens", type=int, default=1000, help="length of a prompt under --no-sharing")
    make.add_argument("--seed", type=int, default=0, help="the same seed gives the same trace")


def run(args: argparse.Namespace) -> int:
    """Run ``feather trace make``, ``import`` or ``inspect``."""
    console = Console()
    if args.action in ("make", "import"):
        check_new(args.out, args.overwrite)
    if args.action == "make":
        trace = make(args)
        save_trace(trace, args.out)
        made = f"{args.out}: {trace.name}, {len(trace.requests):,} requests"
        console.print(made, markup=False, highlight=False, soft_wrap=True)
        return 0
    if args.action == "import":
        imported = trace_import.import_trace(args)
        trace = imported.trace
        _tell(trace.notices)
        save_trace(trace, args.out)
        rate = f", {trace.rate:,.4g} a second" if trace.rate else ""
        for line in (f"{args.out}: {imported.format}, {len(trace.requests):,} requests{rate}", *imported.made_up):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return 0
    check_positive(args, "requests")
    trace = load_trace(args.file, args.block_size, args.requests)
    _tell(trace.notices)
    facts = describe(trace)
    if args.json:
        print(json.dumps({**asdict(facts), "notices": trace.notices}, indent=1))
    else:
        console.print(table(facts))
    return 0


def _tell(notices: list[str]) -> None:
    for notice in notices:
        Console(stderr=True).print(f"notice: {notice}", markup=False, highlight=False, soft_wrap=True)


def make(args: argparse.Namespace) -> Trace:
    """Make the trace that the arguments describe."""
    if args.traffic:
        if extra := [name for name in given(args, _add_make) if name not in ("traffic", "seed", "out", "overwrite")]:
            raise FeatherError(f"--traffic {args.traffic}: takes no {', '.join(map(flag, extra))}")
        return TRAFFIC[args.traffic](seed=args.seed)
    return workloads.made(args, args.requests)


def table(facts: TraceFacts) -> Table:
    """Return the facts as a table for people."""
    result = Table(title=escape(facts.name), title_justify="left", show_header=False)
    result.add_column(no_wrap=True)
    result.add_column()
    own = f"; {facts.alone:,} requests have a first block of their own" if facts.alone else ""
    groups = (
        f"{facts.first_level_groups:,}, the largest of {facts.largest_group:,} requests"
        if facts.first_level_groups
        else "none"
    )
    for name, value in [
        ("requests", f"{facts.requests:,} in {facts.duration_s:,.1f} s, {facts.rate:,.2f} a second"),
        ("prompt tokens", _shown(facts.input_length, facts.input_tokens)),
        ("output tokens", _shown(facts.output_length, facts.output_tokens)),
        ("sharing ratio", f"{facts.sharing_ratio:.1%} of prompt tokens hit a cache of unlimited size"),
        ("unique tokens", f"{facts.unique_prompt_tokens:,} must be computed at least once"),
        ("first-level groups", groups + own),
        ("shared levels", f"mean {facts.levels_mean:.1f}, largest {facts.levels_max}"),
        ("block", f"{facts.block_size:,} tokens"),
    ]:
        result.add_row(name, value)
    return result


def _shown(lengths: Lengths, total: int) -> str:
    return (
        f"mean {lengths.mean:,.0f}, p50 {lengths.p50:,.0f}, p90 {lengths.p90:,.0f}, p99 {lengths.p99:,.0f}, "
        f"largest {lengths.largest:,}; {total:,} in all"
    )
