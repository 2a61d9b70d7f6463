"""Modelled time of a plan by the planner's costs, where each free processor takes the next unit of the queues.

The planner's split `rounds` minimises the same, but for two things: it deals the units of large tiles in turn, and it
does not see how tails are cut (``csrc/planner/rounds.h``). Needs no GPU.
"""

from __future__ import annotations

from heapq import heapreplace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from feather_kernels.plan import PackPlan

Lengths = npt.NDArray[np.integer]
WARP_ROWS = 16  # tiles of no more are single warps'
UNIT_ALONE = 1.5  # times its cost that a unit takes while the processor's other team is idle (csrc/heuristics.h)


class Modelled(NamedTuple):
    """The modelled time of one layer, in microseconds."""

    us: float
    even_us: float  # if the same work could be spread evenly: what no grouping of its units goes below


def model(plan: PackPlan, seq_len: Lengths | None = None) -> Modelled:
    """What a plan takes.

    Teams' units go to the least loaded processor, one after the other. Single warps' fill what that leaves idle and
    are then spread evenly; but the longest of them takes as long as one warp needs for it, half of its processor being
    busy. So are parts.

    Parameters
    ----------
    plan : PackPlan
    seq_len : int [requests], optional
        The lengths now, of a plan that is kept while tails grow.
    """
    options, lengths = plan.options, _lengths(plan, seq_len)
    processors, heads, costs = options.n_sm, options.num_kv_heads, options.costs.of_tiles(plan.tiles)
    loads = [(0.0, processor, 0) for processor in range(processors)]
    spread, longest = plan.n_parts * heads * (options.costs.part + plan.group_size * options.costs.part_row), 0.0
    tail = next(tile for tile, (m, _) in enumerate(plan.tiles) if m >= plan.group_size)
    for queue, (begin, end) in enumerate(pairwise(plan.queue_begin.tolist())):
        tile = len(plan.tiles) - 1 - queue
        m, n = plan.tiles[tile]
        chunks = lengths[begin:end]
        ns = costs[tile] + costs[len(plan.tiles) + tile] * -(-chunks // n)
        if m <= WARP_ROWS:
            teams = options.tail_warps if tile == tail else round(1 / options.alpha[tile])
            together = plan.head_pack if tile == tail else 1
            spread += heads * float(ns.sum())
            longest = max(longest, together * float(ns.max(initial=0)) * (1 + teams) / 2)
            continue
        teams = max(1, round(1 / options.alpha[tile]))
        first = UNIT_ALONE if teams > 1 else 1.0
        other = (teams - first) / max(1, teams - 1)
        loads = [(load, processor, 0) for load, processor, _ in sorted(loads)]
        for cost in np.repeat(ns, heads).tolist():
            load, processor, units = loads[0]
            heapreplace(loads, (load + cost * (other if units % teams else first), processor, units + 1))
    top = max(load for load, *_ in loads)
    idle = sum(top - load for load, *_ in loads)
    even = (spread - idle) / processors + top
    return Modelled(max(top, even, longest) / 1e3, even / 1e3)


def drift(plan: PackPlan) -> int:
    """PackInfer's delta L: token-heads by which the most and the least loaded processor differ (equation 4)."""
    loads = [0] * plan.options.n_sm
    for tokens in np.repeat(_lengths(plan, None), plan.options.num_kv_heads).tolist():
        heapreplace(loads, loads[0] + tokens)
    return max(loads) - min(loads)


def _lengths(plan: PackPlan, seq_len: Lengths | None) -> npt.NDArray[np.int64]:
    """int64 [items]: tokens."""
    items = plan.items.astype(np.int64)
    lengths, grows = items[:, 3] - items[:, 2], items[:, 4]
    return lengths if seq_len is None else lengths + np.where(grows >= 0, (seq_len - plan.forest.seq_len)[grows], 0)
