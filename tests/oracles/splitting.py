"""How balanced chunks are cut, from the rule in words: the oracle of ``feather_kernels``' KV split.

Shares no code and no data structure with the product.
"""

import math


def up(value, step):
    return -(-value // step) * step


def pieces(length, longest, step):
    """Lengths of a range's chunks: as few as `longest` allows, even, whole steps but for the last."""
    if length <= longest:
        return (length,)
    chunk = up(-(-length // -(-length // longest)), step)
    rest = length % chunk
    return (chunk,) * (length // chunk) + ((rest,) if rest else ())


def least_chunk(min_chunk, step):
    """The length that no limit is below: eight steps of the tile, or more where asked."""
    return max(min_chunk, 8 * step)


def tile_limit(lengths, alpha, kv_heads, n_sm, least, step):
    """The longest chunk in a tile whose row tiles have these lengths, by their even share alone, in whole steps."""
    return up(max(least, math.ceil(alpha * sum(lengths) * kv_heads / n_sm)), step)


def head_pack(group_size, kv_heads, head_dim):
    """KV heads to a unit of the tile of 8 rows."""
    return 2 if 2 * group_size <= 8 and kv_heads % 2 == 0 and head_dim <= 128 else 1


def tail_limits(tails, units, warps, least, step):
    """The longest chunk of each tail, for tails from the longest to the shortest.

    A tail is so many units, a chunk of it as many. The longest tails, as many as fill whole rounds of the warps, are
    cut only where they exceed five quarters of a warp's even share of all tokens; the others so that their chunks are
    no more than one round, where up to eight longer tries reach that.
    """
    rounds = sum(length > 0 for length in tails) * units // warps
    whole = rounds * warps // units
    last = tails[whole:]
    chunk = up(max(least, share(last, units, warps)), step)
    for _ in range(8):
        if units * sum(up(length, chunk) // chunk for length in last) <= warps:
            break
        chunk = up(chunk * 5 // 4, step)
    return [up(max(least, share(tails, units, warps) * 5 // 4), step)] * whole + [chunk] * len(last)


def share(tails, units, warps):
    """Tokens that fall to each warp."""
    return sum(tails) * units // warps


def least_promoted(lengths, kv_heads, n_sm):
    """The length from which a pack of several requests leaves its tile of at most 16 rows for the next larger one.

    `lengths` are those of all such packs. Eight warps of each processor share them; a pack is long if it is four times
    what falls to a warp.
    """
    return max(256, 4 * share(lengths, kv_heads, 8 * n_sm))
