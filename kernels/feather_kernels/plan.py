"""Pack plans: which requests read which KV together, in the order the kernel runs it (PAT 5 and 6).

A ``Planner`` owns a buffer and the fixed arguments; ``Planner.plan`` is one call into
``csrc/planner``. ``make_plan`` is the same for a single plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feather_kernels.errors import PlanError
from feather_kernels.forest import Forest, IntArray, check_forest
from feather_kernels.options import UNLIMITED, PlannerOptions, PlanStats

SHARED_LEVELS = 5  # shared levels that there is memory for
MIN_GROWTH = 64  # tokens that any tail may grow before its plan is stale
_FOLDED_SHARE = 4  # of the growing item's length, where units of others read tails: the lab's "What made it faster?"

MAGIC = 0x70616B31
HEADER = 32  # int32 entries
DOUBLINGS = 16  # of the price of parts, at most: at 2**16 times their price ranges below 400,000 tokens are not shared
CLOSES = -2  # in place of a member's partial row: its item writes the request's result
_ITEM = 12  # entries of an item
_ITEMS, _MEMBERS, _REQUESTS, _PARTS = 1, 2, 3, 4  # entries of the header, as csrc/common/plan_buffer.h numbers them
_ITEMS_BEGIN, _MEMBERS_BEGIN, _PART_BEGIN, _USED, _SERIAL, _CLOSING, _HEAD_PACK, _MERGES = range(6, 14)
_QUEUE = 16


class Traffic(NamedTuple):
    """Bytes over all KV heads (model: see ``pack.py``)."""

    kv: int  # KV tokens loaded
    partial: int  # partial results, written and read

    @property
    def total(self) -> int:
        """Bytes of both kinds."""
        return self.kv + self.partial


class Planner:
    """Plans batches into one buffer; what stays the same from batch to batch is given once.

    Parameters
    ----------
    num_qo_heads, num_kv_heads, head_dim : int
        The attention layer.
    buffer : int32 [capacity], optional
        Memory to plan into (pinned, for example); at least ``Planner.buffer_size`` entries.
    **options
        The other fields of `PlannerOptions`; ``max_requests`` is needed.

    Raises
    ------
    PlanError
        An argument that is not as there.
    """

    def __init__(
        self, num_qo_heads: int, num_kv_heads: int, head_dim: int, *, buffer: IntArray | None = None, **options: Any
    ) -> None:
        self.options = PlannerOptions(num_qo_heads, num_kv_heads, head_dim, **options)
        self._record = self.options.record()
        self.buffer_size = int(_library().buffer_size(self._record))
        if self.buffer_size > UNLIMITED:
            raise PlanError(
                f"this capacity needs a buffer of {self.buffer_size} entries: lower max_requests, max_items or "
                "max_members"
            )
        self.buffer = _checked_buffer(buffer, self.buffer_size)

    def plan(self, forest: Forest) -> PackPlan:
        """Plan a batch into the planner's buffer, over whatever plan was there.

        Raises
        ------
        PlanError
            A forest that contradicts itself, or a plan that exceeds the capacity. The buffer keeps its last plan.
        """
        check_forest(forest)
        stats = _fit(self.options, self._record, forest, self.buffer)
        return PackPlan(self, forest, self.buffer, int(self.buffer[_SERIAL]), stats)


@dataclass(frozen=True, eq=False)
class PackPlan:
    """One batch's plan: views into the planner's buffer, which the planner's next plan overwrites.

    Attributes
    ----------
    buffer : int32 [Planner.buffer_size]
        Everything the kernel reads; its first ``used`` entries are this plan. Header of 32: magic, items, members,
        requests, partial rows, tiles, begin of items, of members, of part_begin, used, serial, closing items, head
        pack, items behind the queues; queue_begin from 16 on.
    """

    planner: Planner
    forest: Forest
    buffer: IntArray
    serial: int
    stats: PlanStats

    @cached_property
    def header(self) -> list[int]:
        """First numbers of the buffer: where its parts begin."""
        return self.buffer[:HEADER].tolist()

    @property
    def options(self) -> PlannerOptions:
        """Those that it was made with."""
        return self.planner.options

    @property
    def strategy(self) -> str:
        """Name of the packing strategy."""
        return self.options.strategy

    @property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        """Tile shapes (m, n) that it may use."""
        return self.options.tiles

    @property
    def group_size(self) -> int:
        """Query heads to a KV head."""
        return self.options.group_size

    @property
    def n_items(self) -> int:
        """Work items."""
        return self.stats.items

    @property
    def n_members(self) -> int:
        """Entries of all row lists."""
        return self.stats.members

    @property
    def n_requests(self) -> int:
        """Requests of the batch."""
        return self.forest.n_requests

    @property
    def row_offset(self) -> IntArray:
        """int64 [n_requests]: start of each request's row in the flat table, in entries."""
        return self.forest.row_offset

    @property
    def n_parts(self) -> int:
        """Rows of the partial-result buffer, each G query heads of every KV head."""
        return self.stats.parts

    @property
    def n_closing(self) -> int:
        """Items that close a request of several parts: one for each, in the tail tile's queue or behind the queues."""
        return self.header[_CLOSING]

    @property
    def n_merges(self) -> int:
        """Those of them behind the queues, without tokens."""
        return self.header[_MERGES]

    @property
    def head_pack(self) -> int:
        """KV heads to a unit of the m = 8 queue; 1 if there is none."""
        return self.header[_HEAD_PACK]

    @property
    def used(self) -> int:
        """Entries of `buffer` up to the plan's last: as many as a copy to the device has to move."""
        return self.header[_USED]

    @property
    def widened(self) -> bool:
        """Whether chunks are longer, or packs fewer, than asked for, to stay within the capacity."""
        return bool(self.stats.widened)

    @property
    def traffic(self) -> Traffic:
        """The packs by the traffic model, before row tiling and KV split."""
        return Traffic(self.stats.model_kv, self.stats.model_partial)

    @property
    def scheduled_traffic(self) -> Traffic:
        """The same of the items as they run: row tiles load their KV again, chunks make more parts."""
        return Traffic(self.stats.scheduled_kv, self.stats.scheduled_partial)

    @property
    def tokens_read(self) -> int:
        """KV tokens that the items read, per KV head; one that several row tiles read counts in each."""
        options = self.options
        token = options.kv_value_bytes * options.token_values * options.num_kv_heads  # bytes of K and V
        return self.scheduled_traffic.kv // token

    @property
    def items(self) -> IntArray:
        """int32 [n_items, 12]: row offset low, high, start, stop, grows, first member, members, tile; then of the first
        member its request and part, and of the partial rows that it takes in the first and how many."""
        begin = self.header[_ITEMS_BEGIN]
        return self.buffer[begin : begin + _ITEM * self.n_items].reshape(-1, _ITEM)

    @property
    def members(self) -> IntArray:
        """int32 [n_members, 2]: request; and its partial row, -1 for its only item, or `CLOSES`."""
        begin = self.header[_MEMBERS_BEGIN]
        return self.buffer[begin : begin + 2 * self.n_members].reshape(-1, 2)

    @property
    def part_begin(self) -> IntArray:
        """int32 [n_requests + 1]: each request's partial rows, in order of position; what closes it has none."""
        begin = self.header[_PART_BEGIN]
        return self.buffer[begin : begin + self.n_requests + 1]

    @property
    def queue_begin(self) -> IntArray:
        """int32 [n_tiles + 1]: queue q holds the items of tile ``n_tiles - 1 - q`` (largest m first), longest first.

        With ``merge="fused"``, the queue of the smallest m >= G has three such runs: items that neither wait for an
        item of this queue nor are waited for; those that others wait for; and closing items that wait for any of these.
        So an item waits for earlier ones only. No item that neither deposits nor waits may stand behind the first run:
        a warp that still owes a part passes over slots of its ring from there on (`csrc/common/tail_stream.cuh`).
        Closing items without tokens are in no queue: they are the plan's last, and wait for any other. Before them are
        tails that an item in a queue reads behind what its members share (`PlannerOptions.fold_tails`).
        """
        return self.buffer[_QUEUE : _QUEUE + len(self.tiles) + 1]

    @cached_property
    def _longest(self) -> npt.NDArray[np.int64]:
        """int64 [requests]: the sequence length up to which each request's growing item may grow."""
        items = self.items[self.items[:, 4] >= 0]
        chunk = np.zeros(self.n_requests, np.int64)
        chunk[items[:, 4]] = items[:, 3] - items[:, 2]
        if self.options.fold_tails:  # a unit has a processor to itself, and all others wait for the longest
            chunk //= _FOLDED_SHARE
        return self.forest.seq_len + np.maximum(chunk, MIN_GROWTH)

    def valid_for(self, batch: Forest | IntArray) -> tuple[bool, str]:
        """Whether the plan still holds (PAT 5.1, lazy update), and if not, why.

        It does while the same requests only grow in their private tails, none by more than its growing item's length
        (with ``fold_tails``, a quarter of it) or 64 tokens, whichever is more. Beyond that the plan would still be
        right, but badly balanced.

        Parameters
        ----------
        batch : Forest or int32 [requests]
            The batch now, or only its sequence lengths where the caller knows that nothing else has changed.
        """
        if int(self.buffer[_SERIAL]) != self.serial:
            return False, "the planner's buffer holds a newer plan"
        if isinstance(batch, Forest):
            for name in ("request_node", "row_offset", "parent", "length"):
                now, planned = getattr(batch, name), getattr(self.forest, name)
                if now is not planned and not np.array_equal(now, planned):
                    return False, f"the forest's {name} has changed"
            seq_len = batch.seq_len
        else:
            seq_len = np.asarray(batch)
        if seq_len.shape != self.forest.seq_len.shape:
            return False, f"the batch has {seq_len.size} requests, the plan {self.n_requests}"
        if not self.options.grow:
            same = np.array_equal(seq_len, self.forest.seq_len)
            return same, "" if same else "a sequence length has changed and the plan was made with grow=False"
        shrunk, outgrown = seq_len < self.forest.seq_len, seq_len > self._longest
        for wrong, reason in ((shrunk, "shrunk"), (outgrown, "outgrown its item")):
            if wrong.any():
                request = int(wrong.argmax())
                before, now = int(self.forest.seq_len[request]), int(seq_len[request])
                return False, f"request {request} has {reason}: {before} tokens when planned, {now} now"
        return True, ""


