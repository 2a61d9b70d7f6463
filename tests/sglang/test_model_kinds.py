"""Models whose layers differ, tiny and in the real scheduler: pat packs what it can, and the rest runs beside it."""

import itertools
import json
import os
import pickle
from types import SimpleNamespace

import drafting
import numpy as np
import plain_attention
import pytest
import torch
from harness import CONFIG, OverlapServer, Server
from plain_attention import STAND_IN, PlainAttention
from sglang.srt.layers.attention import base_attn_backend
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.qwen3_next import Qwen3GatedDeltaNet
from sglang.srt.runtime_context import get_resources

from effort import newest_is_enough, samples
from feather_sglang.adapter.attention import beside, matrix
from feather_sglang.adapter.attention.facts import facts_of
from feather_sglang.adapter.attention.limits import left_to_another
from feather_sglang.adapter.attention.metrics import pat_metrics
from feather_sglang.adapter.options import VARIABLE
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.admission.rules import OvertakingBound
from feather_sglang.scheduling.admission.types import Verdict

WINDOW = CHUNK = 32
_LLAMA = {**CONFIG, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
_GATED = {"mlp_only_layers": [], "norm_topk_prob": True}
_SLIDING = ["sliding_attention", "full_attention"]


class Kind(SimpleNamespace):
    """A model: its configuration, the layers that pat packs, and what is set on layers once it is loaded.

    Prefixes of `prefix` tokens are worth sharing.
    """

    def __init__(self, config, packed, pool="MHATokenToKVPool", layers=None, prefix=130, **config_fields):
        config = {**config, **config_fields}
        super().__init__(config=config, packed=packed, pool=pool, layers=layers or {}, prefix=prefix)


KINDS = {
    "dense": Kind(_LLAMA, [0, 1, 2]),
    "experts": Kind(
        {**_LLAMA, **_EXPERTS, **_GATED}, [0, 1, 2], architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe"
    ),
    "multi-query": Kind(
        _LLAMA, [0, 1], prefix=300, hidden_size=48, num_hidden_layers=2, num_attention_heads=24, num_key_value_heads=1,
    ),
    "windows": Kind(
        {**_LLAMA, "num_hidden_layers": 4}, [1, 3], architectures=["Gemma3ForCausalLM"], model_type="gemma3_text",
        sliding_window=WINDOW, sliding_window_pattern=2, layer_types=_SLIDING * 2, query_pre_attn_scalar=16,
        hidden_activation="gelu_pytorch_tanh", pad_token_id=0,
    ),
    "window pool": Kind(
        _LLAMA, [1], "SWAKVPool", {0: {"sliding_window_size": WINDOW - 1}, 2: {"sliding_window_size": WINDOW - 1}},
        is_hybrid_swa=True, hybrid_layer_pattern=[1, 0, 1], sliding_window=WINDOW,
    ),
    "sinks": Kind(
        {**_LLAMA, "num_hidden_layers": 4}, [1, 3], "SWAKVPool", architectures=["GptOssForCausalLM"],
        model_type="gpt_oss", sliding_window=WINDOW, layer_types=_SLIDING * 2, num_local_experts=4,
        num_experts_per_tok=2, swiglu_limit=7.0,
    ),
    "chunks": Kind(
        _LLAMA, [1], layers={0: {"use_irope": True}, 2: {"use_irope": True}}, attention_chunk_size=CHUNK
    ),
    "score scaling": Kind(
        _LLAMA, [0, 1, 2], layers={0: {"scaling": 0.1}, 1: {"logit_cap": 2.0}, 2: {"logit_cap": 9.0}}
    ),
    "latent": Kind(
        _LLAMA, [0, 1, 2], "MLATokenToKVPool", architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2",
        num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=16,
        v_head_dim=16, first_k_dense_replace=3, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        moe_intermediate_size=32, n_group=1, topk_group=1, topk_method="greedy", moe_layer_freq=1,
        rope_scaling={
            "type": "yarn", "factor": 4, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1,
            "mscale": 0.707, "mscale_all_dim": 0.707,
        },
    ),
    "linear": Kind(
        {**_LLAMA, **_EXPERTS, **_GATED, "num_hidden_layers": 4}, [1, 3], "HybridLinearKVPool",
        architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", full_attention_interval=2,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        linear_conv_kernel_dim=4, shared_expert_intermediate_size=0, partial_rotary_factor=0.25,
    ),
}  # fmt: skip


def remember(layer, hidden, forward_batch):
    """A recurrence that needs no GPU in place of the gated delta rule: a decaying sum, kept in SGLang's state slots."""
    pool = forward_batch.req_to_token_pool if hasattr(forward_batch, "req_to_token_pool") else remember.pool
    states = pool.mamba2_layer_cache(layer.layer_id).temporal
    slots = pool.get_mamba_indices(forward_batch.req_pool_indices).tolist()
    decodes = forward_batch.forward_mode.is_decode()
    counts = [1] * len(slots) if decodes else forward_batch.extend_seq_lens.tolist()
    begun = [True] * len(slots) if decodes else (forward_batch.extend_prefix_lens > 0).tolist()
    out, place, width = torch.empty_like(hidden), 0, hidden.shape[1]
    for slot, count, goes_on in zip(slots, counts, begun, strict=True):
        kept = states[slot].view(-1)[:width]
        state = kept.clone() if goes_on else torch.zeros(width)
        for token in range(place, place + count):
            state = 0.8 * state + hidden[token]
            out[token] = torch.tanh(state)
        kept.copy_(state)
        place += count
    return out


@pytest.fixture
def environment(monkeypatch):
    """The reference instead of the kernel, a look at the slots after every step, and backends for a CPU."""
    monkeypatch.setenv("FEATHER_PAT_REFERENCE", "1")
    monkeypatch.setenv("FEATHER_DEBUG_CHECK", "1")
    monkeypatch.setenv(beside.COARSE_BARRIER, "0")  # which some set, so that this is undone
    plain_attention.install(monkeypatch)
    monkeypatch.setattr(Qwen3GatedDeltaNet, "forward", remember)


@pytest.fixture
def server(tmp_path, environment, monkeypatch):
    made = []

    def make(name, backend=None, kind=Server, stock=STAND_IN, policy="fcfs", **overrides):
        forget_experts()
        flags = {"attention_backend": stock, "decode_attention_backend": backend, **overrides}
        with monkeypatch.context() as patch:
            change_layers(patch, KINDS[name].layers)
            one = kind(tmp_path, policy, config=KINDS[name].config, **flags)
        made.append(one)
        remember.pool = runner_of(one).req_to_token_pool
        spread_weights(runner_of(one).model)
        return one

    yield make
    for one in made:
        one.close()
    forget_experts()


def forget_experts():
    """SGLang keeps where they are once per process, and takes them for the next model's."""
    get_resources().expert_location_metadata = None


def change_layers(patch, layers):
    """Let a model's layers come into being with other values, by layer."""
    original = RadixAttention.__init__

    def init(layer, *args, **kwargs):
        original(layer, *args, **kwargs)
        for key, value in layers.get(layer.layer_id, {}).items():
            setattr(layer, key, value)

    patch.setattr(RadixAttention, "__init__", init)


def runner_of(server):
    return server.scheduler.tp_worker.model_runner


def attention_layers(server):
    layers = [layer for layer in runner_of(server).model.modules() if isinstance(layer, RadixAttention)]
    return {layer.layer_id: layer for layer in layers}


def spread_weights(model):
    """Weights with which tokens depend on the whole prompt, which they hardly do with SGLang's dummy weights."""
    generator = torch.Generator().manual_seed(5)
    for name, weights in model.named_parameters():
        drawn = torch.randn(weights.shape, generator=generator)
        if weights.dim() == 1:
            weights.data.copy_(torch.ones(weights.shape) if "norm" in name else drawn)
        else:
            weights.data.copy_(drawn * 2 * weights.shape[-1] ** -0.5)
    if hasattr(model, "post_load_weights"):  # of latent attention, where some are kept in another form, too
        model.post_load_weights()


def serve(server, prefix=130):
    """Tokens and logprobs of requests in three groups that arrive and end at different times."""
    rng = np.random.default_rng(0)
    prefixes = rng.integers(2, 500, (3, prefix)).tolist()
    prompts = [prefixes[i % 3] + rng.integers(2, 500, 5 + i % 7).tolist() for i in range(10)]
    prompts += [prompts[4], prompts[4], prompts[4][:100], [5, 6, 7]]
    for i, prompt in enumerate(prompts):
        assert server.submit(f"r{i:02}", prompt, max_new_tokens=8 + (5 * i) % 23, logprobs=1)
        if i % 4 == 3:
            server.step()
    server.drain()
    return {
        rid: (list(req.output_ids), list(getattr(req, "logprob", req).output_token_logprobs_val))
        for rid, req in server.requests.items()
    }


def assert_same(got, expected):
    assert {rid: tokens for rid, (tokens, _) in got.items()} == {rid: tokens for rid, (tokens, _) in expected.items()}
    assert len({tuple(tokens) for tokens, _ in expected.values()}) >= len(expected) - 3
    for rid, (_, logprobs) in got.items():
        assert logprobs == pytest.approx(expected[rid][1], abs=1e-3)


def tokens_read():
    metrics = pat_metrics()
    return np.array([metrics.attended._value.get(), metrics.read._value.get()])


@pytest.fixture
def stock(server):
    """Answers of a kind's model on SGLang's own backend, which are computed once."""

    def answers(name):
        if name not in STOCK:
            STOCK[name] = serve(server(name), KINDS[name].prefix)
        return STOCK[name]

    return answers


STOCK = {}


@pytest.mark.parametrize("name", KINDS)
def test_the_tokens_of_sglangs_own_backend(server, stock, name):
    kind = KINDS[name]
    expected = stock(name)
    before = tokens_read()
    one = server(name, "pat")
    backend = runner_of(one).feather_pat
    assert type(runner_of(one).token_to_kv_pool).__name__ == kind.pool
    assert_same(serve(one, kind.prefix), expected)
    attended, read = tokens_read() - before
    assert 0 < read < 0.8 * attended
    others = sorted(set(attention_layers(one)) - set(kind.packed))
    assert [layer for layer in attention_layers(one) if layer in backend.planner.engines] == kind.packed
    assert sorted(backend.beside.calls if backend.beside else []) == others
    assert len(backend.planner.engines.plans) == 1  # for layers that differ in scores only
    facts, line = facts_of(runner_of(one), True), next(line.model for line in matrix.KINDS if line.name == name)
    assert [left_to_another(layer) for layer in facts.layers] == [left_to_another(layer) for layer in line.layers]
    assert (facts.pool, facts.full_pool) == (line.pool, line.full_pool)
    assert [layer.sinks for layer in facts.layers] == [layer.sinks for layer in line.layers]
    assert [group_is_wide(layer) for layer in facts.layers] == [group_is_wide(layer) for layer in line.layers]


def group_is_wide(layer):
    """Whether a request's heads of one KV head are too many for a warp's tile."""
    return layer.q_heads > 16 * layer.kv_heads


N_GRAMS = {
    "speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1, "speculative_num_draft_tokens": 4,
    "speculative_attention_mode": "decode", "max_running_requests": 24,
}  # fmt: skip


@newest_is_enough
@pytest.mark.parametrize("name", ["windows", "window pool", "sinks", "chunks", "score scaling", "latent"])
def test_drafts_are_verified_by_all_layers(server, monkeypatch, name):
    drafting.install(monkeypatch)
    expected = serve(server(name))
    one = server(name, "pat", **N_GRAMS)
    for rid, (tokens, _) in serve(one).items():  # which may be more than asked for
        assert tokens[: len(expected[rid][0])] == expected[rid][0]
    assert runner_of(one).feather_pat.drafts == 4


def test_the_matrix_has_these_kinds():
    assert [line.name for line in matrix.KINDS] == list(KINDS)


@newest_is_enough
@pytest.mark.parametrize("name", ["dense", "experts", "windows"])
def test_what_stands_in_for_gpu_backends_is_right(server, stock, name):
    """SGLang's backend for CPUs can serve these, too."""
    assert_same(stock(name), serve(server(name, stock="torch_native")))
    assert_same(serve(server(name, "pat", stock="torch_native")), stock(name))


SCALES = {"k": 0.125, "v": 2.0}


@newest_is_enough
@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("dense", {}),
        ("score scaling", SCALES),
        ("sinks", SCALES),
        ("dense", SCALES),
        ("score scaling", {}),
        ("sinks", {}),
    ][: samples(6, 3)],
)
def test_a_kv_cache_in_fp8(server, stock, name, scales, monkeypatch):
    """SGLang's backend for CPUs cannot read one, so `PlainAttention` alone says what is right."""
    kind, own, exact = KINDS[name], {}, stock(name)
    for which, scale in scales.items():
        own |= {f"{which}_scale": torch.tensor(scale), f"{which}_scale_float": scale}
    layers = {layer: kind.layers.get(layer, {}) | own for layer in range(kind.config["num_hidden_layers"])}
    monkeypatch.setitem(KINDS, name, SimpleNamespace(config=kind.config, layers=layers))
    expected = serve(server(name, kv_cache_dtype="fp8_e4m3"))
    one = server(name, "pat", kv_cache_dtype="fp8_e4m3")
    pool = runner_of(one).token_to_kv_pool
    assert pool.get_key_buffer(kind.packed[0]).dtype == torch.float8_e4m3fn
    assert_same(serve(one), expected)
    engines = runner_of(one).feather_pat.planner.engines
    assert [layer for layer in attention_layers(one) if layer in engines] == kind.packed
    assert any(got[1] != pytest.approx(exact[rid][1], abs=1e-3) for rid, got in expected.items())


