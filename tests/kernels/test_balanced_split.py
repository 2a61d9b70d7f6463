"""How the splits "balanced", "rounds" and "groups" cut KV: against the rules in ``oracles.splitting``, by example."""

import math
from collections import Counter
from itertools import accumulate, repeat
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import (
    HEADS,
    TILE_SETS,
    check_plan,
    check_tiles,
    forests,
    gathered,
    given_tails,
    packs_in,
    plan_of,
    row_tiles,
    without_tokens,
)

from effort import samples
from feather_kernels.costs import UnitCosts
from feather_kernels.forest import Forest
from feather_kernels.options import DEFAULT_ALPHA
from feather_kernels.pack import MERGES, STRATEGIES
from feather_kernels.tiles import TILES
from feather_kernels.trees import tree_forest
from oracles.splitting import (
    Processors,
    group_limit,
    head_pack,
    least_chunk,
    limits_of_warps,
    pieces,
    team_and_tail,
    tile_limit,
    unlike,
    up,
)

WITHOUT_CHUNKS = sorted(STRATEGIES.keys() - {"two-phase"})  # whose packs have no chunk of their own


@st.composite
def batches(draw):
    """A forest, whose tails are many to a warp or few, and the arguments of its plan."""
    group, kv_heads = draw(st.integers(1, 16)), draw(st.integers(1, 4))
    arguments = {
        "num_qo_heads": group * kv_heads, "num_kv_heads": kv_heads, "strategy": draw(st.sampled_from(WITHOUT_CHUNKS)),
        "merge": draw(st.sampled_from(list(MERGES))), "tiles": draw(st.sampled_from(TILE_SETS)),
        "min_chunk": draw(st.sampled_from([1, 16, 150, 300, 600])), "n_sm": draw(st.sampled_from([1, 2, 5, 20])),
        "tail_warps": draw(st.sampled_from([1, 2, 8, 12])),
        "split": draw(st.sampled_from(["balanced", "rounds", "groups"])),
        "group_capacity": draw(st.sampled_from([1, 500, 3000, 20_000])),
    }  # fmt: skip
    return draw(forests(tokens=2000, tail=draw(st.sampled_from([60, 600, 6000])))), arguments


