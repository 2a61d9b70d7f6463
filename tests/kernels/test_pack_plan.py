"""Every plan covers the batch exactly, in a form that the kernel can run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import HEADS, ONE_TILE, check_plan, forests, plan_of

from feather_kernels.pack import SPLITS, STRATEGIES
from feather_kernels.plan import MAGIC, Planner
from feather_kernels.trees import PAT_TREES, parse_tree, tree_forest


@settings(max_examples=300)
@given(forest=forests(tokens=200, tail=300), grow=st.booleans(), min_chunk=st.sampled_from([1, 16, 64]))
def test_every_strategy_and_split_covers_each_request_and_token_once(forest, grow, min_chunk):
    for strategy in STRATEGIES:
        for split in SPLITS:
            options = {"strategy": strategy, "split": split, "grow": grow, "min_chunk": min_chunk, "n_sm": 20}
            check_plan(plan_of(forest, **options), forest)


@pytest.mark.parametrize("heads", [(8, 8), (16, 1), (12, 2), (5, 1)])
@pytest.mark.parametrize("tiles", [((16, 16),), ((16, 16), (32, 16), (64, 32), (128, 64))])
def test_row_tiles_of_any_group(heads, tiles):
    forest = tree_forest((1, 3, 99), (100, 40, 7))
    plan = plan_of(forest, num_qo_heads=heads[0], num_kv_heads=heads[1], tiles=tiles)
    check_plan(plan, forest)


def test_a_remainder_runs_in_a_small_tile():
    plan = plan_of(tree_forest((1, 17), (4096, 1)), split="none")
    shared = plan.items[plan.items[:, 2] == 0]
    assert shared[:, 6:].tolist() == [[16, 2], [1, 0]]  # 64 rows and 4, not 36 and 32


def test_tiles_are_even_where_a_remainder_would_need_the_largest_anyway():
    plan = plan_of(tree_forest((1, 45), (4096, 1)), split="none")
    shared = plan.items[plan.items[:, 2] == 0]
    assert shared[:, 6:].tolist() == [[15, 2], [15, 2], [15, 2]]


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
    plan = plan_of(tree_forest((1, 2), (10_000, 1)), n_sm=100, alpha=(0.1, 0.1, 1.0))
    limit = 64  # 0.1 * 20,002 token-heads / 100 processors = 20 tokens, at least min_chunk
    shared = plan.items[plan.items[:, 4] < 0]
    lengths = shared[:, 3] - shared[:, 2]
    assert set(lengths[:-1].tolist()) == {limit} and len(shared) == -(-10_000 // limit)


def test_two_phase_has_chunks_of_its_size_and_whole_tails():
    plan = plan_of(tree_forest((1, 8), (256, 100)), strategy="two-phase", shared_chunk=64, split="none")
    assert sorted((plan.items[:, 3] - plan.items[:, 2]).tolist()) == [64] * 4 + [100] * 8


def test_a_batch_of_one_is_one_item_without_parts():
    plan = plan_of(tree_forest((1,), (70,)), split="none")
    assert plan.items.tolist() == [[0, 0, 0, 70, 0, 0, 1, 0]]
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
    assert header[0] == MAGIC and header[1:6] == [plan.n_items, plan.n_members, 10, plan.n_parts, 3]
    assert header[8] < header[6] < header[7]
    assert all(begin % 32 == 0 for begin in header[6:9])
    assert header[9] == plan.used == header[7] + 2 * plan.n_members <= len(plan.buffer)
    assert plan.used <= 32 + 8 * plan.n_items + 2 * plan.n_members + 11 + 3 * 32  # packed: one short copy moves it
    assert header[10] == first[10] + 1
    assert header[16:20] == plan.queue_begin.tolist()


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


def test_scheduled_traffic_counts_row_tiles_and_chunks():
    plan = plan_of(tree_forest((1, 40), (4096, 64)), split="none", strategy="naive")
    token, part = 2 * 64 * 2 * 2, 4 * 65 * 4 * 2 * 2  # both KV heads
    assert plan.traffic == ((4096 + 40 * 64) * token, 80 * part)
    assert plan.scheduled_traffic == ((3 * 4096 + 40 * 64) * token, 80 * part)
    assert plan_of(plan.forest, **ONE_TILE, strategy="naive").scheduled_traffic == plan.traffic
