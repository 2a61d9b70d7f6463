"""``feather patch``: put SGLang's extension points into an installed release, and take them out again."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from feather_sglang.errors import FeatherError
from feather_sglang.patching.series import Series, releases
from feather_sglang.patching.site import Site

ACTIONS = {
    "list": "show the releases that have patches, and the installed one",
    "check": "say whether the patches fit the installed release",
    "apply": "patch the installed release, all files or none, with a backup",
    "revert": "restore its files to the byte",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action and ``--site``."""
    parser.add_argument(
        "action", choices=ACTIONS, help="; ".join(f"{name}: {summary}" for name, summary in ACTIONS.items())
    )
    parser.add_argument(
        "--site", type=Path, metavar="DIR", help="folder that holds sglang and its .dist-info. Default: this Python's."
    )


def run(args: argparse.Namespace) -> int:
    """Do it; the exit status is 0, or 1 where ``check`` finds that the patches do not fit."""
    console = Console(soft_wrap=True, highlight=False)
    if args.action == "list":
        return _list(console, args.site)
    site = Site.find(args.site)
    where = f"sglang {site.release} in {site.root}"
    if args.action == "check":
        if site.is_patched:
            console.print(escape(f"{where}: {site.state()}"))
            return 0 if site.state() == "patched" else 1
        try:
            made = site.plan()
        except FeatherError as error:
            console.print(escape(f"{where}: does not fit: {error}"))
            return 1
        console.print(escape(f"{where}: fits, {len(made)} files would change"))
        return 0
    files = site.apply() if args.action == "apply" else site.revert()
    done = "patched" if args.action == "apply" else "as it was"
    console.print(escape(f"{where}: {done}, {len(files)} files"))
    for name in files:
        console.print(escape(f"  {name}"))
    return 0


def _list(console: Console, folder: Path | None) -> int:
    try:
        site: Site | None = Site.find(folder)
    except FeatherError:
        if folder is not None:
            raise
        site = None
    for release in releases():
        mark = f"  <- {site.root}: {site.state()}" if site is not None and site.release == release else ""
        console.print(escape(f"{release}  {len(Series(release).files)} patches{mark}"))
    if site is not None and site.release not in releases():
        console.print(escape(f"{site.release}  none  <- {site.root}"))
    for subject in Series(releases()[-1]).subjects():
        console.print(escape(f"  {subject}"))
    return 0
