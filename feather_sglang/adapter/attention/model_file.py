"""The facts about a model from its ``config.json`` alone, before a server loads it, for models that SGLang has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from feather_sglang.adapter.attention.limits import POOLS, LayerFacts, ModelFacts
from feather_sglang.errors import FeatherError, quoted

NO_WINDOWS = ("Mistral", "Mixtral", "Qwen2", "Qwen3")  # to all layers of which SGLang gives full attention
KINDS: dict[str, dict[str, Any] | None] = {  # by a word in a layer's type; None: no KV
    "full": {}, "sliding": {"window": 1}, "chunked": {"chunked": True}, "linear": None,
}  # fmt: skip


def read_model(path: str) -> ModelFacts:
    """The facts by a ``config.json``, or the one in a folder; heads are those of the whole model.

    Raises ``FeatherError`` for a file that is no model's configuration.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text())
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
        return _facts(_filled(config), str((config.get("architectures") or [""])[0]))
    except OSError as error:
        raise FeatherError(f"{file}: {error.strerror}; name a model's folder or its config.json") from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError) as error:
        raise FeatherError(f"{file}: not a model's configuration ({error!r})") from None


def _filled(config: dict[str, Any]) -> dict[str, Any]:
    """What the file says of the language model, and what its kind has by default."""
    try:
        from transformers import CONFIG_MAPPING, logging

        logging.set_verbosity_error()
        text = CONFIG_MAPPING[config["model_type"]].from_dict(config).get_text_config().to_dict()
    except Exception:  # a kind that the library does not have, or no library
        text = {}
    return {**text, **config, **(config.get("text_config") or {})}


def _facts(text: dict[str, Any], architecture: str) -> ModelFacts:
    latent = bool(text.get("kv_lora_rank"))
    heads = text["num_attention_heads"]
    if latent:
        kv_heads, values = 1, text["kv_lora_rank"]
        head_dim = values + text["qk_rope_head_dim"]
    else:
        kv_heads = text.get("num_key_value_heads") or heads
        head_dim = text.get("head_dim") or text["hidden_size"] // heads
        values = text.get("v_head_dim") or head_dim
    if not all(isinstance(size, int) and size > 0 for size in (heads, kv_heads, head_dim, values)):
        raise ValueError("a size is no whole number above 0")
    sparse = bool(text.get("index_topk") or text.get("compress_ratios"))  # refused, whatever its layers are
    names = ["full"] * text["num_hidden_layers"] if sparse else _layer_types(text, architecture)
    kinds = [KINDS[next(word for word in KINDS if word in name)] for name in names]
    layers = tuple(
        LayerFacts(number, heads, kv_heads, head_dim, values, head_dim**-0.5, latent=latent, **kind)
        for number, kind in enumerate(kinds)
        if kind is not None
    )
    pool = "MLATokenToKVPool" if latent else "HybridLinearKVPool" if None in kinds else "MHATokenToKVPool"
    if sparse:
        pool = "of sparse attention"
    return ModelFacts(
        layers, pool=pool, full_pool=POOLS.get(pool, pool), encoder_decoder=bool(text.get("is_encoder_decoder"))
    )


def _layer_types(text: dict[str, Any], architecture: str) -> Sequence[str]:
    layers = text["num_hidden_layers"]
    types = [name.lower() for name in (text.get("layer_types") or ["full"] * layers)[:layers]]
    if unknown := [name for name in types if not any(word in name for word in KINDS)]:
        raise FeatherError(f"layers of type {quoted(unknown[0])} are not known to this check: start a server to see")
    if architecture.startswith(NO_WINDOWS):
        types = [name.replace("sliding", "full") for name in types]
    return types