def test_other_kv_caches_of_8_bits_are_refused(server, monkeypatch):
    monkeypatch.setattr(torch, "float8_e4m3fn", torch.float8_e5m2)  # SGLang refuses it on a CPU itself
    with pytest.raises(FeatherError, match=r"^the pat backend does not support a KV cache of float8_e5m2 under"):
        server("dense", "pat", kv_cache_dtype="fp8_e4m3")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("sinks", {"kind": OverlapServer}),  # which SGLang has for linear attention on a GPU only
        ("sinks", {"policy": "feather"}),
        ("linear", {"policy": "feather"}),
        ("latent", {"kind": OverlapServer, "policy": "feather"}),
    ],
    ids=["sinks-overlap", "sinks-feather", "linear-feather", "latent-overlap-feather"],
)
def test_under_overlap_and_a_policy(server, stock, name, overrides):
    assert_same(serve(server(name, "pat", **overrides)), stock(name))


def test_where_windows_are_evicted_and_requests_retracted(server, monkeypatch):
    """Now and then the pool looks full."""
    fits, answers = ScheduleBatch.check_decode_mem, {}
    for backend in ("pat", None):
        one, calls = server("sinks", backend, swa_full_tokens_ratio=0.1), itertools.count()
        with monkeypatch.context() as patch:
            patch.setattr(ScheduleBatch, "check_decode_mem", lambda *a, n=calls, **k: next(n) % 4 and fits(*a, **k))
            answers[backend] = serve(one)
        assert sum(req.retraction_count for req in one.requests.values()) > 3
    assert_same(answers["pat"], answers[None])


