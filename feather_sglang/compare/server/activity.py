"""How much a GPU worked during a run and how much of its DRAM bandwidth it used, by NVIDIA's GPM counters."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from feather_sglang.compare.server.machine import first_gpu

try:
    import pynvml
except ImportError:  # SGLang brings nvidia-ml-py along; without a GPU there is nothing to read
    pynvml = None

# The name of each figure and the GPM metric that it is, all in percent: the time in which anything ran on the GPU, the
# multiprocessors that had a warp, averaged over time, and the DRAM bandwidth in use, reads and writes, of the peak.
METRICS = {
    "busy": "NVML_GPM_METRIC_GRAPHICS_UTIL",
    "sm": "NVML_GPM_METRIC_SM_UTIL",
    "dram": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}


class Activity:
    """``with Activity() as activity: ...``; then `activity.summary` has the means over the time between.

    `summary` is None where the counters cannot be read: no GPU, one older than Hopper, or a driver that keeps them to
    itself. It is of the first GPU that servers started from here see.

    Parameters
    ----------
    interval : seconds between two readings; the means are weighted by the time that each stands for.
    """

    def __init__(self, interval: float = 1.0) -> None:
        self.summary: dict[str, Any] | None = None
        self._interval = interval
        self._end = threading.Event()
        self._read: list[tuple[float, dict[str, float]]] = []
        self._thread = threading.Thread(target=self._follow, name="gpu activity", daemon=True)

    def __enter__(self) -> Activity:
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._end.set()
        self._thread.join()
        self.summary = average(self._read)

    def _follow(self) -> None:
        """Read until the end; each reading is what the counters say of the time since the one before."""
        if pynvml is None:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        samples: list[Any] = []
        try:
            gpu = _handle()
            samples += pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
            before, after = samples
            pynvml.nvmlGpmSampleGet(gpu, before)
            begun = time.monotonic()
            while not self._end.is_set():
                self._end.wait(self._interval)
                pynvml.nvmlGpmSampleGet(gpu, after)
                now = time.monotonic()
                self._read.append((now - begun, _between(before, after)))
                before, after, begun = after, before, now
        except pynvml.NVMLError:
            return  # what was read so far counts; `seconds` tells how much of the run that is
        finally:
            for sample in samples:
                pynvml.nvmlGpmSampleFree(sample)
            pynvml.nvmlShutdown()


def average(read: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, Any] | None:
    """Means of (seconds, figures) weighted by the seconds; None of nothing."""
    summary: dict[str, Any] = {}
    for name in METRICS:
        known = [(seconds, figures[name]) for seconds, figures in read if name in figures]
        if total := sum(seconds for seconds, _ in known):
            summary[name] = round(sum(seconds * value for seconds, value in known) / total, 2)
    return {"samples": len(read), "seconds": round(sum(s for s, _ in read), 2), **summary} if summary else None


def _handle() -> Any:
    """NVML's handle of that GPU."""
    gpu = first_gpu()
    return pynvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(gpu)


def _between(before: Any, after: Any) -> dict[str, float]:
    """The metrics of the time between two samples, without those that the GPU could not tell."""
    asked = pynvml.c_nvmlGpmMetricsGet_t()
    asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    asked.sample1, asked.sample2 = before, after
    asked.numMetrics = len(METRICS)
    for place, metric in enumerate(METRICS.values()):
        asked.metrics[place].metricId = getattr(pynvml, metric)
    pynvml.nvmlGpmMetricsGet(asked)
    found = [(name, asked.metrics[place]) for place, name in enumerate(METRICS)]
    return {name: m.value for name, m in found if m.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(m.value)}
