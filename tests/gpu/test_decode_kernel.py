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
