"""The real shapes of the GPU check are models that SGLang makes offline, with the layers that the check is about."""

import copy
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "checks"))

from model_shapes import SHAPES
from test_model_kinds import KINDS, Kind, environment, runner_of, server  # noqa: F401

from feather_sglang.adapter.attention import matrix
from feather_sglang.adapter.attention.facts import facts_of
from feather_sglang.adapter.attention.limits import left_to_another

SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 64, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 0, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "query_pre_attn_scalar": 16, "vocab_size": 512, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1,
    "num_local_experts": 1, "torch_dtype": "float32",
}  # fmt: skip
GPU_ONLY = {"use_qk_norm": False, "interleave_moe_layer_step": 99, "final_logit_softcapping": None}


def shrunk(config, layers=12):
    """The configuration with small sizes and few layers, and without what SGLang computes on a GPU only."""
    made = copy.deepcopy(config)
    for part in (made, made.get("text_config", {})):
        part |= {key: value for key, value in (SMALL | GPU_ONLY).items() if key in part}
        if "num_hidden_layers" in part:
            part["num_hidden_layers"] = layers
            part |= {"layer_types": part["layer_types"][:layers]} if "layer_types" in part else {}
    return made


@pytest.mark.parametrize("name", SHAPES)
def test_sglang_makes_the_shape_and_pat_packs_what_its_kind_says(server, monkeypatch, name, tmp_path):  # noqa: F811
    config = json.loads((SHAPES[name].write(tmp_path / "shape") / "config.json").read_text())
    kind = next(kind for kind in matrix.KINDS if kind.name == SHAPES[name].kind)
    monkeypatch.setitem(KINDS, name, Kind(shrunk(config), []))
    one = server(name, "pat", dtype="float32")
    layers = facts_of(runner_of(one), True).layers
    expected = kind.model.layers
    assert {left_to_another(layer) for layer in layers} == {left_to_another(layer) for layer in expected}
    assert {layer.sinks for layer in layers} == {layer.sinks for layer in expected}
    assert {layer.logit_soft_cap for layer in layers} == {config.get("attn_logit_softcapping", 0.0)}
    one.submit("a", list(range(5, 60)), max_new_tokens=6)
    one.drain()
    assert len(one.requests["a"].output_ids) == 6
