"""Time of prefill steps whose attention pat packs by the prefixes that their requests share in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from feather_kernels.options import PlannerOptions
from feather_sglang.attention.new_tokens import prompt_block
from feather_sglang.attention.packed_prefill.gain import PrefillGain
from feather_sglang.attention.packed_prefill.prefix_paths import forest_of_paths
from feather_sglang.replay.batch_sharing import nodes_of
from feather_sglang.replay.model_shape import ModelShape


class PackedPrefill:
    """Predicts which prefill steps are packed, and the time of their attention.

    The mode is "on" for all steps, "auto" for those that `PrefillGain` predicts to be faster so.
    """

    def __init__(self, model: ModelShape, mode: str) -> None:
        shape = (model.heads, model.kv_heads, model.head_dim)
        block = prompt_block(PlannerOptions(*shape, max_requests=1))
        self._gain, self._always = PrefillGain([shape] * model.layers, block), mode == "on"

    def seconds(
        self, stock: float, new: np.ndarray, cached: np.ndarray, paths: Sequence[tuple[int, ...]], block_size: int
    ) -> float:
        """The attention of a step, of which SGLang's kernel takes `stock` seconds."""
        gain, counts, committed = self._gain, new.astype(np.int64), cached.astype(np.int64)
        if not self._always and not gain.may_pay(committed, counts):
            return stock
        # A block that is cached in part is private.
        walks = [[(node, (place + 1) * block_size) for place, node in enumerate(nodes)] for nodes in nodes_of(paths)]
        forest = forest_of_paths(walks, committed, np.zeros(len(walks)))
        if not self._always and not gain.pays(forest, counts):
            return stock
        ratio = gain.packed_seconds(forest, counts) / gain.stock_seconds(committed, counts)
        return stock * ratio + gain.plan_time.seconds(int(counts.sum()))
