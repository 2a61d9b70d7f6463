"""``feather bench``: one sub-benchmark per claim, each measured beside its peers.

May import: errors, file_writing, report, scheduling, adapter.
"""

from __future__ import annotations

import argparse
import importlib

BENCHES = {
    "cht": ("feather_sglang.bench.cht", "the Chunked Hash Tree beside the paper's and SGLang's lpm and dfs-weight"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand per benchmark."""
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, (path, summary) in BENCHES.items():
        sub = benches.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        importlib.import_module(path).add_arguments(sub)


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark."""
    return int(importlib.import_module(BENCHES[args.bench][0]).run(args))
