"""The order of a plan's items: which units may wait for which, and that all work gets done."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import TILE_SETS, check_plan, forests, members_of, plan_of, without_tokens, work

from effort import samples
from feather_kernels.forest import Forest
from feather_kernels.pack import SPLITS, STRATEGIES
from feather_kernels.plan import CLOSES
from feather_kernels.trees import tree_forest
from oracles.waiting import Unit, stuck


def units(*pairs):
    return [Unit(frozenset(gives), frozenset(wants)) for gives, wants in pairs]


@pytest.mark.parametrize("seed", range(8))
def test_the_oracle_sees_who_is_stuck(seed):
    """A unit that waits, before the one that it waits for."""
    rng = np.random.default_rng(seed)
    good, bad = units(("a", ""), ("", "a")), units(("", "a"), ("a", ""))
    assert stuck([good], [0], [1], rng) == 0 == stuck([good], [0, 0], [3, 1], rng)
    assert stuck([bad], [0], [1], rng) == stuck([bad], [0], [5], rng) == 2
    assert stuck([bad], [0, 0], [1, 1], rng) == 0  # the second worker helps
    assert stuck([units(("", "ab"), ("", "ab"), ("a", ""), ("b", ""))], [0, 0], [1, 1], rng) == 4
    assert stuck([units(("a", "")), units(("", "a"))], [0, 1], [1, 1], rng) == 0
    assert stuck([units(("a", "")), units(("", "a"))], [1], [1], rng) == 2  # nobody serves the first queue
    assert stuck([[], units(("", ""))], [0], [1], rng) == 0
    late = [units(("a", ""), ("b", "")), units(("", "a"), ("", "b"))]
    assert stuck(late, [0, 1], [1, 1], rng, {0}) == 0 == stuck(late, [0, 0], [1, 1], rng, {0, 1})
    assert stuck([units(("", "b"), ("", "a"), ("b", ""), ("a", ""))], [0, 0], [1, 1], rng, {0}) == 4


@settings(max_examples=samples(300, 80))
@given(
    forest=forests(tokens=800, tail=1200), grow=st.booleans(),
    strategy=st.sampled_from(list(STRATEGIES)), split=st.sampled_from(list(SPLITS)), group=st.integers(1, 16),
    tiles=st.sampled_from(TILE_SETS), kv_heads=st.integers(1, 4), n_sm=st.sampled_from([1, 5, 20]),
    workers=st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=6), own=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1), fan_in=st.sampled_from([0, 1, 2, 5, 16]), dealt=st.sets(st.integers(0, 4)),
)  # fmt: skip
def test_workers_that_take_units_in_order_finish(
    forest, grow, strategy, split, group, tiles, kv_heads, n_sm, workers, own, seed, fan_in, dealt
):
    """At any speed, with one worker or more; some may start with the last queue, as warps that only run tails do.

    Any queue's units may be dealt out in turn, to those who serve it, and those behind all queues always are.
    """
    plan = plan_of(
        forest, num_qo_heads=group * kv_heads, num_kv_heads=kv_heads, grow=grow, strategy=strategy, split=split,
        tiles=tiles, n_sm=n_sm, min_chunk=16, fan_in=fan_in,
    )  # fmt: skip
    queues = work(plan)
    assert sum(len(unit.wants) for queue in queues for unit in queue) == plan.n_parts * kv_heads
    last = max((index for index, queue in enumerate(queues[:-1]) if queue), default=0)
    starts, hands = [0] + [last * tails for tails, _ in workers], [own] + [hand for _, hand in workers]
    in_turn = dealt | set(range(last + 1, len(queues)))
    assert stuck(queues, starts, hands, np.random.default_rng(seed), in_turn) == 0


def test_some_of_those_plans_would_be_stuck_in_another_order():
    forest = tree_forest((1, 3), (50, 4000))
    queue, behind = work(plan_of(forest, strategy="naive", split="none", tiles=((64, 64),)))
    assert behind == []
    assert stuck([queue], [0, 0], [1, 1], np.random.default_rng(0)) == 0
    assert stuck([queue[::-1]], [0, 0], [1, 1], np.random.default_rng(0)) > 0


def order(plan):
    """[(start, stop, first request, what becomes of its part)] of each item, as they are taken."""
    what = {-1: "only", CLOSES: "closes"}
    return [
        (item[2], item[3], mine[0][0], what.get(mine[0][1], "gives"))
        for item, mine in zip(plan.items.tolist(), members_of(plan), strict=True)
    ]


NAIVE = {"strategy": "naive", "split": "none"}


def test_three_classes_each_longest_first():
    """A cut tail; two tails below a shared range, in another queue; and one request that shares nothing."""
    forest = Forest([-1], [300], [-1, 0, 0, -1], [900, 350, 360, 40], [0, 1000, 2000, 3000])
    plan = plan_of(forest, split="mean", strategy="naive", n_sm=1)
    check_plan(plan, forest)
    assert order(plan) == [
        (0, 150, 1, "gives"), (150, 300, 1, "gives"),
        (300, 360, 2, "closes"), (300, 350, 1, "closes"), (0, 40, 3, "only"),  # wait for nothing in this queue
        (0, 225, 0, "gives"), (225, 450, 0, "gives"), (450, 675, 0, "gives"),
        (675, 900, 0, "closes"),
    ]  # fmt: skip


def test_a_closing_item_waits_for_its_own_queue_where_the_shared_range_runs_in_it():
    """In one tile, what two requests share is waited for in the queue of their tails."""
    forest = Forest([-1], [100], [0, 0, -1], [150, 400, 70], [0, 1000, 2000])
    for tiles, expected in {
        ((16, 16),): [(0, 70, 2, "only"), (0, 100, 0, "gives"), (100, 400, 1, "closes"), (100, 150, 0, "closes")],
        ((8, 16), (16, 16)): [
            (0, 100, 0, "gives"), (100, 400, 1, "closes"), (0, 70, 2, "only"), (100, 150, 0, "closes"),
        ],
    }.items():  # fmt: skip
        plan = plan_of(forest, **NAIVE, tiles=tiles)
        check_plan(plan, forest)
        assert order(plan) == expected


def test_items_without_tokens_are_the_last():
    """They have nothing to do while they wait, whichever queue that is for."""
    forest = Forest([-1, 0], [100, 40], [0, 1, 1, -1], [120, 140, 140, 10], [0, 1000, 2000, 3000])
    plan = plan_of(forest, **NAIVE, grow=False)
    check_plan(plan, forest)
    assert order(plan)[2:] == [
        (100, 120, 0, "closes"), (0, 10, 3, "only"), (140, 140, 1, "closes"), (140, 140, 2, "closes"),
    ]  # fmt: skip
    assert without_tokens(plan).tolist() == [False] * 4 + [True] * 2


def test_a_request_of_many_parts_is_closed_behind_the_queues():
    """Request 1 has two parts, of which the last one's item closes it; request 0 has more than `fan_in`."""
    forest = Forest([], [], [-1, -1], [640, 100], [0, 1000])
    plan = plan_of(forest, fan_in=3, min_chunk=64, tiles=((8, 16), (16, 16)), n_sm=1)
    check_plan(plan, forest)
    behind = plan.queue_begin[-1]
    assert [item for item in order(plan)[:behind] if item[2] == 1] == [(0, 64, 1, "gives"), (64, 100, 1, "closes")]
    assert {item[3] for item in order(plan)[:behind] if item[2] == 0} == {"gives"} and plan.n_parts == 8
    assert order(plan)[behind:] == [(640, 640, 0, "closes")]
    assert plan.items[behind, 8:].tolist() == [0, CLOSES, 0, 7]
    plan = plan_of(forest, fan_in=7, min_chunk=64, tiles=((8, 16), (16, 16)), n_sm=1)
    check_plan(plan, forest)
    assert plan.queue_begin[-1] == plan.n_items and plan.n_parts == 7


