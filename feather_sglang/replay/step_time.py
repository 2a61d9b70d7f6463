"""Time of a forward pass: prefill FLOP, weight and KV bytes, and the effect of row order on the L2.

docs/design/step_time.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from feather_sglang.errors import FeatherError
from feather_sglang.replay.attention_time import CommonPrefix, Packed
from feather_sglang.replay.batch_sharing import BatchSharing
from feather_sglang.replay.model_shape import ModelShape
from feather_sglang.replay.packed_prefill import PackedPrefill
from feather_sglang.replay.profiles import HardwareProfile


class StepTimeModel:
    """Seconds of a prefill or decode step of `model` on `profile`.

    Parameters
    ----------
    attention : name of a decode kernel of the profile; None takes its first.
    prefill_graphs : whether prefill runs in CUDA graphs; without, the host takes longer to launch a step (`HostTime`).
    packed_prefill : "on", "auto" or "off", as ``--feather-pat-prefill``.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        model: ModelShape,
        attention: str | None = None,
        prefill_graphs: bool = True,
        packed_prefill: str = "off",
    ) -> None:
        kernels = profile.attention
        if attention is not None and attention not in kernels:
            raise FeatherError(
                f"profile {profile.name} has no attention kernel {attention!r}: choose from {', '.join(kernels)}"
            )
        self.prefill_graphs = prefill_graphs
        self.profile = profile
        self.model = model
        self.attention_name = attention if attention is not None else next(iter(kernels))
        self._attention = kernels[self.attention_name]
        self._packed: PackedPrefill | None = None  # only where prefill may be packed
        if packed_prefill != "off":
            if not isinstance(self._attention, Packed):
                raise FeatherError(f"--feather-pat-prefill {packed_prefill}: give --attention pat, too")
            if prefill_graphs:
                raise FeatherError(f"--feather-pat-prefill {packed_prefill}: give --prefill-graphs off, too")
            self._packed = PackedPrefill(model, packed_prefill)
        self._weights_s = model.weight_bytes / profile.weight_bytes_per_s
        self._body_flop = 2.0 * (model.params - model.head_params)  # per token
        self._head_flop = 2.0 * model.head_params  # per token that is sampled from
        self._pair_flop = 4.0 * model.layers * model.heads * model.head_dim  # per query and key
        # Query heads of one KV head stand side by side in a tile, so a tile holds this many tokens.
        self._tile_tokens = max(profile.prefill_tile_rows * model.kv_heads / model.heads, 1.0)
        moved = profile.elementwise_vectors * model.hidden * model.element_bytes * model.layers
        self._token_s = moved / profile.copy_bytes_per_s

    def prefill(
        self,
        extend_lens: Sequence[int],
        prefix_lens: Sequence[int],
        paths: Sequence[tuple[int, ...]] | None = None,
        block_size: int = 1,
    ) -> float:
        """Return the time to compute `extend_lens` new tokens per row after `prefix_lens` cached ones.

        Without `paths`, the hash ids of each prompt's blocks of `block_size` tokens, nothing is shared.
        """
        new, cached = np.asarray(extend_lens, dtype=np.float64), np.asarray(prefix_lens, dtype=np.float64)
        tokens = float(new.sum())
        if not tokens:
            return 0.0
        padded = np.ceil(new / self._tile_tokens) * self._tile_tokens
        keys = cached + (new + 1) / 2 + self.profile.prefill_tile_keys  # a new token sees all before it, and itself
        pairs = float((padded * keys).sum())
        attention = self._pair_flop * pairs / self.profile.prefill_attention_flop_per_s
        if self._packed is not None:
            attention = self._packed.seconds(attention, new, cached, paths or [()] * len(new), block_size)
        return self.profile.step_overhead_s + self._products(tokens, len(new)) + attention

    def sharing(self, paths: Sequence[tuple[int, ...]], block_size: int, lengths: Sequence[int]) -> BatchSharing:
        """What the rows of a batch share: the hash ids of each prompt's blocks, and the KV tokens of each row."""
        return BatchSharing.from_paths(paths, block_size, lengths)

    def decode(self, seq_lens: Sequence[int] | np.ndarray, sharing: BatchSharing) -> float:
        """Return the time of one decode step.

        Parameters
        ----------
        seq_lens : shape [rows], tokens that each row attends to.
        sharing : of the same rows in the same order; rows may have grown since it was made.
        """
        lengths = np.asarray(seq_lens, dtype=np.float64)
        rows = len(lengths)
        if not rows:
            return 0.0
        model = self.model
        layer = self._attention.seconds(lengths, sharing, model.kv_heads, model.head_bytes, model.group)
        return self.profile.step_overhead_s + self._products(rows, rows) + model.layers * layer

    @property
    def needs_rows(self) -> bool:
        """Whether the time of a decode step depends on each row; else on ``CommonSharing`` alone (``decode_total``)."""
        return not isinstance(self._attention, CommonPrefix)

    def decode_total(self, tokens: int, sharing: BatchSharing) -> float:
        """Return what ``decode`` does, from the tokens of all rows together."""
        assert isinstance(self._attention, CommonPrefix)
        rows, model = sharing.rows, self.model
        layer = self._attention.of_total(float(tokens), sharing, model.kv_heads, model.head_bytes)
        return self.profile.step_overhead_s + self._products(rows, rows) + model.layers * layer

    def _products(self, tokens: float, sampled: int) -> float:
        """Return the time of all matrix products, and of the elementwise work between them."""
        overlap = self.profile.products_overlap
        flop_s = (self._body_flop * tokens + self._head_flop * sampled) / self.profile.gemm_flop_per_s
        return (self._weights_s**overlap + flop_s**overlap) ** (1 / overlap) + tokens * self._token_s
