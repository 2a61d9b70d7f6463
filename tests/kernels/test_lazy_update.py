"""How long a plan stays valid, by its own statement."""

import numpy as np
import pytest
from plan_checks import HEADS, plan_of

from feather_kernels.forest import Forest
from feather_kernels.plan import Planner
from feather_kernels.trees import tree_forest

FOREST = tree_forest((1, 8), (400, 100))


def grown(by, request=3):
    seq_len = FOREST.seq_len.copy()
    seq_len[request] += by
    return FOREST.with_seq_len(seq_len)


@pytest.mark.parametrize("by", [0, 1, 100])
def test_valid_while_tails_grow(by):
    plan = plan_of(FOREST, fan_in=0)  # whole tails
    assert plan.valid_for(grown(by)) == (True, "")
    assert plan.valid_for(grown(by).seq_len) == (True, "")


def test_invalid_when_a_tail_has_outgrown_its_item():
    assert plan_of(FOREST).valid_for(grown(101)) == (
        False, "request 3 has outgrown its item: 500 tokens when planned, 601 now"
    )  # fmt: skip


def test_a_short_item_may_grow_by_sixty_four_tokens():
    forest = tree_forest((1, 4), (400, 5))
    plan = plan_of(forest)
    assert plan.valid_for(forest.seq_len + 64)[0] and not plan.valid_for(forest.seq_len + 65)[0]


def test_a_long_item_may_double():
    forest = tree_forest((4,), (3000,))
    plan = plan_of(forest, split="none")
    assert plan.valid_for(forest.seq_len + 3000)[0] and not plan.valid_for(forest.seq_len + 3001)[0]


def test_invalid_when_a_sequence_has_shrunk():
    assert plan_of(FOREST).valid_for(grown(-1)) == (False, "request 3 has shrunk: 500 tokens when planned, 499 now")


@pytest.mark.parametrize(
    ("name", "value"),
    [("row_offset", FOREST.row_offset + 1), ("length", FOREST.length - 1), ("parent", [-1, 0]),
     ("request_node", np.append(np.zeros(7, int), -1))],
)  # fmt: skip
def test_invalid_when_the_forest_has_changed(name, value):
    arrays = {key: getattr(FOREST, key) for key in ("parent", "length", "request_node", "seq_len", "row_offset")}
    arrays[name] = value
    if name == "parent":
        arrays["length"] = [400, 50]
    assert plan_of(FOREST).valid_for(Forest(**arrays)) == (False, f"the forest's {name} has changed")


def test_equal_arrays_are_no_change():
    copy = tree_forest((1, 8), (400, 100))
    assert plan_of(FOREST).valid_for(copy) == (True, "")


def test_invalid_for_another_number_of_requests():
    assert plan_of(FOREST).valid_for(np.full(7, 500)) == (False, "the batch has 7 requests, the plan 8")


def test_without_growth_any_change_is_too_much():
    plan = plan_of(FOREST, grow=False)
    assert plan.valid_for(FOREST) == (True, "")
    assert plan.valid_for(grown(1)) == (False, "a sequence length has changed and the plan was made with grow=False")


def test_invalid_once_the_planner_has_planned_again():
    planner = Planner(**HEADS, max_requests=8)
    first = planner.plan(FOREST)
    planner.plan(FOREST)
    assert first.valid_for(FOREST) == (False, "the planner's buffer holds a newer plan")
