"""A meter of the servers' first GPU during a run: its activity, clocks and power."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
MOMENT = ("sm_mhz", "memory_mhz", "watt", "celsius")


class GpuMeter:
    """``with GpuMeter() as gpu: ...``; then `gpu` has the readings of the time between.

    Attributes
    ----------
    activity : means of `METRICS`; None where the counters cannot be read: no GPU, one older than Hopper, or a driver
        that keeps them to itself.
    clocks : mean and least of `MOMENT`; None where they cannot be read.
    """

    def __init__(self, interval: float = 0.5) -> None:
        self.activity: dict[str, Any] | None = None
        self.clocks: dict[str, Any] | None = None
        self._interval = interval  # seconds between two readings
        self._end = threading.Event()
        self._work: list[tuple[float, dict[str, float]]] = []
        self._moments: list[tuple[float, ...]] = []
        self._thread = threading.Thread(target=self._follow, name="gpu meter", daemon=True)

    def __enter__(self) -> GpuMeter:
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._end.set()
        self._thread.join()
        self.activity, self.clocks = average(self._work), summary(self._moments)

    def _follow(self) -> None:
        """Read until the end; the counters tell of the time since the reading before."""
        if pynvml is None:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        samples: list[Any] = []
        try:
            gpu = _handle()
            samples, begun = _samples(gpu), time.monotonic()
            while not self._end.is_set():
                self._end.wait(self._interval)
                if (moment := _moment(gpu)) is not None:
                    self._moments.append(moment)
                if samples:
                    pynvml.nvmlGpmSampleGet(gpu, samples[1])
                    now = time.monotonic()
                    self._work.append((now - begun, _between(*samples)))
                    samples.reverse()
                    begun = now
        except pynvml.NVMLError:
            return  # what was read so far counts; `seconds` tells how much of the run that is
        finally:
            for sample in samples:
                pynvml.nvmlGpmSampleFree(sample)
            pynvml.nvmlShutdown()


def average(read: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, Any] | None:
    """Means of (seconds, figures) weighted by the seconds; None of nothing."""
    means: dict[str, Any] = {}
    for name in METRICS:
        known = [(seconds, figures[name]) for seconds, figures in read if name in figures]
        if total := sum(seconds for seconds, _ in known):
            means[name] = round(sum(seconds * value for seconds, value in known) / total, 2)
    return {"samples": len(read), "seconds": round(sum(s for s, _ in read), 2), **means} if means else None


def summary(moments: Sequence[tuple[float, ...]]) -> dict[str, Any] | None:
    """Mean and least of each column; None of nothing."""
    if not moments:
        return None
    columns = zip(MOMENT, np.array(moments).T, strict=True)
    return {"samples": len(moments)} | {
        name: {"mean": round(float(column.mean()), 1), "min": float(column.min())} for name, column in columns
    }


def _handle() -> Any:
    gpu = first_gpu()
    return pynvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(gpu)


def _moment(gpu: Any) -> tuple[float, ...] | None:
    """`MOMENT` now; None where the GPU does not tell."""
    try:
        return (
            pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
            pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
            pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
        )
    except pynvml.NVMLError:
        return None


def _samples(gpu: Any) -> list[Any]:
    """Two samples of the counters, of which the first is taken; none where there are no counters."""
    samples: list[Any] = []
    try:
        samples += pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        pynvml.nvmlGpmSampleGet(gpu, samples[0])
    except pynvml.NVMLError:
        while samples:
            pynvml.nvmlGpmSampleFree(samples.pop())
    return samples


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
