"""The results of an earlier suite: read from their file, and held against what a report needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from feather_sglang.errors import FeatherError
from feather_sglang.suite.report import COLUMNS
from feather_sglang.suite.runner import VERSION

TEXTS = ("sglang", "profile", "model", "attention", "slo", "form", "scheduler_cost")
LARGEST = 1e15  # of any number: more than a replay of any length gives


def read(path: Path) -> dict[str, Any]:
    """The results of an earlier run."""
    try:
        results = json.loads(path.read_bytes())
        json.dumps(results, ensure_ascii=False).encode()  # half a surrogate pair cannot be printed
        version, cases = results["version"], results.get("cases")
    except OSError as error:
        raise FeatherError(f"--show {path}: cannot read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise FeatherError(f"--show {path}: no results of feather suite") from None
    of_suite = isinstance(cases, dict) and all(isinstance(case, dict) and "policies" in case for case in cases.values())
    if version != VERSION or not of_suite:
        raise FeatherError(f"--show {path}: no results of feather suite in version {VERSION}")
    if wrong := _wrong(results):
        raise FeatherError(f"--show {path}: damaged results: {wrong}")
    return dict(results)


def _wrong(results: dict[str, Any]) -> str | None:
    """The first entry that is not what a report can show."""
    for name in TEXTS:
        if not isinstance(results.get(name), str):
            return f"{name} is no text"
    for name, kind, entries in (("skipped", list, str), ("server", dict, object), ("environment", dict, str)):
        given = results.get(name, kind())
        values = given.values() if isinstance(given, dict) else given
        if not isinstance(given, kind) or not all(isinstance(value, entries) for value in values):
            return f"{name} is not as feather suite writes it"
    flags = results.get("server", {}).get("server_flags", [])
    if not isinstance(flags, list) or not all(isinstance(flag, str) for flag in flags):
        return "server.server_flags is no list of texts"
    for case, entry in results["cases"].items():
        if wrong := _wrong_in_case(entry):
            return f"cases, {case!r}: {wrong}"
    return None


def _wrong_in_case(case: dict[str, Any]) -> str | None:
    if not isinstance(case.get("kind"), str) or not case["kind"]:
        return "kind is no text"
    for name in ("requests", "kv_tokens", "rate"):
        if not _is_number(case.get(name)) and not (name == "rate" and case.get(name) is None):
            return f"{name} is no number"
    if not isinstance(case["policies"], dict):
        return "policies is no object"
    for policy, figures in case["policies"].items():
        if not isinstance(figures, dict) or not isinstance(figures.get("error", ""), str):
            return f"{policy!r} has no figures"
        for column in COLUMNS:
            value = figures.get(column.field)
            needed = column.field == "slo_share" and "error" not in figures
            if not _is_number(value) and (value is not None or needed):
                return f"{policy!r}: {column.field} is no number"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST
