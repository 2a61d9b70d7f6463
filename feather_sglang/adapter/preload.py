"""Imported by the fork server of `feather ab`: SGLang is imported once, and every replay starts from that process.

Whatever goes wrong here goes wrong again in the replay's own process, which reports it.
"""

import atexit
import contextlib
import gc
import os
from importlib import import_module

from feather_sglang.adapter import cpu_shims

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a replay runs on the CPU; a process forked after CUDA started cannot use it
_kept = os.dup(1), os.dup(2)
gc.disable()  # looking for garbage takes a sixth of the time of importing
with open(os.devnull, "w") as silence, contextlib.suppress(Exception):
    os.dup2(silence.fileno(), 1)
    os.dup2(silence.fileno(), 2)
    cpu_shims.install()
    import_module("feather_sglang.adapter.replay_engine")
    # What a scheduler that starts imports besides takes two seconds.
    import_module("sglang.srt.managers.tp_worker")
    import_module("sglang.srt.models.registry")
gc.freeze()  # what is imported stays: no process that starts from here needs to look through it
gc.enable()
atexit.register(gc.unfreeze)  # or nanobind reports what lies there as leaked
os.dup2(_kept[0], 1)
os.dup2(_kept[1], 2)
os.close(_kept[0])
os.close(_kept[1])
