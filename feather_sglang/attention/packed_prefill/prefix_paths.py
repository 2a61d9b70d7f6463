"""The prefix forest of requests that are known by their paths in a prefix cache's radix tree.

A node of that tree is a run of KV slots; whoever has it on its path reads those slots. Nothing here looks at a slot.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from feather_kernels.forest import Forest

Path = Sequence[tuple[Hashable, int]]


def forest_of_paths(paths: Sequence[Path], committed: npt.NDArray[np.integer], row_offset: npt.ArrayLike) -> Forest:
    """What requests share before they bring new tokens.

    A path has, from the root, nodes that others may have, too, and the position after the last token of each. Those
    count that end within the KV tokens that the request has ``committed`` so far.
    """
    numbers: dict[Hashable, int] = {}
    parents: list[int] = []
    lengths: list[int] = []
    deepest: list[int] = []
    for path, most in zip(paths, np.asarray(committed).tolist(), strict=True):
        above, begin = -1, 0
        for node, end in path:
            if end > most:
                break
            number = numbers.setdefault(node, len(parents))
            if number == len(parents):
                parents.append(above)
                lengths.append(end - begin)
            above, begin = number, end
        deepest.append(above)
    ids = np.arange(len(parents), dtype=np.int64)
    return Forest.from_nodes(
        ids, np.array(parents, np.int64), np.array(lengths, np.int32), np.array(deepest, np.int64),
        np.asarray(committed), np.asarray(row_offset, np.int64),
    )  # fmt: skip
