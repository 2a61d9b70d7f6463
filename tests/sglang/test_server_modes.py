"""Modes of a server in the real scheduler: under pat, and under a policy too, the tokens of SGLang's own."""

import numpy as np
import pytest
import torch
import unpinned
from harness import CONFIG, OverlapServer, Server, runner_of, spread_weights, tokenized
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import CloseSessionReqInput, OpenSessionReqInput, SessionParams
from sglang.srt.mem_cache.pool_host import common, mha
from sglang.srt.sampling.sampling_params import SamplingParams

from feather_sglang.adapter.attention.metrics import pat_metrics
from feather_sglang.adapter.hooks import installed_version, lacks_pages

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


def copy_layers(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """What SGLang's kernel does."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


@pytest.fixture
def host_cache(monkeypatch):
    """SGLang's hierarchical cache on a CPU: nothing to pin, and copies from layer to layer instead of its kernel."""
    monkeypatch.setattr(common, "_cuda_host_register", lambda *args, **kwargs: None)
    monkeypatch.setattr(mha, "transfer_kv_direct", copy_layers, raising=False)
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


# LoRA -----------------------------------------------------------------------------------------------------------

PROJECTIONS = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 32}
RANK = 4


def load_adapters(server, count):
    generator = torch.Generator().manual_seed(3)
    config = {"r": RANK, "lora_alpha": 8, "target_modules": list(PROJECTIONS), "peft_type": "LORA"}
    for number in range(count):
        tensors = {}
        for layer in range(LAYERS):
            for name, width in PROJECTIONS.items():
                module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, 32, generator=generator) * 0.3
                tensors[f"{module}.lora_B.weight"] = torch.randn(width, RANK, generator=generator) * 0.3
        adapter = LoRARef(lora_id=f"id{number}", lora_name=f"adapter{number}", lora_path="__tensor__", pinned=False)
        result = runner_of(server).lora_manager.load_lora_adapter_from_tensors(adapter, tensors, config)
        assert result.success, result.error_message


def adapters_of_packs(server, batch):
    """Of each node of the forest that the batch's plan is of: the adapters of the requests that read it."""
    forest, found = runner_of(server).feather_pat.planner.in_force.forest, {}
    for req, node in zip(batch.reqs, forest.request_node.tolist(), strict=True):
        while node >= 0:
            found.setdefault(node, set()).add(req.lora_id)
            node = int(forest.parent[node])
    return list(found.values())


