"""Facts about a plan: the forest, the packs, and each tile's queue of work items.

Pure: a batch in, a `Report` out, which ``plans/report.py`` prints. The planner is the server's own, so the plan of a
recorded batch is the one that the server ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from feather_kernels.costs import UnitCosts
from feather_kernels.errors import BuildError, PlanError
from feather_kernels.forest import Forest
from feather_kernels.pack import STRATEGIES
from feather_kernels.paths import KernelPath
from feather_kernels.plan import PackPlan, make_plan
from feather_kernels.plans.batch_file import Batch, checksum_of, path_of

Ints = npt.NDArray[np.integer]
_START, _STOP, _GROWS, _FIRST, _COUNT = 2, 3, 4, 5, 6  # columns of `PackPlan.items`


@dataclass(frozen=True)
class Spread:
    """The count, the least, the median and the largest of some values."""

    count: int
    least: int
    median: float
    most: int

    @classmethod
    def of(cls, values: Iterable[int]) -> Spread:
        """Of some whole numbers; zeros if there are none."""
        found = np.fromiter(values, np.int64)
        if not len(found):
            return cls(0, 0, 0.0, 0)
        return cls(len(found), int(found.min()), float(np.median(found)), int(found.max()))


@dataclass(frozen=True)
class NodeGroup:
    """Shared nodes below the same parents whose subtrees look alike."""

    parent: int  # a group's place in the list, or -1
    nodes: int
    tokens: int  # KV tokens of each
    requests: int  # at or below each
    tails: Spread  # private ones of the requests that end at these nodes


@dataclass(frozen=True)
class QueueFacts:
    """The work of one tile shape."""

    m: int  # query rows
    n: int  # KV tokens
    items: int
    units: int  # an item and a KV head, or for tails the planner's ``head_pack`` KV heads
    tokens: int  # KV tokens of all items
    longest: int  # of an item
    rows: float  # query rows of a unit, in the mean
    padding: float  # the share of the m rows that is left empty
    parts: int  # partial results that the items deposit
    teams: int  # of warps on the GPU that take such units
    busy: int  # of them, that get a unit
    processors: int  # the most that get one
    rounds: int  # units of the busiest team if each takes as many
    modelled_us: float  # processors' modelled time, spread evenly over all of them


@dataclass(frozen=True)
class PlanFacts:
    """A plan as a whole. Tokens are KV tokens of one layer, bytes those of all its KV heads."""

    strategy: str
    pack_requests: Spread  # of each pack that several requests share
    pack_tokens: Spread
    items: int
    units: int
    read: int  # KV tokens that the items load
    reuse: float  # how often each of those is attended to
    parts: int  # partial results
    divided: int  # requests that have any
    most_parts: int  # that one has
    merges: int  # requests whose results are combined behind the queues, not by the unit of their last tokens
    kv_bytes: int
    part_bytes: int
    modelled_us: float
    widened: bool  # chunks are longer than the split asks for, by the server's capacity


@dataclass(frozen=True)
class ItemFacts:
    """One work item: positions ``start`` to ``stop`` of its requests' KV."""

    m: int
    n: int
    start: int
    stop: int
    grows: bool
    requests: list[int]
    parts: list[int]  # that it deposits
    takes: int  # partial results that it combines, to close its request


@dataclass(frozen=True)
class Report:
    """The content of the report of ``feather explain-plan``."""

    source: str
    requests: int  # rows of the batch
    padding: int  # rows without a request
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    n_sm: int
    head_pack: int
    attended: int  # KV tokens, by the rows
    unique: int  # of these
    same_as_server: bool | None  # this is the very plan of the server that recorded the batch; None if not asked
    forest: list[NodeGroup]  # parents first
    alone: Spread  # tokens of the requests that share nothing
    plan: PlanFacts
    queues: list[QueueFacts]
    compared: list[PlanFacts] | None  # other strategies' plans
    refused: dict[str, str]  # strategies that cannot plan this batch, and why
    items: list[ItemFacts] | None