def test_the_backend_beside_can_be_named(server, monkeypatch):
    monkeypatch.setitem(ATTENTION_BACKENDS, "fa4", PlainAttention)
    monkeypatch.setenv(VARIABLE, '{"pat_beside": "fa4"}')
    one = server("windows", "pat")
    assert pickle.loads(pickle.dumps(runner_of(one).server_args))._feather_beside == "fa4"  # in another process
    monkeypatch.setenv(VARIABLE, '{"pat_beside": "nothing"}')
    with pytest.raises(FeatherError, match=r"^--feather-pat-beside nothing: SGLang has no such backend .* has .*fa3"):
        server("windows", "pat")


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("sinks", "flashinfer", r"^--feather-pat-beside flashinfer: GptOss.* but got .* Decode: flashinfer"),
        (
            "windows",
            "wave",
            r"^wave cannot decode beside pat \(ImportError: no wave here\): name another",
        ),
    ],
)
def test_a_backend_beside_that_cannot_be_there_is_said_in_one_line(server, monkeypatch, kind, name, says):
    def absent(runner):
        raise ImportError("no wave\n here")

    monkeypatch.setitem(ATTENTION_BACKENDS, "wave", absent)
    monkeypatch.setenv(VARIABLE, json.dumps({"pat_beside": name}))
    with pytest.raises(FeatherError, match=says) as error:
        server(kind, "pat")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "late"), [("fa3", False), ("triton", False), ("trtllm_mha", True), ("hpc_ops", True)])
