"""Timing on the device: CUDA graphs, systems in turn, L2 warm and flushed. Needs a GPU to run, not to import."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

TARGET_US = 1000.0  # a warm replay lasts at least this long, if MOST_RUNS suffice
MOST_RUNS = 50
HIDE_CYCLES = 300_000  # about 150 us: the host enqueues a measurement while the device waits


def events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def elapsed_us(pair: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
    return pair[0].elapsed_time(pair[1]) * 1e3


class Captured:
    """A system's call as two CUDA graphs: one run, and as many back to back as make a replay of about 1 ms.

    Attributes
    ----------
    call : callable
        The system's own, uncaptured.
    out : torch.Tensor
        What every replay writes (of the last run, in the longer graph).
    runs : int
        Runs in the longer graph.
    """

    def __init__(self, call: Callable[[], torch.Tensor]) -> None:
        self.call = call  # keeps alive what the graphs read and write: a system's plan and scratch
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        self._pool = torch.cuda.graph_pool_handle()
        self.single, self.out = self._capture(call, 1)
        pair = events()
        self.single.replay()
        torch.cuda._sleep(HIDE_CYCLES)
        pair[0].record()
        for _ in range(3):
            self.single.replay()
        pair[1].record()
        torch.cuda.synchronize()
        self.runs = max(1, min(MOST_RUNS, math.ceil(TARGET_US * 3 / max(elapsed_us(pair), 1.0))))
        self.many, _ = self._capture(call, self.runs)
        self.many.replay()
        torch.cuda.synchronize()

    def poisoned_run(self) -> torch.Tensor:
        """The output of one replay into a buffer of NaN, so that a row that is not written shows."""
        self.out.fill_(float("nan"))
        self.single.replay()
        torch.cuda.synchronize()
        return self.out

    def _capture(self, call: Callable[[], torch.Tensor], runs: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Not ``torch.cuda.graph``, which would give all cached memory back to the driver at each capture."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._pool)
            try:
                for _ in range(runs):
                    out = call()
            except BaseException:
                _abandon(graph)
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph, out


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that failed; the error that ended it is the one to report."""
    try:
        graph.capture_end()
    except RuntimeError:
        pass


class Flush:
    """Replaces the content of L2: writes one buffer, then reads another, which evicts the first.

    Each is twice the size of L2, and at least 128 MiB.
    """

    def __init__(self, device: str = "cuda") -> None:
        l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
        self.bytes = max(2 * l2, 128 << 20)
        self._written = torch.empty(self.bytes // 4, dtype=torch.int32, device=device)
        self._read = torch.ones(self.bytes // 4, dtype=torch.float32, device=device)
        self._sum = torch.empty((), dtype=torch.float32, device=device)

    def __call__(self) -> None:
        self._written.fill_(1)
        torch.sum(self._read, dim=0, out=self._sum)


@dataclass
class Times:
    """Microseconds a run, one entry a round."""

    warm: list[float] = field(default_factory=list)
    flushed: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Median and least of each kind that was measured."""
        kinds = {"warm": self.warm, "flushed": self.flushed}
        measured = {name: values for name, values in kinds.items() if values}
        return {f"{name}_us": round(median(values), 3) for name, values in measured.items()} | {
            f"{name}_min_us": round(min(values), 3) for name, values in measured.items()
        }


def measure_in_turn(systems: dict[str, Captured], rounds: int, flush: Flush | None) -> dict[str, Times]:
    """Time all systems once a round, so that drifting clocks meet them all alike.

    Warm: the longer graph, right after one run of the same system, per run. Flushed: a single run after `flush`. Either
    is preceded by device work that outlasts the host's enqueueing.
    """
    times = {name: Times() for name in systems}
    for _ in range(rounds):
        pairs = []
        for name, captured in systems.items():
            warm = events()
            torch.cuda._sleep(HIDE_CYCLES)
            captured.single.replay()
            warm[0].record()
            captured.many.replay()
            warm[1].record()
            flushed = None
            if flush is not None:
                flushed = events()
                flush()
                flushed[0].record()
                captured.single.replay()
                flushed[1].record()
            pairs.append((name, captured.runs, warm, flushed))
        torch.cuda.synchronize()
        for name, runs, warm, flushed in pairs:
            times[name].warm.append(elapsed_us(warm) / runs)
            if flushed is not None:
                times[name].flushed.append(elapsed_us(flushed))
    return times


def check_and_measure(
    systems: dict[str, Callable[[], Callable[[], torch.Tensor]]],
    exact: torch.Tensor,
    rows: Sequence[int],
    tolerance: float,
    rounds: int,
    flush: Flush | None,
) -> dict[str, dict[str, Any]]:
    """Microseconds of each system, or why there are none: only what is right is timed.

    Parameters
    ----------
    systems : of each what sets it up and returns its call.
    exact : float32 [len(rows), heads, dim], what these rows of its output must be.
    tolerance : of |out - exact| / |exact|.
    """
    captured, results = {}, {}
    for name, set_up in systems.items():
        try:
            one = Captured(set_up())
        except Exception as problem:  # whatever a peer lacks here
            results[name] = {"error": f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:200]}
            continue
        out = one.poisoned_run().view(-1, *exact.shape[1:])
        error = float((out[rows].float() - exact).norm() / exact.norm())
        results[name] = {"relative_error": error}
        if not bool(out.isfinite().all()):
            results[name]["error"] = "wrong: not all of its output is finite"
        elif error <= tolerance:
            captured[name] = one
        else:
            results[name]["error"] = f"wrong: relative error {error:.1e}, at most {tolerance:g} is right"
    for name, times in measure_in_turn(captured, rounds, flush).items():
        results[name] |= times.summary()
    return results


def copy_bandwidth(gigabytes: float = 4.0, rounds: int = 10, device: str = "cuda") -> float:
    """Bytes read plus bytes written per second of a large device-to-device copy; the median of some."""
    source = torch.empty(int(gigabytes * 2**30), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    target.copy_(source)
    pairs = [events() for _ in range(rounds)]
    for pair in pairs:
        pair[0].record()
        target.copy_(source)
        pair[1].record()
    torch.cuda.synchronize()
    return 2 * source.numel() / (median(map(elapsed_us, pairs)) * 1e-6)


def graph_overhead_us(rounds: int = 20, device: str = "cuda") -> float:
    """What a graph of one tiny kernel takes between two events: contained in every flushed time."""
    one = torch.zeros(1, device=device)

    def tiny() -> torch.Tensor:
        return one.add_(1)

    captured = Captured(tiny)
    pairs = [events() for _ in range(rounds)]
    for pair in pairs:
        torch.cuda._sleep(HIDE_CYCLES)
        pair[0].record()
        captured.single.replay()
        pair[1].record()
    torch.cuda.synchronize()
    return median(map(elapsed_us, pairs))


def machine() -> dict[str, Any]:
    """GPU, driver and versions, for the record of a measurement."""
    properties = torch.cuda.get_device_properties(0)
    facts: dict[str, Any] = {
        "gpu": properties.name,
        "processors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }
    for module in ("sgl_kernel", "flashinfer"):
        try:
            facts[module] = getattr(__import__(module), "__version__", "unknown")
        except ImportError:
            facts[module] = None
    return facts


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
