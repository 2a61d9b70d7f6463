"""Agreement of the ranks of a tensor-parallel group before they form a batch.

Each rank runs its own scheduler and all must form the same batch; under data-parallel attention the group is the one
within which attention is tensor-parallel, and other groups have other batches. Decisions are functions of the request
stream, which SGLang broadcasts, of a seed, and of readings that differ between ranks: the clock and what it measured.
The first rank's readings hold for all.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist

from feather_sglang.scheduling.meters.readings import Readings


def is_first_rank() -> bool:
    """Whether this process speaks for all that decode the same batches; also where there are no ranks."""
    if not dist.is_initialized():
        return True
    from sglang.srt.runtime_context import get_parallel  # which takes seconds where nothing else is SGLang's

    return dist.get_rank() % get_parallel().attn_tp_size == 0


class Agreement:
    """The first rank's readings, on all of ``group`` (a CPU process group; None or one rank: no communication)."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group) if group is not None and dist.is_initialized() else 1

    def _first_rank(self) -> int:
        return dist.get_process_group_ranks(self.group)[0]

    def secret(self) -> int:
        """A random 63-bit hash seed, the same on every rank and unknown to clients."""
        value = torch.tensor([secrets.randbits(63)], dtype=torch.int64)
        if self.ranks > 1:
            dist.broadcast(value, self._first_rank(), self.group)
        return int(value.item())

    def all(self, mine: bool) -> bool:
        """Whether every rank says yes."""
        if self.ranks == 1:
            return mine
        value = torch.tensor([int(mine)], dtype=torch.int64)
        dist.all_reduce(value, dist.ReduceOp.MIN, self.group)
        return bool(value.item())

    def readings(self, mine: Readings) -> Readings:
        """The first rank's."""
        if self.ranks == 1:
            return mine
        known = [math.nan if figure is None else figure for figure in astuple(mine)]
        value = torch.tensor(known, dtype=torch.float64)
        dist.broadcast(value, self._first_rank(), self.group)
        said: list[Any] = [None if math.isnan(figure) else figure for figure in value.tolist()]
        return Readings(*said)