def test_the_table_of_slots_keeps_still_while_a_backend_beside_reads_it(monkeypatch, name, late):
    """In a graph: to 0.5.17 SGLang cannot know, and would write to it as soon as a replay begins."""
    monkeypatch.setenv(beside.COARSE_BARRIER, "0")
    monkeypatch.setitem(ATTENTION_BACKENDS, name, lambda runner: name)
    runner = SimpleNamespace(server_args=SimpleNamespace(_feather_beside=name))
    assert beside.create_beside(runner, 3) == name
    asked = hasattr(base_attn_backend, "SharedReadEnds")
    assert os.environ[beside.COARSE_BARRIER] == ("1" if late and not asked else "0")


def test_a_backend_beside_that_has_nothing_to_do_is_said(server, monkeypatch, caplog):
    monkeypatch.setenv(VARIABLE, '{"pat_beside": "fa3"}')
    with caplog.at_level("WARNING", "feather_sglang"):
        one = server("dense", "pat")
    assert runner_of(one).feather_pat.beside is None
    assert "--feather-pat-beside fa3" in caplog.text


def test_a_model_with_windows_only_is_refused(server, monkeypatch):
    windows = {"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 1, 1], "sliding_window": WINDOW}
    monkeypatch.setitem(KINDS, "windows only", Kind(_LLAMA, [], **windows))
    with pytest.raises(
        FeatherError, match=r"can pack no layer of this model \(KV in the pool for sliding windows\): choose"
    ):
        server("windows only", "pat")


class Recorder:
    """Notes every call, by name."""

    def __init__(self):
        self.called = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.called.append((name, kwargs))


def test_the_backend_beside_is_told_of_every_step(server):
    """As SGLang calls a backend: with the graph around a capture, with the graph around a replay, and without one."""
    one = server("windows", "pat")
    backend, rows = runner_of(one).feather_pat, torch.zeros(2, dtype=torch.int64)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, seq_lens=torch.ones(2, dtype=torch.int64), req_pool_indices=rows
    )
    backend.beside = recorder = Recorder()
    backend.init_cuda_graph_state(4, 4)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.on_after_cuda_graph_warmup()
    backend.init_forward_metadata_in_graph(batch)
    backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata(batch)
    assert [name for name, _ in recorder.called] == [
        "init_cuda_graph_state", "init_forward_metadata_out_graph", "on_after_cuda_graph_warmup",
        "init_forward_metadata_in_graph", "init_forward_metadata_out_graph", "init_forward_metadata",
    ]  # fmt: skip
    assert recorder.called[1][1] == {"in_capture": True} and recorder.called[4][1] == {"in_capture": False}
    backend.forward_decode(None, None, None, attention_layers(one)[0], batch, sinks=1)
    assert recorder.called[-1] == ("forward_decode", {"sinks": 1})


