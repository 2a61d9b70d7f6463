"""The options of a planner: checked here, and handed to ``csrc/planner/interface.h`` field by field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feather_kernels.costs import UnitCosts
from feather_kernels.errors import BuildError, PlanError, is_number, is_whole
from feather_kernels.pack import MERGES, SPLITS, STRATEGIES
from feather_kernels.paths import MOST_SHARED, KernelPath
from feather_kernels.tiles import TILES, WIDEST_HEAD

Tiles = Sequence[tuple[int, int]]
BY_DEFAULT: Any = None  # what follows from the others

# One over a processor's teams, by m, on either path; beyond head_dim 128 there are half as many teams.
DEFAULT_ALPHA = {8: 0.125, 16: 0.125, 32: 0.25, 64: 0.5, 128: 1.0}
COMPUTE_SPLIT_COST = 64.0  # row-tokens that a partial row is worth to `compute`: its bytes at a few FLOP each
GROUP_CAPACITY = 8192  # token-heads: the example of PackInfer 3.1, not measured
FAN_IN = 16  # parts of a request that the item of the last one takes in one by one
UNLIMITED = 2**31 - 1
_THIN_ROWS = 8  # of the tile that runs one request's query heads

_MAX_TILES = 15
_MAX_TILE = 1 << 20  # rows, or tokens: more than any kernel has, and far from the planner's int32
_MAX_PROCESSORS = 1 << 12
_MOST_TEAMS = 1 << 16  # of a processor: more than any has threads

# ``PlannerOptions`` of csrc/planner/interface.h. The first line's fields are the places of names in their tables.
_CHOICES = {"strategy": tuple(STRATEGIES), "split": tuple(SPLITS), "merge": tuple(MERGES)}
_INTEGERS = (
    "grow", "num_kv_heads", "group_size", "head_dim", "kv_value_bytes", "token_values", "n_sm", "max_requests",
    "max_items", "max_members", "max_parts", "min_chunk", "shared_chunk", "item_overhead", "head_pack", "tail_warps",
    "fan_in", "causal_tails", "fold_tails", "group_capacity",
)  # fmt: skip
_RECORD = np.dtype(
    [(name, np.int64) for name in (*_CHOICES, *_INTEGERS, "n_tiles")]
    + [(name, np.int64, (_MAX_TILES,)) for name in ("tile_m", "tile_n")]
    + [(name, np.float64) for name in ("profit_factor", "compute_split_cost", "part_ns", "part_row_ns")]
    + [(name, np.float64, (_MAX_TILES,)) for name in ("alpha", "unit_ns", "step_ns")]
)


@dataclass(frozen=True)
class PlannerOptions:
    """Options that stay the same from batch to batch: attention layer, GPU, pack strategy and capacity.

    What is left out has its value here once it is made; only `head_pack` and `profit_factor` stay None.

    Attributes
    ----------
    num_qo_heads, num_kv_heads, head_dim : int
        The attention layer; ``num_qo_heads / num_kv_heads`` is the group size G.
    max_requests : int
        Largest batch. With `max_items` and `max_members` it fixes the size of the buffer.
    strategy : str
        A key of ``pack.STRATEGIES``.
    tiles : sequence of (m, n), optional
        Rows and KV tokens of the kernel's tiles, by ascending m; default ``tiles.TILES["hopper"]``. An item of R rows
        runs in the smallest m >= R, but in m = 8 only if it has one request. With ``split`` "balanced", "rounds" or
        "groups", long packs of several requests in a tile of at most 16 rows run in the next larger one where they are
        few; and all packs, tails too, in the smallest tile of more than 16 rows where they are few in all, and but for
        "balanced" tails where they suit its teams (``csrc/planner/row_tiles.h``, ``merge_into_warpgroup_tile``).
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
    kv_value_bytes : {2, 1}
        Of a value in the caches, for the traffic model.
    token_values : int, optional
        Values of a token there, for one KV head; default K and V, ``2 * head_dim``.
    causal_tails : bool
        Requests that have one row of slots, and each a token more than the one before, as the new tokens of a prompt
        do, have their tails in one pack, in a tile of teams; whoever runs it lets each see its own tokens only. Needs
        `grow` False, and a tile of more than 16 rows.
    fold_tails : bool
        Tails may be read by the unit of what their requests share, behind it, and no unit merges: so the kernel for
        latent attention has it.
    group_capacity : int
        PackInfer's C, for ``split`` "groups": token-heads (KV tokens of one KV head) that a processor's teams take at
        once. Which processor has which group is not planned: where the kernel's teams ask for units, whoever is free
        takes the longest left, and that is PackInfer's rule, the longest first onto the least loaded.

    Raises
    ------
    PlanError
        An argument that is not as above.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    _: KW_ONLY
    max_requests: int
    strategy: str = "time"
    tiles: tuple[tuple[int, int], ...] = BY_DEFAULT
    split: str = "rounds"
    merge: str = "fused"
    alpha: tuple[float, ...] = BY_DEFAULT
    min_chunk: int = 64
    n_sm: int = 132
    grow: bool = True
    max_items: int = BY_DEFAULT
    max_members: int = BY_DEFAULT
    max_parts: int = BY_DEFAULT
    profit_factor: float | None = None
    shared_chunk: int = 64
    compute_split_cost: float = COMPUTE_SPLIT_COST
    item_overhead: int = 0
    costs: UnitCosts = BY_DEFAULT
    head_pack: int | None = None
    tail_warps: int = BY_DEFAULT
    fan_in: int = FAN_IN
    kv_value_bytes: int = 2
    token_values: int = BY_DEFAULT
    causal_tails: bool = False
    fold_tails: bool = False
    group_capacity: int = GROUP_CAPACITY

    def __post_init__(self) -> None:
        if self.tail_warps is None:
            self._settle(tail_warps=tail_warps_of("hopper", self.head_dim))
        if self.token_values is None:
            self._settle(token_values=2 * self.head_dim)
        self._require_positive(
            "num_qo_heads",
            "num_kv_heads",
            "head_dim",
            "max_requests",
            "min_chunk",
            "n_sm",
            "shared_chunk",
            "tail_warps",
            "token_values",
            "group_capacity",
        )
        for name in ("grow", "causal_tails"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise PlanError(f"{name} is {getattr(self, name)!r}: give True or False")
        if self.n_sm > _MAX_PROCESSORS:
            raise PlanError(f"n_sm is {self.n_sm}: a GPU has no more than {_MAX_PROCESSORS} processors")
        if self.num_qo_heads % self.num_kv_heads:
            raise PlanError(f"num_qo_heads {self.num_qo_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if not _is_count(self.fan_in):
            raise PlanError(f"fan_in is {self.fan_in!r}: give a number from 0 (no limit) to {UNLIMITED}")
        if not is_whole(self.kv_value_bytes) or self.kv_value_bytes not in (1, 2):
            raise PlanError(f"kv_value_bytes is {self.kv_value_bytes!r}: give 2 or 1")
        if not _is_count(self.item_overhead):
            raise PlanError(f"item_overhead is {self.item_overhead!r}: give a number from 0 to {UNLIMITED}")
        factor, cost = self.profit_factor, self.compute_split_cost
        of_profit = factor is None or (is_number(factor) and 0 < factor < math.inf)
        if not (is_number(cost) and 0 <= cost < math.inf) or not of_profit:
            raise PlanError(
                f"compute_split_cost is {cost!r} and profit_factor {factor!r}: compute_split_cost is at least 0, "
                "profit_factor above 0, and both are finite"
            )
        if self.causal_tails and self.grow:
            raise PlanError("causal_tails is for tails that do not grow: give grow=False")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise PlanError(f"{name} is {getattr(self, name)!r}: use one of {', '.join(choices)}")
        tiles = _checked_tiles(TILES["hopper"] if self.tiles is None else self.tiles, self.group_size)
        _check_head_pack(self.head_pack, self.group_size, self.num_kv_heads, tiles)
        self._settle(tiles=tiles)
        if self.max_items is None:
            without_tokens = self.max_requests if self.merge == "fused" and not self.grow else 0
            self._settle(max_items=4 * self.max_requests + without_tokens + 8 * self.n_sm)
        if self.max_members is None:
            self._settle(max_members=16 * self.max_requests + 16 * self.max_items)
        if self.max_parts is None:
            self._settle(max_parts=UNLIMITED)
        self._require_positive("max_items", "max_members")
        if not _is_count(self.max_parts):
            raise PlanError(f"max_parts is {self.max_parts!r}: give a number from 0 to {UNLIMITED}")
        self._settle(alpha=_alpha(self.alpha, tiles, self.head_dim > WIDEST_HEAD))
        if self.costs is None:
            self._settle(costs=UnitCosts.default(tiles))
        if not isinstance(self.costs, UnitCosts):
            raise PlanError(f"costs is {self.costs!r}: give UnitCosts")

    def _settle(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _require_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not _is_count(value) or value < 1:
                raise PlanError(f"{name} is {value!r}: give a number from 1 to {UNLIMITED}")

    @property
    def group_size(self) -> int:
        """G: query heads to a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    def record(self) -> npt.NDArray[np.int64]:
        """What the planner reads: its ``PlannerOptions``, as entries of eight bytes."""
        record = np.zeros(1, _RECORD)
        (fields,) = record
        for name, choices in _CHOICES.items():
            fields[name] = choices.index(getattr(self, name))
        for name in _INTEGERS:
            fields[name] = getattr(self, name) or 0
        count = len(self.tiles)
        fields["n_tiles"] = count
        fields["tile_m"][:count], fields["tile_n"][:count] = zip(*self.tiles, strict=True)
        fields["profit_factor"], fields["compute_split_cost"] = self.profit_factor or 0, self.compute_split_cost
        fields["part_ns"], fields["part_row_ns"] = self.costs.part, self.costs.part_row
        fields["alpha"][:count] = self.alpha
        costs = self.costs.of_tiles(self.tiles)
        fields["unit_ns"][:count], fields["step_ns"][:count] = costs[:count], costs[count:]
        return record.view(np.int64)


class PlanStats(NamedTuple):
    """``PlanStats`` of csrc/planner/interface.h: the numbers that a plan returns besides its buffer, each an int64.

    Attributes
    ----------
    model_kv, model_partial : int
        Bytes, over all KV heads, of the packs before row tiling and KV split.
    scheduled_kv, scheduled_partial : int
        The same of the items as they run.
    items, members, parts : int
        How many the plan has.
    widened : int
        Whether chunks are longer, or packs fewer, than asked for.
    """

    model_kv: int
    model_partial: int
    scheduled_kv: int
    scheduled_partial: int
    items: int
    members: int
    parts: int
    widened: int


def check_interface(theirs: str) -> None:
    """Compare what the planner's library says of its structs with what is here.

    Parameters
    ----------
    theirs : str
        ``describe_interface`` of csrc/planner/interface.h.

    Raises
    ------
    BuildError
        Another field, order or type.
    """
    stats = np.dtype([(name, np.int64) for name in PlanStats._fields])
    choices = " | ".join(" ".join(names) for names in _CHOICES.values())
    ours = "\n".join((_described("options", _RECORD), _described("stats", stats), f"choices {choices}"))
    for own, other in zip_longest(ours.split(), theirs.split()):
        if own != other:
            raise BuildError(f"the planner's library has {other} where feather_kernels.options has {own}: reinstall")


def _described(name: str, record: np.dtype[Any]) -> str:
    fields = " ".join(f"{key}:{kind.base.kind}{offset}" for key, (kind, offset, *_) in (record.fields or {}).items())
    return f"{name} {fields} size:{record.itemsize}"


def tail_warps_of(path: str, head_dim: int, shared_kb: int = MOST_SHARED) -> int:
    """Warps of a processor that take tails, on a path of the kernel (``tiles.TILES``)."""
    return KernelPath.of(path, head_dim, shared_kb).teams_per_processor(_THIN_ROWS)


def _is_count(value: Any) -> bool:
    return is_whole(value) and 0 <= value <= UNLIMITED


def _checked_tiles(tiles: Tiles, group_size: int) -> tuple[tuple[int, int], ...]:
    try:
        checked = tuple((m, n) for m, n in tiles)
    except (TypeError, ValueError):
        checked = ()
    if not all(is_whole(size) for tile in checked for size in tile):
        checked = ()
    if not checked:
        raise PlanError(f"tiles are {tiles!r}: give 1 to {_MAX_TILES} pairs (m, n) of integers")
    checked = tuple((int(m), int(n)) for m, n in checked)
    rows = [m for m, _ in checked]
    sizes = [size for tile in checked for size in tile]
    in_range = len(checked) <= _MAX_TILES and 1 <= min(sizes) and max(sizes) <= _MAX_TILE
    if not in_range or rows != sorted(set(rows)):
        raise PlanError(f"tiles are {checked}: give 1 to {_MAX_TILES} pairs (m, n) of ascending m, up to {_MAX_TILE}")
    if group_size > rows[-1]:
        raise PlanError(f"the group of {group_size} query heads has more rows than the largest tile, {rows[-1]}")
    return checked


def _check_head_pack(head_pack: int | None, group_size: int, num_kv_heads: int, tiles: Tiles) -> None:
    if head_pack is not None and (not is_whole(head_pack) or head_pack not in (1, 2)):
        raise PlanError(f"head_pack is {head_pack!r}: give 1, 2 or None")
    tail_rows = next(m for m, _ in tiles if m >= group_size)
    if head_pack == 2 and (tail_rows != _THIN_ROWS or 2 * group_size > _THIN_ROWS or num_kv_heads % 2):
        raise PlanError(
            f"head_pack is 2, with groups of {group_size}, {num_kv_heads} KV heads and {tail_rows} rows to a tail: it "
            "needs a tile of 8 rows that holds two groups, and an even number of KV heads"
        )


def _alpha(alpha: Sequence[float] | None, tiles: tuple[tuple[int, int], ...], half: bool) -> tuple[float, ...]:
    if alpha is None:
        shares = tuple(
            max((share for m, share in DEFAULT_ALPHA.items() if m <= tile[0]), default=0.3) for tile in tiles
        )
        return tuple(min(1.0, 2 * share) for share in shares) if half else shares
    given = tuple(alpha) if isinstance(alpha, Sequence | np.ndarray) and not isinstance(alpha, str) else ()
    in_range = all(is_number(share) and 1 / _MOST_TEAMS <= share < math.inf for share in given)
    if len(given) != len(tiles) or not in_range:
        raise PlanError(
            f"alpha is {alpha!r}: give a finite number above 0 for each of the {len(tiles)} tiles, one over a "
            f"processor's teams, of which there are no more than {_MOST_TEAMS}"
        )
    return tuple(float(share) for share in given)
