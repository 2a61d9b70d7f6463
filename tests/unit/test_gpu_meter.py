"""The meter of the GPU without a GPU: figures from readings, and from a machine that has no GPU."""

import time
from types import SimpleNamespace

import pytest

from feather_sglang.compare.server import gpu_meter
from feather_sglang.compare.server.gpu_meter import GpuMeter, average, summary


class Library:
    """nvidia-ml-py's calls for a GPU that has been at work for a while; the DRAM counter stays unknown."""

    NVML_GPM_METRIC_GRAPHICS_UTIL, NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 1, 2, 10
    NVML_GPM_METRICS_GET_VERSION, NVML_SUCCESS = 1, 0
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, fails=None):
        self.fails, self.open, self.samples, self.asked, self.held = fails, 0, 0, None, 0

    def nvmlInit(self):
        if self.fails == "nvmlInit":
            raise self.NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index):
        self.asked = index
        return index

    def nvmlDeviceGetHandleByUUID(self, name):
        self.asked = name
        return name

    def nvmlDeviceGetClockInfo(self, gpu, kind):
        if self.fails == "nvmlDeviceGetClockInfo":
            raise self.NVMLError("not supported")
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetPowerUsage(self, gpu):
        return 500_500

    def nvmlDeviceGetTemperature(self, gpu, kind):
        return 40

    def nvmlGpmSampleAlloc(self):
        self.held += 1
        return SimpleNamespace(number=None)

    def nvmlGpmSampleFree(self, sample):
        self.held -= 1

    def nvmlGpmSampleGet(self, gpu, sample):
        if self.fails == "nvmlGpmSampleGet":
            raise self.NVMLError("not supported")
        self.samples += 1
        sample.number = self.samples

    def c_nvmlGpmMetricsGet_t(self):
        return SimpleNamespace(metrics=[SimpleNamespace() for _ in range(8)])

    def nvmlGpmMetricsGet(self, asked):
        assert asked.version == 1 and asked.numMetrics == 3 and asked.sample2.number == asked.sample1.number + 1
        for metric in asked.metrics[:3]:
            metric.nvmlReturn, metric.value = 0, {1: 90.0, 2: 70.0, 10: float("nan")}[metric.metricId]


def seen(library, monkeypatch, gpus=None, samples=0):
    monkeypatch.setattr(gpu_meter, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if gpus is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    with GpuMeter(interval=0.02) as found:
        time.sleep(0.09)
        while samples and library.samples < samples:  # on a busy machine they take longer
            time.sleep(0.01)
    return found


def test_readings_follow_each_other_until_the_end(monkeypatch):
    library, begun = Library(), time.monotonic()
    activity = seen(library, monkeypatch, samples=3).activity
    took = time.monotonic() - begun  # on a busy machine more than was slept
    assert activity.pop("samples") == library.samples - 1 >= 2
    assert 0.04 <= activity.pop("seconds") <= took + 0.005  # rounded
    assert activity == {"busy": 90.0, "sm": 70.0}
    assert library.open == library.held == 0


@pytest.mark.parametrize("gpus, asked", [(None, 0), ("", 0), ("2,3", 2), ("GPU-7,1", "GPU-7")])
def test_the_gpu_is_the_servers(gpus, asked, monkeypatch):
    library = Library()
    seen(library, monkeypatch, gpus)
    assert library.asked == asked


@pytest.mark.parametrize(
    "fails, tells",
    [("nvmlInit", set()), ("nvmlGpmSampleGet", {"clocks"}), ("nvmlDeviceGetClockInfo", {"activity"})],
)
def test_a_gpu_that_does_not_tell_all(fails, tells, monkeypatch):
    library = Library(fails)
    found = seen(library, monkeypatch)
    assert {name for name in ("activity", "clocks") if getattr(found, name) is not None} == tells
    assert library.open == library.held == 0


def test_without_the_library(monkeypatch):
    found = seen(None, monkeypatch)
    assert found.activity is None and found.clocks is None


def test_clocks_have_their_mean_and_their_least(monkeypatch):
    clocks = seen(Library(), monkeypatch).clocks
    assert clocks.pop("samples") > 0
    assert clocks == {
        name: {"mean": value, "min": value}
        for name, value in (("sm_mhz", 1980), ("memory_mhz", 3201), ("watt", 500.5), ("celsius", 40))
    }
    assert summary([(1980, 1, 2, 3), (1900, 1, 2, 3)])["sm_mhz"] == {"mean": 1940.0, "min": 1900.0}


def test_means_weigh_readings_by_their_time():
    read = [(1.0, {"busy": 10.0, "dram": 4.0}), (3.0, {"busy": 50.0}), (0.0, {"dram": 900.0})]
    assert average(read) == {"samples": 3, "seconds": 4.0, "busy": 40.0, "dram": 4.0}
    assert average([]) is None and average([(1.0, {})]) is None