def test_what_sglang_would_decode_with_is_beside():
    """Its own choice for decoding counts before its choice for both, and is remembered once."""
    args = SimpleNamespace(decode_attention_backend="pat", attention_backend=None, prefill_attention_backend=None)
    seen = []

    def resolve(args):
        seen.append(args.decode_attention_backend)
        args._resolved_overrides = [("a", {"attention_backend": "fa3"}), ("b", {"decode_attention_backend": "triton"})]

    beside.resolve_beside(resolve, args)
    assert seen == [None] and args._feather_beside == "triton" and args.decode_attention_backend == "pat"
    assert beside.resolved(args, "decode_attention_backend") == "pat"
    beside.resolve_beside(lambda args: seen.append(args.decode_attention_backend), args)  # in the scheduler's process
    assert seen == [None, "pat"] and args._feather_beside == "triton"
    with pytest.raises(FeatherError, match="name it with --feather-pat-beside"):
        beside.create_beside(SimpleNamespace(server_args=SimpleNamespace()), 3)


@pytest.mark.parametrize("policy", ["feather", "feather-bandit"])
def test_no_state_slot_of_linear_layers_is_lost(server, monkeypatch, policy):
    """Of twelve; requests share prefixes, are retracted, and are aborted while they wait or run."""
    fits, answers = ScheduleBatch.check_decode_mem, {}
    for name, backend in (("fcfs", None), (policy, "pat")):
        one = server("linear", backend, policy=name, max_mamba_cache_size=12, max_running_requests=4)
        calls = itertools.count()
        rng = np.random.default_rng(1)
        prefixes = rng.integers(2, 500, (3, 90)).tolist()
        with monkeypatch.context() as patch:
            patch.setattr(ScheduleBatch, "check_decode_mem", lambda *a, n=calls, **k: next(n) % 5 and fits(*a, **k))
            for number in range(30):
                prompt = prefixes[number % 3] + rng.integers(2, 500, 6).tolist()
                assert one.submit(f"r{number:02}", prompt, max_new_tokens=9)
                if number % 4 == 3:
                    one.step()
                if number % 7 == 6:
                    one.abort(f"r{number:02}")
                    one.abort(f"r{number - 5:02}")
            one.drain()
        one.assert_nothing_left()
        slots, cache = runner_of(one).req_to_token_pool.mamba_allocator, one.scheduler.tree_cache
        assert slots.available_size() + cache.mamba_evictable_size() == 12 and cache.mamba_evictable_size() > 3
        assert sum(req.retraction_count for req in one.requests.values()) > 3
        assert one.scheduler.flush_cache() and slots.available_size() == 12
        answers[name] = {rid: tokens for rid, tokens in one.outputs().items() if len(tokens) == 9}
    shared = set(answers["fcfs"]) & set(answers[policy])
    assert len(shared) > 20 and len({tuple(answers["fcfs"][rid]) for rid in shared}) > 15
    assert {rid: answers[policy][rid] for rid in shared} == {rid: answers["fcfs"][rid] for rid in shared}


