"""The kernel for latent attention on a GPU: fewer of the cases of ``check_latent_kernel.py``, the full pass."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "checks"))

import check_latent_kernel as check
import latent_cases
import torch

from feather_kernels.latent import LatentDecodeWrapper
from feather_kernels.trees import forest_table, tree_forest

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of compute capability 9.0")


@pytest.mark.parametrize("seed", range(10_000, 10_064))
def test_a_random_forest(seed):
    outcome = latent_cases.check_forest(latent_cases.draw(seed))
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"


@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("seed", range(10_000, 10_008))
def test_plans_as_a_server_makes_them(seed, heads):
    choice = replace(latent_cases.draw(seed), wrapper=(), growth=20, heads=latent_cases.Heads(heads, 1))
    outcome = latent_cases.check_forest(choice)
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"


@pytest.mark.parametrize("drafts", [2, 4])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_draft_sees_its_own_tokens_only(heads, drafts):
    row = check.Row("8_300", heads, drafts)
    given = check.Inputs(row, 1)
    rows = list(range(given.case.n_requests))
    out, exact = given.feather()().float(), given.exact(rows)
    assert float((out - exact).norm() / exact.norm()) < 4e-3


def test_a_graph_is_replayed_for_another_batch():
    """Only contents change, no addresses."""
    forests = [tree_forest((1, 40), (300, 30)), tree_forest((40,), (90,))]
    draw = torch.Generator("cuda").manual_seed(0)
    latents = torch.randn(8192, 1, 576, dtype=torch.bfloat16, device="cuda", generator=draw)
    q = torch.randn(40, 16, 576, dtype=torch.bfloat16, device="cuda", generator=draw)
    decode = LatentDecodeWrapper(16, sm_scale=latent_cases.SCALE, max_requests=40)
    table = torch.zeros(1 << 14, dtype=torch.int32, device="cuda")
    lens = torch.zeros(40, dtype=torch.int32, device="cuda")
    out = torch.empty(40, 16, 512, dtype=torch.bfloat16, device="cuda")

    def plan(forest):
        slots, _ = forest_table(forest, rng=np.random.default_rng(0))
        table[: len(slots)].copy_(torch.from_numpy(slots))
        lens.copy_(torch.from_numpy(forest.seq_len))
        decode.plan(forest, table, lens)

    plan(forests[0])
    decode.run(q, latents, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode.run(q, latents, out)
    for forest in (*forests, forests[0]):
        plan(forest)
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, decode.run(q, latents)) and replayed.isfinite().all()


def test_scores_that_rise_by_more_than_a_float32_can_hold():
    """Keys grow along the sequence, so that exp2(score - the first stage's maximum) overflows, and more than once."""
    tokens = 1500
    forest = tree_forest((1, 5), (tokens, 70))
    table, slots = forest_table(forest)
    rows = torch.from_numpy(table).cuda()
    draw = torch.Generator("cuda").manual_seed(0)
    latents = torch.randn(slots, 1, 576, dtype=torch.bfloat16, device="cuda", generator=draw)
    first = int(forest.row_offset[0])
    grown = 1 + torch.arange(tokens, device="cuda") * 0.06
    latents[rows[first : first + tokens].long()] *= grown[:, None, None].bfloat16()
    q = torch.randn(5, 16, 576, dtype=torch.bfloat16, device="cuda", generator=draw)
    decode = LatentDecodeWrapper(16, sm_scale=576**-0.5, max_requests=5)
    decode.plan(forest, rows)
    out = decode.run(q, latents)
    for request in range(5):
        begin = int(forest.row_offset[request])
        own = latents[rows[begin : begin + int(forest.seq_len[request])].long(), 0].double()
        scores = q[request].double() @ own.T * 576**-0.5
        assert scores.max() > 150
        right = scores.softmax(-1) @ own[:, :512]
        assert float((out[request].double() - right).norm() / right.norm()) < 4e-3


@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.parametrize("own", [20, 32])
def test_a_nan_stays_with_the_request_whose_token_it_is(heads, own):
    """Requests' own tokens share a unit, and stages of it."""
    forest = tree_forest((1, 256), (300, own))
    table, slots = forest_table(forest)
    rows = torch.from_numpy(table).cuda()
    draw = torch.Generator("cuda").manual_seed(0)
    latents = torch.randn(slots, 1, 576, dtype=torch.bfloat16, device="cuda", generator=draw)
    q = torch.randn(256, heads, 576, dtype=torch.bfloat16, device="cuda", generator=draw)
    decode = LatentDecodeWrapper(heads, sm_scale=latent_cases.SCALE, max_requests=256)
    decode.plan(forest, rows)
    assert decode.pack_plan.items[:, 11].max() > 1
    clean = decode.run(q, latents)
    assert clean.isfinite().all()
    others = torch.ones(256, dtype=torch.bool, device="cuda")
    for request, column in ((5, 0), (11, 300), (12, 511), (18, 575)):
        last = int(forest.row_offset[request] + forest.seq_len[request]) - 1
        latents[rows[last].long(), 0, column] = float("nan")
        others[request] = False
    out = decode.run(q, latents)
    # Rows of a warp are rescaled together, so that others of the same 16 rows may round elsewhere.
    torch.testing.assert_close(out[others], clean[others], atol=1e-2, rtol=2e-2)
    assert out[~others].isnan().all()
