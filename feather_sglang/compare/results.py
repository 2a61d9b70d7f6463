"""The results file of an earlier comparison: it is not replaced unasked."""

from __future__ import annotations

import argparse
from pathlib import Path

from feather_sglang.errors import FeatherError
from feather_sglang.replay.arguments import DEFAULT_OUT


def check_overwrite(args: argparse.Namespace, target: Path) -> None:
    """Raise ``FeatherError`` where nobody named the place and an earlier run's results are there."""
    if not args.overwrite and target == DEFAULT_OUT / "results.json" and target.exists():
        raise FeatherError(f"{target} is an earlier run's: give --overwrite, or another folder by --out")
