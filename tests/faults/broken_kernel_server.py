"""``sglang.launch_server`` whose packed kernel, in NumPy, fails once it has run for a while.

Its processes run this file, too, and find the same.
"""

import itertools
import runpy
from typing import Any

from feather_kernels.reference_engine import ReferenceEngine

RUNS = 40  # before it fails

run, runs = ReferenceEngine.run, itertools.count()


def fail_later(*args: Any, **kwargs: Any) -> Any:
    if next(runs) < RUNS:
        return run(*args, **kwargs)
    raise RuntimeError("forward kernel: an illegal memory access was encountered\nand what more CUDA has to say")


ReferenceEngine.run = fail_later  # type: ignore[method-assign]

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
