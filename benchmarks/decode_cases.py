"""Batches of the decode benchmarks and the GPU check in each system's layout, their floor, and the reference.

The host part (`Case`) needs NumPy only; the device part (`attend`, `padded_slots`) any torch, GPU or not.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feather_kernels.forest import Forest
from feather_kernels.trees import (
    FAR_TREES,
    LONG_TREES,
    MIXED_TREES,
    PAT_TREES,
    SERVING_TREES,
    SMALL_TREES,
    UNLIKE_TREES,
    forest_table,
    named_forest,
)

Ints = npt.NDArray[np.integer]

COPY_BANDWIDTH = 4.3e12  # bytes read plus bytes written per second: an H200's large device-to-device copy
MATRIX_RATE = 790e12  # FLOP per second: an H200's large bf16 matrix product on random data


class Heads(NamedTuple):
    """Query heads and KV heads, written ``32/8``."""

    query: int
    kv: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv}"

    @property
    def group(self) -> int:
        return self.query // self.kv


def parse_heads(text: str) -> Heads:
    """``"32/8"`` as `Heads`; one clear line for anything else."""
    try:
        heads = Heads(*(int(number) for number in text.split("/")))
    except (TypeError, ValueError):
        raise ValueError(f"heads {text!r}: give query/KV heads, such as 32/8") from None
    if heads.kv < 1 or heads.query < 1 or heads.query % heads.kv:
        raise ValueError(f"heads {text!r}: the query heads must be a multiple of the KV heads")
    return heads


class Paged(NamedTuple):
    """KV as FlashInfer takes it: sequence i has the pages ``indices[indptr[i]:indptr[i + 1]]``."""

    indptr: Ints  # int32 [sequences + 1]
    indices: Ints  # int32 [pages]
    last_page_len: Ints  # int32 [sequences]


class Levels(NamedTuple):
    """Two levels as FlashInfer's cascade takes them: the prefix of all requests, and the rest of each."""

    qo_indptr: tuple[Ints, Ints]
    paged: tuple[Paged, Paged]