def serve_adapters(server):
    """Equal prefixes under four adapters and none; returns the tokens, and the adapters of every batch and pack."""
    load_adapters(server, 4)
    generator = np.random.default_rng(0)
    prefix, together, packs = draw(generator, 130), [], []
    prompts = [prefix + draw(generator, 5 + i % 7) for i in range(5)]
    for number in range(25):
        lora_id = f"id{number % 5}" if number % 5 < 4 else None
        server.submit(f"r{number:02}", prompts[number // 5], lora_id=lora_id, max_new_tokens=6 + number % 9)
    while (batch := server.step()) is not None or server.scheduler.waiting_queue:
        if batch is not None and batch.forward_mode.is_decode():
            together.append({req.lora_id for req in batch.reqs})
            if hasattr(runner_of(server), "feather_pat"):
                packs += adapters_of_packs(server, batch)
    return server.outputs(), together, packs


@under
def test_requests_of_other_adapters_share_nothing(server, monkeypatch, policy, kind):
    """Three adapters at a time, or two and the model itself, have room in a batch."""
    unpinned.install(monkeypatch)
    flags = {
        "enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": list(PROJECTIONS),
        "max_loras_per_batch": 3, "lora_backend": "torch_native",
    }  # fmt: skip
    expected, _, _ = serve_adapters(server(backend=None, **flags))
    assert len({tuple(tokens) for tokens in expected.values()}) > 20  # prompts are equal, adapters are not
    before = tokens_read()
    one = server(policy, kind, **flags)
    got, together, packs = serve_adapters(one)
    assert got == expected
    assert max(map(len, together)) == 3 and len(packs) > 50 and all(len(pack) == 1 for pack in packs)
    assert share_read(before) < 0.7
    one.assert_nothing_left()


# Sessions -------------------------------------------------------------------------------------------------------


def serve_sessions(server, streaming):
    """Four sessions of four turns with one beginning, beside requests that share it."""
    scheduler, generator = server.scheduler, np.random.default_rng(0)
    prefix, last = draw(generator, 130), {}
    names = [f"s{number}" for number in range(4)]
    for name in names:
        opened = OpenSessionReqInput(capacity_of_str_len=1000, session_id=name, streaming=streaming)
        assert scheduler.open_session(opened).success
    for turn in range(4):
        for number, name in enumerate(names):
            params = SamplingParams(max_new_tokens=5 + number + turn, temperature=0.0, ignore_eos=True)
            rid, tokens = f"{name}-{turn}", draw(generator, 30 + number)
            session = SessionParams(id=name, rid=None if streaming else last.get(name))
            request = tokenized(rid, tokens if turn else prefix + tokens, params, session_params=session)
            scheduler.handle_generate_request(request)
            server.requests[rid] = scheduler.waiting_queue[-1]
            last[name] = rid
            server.submit(f"beside-{name}-{turn}", prefix + draw(generator, 9), max_new_tokens=7)
            server.step()
        server.drain()
    server.step()
    assert all(len(server.requests[f"{name}-3"].origin_input_ids) > 250 for name in names)
    for name in names:
        scheduler.close_session(CloseSessionReqInput(session_id=name))
    return server.outputs()


@pytest.mark.parametrize("streaming", [False, True], ids=["sessions", "streaming"])
@under
def test_sessions(server, policy, kind, streaming):
    flags = {"enable_streaming_session": streaming}
    expected = serve_sessions(server(backend=None, **flags), streaming)
    before = tokens_read()
    one = server(policy, kind, **flags)
    assert serve_sessions(one, streaming) == expected
    assert share_read(before) < 0.8
    one.assert_nothing_left()


# Beam search ----------------------------------------------------------------------------------------------------


def serve_beams(server):
    """Every fourth request has beams; returns what each client gets, and (requests, rows) of every decode batch."""
    generator, sizes = np.random.default_rng(0), []
    prefix = draw(generator, 130)
    for number in range(18):
        beams = {"beam_width": 2 + number % 3, "n": 2} if number % 4 == 1 else {}
        prompt = prefix + draw(generator, 5 + number % 7)
        assert server.submit(f"r{number:02}", prompt, max_new_tokens=9 if beams else 6 + 2 * number, **beams)
        server.step()
    while (batch := server.step()) is not None or server.scheduler.waiting_queue:
        if batch is not None and batch.forward_mode.is_decode():
            sizes.append((len(batch.reqs), len(batch.req_pool_indices)))
    return {
        rid: [beam.tokens for beam in req.beam_group.final_results] if req.beam_group else list(req.output_ids)
        for rid, req in server.requests.items()
    }, sizes


@under
def test_beams_beside_others(server, policy, kind):
    pytest.importorskip("sglang.srt.beam_search", reason="this SGLang has no beam search")
    expected, _ = serve_beams(server(backend=None))
    assert all(len(answer) > 1 for answer in expected.values())
    before = tokens_read()
    one = server(policy, kind)
    got, sizes = serve_beams(one)
    assert got == expected
    assert any(rows > requests for requests, rows in sizes) and any(rows == requests for requests, rows in sizes)
    assert share_read(before) < 0.8
    one.assert_nothing_left()


# Pages ----------------------------------------------------------------------------------------------------------


@under
def test_pages_of_64(server, policy, kind):
    if lacks_pages(installed_version()):
        pytest.skip("this SGLang allocates pages with a GPU kernel")
    expected = rounds_of_prefixes(server(backend=None))
    before = tokens_read()
    one = server(policy, kind, page_size=64)
    assert rounds_of_prefixes(one) == expected
    assert share_read(before) < 0.8
    one.step()
    one.assert_pools_full()
