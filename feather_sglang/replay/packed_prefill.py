"""Time of prefill steps whose attention pat packs by the prefixes that their requests share in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from feather_kernels.forest import Forest
from feather_kernels.options import PlannerOptions
from feather_sglang.attention.new_tokens import prompt_block
from feather_sglang.attention.packed_prefill.gain import PrefillGain
from feather_sglang.replay.batch_sharing import nodes_of
from feather_sglang.replay.model_shape import ModelShape


class PackedPrefill:
    """Which steps are packed, and what their attention takes then.

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
        forest = cached_forest(paths, block_size, committed.tolist())
        if not self._always and not gain.pays(forest, counts):
            return stock
        ratio = gain.packed_seconds(forest, counts) / gain.stock_seconds(committed, counts)
        return stock * ratio + gain.plan_time.seconds(int(counts.sum()))


def cached_forest(paths: Sequence[tuple[int, ...]], block_size: int, committed: Sequence[int]) -> Forest:
    """The prefix forest of requests before their new tokens, a node a block; a block that is cached in part is private.

    Parameters
    ----------
    paths : hash ids of each prompt's blocks.
    block_size : tokens in a block.
    committed : tokens of each request in the cache.
    """
    cached = nodes_of(path[: int(most) // block_size] for path, most in zip(paths, committed, strict=True))
    parents = {node: above for nodes in cached for above, node in pairwise((-1, *nodes))}  # in order
    return Forest(
        np.array(list(parents.values()), np.int32), np.full(len(parents), block_size, np.int32),
        np.array([nodes[-1] if nodes else -1 for nodes in cached], np.int32),
        np.asarray(committed, np.int32), np.zeros(len(cached), np.int64),
    )  # fmt: skip
