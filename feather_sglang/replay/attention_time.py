"""Time of one layer's decode attention, for three kinds of kernel (docs/design/step_time.md derives the formulas).

Each kind is a frozen set of constants with one method. Which constants belong to which GPU is said by its profile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from feather_sglang.replay.batch_sharing import BatchSharing


class AttentionTime(Protocol):
    """Decode attention of one layer."""

    def seconds(self, lengths: np.ndarray, sharing: BatchSharing, kv_heads: int, head_bytes: int, group: int) -> float:
        """Return the time of one layer.

        Parameters
        ----------
        lengths : shape [rows], tokens of each row.
        kv_heads : KV heads of a layer.
        head_bytes : bytes of a token's K and V for one head.
        group : query heads to a KV head.
        """
        ...


@dataclass(frozen=True)
class RowByRow:
    """A kernel that reads every row's KV: a work item per row and KV head, dealt to the processors in row order.

    Its compute time counts waves of items. Its DRAM time counts what the L2 does not serve: the first use of a token,
    and a later use by a row too far behind to run beside the earlier one, once the L2 has moved on. The two overlap
    partly: (compute^overlap + dram^overlap)^(1/overlap).
    """

    launch_s: float
    item_s: float  # per work item
    byte_s: float  # per byte that an item reads, at one processor
    processors: float
    split_rows: float  # 1: items are cut so that all processors finish together; 0: only very long ones are cut
    longest_share: float  # an item of more than this many times a processor's even share of the work is cut
    window_rows: float  # rows at this distance no longer run at the same time
    l2_bytes: float
    dram_bytes_per_s: float
    overlap: float

    def seconds(self, lengths: np.ndarray, sharing: BatchSharing, kv_heads: int, head_bytes: int, group: int) -> float:
        """Time of one layer's decode attention; see ``AttentionTime``."""
        compute = self._compute(lengths, kv_heads, head_bytes)
        tokens = self._dram_tokens(float(lengths.sum()), sharing, kv_heads * head_bytes)
        dram = tokens * kv_heads * head_bytes / self.dram_bytes_per_s
        return self.launch_s + (compute**self.overlap + dram**self.overlap) ** (1 / self.overlap)

    def _compute(self, lengths: np.ndarray, kv_heads: int, head_bytes: int) -> float:
        token_s = self.byte_s * head_bytes
        items = len(lengths) * kv_heads
        even = (items * self.item_s + float(lengths.sum()) * kv_heads * token_s) / self.processors
        if self.split_rows:
            return even
        # Of the k longest rows some processor gets ceil(k * kv_heads / processors) items, each at least as long as
        # the k-th row: the longest such bound. For rows of one length it is exact.
        longest = self.longest_share * float(lengths.sum()) * kv_heads / self.processors
        descending = np.minimum(np.sort(lengths)[::-1], longest)
        waves = np.ceil(np.arange(1, len(lengths) + 1) * kv_heads / self.processors)
        return max(even, float((waves * (self.item_s + descending * token_s)).max()))

    def _dram_tokens(self, total: float, sharing: BatchSharing, token_bytes: int) -> float:
        # A row `distance` behind the last user of a prefix runs beside it with probability 1 - distance / window.
        again = sum(tokens * min(1.0, distance / self.window_rows) for distance, tokens in sharing.reuse)
        first = total - sum(tokens for _, tokens in sharing.reuse)
        # What one window of rows brings into the L2 decides how much of it the next window still finds there.
        footprint = (first + again) / sharing.rows * self.window_rows * token_bytes
        missed = 1 / (1 + (self.l2_bytes / footprint) ** 4)
        return first + again * missed


@dataclass(frozen=True)
class Packed:
    """A kernel that packs the query rows of all requests that share KV into tiles, and reads that KV once for them.

    Three phases follow each other. Shared KV takes what its reading and its tiles' arithmetic take, which overlap
    partly as above: every tile of `tile_rows` query rows goes along all of the KV, full or not. Then KV that one row
    has alone is read. Every part of a row, one for each stretch of KV it attends to, has a price of its own.
    """

    launch_s: float
    dram_bytes_per_s: float
    processors: float
    tile_rows: float  # query rows: those of a request are the query heads of a KV head
    tile_byte_s: float  # per byte of KV that a tile goes along, at one processor
    part_s: float  # per part and KV head, at one processor
    overlap: float

    def seconds(self, lengths: np.ndarray, sharing: BatchSharing, kv_heads: int, head_bytes: int, group: int) -> float:
        """Time of one layer's decode attention; see ``AttentionTime``."""
        token_bytes = kv_heads * head_bytes
        read_s = token_bytes / self.dram_bytes_per_s
        tile_s = token_bytes * self.tile_byte_s / self.processors
        own = sharing.unique_tokens + float(lengths.sum()) - sharing.total_tokens
        time = self.launch_s + sharing.parts * kv_heads * self.part_s / self.processors
        for rows, tokens in sharing.shared:
            tiles = math.ceil(rows * group / self.tile_rows)
            time += tokens * (read_s**self.overlap + (tiles * tile_s) ** self.overlap) ** (1 / self.overlap)
            own -= tokens
        return time + own * read_s


@dataclass(frozen=True)
class CommonPrefix:
    """A kernel for which only the prefix shared by *all* rows is cheap (paper, figures 3.2 to 3.6)."""

    mixed_bytes_per_s: float  # every row's own reading of KV that not all rows share
    common_speedup: float  # how much cheaper a byte of the common prefix is
    dram_bytes_per_s: float

    def seconds(self, lengths: np.ndarray, sharing: BatchSharing, kv_heads: int, head_bytes: int, group: int) -> float:
        """Time of one layer's decode attention; see ``AttentionTime``."""
        return self.of_total(float(lengths.sum()), sharing, kv_heads, head_bytes)

    def of_total(self, total: float, sharing: BatchSharing, kv_heads: int, head_bytes: int) -> float:
        """The same from the sum of the lengths; the order of the rows does not matter."""
        token_bytes = kv_heads * head_bytes
        growth = total - sharing.total_tokens
        alone = sharing.rows == 1
        common = sharing.rows * sharing.common_tokens + (growth if alone else 0.0)
        mixed = total - common
        reading = (mixed + common / self.common_speedup) / self.mixed_bytes_per_s
        floor = (sharing.unique_tokens + growth) / self.dram_bytes_per_s
        return token_bytes * max(reading, floor)


KINDS: dict[str, type] = {"row-by-row": RowByRow, "packed": Packed, "common-prefix": CommonPrefix}
