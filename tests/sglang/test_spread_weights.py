"""Dummy weights that let a model tell prompts apart, the same in every process."""

import sys
from pathlib import Path

import pytest
import torch
from sglang.srt.model_loader import loader

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
