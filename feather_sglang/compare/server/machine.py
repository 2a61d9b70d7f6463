"""The machine under the servers: GPU, versions, and clocks while a case runs."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from feather_sglang.compare.server.process import own_group

PACKAGES = (
    "sglang", "sglang-kernel", "sgl-kernel", "flashinfer-python", "triton", "torch", "transformers", "feather-sglang",
)  # fmt: skip
_SAMPLED = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "watt": "power.draw", "celsius": "temperature.gpu"}
_FIXED = {
    "gpu": "name",
    "gpu_index": "index",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "max_sm_mhz": "clocks.max.sm",
    "power_limit_watt": "power.limit",
}
_VERSIONS = """
import json, sys
from importlib import metadata
found = {"python": sys.version.split()[0]}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def machine(python: str) -> dict[str, Any]:
    """GPU, processor count and the versions that `python` would import."""
    facts: dict[str, Any] = {"gpu": None, "processors": os.cpu_count(), "kernel": platform.release()}
    values = _ask(_query(_FIXED))
    if values:
        facts |= dict(zip(_FIXED, values.splitlines()[0].split(", "), strict=False))
    versions = _ask([python, "-c", _VERSIONS, *PACKAGES])
    return facts | {"versions": json.loads(versions) if versions else {}}


class Clocks:
    """``with Clocks() as clocks: ...``; then `clocks.summary` has mean and least of what nvidia-smi read meanwhile.

    One long-running reader, as starting one for each reading takes a processor for a while.
    """

    def __init__(self, interval_ms: int = 500) -> None:
        self.summary: dict[str, Any] | None = None
        self._command = [*_query(_SAMPLED), f"--loop-ms={interval_ms}"]

    def __enter__(self) -> Clocks:
        self._output = tempfile.TemporaryFile("w+")
        try:
            self._reader: subprocess.Popen[bytes] | None = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                preexec_fn=own_group,  # it would read on for ever where this process is killed
            )
        except OSError:
            self._reader = None
        return self

    def __exit__(self, *problem: object) -> None:
        with self._output:
            if self._reader is not None:
                self._reader.kill()
                self._reader.wait()
                self._output.seek(0)
                self.summary = summarize_clocks(self._output.read())


def summarize_clocks(text: str) -> dict[str, Any] | None:
    """Mean and least of each column of nvidia-smi's lines; None where none is whole."""
    rows = []
    for line in text.splitlines():
        try:
            row = [float(cell) for cell in line.split(", ")]
        except ValueError:
            continue  # a header, an error, or the line that was being written
        if len(row) == len(_SAMPLED):
            rows.append(row)
    if not rows:
        return None
    data = np.array(rows)
    return {"samples": len(rows)} | {
        name: {"mean": round(float(column.mean()), 1), "min": float(column.min())}
        for name, column in zip(_SAMPLED, data.T, strict=True)
    }


def first_gpu() -> str:
    """Index or UUID of the first GPU that servers started from here see."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"


def _query(columns: Mapping[str, str]) -> list[str]:
    return [
        "nvidia-smi",
        f"--id={first_gpu()}",
        f"--query-gpu={','.join(columns.values())}",
        "--format=csv,noheader,nounits",
    ]


def _ask(command: list[str]) -> str:
    """What a program prints; nothing where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
