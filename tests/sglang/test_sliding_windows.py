"""Models with sliding windows: SGLang keeps the KV of such layers in a pool of its own, and evicts it apart."""

import random

import pytest
from harness import CONFIG, Server

WINDOW, PREFIX, TAIL, OUTPUTS = 32, 640, 4, 40
LAYERS = {"UnifiedRadixCache": [1, 0], "PureSWARadixCache": [1, 1]}  # by SGLang's cache for them; 1: sees a window only


class WindowServer(Server):
    """A Llama some of whose layers see a window, with weights that let it tell prompts apart."""

    def __init__(self, folder, policy, layers, **overrides):
        windows = {"is_hybrid_swa": True, "hybrid_layer_pattern": layers, "sliding_window": WINDOW}
        config = {**CONFIG, "num_hidden_layers": len(layers), **windows}
        super().__init__(folder, policy, config=config, **overrides)
        runner = self.scheduler.tp_worker.model_runner
        for layer, in_window in zip(runner.model.model.layers, layers, strict=True):
            if in_window:  # a Llama has no windows of its own
                layer.self_attn.attn.sliding_window_size = WINDOW - 1
        for name, weight in runner.model.named_parameters():
            if "norm" in name:
                weight.data.fill_(1)
            elif "self_attn" in name:
                weight.data.mul_(1000)
        self.pool = runner.token_to_kv_pool
        for read in ("get_key_buffer", "get_value_buffer"):
            setattr(self.pool, read, self._by_full_location(getattr(self.pool, read)))

    def _by_full_location(self, read):
        """SGLang's attention for CPUs writes to the pool for windows, but reads as if there were only the other."""

        def buffer(layer):
            in_window = self.pool.layers_mapping[layer][1]
            return read(layer)[self.pool.full_to_swa_index_mapping[:-1]] if in_window else read(layer)

        return buffer

    def assert_pools_full(self):
        allocator, cache = self.scheduler.token_to_kv_pool_allocator, self.scheduler.tree_cache
        assert allocator.swa_available_size() + cache.swa_evictable_size() == allocator.size_swa
        if self.pool.full_layer_nums:
            assert allocator.full_available_size() + cache.full_evictable_size() == allocator.size_full

    def submit_groups(self):
        """Four groups of six, each with a prefix."""
        for group in range(4):
            prefix = random.Random(group).choices(range(2, 512), k=PREFIX)
            for i in range(6):
                # SGLang reserves the whole output of a request that ignores its end token; these could end, but do not.
                assert self.submit(f"{group}{i}", prefix + [300 + i] * TAIL, max_new_tokens=OUTPUTS, ignore_eos=False)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What fcfs generates where memory is plenty, by cache."""
    outputs = {}
    for cache, layers in LAYERS.items():
        one = WindowServer(tmp_path_factory.mktemp("fcfs"), "fcfs", layers, max_total_tokens=20000)
        one.submit_groups()
        one.drain()
        one.assert_nothing_left()
        outputs[cache] = one.outputs()
        one.close()
        assert len({tuple(tokens) for tokens in outputs[cache].values()}) == 24
    return outputs


@pytest.mark.parametrize(
    "cache, retracts, options",
    [
        ("UnifiedRadixCache", False, {}),
        ("UnifiedRadixCache", True, {"swa_full_tokens_ratio": 0.2, "chunked_prefill_size": 128}),
        ("PureSWARadixCache", False, {}),
    ],
)
def test_where_memory_is_short_the_same_tokens_as_under_fcfs(tmp_path, monkeypatch, expected, cache, retracts, options):
    """Three of the four prefixes fit into the pool, without the rest of the requests."""
    monkeypatch.setenv("FEATHER_DEBUG_CHECK", "1")
    pools = {"max_total_tokens": 2000, "schedule_conservativeness": 0.01, **options}
    one = WindowServer(tmp_path, "feather", LAYERS[cache], **pools)
    assert one.scheduler.is_hybrid_swa and type(one.scheduler.tree_cache).__name__ == cache
    one.submit_groups()
    short = 0
    while one.step() is not None or one.scheduler.waiting_queue:
        short += one.feather.admission.state.deferrals.memory_is_short()
        assert one.steps < 1000
    assert short > 10 and one.feather.admission.stats()["deferrals"]["evicts"] > 0
    assert all(req.finished() and len(req.output_ids) == OUTPUTS for req in one.requests.values())
    retracted = {rid for rid, req in one.requests.items() if req.retraction_count}
    assert bool(retracted) == retracts
    # After a retraction 0.5.17 may go on with other tokens, under fcfs as well.
    others = expected[cache].keys() - retracted
    assert others and all(one.outputs()[rid] == expected[cache][rid] for rid in others)
    one.assert_nothing_left()
    one.close()
