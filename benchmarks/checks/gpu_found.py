"""Find the GPU that ``check_gpu.py`` can check: the first visible one, if it is a Hopper GPU.

As a program: exit status 0, or 2 and one line that says why not. It needs nothing but Python's standard library.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

HOPPER = "9.0"
COLUMNS = "name,compute_cap,memory.total"


class NoHopper(Exception):
    """There is nothing to check; the message says why in one line."""


class Gpu(NamedTuple):
    """The GPU, and its memory in MiB."""

    name: str
    memory_mib: int


def hopper() -> Gpu:
    """The GPU that is checked; raises ``NoHopper`` where there is none."""
    needs = f"this check needs an NVIDIA Hopper GPU (compute capability {HOPPER})"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if visible in ("", "-1"):
        raise NoHopper(f"{needs}, and CUDA_VISIBLE_DEVICES hides every GPU")
    command = ["nvidia-smi", f"--id={visible}", f"--query-gpu={COLUMNS}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        raise NoHopper(f"{needs}, and nvidia-smi, which names it, does not run here") from None
    cells = asked.stdout.strip().partition("\n")[0].split(", ")
    if asked.returncode or len(cells) != COLUMNS.count(",") + 1:
        said = " ".join((asked.stdout + asked.stderr).split())[:200]
        raise NoHopper(f"{needs}, and nvidia-smi names no GPU {visible}: {said}")
    name, capability, memory = cells
    if capability != HOPPER:
        raise NoHopper(f"{needs}, and {name} has compute capability {capability}")
    return Gpu(name, int(float(memory)))


if __name__ == "__main__":
    try:
        hopper()
    except NoHopper as reason:
        print(reason, file=sys.stderr)
        sys.exit(2)