def explain(batch: Batch, *, compare: bool = False, items: bool = False) -> Report:
    """Plan a batch and say what the plan does; ``compare`` plans it with every other strategy, too.

    Raises ``PlanError``: a batch that contradicts itself or cannot be planned; ``BuildError``: no compiled planner.
    """
    try:
        plan = make_plan(batch.forest, **batch.arguments)
        queues = _queues(plan)
        whole = _facts(batch, plan, queues)
    except (BuildError, PlanError) as error:
        raise type(error)(f"{batch.source}: {error}") from None
    compared, refused = _compare(batch, whole) if compare else (None, {})
    forest, requests = batch.forest, batch.forest.n_requests - batch.padding
    own = forest.seq_len - forest.shared_length
    groups, alone = _groups(forest, own, requests)
    options = plan.options
    return Report(
        source=batch.source,
        requests=requests,
        padding=batch.padding,
        **{name: getattr(options, name) for name in ("num_qo_heads", "num_kv_heads", "head_dim", "n_sm")},
        head_pack=plan.head_pack,
        attended=int(forest.seq_len.sum(dtype=np.int64)),
        unique=sum(group.nodes * group.tokens for group in groups if group.requests) + int(own.sum()),
        same_as_server=None if batch.checksum is None else checksum_of(plan) == batch.checksum,
        forest=groups,
        alone=alone,
        plan=whole,
        queues=queues,
        compared=compared,
        refused=refused,
        items=_items(plan) if items else None,
    )


# The forest -----------------------------------------------------------------------------------------------------


def _groups(forest: Forest, own: Ints, requests: int) -> tuple[list[NodeGroup], Spread]:
    """Its nodes by their likeness, and the tokens of requests without any; rows from ``requests`` on are padding."""
    parents, tokens = forest.parent.tolist(), forest.length.tolist()
    ends: list[list[int]] = [[] for _ in range(forest.n_nodes + 1)]  # tails by deepest node; -1 finds the last
    for node, tail in zip(forest.request_node[:requests].tolist(), own[:requests].tolist(), strict=True):
        ends[node].append(tail)
    below = [len(tails) for tails in ends]
    children: list[list[int]] = [[] for _ in parents]
    shapes: dict[Any, int] = {}
    shape = [0] * len(parents)
    for node in reversed(range(len(parents))):  # children come after their parents
        look = tokens[node], below[node], len(ends[node]), tuple(sorted(children[node]))
        shape[node] = shapes.setdefault(look, len(shapes))
        if parents[node] >= 0:
            below[parents[node]] += below[node]
            children[parents[node]].append(shape[node])
    members: dict[tuple[int, int], list[int]] = {}  # nodes of each group, by its parent's group and their shape
    place: dict[tuple[int, int], int] = {}
    group_of = [-1] * (len(parents) + 1)
    for node, parent in enumerate(parents):
        key = group_of[parent], shape[node]
        group_of[node] = place.setdefault(key, len(place))
        members.setdefault(key, []).append(node)
    return [
        NodeGroup(
            parent=above,
            nodes=len(nodes),
            tokens=tokens[nodes[0]],
            requests=below[nodes[0]],
            tails=Spread.of(tail for node in nodes for tail in ends[node]),
        )
        for (above, _), nodes in members.items()
    ], Spread.of(ends[-1])


# The plan -------------------------------------------------------------------------------------------------------


def _facts(batch: Batch, plan: PackPlan, queues: Sequence[QueueFacts]) -> PlanFacts:
    packs = _shared_packs(batch, plan)
    parts = np.diff(plan.part_begin)
    read = sum(queue.tokens for queue in queues)
    return PlanFacts(
        strategy=plan.strategy,
        pack_requests=Spread.of(requests for requests, _ in packs),
        pack_tokens=Spread.of(tokens for _, tokens in packs),
        items=plan.n_items,
        units=sum(queue.units for queue in queues),
        read=read,
        reuse=int(batch.forest.seq_len.sum(dtype=np.int64)) / read if read else 1.0,
        parts=plan.n_parts,
        divided=int((parts > 0).sum()),
        most_parts=int(parts.max(initial=0)),
        merges=plan.n_merges,
        kv_bytes=plan.scheduled_traffic.kv,
        part_bytes=plan.scheduled_traffic.partial,
        modelled_us=sum(queue.modelled_us for queue in queues),
        widened=plan.widened,
    )


