"""Random decode batches for the GPU check: every choice follows from one seed, so that a failure can be run again."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feather_kernels.forest import Forest
from feather_kernels.pack import MERGES, SPLITS, STRATEGIES
from feather_kernels.tiles import TILES, built_tiles
from feather_kernels.trees import forest_table, random_forest, tree_forest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from decode_cases import Heads

Ints = npt.NDArray[np.integer]

REQUESTS, LONGEST = 1024, 32 << 10
KV_HEADS = (1, 1, 2, 4, 8, 8, 16, 32)
QUERY_HEADS = 128  # at most
PAGES = (1, 1, 1, 1, 2, 4, 8, 16, 32, 64)
TOKENS, ELEMENTS = (
    1_000_000,
    1 << 28,
)  # of all sequences, and times KV heads and head_dim: what a case's reference costs
BIG_TOKENS, BIG_ELEMENTS, BIG_SHARE = 3_000_000, 1 << 30, 0.05
LAUNCHES = ("persistent", "persistent", "persistent", "streams", "serial")
KINDS = ("alone", "flat", "levels", "random", "random", "random")
PATHS = ("auto", "auto", "auto", "portable", "hopper")
WARP_ROWS = 16  # of the smallest tile, at most, where the kernel that attends also merges
WILD = 1 << 24  # beyond every cache here: a page id that only memory checkers may meet


@dataclass(frozen=True)
class Choice:
    """The parameters of a case, without its data."""

    seed: int
    heads: Heads
    head_dim: int
    dtype: str
    page_size: int
    table_dtype: str
    requests: int
    longest: int  # about the longest sequence
    kind: str  # "alone", "flat", "levels" or "random"
    q_scale: float
    spiky: bool  # a few keys are ten times as long
    soft_cap: float
    sm_scale: float | None
    return_lse: bool
    give_out: bool
    give_lens: bool
    interleaved: bool  # K and V are the halves of one tensor
    growth: int  # tokens that sequences grow by, at most, after the plan
    wrapper: tuple[tuple[str, Any], ...]  # arguments of `PackedDecodeWrapper`
    wild: bool = False
    sinks: bool = False  # attention sinks, in float32 or the case's dtype
    fp8_kv: bool = False  # caches in e4m3, with scales

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self.wrapper)
        return (
            f"{self.requests} requests to {self.longest} tokens ({self.kind}), {self.heads} x {self.head_dim} "
            f"{self.dtype}, page size {self.page_size}, growth {self.growth}, soft cap {self.soft_cap:g}"
            f"{', sinks' if self.sinks else ''}{', fp8 KV' if self.fp8_kv else ''}; {given}"
        )


def draw(seed: int, hopper: bool = True) -> Choice:
    """The case of a seed. Group sizes take turns, so that any 16 seeds in a row have them all."""
    rng = np.random.default_rng(seed)
    group = 1 + seed % 16
    heads = Heads(0, int(rng.choice([kv for kv in KV_HEADS if kv * group <= QUERY_HEADS])))
    heads = Heads(heads.kv * group, heads.kv)
    head_dim = int(rng.choice([64, 128, 128]))
    requests, longest = (round(math.exp(rng.uniform(0, math.log(most)))) for most in (REQUESTS, LONGEST))
    big = rng.random() < BIG_SHARE
    tokens = min(BIG_TOKENS if big else TOKENS, (BIG_ELEMENTS if big else ELEMENTS) // (heads.kv * head_dim))
    while requests * longest > tokens:
        if rng.random() < 0.5 and requests > 1:
            requests = (requests + 1) // 2
        elif longest > 1:
            longest = (longest + 1) // 2
    launch = LAUNCHES[rng.integers(len(LAUNCHES))]
    path = str(rng.choice(PATHS))
    built = TILES["hopper" if hopper and path != "portable" else "portable"]
    first_tile = int(rng.integers(len(built))) if rng.random() < 0.15 else 0
    growth = int(rng.choice([1, 20, 300])) if rng.random() < 0.25 else 0
    strategy = "time" if rng.random() < 0.3 else str(rng.choice(list(STRATEGIES)))
    split = "balanced" if rng.random() < 0.5 else str(rng.choice(list(SPLITS)))
    wrapper: dict[str, Any] = {
        "strategy": strategy, "split": split, "launch": launch,
        "path": path if hopper or path != "hopper" else "auto", "prefetch": bool(rng.random() < 0.2),
        "grow": bool(growth or rng.random() < 0.5), "debug": bool(rng.random() < 0.05),
    }  # fmt: skip
    if first_tile:
        wrapper["tiles"] = built[first_tile:]
    wrapper["merge"] = _merge(seed, launch, built[first_tile][0])
    wrapper["fan_in"] = _fan_in(seed)
    return Choice(
        seed, heads, head_dim, str(rng.choice(["float16", "bfloat16"])), int(rng.choice(PAGES)),
        str(rng.choice(["int32", "int64"])), requests, longest, str(rng.choice(KINDS)),
        float(rng.choice([0.3, 1.0, 1.0, 3.0])),
        bool(rng.random() < 0.1), float(rng.choice([0, 0, 0, 0, 5, 30])), 0.2 if rng.random() < 0.1 else None,
        bool(rng.random() < 0.5), bool(rng.random() < 0.8), bool(rng.random() < 0.5), bool(rng.random() < 0.15),
        growth, tuple(wrapper.items()),
    )  # fmt: skip


def _merge(seed: int, launch: str, least_rows: int) -> str | None:
    """Who merges, of those that the wrapper allows; drawn apart, so that all else of a seed's case stays as it was."""
    merge = (None, *MERGES)[np.random.default_rng([seed, 2]).integers(1 + len(MERGES))]
    may_fuse = launch == "persistent" and least_rows <= WARP_ROWS
    return merge if may_fuse or merge != "fused" else None


