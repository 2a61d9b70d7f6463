"""What the requests of a prefill step share in the cache, by the hash ids of their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from feather_kernels.forest import Forest
from feather_sglang.replay.batch_sharing import nodes_of


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
