"""Imported by the fork server of `feather ab`: SGLang is imported once, and every replay starts from that process.

Whatever goes wrong here goes wrong again in the replay's own process, which reports it. A file, named by `READY`, tells
the command that it is done.
"""

import atexit
import contextlib
import ctypes
import gc
import os
import signal
from importlib import import_module
from pathlib import Path

from feather_sglang.adapter import cpu_shims

READY = "FEATHER_PRELOADED"
_PR_SET_PDEATHSIG = 1

# It ends with the command, amid an import too, and does not take down for seconds what it has imported.
with contextlib.suppress(OSError, AttributeError):  # not Linux
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a replay runs on the CPU; a process forked after CUDA started cannot use it
_kept = os.dup(1), os.dup(2)
gc.disable()  # looking for garbage takes a sixth of the time of importing
with open(os.devnull, "w") as silence, contextlib.suppress(Exception):
    os.dup2(silence.fileno(), 1)
    os.dup2(silence.fileno(), 2)
    cpu_shims.install()
    import_module("feather_sglang.adapter.replay_engine")
    # What a scheduler that starts imports besides takes two seconds, and placing the plugins' hooks half a second: for
    # each, SGLang looks through all that is imported.
    import_module("sglang.srt.managers.tp_worker")
    import_module("sglang.srt.models.registry")
    import_module("sglang.srt.plugins").load_plugins()
    import_module("sglang.srt.dllm.algorithm")
gc.freeze()  # what is imported stays: no process that starts from here needs to look through it
gc.enable()
atexit.register(gc.unfreeze)  # or nanobind reports what lies there as leaked
os.dup2(_kept[0], 1)
os.dup2(_kept[1], 2)
os.close(_kept[0])
os.close(_kept[1])
if _ready := os.environ.pop(READY, None):
    with contextlib.suppress(OSError):  # nobody waits any more
        Path(_ready).touch()
