"""What the pat backend cannot serve: found when it is built, each with one line that says what to do."""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from feather_sglang.adapter.refusals import ANOTHER_BACKEND as _ELSE
from feather_sglang.adapter.refusals import REFERENCE, refuse_pat_flags
from feather_sglang.errors import FeatherError

HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 16


def uses_reference(runner: Any) -> bool:
    """Whether the runner is on a CPU, with the NumPy reference asked for; raises where neither engine can run."""
    device = torch.device(runner.device).type
    if device == "cpu":
        if os.environ.get(REFERENCE) == "1":
            return True
        raise FeatherError(f"the pat backend needs an NVIDIA GPU, this server runs on the CPU: {_ELSE}")
    if device != "cuda" or torch.version.cuda is None:
        raise FeatherError(f"the pat backend needs an NVIDIA GPU, this server runs on {runner.device}: {_ELSE}")
    major, minor = torch.cuda.get_device_capability(torch.cuda.current_device())
    if major < 8:
        raise FeatherError(f"the pat backend needs compute capability 8.0 or 9.0, this GPU has {major}.{minor}")
    return False


def attention_layers(runner: Any, reference: bool) -> list[RadixAttention]:
    """The model's attention layers, if the backend can serve them all.

    Raises
    ------
    FeatherError
        A model, a setting or a KV cache that it cannot serve.
    """
    _refuse_settings(runner)
    _refuse_model(runner)
    layers = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
    if not layers:
        raise FeatherError(f"the pat backend finds no attention layer in this model: {_ELSE}")
    for layer in layers:
        _refuse_layer(layer, reference)
    if len({(layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim) for layer in layers}) > 1:
        raise FeatherError(f"the pat backend needs the same heads in all layers, this model's differ: {_ELSE}")
    if len({(layer.scaling, layer.logit_cap) for layer in layers}) > 1:
        raise FeatherError(f"the pat backend needs one scale of the scores, this model's layers differ: {_ELSE}")
    return layers


def _refuse_settings(runner: Any) -> None:
    refuse_pat_flags(runner.server_args)
    parallel = get_parallel()  # what SGLang has made of the flags
    for unsupported, flag in (
        (parallel.attn_dp_size > 1, "data-parallel attention"),
        (parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1, "context parallelism"),
    ):
        if unsupported:
            raise FeatherError(f"the pat backend does not support {flag}; drop it or {_ELSE}")


def _refuse_model(runner: Any) -> None:
    model, pool = runner.model_config, runner.token_to_kv_pool
    for unsupported, what in (
        (model.attention_arch == AttentionArch.MLA, "multi-head latent attention"),
        (model.is_encoder_decoder, "encoder-decoder models"),
        (runner.sliding_window_size is not None or runner.is_hybrid_swa, "sliding windows"),
        (model.attention_chunk_size is not None, "chunked attention"),
        (model.has_attention_sinks, "attention sinks"),
    ):
        if unsupported:
            raise FeatherError(f"the pat backend does not support {what}, which this model has: {_ELSE}")
    if runner.kv_cache_dtype != runner.dtype:
        raise FeatherError(
            f"the pat backend does not support a KV cache of {runner.kv_cache_dtype} under a model in {runner.dtype}: "
            f"drop --kv-cache-dtype or {_ELSE}"
        )
    # Others hold latents or quantised values, several kinds of layers, or rows of ids that stand for slots.
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if type(pool) is not MHATokenToKVPool or layout != "nhd":
        raise FeatherError(f"the pat backend does not support the KV cache {type(pool).__name__} ({layout}): {_ELSE}")


def _refuse_layer(layer: RadixAttention, reference: bool) -> None:
    for unsupported, what in (
        (layer.is_cross_attention, "cross attention"),
        (layer.attn_type != AttentionType.DECODER, f"attention of type {layer.attn_type.value}"),
        (layer.sliding_window_size > -1, "sliding windows"),
        (layer.logit_cap and layer.logit_capping_method != "tanh", f"logit capping by {layer.logit_capping_method}"),
        (layer.pos_encoding_mode != "NONE", f"positional encoding {layer.pos_encoding_mode} in attention"),
        (layer.xai_temperature_len > 0, "attention temperature"),
        (layer.v_head_dim != layer.head_dim, f"values of {layer.v_head_dim} beside keys of {layer.head_dim}"),
        (layer.tp_q_head_num > MAX_GROUP * layer.tp_k_head_num, f"more than {MAX_GROUP} query heads to a KV head"),
    ):
        if unsupported:
            raise FeatherError(f"the pat backend does not support {what}, which this model has: {_ELSE}")
    if not reference and layer.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise FeatherError(f"the pat backend does not support head_dim {layer.head_dim} (only {known}): {_ELSE}")
