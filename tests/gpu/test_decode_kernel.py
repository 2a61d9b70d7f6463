"""The decode kernel on a GPU: fewer of the cases of ``check_decode_kernel.py``, which is the full pass."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import check_decode_kernel as check
import random_batches
import torch

from feather_kernels import PackedDecodeWrapper
from feather_kernels.trees import forest_table, tree_forest

GPU = torch.cuda.is_available()
HOPPER = GPU and torch.cuda.get_device_capability()[0] >= 9
pytestmark = pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU: torch sees none")


@pytest.mark.parametrize("seed", range(10_000, 10_064))
def test_a_random_forest(seed):
    outcome = check.check_forest(random_batches.draw(seed, HOPPER), PackedDecodeWrapper, "cuda")
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"


@pytest.mark.parametrize("seed", range(check.SMALL_CASES))
def test_a_tiny_batch(seed):
    outcome = check.check_forest(random_batches.small(seed, HOPPER), PackedDecodeWrapper, "cuda")
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"


@pytest.mark.parametrize("seed", range(10_000, 10_004))
def test_a_graph_is_replayed_for_another_batch(seed):
    outcome = check.check_capture(random_batches.draw(seed, HOPPER), PackedDecodeWrapper, "cuda")
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"


def test_bad_input_is_one_clear_error_and_writes_nothing():
    assert check.check_bad_input(PackedDecodeWrapper, "cuda") == []


@pytest.mark.parametrize("merge", ["fused", "kernel"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [(300, 40), (2000, 40), (40,)])  # parts of small packs, of large ones, none
def test_a_value_that_is_not_finite_spoils_its_own_rows_only(tokens, value, merge):
    """One V of the last request's tail, in the second of two KV heads."""
    nodes = (1, 60)[-len(tokens) :]
    forest = tree_forest(nodes, tokens)
    table, slots = forest_table(forest)
    q, k, v = (torch.randn(n, h, 128, dtype=torch.float16, device="cuda") for n, h in ((60, 8), (slots, 2), (slots, 2)))
    decode = PackedDecodeWrapper(8, 2, 128, max_requests=60, merge=merge)
    decode.plan(forest, torch.from_numpy(table).cuda())
    right = decode.run(q, k, v)
    v[int(table[forest.row_offset[-1] + forest.seq_len[-1] - 1]), 1, 5] = value
    out = decode.run(q, k, v)
    assert right.isfinite().all() and not out[-1, 4:, 5].isfinite().any()
    assert torch.equal(out[:-1], right[:-1]) and torch.equal(out[-1, :4], right[-1, :4])
