"""The facts about a model runner's model and server that `limits` judges."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_parallel, get_spec

from feather_kernels.build import PROVEN
from feather_sglang.adapter.attention.beside import CHOICE, DRAFT_FLAG, DRAFTS_BY_PAT, PAT
from feather_sglang.adapter.attention.engines import PackedLayers
from feather_sglang.adapter.attention.limits import (
    LayerFacts,
    ModelFacts,
    packed_layers,
    packing,
    refuse_capability,
    what_was_run,
)
from feather_sglang.adapter.options import FeatherOptions, packs_prefill
from feather_sglang.adapter.refusals import ANOTHER_BACKEND, REFERENCE, refuse_pat_flags
from feather_sglang.errors import FeatherError

logger = logging.getLogger(__name__)


def packed_of(runner: Any) -> PackedLayers:
    """The packed layers of a model runner; raises ``FeatherError`` for what pat cannot serve."""
    reference = uses_reference(runner)
    refuse_pat_flags(runner.server_args)
    facts = facts_of(runner, reference)
    layers = packed_layers(facts)
    if any(layer.latent for layer in layers):
        _refuse_with_latents(runner.server_args)
    return PackedLayers(
        layers, runner.dtype, runner.kv_cache_dtype, runner.device, runner.token_to_kv_pool,
        others=len(facts.layers) - len(layers), reference=reference,
        verdict="; ".join(packing(facts, getattr(runner.server_args, CHOICE, None))),
    )  # fmt: skip


def _refuse_with_latents(args: Any) -> None:
    """Their prefill has keys for each head, which no pool holds; a draft model with latents was not tried."""
    chosen = {"--feather-pat-prefill": packs_prefill(), f"{DRAFT_FLAG} {PAT}": getattr(args, DRAFTS_BY_PAT, False)}
    if asked := [flag for flag, value in chosen.items() if value]:
        raise FeatherError(f"{asked[0]} is not for latent attention, which this model has; leave it out")


def uses_reference(runner: Any) -> bool:
    """Whether the runner is on a CPU, with the NumPy reference asked for; raises where neither engine can run."""
    device = torch.device(runner.device).type
    if device == "cpu" and os.environ.get(REFERENCE) == "1":
        return True
    if device != "cuda" or torch.version.cuda is None:
        where = "the CPU" if device == "cpu" else str(runner.device)
        raise FeatherError(f"the pat backend needs an NVIDIA GPU, this server runs on {where}: {ANOTHER_BACKEND}")
    major, minor = torch.cuda.get_device_capability(torch.cuda.current_device())
    refuse_capability(major, minor, FeatherOptions.from_environment().unproven_gpu)
    if 10 * major + minor not in PROVEN:
        logger.warning("feather: %s", what_was_run(major, minor))
    return False


def facts_of(runner: Any, reference: bool) -> ModelFacts:
    """The facts of a model runner whose model and memory pools exist."""
    model, pool, parallel = runner.model_config, runner.token_to_kv_pool, get_parallel()
    full_pool = getattr(pool, "full_kv_pool", pool)
    in_window_pool = {
        layer for layer, (_, in_window) in getattr(pool, "layers_mapping", {}).items() if in_window
    }  # of a pool with slots of its own for windows
    chunks = model.attention_chunk_size is not None
    latent = model.attention_arch == AttentionArch.MLA
    layers = dict.fromkeys(  # several may read the KV of one
        _layer_facts(layer, chunks, layer.layer_id in in_window_pool, _has_sinks(runner.model, name), latent, reference)
        for name, layer in runner.model.named_modules()
        # A latent layer has another object for prefill, whose keys are no latents.
        if isinstance(layer, RadixAttention) and (not latent or layer.v_head_dim == model.kv_lora_rank)
    )
    return ModelFacts(
        layers=tuple(layers),
        dtype=str(runner.dtype).removeprefix("torch."),
        kv_dtype=str(runner.kv_cache_dtype).removeprefix("torch."),
        pool=type(pool).__name__,
        full_pool=type(full_pool).__name__,
        layout=getattr(full_pool, "kv_cache_layout", "nhd"),
        encoder_decoder=model.is_encoder_decoder,
        attn_cp_size=max(parallel.attn_cp_size, parallel.attn_dcp_size),
        speculative=get_spec().speculative_algorithm is not None,
    )


def _has_sinks(model: torch.nn.Module, name: str) -> bool:
    """Whether an attention layer's owner has sinks to hand on: they are its parameters, ``sinks`` or ``*sink_bias``."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return any("sink" in parameter for parameter, _ in owner.named_parameters(recurse=False))


def _layer_facts(
    layer: RadixAttention, chunks: bool, in_window_pool: bool, sinks: bool, latent: bool, reference: bool
) -> LayerFacts:
    return LayerFacts(
        layer_id=layer.layer_id,
        q_heads=layer.tp_q_head_num,
        kv_heads=layer.tp_k_head_num,
        head_dim=layer.head_dim,
        v_head_dim=layer.v_head_dim,
        sm_scale=layer.scaling,
        logit_soft_cap=layer.logit_cap or 0.0,
        capping=layer.logit_capping_method,
        attention=layer.attn_type.value,
        cross=layer.is_cross_attention,
        window=layer.sliding_window_size,
        chunked=chunks and layer.use_irope,
        positions=layer.pos_encoding_mode,
        temperature=layer.xai_temperature_len,
        in_window_pool=in_window_pool,
        sinks=sinks,
        latent=latent,
        reference=reference,
    )
