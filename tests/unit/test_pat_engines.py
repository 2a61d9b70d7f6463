"""One engine and one plan for each shape of heads that a model's layers have."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import feather_kernels
from feather_kernels.reference import direct_decode
from feather_kernels.trees import forest_table, tree_forest
from feather_sglang.adapter.attention.engines import Engines, PackedLayers
from feather_sglang.adapter.attention.limits import LayerFacts
from feather_sglang.errors import FeatherError

SMALL = LayerFacts(0, 4, 2, 16, 16, 0.25, reference=True)
LAYERS = (
    SMALL,
    replace(SMALL, layer_id=2, sm_scale=0.5, logit_soft_cap=3.0),
    replace(SMALL, layer_id=5, q_heads=6, kv_heads=1, head_dim=8, v_head_dim=8),
    replace(SMALL, layer_id=6, sinks=True),
    replace(SMALL, layer_id=7, logit_soft_cap=3.0, sinks=True),
)


def test_layers_share_the_plan_of_their_shape_and_have_scores_of_their_own():
    forest = tree_forest((1, 5), (40, 9))
    table, slots = forest_table(forest)
    engines = Engines(PackedLayers(LAYERS, torch.float32, torch.float32, "cpu", reference=True), 8)
    lens = torch.from_numpy(np.array(forest.seq_len))
    assert not engines.valid_for(forest.seq_len) and 1 not in engines
    engines.plan(forest, torch.from_numpy(table), lens)
    assert len(engines.plans) == 2 and engines.valid_for(forest.seq_len)
    rng = np.random.default_rng(0)
    for layer in LAYERS:
        heads, kv_heads, dim = engines.shape(layer.layer_id)
        q, k, v = (rng.standard_normal(s) for s in ((5, heads, dim), (slots, kv_heads, dim), (slots, kv_heads, dim)))
        sinks = rng.standard_normal(heads) if layer.sinks else None
        out = torch.empty(q.shape, dtype=torch.float64)
        given = None if sinks is None else torch.from_numpy(sinks)
        engines.run(layer.layer_id, *map(torch.from_numpy, (q, k, v)), out, given)
        scores = layer.sm_scale, layer.logit_soft_cap, sinks
        np.testing.assert_allclose(out.numpy(), direct_decode(forest, q, k, v, table, 1, *scores)[0], atol=1e-12)


@pytest.mark.parametrize("extras", [{"attn_sink": torch.ones(2)}, {"sinks": torch.ones(2)}, {"topk_indices": [1]}])
def test_what_latent_attention_does_not_know_is_refused(extras):
    latent = replace(SMALL, kv_heads=1, head_dim=24, v_head_dim=16, latent=True)
    engines = Engines(PackedLayers((latent,), torch.float32, torch.float32, "cpu", reference=True), 8)
    layer = SimpleNamespace(layer_id=latent.layer_id)
    with pytest.raises(FeatherError, match=f"does not support {next(iter(extras))} in attention"):
        engines.attend(torch.ones(1), None, None, layer, None, q_rope=torch.ones(1), **extras)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("layers", "loaded"),
    [
        ([replace(SMALL, sinks=True)], [(False, True)]),  # and none without sinks, which nobody would run
        ([SMALL, replace(SMALL, layer_id=1, sm_scale=9.0)], [(False, False)]),
        ([replace(SMALL, logit_soft_cap=5.0), replace(SMALL, layer_id=1, sinks=True)], [(False, True), (True, False)]),
    ],
)
def test_the_kernels_that_layers_need_are_loaded_and_no_others(monkeypatch, layers, loaded, kv_dtype):
    """Before anything is captured; with a soft cap or without, with sinks or without, of the cache's dtype."""
    asked = set()

    class Wrapper:
        def __init__(self, *shape, kv_dtype, logit_soft_cap, sinks, **_):
            self.kv_dtype = kv_dtype
            self.load(logit_soft_cap > 0, sinks)

        def load(self, soft_cap, sinks):
            asked.add((soft_cap, sinks, self.kv_dtype))

    monkeypatch.setattr(feather_kernels, "PackedDecodeWrapper", Wrapper)
    layers = tuple(replace(layer, head_dim=64, reference=False) for layer in layers)
    Engines(PackedLayers(layers, torch.bfloat16, kv_dtype, "cuda"), 8)
    assert asked == {(*scores, kv_dtype) for scores in loaded}


def test_a_layer_that_comes_with_other_scores_than_it_said_is_no_surprise_to_a_capture():
    """The reference refuses what the kernel would have to load."""
    forest = tree_forest((1, 5), (40, 9))
    table, slots = forest_table(forest)
    engines = Engines(PackedLayers(LAYERS[2:3], torch.float32, torch.float32, "cpu", reference=True), 8)
    engines.plan(forest, torch.from_numpy(table), torch.from_numpy(np.array(forest.seq_len)))
    q, kv = torch.zeros(5, 6, 8), torch.zeros(slots, 1, 8)
    engines.run(5, q, kv, kv, torch.empty_like(q), None)
    with pytest.raises(FeatherError, match=r"kernel failed in layer .*: no kernels are loaded .*sinks True$"):
        engines.run(5, q, kv, kv, torch.empty_like(q), torch.zeros(6))
