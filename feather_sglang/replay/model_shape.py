"""Shapes of models, as the step-time model needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from feather_sglang.errors import FeatherError


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder, by the sizes in its config.json.

    Attributes
    ----------
    tied : whether the output head is the input embedding.
    element_bytes : bytes of a weight and of a KV element (2: bf16).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    tied: bool = False
    element_bytes: int = 2

    @property
    def head_params(self) -> int:
        """Weights of the output head; it sees one token per request, the rest sees every token."""
        return self.hidden * self.vocabulary

    @property
    def params(self) -> int:
        """Weights that take part in matrix products, output head included, input embedding not."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.feed_forward) + self.head_params

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        return self.params * self.element_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of weights that the device keeps, input embedding included."""
        return (self.params if self.tied else self.params + self.head_params) * self.element_bytes

    @property
    def head_bytes(self) -> int:
        """K and V of one token for one head of one layer."""
        return 2 * self.head_dim * self.element_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return self.layers * self.kv_heads * self.head_bytes

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        return self.heads // self.kv_heads


# From the models' published config.json files.
MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
        ModelShape("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151936, tied=True),
    )
}
DEFAULT_MODEL = "llama3-8b"  # the paper's


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a dense decoder from its config.json; ``FeatherError`` for any other model."""
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [size for size in sizes if not isinstance(config.get(size), int)]
    experts = [key for key in config if "experts" in key]
    if missing or experts:
        why = f"it has no {missing[0]}" if missing else f"it has {experts[0]}"
        raise FeatherError(f"{name}: the step-time model knows dense decoders, and this is none: {why}")
    layers, hidden, heads, feed_forward, vocabulary = (config[size] for size in sizes)
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // max(heads, 1)
    if not all(isinstance(n, int) and n > 0 for n in (layers, hidden, heads, feed_forward, kv_heads, head_dim)):
        raise FeatherError(f"{name}: its config.json has a size that is not a whole number above 0")
    tied = bool(config.get("tie_word_embeddings"))
    return ModelShape(name, layers, hidden, heads, kv_heads, head_dim, feed_forward, vocabulary, tied)


def load_model(name: str = DEFAULT_MODEL) -> ModelShape:
    """Return a built-in shape by name."""
    try:
        return MODELS[name]
    except KeyError:
        raise FeatherError(f"unknown model {name!r}: choose from {', '.join(sorted(MODELS))}") from None
