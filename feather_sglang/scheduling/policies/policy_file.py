"""Policy files: versioned JSON, written atomically, read with suspicion."""

from __future__ import annotations

import json
import os
from typing import Any

from feather_sglang.errors import FeatherError, quoted
from feather_sglang.file_writing import read_text, replace_text

FORMAT = "feather-policy"
VERSION = 1
LARGEST_FILE = 1 << 24  # bytes
_LARGEST = 1e300  # a larger number is damage, and would overflow in the arithmetic that follows


def write_document(path: str | os.PathLike[str], policy: str, content: dict[str, Any]) -> None:
    """Write a policy file: a reader sees the old file or the new one, never a part of one."""
    text = json.dumps({"format": FORMAT, "version": VERSION, "policy": policy, **content}, indent=1, allow_nan=False)
    replace_text(path, text + "\n", "policy file")


def read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a policy file and check that it is one, of a version this release can read."""
    try:
        document = json.loads(read_text(path, LARGEST_FILE))
    except OSError as error:
        raise FeatherError(f"cannot read policy file {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FeatherError(f"policy file {path} is damaged: not JSON ({str(error).splitlines()[0]})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FeatherError(f'{path} is not a policy file: it lacks "format": "{FORMAT}"')
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FeatherError(f"policy file {path} is damaged: version is {quoted(version)}")
    if version > VERSION:
        raise FeatherError(
            f"policy file {path} has version {quoted(version)}, this release reads up to {VERSION}: "
            "update feather-sglang"
        )
    if not isinstance(document.get("policy"), str):
        raise FeatherError(f"policy file {path} is damaged: it names no policy")
    return document


def number(value: Any, what: str, low: float = 0.0, high: float = _LARGEST) -> float:
    """Return `value` if it is a finite number within bounds; ValueError says what is wrong."""
    # Comparisons with NaN are false, so NaN is refused here too.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{what} is {str(value)[:40]!r}")
    return value


def integer(value: Any, what: str, high: int = 2**62) -> int:
    """Return `value` if it is a whole number from 0 to `high`."""
    if not isinstance(value, int):
        raise ValueError(f"{what} is {str(value)[:40]!r}")
    return int(number(value, what, high=high))


def mapping(value: Any, what: str) -> dict[str, Any]:
    """Return `value` if it is a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    return value


def sequence(value: Any, what: str, length: int | None = None) -> list[Any]:
    """Return `value` if it is a JSON array (of that length)."""
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise ValueError(f"{what} is not an array" + (f" of {length}" if length is not None else ""))
    return value


def pairs(value: Any, what: str) -> list[tuple[int, int]]:
    """Return `value` if it is a JSON array of pairs of whole numbers."""
    rows = [sequence(row, what, 2) for row in sequence(value, what)]
    return [(integer(first, what), integer(second, what)) for first, second in rows]