def rule(rows, few, given, arguments, widen=1.0):
    """How often each (tile, length, its chunks) occurs by the rule, and the head pack.

    `few`: the tile that takes everything, where chunks may be short, or None; `given`: the tails that teams take though
    packs are not few.
    """
    tiles, kv_heads, n_sm = arguments["tiles"], arguments["num_kv_heads"], arguments["n_sm"]
    group = arguments["num_qo_heads"] // kv_heads
    team, tail = team_and_tail(tiles, group)
    pack = head_pack(group, kv_heads, HEADS["head_dim"]) if tiles[tail][0] == 8 else 1
    cut, of_warps = [], [tile for tile, (m, _) in enumerate(tiles) if m <= 16]
    alone = {tile for tile, *_ in rows} <= set(of_warps)
    grouped = arguments["split"] == "groups"
    of_warps = [] if grouped else of_warps
    for tile in of_warps:
        m, step = tiles[tile]
        longest_first = sorted((stop - start for of, start, stop, _ in rows if of == tile), reverse=True)
        warps = n_sm * (arguments["tail_warps"] if tile == tail else round(1 / DEFAULT_ALPHA[m]))
        units, least = kv_heads // (pack if tile == tail else 1), least_chunk(arguments["min_chunk"], step, alone)
        busy = max(1, warps * 2 // 3) if alone and tile == tail else warps
        two_rounds = tile != tail and arguments["split"] == "rounds"
        limits = limits_of_warps(longest_first, units, warps, busy, least, step, two_rounds)
        cut += [(tile, length, longest) for length, longest in zip(longest_first, limits, strict=True)]
    lengths = [[stop - start for of, start, stop, _ in rows if of == tile] for tile in range(len(tiles))]
    leasts = [least_chunk(arguments["min_chunk"], n, tile == few) for tile, (_, n) in enumerate(tiles)]
    limits = [
        group_limit(arguments["group_capacity"], DEFAULT_ALPHA[m], least, n)
        if grouped
        else tile_limit(some, DEFAULT_ALPHA[m], kv_heads, n_sm, least, n)
        for some, least, (m, n) in zip(lengths, leasts, tiles, strict=True)
    ]
    even, wholes = [], [0] * len(tiles)  # tails of even shares
    if given and not grouped and unlike([stop - start for _, start, stop, _ in given]):
        even = [(team, *row[1:]) for row in given]
        cut += [(team, stop - start, limits[team]) for _, start, stop, _ in given]
        rows = [row for row in rows if row not in even]
    if arguments["split"] == "rounds":
        settle_rounds(rows, even, arguments, tail, pack, leasts, limits, wholes)
    for tile in set(range(len(tiles))) - set(of_warps):
        longest_first = sorted((stop - start for of, start, stop, _ in rows if of == tile), reverse=True)
        cut += [(tile, n, n if i < wholes[tile] else limits[tile]) for i, n in enumerate(longest_first)]
    chunks = [(tile, size, pieces(size, int(longest * widen), tiles[tile][1])) for tile, size, longest in cut]
    return Counter(chunks), pack


def settle_rounds(rows, even, arguments, tail, pack, leasts, limits, wholes):
    """Change the limits of the tiles of more than 16 rows, the largest first, and how many row tiles stay whole."""
    tiles, kv_heads = arguments["tiles"], arguments["num_kv_heads"]
    group, costs = arguments["num_qo_heads"] // kv_heads, UnitCosts.default(arguments["tiles"])
    of_tiles, single = costs.of_tiles(tiles), [row for row in rows if tiles[row[0]][0] <= 16]
    processors = Processors(
        arguments["n_sm"], tiles, of_tiles[: len(tiles)], of_tiles[len(tiles) :],
        kv_heads * (costs.part + group * costs.part_row), kv_heads, pack * arguments["tail_warps"],
        arguments["merge"] == "fused", tail, [stop - start for tile, start, stop, _ in single if tile == tail],
        [(tile, stop - start) for tile, start, stop, _ in [*single, *even] if tile != tail],
    )  # fmt: skip
    for tile in reversed(range(len(tiles))):
        mine = [(stop - start, len(members)) for of, start, stop, members in rows if of == tile]
        mine.sort(key=lambda row: -row[0])
        if mine and tiles[tile][0] > 16:
            teams, least = round(1 / DEFAULT_ALPHA[tiles[tile][0]]), up(leasts[tile], tiles[tile][1])
            limits[tile], wholes[tile] = processors.settle(tile, mine, limits[tile], least, teams)


def cuts(plan, rows):
    """The same as it is in a plan."""
    items = packs_in(plan)
    assert len(items) == plan.n_items - without_tokens(plan).sum()
    found = {
        (tile, start, stop, members): tuple(
            end - begin
            for begin, end, some in sorted(items, key=lambda item: item[0])
            if some == members and start <= begin < max(stop, start + 1)
        )
        for tile, start, stop, members in rows
    }
    assert sum(map(len, found.values())) == len(items)
    return Counter((row[0], row[2] - row[1], chunks) for row, chunks in found.items())


@settings(max_examples=samples(400, 100))
@given(batch=batches(), grow=st.booleans())
def test_chunks_are_those_of_the_rule(batch, grow):
    forest, arguments = batch
    arguments["grow"] = grow
    plan = plan_of(forest, **arguments)
    check_tiles(plan)
    rows = row_tiles(plan)
    given = given_tails(plan)
    few = team_and_tail(plan.tiles, plan.group_size)[0] if len(given) == len(rows) else gathered(plan)
    expected, pack = rule(rows, few, given, arguments)
    assert cuts(plan, rows) == expected and plan.head_pack == pack and not plan.widened
    alone = all(arguments["tiles"][tile][0] <= 16 for tile, *_ in rows)
    for tile, length, chunks in expected:
        least = least_chunk(arguments["min_chunk"], arguments["tiles"][tile][1], alone or tile == few)
        assert len(chunks) <= max(1, -(-length // least))  # never more than chunks of the least length would be


@settings(max_examples=samples(200, 80))
@given(batch=batches(), share=st.floats(0, 1))
def test_chunks_are_widened_no_further_than_the_capacity_asks(batch, share):
    forest, arguments = batch
    arguments["fan_in"] = 0  # all items have KV
    free = plan_of(forest, **arguments)
    rows = row_tiles(free)
    limit = len(rows) + int(share * (free.n_items - len(rows)))
    plan = plan_of(forest, **arguments, max_items=limit, max_members=free.n_members)
    steps = accumulate(repeat(1.25), mul, initial=1.0)
    widened = (rule(rows, gathered(plan), [], arguments, widen)[0] for widen in steps)
    expected = next(some for some in widened if sum(len(c) * count for (_, _, c), count in some.items()) <= limit)
    assert cuts(plan, rows) == expected and plan.widened == (limit < free.n_items)


def loose(lengths):
    """A forest of requests that share nothing."""
    return tree_forest((len(lengths),), (max(lengths),)).with_seq_len(lengths)


def loose_chunks(lengths, **arguments):
    """For each request that shares nothing, its chunks. 12 warps and 2 KV heads to a unit, so 12 chunks are a round."""
    forest = loose(lengths)
    plan = plan_of(forest, **{"n_sm": 1, "head_pack": 2, "fan_in": 0, **arguments})
    check_plan(plan, forest)
    items = plan.items[~without_tokens(plan)]
    mine = [items[items[:, 8] == request] for request in range(len(lengths))]
    return [(some[:, 3] - some[:, 2])[some[:, 2].argsort()].tolist() for some in mine]


@pytest.mark.parametrize(
    ("tails", "in_last_round"),
    [
        (12, []),
        (24, []),
        (18, [[512, 488]] * 6),  # 500 tokens a warp
        (13, [[96] * 10 + [40]]),  # 83 a warp
        (14, [[176] * 5 + [120]] * 2),  # 166 a warp
        (11, [[1000]] * 11),  # no whole round: 1375 to each of eight warps
        (5, [[512, 488]] * 5),  # 625
        (4, [[512, 488]] * 4),  # 500
        (3, [[336, 336, 328]] * 3),  # 375
        (7, [[1000]] * 7),  # 875, so 14 chunks: longer ones until they are no more than 12
        (36 + 4, [[336, 336, 328]] * 4),
    ],
)
def test_only_tails_of_the_last_round_are_cut(tails, in_last_round):
    chunks = loose_chunks([1000] * tails)
    assert sorted(chunks, key=len) == [[1000]] * (tails - len(in_last_round)) + in_last_round


def test_whole_steps_may_leave_a_warp_of_the_last_round_idle():
    assert loose_chunks([1550] * 13) == [[1550]] * 12 + [[144] * 10 + [110]]  # 129 a warp: 11 chunks


def test_a_long_one_among_short_ones_is_cut_to_an_even_share():
    """Chunks of one round for each warp would be twice as long or more: some warps have two units instead."""
    assert loose_chunks([10_000] + [1] * 6)[0] == [1680] * 5 + [1600]  # one round of twelve
    assert loose_chunks([10_000] + [1] * 7)[0] == [848] * 11 + [672]  # five would be longer than 2.5 x 848
    assert loose_chunks([10_000] + [1] * 10)[0] == [848] * 11 + [672]
    assert loose_chunks([100_000] + [1] * 118, n_sm=10)[0] == [848] * 117 + [784]
    assert loose_chunks([10_000] * 12 + [5000] + [1] * 10)[12] == [2512, 2488]  # where a round is whole, as before


def test_the_longest_tails_are_the_whole_ones():
    chunks = loose_chunks([600, 620] * 6 + [400, 300] * 3)
    assert chunks[:12] == [[600], [620]] * 6
    assert chunks[12:] == [[208, 192], [160, 140]] * 3  # 175 a warp are 176, and 15 chunks; 224 are 12


def test_a_tail_of_a_whole_round_is_cut_where_it_exceeds_a_warps_even_share_by_a_quarter():
    assert loose_chunks([5000] + [100] * 11) == [[640] * 7 + [520]] + [[100]] * 11  # 508 a warp, so 635
    assert loose_chunks([592] + [470] * 11) == [[592]] + [[470]] * 11  # 480, so 600, in steps of 16 is 608
    assert loose_chunks([620] + [470] * 11) == [[320, 300]] + [[470]] * 11  # 482, so 602


def test_a_round_of_more_warps_or_units_has_more_or_fewer_tails():
    assert loose_chunks([1000] * 12, tail_warps=24) == [[512, 488]] * 12
    assert loose_chunks([1000] * 12, n_sm=2) == [[512, 488]] * 12
    assert loose_chunks([1000] * 6, head_pack=1) == [[1000]] * 6
    assert loose_chunks([1000] * 6, num_qo_heads=16, num_kv_heads=4) == [[1000]] * 6


def test_no_chunk_is_made_for_less_than_the_least():
    assert loose_chunks([1000], min_chunk=400) == [[336, 336, 328]]
    assert loose_chunks([256], min_chunk=1, n_sm=9) == [[16] * 16]  # a step
    assert loose_chunks([256], n_sm=9) == [[64] * 4]
    assert loose_chunks([1000], min_chunk=1, n_sm=9, tiles=((64, 64),), head_pack=None) == [[512, 488]]
    assert loose_chunks([64], n_sm=9) == [[64]]


def test_beside_larger_tiles_a_chunk_has_eight_steps():
    """64 rows share 1000 tokens, and nothing is gained by a tail that ends before them."""
    forest = Forest([-1], [1000], [0] * 16 + [-1], [1001] * 16 + [256], [*range(0, 17 * 1100, 1100)])
    plan = plan_of(forest, num_qo_heads=4, num_kv_heads=1, n_sm=9, min_chunk=1)
    check_plan(plan, forest)
    tail = plan.items[(plan.items[:, 8] == 16) & ~without_tokens(plan)]
    assert sorted((tail[:, 3] - tail[:, 2]).tolist()) == [128, 128]


def test_tails_without_tokens_make_no_round():
    assert loose_chunks([1000] * 8 + [1] * 4) == [[512, 488]] * 8 + [[1]] * 4  # a round, and 667 a warp, so 833
    assert loose_chunks([1000] * 8 + [0] * 4) == [[1000]] * 8 + [[0]] * 4  # none, and 8 chunks fit where 16 do not


def test_shared_chunks_of_two_phase_stay_as_they_are():
    """With one tile, shared packs are of the tail tile too."""
    forest = tree_forest((1, 3), (512, 1000))
    lengths = {}
    for tile in ((16, 16), (64, 64)):
        plan = plan_of(forest, strategy="two-phase", shared_chunk=64, n_sm=1, tiles=(tile,))
        check_plan(plan, forest)
        lengths[tile] = (plan.items[:, 3] - plan.items[:, 2]).tolist()
    assert lengths[16, 16] == [512] * 3 + [64] * 8 + [488] * 3  # closing items after the others
    assert lengths[64, 64] == [64] * 8 + [1000] * 3  # no tile of single warps: a chunk may be a team's share


def shared_tiles(packs, **arguments):
    """The tile's rows and the chunks of each pack of (tokens, requests), which are the only shared ones.

    Four query heads of one KV head, so four requests to a tile of 16 rows; by default on one processor.
    """
    node = [index for index, (_, count) in enumerate(packs) for _ in range(count)]
    tokens = [length for length, _ in packs]
    seq_len = [tokens[n] + 5 for n in node]
    forest = Forest([-1] * len(packs), tokens, node, seq_len, [*accumulate(seq_len[:-1], initial=0)])
    options = {"num_qo_heads": 4, "num_kv_heads": 1, "n_sm": 1, "strategy": "naive", "fan_in": 0, **arguments}
    plan = plan_of(forest, **options)
    check_plan(plan, forest)
    found = []
    for pack in range(len(packs)):
        request = node.index(pack)
        mine = [
            (plan.tiles[item[7]][0], item[3] - item[2])
            for item in sorted(plan.items.tolist(), key=lambda item: item[2])
            if item[8] == request and item[3] <= tokens[pack] and item[4] < 0
        ]
        assert len({rows for rows, _ in mine}) == 1
        found.append((mine[0][0], [length for _, length in mine]))
    return found


def test_a_long_pack_among_few_moves_to_the_next_larger_tile():
    assert shared_tiles([(1000, 2)]) == [(64, [512, 488])]  # 125 tokens to each of eight warps
    assert shared_tiles([(256, 2)]) == [(64, [256])]
    assert shared_tiles([(255, 2)])[0][0] == 16  # no pack of less is long
    assert shared_tiles([(1000, 2), (1000, 3)]) == [(64, [1000])] * 2
    assert [rows for rows, _ in shared_tiles([(1000, 2)] * 3)] == [16] * 3  # 375 to a warp, a quarter of 1500


def test_a_pack_is_long_by_four_times_a_warps_share_of_all_of_its_kind():
    chunks = shared_tiles([(2000, 2), (1999, 2)], num_qo_heads=8, num_kv_heads=2)  # 999 to a warp
    assert [rows for rows, _ in chunks] == [16, 16]
    chunks = shared_tiles([(2000, 2), (1999, 2)], num_qo_heads=8, num_kv_heads=2, n_sm=2)  # 499: 1996
    assert [rows for rows, _ in chunks] == [64, 64]
    chunks = shared_tiles([(2001, 2), (1995, 2)], num_qo_heads=8, num_kv_heads=2, n_sm=2)  # 499 too
    assert [rows for rows, _ in chunks] == [64, 16]
    chunks = shared_tiles([(300, 2), (9000, 9)])  # 36 rows are not of that kind, nor are tails
    assert [rows for rows, _ in chunks] == [64, 64]
    chunks = shared_tiles([(300, 2)] + [(100, 2)] * 4)  # 87: 348
    assert [rows for rows, _ in chunks] == [16] * 5
    chunks = shared_tiles([(1000, 2), (1000, 3)], head_dim=256)  # of four warps, 500 to each
    assert [rows for rows, _ in chunks] == [16, 16]


def test_two_rounds_of_chunks_where_a_third_of_the_warps_would_have_none():
    """Five packs on eight warps are one round, of 960 tokens; in thirds they are two, of 320."""
    assert shared_tiles([(960, 2)] * 5) == [(16, [320] * 3)] * 5
    assert shared_tiles([(960, 2)] * 6) == [(16, [960])] * 6  # for six of the eight
    assert shared_tiles([(960, 2)] * 4) == [(16, [480] * 2)] * 4  # for all of them
    behind = shared_tiles([(1800, 2)] * 8 + [(960, 2)] * 5)
    assert behind == [(16, [1800])] * 8 + [(16, [320] * 3)] * 5  # a whole round goes before
    assert shared_tiles([(960, 2)] * 5, split="balanced") == [(16, [960])] * 5  # queues pop there
    assert shared_tiles([(960, 2)] * 5 + [(64, 9)])[:5] == [(16, [320] * 3)] * 5  # beside a larger tile too


def test_packs_behind_whole_rounds_of_teams_make_a_round_of_their_own():
    """Eight teams of four processors: eight packs stay whole, and the ninth is cut for all of them."""
    packs = [(5000, 5)] * 9
    chunks = [chunks for rows, chunks in shared_tiles(packs, n_sm=4) if rows == 64]
    assert sorted(chunks, key=len) == [[5000]] * 8 + [[640] * 7 + [520]]
    assert [len(chunks) for _, chunks in shared_tiles(packs[:8], n_sm=4)] == [1] * 8
    uneven = shared_tiles([(4000, 5)] + [(5000, 5)] * 8, n_sm=4)  # the shortest
    assert [len(chunks) for _, chunks in uneven] == [6] + [1] * 8
    assert len(shared_tiles(packs, n_sm=4, split="balanced")[0][1]) == 1


def test_a_chunk_is_a_teams_share_of_a_groups_capacity_whatever_the_batch():
    """Two teams take the tile of 64 rows, one that of 128; tails go to single warps, in eighths, and longer least."""
    for packs in ([(8000, 16), (9000, 32)], [(8000, 16), (9000, 32), (60_000, 32)]):
        found = shared_tiles(packs, n_sm=8, split="groups", group_capacity=5000)
        assert found[:2] == [(64, [2048, 2048, 2048, 1856]), (128, [4544, 4456])]
    assert loose_chunks([1000] * 13, split="groups", group_capacity=4096) == [[512, 488]] * 13
    assert loose_chunks([1000] * 13, split="groups", group_capacity=100) == [[128] * 7 + [104]] * 13


def test_chunks_of_two_rounds_are_no_shorter_than_16_steps():
    assert shared_tiles([(704, 2)] * 5) == [(16, [240, 240, 224])] * 5  # of 288 at most
    assert shared_tiles([(600, 2)] * 5) == [(16, [600])] * 5  # of 240


def test_a_long_pack_moves_by_one_tile_and_out_of_single_warps_only():
    portable = TILES["portable"]
    assert shared_tiles([(1000, 2)], tiles=portable)[0][0] == 32
    assert shared_tiles([(1000, 8)], tiles=portable)[0][0] == 32  # 32 rows, where they belong
    assert shared_tiles([(1000, 16)])[0][0] == 64
    assert shared_tiles([(1000, 2)], tiles=((16, 16), (128, 64)))[0][0] == 128
    assert shared_tiles([(1000, 2)], tiles=((8, 16), (16, 16)))[0][0] == 16  # there is no larger one
    assert shared_tiles([(1000, 2)], tiles=((64, 64),))[0][0] == 64


def test_tails_and_other_splits_stay_in_their_tile():
    forest = tree_forest((1,), (5000,))
    for group in (4, 16):
        plan = plan_of(forest, num_qo_heads=group, num_kv_heads=1, fan_in=0)
        assert {plan.tiles[tile][0] for tile in plan.items[:, 7].tolist()} == {max(8, group)}
    for split in ("none", "mean"):
        assert shared_tiles([(1000, 2)], split=split)[0][0] == 16


def tiles_of(forest, **arguments):
    """The rows of the tiles that have items with tokens; two processors, one KV head, four query heads to it."""
    plan = plan_of(forest, **{"num_qo_heads": 4, "num_kv_heads": 1, "n_sm": 2, **arguments})
    check_plan(plan, forest)
    return {plan.tiles[tile][0] for tile in plan.items[~without_tokens(plan), 7].tolist()}


def test_few_packs_are_gathered_in_the_smallest_tile_of_teams():
    """Two processors have four teams in the tile of 64 rows: six packs are few, with up to 12,000 tokens."""
    for fan_in in (1, 16):
        assert tiles_of(tree_forest((6,), (2000,)), fan_in=fan_in) == {64}
        assert tiles_of(tree_forest((7,), (50,)), fan_in=fan_in) == {8}
        assert tiles_of(tree_forest((6,), (2001,)), fan_in=fan_in) == {8}
    assert tiles_of(tree_forest((1, 3), (3000, 100)), strategy="naive") == {64}  # a shared pack of 16 rows and three
    assert tiles_of(tree_forest((6,), (2000,)), n_sm=1) == {8}
    assert tiles_of(tree_forest((6,), (2000,)), num_kv_heads=2, num_qo_heads=8) == {8}  # twice the units


@pytest.mark.parametrize(
    ("tree", "teams", "otherwise"),
    [
        (((1, 16), (500, 1)), 17 / 1.5, {8, 64}),
        (((1, 17), (500, 1)), 19, {8, 128}),  # 68 rows are two tiles of 64
        (((1, 2, 20), (500, 300, 10)), 24 / 2, {8, 64, 128}),
        (((1, 10, 20), (500, 30, 10)), 32 / 3, {8, 16, 128}),
        (((1, 8, 16), (500, 30, 10)), 25 / 3, {8, 16, 64}),
        (((8, 16), (30, 10)), 24 / 1.5, {8, 16}),
    ],
)
def test_more_packs_are_few_where_they_would_be_in_more_kinds_of_tiles(tree, teams, otherwise):
    """A processor has two teams in the tile of 64 rows, which takes everything where there are enough of them."""
    least = math.ceil(teams / 2)
    assert tiles_of(tree_forest(*tree), strategy="naive", n_sm=least) == {64}
    assert tiles_of(tree_forest(*tree), strategy="naive", n_sm=least - 1) == otherwise


def test_tails_alone_in_one_round_of_teams_are_theirs_whatever_their_length():
    for split, tile in (("rounds", 64), ("balanced", 8)):
        assert tiles_of(tree_forest((4,), (9000,)), split=split) == {tile}  # four teams
        assert tiles_of(tree_forest((5,), (9000,)), split=split) == {8}
    assert tiles_of(tree_forest((1, 2), (9000, 9000)), split="rounds", strategy="naive") == {8, 64}  # one is shared


@pytest.mark.parametrize(
    ("lengths", "heads", "tile"),
    [
        ([4000] + [600] * 6, 1, 64),  # in more than a round and a half of the four teams they are not few
        ([200] + [30] * 9, 1, 64),
        ([1200] + [600] * 8, 1, 8),  # not unlike enough
        ([4000] + [600] * 6, 2, 64),
    ],
)
def test_teams_take_tails_of_unlike_lengths(lengths, heads, tile):
    arguments = {"num_qo_heads": 4 * heads, "num_kv_heads": heads}
    assert tiles_of(loose(lengths), split="rounds", **arguments) == {tile}
    assert tiles_of(loose(lengths), split="balanced", **arguments) == {8}


@pytest.mark.parametrize(
    ("tails", "processors", "tile"),
    [
        ([9000] + [75] * 16, 2, 64),  # 600 in the mean
        ([9000] + [74] * 16, 2, 8),
        ([9000] + [75] * 16, 8, 64),  # more than a round of 16 teams
        ([9000] + [75] * 16, 9, 8),
        ([2000] * 17, 2, 8),  # alike
    ],
)
def test_beside_other_packs_teams_take_tails_of_unlike_lengths_that_are_not_short(tails, processors, tile):
    """What 17 requests share are 68 rows, in the tile of 128."""
    forest = tree_forest((1, 17), (500, 9000)).with_seq_len([500 + length for length in tails])
    assert tiles_of(forest, split="rounds", strategy="naive", n_sm=processors) == {tile, 128}
    assert tiles_of(forest, split="balanced", strategy="naive", n_sm=processors) == {8, 128}


@pytest.mark.parametrize(
    ("requests", "tokens", "tile"),
    [(7, 4000, 64), (6, 4000, 8), (29, 4000, 8), (31, 4000, 64), (33, 4000, 64), (15, 999, 8), (15, 1000, 64)],
)
def test_teams_take_long_tails_of_like_lengths_where_their_last_round_is_full_or_one_of_many(requests, tokens, tile):
    """1.75, 1.5, 7.25, 7.75, 8.25 and 3.75 rounds of four teams."""
    assert tiles_of(tree_forest((requests,), (tokens,)), split="rounds") == {tile}


def test_unlike_tails_are_cut_to_a_teams_share():
    for short, longest in ((7, 2304), (200, 4544), (300, 9000)):  # of 2,432, 7,296 and 9,750 at most, in even pieces
        plan = plan_of(loose([9000] + [100] * short), n_sm=2, num_qo_heads=4, num_kv_heads=1, split="rounds")
        items = plan.items[~without_tokens(plan)]
        assert (items[:, 3] - items[:, 2]).max() == longest


def test_other_packs_beside_tails_of_teams_keep_their_least_chunk():
    """Eight steps of the tile of 64 rows, in which three packs of 800 tokens are, five requests each."""
    forest = tree_forest((3, 15), (800, 9000)).with_seq_len([8800] + [900] * 14)
    arguments = {"num_qo_heads": 4, "num_kv_heads": 1, "n_sm": 5, "strategy": "naive", "split": "rounds"}
    assert tiles_of(forest, **arguments) == {64}
    plan = plan_of(forest, **arguments)
    shared = plan.items[plan.items[:, 6] == 5].tolist()
    assert sorted(item[3] - item[2] for item in shared) == [352] * 3 + [448] * 3


def test_few_packs_of_many_rows_are_cut_into_several_tiles():
    plan = plan_of(tree_forest((1, 40), (300, 1)), n_sm=40, num_qo_heads=4, num_kv_heads=1, strategy="naive")
    shared = plan.items[plan.items[:, 2] == 0]
    assert (plan.items[~without_tokens(plan), 7] == 2).all() and plan.tiles[2] == (64, 64)
    assert sorted(set(shared[:, 6].tolist())) == [8, 16]  # 16 requests fill it


def test_few_packs_stay_where_one_has_a_chunk_of_its_own():
    assert tiles_of(tree_forest((1, 3), (500, 100)), strategy="two-phase") == {8, 64}  # the tails stay
    assert tiles_of(tree_forest((6,), (2000,)), tiles=((8, 16), (16, 16))) == {8}  # there is no such tile
    for split in ("none", "mean"):
        assert tiles_of(tree_forest((6,), (2000,)), split=split) == {8}
    assert tiles_of(tree_forest((6,), (2000,)), fan_in=0) == {8}


def test_chunks_of_few_packs_may_be_as_short_as_asked_for():
    """A tile of 64 rows steps by 64 tokens: its chunks have eight steps elsewhere."""
    for min_chunk, chunks in ((64, 16), (100, 8), (1000, 1)):
        plan = plan_of(tree_forest((1,), (1024,)), n_sm=50, min_chunk=min_chunk)
        lengths = [item[3] - item[2] for item in plan.items[~without_tokens(plan)].tolist()]
        assert lengths == [1024 // chunks] * chunks, min_chunk


def test_promoted_chunks_are_those_of_the_larger_tile():
    """64 processors: a chunk has at least eight steps of its tile, but among single warps alone only `min_chunk`."""
    assert shared_tiles([(1000, 2)], n_sm=64) == [(64, [512, 488])]
    assert shared_tiles([(1000, 2)], n_sm=64, tiles=((8, 16), (16, 16))) == [(16, [64] * 15 + [40])]


def test_a_chunk_is_a_share_of_the_tokens_of_its_own_tile():
    """Of two processors, four teams take the tile of 64 rows and two that of 128."""
    alone = shared_tiles([(8000, 16)], n_sm=2)
    assert alone == [(64, [2048, 2048, 2048, 1856])]  # 2000 to a team
    assert shared_tiles([(8000, 16), (6000, 32)], n_sm=2) == [*alone, (128, [3008, 2992])]
    assert shared_tiles([(8000, 16), (60_000, 32)], n_sm=2) == [*alone, (128, [30_016, 29_984])]
    assert shared_tiles([(8000, 16), (8000, 16)], n_sm=2) == [(64, [4032, 3968])] * 2  # 4000 to a team
