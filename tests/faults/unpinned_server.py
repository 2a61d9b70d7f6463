"""``sglang.launch_server`` where no memory can be pinned, and what nobody refers to is collected at once.

Its processes run this file, too, and find the same.
"""

import gc
import runpy
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "sglang"))

import unpinned

COLLECT_EVERY = 5  # seconds


class Patch:
    """The needed part of ``pytest.MonkeyPatch``, without undoing."""

    setattr = staticmethod(setattr)


def collect() -> None:
    """A session of SGLang's leaves cycles of 40 KB when it is closed, of which Python collects the old ones rarely."""
    while True:
        time.sleep(COLLECT_EVERY)
        gc.collect()


if not hasattr(torch.empty, "__wrapped__"):
    unpinned.install(Patch)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
else:
    threading.Thread(target=collect, daemon=True).start()
