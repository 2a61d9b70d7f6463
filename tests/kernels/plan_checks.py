"""Helpers of the planner's tests: random forests, and checks of everything that must hold of any plan."""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from feather_kernels.plan import CLOSES, MAGIC, Planner, make_plan
from feather_kernels.tiles import TILES
from feather_kernels.trees import forest_table, random_forest
from oracles.splitting import gathers, head_pack, least_promoted, team_and_tail, teams_take_tails
from oracles.waiting import Unit

HEADS = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64}
GROUP = HEADS["num_qo_heads"] // HEADS["num_kv_heads"]
TILE_SETS = [*TILES.values(), ((64, 64),), ((128, 64),)]
MOVES = ("balanced", "rounds", "groups")  # splits with which packs may leave the smallest tile that holds them
GIVES = ("rounds", "groups")  # and tails alone or of unlike length that of single warps
ONE_TILE = {"split": "none", "tiles": ((1 << 20, 16),)}  # items are the packs themselves


def plan_of(forest, **arguments):
    return make_plan(forest, **{**HEADS, **arguments})


@st.composite
def forests(draw, most=40, tokens=64, tail=64):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random_forest(rng, draw(st.integers(1, most)), max_node_tokens=tokens, max_tail_tokens=tail)


def offsets(plan):
    """int64 [items]: each item's place in the table."""
    items = plan.items.astype(np.int64)
    return items[:, 1] << 32 | items[:, 0] & 0xFFFFFFFF


def without_tokens(plan):
    """bool [items]: items that only close a request."""
    items = plan.items
    return (plan.members[items[:, 5], 1] == CLOSES) & (items[:, 2] == items[:, 3]) & (items[:, 4] < 0)


def packs_in(plan):
    """The plan's items as the oracle writes packs."""
    members = plan.members[:, 0].tolist()
    items = plan.items[~without_tokens(plan)].tolist()
    return {(item[2], item[3], frozenset(members[item[5] : item[5] + item[6]])) for item in items}


def check_plan(plan, forest):
    """Each (request, KV token) pair once, rows within tiles, parts and queues numbered as the kernel expects."""
    items, members = plan.items, plan.members
    assert items[:, 6].sum() == len(members) == plan.n_members and (items[:, 6] > 0).all()
    assert (items[:, 5] == np.cumsum(items[:, 6]) - items[:, 6]).all()
    check_tiles(plan)
    check_queues(plan)
    check_header(plan)
    table, _ = forest_table(forest)
    parts = [[] for _ in range(forest.n_requests)]  # of each request: its items with KV, and the one that closes it
    for offset, item in zip(offsets(plan).tolist(), items.tolist(), strict=True):
        _, _, start, stop, grows, first, count, tile, request, part, *taken = item
        assert [request, part] == members[first].tolist()
        assert taken[0] >= plan.part_begin[request] and (part == CLOSES or not taken[1])
        slots = table[offset + start : offset + stop]
        for request, part in members[first : first + count].tolist():
            row = int(forest.row_offset[request])
            assert (slots == table[row + start : row + stop]).all()
            parts[request].append(Part(start, stop, part, grows, count, tile, tuple(taken)))
    check_parts(plan, forest, parts)


class Part(NamedTuple):
    start: int
    stop: int
    row: int  # partial row, -1 or CLOSES
    grows: int
    members: int  # of its item
    tile: int
    taken: tuple  # the first partial row that it takes in, and how many


def tile_of(plan, members):
    """The smallest tile with the rows of so many requests; eight rows are one request's."""
    fits = (m >= members * plan.group_size and (members == 1 or m > 8) for m, _ in plan.tiles)
    return list(fits).index(True)


def uncut(plan):
    """The same planner's plan of the same batch with whole packs: how they are cut does not change what they are."""
    strategy = "naive" if plan.strategy == "two-phase" else plan.strategy  # which has chunks of its own
    whole = replace(plan.options, strategy=strategy, split="none")
    # Of wide groups a small tile may hold fewer requests than the one that all went to: twice the members are room.
    return Planner(**vars(replace(whole, max_members=2 * whole.max_members))).plan(plan.forest)


def row_tiles(plan):
    """[(tile, start, stop, members)] of what the plan cuts: a pack's rows in one tile, in the tile that they run in."""
    team = gathered(plan)
    if team is None:
        rows, given = uncut_rows(plan), given_tails(plan)
        rows = promoted(plan, rows) if plan.options.split in MOVES else rows
        team, _ = team_and_tail(plan.tiles, plan.group_size)
        return [(team, *row[1:]) if row in given else row for row in rows]
    whole = uncut(plan)
    return [
        (team, *item[2:4], frozenset(piece))
        for item, mine, bare in zip(whole.items.tolist(), members_of(whole), without_tokens(whole), strict=True)
        if not bare
        for piece in cut_rows(plan, [request for request, _ in mine], team)
    ]


