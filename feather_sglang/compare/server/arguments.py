"""Flags of ``feather ab --engine server``."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

# Each with its default, by which a replay sees that it was given.
SERVER_ONLY: dict[str, Any] = {
    "repeat": 1, "time_limit": math.inf, "start_timeout": 300.0,
    "json": None, "bench_serving": None, "one_server": False,
}  # fmt: skip


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only real servers take."""
    group = parser.add_argument_group(
        "with --engine server",
        "--model is the model's folder, or one with its config.json alone (then with dummy weights); --attention one "
        "or more of fa3, flashinfer, triton, pat, separated by commas",
    )

    def add(name: str, **settings: Any) -> None:
        group.add_argument(f"--{name.replace('_', '-')}", default=SERVER_ONLY[name], **settings)

    add("repeat", type=int, metavar="N", help="rounds, every other one backwards: 2 gives A B B A (%(default)s)")
    add("one_server", action="store_true", help="switch the policy of a running server between runs; starts are few")
    add("time_limit", type=float, metavar="SECONDS", help="for everything; what is missing then is named (none)")
    add("start_timeout", type=float, metavar="SECONDS", help="in which a server must be up (%(default)g)")
    add("json", type=Path, metavar="FILE", help="results, written anew after each run (OUT/results.json)")
    add("bench_serving", type=Path, metavar="FILE", help="show this output of sglang.bench_serving beside them")
