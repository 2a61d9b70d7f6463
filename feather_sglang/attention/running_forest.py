"""The prefix forest of the running batch, kept up to date as requests join and leave.

A compressed trie over each request's sequence of chunk hashes, where equal hashes mean equal KV slots. Nothing here
knows where the hashes come from; no module of SGLang or torch is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from feather_kernels.forest import Forest

Hashes = npt.NDArray[np.int64]


class _Node:
    """Chunks ``start`` to ``stop`` of every request below it; ``hashes`` is the whole sequence of one such request."""

    __slots__ = ("children", "count", "ends", "hashes", "index", "parent", "start", "stop")

    def __init__(self, parent: _Node | None, hashes: Hashes, start: int, stop: int) -> None:
        self.parent = self if parent is None else parent
        self.hashes, self.start, self.stop = hashes, start, stop
        self.children: dict[int, _Node] = {}  # by the hash of their first chunk
        self.count = 0  # requests at or below this node
        self.ends = 0  # requests whose last chunk is this node's
        self.index = -1  # in the forest that was built last


class RunningForest:
    """The chunks that running requests share, of ``chunk`` tokens each."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.revision = 0  # changes whenever a join changes what is shared; a leave changes the batch anyway
        self._root = _Node(None, np.empty(0, np.int64), 0, 0)
        self._last: dict[int, _Node] = {}  # the node with each request's last chunk

    def __len__(self) -> int:
        return len(self._last)

    def __contains__(self, request: int) -> bool:
        return request in self._last

    def join(self, request: int, hashes: Hashes) -> None:
        """Enter a request, known by any number, with the hashes of its chunks, int64 [chunks].

        Comparison is by whole runs of chunks: the cost grows with the nodes on the request's path.
        """
        if request in self._last:
            raise ValueError(f"request {request} has joined already")
        node, depth, end = self._root, 0, len(hashes)
        node.count += 1
        while depth < end:
            first = int(hashes[depth])
            child = node.children.get(first)
            if child is None:
                child = node.children[first] = _Node(node, hashes, depth, end)
            else:
                stop = min(child.stop, end)
                differs = child.hashes[depth:stop] != hashes[depth:stop]
                same = depth + (int(differs.argmax()) if differs.any() else stop - depth)
                if same < child.stop:
                    child = _split(child, same)
                self.revision += 1
            child.count += 1
            node, depth = child, child.stop
        node.ends += 1
        self._last[request] = node

    def leave(self, request: int) -> None:
        """Take a request out, and with it every node that nobody else needs."""
        node = self._last.pop(request)
        node.ends -= 1
        above = node
        while above is not self._root:
            above.count -= 1
            above = above.parent
        self._root.count -= 1
        while not node.count and node is not self._root:
            del node.parent.children[int(node.hashes[node.start])]
            node = node.parent
        if node is not self._root and not node.ends and len(node.children) == 1:
            _merge(node)

    def forest(self, requests: Sequence[int], seq_lens: npt.NDArray[np.int32], row_offset: npt.ArrayLike) -> Forest:
        """The forest of a batch, in the batch's order.

        The requests are all that have joined, and any number that have not: those share nothing.
        """
        parents: list[int] = []
        lengths: list[int] = []
        stack = [self._root]
        while stack:
            node = stack.pop()
            for child in node.children.values():
                if child.count > 1:
                    child.index = len(parents)
                    parents.append(node.index)
                    lengths.append((child.stop - child.start) * self.chunk)
                    stack.append(child)
        last = [self._last.get(request, self._root) for request in requests]
        # The parent of a node with one request has several, or is the root: others have been merged away.
        nodes = [node.index if node.count > 1 else node.parent.index for node in last]
        return Forest(
            np.array(parents, np.int32), np.array(lengths, np.int32), np.array(nodes, np.int32), seq_lens,
            np.asarray(row_offset, np.int64),
        )  # fmt: skip


def _split(node: _Node, at: int) -> _Node:
    """Cut a node in two at chunk ``at``; returns the new upper part."""
    upper = _Node(node.parent, node.hashes, node.start, at)
    upper.count = node.count
    upper.parent.children[int(node.hashes[node.start])] = upper
    upper.children[int(node.hashes[at])] = node
    node.parent, node.start = upper, at
    return upper


def _merge(node: _Node) -> None:
    """Give a node's chunks to its only child, whose ``hashes`` hold them as well."""
    (child,) = node.children.values()
    child.parent, child.start = node.parent, node.start
    child.parent.children[int(child.hashes[child.start])] = child
