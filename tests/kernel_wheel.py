"""The wheel ``feather-kernels`` for tests: built small, installed by pip, and used where there is no compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

# One kernel, the one that is compiled fastest: what there is of all others in the wheel is theirs alone.
ONE_KERNEL = "--arch 80 --dtype float16 --head-dim 64 --soft-cap 0 --sinks 0 --fp8-kv 0 --causal 0".split()
PLANNER_ALONE = ["--arch"]
COMPILER = re.compile(r"(.*-)?(gcc|g\+\+|cc|c\+\+|clang|clang\+\+|nvcc)(-[\d.]+)?")


def build_wheel(folder: Path, *flags: str) -> Path:
    """Write the wheel into a folder."""
    command = [sys.executable, "-m", "feather_kernels.build", "--wheel", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel as a user does, but into a folder of its own, and without a network."""
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "--target", str(folder), str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def without_compilers(installed: Path, empty: Path) -> dict[str, str]:
    """Variables under which the installed wheel is found, and nothing can be compiled or was compiled before.

    All programs are there but compilers: SGLang asks some of them about the machine.
    """
    programs = empty.with_name("programs")
    programs.mkdir()
    for folder in filter(os.path.isdir, os.environ["PATH"].split(os.pathsep)):
        for name in os.listdir(folder):
            if not COMPILER.fullmatch(name) and not (programs / name).is_symlink():
                (programs / name).symlink_to(Path(folder, name))
    paths = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PATH": str(programs),
        "PYTHONPATH": os.pathsep.join(paths),
        "FEATHER_KERNELS_CACHE": str(empty),
        "SGLANG_CRASH_ON_JIT_COMPILE": "1",
    }
