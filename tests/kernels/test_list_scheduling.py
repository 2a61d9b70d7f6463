"""List scheduling by the queues' order, where each free processor takes the next unit, against the optimum."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import plan_of, without_tokens

from effort import samples
from feather_kernels.trees import tree_forest
from oracles.makespan import bound, dealt, least_makespan, listed, paper_groups

LENGTHS = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 5000)), min_size=1, max_size=10)


def in_queue(lengths, **arguments):
    """Tokens of the plan's items in the order of its only queue, of requests that share nothing."""
    forest = tree_forest((len(lengths),), (max(lengths),)).with_seq_len(lengths)
    plan = plan_of(forest, num_qo_heads=1, num_kv_heads=1, tiles=((64, 16),), fan_in=0, **arguments)
    items = plan.items[~without_tokens(plan)]
    return (items[:, 3] - items[:, 2]).tolist()


def test_the_oracle_knows_cases_done_by_hand():
    tight = [5, 5, 4, 4, 3, 3, 3]
    assert least_makespan(tight, 3) == 9 and max(listed(tight, 3)) == 11 == pytest.approx(9 * bound(3))
    assert least_makespan([7], 4) == 7 and least_makespan([], 4) == 0
    assert least_makespan([4, 3, 3, 2, 2, 2], 2) == 8
    assert dealt([5, 3, 2], 2) == [7, 3] and listed([5, 3, 2], 2) == [5, 5]
    assert paper_groups([6, 5, 4, 3], 10) == [[6, 3], [5, 4]]
    assert paper_groups([6, 6, 6], 10) == [[6], [6], [6]]  # two groups would do by their sum
    assert paper_groups([15, 5], 10) == [[5], [], [15]]  # too long for any group


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_the_least_makespan_is_that_of_all_assignments(lengths):
    of_all = (
        max(sum(length for length, at in zip(lengths, places, strict=True) if at == one) for one in range(3))
        for places in product(range(3), repeat=len(lengths))
    )
    assert least_makespan(lengths, 3) == min(of_all)


@settings(max_examples=samples(300, 100))
@given(lengths=LENGTHS, processors=st.integers(1, 4))
def test_whole_units_of_a_queue_are_within_grahams_bound_of_the_best(lengths, processors):
    units = in_queue(lengths, split="none")
    assert sorted(units) == sorted(lengths)
    assert max(listed(units, processors)) <= bound(processors) * least_makespan(lengths, processors) + 1e-9


@settings(max_examples=samples(300, 100))
@given(lengths=LENGTHS, capacity=st.integers(1, 20_000))
def test_a_queue_makes_the_papers_groups_where_all_are_feasible(lengths, capacity):
    """Loads are the same; where a group has no room, the paper makes one more, and a processor just takes longer."""
    groups = paper_groups(lengths, capacity)
    wanted = -(-sum(lengths) // capacity)
    loads = listed(in_queue(lengths, split="none"), wanted)
    if len(groups) == wanted:
        assert sorted(loads) == sorted(map(sum, groups))
    else:
        assert max(loads) > capacity


@settings(max_examples=samples(300, 100))
@given(lengths=LENGTHS, capacity=st.integers(200, 8000), processors=st.integers(1, 4))
def test_a_groups_capacity_bounds_what_processors_differ_by(lengths, capacity, processors):
    """No more than a chunk, which a tile of 64 rows has no longer than half a group's capacity, or its least."""
    units = in_queue(lengths, split="groups", group_capacity=capacity, n_sm=processors)
    longest = max(capacity // 2, 8 * 16) + 16
    assert sum(units) == sum(lengths) and max(units) <= longest
    loads = listed(units, processors)
    assert max(loads) - min(loads) <= longest


@pytest.mark.parametrize("capacity", [1024, 4096])
def test_a_batch_smaller_than_its_groups_leaves_processors_idle(capacity):
    """What a capacity that minds the GPU only costs: as many chunks as the tokens make, however many could run."""
    units = in_queue([4096], split="groups", group_capacity=capacity, n_sm=132)
    assert len(units) == 4096 // (capacity // 2)
    assert len(in_queue([4096], split="balanced", n_sm=132)) > len(units)
