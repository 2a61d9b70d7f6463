"""The tile shapes (m query rows, n KV tokens) that the kernels can be built with.

``python -m feather_kernels.tune`` says what bounds them on a GPU (`tune`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from feather_kernels.paths import MOST_SHARED, SHARED_KB, portable_ring

if TYPE_CHECKING:
    from feather_kernels.device import NRule

# By ascending m, as they are built unless another n is asked for; csrc/traits.h has the same.
TILES = {
    "portable": ((8, 16), (16, 16), (32, 32), (64, 32)),
    "hopper": ((8, 16), (16, 16), (64, 64), (128, 64)),
}
LATENT_TILES = ((64, 64),)  # of latent attention: a tile of few rows costs as much as a full one, but no more bytes
WIDEST_HEAD = 128  # of m = 128: beyond, two warpgroups' results do not fit into registers


def built_tiles(path: str, head_dim: int, shared_kb: int = MOST_SHARED) -> tuple[tuple[int, int], ...]:
    """The tiles of a path that are built for a head dimension, and a processor with so much shared memory."""
    if path == "portable" and head_dim > WIDEST_HEAD and shared_kb < SHARED_KB[80]:
        return tuple((m, 16 if m == 32 else n) for m, n in TILES[path])
    return tuple(tile for tile in TILES[path] if tile[0] <= 64 or head_dim <= WIDEST_HEAD)


def n_choices(path: str, m: int, head_dim: int, shared_kb: int = MOST_SHARED) -> tuple[int, ...]:
    """The n with which the tile of m rows can be built: a ring has at least two stages.

    Up to 16 rows are one warp's, which multiplies 16 tokens at a time. On the Hopper path a stage has 8 KB of K or
    more: what must be known of each has its place beside the rings, and there is room for 12 of them. None of more
    rows at a head dimension that the kernels do not have.
    """
    if m <= 16:
        return (16,)
    if path == "portable":
        known = head_dim in (64, 128, 256)
        least, ring = 16, portable_ring(head_dim, shared_kb) * m // 16 // (4 * head_dim) if known else 0
    else:
        least, ring = 4096 // head_dim, {64: 384, 128: 192, 256: 128}.get(head_dim, 0)
    return tuple(n for n in (16, 32, 64, 128) if least <= n <= ring // 2)


def chosen_tiles(
    path: str, head_dim: int, rules: Mapping[str, NRule], shared_kb: int = MOST_SHARED
) -> tuple[tuple[int, int], ...]:
    """`built_tiles` with the n that a GPU's rule has for long KV, where it has a rule for these: it was timed once."""
    rule = rules.get(path) if head_dim == PROFILED_HEAD else None
    built = built_tiles(path, head_dim, shared_kb)
    return built if rule is None else tuple((m, rule.choose_n(m, LONGEST_KV)) for m, _ in built)


def are_tiles(path: str, head_dim: int, tiles: Sequence[tuple[int, int]]) -> bool:
    """Whether the path can be built with all of these."""
    rows = [m for m, _ in built_tiles(path, head_dim)]
    return all(m in rows and n in n_choices(path, m, head_dim) for m, n in tiles)


def parse_tile(text: str) -> tuple[str, int, int]:
    """(path, m, n) of "hopper:64x32"; for argparse."""
    path, _, shape = text.partition(":")
    m, _, n = shape.partition("x")
    if path not in TILES or not (m.isdecimal() and n.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: give {' or '.join(TILES)}, and m x n, such as hopper:64x32")
    return path, int(m), int(n)


LONGEST_KV = 4096  # PAT 5.2: where the sweep behind the rule for n ends
PROFILED_HEAD, PROFILED_DTYPE = 128, "float16"  # what the rule in a GPU's profile was timed with
DTYPE_BYTES = {"float16": 2, "bfloat16": 2}
