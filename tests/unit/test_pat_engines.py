"""One engine and one plan for each shape of heads that a model's layers have."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from feather_kernels.reference import direct_decode
from feather_kernels.trees import forest_table, tree_forest
from feather_sglang.adapter.attention.engines import Engines
from feather_sglang.adapter.attention.limits import LayerFacts

SMALL = LayerFacts(0, 4, 2, 16, 16, 0.25, reference=True)
LAYERS = (
    SMALL,
    replace(SMALL, layer_id=2, sm_scale=0.5, logit_soft_cap=3.0),
    replace(SMALL, layer_id=5, q_heads=6, kv_heads=1, head_dim=8, v_head_dim=8),
)


def test_layers_share_the_plan_of_their_shape_and_have_scores_of_their_own():
    forest = tree_forest((1, 5), (40, 9))
    table, slots = forest_table(forest)
    engines = Engines(LAYERS, torch.float32, "cpu", 8, sinks=True, reference=True)
    lens = torch.from_numpy(np.array(forest.seq_len))
    assert not engines.valid_for(forest.seq_len) and 1 not in engines
    engines.plan(forest, torch.from_numpy(table), lens)
    assert len(engines.plans) == 2 and engines.valid_for(forest.seq_len)
    rng = np.random.default_rng(0)
    for layer in LAYERS:
        heads, kv_heads, dim = engines.shape(layer.layer_id)
        q, k, v = (rng.standard_normal(s) for s in ((5, heads, dim), (slots, kv_heads, dim), (slots, kv_heads, dim)))
        for sinks in (None, rng.standard_normal(heads)):
            out = torch.empty(q.shape, dtype=torch.float64)
            given = None if sinks is None else torch.from_numpy(sinks)
            engines.run(layer.layer_id, *map(torch.from_numpy, (q, k, v)), out, given)
            scores = layer.sm_scale, layer.logit_soft_cap, sinks
            np.testing.assert_allclose(out.numpy(), direct_decode(forest, q, k, v, table, 1, *scores)[0], atol=1e-12)
