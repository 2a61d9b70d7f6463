"""The machine under the servers: its GPU, and the installed versions."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from typing import Any

PACKAGES = (
    "sglang", "sglang-kernel", "sgl-kernel", "flashinfer-python", "triton", "torch", "transformers", "feather-sglang",
)  # fmt: skip
_GPU = {
    "gpu": "name",
    "gpu_index": "index",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "max_sm_mhz": "clocks.max.sm",
    "power_limit_watt": "power.limit",
}


def machine() -> dict[str, Any]:
    """GPU, processor count and the versions of what is installed here."""
    facts: dict[str, Any] = {"gpu": None, "processors": os.cpu_count(), "kernel": platform.release()}
    query = ["nvidia-smi", f"--id={first_gpu()}", f"--query-gpu={','.join(_GPU.values())}"]
    try:
        done = subprocess.run([*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30)
        if done.returncode == 0:
            facts |= dict(zip(_GPU, done.stdout.splitlines()[0].split(", "), strict=False))
    except (OSError, subprocess.SubprocessError, IndexError):
        pass  # there is no GPU
    facts["versions"] = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts["versions"][name] = metadata.version(name)
    return facts


def first_gpu() -> str:
    """Index or UUID of the first GPU that servers started from here see."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
