"""The packs of each strategy, against the definitions in ``oracles.packing``."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_checks import GROUP, HEADS, ONE_TILE, forests, packs_in, plan_of, without_tokens

from effort import samples
from feather_kernels.forest import Forest
from feather_kernels.pack import MERGES, STRATEGIES
from feather_kernels.trees import PAT_TREES, parse_tree, tree_forest
from oracles.packing import Node, algorithm_1, cheapest, packs_of, prefix_forest, traffic

DIM = HEADS["head_dim"]
merges_of_parts = st.sampled_from(list(MERGES))


def assert_same(packs, plan):
    assert len(packs) == len(set(packs)) and packs_in(plan) == set(packs)
    kv, partial = traffic(packs, DIM, GROUP, plan.options.merge)
    assert plan.traffic == plan.scheduled_traffic == (kv * HEADS["num_kv_heads"], partial * HEADS["num_kv_heads"])


@settings(max_examples=samples(600, 200))
@given(forest=forests(), grow=st.booleans(), factor=st.sampled_from([None, 4, 0.5, 100]), merge=merges_of_parts)
def test_profit_is_algorithm_1(forest, grow, factor, merge):
    plan = plan_of(forest, strategy="profit", grow=grow, profit_factor=factor, merge=merge, **ONE_TILE)
    assert_same(algorithm_1(forest, DIM, GROUP, grow, factor, merge), plan)


@settings(max_examples=samples(300, 100))
@given(forest=forests(), grow=st.booleans(), merge=merges_of_parts)
def test_fixed_strategies(forest, grow, merge):
    rules = {
        "query": lambda node, child, start: True,
        "naive": lambda node, child, start: False,
        "relay": lambda node, child, start: node.begin > 0,
    }
    for strategy, merges in rules.items():
        plan = plan_of(forest, strategy=strategy, grow=grow, merge=merge, **ONE_TILE)
        assert_same(packs_of(forest, merges, grow), plan)


@settings(max_examples=samples(300, 100))
@given(forest=forests(), grow=st.booleans(), merge=merges_of_parts)
def test_compute_is_fasttrees_algorithm_1(forest, grow, merge):
    """Padding and split costs by hand, for tiles (16, 8) and (32, 16)."""
    tiles, lengths, split_cost = ((16, 8), (32, 16)), forest.seq_len.tolist(), 20.0

    def padding(requests, length):
        rows = requests * GROUP
        m, n = next((tile for tile in tiles if tile[0] >= rows), tiles[-1])
        return -(-rows // m) * m * (-(-length // n) * n) - rows * length

    left = {}

    def merges(node, child, start):
        count = left.setdefault(node, len(node.requests))
        shared = isinstance(child, Node)
        size = len(child.requests) if shared else 1
        carried, length = node.end - start, child.end - child.begin if shared else lengths[child] - node.end
        if not shared and not length and not grow:
            return False
        split_kv = padding(count, carried) + padding(size, length) + split_cost * size * GROUP
        split_q = padding(count - size, carried) + padding(size, carried + length)
        if split_kv >= split_q:
            left[node] -= size
        return split_kv >= split_q

    # Packs are cut into row tiles here, so their traffic is compared, not the items.
    options = {"tiles": tiles, "split": "none", "compute_split_cost": split_cost}
    plan = plan_of(forest, strategy="compute", grow=grow, merge=merge, **options)
    kv, partial = traffic(packs_of(forest, merges, grow), DIM, GROUP, merge)
    assert plan.traffic == (kv * HEADS["num_kv_heads"], partial * HEADS["num_kv_heads"])


@settings(max_examples=samples(400, 150))
@given(forest=forests(), grow=st.booleans(), merge=merges_of_parts)
def test_optimal_below_profit_below_naive(forest, grow, merge):
    total = {name: plan_of(forest, strategy=name, grow=grow, merge=merge).traffic.total for name in STRATEGIES}
    assert total["optimal"] <= total["profit"] <= total["naive"] <= total["two-phase"]
    assert total["optimal"] == min(total.values())


@settings(max_examples=samples(300, 100))
@given(
    forest=forests(most=7, tokens=24, tail=8), grow=st.booleans(), overhead=st.sampled_from([0, 1000, 20_000]),
    merge=merges_of_parts,
)  # fmt: skip
def test_optimal_is_the_exhaustive_optimum(forest, grow, overhead, merge):
    assume(sum(len(node.edges()) for node in prefix_forest(forest)[1]) <= 9)
    plan = plan_of(forest, strategy="optimal", grow=grow, item_overhead=overhead, merge=merge, **ONE_TILE)
    per_head = plan.traffic.total // HEADS["num_kv_heads"]
    packs = int((~without_tokens(plan)).sum())
    assert per_head + overhead * packs == cheapest(forest, DIM, GROUP, grow, overhead, merge)


def chain_optimum(lengths, part, overhead, merge):
    """Bytes of the best packs of a chain, one request of which ends at each node and two at the last, without tails."""
    n, begin, token = len(lengths), np.cumsum([0, *lengths]), 2 * DIM * 2
    least = np.zeros(n + 1, int)  # of all below a node, by where the range starts that is carried there
    for node in reversed(range(n)):
        carried, leaves = begin[node + 1] - begin[: node + 1], 1 if node < n - 1 else 2
        within, apart = least[: node + 1], least[node + 1] + (n - node if node < n - 1 else 0) * part
        tail = token * carried + (part * (begin[: node + 1] > 0) if merge == "kernel" else 0)
        split = part if merge == "fused" else 2 * part
        packed = token * carried + overhead + np.minimum(within, apart) + leaves * np.minimum(tail, split)
        least = np.minimum(within + leaves * tail, packed)
    return int(least[0])


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("overhead", [0, 100_000_000, 1_000_000_000])
def test_optimal_is_the_optimum_of_a_deep_chain(overhead, merge):
    """Of more levels than are looked at first; nothing is packed at the highest price of a pack, and much at none."""
    n, rng = 1500, np.random.default_rng(0)
    lengths, node = rng.integers(1, 4, n), [*range(n), n - 1]
    forest = Forest(np.arange(-1, n - 1), lengths, node, np.cumsum(lengths)[node] + 5, np.arange(n + 1) * 10_000)
    plan = plan_of(forest, strategy="optimal", item_overhead=overhead, merge=merge, fan_in=0, **ONE_TILE)
    packs = int((~without_tokens(plan)).sum()) - (n + 1)
    bytes_moved = plan.traffic.total // HEADS["num_kv_heads"] - (n + 1) * 5 * 2 * DIM * 2
    part = GROUP * (DIM + 4) * 2 * 2
    assert bytes_moved + overhead * packs == chain_optimum(lengths, part, overhead, merge)
    assert (packs > 20) if overhead == 0 else (packs > 0) == (overhead < 1_000_000_000)


@pytest.mark.parametrize("name", PAT_TREES)
def test_pat_trees_in_order_of_traffic(name):
    forest = tree_forest(*parse_tree(name))
    naive, profit, optimal = (plan_of(forest, strategy=s).traffic.total for s in ("naive", "profit", "optimal"))
    assert optimal <= profit <= naive


@pytest.mark.parametrize(("merge", "longest"), [("fused", 4), ("kernel", 8)])
def test_a_tail_takes_a_range_that_weighs_no_more_than_its_parts(merge, longest):
    """A token of 4 * 64 bytes, a part of 2 * 4 * (2 * 64 + 8): one is saved, or two if even a lone part is written."""
    for tokens in range(1, 20):
        plan = plan_of(tree_forest((1, 2), (tokens, 5)), strategy="profit", merge=merge, **ONE_TILE)
        assert (plan.n_parts == 0) == (tokens <= longest)


def test_profit_minds_the_group_size():
    forest = tree_forest((1, 4, 64), (100, 500, 500))  # 16 requests below each middle node
    plans = [plan_of(forest, strategy="profit", num_qo_heads=2 * group, **ONE_TILE) for group in (4, 8)]
    assert [plan.items[:, 2].tolist().count(0) for plan in plans] == [1, 4]  # 4 * 16 * 68/64 < 100 <= 8 * 16 * 68/64
