"""A path-compressed trie over chunk hash vectors in which every node knows the best waiting request below it.

The mechanics of the Chunked Hash Tree: where vectors end, branch and merge, and the heaps that rank them. Which
state a request is in is the business of ``cht.py``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from heapq import heapify, heappop, heappush
from typing import Any

from feather_sglang.chunk_hash import DIGEST

SLACK = 16  # stale heap entries that are not worth a clean-up


class Owner:
    """What a heap entry speaks for: a child node or a request ending at the heap's node.

    Entries are ``(priority, count, seq, owner, request)``; one is live while ``owner.entry is entry``.
    """

    __slots__ = ("entry",)

    entry: tuple[int, int, int, Owner, Request] | None

    def __lt__(self, other: object) -> bool:
        return False  # reached only between a live entry and its stale twin, whose order does not matter


class Request(Owner):
    """A request in any state; ``seq`` is its rank by age."""

    __slots__ = ("extra_key", "id", "node", "priority", "seq", "vector")

    node: Node

    def __init__(self, request_id: Hashable, vector: bytes, extra_key: object, priority: int, seq: int) -> None:
        self.entry = None  # set exactly while waiting
        self.id = request_id
        self.vector = vector
        self.extra_key = extra_key
        self.priority = priority
        self.seq = seq


class Node(Owner):
    """A point where requests branch or end; its edge covers chunks ``parent.depth .. depth`` of ``vector``.

    Nothing branches or ends inside an edge, so a node is active (in the working set) as a whole or not at all.
    ``heap`` ranks the children and the requests ending here. An entry's count, less this node's depth, is the missing
    count below an active node. For an inactive child it is the request's length, for an active one the missing count
    rebased on this node's depth; so activating a node changes the entries along its path only.
    """

    __slots__ = ("active", "children", "depth", "ends", "heap", "key", "parent", "vector", "waiting")

    def __init__(self, parent: Node | None, key: bytes, vector: bytes, depth: int) -> None:
        self.entry = None
        self.parent = parent
        self.key = key  # the hash at the edge's first chunk: this node's key among the parent's children
        self.vector = vector
        self.depth = depth
        self.children: dict[bytes, Node] = {}
        self.ends = 0  # requests in any state whose vector ends here
        self.active = 0  # active requests here and below
        self.waiting = 0  # waiting requests here and below
        self.heap: list[Any] = []


def attach(root: Node, request: Request) -> None:
    """Find or make the node where the request's vector ends."""
    vector = request.vector
    end = len(vector) // DIGEST
    node = root
    while node.depth < end:
        key = _at(vector, node.depth)
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = Node(node, key, vector, end)
        elif _at(vector, child.depth - 1) != _at(child.vector, child.depth - 1):  # branches or ends inside the edge
            fork = _agree(vector, child.vector, node.depth + 1, min(end, child.depth))
            child = _split(node, child, fork)
        node = child
    node.ends += 1
    request.node = node


def detach(request: Request) -> None:
    """Take the request's end out and drop the nodes that nothing needs any more."""
    node = request.node
    node.ends -= 1
    if not node.ends and not node.children and node.parent is not None:
        del node.parent.children[node.key]
        node = node.parent
    parent = node.parent
    if parent is not None and not node.ends and len(node.children) == 1:  # nothing branches or ends here
        (child,) = node.children.values()
        parent.children[node.key] = child
        child.parent, child.key = parent, node.key
        _hand_over(node, child, parent.heap)


def _split(parent: Node, child: Node, depth: int) -> Node:
    """Put a node at `depth` on the edge from `parent` to `child`."""
    middle = parent.children[child.key] = Node(parent, child.key, child.vector, depth)
    middle.active, middle.waiting = child.active, child.waiting
    child.parent, child.key = middle, _at(child.vector, depth)
    middle.children[child.key] = child
    _hand_over(child, middle, parent.heap)
    if middle.entry is not None:
        priority, count, seq, _, request = middle.entry
        rebased = count + depth - parent.depth if child.active else count
        child.entry = (priority, rebased, seq, child, request)
        middle.heap.append(child.entry)
    return middle


def shift(node: Node | None, waiting: int, active: int) -> None:
    """Change the counts of a node and all above it, and bring their places in the heaps up to date."""
    while node is not None:
        node.waiting += waiting
        node.active += active
        heap = node.heap
        if len(heap) > 2 * (len(node.children) + node.ends) + SLACK:
            heap[:] = [entry for entry in heap if entry[3].entry is entry]
            heapify(heap)
        while heap and heap[0][3].entry is not heap[0]:
            heappop(heap)
        parent = node.parent
        if not heap:
            node.entry = None
        elif parent is not None:
            priority, count, seq, _, request = heap[0]
            if node.active:
                count += parent.depth - node.depth
            entry = node.entry
            if entry is None or entry[2] != seq or entry[1] != count:
                node.entry = (priority, count, seq, node, request)
                heappush(parent.heap, node.entry)
        node = parent


def check_node(node: Node, ends: list[Request], active: Mapping[Hashable, Request]) -> None:
    """Assert that a node agrees with its children and with the requests that end at it."""
    children = list(node.children.values())
    assert node.parent is None or ends or len(children) > 1, "a node where nothing branches or ends"
    assert node.ends == len(ends)
    assert node.active == sum(r.id in active for r in ends) + sum(child.active for child in children)
    assert node.waiting == sum(r.entry is not None for r in ends) + sum(child.waiting for child in children)
    for request in ends:
        assert request.node is node and len(request.vector) == node.depth * DIGEST
        assert request.vector == node.vector[: len(request.vector)], "a request ends on a foreign path"
        assert request.entry in (None, (request.priority, node.depth, request.seq, request, request))
    for key, child in node.children.items():
        assert child.parent is node and child.depth > node.depth
        assert key == child.key == _at(child.vector, node.depth)
        assert child.vector.startswith(node.vector[: node.depth * DIGEST]), "a child on a foreign path"
    live = [entry for entry in node.heap if entry[3].entry is entry]
    assert {id(entry[3]) for entry in live} == {id(o) for o in (*ends, *children) if o.entry is not None}
    assert len(live) == sum(o.entry is not None for o in (*ends, *children)), "an owner has two live entries"
    assert bool(live) == bool(node.heap) == bool(node.waiting)
    assert not live or node.heap[0][:3] == min(live)[:3], "the top is neither the best nor its stale twin"
    if node.parent is not None and live:
        priority, count, seq, _, request = node.heap[0]
        count += node.parent.depth - node.depth if node.active else 0
        assert node.entry == (priority, count, seq, node, request), "a stale place in the parent's heap"
    else:
        assert node.entry is None


def _at(vector: bytes, chunk: int) -> bytes:
    """Return the cumulative hash after `chunk` + 1 chunks; empty where the vector is shorter."""
    return vector[chunk * DIGEST : (chunk + 1) * DIGEST]


def _agree(one: bytes, other: bytes, low: int, high: int) -> int:
    """Return how many chunks two vectors share, given that these are at least `low` and at most `high`."""
    while low < high:  # cumulative hashes: equal at a depth means equal everywhere above it
        middle = (low + high + 1) // 2
        if _at(one, middle - 1) == _at(other, middle - 1):
            low = middle
        else:
            high = middle - 1
    return low


def _hand_over(old: Owner, new: Owner, heap: list[Any]) -> None:
    """Let `new` take the place of `old` in the heap of their parent."""
    new.entry = None
    if old.entry is not None:
        priority, count, seq, _, request = old.entry
        old.entry, new.entry = None, (priority, count, seq, new, request)
        heappush(heap, new.entry)