def uncut_rows(plan):
    """The same in the smallest tiles that hold them."""
    return [(tile_of(plan, len(members)), start, stop, members) for start, stop, members in packs_in(uncut(plan))]


def gathered(plan):
    """The tile that takes everything; or None."""
    options, rows = plan.options, uncut_rows(plan)
    if not may_move(plan, rows):
        return None
    arguments = plan.tiles, teams_of(plan), plan.group_size, options.num_kv_heads, options.split in GIVES
    return gathers(promoted(plan, rows), *arguments)


def given_tails(plan):
    """Of the row tiles, where not all are gathered, the tails that teams take: as they would be in their own tile."""
    options, rows = plan.options, promoted(plan, uncut_rows(plan))
    team, tail = team_and_tail(plan.tiles, plan.group_size)
    if options.split not in GIVES or team in (None, tail) or not may_move(plan, rows) or gathered(plan) is not None:
        return []
    tails = [row for row in rows if row[0] == tail and len(row[3]) == 1]
    lengths, rounds = [row[2] - row[1] for row in tails], len(tails) * options.num_kv_heads / teams_of(plan)[team]
    return tails if teams_take_tails(lengths, len(rows) - len(tails), rounds) else []


def may_move(plan, rows):
    """Whether packs may run in other tiles than the smallest that hold them."""
    fixed = plan.options.strategy == "two-phase" and any(len(members) > 1 for *_, members in rows)
    return plan.options.split in MOVES and not fixed and plan.options.fan_in != 0


def teams_of(plan):
    """Of each tile."""
    return [max(1, round(1 / alpha)) * plan.options.n_sm for alpha in plan.options.alpha]