def _fan_in(seed: int) -> int:
    """How many parts a closing item takes in one by one; drawn apart, as `_merge`."""
    return int(np.random.default_rng([seed, 3]).choice([0, 2, 5, 16]))


def with_wide_group(choice: Choice, hopper: bool = True) -> Choice:
    """The case with more query heads to a KV head than a warp's tile has rows, up to what the largest tile holds."""
    path = "hopper" if hopper and dict(choice.wrapper)["path"] != "portable" else "portable"
    largest = built_tiles(path, choice.head_dim)[-1][0]
    wide = [group for group in (17, 24, 32, 48, 64, 71, 96, 128) if group <= largest]
    group = wide[choice.seed % len(wide)]
    kept = [(name, value) for name, value in choice.wrapper if name != "tiles" and (name, value) != ("merge", "fused")]
    kv_heads = 1 + choice.seed // 8 % 2
    return replace(choice, heads=Heads(group * kv_heads, kv_heads), wrapper=tuple(kept))


def small(seed: int, hopper: bool = True) -> Choice:
    """A tiny case for memory checkers; launches and paths take turns. Unused table entries point nowhere."""
    rng = np.random.default_rng(seed)
    wrapper = {name: value for name, value in draw(seed, hopper).wrapper if name not in ("tiles", "debug")}
    wrapper["launch"] = LAUNCHES[1:][seed % 4]
    wrapper["merge"] = _merge(seed, wrapper["launch"], TILES["portable"][0][0])
    wrapper["path"] = "hopper" if hopper and seed % 3 == 1 else "portable" if seed % 3 == 2 else "auto"
    wrapper |= {"min_chunk": 16, "fan_in": (2, 16)[seed % 2]}  # so that tails of a few steps have many parts
    group = (1, 4, 8, 16)[seed // 3 % 4]
    return replace(
        draw(seed, hopper), heads=Heads(2 * group, 2), page_size=(1, 16, 1, 4)[seed // 2 % 4],
        requests=int(rng.integers(2, 9)), longest=int(rng.integers(20, 200)),
        kind=("random", "flat", "levels", "random")[seed // 4 % 4],
        wrapper=tuple(wrapper.items()), wild=True,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Batch:
    """The data of a case on the host.

    Attributes
    ----------
    forest : Forest
        As planned; ``row_offset`` indexes `table`.
    seq_len : int32 [requests]
        Lengths when it runs: the forest's, or grown.
    table : int32 [entries]
        Page ids; entries of no row, and those past a row's room, hold an unused page (or a wild one).
    valid : int32 [pages]
        Tokens of each page that some request reads, from its start on; all others are to be NaN.
    """

    choice: Choice
    forest: Forest
    seq_len: Ints
    table: Ints
    valid: Ints

    @property
    def n_slots(self) -> int:
        return len(self.valid) * self.choice.page_size

    @cached_property
    def tokens(self) -> int:
        return int(self.seq_len.sum())


def make(choice: Choice) -> Batch:
    """The batch of a case, from its seed."""
    rng = np.random.default_rng([choice.seed, 1])
    forest = _sharing(choice, rng)
    page_size, growth = choice.page_size, choice.growth
    seq_len = forest.seq_len.astype(np.int64)
    if rng.random() < 0.1:  # one sequence far longer than the others
        seq_len[rng.integers(len(seq_len))] += rng.integers(choice.longest + 1)
    if rng.random() < 0.05:
        seq_len[forest.request_node < 0] *= rng.random(int((forest.request_node < 0).sum())) < 0.8  # empty requests
    pages = -(-(seq_len + growth) // page_size)
    forest = Forest(forest.parent, forest.length, forest.request_node, seq_len, _rows(pages, rng))
    packed, used = forest_table(forest, page_size, room=growth)
    total = used + max(2, used // 8)
    ids = rng.permutation(total).astype(np.int32)
    nowhere = WILD if choice.wild else int(ids[-1])
    table = np.full(len(packed) + int(rng.integers(3)), nowhere, np.int32)
    table[: len(packed)][packed >= 0] = ids[packed[packed >= 0]]
    grown = seq_len + (rng.integers(0, growth + 1, len(seq_len)) if growth else 0)
    return Batch(choice, forest, grown.astype(np.int32), table, _valid(forest, grown, packed, ids, page_size))


def _sharing(choice: Choice, rng: np.random.Generator) -> Forest:
    """What is shared, and the lengths; rows and table come later."""
    requests, longest, page_size = choice.requests, choice.longest, choice.page_size
    if choice.kind == "alone":
        return tree_forest((requests,), (1,)).with_seq_len(rng.integers(1, longest + 1, requests))
    if choice.kind == "random":
        return random_forest(
            rng, requests, max_roots=int(rng.integers(1, 7)), max_branch=int(rng.integers(2, 9)),
            max_node_tokens=max(page_size, longest // 3), max_tail_tokens=max(1, longest // 2), page_size=page_size,
        )  # fmt: skip
    depth = 2 if choice.kind == "flat" else int(rng.integers(2, 7))
    nodes = sorted(rng.integers(1, requests + 1, depth - 1).tolist())
    nodes = [1, *nodes[1:]] if choice.kind == "flat" else nodes
    tokens = [page_size * int(rng.integers(1, max(1, longest // depth // page_size) + 1)) for _ in nodes]
    forest = tree_forest([*nodes, requests], [*tokens, 1])
    tails = rng.integers(0, max(1, longest // depth) + 1, requests)
    return forest.with_seq_len(forest.shared_length + tails)


def _rows(pages: Ints, rng: np.random.Generator) -> Ints:
    """Where rows lie: as in a matrix with more rows than requests, or ragged, in any order, with gaps."""
    requests, stride = len(pages), int(pages.max()) + 1
    if rng.random() < 0.5 and 2 * requests * stride <= 1 << 22:
        return rng.permutation(2 * requests)[:requests].astype(np.int64) * stride
    order = rng.permutation(requests)
    room = pages[order] + rng.integers(0, 4, requests)
    rows = np.empty(requests, np.int64)
    rows[order] = np.cumsum(room) - room
    return rows


def _valid(forest: Forest, seq_len: Ints, packed: Ints, ids: Ints, page_size: int) -> Ints:
    """Tokens in use of each page. Shared pages are full, so that whichever request writes last says the same."""
    pages = -(-seq_len // page_size)
    number = np.arange(int(pages.sum())) - np.repeat(np.cumsum(pages) - pages, pages)
    page = ids[packed[np.repeat(forest.row_offset, pages) + number]]
    valid = np.zeros(len(ids), np.int32)
    valid[page] = np.minimum(np.repeat(seq_len, pages) - number * page_size, page_size)
    return valid
