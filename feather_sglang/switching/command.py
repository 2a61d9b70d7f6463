"""``feather switch``: change the policy of a running server, compare two windows, and go back where it is worse."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.errors import FeatherError, quoted
from feather_sglang.scheduling.policy_names import FEATHER, STOCK
from feather_sglang.switching.bounds import Bound, parse
from feather_sglang.switching.metrics import FIGURES, Figures, figures
from feather_sglang.switching.server import InForce, Refused, RunningServer, Superseded

KEY = "FEATHER_ADMIN_KEY"
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``feather switch``."""
    parser.add_argument("url", metavar="URL", help="server, as http://localhost:30000")
    parser.add_argument("policy", metavar="POLICY", help="schedule policy to change to")
    parser.add_argument("--options", default="{}", metavar="JSON", help="options of a feather policy that differ")
    parser.add_argument(
        "--watch", default="10m", metavar="TIME", help="length of each window: 90s, 10m, 1h (%(default)s)"
    )
    parser.add_argument(
        "--settle", default="30s", metavar="TIME", help="time left out between the switch and the window (%(default)s)"
    )
    parser.add_argument(
        "--keep",
        default="ttft_p99<=1.1x,tok/s>=0.98x",
        metavar="BOUNDS",
        help="bounds under which the new policy stays, times the figure before or values (%(default)s)",
    )
    parser.add_argument("--admin-key", metavar="KEY", help=f"the server's --admin-api-key (the variable {KEY})")
    parser.add_argument("--api-key", metavar="KEY", help="the server's --api-key, where it has one")


def run(args: argparse.Namespace) -> int:
    """Switch, and say what that changed; 1 where the server went back."""
    bounds = parse(args.keep)
    watch, settle = seconds_of("--watch", args.watch), seconds_of("--settle", args.settle, least=0)
    new = wanted(args.policy, args.options)
    if not (key := args.admin_key or os.environ.get(KEY)):
        raise FeatherError(f"give the server's --admin-api-key by --admin-key or the variable {KEY}")
    server, console = RunningServer(args.url, key, args.api_key), Console(highlight=False)
    old = server.in_force()
    server.check_orders()
    if old.policy == new.policy and not new.options:
        raise FeatherError(f"{server.url} runs {new.policy} already")

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    say(f"measuring {old.policy} for {watch:g} s, then {new.policy} for as long; Ctrl-C goes back to {old.policy}")
    before = window(server, watch)
    if unknown := [bound.text for bound in bounds if before[bound.figure] in (None, 0.0, math.inf)]:
        raise FeatherError(
            f"nothing was changed: under {old.policy}, {watch:g} s of traffic say nothing on {unknown[0]}"
        )
    stays = False
    try:
        server.order(new)
        say(f"{new.policy} is in force")
        time.sleep(settle)
        after = window(server, watch)
        server.check_runs(new)
        missed = [bound for bound in bounds if not bound.held(before, after)]
        console.print(table(before, after, old.policy, new.policy, bounds))
        stays = not missed
    except (Refused, Superseded):
        stays = True  # as it was, or as somebody else wants it
        raise
    finally:  # after a signal and a broken pipe, too
        if not stays:
            go_back(server, old, say)
    say(verdict(before, after, old.policy, new.policy, bounds, missed))
    return int(bool(missed))


def seconds_of(flag: str, text: str, least: float = 1e-3) -> float:
    """A time such as ``90s`` or ``10m``, in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text, re.ASCII)
    if found is None or (seconds := float(found[1]) * UNITS[found[2]]) < least or seconds > 1e6:
        raise FeatherError(f"{flag} {quoted(text)}: expected a time such as 90s, 10m or 1h")
    return seconds


def wanted(policy: str, options: str) -> InForce:
    """The policy and its options, as far as they can be checked here."""
    if policy not in STOCK + FEATHER:
        raise FeatherError(f"unknown schedule policy {quoted(policy)}; choose from {', '.join(STOCK + FEATHER)}")
    try:
        told = json.loads(options)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict) or (told and policy not in FEATHER):
        raise FeatherError(
            f"--options {quoted(options)}: a JSON object for a feather policy, as '{{\"max_wait\": 30}}'"
        )
    FeatherOptions().updated({name: value for name, value in told.items() if name != "policy_file"})  # a server's path
    return InForce(policy, told)


def window(server: RunningServer, seconds: float) -> Figures:
    """The server's figures over that time from now on."""
    first, begun = server.totals(), time.monotonic()
    time.sleep(seconds)
    return figures(first, server.totals(), time.monotonic() - begun)


def go_back(server: RunningServer, old: InForce, say: Any) -> None:
    """Order the policy that was in force."""
    with contextlib.suppress(OSError):  # nobody listens any more
        say(f"going back to {old.policy}")
    try:
        server.order(old)
    except FeatherError as error:
        raise FeatherError(f"could not go back to {old.policy}, order it again yourself: {error}") from None
    except BaseException:  # a second signal
        with contextlib.suppress(OSError):
            say(f"the server has not confirmed {old.policy}: order it again yourself")
        raise


def ratio(before: Figures, after: Figures, figure: str) -> str:
    """A figure to what it was; a dash where that is not known."""
    old, new = before[figure], after[figure]
    return f"{new / old:.2f}x" if old and new is not None else "-"


def table(before: Figures, after: Figures, old: str, new: str, bounds: Sequence[Bound]) -> Table:
    """The windows side by side."""
    shown = Table("", title="equal windows before and after the switch", title_justify="left")
    for head in (old, new, "ratio", "bound"):
        shown.add_column(head, justify="right")
    for figure, (name, form) in FIGURES.items():
        values = ["-" if one is None else form.format(one) for one in (before[figure], after[figure])]
        judged = [
            f"{one.text}: {'held' if one.held(before, after) else 'missed'}" for one in bounds if one.figure == figure
        ]
        shown.add_row(name, *values, ratio(before, after, figure), escape(", ".join(judged)))
    return shown


def verdict(
    before: Figures, after: Figures, old: str, new: str, bounds: Sequence[Bound], missed: Sequence[Bound]
) -> str:
    """What became of the switch and why, in a sentence."""
    told = ", ".join(f"{one.figure} is {ratio(before, after, one.figure)} ({one.text})" for one in missed or bounds)
    return f"the server is back at {old}, as under {new} {told}" if missed else f"the server stays at {new}: {told}"
