"""The results of an earlier suite, read from their file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from feather_sglang.errors import FeatherError
from feather_sglang.suite.report import page, tables
from feather_sglang.suite.runner import VERSION

DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # what a report raises of odd entries


def read(path: Path) -> dict[str, Any]:
    """The results of an earlier run; ``FeatherError`` for a file that no report can be made of."""
    try:
        results = json.loads(path.read_bytes())
        # Half a surrogate pair cannot be printed, and no figure is infinite.
        json.dumps(results, ensure_ascii=False, allow_nan=False).encode()
        version = results["version"]
    except OSError as error:
        raise FeatherError(f"--show {path}: cannot read: {error.strerror}") from None
    except (*DAMAGED, RecursionError):
        raise FeatherError(f"--show {path}: no results of feather suite") from None
    if version != VERSION or not isinstance(results.get("cases"), dict):
        raise FeatherError(f"--show {path}: no results of feather suite in version {VERSION}")
    try:
        page(results, ""), list(tables(results))
    except DAMAGED as error:
        raise FeatherError(f"--show {path}: damaged results: {type(error).__name__} {error}") from None
    return dict(results)
