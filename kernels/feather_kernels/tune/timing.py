"""Times of a tile shape for units of one KV length, from which the rule for n is made (PAT 5.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from feather_kernels.forest import Forest
from feather_kernels.tiles import LONGEST_KV, built_tiles
from feather_kernels.tune.memory_probe import nanoseconds
from feather_kernels.wrapper import PackedDecodeWrapper

KV_HEADS, GROUP = 32, 4  # a pack is 32 units; four query heads to a KV head
SMS_PER_PACK = 4  # a processor has eight units, whole rounds of every tile's teams (where four divides the processors)
PLANNER: dict[str, Any] = {"strategy": "naive", "split": "none", "merge": "kernel", "grow": False}
RUNS, ROUNDS = 10, 5


def full_packs(packs: int, m: int, kv_len: int) -> Forest:
    """As many packs, each of the requests whose rows fill a tile, with nothing but what they share."""
    of_request = np.repeat(np.arange(packs), m // GROUP)
    none, lengths = np.full(packs, -1), np.full(packs, kv_len)
    return Forest(none, lengths, of_request, np.full(len(of_request), kv_len), of_request * kv_len)


class UnitTimer:
    """Times one tile's queue alone, with packs that fill the tile and whole rounds of units.

    Parameters
    ----------
    path : {"portable", "hopper"}
    head_dim : int
    dtype : {"float16", "bfloat16"}
    """

    def __init__(self, path: str, head_dim: int, dtype: str) -> None:
        self.path, self.head_dim, self.dtype = path, head_dim, getattr(torch, dtype)
        self.packs = max(1, torch.cuda.get_device_properties("cuda").multi_processor_count // SMS_PER_PACK)
        shape = (self.packs * LONGEST_KV, KV_HEADS, head_dim)
        draw = torch.Generator("cuda").manual_seed(0)
        self.k, self.v = (torch.empty(shape, dtype=self.dtype, device="cuda").normal_(generator=draw) for _ in range(2))
        self._wrappers: dict[tuple[int, int], PackedDecodeWrapper] = {}

    def time_us(self, m: int, n: int, kv_len: int) -> float:
        """Microseconds of a launch, the median of several."""
        decode = self._wrapper(m, n)
        plan = decode.plan(
            full_packs(self.packs, m, kv_len), torch.arange(self.packs * kv_len, dtype=torch.int32, device="cuda")
        )
        queue = len(plan.tiles) - 1 - [rows for rows, _ in plan.tiles].index(m)
        q = torch.zeros(plan.n_requests, KV_HEADS * GROUP, self.head_dim, dtype=self.dtype, device="cuda")
        out = torch.empty_like(q)
        return _microseconds(lambda: decode.run_queue(queue, q, self.k, self.v, out))

    def _wrapper(self, m: int, n: int) -> PackedDecodeWrapper:
        if (m, n) not in self._wrappers:
            tiles = tuple((rows, n if rows == m else other) for rows, other in built_tiles(self.path, self.head_dim))
            self._wrappers[m, n] = PackedDecodeWrapper(
                KV_HEADS * GROUP, KV_HEADS, self.head_dim, dtype=self.dtype, path=self.path, tiles=tiles,
                max_requests=self.packs * (m // GROUP), **PLANNER,
            )  # fmt: skip
        return self._wrappers[m, n]


def _microseconds(call: Any) -> float:
    """Of one call, in a CUDA graph of several, so that the host's launches do not count."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(RUNS):
            call()
    return nanoseconds(graph.replay, ROUNDS) / RUNS / 1e3
