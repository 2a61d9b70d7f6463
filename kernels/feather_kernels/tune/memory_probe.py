"""Memory latency and bandwidth of a GPU, for constraint 2 of the tile solver (PAT 5.2, figure 7a). Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from feather_kernels.build import load_memory_probe

SIZES = tuple(16 << i for i in range(4, 13))  # 256 bytes to 64 KB
FLAT = 1.1  # of the smallest copy's time
COPIES = 1000  # PAT averages over as many
BUFFER = 1 << 30  # bytes: far more than any L2


def flat_part(times: Sequence[float]) -> float:
    """The inherent latency: the mean of the times that do not grow with size yet (times by ascending size)."""
    flat = [times[0]]
    for time in times[1:]:
        if time > FLAT * times[0]:
            break
        flat.append(time)
    return sum(flat) / len(flat)


def measure_latency(device: Any = "cuda") -> tuple[float, dict[int, float]]:
    """L in ns, and the time of one copy in ns by its size in bytes."""
    capability = torch.cuda.get_device_capability(device)
    module = load_memory_probe(10 * capability[0] + capability[1])
    buffer = torch.zeros(BUFFER, dtype=torch.uint8, device=device)
    times = {size: nanoseconds(lambda size=size: module.probe(buffer, size, COPIES), 5) / COPIES for size in SIZES}
    return flat_part(list(times.values())), times


def measure_bandwidth(device: Any = "cuda") -> float:
    """B in bytes per ns: a device-to-device copy, read and written bytes both counted."""
    source = torch.zeros(BUFFER, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * BUFFER / nanoseconds(lambda: target.copy_(source), 20)


def nanoseconds(work: Any, repeats: int) -> float:
    """Median over repeats, after one run that is not counted."""
    times = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e6)
    return sorted(times[1:])[repeats // 2]
