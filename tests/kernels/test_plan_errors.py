"""A user's mistake is one clear line, and leaves the last plan in place."""

import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from plan_checks import HEADS, plan_of

from feather_kernels.build import load_planner
from feather_kernels.errors import BuildError, PlanError
from feather_kernels.forest import Forest
from feather_kernels.options import UNLIMITED, PlannerOptions, check_interface
from feather_kernels.plan import Planner, make_plan
from feather_kernels.tiles import TILES
from feather_kernels.trees import tree_forest

NAIVE = {"strategy": "naive"}
FOREST = tree_forest((1, 8), (400, 100))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "best"}, "strategy is 'best': use one of query, relay, two-phase, naive, compute, profit, opt"),
        ({"split": "even"}, "split is 'even': use one of none, mean, balanced, rounds, groups"),
        ({"merge": "none"}, "merge is 'none': use one of fused, kernel"),
        ({"fan_in": -1}, r"fan_in is -1: give a number from 0 \(no limit\)"),
        ({"group_capacity": 0}, "group_capacity is 0: give a number from 1 to"),
        ({"head_pack": 3}, "head_pack is 3: give 1, 2 or None"),
        ({"head_pack": 2, "num_qo_heads": 10}, "head_pack is 2, with groups of 5, .* a tile of 8 rows that holds two"),
        ({"head_pack": 2, "num_qo_heads": 3, "num_kv_heads": 3}, "with groups of 1, 3 KV heads .*an even number"),
        ({"head_pack": 2, "tiles": ((16, 16),)}, "and 16 rows to a tail: it needs a tile of 8 rows"),
        ({"num_qo_heads": 9}, "num_qo_heads 9 is no multiple of num_kv_heads 2"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"head_dim": -64}, "head_dim is -64"),
        ({"tiles": ()}, "give 1 to 15 pairs"),
        ({"tiles": ((32, 16), (16, 16))}, "of ascending m"),
        ({"tiles": ((8, 2**33),)}, "of ascending m, up to 1048576"),
        ({"tiles": ((8, 16), (2**33, 16))}, "of ascending m, up to 1048576"),
        ({"tiles": ((2, 16),)}, "group of 4 query heads has more rows than the largest tile, 2"),
        ({"alpha": (1.0,)}, "alpha is .*: give a finite number above 0 for each of the 4 tiles"),
        ({"alpha": (1.0, 0, 1, 1)}, "give a finite number above 0"),
        ({"alpha": (math.nan,) * 4}, "give a finite number above 0"),
        ({"alpha": (1, 1, 1, math.inf)}, "give a finite number above 0"),
        ({"min_chunk": 0}, "min_chunk is 0"),
        ({"n_sm": 0}, "n_sm is 0"),
        ({"n_sm": 5000}, "n_sm is 5000: a GPU has no more than 4096"),
        ({"profit_factor": 0}, "profit_factor above 0, and both are finite"),
        ({"profit_factor": math.nan}, "profit_factor above 0, and both are finite"),
        ({"compute_split_cost": -1}, "compute_split_cost is at least 0"),
        ({"compute_split_cost": math.nan}, "compute_split_cost is at least 0"),
        ({"item_overhead": -1}, "item_overhead is -1: give a number from 0 to"),
        ({"item_overhead": 2**63}, "item_overhead is 9223372036854775808: give a number from 0 to"),
        ({"max_parts": -1}, "max_parts is -1: give a number from 0 to"),
        ({"max_parts": 2**63}, "max_parts is 9223372036854775808: give a number from 0 to"),
        ({"max_requests": 7}, "a batch of 8 requests exceeds the planner's 7: raise max_requests"),
        ({"max_parts": 7, **NAIVE}, "a plan of 9 items, 16 members and 8 partial rows exceeds .*raise max_items, "),
        ({"max_parts": 15, "merge": "kernel", **NAIVE}, "a plan of 9 items, 16 members and 16 partial rows exceeds"),
        ({"max_items": 8, **NAIVE}, "exceeds the planner's 8, "),
        ({"max_members": 15, **NAIVE}, "exceeds the planner's .*, 15 and"),
        ({"max_items": 7}, "a plan of 8 items, 8 members and 0 partial rows exceeds"),  # nothing shared: no fewer
        ({"max_items": 0}, "max_items is 0"),
        ({"max_members": 2**31 - 1}, "needs a buffer of 4294.* entries: lower max_requests, max_items or max_members"),
        ({"buffer": np.zeros(10, np.int32)}, "buffer has 10 entries: this capacity needs"),
        ({"buffer": np.zeros(10_000)}, "buffer is no writable contiguous int32 vector"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(PlanError, match=message) as error:
        plan_of(FOREST, **arguments)
    assert "\n" not in str(error.value)


def test_a_failed_plan_leaves_the_last_one():
    planner = Planner(**HEADS, max_requests=8)
    plan = planner.plan(FOREST)
    before = plan.buffer.copy()
    with pytest.raises(PlanError, match="request 0 has 1 tokens"):
        planner.plan(Forest([-1], [5], [0], [1], [0]))
    assert (plan.buffer == before).all() and plan.valid_for(FOREST)[0]


@pytest.mark.parametrize("strategy", ["optimal", "time"])
def test_a_table_beyond_memory_is_refused(strategy):
    n = 9000
    chain = Forest(np.arange(-1, n - 1), np.ones(n, int), np.arange(n), np.arange(n) + 1, np.zeros(n, int))
    with pytest.raises(PlanError, match=rf"strategy {strategy} needs .* states"):
        plan_of(chain, strategy=strategy)


@pytest.mark.parametrize("strategy", ["naive", "two-phase"])
def test_packs_of_more_members_than_the_planner_can_number_are_refused(strategy):
    n = 70_000
    chain = Forest(np.arange(-1, n - 1), np.ones(n, int), np.arange(n), np.arange(n) + 1, np.zeros(n, int))
    members = sum(range(2, n + 1)) + n  # the last node has one request: no pack
    with pytest.raises(PlanError, match=f"packs of up to {members} members are too many: use another strategy"):
        plan_of(chain, strategy=strategy)


def test_a_buffer_of_ones_own():
    size = Planner(**HEADS, max_requests=8).buffer_size
    buffer = np.zeros(size + 5, np.int32)
    plan = make_plan(FOREST, **HEADS, max_requests=8, buffer=buffer)
    assert np.shares_memory(plan.buffer, buffer) and len(plan.buffer) == size
    assert plan.items.tolist() == plan_of(FOREST).items.tolist()


def test_a_library_with_other_fields_is_refused_in_one_line():
    library = load_planner().interface()
    check_interface(library)
    for there, other in (("fan_in:i144", "fan_out:i144"), ("alpha:f", "alpha:i"), ("naive compute", "compute naive")):
        with pytest.raises(BuildError) as error:
            check_interface(library.replace(there, other))
        assert "where feather_kernels.options has" in str(error.value) and "\n" not in str(error.value)


def test_options_are_settled_once_and_stay():
    options = PlannerOptions(**HEADS, max_requests=9)
    assert replace(options) == options and options.max_parts == UNLIMITED and options.tiles == TILES["hopper"]
    with pytest.raises(FrozenInstanceError):
        options.fan_in = 0
    with pytest.raises(PlanError, match="fan_in is -1"):
        replace(options, fan_in=-1)