def cut_rows(plan, requests, tile):
    """A row tile's requests in tiles no larger than `tile`: full ones and a rest, or even ones that pad no more."""
    count, capacity = len(requests), plan.tiles[tile][0] // plan.group_size
    tiles = -(-count // capacity)
    even = tile_of(plan, count - (tiles - 1) * capacity) == tile
    ends = [count * (i + 1) // tiles if even else min(count, (i + 1) * capacity) for i in range(tiles)]
    return [requests[begin:end] for begin, end in pairwise([0, *ends])]


def promoted(plan, rows):
    """The row tiles with the long ones among those of several requests in a small tile in the next larger one."""
    options = plan.options
    shared = [row for row in rows if len(row[3]) > 1 and plan.tiles[row[0]][0] <= 16]
    warps = options.n_sm * (8 if options.head_dim <= 128 else 4)
    least = least_promoted([stop - start for _, start, stop, _ in shared], options.num_kv_heads, warps)
    largest = len(plan.tiles) - 1
    moved = [(min(row[0] + 1, largest), *row[1:]) for row in shared if row[2] - row[1] >= least]
    return [row for row in rows if row not in shared or row[2] - row[1] < least] + moved


def check_tiles(plan):
    """Each item is in the tile of the rows that it is cut from."""
    rows = {}
    for tile, start, stop, members in row_tiles(plan):
        rows.setdefault(members, []).append((start, stop, tile))
    bare = without_tokens(plan)
    assert (plan.items[bare][:, 6:8] == [1, tile_of(plan, 1)]).all()
    members = plan.members[:, 0].tolist()
    for _, _, start, stop, _, first, count, tile, *_ in plan.items[~bare].tolist():
        mine = rows[frozenset(members[first : first + count])]
        assert tile in {of_row for begin, end, of_row in mine if begin <= start <= stop <= end}
        assert start == stop or len([begin for begin, end, _ in mine if begin <= start and stop <= end]) == 1


def members_of(plan):
    """[(request, part)] of each item."""
    members = list(map(tuple, plan.members.tolist()))
    return [members[first : first + count] for first, count in plan.items[:, 5:7].tolist()]


def work(plan):
    """The plan's queues for `oracles.waiting`: each item is a unit for every KV head, or every `head_pack` of them.

    The last one holds the items behind the queues.
    """
    tail, heads = tile_of(plan, 1), plan.options.num_kv_heads
    queues = []
    for begin, end in pairwise(plan.queue_begin.tolist()):
        queue = []
        for item, mine in list(zip(plan.items.tolist(), members_of(plan), strict=True))[begin:end]:
            taken = range(item[10], item[10] + item[11])
            step = plan.head_pack if item[7] == tail else 1
            for head in range(0, heads, step):
                mates = range(head, head + step)
                gives = frozenset((part, h) for _, part in mine if part >= 0 for h in mates)
                queue.append(Unit(gives, frozenset((part, h) for part in taken for h in mates)))
        queues.append(queue)
    merges = plan.items[plan.queue_begin[-1] :, 10:].tolist()
    rows = ((range(first, first + count), head) for first, count in merges for head in range(heads))
    return [*queues, [Unit(frozenset(), frozenset((part, head) for part in parts)) for parts, head in rows]]


def check_queues(plan):
    """Largest tile first, longest item first; in the last queue with work in three classes, by who waits for whom.

    Items without tokens, and they alone, come behind the queues.
    """
    queues, items, members = plan.queue_begin.tolist(), plan.items, members_of(plan)
    assert queues[0] == 0 and queues == sorted(queues)
    assert without_tokens(plan).tolist() == [index >= queues[-1] for index in range(plan.n_items)]
    closing = [index for index, mine in enumerate(members) if mine[0][1] == CLOSES]
    assert len(closing) == (plan.members[:, 1] == CLOSES).sum() == plan.n_closing  # none closes two requests
    assert (items[closing][:, 6:8] == [1, tile_of(plan, 1)]).all()
    for queue, (begin, end) in enumerate(pairwise(queues)):
        assert (items[begin:end, 7] == len(plan.tiles) - 1 - queue).all()
    tail_queue = len(plan.tiles) - 1 - tile_of(plan, 1)
    first, last = queues[tail_queue : tail_queue + 2]
    assert last == queues[-1]
    order = [(item[7] * -1, 0, item[2] - item[3]) for item in items[:last].tolist()]
    for index, rank in enumerate(classes(plan, members[first:last]), first):
        order[index] = (order[index][0], rank, order[index][2])
    assert order == sorted(order)
    check_waits(plan, members, first)


def classes(plan, members):
    """Of each item of the last queue with work: 0; 1 if others of it wait for it; 2 if it waits for others of it."""
    if plan.options.merge == "kernel":
        return [0] * len(members)
    awaited = {request for mine in members for request, part in mine if part >= 0}
    return [
        (2 if mine[0][1] == CLOSES else 1) if any(request in awaited for request, _ in mine) else 0 for mine in members
    ]


def check_waits(plan, members, first):
    """What an item waits for is in another queue or before it in this one, whose items start at `first`; and each
    partial row is waited for once."""
    place = {part: index for index, mine in enumerate(members) for _, part in mine if part >= 0}
    taken = [range(first, first + count) for first, count in plan.items[:, 10:].tolist()]
    waits = [(index, row) for index, rows in enumerate(taken) for row in rows]
    assert sorted(row for _, row in waits) == (list(range(plan.n_parts)) if plan.options.merge == "fused" else [])
    assert all(place[row] < index >= first for index, row in waits)


def check_header(plan):
    options, header = plan.options, plan.header
    assert header[:6] == [MAGIC, plan.n_items, plan.n_members, plan.n_requests, plan.n_parts, len(plan.tiles)]
    assert header[8] < header[6] < header[7] and all(begin % 32 == 0 for begin in header[6:9])
    assert header[9] == plan.used == header[7] + 2 * plan.n_members <= len(plan.buffer)
    assert header[11] == plan.n_closing and header[12] == plan.head_pack and header[14:16] == [0, 0]
    assert header[13] == plan.n_items - plan.queue_begin[-1]
    pack = head_pack(plan.group_size, options.num_kv_heads, options.head_dim)
    pairs = plan.tiles[tile_of(plan, 1)][0] == 8
    assert plan.head_pack == (options.head_pack or pack if pairs else 1)


def check_parts(plan, forest, parts):
    begin = plan.part_begin.tolist()
    assert begin[0] == 0 and begin[-1] == plan.n_parts
    for request, mine in enumerate(parts):
        mine.sort(key=lambda part: (part.start, part.stop, part.row == CLOSES))
        ends = [0, *(part.stop for part in mine)]
        assert [part.start for part in mine] == ends[:-1] and ends[-1] == forest.seq_len[request]
        rows, closer = list(range(begin[request], begin[request + 1])), []
        if len(mine) == 1:
            assert rows == []
            closer = [-1]
        elif plan.options.merge == "fused":
            closer = [CLOSES]
            check_closer(plan, mine)
            assert mine[-1].taken == (begin[request], len(rows))
        assert [part.row for part in mine] == rows + closer
        growing = [part.grows for part in mine if part.grows >= 0]
        assert growing == ([request] if plan.options.grow else [])
        assert not plan.options.grow or mine[-1 - only_closes(mine[-1])].grows == request


def only_closes(part):
    return part.row == CLOSES and part.start == part.stop and part.grows < 0


def check_closer(plan, mine):
    """The last item with tokens, if it can: alone in the tail tile, and of no more parts than it takes in."""
    assert mine[-1].tile == tile_of(plan, 1) and mine[-1].members == 1
    parts = mine[: -1 if only_closes(mine[-1]) else None]
    can = parts[-1].tile == tile_of(plan, 1) and parts[-1].members == 1
    assert only_closes(mine[-1]) == (not can or 0 < plan.options.fan_in < len(parts))