def default_parts(max_requests: int, num_qo_heads: int, levels: int = SHARED_LEVELS) -> int:
    """Partial results that the wrapper has memory for.

    Parameters
    ----------
    max_requests, num_qo_heads : int
        As for `Planner`.
    levels : int
        Shared levels of a request, each a part.
    """
    # And the chunks of long packs: about as many query rows in all as the processors' tiles hold at once, whatever the
    # heads. Deeper batches are packed less (`Planner.plan`).
    return levels * max_requests + 65536 // num_qo_heads


def make_plan(forest: Forest, *, max_requests: int | None = None, **arguments: Any) -> PackPlan:
    """One plan in a buffer of its own, as large as it has to be; arguments as for `Planner`.

    With ``max_items``, ``max_members`` or ``buffer`` given, the capacity is that of `Planner` instead.
    """
    check_forest(forest)
    requests = max(forest.n_requests, 1) if max_requests is None else max_requests
    if not arguments.keys() & {"max_items", "max_members", "buffer"}:
        scout = PlannerOptions(max_requests=requests, **arguments, max_items=UNLIMITED, max_members=UNLIMITED)
        needed = _fit(scout, scout.record(), forest, np.empty(0, np.int32))
        arguments |= {"max_items": max(needed.items, 1), "max_members": max(needed.members, 1)}
    return Planner(max_requests=requests, **arguments).plan(forest)


