"""Latent attention under what its models are served with, on a CPU: the tokens are those of SGLang's own backend."""

import drafting
import numpy as np
import pytest
import torch
from harness import OverlapServer, Server
from sglang.srt.mem_cache.pool_host import mla
from test_model_kinds import KINDS, Kind, environment, runner_of, server  # noqa: F401
from test_server_modes import copy_layers, host_cache, share_read, tokens_read  # noqa: F401

from effort import newest_is_enough, on_newest

LATENT = {**KINDS["latent"].config, "num_hidden_layers": 2, "first_k_dense_replace": 2}
# Of SGLang's class for DeepSeek V3, whose last layer drafts.
DRAFTING = {
    **LATENT, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_nextn_predict_layers": 1,
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
}  # fmt: skip
NEXTN = {
    "speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3, "speculative_attention_mode": "decode", "max_running_requests": 24,
}  # fmt: skip


@pytest.fixture
def made(server, monkeypatch):  # noqa: F811
    """Makes servers of a latent model."""

    def make(*args, config=LATENT, **flags):
        monkeypatch.setitem(KINDS, "served", Kind(config, [], "MLATokenToKVPool"))
        return server("served", *args, **flags)

    return make


def rounds_of_prefixes(one, rounds=2):
    """Rounds of prefixes that do not fit a small pool together; four requests to each."""
    generator = np.random.default_rng(0)

    def draw(count):
        return generator.integers(2, 500, count).tolist()

    prefixes = [draw(200) for _ in range(4)]
    for number in range(rounds):
        for group, prefix in enumerate(prefixes):
            for which in range(4):
                one.submit(f"{number}{group}{which}", prefix + draw(5 + group), max_new_tokens=8)
            one.drain()
    return one.outputs()


@newest_is_enough
def test_prefixes_in_chunks_that_come_back_from_the_host(made, host_cache, monkeypatch):  # noqa: F811
    """Chunked prefill and the hierarchical cache at once, under a policy and the overlap scheduler."""
    monkeypatch.setattr(mla, "transfer_kv_direct", copy_layers, raising=False)
    expected = rounds_of_prefixes(made(kind=Server))
    before = tokens_read()
    small = {"max_total_tokens": 768, "chunked_prefill_size": 64, "hicache_write_policy": "write_through"}
    one = made("pat", kind=OverlapServer, policy="feather", **small, **host_cache)
    assert rounds_of_prefixes(one) == expected
    assert len(set(map(tuple, expected.values()))) > 20
    assert sum(req.host_hit_length for req in one.requests.values()) > 300
    assert share_read(before) < 0.7
    one.assert_nothing_left()


# To 0.5.17 the model hands its draft layer's backend what pat takes apart, of which Triton's knows nothing.
@pytest.mark.skipif(not on_newest(), reason="SGLang does not tell a draft layer's backend from the model's")
def test_the_models_own_layer_drafts(made, monkeypatch):
    drafting.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)  # of a draft model that takes over the head
    expected = rounds_of_prefixes(made(config=DRAFTING), rounds=1)
    one = made("pat", kind=OverlapServer, config=DRAFTING, **NEXTN)
    before = tokens_read()
    for rid, tokens in rounds_of_prefixes(one, rounds=1).items():  # which may be more than asked for
        assert tokens[: len(expected[rid])] == expected[rid]
    assert runner_of(one).feather_pat.drafts == 3
    assert all(req.spec_verify_ct > 0 for req in one.requests.values())
    assert share_read(before) < 0.8
