"""The batches of the benchmark of verify steps, its reference against the kernel's, and its floor; no GPU."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_verify as bench
from decode_cases import COPY_BANDWIDTH, MATRIX_RATE, Heads

from feather_kernels.plan import make_plan
from feather_kernels.reference import reference_decode


@pytest.mark.parametrize(("requests", "groups", "drafts"), [(12, 3, 4), (7, 2, 2), (5, 5, 3)])
def test_what_times_are_checked_against_is_what_the_kernel_computes(requests, groups, drafts):
    batch = bench.batch_of(requests, groups, 40, 9, drafts, Heads(8, 2), head_dim=16)
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(requests * drafts, 8, 16, generator=draw)
    k, v = torch.randn(2, batch.slots, 2, 16, generator=draw)
    exact = bench.reference(batch, bench.Tensors(q, k, v, torch.from_numpy(batch.table)), range(requests))
    plan = make_plan(bench.with_new_tokens(batch.forest, drafts), num_qo_heads=8, num_kv_heads=2, head_dim=16)
    out, _ = reference_decode(plan, q.numpy(), k.numpy(), v.numpy(), batch.table.ravel(), 1)
    assert np.abs(out - exact.numpy()).max() < 1e-5


def test_groups_share_slots_and_nobody_else_does():
    batch = bench.batch_of(10, 2, 30, 5, 4, Heads(4, 4))
    assert len(np.unique(batch.table)) == batch.slots == 2 * 30 + 10 * 9
    assert (batch.table[:5, :30] == batch.table[0, :30]).all() and (batch.table[5:, :30] == batch.table[5, :30]).all()
    kv = batch.slots * 2 * 4 * 128 * 2 / COPY_BANDWIDTH
    flop = 4 * 128 * 4 * 10 * sum(range(36, 40)) / MATRIX_RATE
    assert batch.floor == pytest.approx(max(kv, flop))
