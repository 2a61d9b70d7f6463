"""What the requests of a prefill step share in the cache, by the hash ids of their prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from feather_kernels.forest import Forest


def cached_forest(paths: Sequence[tuple[int, ...]], block_size: int, committed: Sequence[int]) -> Forest:
    """The prefix forest of requests before their new tokens, a node a block; a block that is cached in part is private.

    Parameters
    ----------
    paths : hash ids of each prompt's blocks.
    block_size : tokens in a block.
    committed : tokens of each request in the cache.
    """
    nodes: dict[tuple[int, int], int] = {}  # (parent node, hash id) -> node
    parents: list[int] = []
    deepest: list[int] = []
    for path, most in zip(paths, committed, strict=True):
        node = -1
        for hash_id in path[: int(most) // block_size]:
            above, node = node, nodes.setdefault((node, hash_id), len(parents))
            if node == len(parents):
                parents.append(above)
        deepest.append(node)
    return Forest(
        np.array(parents, np.int32), np.full(len(parents), block_size, np.int32), np.array(deepest, np.int32),
        np.asarray(committed, np.int32), np.zeros(len(deepest), np.int64),
    )  # fmt: skip
