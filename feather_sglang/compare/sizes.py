"""Runs on several replicas behind a router: their flags, their names, and how many replicas are enough."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from feather_sglang.compare.policies import split
from feather_sglang.compare.rates import Rates, Shares
from feather_sglang.errors import FeatherError
from feather_sglang.replay.routers import ROUTERS
from feather_sglang.replay.traces import Trace
from feather_sglang.report.tables import sizes
from feather_sglang.slo import SHARE, SLO, enough

DEFAULT_ROUTER = "cache-aware"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--replicas`` and ``--router``."""
    group = parser.add_argument_group("several servers", "each is replayed in a process of its own")
    group.add_argument(
        "--replicas",
        type=_counts,
        default=(),
        metavar="N[,N]",
        help="N servers behind a router; of several N, each is run, and --slo names the smallest within the bounds",
    )
    group.add_argument(
        "--router",
        metavar="NAMES",
        help=f"one or more of {', '.join(ROUTERS)}, separated by commas ({DEFAULT_ROUTER})",
    )


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1 or len(set(counts)) < len(counts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of servers, or several with commas between")
    return counts


def chosen_routers(args: argparse.Namespace) -> list[str]:
    """The routers that ``--router`` names; none where one server is replayed without."""
    if not args.replicas:
        if args.router is not None:
            raise FeatherError(f"--router {args.router}: goes with --replicas")
        return []
    routers = split(DEFAULT_ROUTER if args.router is None else args.router)
    if not routers or not set(routers) <= ROUTERS.keys() or len(set(routers)) < len(routers):
        raise FeatherError(f"--router {args.router}: name each once, out of {', '.join(ROUTERS)}")
    if len(args.replicas) > 1 and len(args.rate_scale) > 1:
        raise FeatherError("--replicas and --rate-scale: give several values of one of the two")
    return routers


def named_runs(policies: Sequence[str], routers: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Policy and router by a run's name: that of the policy where there are not several routers."""
    return {
        f"{policy} {router}" if len(routers) > 1 else policy: (policy, router)
        for policy in policies
        for router in (routers or [""])
    }


class Sizes(Rates):
    """The runs of a comparison: each of these names with each of the numbers of replicas."""

    def __init__(self, names: Sequence[str], counts: Sequence[int], trace: Trace, slo: SLO | None) -> None:
        super().__init__(names, dict.fromkeys(counts, trace), slo)

    def label(self, scale: float, name: str) -> str:
        """What a run under that name is called."""
        return f"{name} x{scale}"

    def heading(self, scale: float) -> str:
        """What the table of that number's runs is called, after what all have in common."""
        return f", replicas: {scale}"

    def point(self, scale: float) -> float:
        """What the runs are compared by: the number of replicas."""
        return scale

    def findings(self, shares: Shares) -> dict[str, Any]:
        """What a results file says of several numbers of replicas."""
        if self.slo is None:
            return {}
        return {"enough": {"share": SHARE, "replicas": {name: enough(pairs) for name, pairs in shares.items()}}}

    def conclusion(self, shares: Shares, slo: str) -> Table:
        """How many replicas are enough for the SLO."""
        return sizes(shares, slo)
