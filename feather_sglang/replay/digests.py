"""What a replay's figures depend on, in a few letters: whoever keeps figures keeps these beside them."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from feather_sglang.replay.traces import Trace

# The code that a replay's figures come from: these, but for modules of the command line.
DECIDES = ("adapter", "attention", "replay", "slo.py", "report/summary.py", "scheduling", "simulation")
DECIDES_NOT = ("arguments.py", "doctor.py", "on_ray.py", "trace_cli.py", "train.py")


@cache
def code_digest() -> str:
    """Of the code that decides what a replay's figures are."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for place in DECIDES:
        path = root / place
        files = sorted(file for file in path.rglob("*") if file.suffix in (".py", ".json")) if path.is_dir() else [path]
        for file in (file for file in files if file.name not in DECIDES_NOT):
            digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def trace_digest(trace: Trace) -> str:
    """Of the requests as they are replayed."""
    return hashlib.sha256(repr((trace.block_size, trace.requests)).encode()).hexdigest()[:12]