@newest_is_enough
def test_who_is_deferred_holds_no_state_slot(server, monkeypatch):
    """SGLang's look-up has given each of these one to copy a cached state to, and there are fewer than requests."""
    one = server("linear", policy="feather", max_mamba_cache_size=12, max_running_requests=4)
    rng = np.random.default_rng(1)
    prefix = rng.integers(2, 500, 600).tolist()
    assert one.submit("first", prefix, max_new_tokens=2)
    one.drain()
    prefix += one.requests["first"].output_ids  # where its state is kept
    deferred, slots = [], runner_of(one).req_to_token_pool.mamba_allocator
    free = slots.available_size()

    def check(rule, proposal, opened):
        late = proposal.request_id.startswith("late") and one.steps < 40
        deferred.extend([proposal.cached] * late)
        return Verdict.OVERTAKES if late else Verdict.ADMIT

    monkeypatch.setattr(OvertakingBound, "check", check)
    for number in range(15):
        assert one.submit(f"late{number}", prefix + rng.integers(2, 500, 6).tolist(), max_new_tokens=2)
    for number in range(4):
        assert one.submit(f"now{number}", rng.integers(2, 500, 80).tolist(), max_new_tokens=9)
    assert one.feather.admission.state.cached_prefixes.tokens("late9") > 590  # looked up as it arrived
    assert slots.available_size() == free
    one.step()
    assert not any(rid.startswith("late") and holds_state(req) for rid, req in one.requests.items())
    one.abort("late7")
    one.drain()
    assert len(deferred) > 30 and min(deferred[:8]) > 590
    one.assert_nothing_left()
    assert slots.available_size() + one.scheduler.tree_cache.mamba_evictable_size() == 12


def holds_state(req):
    owner = req if hasattr(req, "mamba_pool_idx") else req.kv  # since 0.5.19
    return owner.mamba_pool_idx is not None
