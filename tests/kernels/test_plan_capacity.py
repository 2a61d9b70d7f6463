"""The wrapper's memory for partial results: enough for batches as they come, and deeper ones are packed less."""

import numpy as np
import pytest
from plan_checks import HEADS, check_plan, plan_of

from feather_kernels.forest import Forest
from feather_kernels.plan import Planner, default_parts, make_plan
from feather_kernels.trees import PAT_TREES, parse_tree, random_forest, tree_forest

LAYERS = [(32, 8), (64, 8), (32, 32), (128, 8), (16, 2), (8, 1), (4, 1)]


def served(rng, requests, groups, levels):
    """Groups of requests with a prefix each, which branches at every level; long and short tails."""
    nodes = [groups]
    for _ in range(levels - 1):
        nodes.append(min(requests, nodes[-1] * int(rng.integers(2, 9))))
    most = int(rng.choice([500, 2000, 8000]))
    forest = tree_forest([*nodes, requests], [*rng.integers(most // 4, most + 1, levels).tolist(), 1])
    return forest.with_seq_len(forest.shared_length + rng.integers(1, 1000, requests))


def batches():
    rng = np.random.default_rng(0)
    yield from (tree_forest(*parse_tree(name)) for name in PAT_TREES)
    yield tree_forest((10, 40, 80, 320, 960, 2048), (8000,) * 5 + (300,))  # five parts each at 64/8
    for _ in range(30):
        tokens, tail = int(rng.choice([64, 400, 2000, 8000])), int(rng.choice([64, 600, 3000]))
        yield random_forest(rng, int(rng.integers(2, 2049)), max_node_tokens=tokens, max_tail_tokens=tail)
    for requests in (500, 1000, 2048):
        for groups in (1, 2, 10, 50):
            yield from (served(rng, requests, groups, levels) for levels in range(1, 6))


@pytest.mark.parametrize("heads", LAYERS, ids=str)
def test_the_default_is_enough_for_batches_as_they_come(heads):
    for forest in batches():
        requests = forest.n_requests
        planner = Planner(*heads, 128, max_requests=requests, max_parts=default_parts(requests, heads[0]))
        assert not planner.plan(forest).widened
    assert default_parts(2048, 32) * 32 * 128 * 4 < 210e6  # bytes


def chain(depth, requests, tokens):
    """As many requests leave a long prefix after each of its nodes."""
    node = np.repeat(np.arange(depth), requests)
    rows = np.arange(depth * requests) * (depth * tokens + 100)
    return Forest(np.arange(depth) - 1, np.full(depth, tokens), node, (node + 1) * tokens + 100, rows)


@pytest.mark.parametrize(("depth", "requests", "tokens"), [(64, 32, 1024), (32, 64, 2048), (16, 128, 512)])
def test_a_batch_of_many_levels_is_packed_less(depth, requests, tokens):
    forest, count = chain(depth, requests, tokens), depth * requests
    planner = Planner(32, 8, 128, max_requests=count, max_parts=default_parts(count, 32))
    plan = planner.plan(forest)
    assert plan.widened and plan.n_parts <= planner.options.max_parts
    assert plan.tokens_read < 2 * plan_of(forest, num_qo_heads=32, num_kv_heads=8, head_dim=128).tokens_read
    assert not planner.plan(tree_forest((1, 8), (400, 100))).widened  # parts have their price again


def test_what_is_packed_less_is_complete():
    forest = chain(12, 3, 300)
    free = plan_of(forest, split="none")
    plan = Planner(**HEADS, max_requests=36, split="none", max_parts=40).plan(forest)
    assert not free.widened and free.n_parts > 40 >= plan.n_parts > 0 and plan.widened
    check_plan(plan, forest)


def test_a_single_plan_is_packed_less_too():
    forest, capacity = chain(12, 3, 300), {"split": "none", "max_parts": 40}
    plan = make_plan(forest, **HEADS, **capacity)
    planned = Planner(**HEADS, max_requests=36, **capacity).plan(forest)
    assert plan.widened and plan.stats == planned.stats and plan.items.tolist() == planned.items.tolist()


def test_no_request_is_closed_apart_where_its_last_part_has_no_room():
    forest, arguments = chain(12, 3, 300), {"split": "none", "strategy": "naive"}
    plain = plan_of(forest, **arguments, fan_in=0)
    apart = plan_of(forest, **arguments, fan_in=2)
    planner = Planner(**HEADS, max_requests=36, **arguments, fan_in=2, max_parts=apart.n_parts - 1)
    plan = planner.plan(forest)
    assert apart.n_parts > plain.n_parts == plan.n_parts and not plan.widened
    assert plan.items.tolist() == plain.items.tolist()
    small = tree_forest((1, 3), (300, 40))  # there is room again
    assert planner.plan(small).items.tolist() == plan_of(small, **arguments, fan_in=2).items.tolist()
