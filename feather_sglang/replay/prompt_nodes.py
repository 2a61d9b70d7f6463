"""The nodes of the tree that prompts make, by the hash ids of their blocks."""

from __future__ import annotations

from collections.abc import Iterable


def nodes_of(paths: Iterable[tuple[int, ...]]) -> list[list[int]]:
    """Each path's nodes from the root, numbered as they come up: an id behind the same ids is the same node."""
    numbers: dict[tuple[int, int], int] = {}  # (parent node, hash id) -> node
    found = []
    for path in paths:
        node, nodes = -1, []
        for hash_id in path:
            node = numbers.setdefault((node, hash_id), len(numbers))
            nodes.append(node)
        found.append(nodes)
    return found