def _shared_packs(batch: Batch, plan: PackPlan) -> list[tuple[int, int]]:
    """Requests and tokens of each pack of several requests.

    A plan has items only. Those of the same plan without a KV split are row tiles, and the tiles of a pack have their
    range and its last node in common.
    """
    # Only `two-phase` cuts packs by itself; uncut they are those of `naive`.
    strategy = "naive" if plan.strategy == "two-phase" else plan.strategy
    forest = plan.forest
    whole = make_plan(forest, **{**batch.arguments, "strategy": strategy, "split": "none"})
    parent, end, deepest = forest.parent.tolist(), forest.node_end.tolist(), forest.request_node.tolist()
    first_request = whole.members[:, 0].tolist()
    packs: dict[tuple[int, int, int], int] = {}
    for item in whole.items[whole.items[:, _GROWS] < 0].tolist():
        start, stop = item[_START], item[_STOP]
        node = deepest[first_request[item[_FIRST]]]
        while parent[node] >= 0 and end[parent[node]] >= stop:
            node = parent[node]
        packs[node, start, stop] = packs.get((node, start, stop), 0) + item[_COUNT]
    return [(requests, stop - start) for (_, start, stop), requests in packs.items()]


def _queues(plan: PackPlan) -> list[QueueFacts]:
    """The queues that have work, largest m first."""
    path = KernelPath.of(path_of(plan.tiles), plan.options.head_dim)
    costs, kv_heads, n_sm = UnitCosts(), plan.options.num_kv_heads, plan.options.n_sm
    unit_ns, step_ns = np.split(np.array(UnitCosts.default(plan.tiles).of_tiles(plan.tiles)), 2)
    tail = next(index for index, (m, _) in enumerate(plan.tiles) if m >= plan.group_size)
    deposits = np.concatenate([[0], np.cumsum(plan.members[:, 1] >= 0)])  # before each member
    found = []
    for queue, (begin, end) in enumerate(pairwise(plan.queue_begin.tolist())):
        if begin == end:
            continue
        index = len(plan.tiles) - 1 - queue
        m, n = plan.tiles[index]
        heads = plan.head_pack if index == tail else 1  # KV heads to a unit
        teams = max(1, path.teams_per_processor(m)) * n_sm
        items = plan.items[begin:end].astype(np.int64)
        tokens, first = items[:, _STOP] - items[:, _START], items[:, _FIRST]
        units = len(items) * kv_heads // heads
        rows = float(items[:, _COUNT].mean()) * plan.group_size * heads
        parts = int((deposits[first + items[:, _COUNT]] - deposits[first]).sum())
        spent = len(items) * unit_ns[index] + int((-(-tokens // n)).sum()) * step_ns[index]
        spent += parts * (costs.part + plan.group_size * costs.part_row)
        found.append(QueueFacts(
            m, n, len(items), units, tokens=int(tokens.sum()), longest=int(tokens.max()), rows=rows,
            padding=1 - rows / m, parts=parts, teams=teams, busy=min(units, teams), processors=min(units, n_sm),
            rounds=-(-units // teams), modelled_us=float(spent * kv_heads / n_sm / 1000),
        ))  # fmt: skip
    return found


def _items(plan: PackPlan) -> list[ItemFacts]:
    members = plan.members.tolist()
    found = []
    for _, _, start, stop, grows, first, count, tile, *_, taken in plan.items.tolist():
        mine = members[first : first + count]
        m, n = plan.tiles[tile]
        requests, parts = [request for request, _ in mine], [part for _, part in mine if part >= 0]
        found.append(ItemFacts(m, n, start, stop, grows >= 0, requests, parts, taken))
    return found


def _compare(batch: Batch, chosen: PlanFacts) -> tuple[list[PlanFacts], dict[str, str]]:
    """The batch by every strategy, and why some cannot plan it."""
    compared, refused = [], {}
    for strategy in STRATEGIES:
        if strategy == chosen.strategy:
            compared.append(chosen)
            continue
        other = replace(batch, arguments={**batch.arguments, "strategy": strategy})
        try:
            plan = make_plan(batch.forest, **other.arguments)
            compared.append(_facts(other, plan, _queues(plan)))
        except PlanError as error:
            refused[strategy] = str(error)
    return compared, refused
