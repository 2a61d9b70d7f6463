"""``feather trace``: make a request trace, or describe one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from feather_sglang.replay.traces import MOONCAKE_BLOCK, Trace, load_trace, save_trace
from feather_sglang.replay.workloads import no_sharing, shared_prefix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``feather trace make`` and ``feather trace inspect``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    make = actions.add_parser("make", help="write a generated workload as a trace")
    make.add_argument("--groups", type=int, default=5, help="prefix groups (5)")
    make.add_argument("--prefix-tokens", type=int, default=5000, help="shared tokens of a prompt (5000)")
    make.add_argument("--unique-tokens", type=int, default=20, help="tokens of its own at the end of a prompt (20)")
    make.add_argument("--prompt-tokens", type=int, default=1000, help="prompt length with --no-sharing (1000)")
    make.add_argument("--levels", type=int, default=1, help="levels of the prefix tree (1)")
    make.add_argument("--rate", type=float, default=100.0, help="requests per second (100)")
    make.add_argument("--output-tokens", type=int, default=200, help="output tokens per request (200)")
    make.add_argument("--requests", type=int, default=1000, help="number of requests (1000)")
    make.add_argument("--jitter", type=float, default=0.0, help="spread of unique and output lengths, 0 to 1 (0)")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--no-sharing", action="store_true", help="no two prompts share a block")
    make.add_argument("--out", type=Path, required=True, metavar="FILE")
    inspect = actions.add_parser("inspect", help="describe a trace: sharing, levels, lengths")
    inspect.add_argument("trace", metavar="FILE")
    inspect.add_argument("--block-size", type=int, default=MOONCAKE_BLOCK, help="tokens per hash id (512)")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the action."""
    console = Console()
    if args.action == "make":
        common = {"output_tokens": args.output_tokens, "rate": args.rate, "requests": args.requests, "seed": args.seed}
        if args.no_sharing:
            trace = no_sharing(prompt_tokens=args.prompt_tokens, jitter=args.jitter, **common)
        else:
            trace = shared_prefix(
                groups=args.groups,
                prefix_tokens=args.prefix_tokens,
                unique_tokens=args.unique_tokens,
                levels=args.levels,
                jitter=args.jitter,
                **common,
            )
        save_trace(trace, args.out)
        console.print(f"wrote {len(trace.requests):,} requests ({trace.name}) to {args.out}")
        return 0
    trace = load_trace(args.trace, args.block_size)
    facts = describe(trace)
    if args.json:
        print(json.dumps(facts, indent=1))
        return 0
    for notice in trace.notices:
        console.print(f"[yellow]notice:[/yellow] {notice}")
    table = Table(title=trace.name, title_justify="left", show_header=False)
    for name, value in facts.items():
        shown = ", ".join(f"{k} {v:,.0f}" for k, v in value.items()) if isinstance(value, dict) else f"{value:,}"
        table.add_row(name.replace("_", " "), shown)
    console.print(table)
    return 0


def describe(trace: Trace) -> dict[str, Any]:
    """Figures of a trace.

    ``sharing_ratio`` is the share of prompt tokens that a cache without a limit would hold already; ``levels`` the
    largest number of points along one prompt at which others part from it.
    """
    requests = trace.requests
    duration = requests[-1].arrival_s - requests[0].arrival_s
    nodes: dict[tuple[int, int], int] = {}
    fanout: dict[int, set[int]] = {}
    shared = 0
    paths: list[list[int]] = []
    for request in requests:
        node, done, path = -1, 0, []
        for hash_id in request.hash_ids:
            tokens = min(trace.block_size, request.input_length - done)
            key = (node, hash_id)
            known = key in nodes
            fanout.setdefault(node, set()).add(hash_id)
            path.append(node)
            node = nodes.setdefault(key, len(nodes))
            shared += tokens if known else 0
            done += tokens
        paths.append(path)
    total = sum(request.input_length for request in requests)
    return {
        "requests": len(requests),
        "duration_s": round(duration, 3),
        "requests_per_s": round((len(requests) - 1) / duration, 3) if duration else 0.0,
        "input_tokens": _percentiles([r.input_length for r in requests]),
        "output_tokens": _percentiles([r.output_length for r in requests]),
        "sharing_ratio": round(shared / total, 4) if total else 0.0,
        "unique_prompt_tokens": total - shared,
        "first_level_groups": len(fanout.get(-1, ())),
        "levels": max((sum(len(fanout[node]) > 1 for node in path) for path in paths), default=0),
        "block_size": trace.block_size,
    }


def _percentiles(values: Sequence[int]) -> dict[str, float]:
    numbers = np.asarray(values, dtype=float)
    return {"mean": float(numbers.mean()), **{f"p{q}": float(np.percentile(numbers, q)) for q in (50, 90, 99)}}
