"""Device memory of a wrapper, at constant addresses, so that CUDA graphs may read it."""

from __future__ import annotations

import numpy as np
import torch

from feather_kernels.config import KernelConfig
from feather_kernels.plan import PackPlan

_COUNTERS = 16  # per queue: work units popped, and CTAs that have left
_NOT_PUBLISHED = -1  # a partial row's stats, as int32, before anybody has written them (csrc/common/partial.cuh)


class Scratch:
    """The plan that the kernels read, and the partial results that they exchange.

    Parameters
    ----------
    config : KernelConfig
        The layer and its device.
    plan_entries : int
        Of the planner's buffer.
    max_requests, max_parts : int
        Capacity.

    Attributes
    ----------
    plan : torch.Tensor
        int32 [plan_entries]
    seq_lens : torch.Tensor
        int32 [max_requests], for who hands none.
    part_out : torch.Tensor
        int16 [max_parts, part_rows, part_dim], of the configuration
    part_stats : torch.Tensor
        int32 [max_parts, part_rows, 2]
    counters : torch.Tensor
        int32 [`_COUNTERS`]
    """

    def __init__(self, config: KernelConfig, plan_entries: int, max_requests: int, max_parts: int) -> None:
        device, rows = config.device, config.part_rows

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.device = device
        self.plan, self.seq_lens, self.counters = zeros(plan_entries), zeros(max_requests), zeros(_COUNTERS)
        self.part_out = torch.empty(max_parts, rows, config.part_dim, dtype=torch.int16, device=device)
        self.part_stats = zeros(max_parts, rows, 2).fill_(_NOT_PUBLISHED)
        on_gpu = device.type == "cuda"
        self._staging = [torch.zeros(plan_entries, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._copied = [torch.cuda.Event() if on_gpu else None for _ in self._staging]
        self._turn = 0

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the kernels' order."""
        return self.part_out, self.part_stats, self.counters, self.plan

    def take(self, plan: PackPlan, seq_lens: torch.Tensor | None) -> torch.Tensor:
        """Copy a plan to the device in the current stream; its lengths, too, where none are there. Returns these."""
        self._turn = 1 - self._turn
        staging, copied = self._staging[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # the copy before last has left this buffer
        staging.numpy()[: plan.used] = plan.buffer[: plan.used]
        self.plan[: plan.used].copy_(staging[: plan.used], non_blocking=True)
        if seq_lens is None:
            seq_lens = self.seq_lens
            seq_lens[: plan.n_requests].copy_(torch.from_numpy(np.array(plan.forest.seq_len)))
        if copied is not None:
            copied.record(torch.cuda.current_stream(self.device))  # which need not be the current device
        return seq_lens
