"""The running requests that read the same KV slots, found in SGLang's own table of slots.

``req_to_token`` has a row of slot ids for every running request, whatever prefix cache, page size or LoRA adapter put
them there, and equal slots are equal KV. So sharing is found in the slots and not in the tokens: rows are hashed on the
device, a number for every chunk of slots, and the numbers of a few hundred requests make the forest.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from feather_kernels.forest import Forest
from feather_sglang.attention.running_forest import RunningForest

CHUNK = 32  # tokens: sharing is found in multiples of it
MAX_SLOTS = 1 << 22  # that one step hashes, padding included; the rest waits for the next step

Rows = npt.NDArray[np.int64]


class Hashes:
    """Row hashes whose copy to the host may still be under way."""

    def __init__(self, on_device: torch.Tensor) -> None:
        self._event: Any = None
        self._values = on_device
        if on_device.is_cuda:
            self._values = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            self._values.copy_(on_device, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def ready(self) -> bool:
        """Whether they have arrived; never waits."""
        return self._event is None or bool(self._event.query())

    def values(self) -> npt.NDArray[np.int64]:
        """int64 [rows, chunks]"""
        return self._values.numpy()


class Submitted(NamedTuple):
    """A group of rows that were hashed by one launch."""

    rows: Rows
    stamps: Rows  # tell a row's owner from those before and after it
    chunks: Rows  # how many of each row's hashes count
    in_prefill: bool  # whether a prefill's rows, up to where the prefix cache held them, or settled ones
    hashes: Hashes


def on_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """The values there, without waiting for the copy."""
    on_host = torch.from_numpy(values)
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host


class RowHasher:
    """Hashes rows of the table, chunk by chunk.

    A chunk's hash is the sum of its slots, each times a secret odd number of its place, modulo 2**64. That is a
    universal hash: two chunks that differ collide with a chance of about 2**-60 (less the powers of two that all
    differences have in common), and nobody outside can choose slots or learn the numbers.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        secret = [secrets.randbits(63) | 1 for _ in range(CHUNK)]
        self._weights = torch.tensor(secret, dtype=torch.int64, device=table.device)

    def submit(self, rows: Rows, chunks: int) -> Hashes:
        """Start to hash the first ``chunks`` chunks of each row, in the current stream."""
        slots = self.table[:, : chunks * CHUNK].index_select(0, on_device(rows, self.table.device))
        return Hashes((slots.view(len(rows), chunks, CHUNK) * self._weights).sum(dim=2))


