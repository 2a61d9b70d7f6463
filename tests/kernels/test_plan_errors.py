"""A user's mistake is one clear line, and leaves the last plan in place."""

import math
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from plan_checks import HEADS, plan_of

from feather_kernels.build import load_planner
from feather_kernels.errors import BuildError, PlanError
from feather_kernels.forest import Forest
from feather_kernels.options import UNLIMITED, PlannerOptions, check_interface
from feather_kernels.pack import STRATEGIES
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
        ({"alpha": (2.0**-57,) * 4}, "give a finite number above 0 .*no more than 65536"),  # a product wrapped to 0
        ({"alpha": (5e-324,) * 4}, "give a finite number above 0"),
        ({"alpha": "abcd"}, "alpha is 'abcd': give a finite number"),
        ({"alpha": 1.0}, "alpha is 1.0: give a finite number"),
        ({"alpha": ("1",) * 4}, "give a finite number above 0"),
        ({"num_kv_heads": 2.0}, "num_kv_heads is 2.0: give a number from 1"),
        ({"num_qo_heads": "8"}, "num_qo_heads is '8': give a number from 1"),
        ({"head_dim": 64.5}, "head_dim is 64.5: give a number from 1"),
        ({"max_requests": "8"}, "max_requests is '8'"),
        ({"max_requests": True}, "max_requests is True"),
        ({"max_items": 100.5}, "max_items is 100.5"),
        ({"max_parts": 1.5}, "max_parts is 1.5"),
        ({"fan_in": 1.5}, "fan_in is 1.5"),
        ({"fan_in": None}, "fan_in is None"),
        ({"item_overhead": [1]}, r"item_overhead is \[1\]"),
        ({"kv_value_bytes": 1.0}, "kv_value_bytes is 1.0: give 2 or 1"),
        ({"head_pack": 1.0}, "head_pack is 1.0: give 1, 2 or None"),
        ({"head_pack": [1]}, "give 1, 2 or None"),
        ({"profit_factor": "4"}, "profit_factor '4'"),
        ({"compute_split_cost": None}, "compute_split_cost is None"),
        ({"grow": "no"}, "grow is 'no': give True or False"),
        ({"causal_tails": None, "grow": False}, "causal_tails is None: give True or False"),
        ({"strategy": ["time"]}, r"strategy is \['time'\]: use one of"),
        ({"tiles": 3}, "tiles are 3: give 1 to 15 pairs"),
        ({"tiles": ((16, 16.5),)}, "give 1 to 15 pairs .* of integers"),
        ({"tiles": ((16,),)}, "give 1 to 15 pairs"),
        ({"costs": 5.0}, "costs is 5.0: give UnitCosts"),
        ({"buffer": [0] * 10_000}, "buffer is no writable contiguous int32 vector"),
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


@pytest.mark.parametrize("forest", [None, 3, [[0], [1]], {"parent": []}])
def test_what_is_no_forest(forest):
    with pytest.raises(PlanError, match=r"forest is .*: give a Forest"):
        Planner(**HEADS, max_requests=8).plan(forest)
    with pytest.raises(PlanError, match=r"forest is .*: give a Forest"):
        make_plan(forest, **HEADS)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_every_allowed_share_of_a_processor_is_planned_with(strategy):
    for alpha in (2.0**-16, 2.0**-9, 1.0, 1e300):
        assert plan_of(FOREST, strategy=strategy, alpha=(alpha,) * 4).n_requests == 8


def test_more_bytes_than_are_counted_are_refused():
    forest = Forest([], [], [-1] * 3, [2**31 - 1] * 3, [0] * 3)
    with pytest.raises(PlanError, match="more than is counted"):
        make_plan(forest, num_qo_heads=2**20, num_kv_heads=2**20, head_dim=2**20)


CHAIN = """
import resource, sys
import numpy as np
from feather_kernels import Forest, PlanError, Planner, make_plan
def chain(n):
    return Forest(np.arange(-1, n - 1), np.ones(n, int), np.append(np.arange(n), n - 1), np.append(np.arange(n) + 1, n),
                  np.zeros(n + 1, int))
HEADS = dict(num_qo_heads=8, num_kv_heads=2, head_dim=64)
def megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
make_plan(chain(9), **HEADS)
before = megabytes()
"""


def told_by(program):
    ran = subprocess.run([sys.executable, "-c", CHAIN + program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split("\n")


def test_a_chain_of_shared_nodes_takes_little_memory():
    """Sixteen million states: with tables of all that is known of each they would be 530 MB."""
    more, *_ = told_by("Planner(**HEADS, max_requests=8192).plan(chain(5600)); print(megabytes() - before)")
    assert float(more) < 100


def test_members_beyond_the_capacity_are_refused_before_they_are_listed():
    said, more, *_ = told_by(
        "try: Planner(**HEADS, max_requests=20_001, strategy='naive').plan(chain(20_000))\n"
        "except PlanError as error: print(error)\n"
        "print(megabytes() - before)"
    )
    assert "members exceeds the planner's" in said and "raise max_members" in said
    assert float(more) < 100  # they would be 800 MB


def test_a_batch_beyond_memory_is_one_line_and_the_next_one_is_planned():
    said, planned, *_ = told_by(
        "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + (300 << 20),) * 2)\n"
        "try: make_plan(chain(20_000), **HEADS, strategy='naive')\n"
        "except PlanError as error: print(error)\n"
        "print(make_plan(chain(9), **HEADS).n_requests)"
    )
    assert said.startswith("memory does not suffice") and planned == "10"


def test_a_failed_plan_leaves_the_last_one():
    planner = Planner(**HEADS, max_requests=8)
    plan = planner.plan(FOREST)
    before = plan.buffer.copy()
    with pytest.raises(PlanError, match="request 0 has 1 tokens"):
        planner.plan(Forest([-1], [5], [0], [1], [0]))
    assert (plan.buffer == before).all() and plan.valid_for(FOREST)[0]


@pytest.mark.parametrize("strategy", ["optimal", "time"])
def test_a_table_beyond_memory_is_refused(strategy):
    n = 70_000
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
    for there, other in (("fan_in:i152", "fan_out:i152"), ("alpha:f", "alpha:i"), ("naive compute", "compute naive")):
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
