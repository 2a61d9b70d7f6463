"""The decode kernel on a GPU: fewer of the cases of ``check_decode_kernel.py``, which is the full pass."""

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "checks"))

import check_decode_kernel as check
import random_batches
import torch
from decode_cases import attend

from feather_kernels import PackedDecodeWrapper
from feather_kernels.device import Device
from feather_kernels.trees import forest_table, tree_forest

GPU = torch.cuda.is_available()
HOPPER = GPU and Device.of().path == "hopper"
pytestmark = pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU: torch sees none")


@pytest.mark.parametrize("seed", range(10_000, 10_064))
def test_a_random_forest(seed):
    outcome = check.check_forest(random_batches.draw(seed, HOPPER), PackedDecodeWrapper, "cuda")
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"


@pytest.mark.parametrize("seed", range(10_000, 10_032))
def test_attention_sinks(seed):
    choice = replace(random_batches.draw(seed, HOPPER), sinks=True)
    outcome = check.check_forest(choice, PackedDecodeWrapper, "cuda")
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"


@pytest.mark.parametrize("seed", range(10_000, 10_016))
def test_wide_groups(seed):
    choice = random_batches.with_wide_group(random_batches.draw(seed, HOPPER), HOPPER)
    outcome = check.check_forest(choice, PackedDecodeWrapper, "cuda")
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seed", range(10_000, 10_016))
def test_an_fp8_cache(seed, head_dim):
    choice = replace(random_batches.draw(seed, HOPPER), fp8_kv=True, head_dim=head_dim)
    choice = replace(choice, wrapper=tuple(pair for pair in choice.wrapper if pair[0] != "tiles"))
    outcome = check.check_forest(choice, PackedDecodeWrapper, "cuda")
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"


@pytest.mark.parametrize("seed", range(check.SMALL_CASES))
def test_a_tiny_batch(seed):
    outcome = check.check_forest(random_batches.small(seed, HOPPER), PackedDecodeWrapper, "cuda")
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"


@pytest.mark.parametrize("seed", range(10_000, 10_008))
@pytest.mark.parametrize(
    "others", [(("hopper", 64, 32), ("hopper", 128, 32)), (("portable", 32, 16), ("portable", 64, 64))]
)
def test_tiles_of_another_n(others, seed):
    if others[0][0] == "hopper" and not HOPPER:
        pytest.skip("needs an NVIDIA GPU of compute capability 9.0: this one is older")
    choice = replace(random_batches.draw(seed, HOPPER), head_dim=128, soft_cap=0.0, dtype="float16")
    choice = replace(choice, wrapper=check.with_tiles(choice, others))
    outcome = check.check_forest(choice, PackedDecodeWrapper, "cuda")
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"


def test_a_tile_that_cannot_be_built_is_said():
    with pytest.raises(ValueError, match=r"^tiles are .*: for m = 32 n may be \(16, 32, 64\)$"):
        PackedDecodeWrapper(8, 1, 64, path="portable", tiles=((8, 16), (16, 16), (32, 128), (64, 32)))


@pytest.mark.parametrize("seed", range(10_000, 10_004))
def test_a_graph_is_replayed_for_another_batch(seed):
    outcome = check.check_capture(random_batches.draw(seed, HOPPER), PackedDecodeWrapper, "cuda")
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"


def test_bad_input_is_one_clear_error_and_writes_nothing():
    assert check.check_bad_input(PackedDecodeWrapper, "cuda") == []


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize(("nodes", "tokens"), [((1, 500), (1500, 70)), ((1, 60), (2000, 40)), ((1, 16), (777, 200))])
def test_scores_that_rise_by_more_than_a_float32_can_hold(nodes, tokens, kv_heads):
    """Keys grow along the sequence, so that exp2(score - the first tile's maximum) overflows, and more than once."""
    forest = tree_forest(nodes, tokens)
    table, slots = forest_table(forest)
    rows = torch.from_numpy(table).cuda()
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(n, h, 128, dtype=torch.float16, device="cuda", generator=draw)
        for n, h in ((nodes[-1], 32), (slots, kv_heads), (slots, kv_heads))
    )
    length = sum(tokens)
    grown = torch.ones(slots, device="cuda")
    slots_of = torch.stack([rows[begin : begin + length].long() for begin in forest.row_offset.tolist()])
    grown[slots_of] = 1 + torch.arange(length, device="cuda") * 0.06
    k = (k * grown[:, None, None]).half()
    decode = PackedDecodeWrapper(32, kv_heads, 128, max_requests=nodes[-1])
    decode.plan(forest, rows)
    lens = torch.full((nodes[-1],), length, device="cuda")
    right, right_lse = attend(q, k, v, slots_of, lens, 128**-0.5, 0.0)
    first, _ = attend(q, k, v, slots_of[:, :64], lens.clamp(max=64), 128**-0.5, 0.0)
    assert right_lse.max() > 150  # nats
    assert not torch.allclose(first.float(), right.float(), atol=0.1)
    torch.testing.assert_close(decode.run(q, k, v).float(), right.float(), atol=4e-3, rtol=0)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("requests", [60, 500])  # on Hopper, their prompt is for tiles with m = 64 and with m = 128
def test_scores_that_grow_from_tile_to_tile(requests, head_dim, dtype):
    """The maximum of a tile is far above those of the tiles before it; the last tile is not full."""
    prompt = 2010
    forest = tree_forest((1, requests), (prompt, 40))
    table, slots = forest_table(forest)
    shapes = ((requests, 8, head_dim), (slots, 2, head_dim), (slots, 2, head_dim))
    q, k, v = (torch.randn(shape, dtype=dtype, device="cuda") for shape in shapes)
    first = int(forest.row_offset[0])
    grown = torch.linspace(0.1, 30, prompt, device="cuda")
    k[torch.from_numpy(table[first : first + prompt]).cuda().long()] *= grown.to(dtype)[:, None, None]
    decode = PackedDecodeWrapper(8, 2, head_dim, max_requests=requests, dtype=dtype)
    plan = decode.plan(forest, torch.from_numpy(table).cuda())
    if HOPPER:
        queues = zip(reversed(plan.tiles), pairwise(plan.queue_begin.tolist()), strict=False)
        used = [m for (m, _), (begin, end) in queues if end > begin]
        assert max(used) == (64 if requests == 60 else 128)
    out = decode.run(q, k, v)
    for request in range(0, requests, 29):
        row = int(forest.row_offset[request])
        own = torch.from_numpy(table[row : row + int(forest.seq_len[request])]).cuda().long()
        keys, values = (x[own].double().repeat_interleave(4, dim=1) for x in (k, v))
        scores = torch.einsum("hd,thd->ht", q[request].double(), keys) * head_dim**-0.5
        right = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
        assert (out[request] - right).abs().max() < 2 * torch.finfo(dtype).eps * v.abs().max()
