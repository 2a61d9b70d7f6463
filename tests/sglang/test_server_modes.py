"""Modes of a server in the real scheduler: under pat, and under a policy too, the tokens of SGLang's own."""

import numpy as np
import pytest
import torch
from harness import CONFIG, OverlapServer, Server, spread_weights
from sglang.srt.mem_cache.pool_host import common, mha

from feather_sglang.adapter.attention.metrics import pat_metrics

LAYERS = 2
UNDER = [("fcfs", Server), ("feather", OverlapServer)]
under = pytest.mark.parametrize(("policy", "kind"), UNDER, ids=["fcfs", "feather-overlap"])


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Makes servers under the reference instead of the kernel, with a look at the slots after every step."""
    monkeypatch.setenv("FEATHER_PAT_REFERENCE", "1")
    monkeypatch.setenv("FEATHER_DEBUG_CHECK", "1")
    made = []

    def make(policy="fcfs", kind=Server, backend="pat", **overrides):
        config = {**CONFIG, "num_hidden_layers": LAYERS}
        made.append(kind(tmp_path, policy, config=config, decode_attention_backend=backend, **overrides))
        spread_weights(made[-1])
        return made[-1]

    yield make
    for one in made:
        one.close()


def tokens_read():
    metrics = pat_metrics()
    return np.array([metrics.attended._value.get(), metrics.read._value.get()])


def share_read(before):
    attended, read = tokens_read() - before
    return read / attended


def draw(generator, count):
    return generator.integers(2, 500, count).tolist()


# Hierarchical cache ---------------------------------------------------------------------------------------------


@pytest.fixture
def host_cache(monkeypatch):
    """SGLang's hierarchical cache on a CPU: nothing to pin, and copies from layer to layer instead of its kernel."""

    def copy(src_layers, dst_layers, src_indices, dst_indices, page_size):
        for source, target in zip(src_layers, dst_layers, strict=True):
            target[dst_indices.long()] = source[src_indices.long()]

    monkeypatch.setattr(common, "_cuda_host_register", lambda *args, **kwargs: None)
    monkeypatch.setattr(mha, "transfer_kv_direct", copy, raising=False)
    monkeypatch.setattr(torch.cpu.Stream, "synchronize", lambda stream: None, raising=False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    flags = {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first", "hicache_ratio": 4.0}
    return {"enable_hierarchical_cache": True, "hicache_size": 0, **flags}


def rounds_of_prefixes(server):
    """Three rounds of eight prefixes that do not fit the pool together; three requests to each."""
    generator = np.random.default_rng(0)
    prefixes = [draw(generator, 130) for _ in range(8)]
    for number in range(3):
        for group, prefix in enumerate(prefixes):
            for which in range(3):
                server.submit(f"{number}{group}{which}", prefix + draw(generator, 5 + group), max_new_tokens=6)
            server.drain()
    return server.outputs()


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
@under
def test_prefixes_come_back_from_the_host(server, host_cache, policy, kind, write_policy):
    expected = rounds_of_prefixes(server(backend=None, max_total_tokens=1024))
    before = tokens_read()
    one = server(policy, kind, max_total_tokens=1024, hicache_write_policy=write_policy, **host_cache)
    assert rounds_of_prefixes(one) == expected
    assert sum(req.host_hit_length for req in one.requests.values()) > 1500
    assert share_read(before) < 0.6
    one.assert_nothing_left()
