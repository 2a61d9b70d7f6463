"""Every plan covers the batch exactly, in a form that the kernel can run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import HEADS, ONE_TILE, TILE_SETS, check_header, check_plan, check_queues, forests, plan_of

from effort import samples
from feather_kernels.errors import PlanError
from feather_kernels.forest import Forest
from feather_kernels.pack import MERGES, SPLITS, STRATEGIES
from feather_kernels.plan import CLOSES, MAGIC, Planner
from feather_kernels.tiles import TILES
from feather_kernels.trees import PAT_TREES, parse_tree, tree_forest


@pytest.mark.slow
@settings(max_examples=samples(3000, 600))
@given(
    strategy=st.sampled_from(list(STRATEGIES)), split=st.sampled_from(list(SPLITS)), grow=st.booleans(),
    forest=forests(tokens=400, tail=600), min_chunk=st.sampled_from([1, 16, 200]),
    merge=st.sampled_from(list(MERGES)), tiles=st.sampled_from(TILE_SETS), group=st.integers(1, 16) | st.just(48),
    kv_heads=st.integers(1, 4), n_sm=st.sampled_from([1, 20]), fan_in=st.sampled_from([0, 1, 2, 5, 16]),
)  # fmt: skip
def test_every_strategy_and_split_covers_each_request_and_token_once(
    strategy, split, grow, forest, min_chunk, merge, tiles, group, kv_heads, n_sm, fan_in
):
    options = {
        "num_qo_heads": group * kv_heads, "num_kv_heads": kv_heads, "merge": merge, "tiles": tiles, "grow": grow,
        "min_chunk": min_chunk, "n_sm": n_sm, "fan_in": fan_in,
    }  # fmt: skip
    check_plan(plan_of(forest, strategy=strategy, split=split, **options), forest)


@pytest.mark.parametrize("heads", [(8, 8), (16, 1), (12, 2), (5, 1), (34, 2), (64, 1), (128, 1)])
@pytest.mark.parametrize("tiles", [((16, 16),), ((16, 16), (32, 16), (64, 32), (128, 64)), TILES["hopper"]])
def test_row_tiles_of_any_group(heads, tiles):
    if heads[0] > tiles[-1][0] * heads[1]:
        with pytest.raises(PlanError, match="more rows than the largest tile, 16"):
            plan_of(tree_forest((1,), (9,)), num_qo_heads=heads[0], num_kv_heads=heads[1], tiles=tiles)
        return
    forest = tree_forest((1, 3, 99), (100, 40, 7))
    plan = plan_of(forest, num_qo_heads=heads[0], num_kv_heads=heads[1], tiles=tiles)
    check_plan(plan, forest)


def test_a_remainder_runs_in_a_small_tile():
    plan = plan_of(tree_forest((1, 33), (4096, 1)), split="none")
    shared = plan.items[plan.items[:, 2] == 0]
    assert shared[:, 6:8].tolist() == [[32, 3], [1, 0]]  # 128 rows and 4, not 68 and 64


def test_eight_rows_are_one_requests():
    plan = plan_of(tree_forest((1, 34), (4096, 1)), split="none")
    shared = plan.items[plan.items[:, 2] == 0]
    assert shared[:, 6:8].tolist() == [[32, 3], [2, 1]]
    alone = plan_of(tree_forest((1, 3), (4096, 1)), strategy="naive", split="none", tiles=((8, 16),))
    assert alone.items[:, 6:8].tolist() == [[1, 0]] * 6


def test_tiles_are_even_where_a_remainder_would_need_the_largest_anyway():
    plan = plan_of(tree_forest((1, 81), (4096, 1)), split="none")
    shared = plan.items[plan.items[:, 2] == 0]
    assert shared[:, 6:8].tolist() == [[27, 3], [27, 3], [27, 3]]


@pytest.mark.parametrize("name", PAT_TREES)
def test_pat_trees(name):
    forest = tree_forest(*parse_tree(name))
    plan = plan_of(forest)
    if forest.seq_len.sum() < 300_000:
        check_plan(plan, forest)
    assert len(plan.part_begin) == forest.n_requests + 1


def test_mean_split_leaves_no_item_above_the_mean():
    forest = tree_forest((1, 4, 16), (5000, 300, 10))
    whole, cut = plan_of(forest, split="none"), plan_of(forest, split="mean")
    lengths = whole.items[:, 3] - whole.items[:, 2]
    assert (cut.items[:, 3] - cut.items[:, 2]).max() <= lengths.mean()


def test_balanced_chunks_are_even_and_whole_kv_tiles():
    tiles, alpha = ((8, 16), (16, 16)), (0.1, 0.1)
    plan = plan_of(tree_forest((1, 2), (10_000, 1)), n_sm=100, alpha=alpha, tiles=tiles, fan_in=0)
    limit = 64  # 0.1 * 20,000 token-heads of the tile / 100 processors = 20 tokens, at least min_chunk
    shared = plan.items[plan.items[:, 4] < 0]
    lengths = shared[:, 3] - shared[:, 2]
    assert set(lengths[:-1].tolist()) == {limit} and len(shared) == -(-10_000 // limit)


def test_two_phase_has_chunks_of_its_size_and_whole_tails():
    plan = plan_of(tree_forest((1, 8), (256, 100)), strategy="two-phase", shared_chunk=64, split="none")
    assert sorted((plan.items[:, 3] - plan.items[:, 2]).tolist()) == [64] * 4 + [100] * 8


def test_a_batch_of_one_is_one_item_without_parts():
    plan = plan_of(tree_forest((1,), (70,)), split="none")
    assert plan.items.tolist() == [[0, 0, 0, 70, 0, 0, 1, 0, 0, -1, 0, 0]]
    assert plan.members.tolist() == [[0, -1]] and plan.n_parts == 0 and plan.traffic.partial == 0


def test_an_empty_batch_is_an_empty_plan():
    plan = plan_of(tree_forest((1,), (5,)))
    empty = type(plan.forest)([], [], [], [], [])
    plan = plan_of(empty)
    assert plan.n_items == plan.n_parts == 0 and plan.part_begin.tolist() == [0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("grow", [True, False])
def test_identical_prompts_without_tails(strategy, grow):
    forest = tree_forest((1, 6), (90, 0))
    plan = plan_of(forest, strategy=strategy, grow=grow, split="none")
    check_plan(plan, forest)
    if not grow and strategy != "query":
        assert plan.n_parts == (0 if strategy != "two-phase" else 12)
        assert plan.n_closing == (0 if strategy != "two-phase" else 6)


def test_without_sharing_all_strategies_agree():
    forest = tree_forest((30,), (500,))
    items = [plan_of(forest, strategy=strategy).items.tolist() for strategy in STRATEGIES]
    assert all(other == items[0] for other in items)


def test_row_offsets_beyond_32_bits():
    forest = tree_forest((2,), (40,))
    far = type(forest)(forest.parent, forest.length, forest.request_node, forest.seq_len, [2**31 + 7, 5 * 2**32 + 3])
    low, high = plan_of(far).items[:, :2].T.astype(np.int64)
    assert sorted(((high << 32) + (low & 0xFFFFFFFF)).tolist()) == [2**31 + 7, 5 * 2**32 + 3]


def test_header_says_where_everything_is():
    planner = Planner(**HEADS, max_requests=100)
    first = planner.plan(tree_forest((1, 40), (600, 20))).header
    plan = planner.plan(tree_forest((2, 10), (300, 50)))
    header = plan.header
    check_header(plan)
    assert header[0] == MAGIC and header[1:6] == [plan.n_items, plan.n_members, 10, plan.n_parts, 4]
    assert plan.used <= 32 + 12 * plan.n_items + 2 * plan.n_members + 11 + 3 * 32  # packed: one short copy moves it
    assert header[10] == first[10] + 1
    assert header[11:13] == [10, 2]
    assert header[16:21] == plan.queue_begin.tolist()


NAIVE = {"strategy": "naive", "split": "none"}


def test_the_last_part_closes_its_request():
    plan = plan_of(tree_forest((1, 2), (100, 50)), **NAIVE)
    assert plan.items[:, 2:8].tolist() == [[0, 100, -1, 0, 2, 1], [100, 150, 0, 2, 1, 0], [100, 150, 1, 3, 1, 0]]
    assert plan.items[:, 8:].tolist() == [[0, 0, 0, 0], [0, CLOSES, 0, 1], [1, CLOSES, 1, 1]]
    assert plan.members.tolist() == [[0, 0], [1, 1], [0, CLOSES], [1, CLOSES]]
    assert plan.part_begin.tolist() == [0, 1, 2] and plan.n_parts == plan.n_closing == 2


def test_the_merge_kernel_wants_every_part():
    plan = plan_of(tree_forest((1, 2), (100, 50)), **NAIVE, merge="kernel")
    assert plan.members.tolist() == [[0, 0], [1, 2], [0, 1], [1, 3]]
    assert plan.part_begin.tolist() == [0, 2, 4] and plan.n_parts == 4 and plan.n_closing == 0


def test_the_last_of_many_chunks_closes():
    plan = plan_of(tree_forest((1,), (1000,)), n_sm=8, min_chunk=100, fan_in=0)
    assert plan.members[:, 1].tolist() == [*range(plan.n_parts), CLOSES] and plan.n_parts > 3
    assert plan.items[-1, 3:5].tolist() == [1000, 0]


def test_requests_that_end_inside_the_tree_are_closed_without_tokens():
    forest = tree_forest((1, 2, 4), (100, 50, 0))
    plan = plan_of(forest, **NAIVE, grow=False)
    assert plan.items[3:, 2:8].tolist() == [[150, 150, -1, first, 1, 0] for first in range(8, 12)]
    assert plan.items[3:, 8:].tolist() == [[request, CLOSES, 2 * request, 2] for request in range(4)]
    assert plan.items[3:, 0].tolist() == forest.row_offset.tolist()
    assert plan.members[8:].tolist() == [[request, CLOSES] for request in range(4)]
    assert plan.n_items == 7 and plan.n_closing == 4 and plan.n_parts == 8
    grows = plan_of(forest, **NAIVE)
    assert grows.n_items == 7 and grows.items[3:, 4].tolist() == [0, 1, 2, 3]  # a tail of no tokens closes


def test_a_request_alone_at_the_end_of_its_node_closes_there():
    """Four tokens are loaded again more cheaply than a part is written."""
    forest = Forest([-1, 0], [100, 4], [1, 1, 1, 0], [104, 131, 130, 120], [0, 200, 400, 600])
    for strategy in ("profit", "optimal"):
        plan = plan_of(forest, strategy=strategy, split="none", grow=False)
        assert plan.items[:, 2:4].tolist() == [[0, 100], [100, 131], [100, 130], [100, 120], [100, 104]]
        assert plan.members[4:].tolist() == [[1, CLOSES], [2, CLOSES], [3, CLOSES], [0, CLOSES]]


def test_items_without_tokens_count_against_the_capacity():
    forest = tree_forest((1, 2, 4), (100, 50, 0))
    for limit in ({"max_items": 6}, {"max_members": 11}, {"max_parts": 7}):
        with pytest.raises(PlanError, match="a plan of 7 items, 12 members and 8 partial rows exceeds"):
            plan_of(forest, **NAIVE, grow=False, **limit)
    enough = plan_of(forest, **NAIVE, grow=False, max_items=7, max_members=12, max_parts=8)
    check_plan(enough, forest)
    assert (
        Planner(**HEADS, max_requests=9, grow=False).options.max_items
        == Planner(**HEADS, max_requests=9).options.max_items + 9
    )


def test_closing_items_wait_behind_the_others_of_their_queue():
    forest = tree_forest((1, 3), (50, 4000))
    plan = plan_of(forest, **NAIVE, tiles=((64, 64),))
    assert plan.items[:, 3].tolist() == [50, 4050, 4050, 4050] and plan.queue_begin.tolist() == [0, 4]
    plan = plan_of(forest, **NAIVE, num_qo_heads=32)  # no group fits into 8 rows: that queue stays empty
    assert plan.items[1:, 7].tolist() == [1] * 3 and plan.queue_begin.tolist() == [0, 0, 1, 4, 4]


def test_as_many_tiles_and_tokens_as_there_may_be():
    forest = tree_forest((1, 2, 4), (2**28, 2**30, 2**29))
    plan = plan_of(forest, **NAIVE, tiles=tuple((8 << power, 16) for power in range(15)))
    check_queues(plan)
    assert plan.n_closing == 4 and plan.queue_begin.tolist()[-3:] == [0, 3, 7]


@pytest.mark.parametrize(
    ("requests", "arguments", "expected"),
    [
        (3, {}, 2),
        (1, {"num_qo_heads": 24, "num_kv_heads": 6}, 2),
        (3, {"head_pack": 1}, 1),
        (3, {"num_qo_heads": 10}, 1),  # 2 * 5 rows
        (16, {"num_qo_heads": 4, "num_kv_heads": 1}, 1),
        (3, {"tiles": ((16, 16), (64, 64))}, 1),
        (3, {"head_dim": 128}, 2),
        (3, {"head_dim": 256}, 1),  # a ring of one slot: only if asked for
        (3, {"head_dim": 256, "head_pack": 2}, 2),
    ],
)
def test_two_heads_to_a_unit_where_they_fit(requests, arguments, expected):
    plan = plan_of(tree_forest((requests,), (60,)), **{"n_sm": 1, "split": "none", **arguments})
    check_header(plan)
    assert plan.n_items == requests and plan.head_pack == expected


@pytest.mark.parametrize(("group", "least", "most"), [(24, 0.2, 0.3), (64, 0.5, 0.6), (65, 1.0, 1.0), (128, 1.0, 1.0)])
def test_what_is_shared_has_as_many_readers_as_a_tile_holds(group, least, most):
    """Rows of 128 query heads: five requests, two, or one, with which nothing is shared."""
    forest = tree_forest((5, 250), (5000, 200))
    plan = plan_of(forest, num_qo_heads=group, num_kv_heads=1)
    assert least <= plan.tokens_read / int(forest.seq_len.sum()) <= most


def test_capacity_is_kept_by_longer_chunks():
    forest = tree_forest((1, 64), (20_000, 30))
    free = plan_of(forest)
    tight = plan_of(forest, max_parts=300)
    assert free.n_parts > 300 >= tight.n_parts and tight.widened and not free.widened
    check_plan(tight, forest)
    assert plan_of(forest, max_items=70).n_items <= 70
    assert plan_of(forest, max_members=130).n_members <= 130


@settings(max_examples=20)
@given(forest=forests())
def test_same_batch_same_plan(forest):
    planner = Planner(**HEADS, max_requests=forest.n_requests, strategy="optimal")
    views = [
        [view.tolist() for view in (plan.items, plan.members, plan.part_begin, plan.queue_begin)]
        for plan in (planner.plan(forest), planner.plan(tree_forest((1,), (9,))), planner.plan(forest))
    ]
    assert views[0] == views[2]


@pytest.mark.parametrize(("merge", "parts"), [("fused", 40), ("kernel", 80)])
def test_scheduled_traffic_counts_row_tiles_and_chunks(merge, parts):
    plan = plan_of(tree_forest((1, 40), (4096, 64)), split="none", strategy="naive", merge=merge)
    token, part = 2 * 64 * 2 * 2, 4 * (64 * 2 + 8) * 2 * 2  # both KV heads
    assert plan.traffic == ((4096 + 40 * 64) * token, parts * part)
    assert plan.scheduled_traffic == ((2 * 4096 + 40 * 64) * token, parts * part)
    assert plan_of(plan.forest, **ONE_TILE, strategy="naive", merge=merge).scheduled_traffic == plan.traffic


def test_a_token_of_8_bits_is_half_the_traffic():
    read = {}
    for tokens in (4, 8, 12):
        forest = tree_forest((1, 2), (tokens, 5))
        for size in (2, 1):
            plan = plan_of(forest, strategy="profit", kv_value_bytes=size, **ONE_TILE)
            assert plan.traffic.kv == plan.tokens_read * 2 * 2 * 64 * size
            read[tokens, size] = plan.tokens_read
    # Read twice, where it weighs less than a part: in 8 bits up to twice as many tokens do.
    assert read == {(4, 2): 18, (4, 1): 18, (8, 2): 18, (8, 1): 26, (12, 2): 22, (12, 1): 22}
    with pytest.raises(PlanError, match="kv_value_bytes is 4: give 2 or 1"):
        plan_of(forest, kv_value_bytes=4)


@pytest.mark.parametrize("heads", [{}, {"num_qo_heads": 12, "num_kv_heads": 3, "head_dim": 128}])
def test_tokens_read_are_the_items_own(heads):
    plan = plan_of(tree_forest((1, 40), (4096, 64)), strategy="naive", **heads)
    assert plan.n_items > 43  # three row tiles, some of them cut, and 40 tails
    assert plan.tokens_read == (plan.items[:, 3] - plan.items[:, 2]).sum() == 3 * 4096 + 40 * 64
    assert type(plan.tokens_read) is int


def test_without_a_tail_every_part_is_traffic():
    plan = plan_of(tree_forest((1, 2, 4), (100, 50, 0)), **NAIVE, grow=False)
    assert plan.traffic.partial == plan.scheduled_traffic.partial == 4 * 2 * (4 * (64 * 2 + 8) * 2 * 2)


def test_chunks_of_shared_nodes_may_be_as_long_as_there_are_numbers():
    forest = tree_forest((1, 8), (400, 100))
    plans = [plan_of(forest, strategy="two-phase", shared_chunk=most, split="none") for most in (2**20, 2**31 - 1)]
    assert plans[0].traffic == plans[1].traffic and plans[1].traffic.partial > 0
