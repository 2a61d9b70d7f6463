"""Pack plans: which requests read which KV together, in the order the kernel runs it (PAT 5 and 6).

A ``Planner`` owns a buffer and the fixed arguments; ``Planner.plan`` is one call into
``csrc/planner``. ``make_plan`` is the same for a single plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feather_kernels.costs import UnitCosts
from feather_kernels.errors import PlanError
from feather_kernels.forest import Forest, IntArray
from feather_kernels.pack import MERGES, SPLITS, STRATEGIES
from feather_kernels.tile_solver import Path
from feather_kernels.tiles import TILES, WIDEST_HEAD

Tiles = Sequence[tuple[int, int]]

# One over a processor's teams, by m, on either path; beyond head_dim 128 there are half as many teams.
DEFAULT_ALPHA = {8: 0.125, 16: 0.125, 32: 0.25, 64: 0.5, 128: 1.0}
COMPUTE_SPLIT_COST = 64.0  # row-tokens that a partial row is worth to `compute`: its bytes at a few FLOP each
FAN_IN = 16  # parts of a request that the item of the last one takes in one by one
MIN_GROWTH = 64  # tokens that any tail may grow before its plan is stale

MAGIC = 0x70616B31
HEADER = 32  # int32 entries
UNLIMITED = 2**31 - 1
DOUBLINGS = 16  # of the price of parts, at most: at 2**16 times their price ranges below 400,000 tokens are not shared
CLOSES = -2  # in place of a member's partial row: its item writes the request's result
_MAX_TILES = 15
_MAX_TILE = 1 << 20  # rows, or tokens: more than any kernel has, and far from the planner's int32
_MAX_PROCESSORS = 1 << 12
_PART_PRICE = slice(2, 4)  # of the reals, as csrc/planner/plan.h numbers them
_WIDENED = 7  # entry of the stats
_ITEM = 12  # entries of an item
_THIN_ROWS = 8  # of the tile that runs one request's query heads
_FAN_IN = 17  # entry of the fixed arguments
_CONFIG_TILES = 19  # entries of the fixed arguments before the tiles, as csrc/planner/plan.h numbers them
_ITEMS, _MEMBERS, _REQUESTS, _PARTS = 1, 2, 3, 4  # entries of the header, as csrc/common/plan_buffer.h numbers them
_ITEMS_BEGIN, _MEMBERS_BEGIN, _PART_BEGIN, _USED, _SERIAL, _CLOSING, _HEAD_PACK, _MERGES = range(6, 14)
_QUEUE = 16


class Traffic(NamedTuple):
    """Bytes over all KV heads (model: see ``pack.py``)."""

    kv: int  # KV tokens loaded
    partial: int  # partial results, written and read

    @property
    def total(self) -> int:
        return self.kv + self.partial


def tail_warps_of(path: str, head_dim: int) -> int:
    """Warps of a processor that take tails, on a path of the kernel (``tiles.TILES``)."""
    return Path.of(path, head_dim).teams_per_processor(_THIN_ROWS)


class Planner:
    """Plans batches into one buffer; what stays the same from batch to batch is given once.

    Parameters
    ----------
    num_qo_heads, num_kv_heads, head_dim : int
        The attention layer; ``num_qo_heads / num_kv_heads`` is the group size G.
    max_requests : int
        Largest batch. With `max_items` and `max_members` it fixes the size of the buffer.
    strategy : str
        A key of ``pack.STRATEGIES``.
    tiles : sequence of (m, n), optional
        Rows and KV tokens of the kernel's tiles, by ascending m; default ``tiles.TILES["hopper"]``. An item of R rows
        runs in the smallest m >= R, but in m = 8 only if it has one request. With ``split`` "balanced" or
        "rounds", long packs of several requests in a tile of at most 16 rows run in the next larger one where they are
        few; and all packs, tails too, in the smallest tile of more than 16 rows where they are few in all, and with
        "rounds" tails alone where they suit its teams (``csrc/planner/row_tiles.h``, ``merge_into_warpgroup_tile``).
    split : str
        A key of ``pack.SPLITS``: how long KV is cut.
    merge : str
        A key of ``pack.MERGES``: who combines the parts of a request.
    alpha : sequence of float, optional
        Of each tile, one over a processor's teams. For ``split`` "balanced", and for "rounds" to begin with, chunks are
        no longer than ``alpha * (token-heads of that tile) / n_sm``. Items of tiles of at most 16 rows, whose units
        single warps take, are cut otherwise: the longest, as many as fill whole rounds of the warps, only where they
        exceed 5/4 of a warp's even share of the tile's tokens; the others so that their chunks are one round, or with
        "rounds" two (``csrc/planner/split.h``, ``balance_warps``).
    min_chunk : int
        ... but the limit is no lower than this many tokens, nor than eight steps of its tile unless single warps have
        all the work or packs are few (`tiles`). Chunks of a pack are even, so shorter than their limit, by up to half.
    n_sm : int
        Processors of the GPU.
    grow : bool
        The private tails grow between plans: every request has an item whose end the kernel reads from ``seq_lens``.
    max_items, max_members, max_parts : int, optional
        Capacity. A plan that exceeds it is made with longer chunks; if that does not help, and the strategy is
        "time", with parts priced higher, so that requests take part in fewer packs; at last `PlanError`.
    profit_factor : float, optional
        ``profit`` merges where ``profit_factor * requests >= carried tokens``; PAT publishes 4. By default the byte
        model decides, which is nearly 2 * G (see ``pack.py``).
    shared_chunk : int
        Tokens in a chunk of ``two-phase``.
    compute_split_cost : float
        What one more partial row costs ``compute``, in row-tokens.
    item_overhead : int
        What one more pack costs ``optimal``, in bytes per KV head.
    costs : UnitCosts, optional
        What ``time`` minimises, and ``rounds``; by default for an H200.
    head_pack : {1, 2}, optional
        KV heads to a unit of the m = 8 queue. 2 needs 2 * G <= 8 and an even number of KV heads, and is taken by
        default where it has them, up to head_dim 128.
    tail_warps : int, optional
        Warps of a processor that take tails, each a unit at a time; by default those of the Hopper path.
    fan_in : int
        With ``merge`` "fused": a request of more parts than this is closed by an item without tokens, behind the
        queues, whose warps ask for many parts at once. 0 for no limit, and for few packs to stay in their tiles
        (`tiles`); a batch whose plan has no room for the one part more is planned so.
    buffer : int32 [capacity], optional
        Memory to plan into (pinned, for example); at least ``Planner.buffer_size`` entries.

    Raises
    ------
    PlanError
        An argument that is not as above.
    """

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        max_requests: int,
        strategy: str = "time",
        tiles: Tiles | None = None,
        split: str = "rounds",
        merge: str = "fused",
        alpha: Sequence[float] | None = None,
        min_chunk: int = 64,
        n_sm: int = 132,
        grow: bool = True,
        max_items: int | None = None,
        max_members: int | None = None,
        max_parts: int | None = None,
        profit_factor: float | None = None,
        shared_chunk: int = 64,
        compute_split_cost: float = COMPUTE_SPLIT_COST,
        item_overhead: int = 0,
        costs: UnitCosts | None = None,
        head_pack: int | None = None,
        tail_warps: int | None = None,
        fan_in: int = FAN_IN,
        buffer: IntArray | None = None,
    ) -> None:
        from feather_kernels.build import (
            load_planner,  # here: `python -m feather_kernels.build` imports this module first
        )

        self.tail_warps = tail_warps_of("hopper", head_dim) if tail_warps is None else tail_warps
        _require_positive(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, max_requests=max_requests,
            min_chunk=min_chunk, n_sm=n_sm, shared_chunk=shared_chunk, tail_warps=self.tail_warps,
        )  # fmt: skip
        if n_sm > _MAX_PROCESSORS:
            raise PlanError(f"n_sm is {n_sm}: a GPU has no more than {_MAX_PROCESSORS} processors")
        if num_qo_heads % num_kv_heads:
            raise PlanError(f"num_qo_heads {num_qo_heads} is no multiple of num_kv_heads {num_kv_heads}")
        if not 0 <= fan_in <= UNLIMITED:
            raise PlanError(f"fan_in is {fan_in}: give a number from 0 (no limit) to {UNLIMITED}")
        if not 0 <= item_overhead <= UNLIMITED:
            raise PlanError(f"item_overhead is {item_overhead}: give a number from 0 to {UNLIMITED}")
        if not 0 <= compute_split_cost < math.inf or not (profit_factor is None or 0 < profit_factor < math.inf):
            raise PlanError("compute_split_cost is at least 0, profit_factor above 0, and both are finite")
        self.strategy = _known("strategy", strategy, STRATEGIES)
        self.split = _known("split", split, SPLITS)
        self.merge = _known("merge", merge, MERGES)
        self.grow = grow
        self.num_kv_heads, self.group_size, self.head_dim = num_kv_heads, num_qo_heads // num_kv_heads, head_dim
        self.tiles = _checked_tiles(TILES["hopper"] if tiles is None else tiles, self.group_size)
        _check_head_pack(head_pack, self.group_size, num_kv_heads, self.tiles)
        self.n_sm, self.head_pack, self.fan_in, self.max_requests = n_sm, head_pack, fan_in, max_requests
        without_tokens = max_requests if merge == "fused" and not grow else 0
        self.max_items = 4 * max_requests + without_tokens + 8 * n_sm if max_items is None else max_items
        self.max_members = 16 * max_requests + 16 * self.max_items if max_members is None else max_members
        self.max_parts = UNLIMITED if max_parts is None else max_parts
        _require_positive(max_items=self.max_items, max_members=self.max_members)
        if not 0 <= self.max_parts <= UNLIMITED:
            raise PlanError(f"max_parts is {self.max_parts}: give a number from 0 to {UNLIMITED}")
        self._config = np.zeros(_CONFIG_TILES + 2 * _MAX_TILES, np.int64)
        self._config[:_CONFIG_TILES] = [
            list(STRATEGIES).index(strategy), list(SPLITS).index(split), grow, num_kv_heads, self.group_size, head_dim,
            min_chunk, n_sm, max_requests, self.max_items, self.max_members, self.max_parts, shared_chunk,
            item_overhead, list(MERGES).index(merge), head_pack or 0, self.tail_warps, fan_in, len(self.tiles),
        ]  # fmt: skip
        self._config[_CONFIG_TILES : _CONFIG_TILES + 2 * len(self.tiles)] = np.ravel(self.tiles)
        costs = UnitCosts.default(self.tiles) if costs is None else costs
        self._reals = np.array([
            profit_factor or 0, compute_split_cost, costs.part, costs.part_row,
            *_alpha(alpha, self.tiles, head_dim > WIDEST_HEAD), *costs.of_tiles(self.tiles),
        ], np.float64)  # fmt: skip
        self._stats = np.zeros(8, np.int64)
        module = load_planner()
        self._plan = module.plan
        self.buffer_size = int(module.buffer_size(self._config))
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
        dearer = self._fit(forest, self.buffer)
        self._stats[_WIDENED] |= dearer
        return PackPlan(self, forest, self.buffer, int(self.buffer[_SERIAL]), tuple(self._stats.tolist()))

    def _fit(self, forest: Forest, buffer: IntArray) -> bool:
        """Plan within the capacity; whether that took a higher price of parts."""
        try:
            self._call(forest, buffer)
            return False
        except PlanError as error:
            refused = error
        price = self._reals[_PART_PRICE]
        normal = price.copy()
        fan_ins = dict.fromkeys((self.fan_in, 0))  # closing items apart take more room
        try:
            for doublings, fan_in in [(times, fan_in) for times in range(DOUBLINGS + 1) for fan_in in fan_ins][1:]:
                if doublings and self.strategy != "time":
                    break
                price[:] = normal * 2**doublings
                self._config[_FAN_IN] = fan_in
                try:
                    self._call(forest, buffer)
                    return doublings > 0
                except PlanError as error:
                    refused = error
            raise refused
        finally:
            price[:] = normal
            self._config[_FAN_IN] = self.fan_in

    def _call(self, forest: Forest, buffer: IntArray) -> None:
        try:
            self._plan(
                self._config, self._reals, forest.parent, forest.length, forest.request_node, forest.seq_len,
                forest.row_offset, buffer, self._stats,
            )  # fmt: skip
        except ValueError as error:
            raise PlanError(str(error)) from None


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
    stats: tuple[int, ...]

    @cached_property
    def header(self) -> list[int]:
        return self.buffer[:HEADER].tolist()

    @property
    def strategy(self) -> str:
        return self.planner.strategy

    @property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        return self.planner.tiles

    @property
    def group_size(self) -> int:
        return self.planner.group_size

    @property
    def n_items(self) -> int:
        return self.stats[4]

    @property
    def n_members(self) -> int:
        return self.stats[5]

    @property
    def n_requests(self) -> int:
        return self.forest.n_requests

    @property
    def row_offset(self) -> IntArray:
        """int64 [n_requests]: start of each request's row in the flat table, in entries."""
        return self.forest.row_offset

    @property
    def n_parts(self) -> int:
        """Rows of the partial-result buffer, each G query heads of every KV head."""
        return self.stats[6]

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
        return bool(self.stats[_WIDENED])

    @property
    def traffic(self) -> Traffic:
        """The packs by the traffic model, before row tiling and KV split."""
        return Traffic(*self.stats[0:2])

    @property
    def scheduled_traffic(self) -> Traffic:
        """The same of the items as they run: row tiles load their KV again, chunks make more parts."""
        return Traffic(*self.stats[2:4])

    @property
    def tokens_read(self) -> int:
        """KV tokens that the items read, per KV head; one that several row tiles read counts in each."""
        token = 2 * 2 * self.planner.head_dim * self.planner.num_kv_heads  # bytes of K and V, 16 bits each
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
        a warp that still owes a part passes over slots of its ring from there on (`csrc/sm80`). Closing items
        without tokens are in no queue: they follow the last one, and wait for any other.
        """
        return self.buffer[_QUEUE : _QUEUE + len(self.tiles) + 1]

    @cached_property
    def _longest(self) -> npt.NDArray[np.int64]:
        """int64 [requests]: the sequence length up to which each request's growing item may grow."""
        items = self.items[self.items[:, 4] >= 0]
        chunk = np.zeros(self.n_requests, np.int64)
        chunk[items[:, 4]] = items[:, 3] - items[:, 2]
        return self.forest.seq_len + np.maximum(chunk, MIN_GROWTH)

    def valid_for(self, batch: Forest | IntArray) -> tuple[bool, str]:
        """Whether the plan still holds (PAT 5.1, lazy update), and if not, why.

        It does while the same requests only grow in their private tails, none by more than its growing item's length
        or 64 tokens, whichever is more. Beyond that the plan would still be right, but badly balanced.

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
            return False, f"the batch has {len(seq_len)} requests, the plan {self.n_requests}"
        if not self.planner.grow:
            same = np.array_equal(seq_len, self.forest.seq_len)
            return same, "" if same else "a sequence length has changed and the plan was made with grow=False"
        shrunk, outgrown = seq_len < self.forest.seq_len, seq_len > self._longest
        for wrong, reason in ((shrunk, "shrunk"), (outgrown, "outgrown its item")):
            if wrong.any():
                request = int(wrong.argmax())
                before, now = int(self.forest.seq_len[request]), int(seq_len[request])
                return False, f"request {request} has {reason}: {before} tokens when planned, {now} now"
        return True, ""


def default_parts(max_requests: int, num_qo_heads: int) -> int:
    """Partial results that the wrapper has memory for.

    Parameters
    ----------
    max_requests, num_qo_heads : int
        As for `Planner`.
    """
    # A part for each of five shared levels, and the chunks of long packs: about as many query rows in all as the
    # processors' tiles hold at once, whatever the heads. Deeper batches are packed less (`Planner.plan`).
    return 5 * max_requests + 65536 // num_qo_heads


def make_plan(forest: Forest, *, max_requests: int | None = None, **arguments: Any) -> PackPlan:
    """One plan in a buffer of its own, as large as it has to be; arguments as for `Planner`.

    With ``max_items``, ``max_members`` or ``buffer`` given, the capacity is that of `Planner` instead.
    """
    requests = max(forest.n_requests, 1) if max_requests is None else max_requests
    if not arguments.keys() & {"max_items", "max_members", "buffer"}:
        scout = Planner(max_requests=requests, **arguments, max_items=1, max_members=1)
        scout._config[9:11] = UNLIMITED
        scout._fit(forest, np.empty(0, np.int32))
        arguments |= {"max_items": max(int(scout._stats[4]), 1), "max_members": max(int(scout._stats[5]), 1)}
    return Planner(max_requests=requests, **arguments).plan(forest)


def _require_positive(**arguments: int) -> None:
    for name, value in arguments.items():
        if not 1 <= value <= UNLIMITED:
            raise PlanError(f"{name} is {value}: give a number from 1 to {UNLIMITED}")


def _known(name: str, value: str, choices: dict[str, str]) -> str:
    if value not in choices:
        raise PlanError(f"{name} is {value!r}: use one of {', '.join(choices)}")
    return value


def _checked_tiles(tiles: Tiles, group_size: int) -> tuple[tuple[int, int], ...]:
    checked = tuple((int(m), int(n)) for m, n in tiles)
    rows = [m for m, _ in checked]
    sizes = [size for tile in checked for size in tile]
    in_range = 1 <= len(checked) <= _MAX_TILES and 1 <= min(sizes) and max(sizes) <= _MAX_TILE
    if not in_range or rows != sorted(set(rows)):
        raise PlanError(f"tiles are {checked}: give 1 to {_MAX_TILES} pairs (m, n) of ascending m, up to {_MAX_TILE}")
    if group_size > rows[-1]:
        raise PlanError(f"the group of {group_size} query heads has more rows than the largest tile, {rows[-1]}")
    return checked


def _check_head_pack(head_pack: int | None, group_size: int, num_kv_heads: int, tiles: Tiles) -> None:
    if head_pack not in (None, 1, 2):
        raise PlanError(f"head_pack is {head_pack}: give 1, 2 or None")
    tail_rows = next(m for m, _ in tiles if m >= group_size)
    if head_pack == 2 and (tail_rows != _THIN_ROWS or 2 * group_size > _THIN_ROWS or num_kv_heads % 2):
        raise PlanError(
            f"head_pack is 2, with groups of {group_size}, {num_kv_heads} KV heads and {tail_rows} rows to a tail: it "
            "needs a tile of 8 rows that holds two groups, and an even number of KV heads"
        )


def _alpha(alpha: Sequence[float] | None, tiles: tuple[tuple[int, int], ...], half: bool) -> list[float]:
    if alpha is None:
        shares = [max((share for m, share in DEFAULT_ALPHA.items() if m <= tile[0]), default=0.3) for tile in tiles]
        return [min(1.0, 2 * share) for share in shares] if half else shares
    if len(alpha) != len(tiles) or not all(0 < share < math.inf for share in alpha):
        raise PlanError(f"alpha is {tuple(alpha)}: give a finite number above 0 for each of the {len(tiles)} tiles")
    return [float(share) for share in alpha]


def _checked_buffer(buffer: IntArray | None, size: int) -> IntArray:
    if buffer is None:
        return np.zeros(size, np.int32)
    if buffer.dtype != np.int32 or buffer.ndim != 1 or not buffer.flags.c_contiguous or not buffer.flags.writeable:
        raise PlanError("buffer is no writable contiguous int32 vector")
    if len(buffer) < size:
        raise PlanError(f"buffer has {len(buffer)} entries: this capacity needs {size}")
    return buffer[:size]
