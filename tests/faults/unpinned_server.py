"""``sglang.launch_server`` where no memory can be pinned; its processes run this file, too, and find the same."""

import runpy
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "sglang"))

import unpinned


class Patch:
    """The needed part of ``pytest.MonkeyPatch``, without undoing."""

    setattr = staticmethod(setattr)


if not hasattr(torch.empty, "__wrapped__"):
    unpinned.install(Patch)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