def _library() -> Any:
    from feather_kernels.build import load_planner  # here: `python -m feather_kernels.build` imports this module first

    return load_planner()


def _fit(options: PlannerOptions, record: npt.NDArray[np.int64], forest: Forest, buffer: IntArray) -> PlanStats:
    """Plan within the capacity, at a higher price of parts if it takes that; `record` is that of the options."""
    try:
        return _call(record, forest, buffer)
    except PlanError as error:
        refused = error
    for doublings in range(1, DOUBLINGS + 1 if options.strategy == "time" else 1):
        costs = options.costs
        dearer = replace(costs, part=costs.part * 2**doublings, part_row=costs.part_row * 2**doublings)
        try:
            return _call(replace(options, costs=dearer).record(), forest, buffer)._replace(widened=1)
        except PlanError as error:
            refused = error
    raise refused


def _call(record: npt.NDArray[np.int64], forest: Forest, buffer: IntArray) -> PlanStats:
    stats = np.empty(len(PlanStats._fields), np.int64)
    try:
        _library().plan(
            record, forest.parent, forest.length, forest.request_node, forest.seq_len, forest.row_offset, buffer, stats
        )
    except ValueError as error:
        raise PlanError(str(error)) from None
    return PlanStats(*stats.tolist())


def _checked_buffer(buffer: IntArray | None, size: int) -> IntArray:
    if buffer is None:
        try:
            return np.zeros(size, np.int32)
        except MemoryError:
            raise PlanError(f"no memory for a buffer of {size} entries: lower max_requests or max_items") from None
    if (
        not isinstance(buffer, np.ndarray)
        or buffer.dtype != np.int32
        or buffer.ndim != 1
        or not buffer.flags.c_contiguous
        or not buffer.flags.writeable
    ):
        raise PlanError("buffer is no writable contiguous int32 vector")
    if len(buffer) < size:
        raise PlanError(f"buffer has {len(buffer)} entries: this capacity needs {size}")
    return buffer[:size]
