"""Dummy weights that let a model tell prompts apart, the same in every process."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_loader import loader

from effort import newest_is_enough

pytestmark = newest_is_enough

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "checks"))


def test_weights_follow_from_their_names(monkeypatch):
    monkeypatch.setattr(loader, "initialize_dummy_weights", None)
    from spread_weights import spread_weights

    def model():
        one = torch.nn.ModuleDict({name: torch.nn.Linear(256, 128) for name in ("qkv_proj", "up_proj")})
        one["norm"] = torch.nn.LayerNorm(8)
        spread_weights(one)
        return {name: weights.detach() for name, weights in one.named_parameters()}

    first, second = model(), model()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["qkv_proj.weight"], 2 * first["up_proj.weight"])
    assert first["qkv_proj.weight"].std() == pytest.approx(1.4 / 16, rel=0.05)
    assert first["up_proj.weight"].std() == pytest.approx(1 / 16, rel=0.05)
    assert (first["norm.weight"] == 1).all()


@pytest.mark.parametrize(
    "shard", [{"tp_rank": 1}, {"moe_tp_rank": 1}, {"shard_indices": SimpleNamespace(org_vocab_start_index=64)}], ids=str
)
def test_shards_of_a_tensor_parallel_model_differ(monkeypatch, shard):
    monkeypatch.setattr(loader, "initialize_dummy_weights", None)
    from spread_weights import spread_weights

    def weights(**fields):
        one = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(64, 32, bias=False)})
        for name, value in fields.items():
            setattr(one["lm_head"], name, value)
        spread_weights(one)
        return one["lm_head"].weight.detach()

    first = weights()
    assert torch.equal(weights(tp_rank=0), first)
    assert torch.equal(weights(shard_indices=SimpleNamespace(org_vocab_start_index=0)), first)
    assert torch.equal(weights(**shard), weights(**shard)) and not torch.equal(weights(**shard), first)
