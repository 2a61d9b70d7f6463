"""A launch for each tile shape instead of one for all, for comparison (PAT 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Arguments = tuple[Any, ...]


class SerialLaunch:
    """One launch for each tile shape, one after the other."""

    def __init__(self, device: torch.device, queues: int) -> None:
        self._queues = range(queues)

    def __call__(self, forward: Callable[..., None], arguments: Arguments) -> None:
        """Run the forward kernels in the current stream."""
        for queue in self._queues:
            forward(*arguments, 1 << queue)


class StreamsLaunch:
    """One launch for each tile shape, on parallel streams that are joined before returning."""

    def __init__(self, device: torch.device, queues: int) -> None:
        self._device, self._streams = device, [torch.cuda.Stream(device) for _ in range(queues)]

    def __call__(self, forward: Callable[..., None], arguments: Arguments) -> None:
        """Run the forward kernels behind what is in the current stream, and before what comes into it."""
        current = torch.cuda.current_stream(self._device)
        begin = torch.cuda.Event()
        begin.record(current)
        for queue, stream in enumerate(self._streams):
            with torch.cuda.stream(stream):
                stream.wait_event(begin)
                forward(*arguments, 1 << queue)
                end = torch.cuda.Event()
                end.record(stream)
            current.wait_event(end)


LAUNCHES: dict[str, Any] = {"streams": StreamsLaunch, "serial": SerialLaunch}
