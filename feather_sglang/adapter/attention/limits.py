"""The limits of the pat backend, as data that its checks and the support matrix both read.

A limit of the model, its pool or the server's parallelism ends start-up. A limit of a layer leaves that layer to the
backend beside pat; only a model without any layer to pack is refused.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from feather_kernels.build import ARCHITECTURES, HEAD_DIMS, LATENT_DIM, LATENT_VALUES, PROVEN
from feather_kernels.paths import SHARED_KB
from feather_sglang.adapter.refusals import ANOTHER_BACKEND, Limit, first_limit
from feather_sglang.errors import FeatherError

FP8 = "float8_e4m3fn"  # of KV; --kv-cache-dtype fp8_e4m3
MAX_GROUP = {64: 128, 128: 128, 256: 64}  # by head_dim: query heads to a KV head that were checked on a GPU
POOLS = {  # and what holds the KV of their layers that see everything
    "MHATokenToKVPool": "MHATokenToKVPool", "SWAKVPool": "MHATokenToKVPool", "HybridLinearKVPool": "MHATokenToKVPool",
    "MLATokenToKVPool": "MLATokenToKVPool",
}  # fmt: skip


@dataclass(frozen=True)
class LayerFacts:
    """Properties of an attention layer that decide whether it is packed; heads are those of a rank.

    Keys of latent attention are latents of one KV head, [latent and rope], whose first ``v_head_dim`` are its values.
    """

    layer_id: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    sm_scale: float
    logit_soft_cap: float = 0.0
    capping: str = "tanh"
    attention: str = "decoder"  # SGLang's AttentionType
    cross: bool = False
    window: int = -1  # tokens before the query's own; -1: all
    chunked: bool = False  # sees its chunk of the sequence only
    positions: str = "NONE"  # encoded in attention
    temperature: int = -1
    in_window_pool: bool = False  # its KV has slots of its own
    sinks: bool = False  # comes with attention sinks
    latent: bool = False  # its values are a part of its keys
    reference: bool = False  # run by the NumPy reference, which takes any head_dim

    @property
    def shape(self) -> tuple[int, int, int]:
        """Query heads, KV heads and head_dim, which a plan is made for."""
        return self.q_heads, self.kv_heads, self.head_dim

    @property
    def of_latent_size(self) -> bool:
        """Whether keys and values have the sizes that the kernel for latents has."""
        return (self.head_dim, self.v_head_dim) == (LATENT_DIM, LATENT_VALUES)

    @property
    def max_group(self) -> int:
        """The most query heads to a KV head."""
        return MAX_GROUP.get(self.head_dim, max(MAX_GROUP.values()))


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model and its server's KV cache that decide whether pat serves it."""

    layers: tuple[LayerFacts, ...]
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    pool: str = "MHATokenToKVPool"
    full_pool: str = "MHATokenToKVPool"  # the one of the layers that see everything
    layout: str = "nhd"
    encoder_decoder: bool = False
    attn_cp_size: int = 1
    speculative: bool = False


