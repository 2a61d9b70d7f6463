"""Time of a forward pass: prefill FLOP, weight and KV bytes, and what row order does to the L2 (docs/step_time.md)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from feather_sglang.errors import FeatherError
from feather_sglang.replay.attention_time import as_lengths
from feather_sglang.replay.batch_sharing import BatchSharing
from feather_sglang.replay.model_shape import MODELS, ModelShape, load_model
from feather_sglang.replay.profiles import HardwareProfile, list_profiles, load_profile

__all__ = [
    "MODELS",
    "BatchSharing",
    "HardwareProfile",
    "ModelShape",
    "StepTimeModel",
    "list_profiles",
    "load_model",
    "load_profile",
]


class StepTimeModel:
    """Seconds of a prefill or decode step of `model` on `profile`.

    Parameters
    ----------
    attention : name of a decode kernel of the profile; None takes its first.
    """

    def __init__(self, profile: HardwareProfile, model: ModelShape, attention: str | None = None) -> None:
        kernels = profile.attention
        if attention is not None and attention not in kernels:
            raise FeatherError(
                f"profile {profile.name} has no attention kernel {attention!r}: choose from {', '.join(kernels)}"
            )
        self.profile = profile
        self.model = model
        self.attention_name = attention if attention is not None else next(iter(kernels))
        self._attention = kernels[self.attention_name]
        self._weights_s = model.weight_bytes / profile.dram_bytes_per_s
        self._body_flop = 2.0 * (model.params - model.head_params)  # per token
        self._head_flop = 2.0 * model.head_params  # per token that is sampled from
        self._pair_flop = 4.0 * model.layers * model.heads * model.head_dim  # per query and key

    def prefill(self, extend_lens: Sequence[int], prefix_lens: Sequence[int]) -> float:
        """Return the time to compute `extend_lens` new tokens per row after `prefix_lens` cached ones."""
        new, cached = np.asarray(extend_lens, dtype=np.float64), np.asarray(prefix_lens, dtype=np.float64)
        flop = self._body_flop * float(new.sum()) + self._head_flop * len(new)
        products = max(flop / self.profile.gemm_flop_per_s, self._weights_s)
        pairs = float((new * cached + new * (new + 1) / 2).sum())  # each new token sees itself and all before
        attention = self._pair_flop * pairs / self.profile.prefill_attention_flop_per_s
        return self.profile.prefill_overhead_s + products + attention

    def decode(self, seq_lens: Sequence[int] | np.ndarray, sharing: BatchSharing) -> float:
        """Return the time of one decode step.

        Parameters
        ----------
        seq_lens : shape [rows], tokens that each row attends to.
        sharing : of the same rows in the same order; rows may have grown since it was made.
        """
        lengths = as_lengths(seq_lens)
        rows = len(lengths)
        if not rows:
            return 0.0
        flop = (self._body_flop + self._head_flop) * rows
        products = max(flop / self.profile.gemm_flop_per_s, self._weights_s)
        layer = self._attention.seconds(lengths, sharing, self.model.kv_heads, self.model.head_bytes)
        return self.profile.decode_overhead_s + products + self.model.layers * layer
