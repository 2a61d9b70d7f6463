"""The JSON file of a finished run, for ``--from``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_finished(path: Path, *keys: str) -> dict[str, Any]:
    """What a benchmark wrote, which has these keys; ends the program in one line if it is something else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SystemExit(f"--from {path}: {error}") from None
    if not isinstance(content, dict) or (missing := [key for key in ("records", *keys) if key not in content]):
        what = f"no {', '.join(missing)}" if isinstance(content, dict) else "no object"
        raise SystemExit(f"--from {path}: not written by this benchmark ({what} in it)")
    return content