MODEL_LIMITS = (
    Limit(
        "several kinds of attention that read the KV of one layer",
        lambda model: len({layer.layer_id for layer in model.layers}) < len(set(model.layers)),
    ),
    Limit("context parallelism", lambda model: model.attn_cp_size > 1),
    Limit(
        "latents in {0.kv_dtype} (--kv-cache-dtype: auto)",
        lambda model: model.pool == "MLATokenToKVPool" and model.kv_dtype != model.dtype,
        "latents in another dtype than the model",
    ),
    Limit("encoder-decoder models, which this is", lambda model: model.encoder_decoder, "encoder-decoder models"),
    Limit(
        "a KV cache of {0.kv_dtype} under a model in {0.dtype} (--kv-cache-dtype: auto or fp8_e4m3)",
        lambda model: model.kv_dtype not in (model.dtype, FP8),
        "KV in a dtype that is neither the model's nor fp8_e4m3, such as fp8_e5m2 and fp4",
    ),
    # Others hold what sparse attention looks up, quantised values, or rows of ids that stand for slots.
    Limit(
        "the KV cache {0.pool}",
        lambda model: model.pool not in POOLS,
        f"KV pools other than {', '.join(POOLS)}",
    ),
    Limit(  # not tried: recurrent states are verified, too
        "speculative decoding of a model with linear attention",
        lambda model: model.speculative and model.pool == "HybridLinearKVPool",
    ),
    Limit(
        "the KV cache {0.full_pool} ({0.layout})",
        lambda model: model.layout != "nhd" or model.full_pool != POOLS[model.pool],
        "a KV slot laid out in another way than heads, then head_dim",
    ),
)
LAYER_LIMITS = (
    Limit("cross attention", lambda layer: layer.cross),
    Limit("attention of type {0.attention}", lambda layer: layer.attention != "decoder", "encoder attention"),
    Limit("sliding windows", lambda layer: layer.window > -1),
    Limit("chunked attention", lambda layer: layer.chunked),
    Limit("KV in the pool for sliding windows", lambda layer: layer.in_window_pool),
    Limit(
        "logit capping by {0.capping}",
        lambda layer: layer.logit_soft_cap > 0 and layer.capping != "tanh",
        "logit capping by other means than tanh",
    ),
    Limit(
        "positional encoding {0.positions} in attention",
        lambda layer: layer.positions != "NONE",
        "positional encoding in attention",
    ),
    Limit("attention temperature", lambda layer: layer.temperature > 0),
    Limit(
        "values of {0.v_head_dim} beside keys of {0.head_dim}",
        lambda layer: layer.v_head_dim != layer.head_dim and not layer.latent,
        "values of another size than keys",
    ),
    Limit(
        "more than {0.max_group} query heads to a KV head",
        lambda layer: layer.q_heads > layer.max_group * layer.kv_heads,
        f"more than {MAX_GROUP[128]} query heads to a KV head, or {MAX_GROUP[256]} with head_dim 256",
    ),
    Limit(
        f"latents of {{0.v_head_dim}} in {{0.head_dim}} values (only {LATENT_VALUES} in {LATENT_DIM})",
        lambda layer: layer.latent and not layer.reference and not layer.of_latent_size,
        "latents of other sizes than 512 values and 64 of rotary embedding",
    ),
    Limit(
        f"head_dim {{0.head_dim}} (only {', '.join(map(str, HEAD_DIMS))})",
        lambda layer: not layer.reference and not layer.latent and layer.head_dim not in HEAD_DIMS,
        f"head_dim other than {', '.join(map(str, HEAD_DIMS))}",
    ),
)


def packed_layers(model: ModelFacts) -> tuple[LayerFacts, ...]:
    """The layers that the packed kernel serves; the others are for the backend beside it.

    Raises ``FeatherError`` for a model or a KV cache that pat cannot serve, and for a model without a layer to pack.
    """
    if limit := first_limit(MODEL_LIMITS, model):
        raise FeatherError(f"the pat backend does not support {limit.what}: {ANOTHER_BACKEND}")
    if not model.layers:
        raise FeatherError(f"the pat backend finds no attention layer in this model: {ANOTHER_BACKEND}")
    found = {layer: left_to_another(layer) for layer in model.layers}
    packed = tuple(layer for layer, limit in found.items() if limit is None)
    if not packed:
        why = ", ".join(dict.fromkeys(limit for limit in found.values() if limit))
        raise FeatherError(f"the pat backend can pack no layer of this model ({why}): {ANOTHER_BACKEND}")
    return packed


def packing(model: ModelFacts, beside: str | None = None) -> tuple[str, str]:
    """(which layers are packed, what is left to whom) of a model, in words; raises as ``packed_layers`` does."""
    packed, left = packed_layers(model), Counter(filter(None, map(left_to_another, model.layers)))
    why = ", ".join(f"{count} layers ({limit})" for limit, count in left.items())
    rest = f"{why} to {beside or 'the backend that SGLang would decode with'}" if left else "no layer"
    return f"packs {len(packed)} of {len(model.layers)} attention layers", f"leaves {rest}"


def left_to_another(layer: LayerFacts) -> str | None:
    """Why a layer is left to the backend beside pat; None if it is packed."""
    limit = first_limit(LAYER_LIMITS, layer)
    return limit and limit.what


def refuse_capability(major: int, minor: int, unproven: bool = False) -> None:
    """Raise ``FeatherError`` for a GPU that the kernels are not built for, or, unless asked to, were not run on."""
    if (capability := 10 * major + minor) not in ARCHITECTURES:
        known = " or ".join(f"{capability / 10:.1f}" for capability in ARCHITECTURES)
        raise FeatherError(f"the pat backend needs compute capability {known}, this GPU has {major}.{minor}")
    if capability not in PROVEN and not unproven:
        raise FeatherError(
            f"the pat backend was not run on a GPU of compute capability {major}.{minor} yet: serve with it all the "
            f"same by --feather-unproven-gpu on, or {ANOTHER_BACKEND}"
        )


def what_was_run(major: int, minor: int) -> str:
    """What the kernels for a GPU that they were not run on have been through."""
    capability = 10 * major + minor
    return (
        f"pat is unproven on compute capability {major}.{minor}: its kernels were compiled for it and run on an H200 "
        f"with the {SHARED_KB[capability]} KB of shared memory of such a GPU, and nothing was run on one; `python -m "
        "feather_kernels.self_test --out FILE` checks this GPU, and FILE is what to report"
    )
