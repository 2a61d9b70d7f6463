"""The support matrix, from the checks that refuse a start: model kinds, server modes, GPUs and SGLang releases.

A server is served if its model's kind, its mode, its GPU and its SGLang each are. A "yes" comes from running the check
on such a case, and names the test that shows it; a "no" is a row of the checks' own tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from feather_sglang.adapter.attention.limits import (
    LAYER_LIMITS,
    MODEL_LIMITS,
    LayerFacts,
    ModelFacts,
    left_to_another,
    packed_layers,
    refuse_capability,
)
from feather_sglang.adapter.hooks import SUPPORTED
from feather_sglang.adapter.refusals import PAT_FLAGS, first_limit
from feather_sglang.errors import FeatherError

KIND_TEST = "tests/sglang/test_model_kinds.py::test_the_tokens_of_sglangs_own_backend"
FP8_TEST = "tests/sglang/test_model_kinds.py::test_a_kv_cache_in_fp8"
DRAFT_TEST = "tests/sglang/test_speculation.py::test_the_tokens_without_speculation"
PREFILL_TEST = "tests/sglang/test_packed_prefill.py::test_the_tokens_of_torch_native_from_fewer_reads"
PAT_TEST = "tests/sglang/test_pat_backend.py::test_"
RANKS_TEST = "tests/sglang/test_data_parallel.py::test_the_tokens_of_sglangs_own_backend_on_each_rank"
MODE_TEST = "tests/sglang/test_server_modes.py::test_"
_FULL = LayerFacts(0, 32, 8, 128, 128, 0.088)
_WIDE = replace(_FULL, q_heads=48, kv_heads=1)
_WINDOW = replace(_FULL, window=127)
_POOL_WINDOW = replace(_WINDOW, in_window_pool=True)
_LATENT = replace(_FULL, q_heads=4, kv_heads=1, head_dim=576, v_head_dim=512, latent=True)
_SINKS = replace(_POOL_WINDOW, sinks=True), replace(_FULL, sinks=True)


@dataclass(frozen=True)
class ModelKind:
    """A kind of model that is served: what it is, examples, and the layers of the tiny model in its test."""

    name: str
    meaning: str
    examples: str
    layers: tuple[LayerFacts, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    gpu_shapes: tuple[str, ...] = ()  # of benchmarks/checks/check_models.py
    gpu_note: str = ""  # what of these was run, if not whole models

    @property
    def model(self) -> ModelFacts:
        """The facts that the checks judge."""
        layers = tuple(replace(layer, layer_id=number) for number, layer in enumerate(self.layers))
        return ModelFacts(layers=layers, **self.facts)


@dataclass(frozen=True)
class Mode:
    """A mode of a server: the arguments that make it, and what shows that it is served."""

    name: str
    shown_by: str
    arguments: dict[str, Any] = field(default_factory=dict)


KINDS = (
    ModelKind(
        "dense", "Every layer has full attention.", "Llama, Qwen2.5, Qwen3", (_FULL,) * 3,
        gpu_shapes=("llama-3.2-1b", "qwen2.5-7b", "qwen3-8b"),
    ),
    ModelKind(
        "experts", "Every layer has full attention, and MLPs are mixtures of experts.", "Qwen3-MoE, Mixtral",
        (_FULL,) * 3, gpu_shapes=("qwen3-30b-a3b",),
    ),
    ModelKind("multi-query", "Dozens of query heads share one KV head.", "StarCoder (48 heads)", (_WIDE,) * 2),
    ModelKind(
        "windows", "Layers with sliding windows alternate with full attention.", "Gemma 2 and 3",
        (_WINDOW, _FULL) * 2, gpu_shapes=("gemma-3-4b", "gemma-2-2b"),
    ),
    ModelKind(
        "window pool", "Layers with sliding windows keep their KV in a smaller pool of their own.",
        "models with SGLang's hybrid SWA memory", (_POOL_WINDOW, _FULL, _POOL_WINDOW), {"pool": "SWAKVPool"},
    ),
    ModelKind(
        "sinks", "As the kind `window pool`, and each head has an attention sink.", "gpt-oss", _SINKS * 2,
        {"pool": "SWAKVPool"}, ("gpt-oss-20b",),
    ),
    ModelKind(
        "chunks", "Layers with attention within chunks of the sequence stand beside full attention.", "Llama 4",
        (replace(_FULL, chunked=True), _FULL, replace(_FULL, chunked=True)), gpu_shapes=("llama-4-scout",),
    ),
    ModelKind(
        "score scaling", "Layers differ in the scale or the soft cap of their attention scores.", "-",
        (replace(_FULL, sm_scale=0.1), replace(_FULL, logit_soft_cap=2.0), replace(_FULL, logit_soft_cap=9.0)),
    ),
    ModelKind(
        "latent", "Every layer has latent attention (MLA), and none is sparse.", "DeepSeek V2 and V3, Kimi K2",
        (_LATENT,) * 3, {"pool": "MLATokenToKVPool", "full_pool": "MLATokenToKVPool"},
        ("deepseek-v2-lite", "deepseek-v3", "kimi-k2"),
        "V3 and K2: one GPU's part of 8, with 8 of 61 layers and 6 experts; never whole",
    ),
    ModelKind(
        "linear", "Layers with linear attention, which have no KV, stand beside full attention.", "Qwen3-Next, Qwen3.5",
        (_FULL,) * 2, {"pool": "HybridLinearKVPool"}, ("qwen3-next-80b-a3b",),
    ),
)  # fmt: skip
_TOKENS = f"{PAT_TEST}the_tokens_of_torch_native_from_fewer_reads"
MODES = (
    Mode("overlap scheduler", f"{PAT_TEST}in_the_overlap_schedulers_order"),
    Mode("CUDA graphs", f"{PAT_TEST}a_replay_with_padding_after_a_capture"),
    Mode("pages of 16 tokens", f"{_TOKENS}[page_size]", {"page_size": 16}),
    Mode("chunked and mixed prefill", f"{_TOKENS}[chunked_prefill_size-enable_mixed_chunk]"),
    Mode("packed prefill (--feather-pat-prefill)", f"{PREFILL_TEST}[plain]"),
    Mode("a feather policy", f"{_TOKENS}[policy]", {"schedule_policy": "feather-order"}),
    Mode("no prefix cache (--disable-radix-cache)", f"{_TOKENS}[disable_radix_cache]", {"disable_radix_cache": True}),
    Mode("retracted and aborted requests", f"{PAT_TEST}retractions_and_aborts"),
    Mode("hierarchical cache in host memory", f"{MODE_TEST}prefixes_come_back_from_the_host"),
    Mode("LoRA with many adapters", f"{MODE_TEST}requests_of_other_adapters_share_nothing", {"enable_lora": True}),
    Mode("sessions, also streaming ones", f"{MODE_TEST}sessions"),
    Mode("beam search, where nothing is shared", f"{MODE_TEST}beams_beside_others"),
    Mode("pages of 64 tokens", f"{MODE_TEST}pages_of_64", {"page_size": 64}),
    Mode("--kv-cache-dtype fp8_e4m3", FP8_TEST, {"kv_cache_dtype": "fp8_e4m3"}),
    *(
        Mode(
            f"{names}, with drafts in chains",
            f"{DRAFT_TEST}[{name}-pat-OverlapServer]",
            {"speculative_algorithm": name, "speculative_eagle_topk": 1},
        )
        for name, names in (("EAGLE", "EAGLE, EAGLE3, NEXTN"), ("STANDALONE", "STANDALONE"), ("NGRAM", "NGRAM"))
    ),
    Mode(
        "--speculative-draft-attention-backend pat: the decode steps of a draft model",
        "tests/sglang/test_speculation.py::test_drafts_by_pat[STANDALONE-OverlapServer]",
        {"speculative_algorithm": "STANDALONE", "speculative_eagle_topk": 1},
    ),
    Mode("data-parallel attention", RANKS_TEST, {"enable_dp_attention": True, "attn_dp_size": 2}),
    Mode("tensor parallelism", "benchmarks/checks/check_pat_server.py --variants tp2", {"tp_size": 2}),
)
CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
GPU_TESTS = {90: "tests/gpu/test_decode_kernel.py"}  # what has run on a GPU of that architecture
GPUS = {  # by compute capability x 10
    90: "H200, H100, GH200",
    80: "A100, A30",
    100: "B200, GB200",
    120: "RTX PRO 6000 Blackwell, RTX 5090",
    89: "L40S, L4, RTX 6000 Ada, RTX 4090",
    86: "A40, A10, RTX 3090",
    75: "T4",
}
EACH_CHANGE = "for each change: python3 dev.py test"
AT_TIMES = "hooks, patches, a start and 30 requests: python3 dev.py versions; tests on demand, with --releases={}"


_KIND_HEADS = ("kind", "what it is", "such as", "layers that its test packs", "checked on a GPU", "shown by")


def kind_rows() -> list[tuple[str, str, str, str, str, str]]:
    """A row for every kind that is served, under `_KIND_HEADS`."""
    rows = []
    for kind in KINDS:
        packed = packed_layers(kind.model)
        others = [limit for layer in kind.model.layers if (limit := left_to_another(layer))]
        does = "all" if not others else f"{len(packed)} of {len(kind.layers)}, those without {others[0]}"
        shapes, test = ", ".join(kind.gpu_shapes), f"{KIND_TEST}[{kind.name}]"
        shapes += f" ({kind.gpu_note})" if kind.gpu_note else ""
        rows.append((kind.name, kind.meaning, kind.examples, does, shapes, test))
    return rows


def mode_rows() -> list[tuple[str, str, str]]:
    """(mode, yes or no, what shows it) of a server."""
    rows = []
    for mode in MODES:
        if limit := first_limit(PAT_FLAGS, SimpleNamespace(**mode.arguments)):
            raise FeatherError(f"the matrix says that {mode.name} is served, and the checks refuse {limit.what}")
        rows.append((mode.name, "yes", mode.shown_by))
    return rows + [(limit.title, "no", "") for limit in PAT_FLAGS]


def gpu_rows() -> list[tuple[str, str, str]]:
    """(compute capability, yes, no, or untested where the checks let it pass and nothing has shown it; what has)."""
    rows = []
    for major, minor in CAPABILITIES:
        try:
            refuse_capability(major, minor, unproven=True)
        except FeatherError:
            rows.append((f"{major}.{minor}", "no", ""))
        else:
            test = GPU_TESTS.get(10 * major + minor, "")
            rows.append((f"{major}.{minor}", "yes" if test else "untested: --feather-unproven-gpu on", test))
    return rows


def limit_rows() -> list[tuple[str, str]]:
    """(what, what becomes of it) of every limit of a model and of a layer."""
    return [(limit.title, "refuses the model") for limit in MODEL_LIMITS] + [
        (limit.title, "leaves the layer to SGLang's backend") for limit in LAYER_LIMITS
    ]


def release_rows() -> list[tuple[str, str, str]]:
    """(release, yes, what is run on it) of each that is supported; each has pins in requirements/."""
    run = {name: AT_TIMES.format(name) for name in SUPPORTED}
    run[SUPPORTED[0]], run[SUPPORTED[-1]] = f"tests/sglang, tests/server, {EACH_CHANGE}", f"all tests, {EACH_CHANGE}"
    return [(name, "yes", text) for name, text in run.items()]


def tables() -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """(title, heads, rows) of each part of the matrix."""
    return [
        ("Model kinds", _KIND_HEADS, list(kind_rows())),
        ("Models and layers that it does not pack", ("model or layer", "what pat does"), list(limit_rows())),
        ("Modes of a server", ("mode", "served", "shown by"), list(mode_rows())),
        ("GPUs", ("compute capability", "served", "shown by"), list(gpu_rows())),
        ("SGLang", ("release", "served", "what is run on it"), list(release_rows())),
    ]