class RowSharing:
    """The running requests by their rows, and the forest of the KV that they share.

    A request is SGLang's object, which a client cannot make twice as it can an id; its row; and that row's generation,
    which SGLang counts up whenever it gives the row away, so a retracted request that comes back is a new one. A
    request that is not in a decode batch has left.

    **When a row is hashed.** What a request has found in the prefix cache, while its prefill runs: those slots are the
    cache's, which keeps them for as long as the request runs. The whole row only once it has settled. Under the overlap
    scheduler a request's first decode step is launched before the result of its prefill is processed, and that
    processing rewrites the part of the row that was computed: where another request has entered the same prompt into
    the prefix cache first, the row's own slots are replaced by the cache's and freed. A hash taken before would be one
    of slots that belong to somebody else soon, who would then seem to share them. From the second decode step on the
    row only grows: SGLang writes to it when it allocates a prefill's or a decode step's tokens and when it enters a
    prefill into the cache, and to none of its earlier places again (beam search does, so batches with beams share
    nothing). Slots in the row of a running request are neither freed nor given to another, so two rows with equal
    chunks keep them as long as both run.

    Parameters
    ----------
    table : SGLang's ``req_to_token``, int32 [rows, tokens].
    generation : SGLang's own counters, int64 [rows], read at every step.
    settled_at : the decode step at which a row no longer changes: 1, or 2 with the overlap scheduler.
    """

    def __init__(self, table: torch.Tensor, generation: npt.NDArray[np.int64], settled_at: int) -> None:
        self.trie = RunningForest(CHUNK)
        self._hasher = RowHasher(table)
        self._stride = table.stride(0)
        self._generation = generation
        self._settled_at = settled_at
        self._requests: list[Hashable] = []  # kept, so that no other object gets the place of one of these
        self._rows = np.empty(0, np.int64)  # of the last decode batch, in its order
        self._seen = np.zeros((4, len(generation)), np.int64)  # request, generation, length, entry; by row
        self._present = np.zeros(len(generation), bool)
        self._steps = np.zeros(len(generation), np.int64)
        self._hashed = np.zeros(len(generation), bool)  # the whole row, or its hashes are on their way
        self._chunks = np.zeros(len(generation), np.int64)  # of each row, in the trie
        self._pending: deque[Submitted] = deque()
        self._entries = 0
        self._prefills = np.zeros(len(generation), np.int64)  # that have begun in each row
        self._found: dict[int, npt.NDArray[np.int64]] = {}  # hashes of what prefill found, until the row decodes

    def prefill(self, rows: Rows, cached: Rows) -> None:
        """Take note of the next prefill batch.

        ``cached`` are KV tokens in each row that belong to the prefix cache; 0 where that is not known.
        """
        self._prefills[rows] += 1  # what is known of these rows is their former owners'
        for row in rows.tolist():
            self._found.pop(row, None)
        chunks = cached // CHUNK
        shared = chunks > 0
        self._submit(rows[shared], self._prefills[rows[shared]], chunks[shared], in_prefill=True)

    def observe(self, requests: list[Hashable], rows: Rows, lengths: npt.NDArray[np.int32]) -> bool:
        """Take note of the next decode batch; ``lengths`` include the token of this step.

        The result is whether the forest has changed: other requests, another order, or more that they share.
        """
        revision = self.trie.revision
        changed = not self._same_batch(requests, rows, lengths)
        if changed:
            if len(requests) != len(rows):  # rows of beams follow those of the requests, and change places
                self.forget()
                self._collect()  # or what prefills submit meanwhile, with its pinned memory, would pile up
                return True
            self._enter(requests, rows, lengths)
        self._seen[2, rows] = lengths
        self._steps[rows] += 1
        self._collect()
        self._hash(rows, lengths)
        return changed or self.trie.revision != revision

    def forest(self, rows: Rows, lengths: npt.NDArray[np.int32]) -> Forest:
        """The forest of the batch observed last; lengths beyond its rows belong to padding, which is row 0."""
        padded = np.zeros(len(lengths), np.int64)
        padded[: len(rows)] = rows
        return self.trie.forest(padded.tolist(), lengths, padded * self._stride)

    def check(self, forest: Forest, lengths: npt.NDArray[np.int32], table: torch.Tensor | None = None) -> None:
        """Assert that the requests of every node have the same slots in the table that the forest is of.

        It waits for the device. Without a table: in SGLang's.
        """
        shared: dict[int, npt.NDArray[np.int32]] = {}
        flat = (self._hasher.table if table is None else table).view(-1)
        for request, row in enumerate(forest.row_offset.tolist()):
            node = int(forest.request_node[request])
            assert forest.shared_length[request] < lengths[request], f"request {request} shares the token of this step"
            while node >= 0:
                end = int(forest.node_end[node])
                slots = flat[row + end - int(forest.length[node]) : row + end].cpu().numpy()
                assert np.array_equal(shared.setdefault(node, slots), slots), f"request {request} does not share {node}"
                node = int(forest.parent[node])

    def forget(self) -> None:
        """Let every request leave."""
        self._leave(self._rows)
        self._requests, self._rows = [], np.empty(0, np.int64)

    def _leave(self, rows: Rows) -> None:
        for row in rows[self._chunks[rows] > 0].tolist():
            self.trie.leave(row)
        self._chunks[rows] = 0
        self._present[rows] = False

    def _same_batch(self, requests: list[Hashable], rows: Rows, lengths: npt.NDArray[np.int32]) -> bool:
        return (
            requests == self._requests
            and np.array_equal(rows, self._rows)
            and bool((self._generation[rows] == self._seen[1, rows]).all())
            and bool((lengths > self._seen[2, rows]).all())
        )

    def _enter(self, requests: list[Hashable], rows: Rows, lengths: npt.NDArray[np.int32]) -> None:
        """Let those leave who are not in the batch, and enter those who were not."""
        identity = np.fromiter(map(hash, requests), np.int64, len(requests))
        generation = self._generation[rows]
        known = (
            self._present[rows]
            & (self._seen[0, rows] == identity)
            & (self._seen[1, rows] == generation)
            & (self._seen[2, rows] < lengths)  # it grows at every step
        )
        stays = np.zeros(len(self._present), bool)
        stays[rows[known]] = True
        self._leave(self._rows[~stays[self._rows]])
        new = rows[~known]
        self._present[new] = True
        self._hashed[new] = False
        self._steps[new] = 0
        self._seen[0, new], self._seen[1, new] = identity[~known], generation[~known]
        self._seen[3, new] = self._entries + np.arange(len(new))
        self._entries += len(new)
        self._requests, self._rows = requests, rows.copy()

    def _collect(self) -> None:
        """Enter the hashes that have arrived; those of requests that have left meanwhile are dropped."""
        while self._pending and self._pending[0].hashes.ready():
            rows, stamps, chunks, in_prefill, hashes = self._pending.popleft()
            current = self._prefills[rows] if in_prefill else np.where(self._present[rows], self._seen[3, rows], -1)
            values = hashes.values()
            for place in np.flatnonzero(current == stamps).tolist():
                row, its = int(rows[place]), values[place, : chunks[place]].copy()  # not the pinned block
                if in_prefill:
                    self._found[row] = its
                else:
                    self._join(row, its)
        for row in [row for row in self._found if self._present[row]]:
            its = self._found.pop(row)
            if not self._chunks[row]:
                self._join(row, its)

    def _join(self, row: int, hashes: npt.NDArray[np.int64]) -> None:
        if self._chunks[row]:
            self.trie.leave(row)
        self.trie.join(row, hashes)
        self._chunks[row] = len(hashes)

    def _hash(self, rows: Rows, lengths: npt.NDArray[np.int32]) -> None:
        """Hash the rows that have settled, but for those that were known to their last chunk."""
        due = ~self._hashed[rows] & (self._steps[rows] >= self._settled_at)
        if not due.any():
            return
        rows, chunks = rows[due], (lengths[due].astype(np.int64) - 1) // CHUNK
        known = self._chunks[rows] == chunks
        self._hashed[rows[known]] = True
        rows, chunks = rows[~known], chunks[~known]
        self._hashed[self._submit(rows, self._seen[3, rows], chunks, in_prefill=False)] = True
        self._collect()

    def _submit(self, rows: Rows, stamps: Rows, chunks: Rows, in_prefill: bool) -> Rows:
        """Hash rows all in one go, up to `MAX_SLOTS`; returns those that fitted."""
        order = np.argsort(chunks, kind="stable")  # rows are padded to the longest: what goes together is alike
        fits = (np.arange(1, len(order) + 1) * chunks[order] * CHUNK <= MAX_SLOTS) | (np.arange(len(order)) == 0)
        order = order[: int(fits.sum())]  # both factors ascend, so those that fit come first
        rows, stamps, chunks = rows[order], stamps[order], chunks[order]
        if len(rows) and chunks[-1]:
            hashes = self._hasher.submit(rows, int(chunks[-1]))
            self._pending.append(Submitted(rows, stamps, chunks, in_prefill, hashes))
        return rows
