"""Planning a step: the lengths of its rows, when a plan is kept, and the buffers that a CUDA graph reads."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from feather_sglang.adapter.attention.engines import PackedLayers
from feather_sglang.adapter.attention.lengths import FILL, Lengths
from feather_sglang.adapter.attention.limits import LayerFacts
from feather_sglang.adapter.attention.rows import CHUNK, RowSharing
from feather_sglang.adapter.attention.step_planner import Step, StepPlanner

LAYER = LayerFacts(0, 4, 2, 16, 16, 0.25, reference=True)
PACKED = PackedLayers((LAYER,), torch.float32, torch.float32, "cpu", reference=True)
SHARED = 2 * CHUNK


@pytest.fixture
def planner():
    """Of a table whose rows 1 and 2 begin with the same slots, as the prefix cache held them."""
    table = torch.arange(4 * 200, dtype=torch.int32).view(4, 200)
    table[2, :SHARED] = table[1, :SHARED]
    sharing = RowSharing(table, np.ones(4), settled_at=2)
    sharing.prefill(np.array([1, 2]), np.array([SHARED, SHARED]))
    return StepPlanner(PACKED, table, sharing, max_requests=4, query_rows=3)


def step(*lens, rows=(1, 2), graph=False):
    counted = np.array(lens, np.int32)
    places = torch.tensor([*rows, *[0] * (len(lens) - len(rows))])
    on_device = (places, torch.from_numpy(counted)) if graph else None
    return Step([f"r{row}" for row in rows], np.array(rows), counted, on_device)


def test_rows_see_what_is_committed_and_the_drafts_before_them():
    committed = np.array([5, 9], np.int32)
    assert Lengths(drafts=3).seen(committed).tolist() == [6, 7, 8, 10, 11, 12]
    assert Lengths(own=1, ahead=4).seen(committed).tolist() == [5, 9]


@pytest.mark.parametrize(
    ("lengths", "more", "seen"),
    [
        (Lengths(), 0, [70, 80]),
        (Lengths(own=1, ahead=4), 2, [73, 83]),
        (Lengths(drafts=3), 0, [71, 72, 73, 81, 82, 83]),
    ],
)
def test_lengths_go_to_where_the_kernel_reads_them(planner, lengths, more, seen):
    planner.set_lens(torch.tensor([70, 80]), lengths, more)
    assert planner.lens.tolist() == seen + [FILL] * (12 - len(seen))


def test_a_plan_is_kept_while_the_same_requests_grow(planner):
    planner.plan(step(70, 80), Lengths())
    plan = planner.in_force
    assert plan.forest.seq_len.tolist() == [70, 80] and plan.forest.shared_length.tolist() == [SHARED] * 2
    planner.plan(step(71, 81), Lengths())
    assert planner.in_force is plan
    planner.plan(step(72, rows=(1,)), Lengths())
    assert planner.in_force.n_requests == 1


def test_a_plan_of_drafts_is_kept_while_few_tokens_are_committed_under_it(planner):
    lengths = Lengths(drafts=3, tail=2)
    planner.plan(step(70, 80), lengths)
    plan = planner.in_force
    assert plan.n_requests == 6 and plan.forest.seq_len.tolist() == [71, 72, 73, 81, 82, 83]
    planner.plan(step(72, 81), lengths)
    assert planner.in_force is plan
    planner.plan(step(73, 82), lengths)
    assert planner.in_force is not plan


def test_a_graph_reads_a_copy_of_its_rows_and_pads_them(planner):
    planner.make_room(4)
    planner.plan(step(70, 80, FILL, FILL, graph=True), Lengths())
    assert planner.in_force.row_offset.tolist() == [0, 200, 400, 600] and planner.in_force.n_requests == 4
    planner.plan(step(71, 81), Lengths())  # without a graph
    assert planner.in_force.row_offset.tolist() == [200, 400]


def test_a_dummy_batch_shares_nothing(planner):
    planner.plan(step(70, 80)._replace(requests=None), Lengths())
    assert planner.in_force.forest.n_nodes == 0
    with pytest.raises(RuntimeError, match="a batch of 5 rows, the backend was built for 4"):
        planner.plan(step(*[9] * 5), Lengths())
