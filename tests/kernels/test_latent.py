"""Latent attention without a GPU: its plans, the inputs that it takes, and those that it refuses in one line."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import feather_kernels.latent as latent_module
from feather_kernels.build import BuildError, Configuration, source_dir
from feather_kernels.costs import UnitCosts
from feather_kernels.errors import PlanError
from feather_kernels.latent import LatentConfig, LatentDecodeWrapper, tiles_of
from feather_kernels.plan import make_plan
from feather_kernels.reference import direct_decode, reference_decode
from feather_kernels.tiles import LATENT_TILES
from feather_kernels.trees import forest_table, named_forest, random_forest, tree_forest

LAYER = {
    "head_dim": 512, "tiles": LATENT_TILES, "strategy": "time", "split": "rounds", "tail_warps": 1,
    "costs": UnitCosts.latent(), "token_values": 576, "fold_tails": True,
}  # fmt: skip


def plan_of(forest, heads, **options):
    return make_plan(forest, num_qo_heads=heads, num_kv_heads=tiles_of(heads), **LAYER | options)


def test_a_plan_holds_until_a_tail_has_grown_by_a_quarter():
    """A unit has a processor to itself, and the others wait for the longest."""
    forest = tree_forest((4,), (3000,))
    plan = plan_of(forest, 16, split="none")
    assert plan.valid_for(forest.seq_len + 750)[0] and not plan.valid_for(forest.seq_len + 751)[0]


def queued(plan):
    """Items of the queue: what units run."""
    return plan.items[: plan.queue_begin[-1]]


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("grow", [False, True])
def test_a_plan_computes_attention_over_latents(seed, grow):
    rng = np.random.default_rng(seed)
    heads = (16, 8, 12, 128, 66, 5)[seed % 6]
    forest = random_forest(rng, int(rng.integers(1, 30)))
    room = 5 * grow
    table, slots = forest_table(forest, room=room)
    plan = plan_of(forest, heads, grow=grow, n_sm=int(rng.choice([2, 12, 132])))
    q = rng.normal(size=(forest.n_requests, heads, 9))
    keys = np.repeat(rng.normal(size=(slots, 1, 9)), tiles_of(heads), axis=1)
    seq_len = forest.seq_len + rng.integers(0, room + 1, forest.n_requests, np.int32)
    given = q, keys, keys[..., :8], table, 1
    out, lse = reference_decode(plan, *given, seq_lens=seq_len)
    right, right_lse = direct_decode(forest.with_seq_len(seq_len), *given)
    np.testing.assert_allclose(out, right, atol=1e-9)
    np.testing.assert_allclose(lse, right_lse, atol=1e-9)


@pytest.mark.parametrize("heads", [1, 5, 8, 12, 16, 64, 96, 128])
def test_a_unit_has_no_more_rows_than_the_tile_and_merges_nothing(heads):
    plan = plan_of(named_forest("1,4,64_300,200,100"), heads)
    items = queued(plan)
    assert (items[:, 6] * plan.group_size <= 64).all()
    members = [plan.members[first : first + count, 1] for first, count in items[:, 5:7].tolist()]
    assert min(part.min() for part in members) >= -1  # of no request is it the one that closes it


def test_short_tails_are_read_behind_what_their_requests_share():
    forest = named_forest("1,256_256,32")
    folded, apart = plan_of(forest, 16), plan_of(forest, 16, fold_tails=False, merge="kernel")
    assert len(queued(folded)) < len(queued(apart)) / 2
    assert folded.n_parts < apart.n_parts
    assert folded.items[:, 4].max() == 255 and (np.sort(folded.items[folded.items[:, 4] >= 0, 4]) == range(256)).all()


def test_tails_longer_than_an_even_share_of_all_work_are_units():
    plan = plan_of(named_forest("1,10_4096,4160"), 16)
    assert (queued(plan)[:, 11] == 0).all()


def test_the_traffic_model_counts_a_latent_once():
    plan = plan_of(named_forest("3_1000"), 16)
    assert plan.traffic.kv == 3 * 1000 * 576 * 2 and plan.tokens_read == 3000


def test_the_sources_have_the_tile_that_python_plans_for():
    traits = (source_dir() / "traits.h").read_text()
    shape = traits[traits.index("struct LatentTraits") :]
    tokens, rows = re.search(r"kTokens = (\d+)", shape), re.search(r"kWarpgroupRows = (\d+)", traits)
    assert tokens and rows and LATENT_TILES == ((int(rows[1]), int(tokens[1])),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("float16", 576, 90), "latent attention in float16 is not supported: use bfloat16"),
        (("bfloat16", 576, 80), "latent attention needs compute capability 9.0, not 8.0"),
        (("bfloat16", 576, 90, True), "latent attention has no soft_cap"),
        (("bfloat16", 576, 90, False, (), True, True), "latent attention has no sinks or fp8_kv"),
    ],
)
def test_what_is_not_built_is_said(arguments, message):
    with pytest.raises(BuildError, match=f"^{re.escape(message)}$"):
        Configuration(*arguments)


@pytest.mark.parametrize("heads", [0, 65, 67, 131])
def test_heads_that_do_not_split_evenly_are_refused(heads):
    with pytest.raises(ValueError, match=f"^{heads} query heads of latent attention: give up to 64, or a multiple of"):
        tiles_of(heads)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": torch.float16}, "latent attention in torch.float16: use torch.bfloat16"),
        ({"kv_dtype": torch.float8_e4m3fn}, "latent attention in torch.float8_e4m3fn: use torch.bfloat16"),
        ({"path": "portable"}, "path 'portable', tiles None: latent attention has hopper and"),
        ({"device": "cpu"}, "device is cpu: the kernels need a CUDA device"),
    ],
)
def test_a_layer_that_is_not_supported_is_refused(given, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        LatentConfig(16, 1, 576, **given)


def test_an_older_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"^latent attention needs compute capability 9.0: cuda:0 has 8.0$"):
        LatentConfig(16, 1, 576, device="cuda:0")


class HostConfig(LatentConfig):
    """The configuration of a layer on the CPU."""

    def __post_init__(self):
        device = torch.device("cpu")
        self._settle(device=device, kv_dtype=self.dtype, path="hopper", tiles=LATENT_TILES)


@pytest.fixture
def ran(monkeypatch):
    """What the kernel of a wrapper on the host is given, instead of running."""
    given = []
    library = SimpleNamespace(forward=lambda *of: given.append(of), merge=lambda *of: given.append(of))
    monkeypatch.setattr(latent_module, "LatentConfig", HostConfig)
    monkeypatch.setattr(latent_module, "load_kernel", lambda *of: library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    return given


def wrapper_of(heads=16, **options):
    wrapper = LatentDecodeWrapper(heads, sm_scale=0.1, max_requests=4, **options)
    wrapper.plan(named_forest("1,3_5,2"), torch.arange(64, dtype=torch.int32))
    return wrapper


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("heads", [16, 128])
def test_queries_come_in_one_tensor_or_in_two(ran, heads):
    wrapper, q, latents = wrapper_of(heads), zeros(3, heads, 576), zeros(64, 1, 576)
    out, lse = wrapper.run(q, latents, return_lse=True)
    assert out.shape == (3, heads, 512) and lse.shape == (3, heads)
    wrapper.run(q[..., :512], latents, q_rope=q[..., 512:])
    apart = zeros(heads, 3, 512).transpose(0, 1)  # heads outermost, as a batched product leaves them
    wrapper.run(apart, latents, q_rope=zeros(3, heads, 64))
    for values, keys, *_, rope, _flags, _queues in ran:
        assert values.shape == (3, heads, 512) and rope.shape == (3, heads, 64)
        assert keys.shape == (64, tiles_of(heads), 576) and (heads <= 64 or keys.stride(1) == 0)
    assert ran[2][0].stride() == apart.stride()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"q": zeros(3, 16, 512)}, "q is [3, 16, 512] without q_rope: give 576 columns, or both"),
        ({"q": zeros(2, 16, 576)}, "q is [2, 16, 512], the plan is for [3, 16, 512]: plan this batch first"),
        ({"q": zeros(3, 16, 576).float()}, "q is torch.float32 on cpu: the wrapper is for torch.bfloat16 on cpu"),
        ({"latents": zeros(64, 576)}, "latents is [64, 576]: give (slots, 1, 576) or (pages, 1, 1, 576)"),
        ({"latents": zeros(64, 1, 577)[..., 1:]}, "latents has strides (577, 577, 1): its slots must be contiguous"),
        ({"out": zeros(3, 16, 1024)[..., ::2]}, "out has strides (16384, 1024, 2): rows must be contiguous"),
        ({"out": zeros(16, 3, 512).transpose(0, 1)}, "out has strides (512, 1536, 1): its heads must lie side by side"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(ran, given, message):
    with pytest.raises(PlanError, match=f"^{re.escape(message)}"):
        wrapper_of().run(**{"q": zeros(3, 16, 576), "latents": zeros(64, 1, 576)} | given)
    assert not ran


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fold_tails": False}, "fold_tails is False: latent attention's units read tails"),
        ({"logit_soft_cap": 3.0}, "latent attention has neither a soft cap nor attention sinks"),
    ],
)
def test_options_that_the_kernel_does_not_have_are_refused(ran, given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        wrapper_of(**given)