def test_an_item_of_a_tile_of_teams_closes_nothing():
    """Four requests that share nothing are few: all in the tile of 64 rows, and closed behind it."""
    forest = tree_forest((4,), (300,))
    plan = plan_of(forest, n_sm=20)
    check_plan(plan, forest)
    assert {plan.tiles[tile][0] for tile in plan.items[: plan.queue_begin[-1], 7].tolist()} == {64}
    assert [item[1:] for item in order(plan)[-4:]] == [(300, request, "closes") for request in range(4)]
    assert plan.queue_begin[-1] == plan.n_items - 4 and plan.n_parts == plan.n_items - 4


def test_an_item_is_waited_for_whoever_its_first_member_is():
    """Request 0 ends with the range that it shares with request 1, which has 30 tokens more."""
    forest = Forest([-1], [50], [0, 0, -1], [50, 80, 10], [0, 1000, 2000])
    plan = plan_of(forest, **NAIVE, grow=False, tiles=((16, 16),))
    check_plan(plan, forest)
    assert order(plan) == [(0, 10, 2, "only"), (0, 50, 0, "only"), (50, 80, 1, "closes")]


def test_before_a_merge_kernel_nobody_waits():
    """Only the length counts."""
    forest = Forest([-1], [50], [0, 0, -1, -1], [150, 130, 90, 70], [0, 1000, 2000, 3000])
    plan = plan_of(forest, **NAIVE, merge="kernel", tiles=((16, 16),))
    check_plan(plan, forest)
    lengths = [stop - start for start, stop, _, _ in order(plan)]
    assert lengths == [100, 90, 80, 70, 50]
