"""``feather explain-plan``: shows the plan of the pat backend for a batch. Needs no GPU."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from feather_kernels.errors import BuildError, PlanError
from feather_kernels.options import tail_warps_of
from feather_kernels.pack import STRATEGIES
from feather_kernels.plans.batch_file import Batch, load_batch, path_of, tree_batch
from feather_kernels.plans.explain import explain
from feather_kernels.plans.report import print_report
from feather_kernels.tiles import built_tiles

HEADS, HEAD_DIM, PROCESSORS = (32, 8), 128, 132  # of a tree
WIDTH = 110  # columns at least: a narrow terminal wraps lines, which is better than numbers cut off


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``feather explain-plan``."""
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE",
        help="batch that a server recorded, or the folder of its option record_plan",
    )  # fmt: skip
    parser.add_argument("--tree", metavar="TREE", help="made-up batch: nodes and tokens by level, as 1,256_512,32")
    parser.add_argument("--heads", type=_heads, metavar="Q/KV", help="query and KV heads (as in FILE; 32/8 for a tree)")
    parser.add_argument("--head-dim", type=_positive, metavar="N", help="size of a head (as in FILE; 128 for a tree)")
    parser.add_argument("--strategy", choices=list(STRATEGIES), help="how to pack (as in FILE; time for a tree)")
    parser.add_argument("--sm", type=_positive, metavar="N", help="SMs of the GPU (as in FILE; 132 for a tree)")
    parser.add_argument("--items", action="store_true", help="also list the work items")
    parser.add_argument("--compare", action="store_true", help="also plan the batch with every other strategy")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Plan the batch and print the report; 2 for a user's mistake, said in one line."""
    try:
        report = explain(_batch(args), compare=args.compare, items=args.items)
    except (BuildError, PlanError) as error:
        print(f"feather: error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(asdict(report), indent=1))
        return 0
    print_report(report, Console(width=max(WIDTH, Console().width), highlight=False))
    return 0


def _batch(args: argparse.Namespace) -> Batch:
    if (args.file is None) == (args.tree is None):
        raise PlanError("give one of: a recorded batch's FILE, or --tree such as 1,4,256_32,256,32")
    if args.tree is not None:
        given = {
            "num_qo_heads": HEADS[0], "num_kv_heads": HEADS[1], "head_dim": HEAD_DIM, "n_sm": PROCESSORS,
            "tiles": built_tiles("hopper", HEAD_DIM),
        }  # fmt: skip
        batch = tree_batch(args.tree, given)
    else:
        batch = load_batch(args.file)
    changes = _changes(args, batch)
    # Another question has another plan than the server's, which is then nothing to compare it with.
    return replace(batch, arguments={**batch.arguments, **changes}, checksum=None) if changes else batch


def _changes(args: argparse.Namespace, batch: Batch) -> dict[str, Any]:
    """What the flags set otherwise than the batch has it."""
    changes: dict[str, Any] = {}
    if args.heads is not None:
        changes |= {"num_qo_heads": args.heads[0], "num_kv_heads": args.heads[1], "head_pack": None}
    if args.head_dim is not None:
        path = path_of(batch.arguments["tiles"])
        changes |= {"head_dim": args.head_dim, "tiles": built_tiles(path, args.head_dim)}
        changes["tail_warps"] = tail_warps_of(path, args.head_dim)
    if args.strategy is not None:
        changes["strategy"] = args.strategy
    if args.sm is not None:
        changes["n_sm"] = args.sm
    return changes


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("expected a whole number of at least 1")
    return value


def _heads(text: str) -> tuple[int, int]:
    try:
        query, kv = (_positive(number) for number in text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected query and KV heads, as in 32/8") from None
    return query, kv