@dataclass(frozen=True, eq=False)
class Case:
    """One decode batch of one attention layer: a forest, its pages, the heads.

    Parameters
    ----------
    name : str
        The tree as PAT writes it.
    forest : Forest
        With ``row_offset`` into `table`.
    table : int32 [entries]
        Page ids, flat (slot ids at page size 1).
    n_pages : int
        Pages of the pool, all in use.
    heads : Heads
    page_size, head_dim : int
    element_size : int
        Bytes of a KV element.
    """

    name: str
    forest: Forest
    table: Ints
    n_pages: int
    heads: Heads
    page_size: int = 1
    head_dim: int = 128
    element_size: int = 2

    def with_heads(self, heads: Heads) -> Case:
        """The same batch, and whatever was derived from it, for other heads."""
        other = copy.copy(self)
        object.__setattr__(other, "heads", heads)
        return other

    @property
    def n_requests(self) -> int:
        return self.forest.n_requests

    @property
    def n_slots(self) -> int:
        return self.n_pages * self.page_size

    @property
    def unique_tokens(self) -> int:
        """KV tokens of the batch, a shared one counted once."""
        forest = self.forest
        return int(forest.length.sum() + (forest.seq_len - forest.shared_length).sum())

    @property
    def kv_bytes(self) -> int:
        """Bytes of the unique KV tokens, K and V over all KV heads."""
        return self.unique_tokens * 2 * self.heads.kv * self.head_dim * self.element_size

    @property
    def flop(self) -> int:
        """4 * rows * tokens * head_dim over the (query-head row, token) pairs: sharing does not lessen it."""
        return 4 * self.head_dim * self.heads.query * int(self.forest.seq_len.sum())

    def floor(self, copy_bandwidth: float = COPY_BANDWIDTH, matrix_rate: float = MATRIX_RATE) -> float:
        """Seconds that no kernel can go below: each KV byte once, or the matrix units at full rate."""
        return max(self.kv_bytes / copy_bandwidth, self.flop / matrix_rate)

    @cached_property
    def pages(self) -> Ints:
        """int64 [requests]: pages of each request."""
        return -(-self.forest.seq_len.astype(np.int64) // self.page_size)

    @cached_property
    def page_table(self) -> Ints:
        """int32 [requests, most pages of any]: FlashAttention's table; entries past a request's end are 0."""
        columns = np.arange(int(self.pages.max()))
        inside = columns < self.pages[:, None]
        entries = np.where(inside, self.forest.row_offset[:, None] + columns, 0)
        return np.where(inside, self.table[entries], 0).astype(np.int32)

    @cached_property
    def paged(self) -> Paged:
        """Every request's whole sequence, for FlashInfer's decode wrapper."""
        return self._paged(np.zeros(self.n_requests, np.int64))

    @cached_property
    def levels(self) -> Levels | None:
        """The run that all requests share and each one's rest; None where there is no such run, or nothing else."""
        forest = self.forest
        roots = np.flatnonzero(forest.parent == -1)
        if len(roots) != 1 or np.any(forest.request_node < 0):
            return None
        shared = int(forest.length[roots[0]])
        if shared % self.page_size or np.any(forest.seq_len <= shared):
            return None
        pages = shared // self.page_size
        row = int(forest.row_offset[0])
        root = Paged(
            np.array([0, pages], np.int32),
            self.table[row : row + pages].astype(np.int32),
            np.array([self.page_size], np.int32),
        )
        rest = self._paged(np.full(self.n_requests, pages, np.int64))
        requests = np.arange(self.n_requests + 1, dtype=np.int32)
        return Levels((np.array([0, self.n_requests], np.int32), requests), (root, rest))

    def _paged(self, skip: Ints) -> Paged:
        """The pages of each request from its ``skip``-th on."""
        count = self.pages - skip
        indptr = np.append(0, np.cumsum(count))
        within = np.arange(int(indptr[-1])) - np.repeat(indptr[:-1], count)
        entries = np.repeat(self.forest.row_offset + skip, count) + within
        last = self.forest.seq_len - (self.pages - 1) * self.page_size
        return Paged(indptr.astype(np.int32), self.table[entries].astype(np.int32), last.astype(np.int32))


def tree_case(
    name: str, heads: Heads, page_size: int = 1, head_dim: int = 128, seed: int = 0, element_size: int = 2
) -> Case:
    """The batch of a name (`named_forest`), its pages scattered at random over a pool of just the needed size."""
    forest = named_forest(name, page_size)
    table, n_pages = forest_table(forest, page_size, rng=np.random.default_rng(seed))
    return Case(name, forest, table, n_pages, heads, page_size, head_dim, element_size)


TREE_SETS = {
    "pat": PAT_TREES, "serving": SERVING_TREES, "small": SMALL_TREES, "long": LONG_TREES, "mixed": MIXED_TREES,
    "unlike": UNLIKE_TREES, "far": FAR_TREES,
}  # fmt: skip


def choose_trees(text: str, names: Sequence[str] = PAT_TREES) -> list[int]:
    """``"1,3,19-20"`` as indices into `names`, counted from 1 as the tables print them; ``all`` for all."""
    if text == "all":
        return list(range(len(names)))
    chosen: list[int] = []
    for part in text.split(","):
        try:
            first, _, last = part.partition("-")
            chosen += range(int(first) - 1, int(last or first))
        except ValueError:
            raise ValueError(f"trees {text!r}: give numbers from 1 to {len(names)}, such as 1,3,19-20") from None
    if not chosen or min(chosen) < 0 or max(chosen) >= len(names):
        raise ValueError(f"trees {text!r}: give numbers from 1 to {len(names)}, such as 1,3,19-20")
    return chosen


def padded_slots(table: Any, row_offset: Any, seq_lens: Any, page_size: int, width: int) -> Any:
    """The slots of some requests, as a matrix.

    Parameters
    ----------
    table : int tensor [entries]
    row_offset, seq_lens : int64 tensor [requests]
    page_size : int
    width : int
        Columns; at least the longest of the requests.

    Returns
    -------
    int64 tensor [requests, width]
        Past a request's end its first slot is repeated, so that every entry can be read (slot 0 if it has none).
    """
    import torch

    positions = torch.arange(width, device=table.device).expand(len(seq_lens), width)
    positions = torch.where(positions < seq_lens[:, None], positions, 0)
    entries = row_offset[:, None] + positions // page_size
    slots = table[entries.clamp(max=len(table) - 1)].long() * page_size + positions % page_size
    return torch.where(seq_lens[:, None] > 0, slots, 0)


def take_slots(cache: Any, slots: Any) -> Any:
    """``cache[slots]``; not every torch can index float8."""
    import torch

    return cache.view(torch.uint8)[slots].view(cache.dtype) if cache.element_size() == 1 else cache[slots]


def attend(
    q: Any, k: Any, v: Any, slots: Any, seq_lens: Any, sm_scale: float, soft_cap: float = 0.0, sinks: Any = None,
    v_scale: float = 1.0,
) -> Any:  # fmt: skip
    """Decode attention of some requests in float32: the reference of every check.

    Parameters
    ----------
    q : tensor [requests, query heads, head_dim]
    k, v : tensor [slots, KV heads, head_dim]
    slots : int64 tensor [requests, width]
        As `padded_slots` gives them.
    seq_lens : int64 tensor [requests]
    sm_scale : float
        Times what keys stand for, in float8.
    soft_cap : float
        Scores become ``cap * tanh(score / cap)``; 0 for none.
    sinks : tensor [query heads], optional
        A logit a head, beside those of the tokens, that has no value.
    v_scale : float
        What values stand for times.

    Returns
    -------
    out : float32 tensor [requests, query heads, head_dim]
        0 for a request without tokens.
    lse : float32 tensor [requests, query heads]
        Natural log-sum-exp of the scores, and the sink; -inf for a request without either.
    """
    import torch

    requests, query_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    rows = q.float().view(requests, kv_heads, query_heads // kv_heads, head_dim)
    keys = take_slots(k, slots).permute(0, 2, 3, 1).float()
    scores = (rows @ keys).mul_(sm_scale)
    del keys
    if soft_cap:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    outside = torch.arange(slots.shape[1], device=q.device) >= seq_lens[:, None]
    scores.masked_fill_(outside[:, None, None, :], float("-inf"))
    if sinks is not None:
        column = sinks.float().view(1, kv_heads, -1, 1).expand(requests, -1, -1, -1)
        scores = torch.cat([scores, column], -1)
    lse = scores.logsumexp(-1)
    values = take_slots(v, slots).permute(0, 2, 1, 3).float()
    out = scores.softmax(-1)[..., : slots.shape[1]] @ values.mul_(v_scale)
    out = torch.where((seq_lens > 0)[:, None, None, None], out, 0.0)
    return out.flatten(1, 2), lse.reshape(q.shape[:2])


class Watchdog:
    """Ends the process when a step takes longer than it may: a hung kernel would otherwise take the machine along.

    A thread of its own, because the main one may be stuck in a CUDA call.
    """

    def __init__(self, enabled: bool = True, poll: float = 0.5) -> None:
        self._deadline, self._what, self._poll = float("inf"), "", poll
        self.on_stall = lambda: None  # what to save first
        if enabled:
            threading.Thread(target=self._watch, daemon=True).start()

    def expect(self, seconds: float, what: str) -> None:
        """The step that begins now, and how long it may take at most."""
        self._what, self._deadline = what, time.monotonic() + seconds

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._deadline = float("inf")

    def _watch(self) -> None:
        while time.monotonic() < self._deadline:
            time.sleep(self._poll)
        print(f"stalled: {self._what}", file=sys.stderr, flush=True)
        try:
            self.on_stall()
        finally:
            sys.stdout.flush()
            os._exit(3)


def grid(rows: Sequence[Sequence[str]], gap: str = "  ") -> str:
    """A table of fixed-width columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        cells = [cell.rjust(widths[i]) if i else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        lines.append(gap.join(cells).rstrip())
    return "\n".join(lines)
