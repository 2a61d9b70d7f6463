"""The Chunked Hash Tree: which waiting request fits the running batch best (paper section 4.2, appendix A).

A request is the vector of its cumulative chunk hashes. The chunks of it that the active requests cover (the
*working set*) are always a prefix of that vector, so ``missing(r) = chunks(r) - matched depth(r)`` and no missing
count has to be stored per request. The tree is a path-compressed trie over the vectors; each node knows the best
waiting request below it, so a change touches the nodes on one path and nothing else, however many requests wait.

Pure data: imports neither SGLang nor torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, KeysView, Mapping, Sequence
from heapq import heapify, heappop, heappush
from operator import index
from typing import Any, NamedTuple

from feather_sglang.chunk_hash import DIGEST, PROCESS_SEED, hash_vector

_SLACK = 16  # stale heap entries that are not worth a clean-up


class Candidate(NamedTuple):
    """A waiting request beside the active batch: the policy's view of adding it (paper 4.2.4).

    ``missing_chunks``: its chunks outside the working set. ``tip_before``, ``tip_after``: depth in chunks of the
    prefix that all active requests share, now and with it. ``peers``: other waiting requests that share its prefix
    of ``tip_after`` chunks.
    """

    request_id: Hashable
    missing_chunks: int
    tip_before: int
    tip_after: int
    peers: int


class UnknownRequestError(KeyError):
    """The tree does not hold this request."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show its repr


class RequestStateError(ValueError):
    """The request is known, but not in a state that allows the operation."""


class _Owner:
    """What a heap entry speaks for: a child node or a request ending at the heap's node.

    Entries are ``(priority, count, seq, owner, request)``; one is live while ``owner.entry is entry``.
    """

    __slots__ = ("entry",)

    entry: tuple[int, int, int, _Owner, _Request] | None

    def __lt__(self, other: object) -> bool:
        return False  # reached only between a live entry and its stale twin, whose order does not matter


class _Request(_Owner):
    __slots__ = ("extra_key", "id", "node", "priority", "seq", "vector")

    node: _Node

    def __init__(self, request_id: Hashable, vector: bytes, extra_key: object, priority: int, seq: int) -> None:
        self.entry = None  # set exactly while waiting
        self.id = request_id
        self.vector = vector
        self.extra_key = extra_key
        self.priority = priority
        self.seq = seq


class _Node(_Owner):
    """A point where requests branch or end; its edge covers chunks ``parent.depth .. depth`` of ``vector``.

    Nothing branches or ends inside an edge, so a node is active (in the working set) as a whole or not at all.
    ``heap`` ranks the children and the requests ending here. An entry's count, less this node's depth, is the missing
    count below an active node. For an inactive child it is the request's length, for an active one the missing count
    rebased on this node's depth; so activating a node changes the entries along its path only.
    """

    __slots__ = ("active", "children", "depth", "ends", "heap", "parent", "vector", "waiting")

    def __init__(self, parent: _Node | None, vector: bytes, depth: int) -> None:
        self.entry = None
        self.parent = parent
        self.vector = vector
        self.depth = depth
        self.children: dict[bytes, _Node] = {}  # by the hash at the child's first chunk
        self.ends = 0  # requests in any state whose vector ends here
        self.active = 0  # active requests here and below
        self.waiting = 0  # waiting requests here and below
        self.heap: list[Any] = []


class ChunkedHashTree:
    """Waiting, active and held requests, and the waiting one closest to the active ones.

    Parameters
    ----------
    chunk_size : int
        Tokens per chunk (K in the paper).
    seed : int, optional
        Hash seed, 0 .. 2**64 - 1. None: random per process. Only ``order_key`` depends on its value, so ranks that
        must agree on row order share a seed.

    Notes
    -----
    With C chunks and P <= C nodes on a request's path: ``insert`` O(tokens + P log C), changes of state
    O(P log fan-out), ``find_best`` O(P), O(1) when nothing changed since. A hash collision makes two prompts look
    alike; that can cost speed, never correctness, as the tree only ranks.
    """

    def __init__(self, chunk_size: int = 64, seed: int | None = None) -> None:
        self.chunk_size = index(chunk_size)
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        self._seed = PROCESS_SEED if seed is None else index(seed)
        if not 0 <= self._seed < 1 << 64:
            raise ValueError(f"seed must be in 0 .. 2**64 - 1, got {seed}")
        self._root = _Node(None, b"", 0)
        self._waiting: dict[Hashable, _Request] = {}
        self._held: dict[Hashable, _Request] = {}
        self._active: OrderedDict[Hashable, _Request] = OrderedDict()  # its first key is O(1), a dict's is not
        self._ages: list[tuple[int, _Request]] = []  # lazy heap behind oldest()
        self._arrivals = 0
        self._best: Candidate | None = None
        self._tip: _Node | None = None  # None: to be found again

    # -- changes -----------------------------------------------------------------------------------------------

    def insert(
        self, request_id: Hashable, token_ids: Sequence[int], extra_key: object = None, priority: int = 0
    ) -> None:
        """Let a new request wait.

        Parameters
        ----------
        token_ids : sequence of int
            Prompt; an int64 buffer (``array("q")``, NumPy) is read in place.
        extra_key : str, bytes, tuple of these, or None
            Requests share prefixes only with requests of an equal key (by ``repr``).
        priority : int
            Lower is served first, before any missing count.
        """
        if request_id in self:
            raise RequestStateError(f"request {request_id!r} is already in the tree ({self._state(request_id)})")
        vector = hash_vector(token_ids, self.chunk_size, self._seed, extra_key)
        request = _Request(request_id, vector, extra_key, index(priority), self._arrivals)
        self._arrivals += 1
        self._attach(request)
        self._wait(request)

    def add_to_batch(self, request_id: Hashable) -> None:
        """Move a waiting request into the active batch."""
        request = self._get(request_id, self._waiting)
        del self._waiting[request_id]
        self._active[request_id] = request
        request.entry = None
        self._shift(request.node, -1, 1)
        if len(self._active) == 1:
            self._tip = request.node
        elif self._tip is not None:  # the tip can only rise: to the common ancestor of itself and the new request
            while self._tip.active < len(self._active):
                self._tip = self._tip.parent
                assert self._tip is not None

    def finish(self, request_id: Hashable) -> None:
        """Forget an active request."""
        self._leave_batch(self._get(request_id, self._active))

    def remove(self, request_id: Hashable) -> None:
        """Forget a waiting or held request."""
        request = self._get(request_id, self._waiting, self._held)
        self._leave_queue(request)
        self._held.pop(request_id, None)
        self._detach(request)

    def hold(self, request_id: Hashable) -> None:
        """Hide a waiting request from ``find_best`` and ``peers`` until it is requeued."""
        request = self._get(request_id, self._waiting)
        self._leave_queue(request)
        self._held[request_id] = request

    def requeue(self, request_id: Hashable, token_ids: Sequence[int] | None = None) -> None:
        """Let an active or held request wait again at its original age, with new tokens if given."""
        request = self._get(request_id, self._active, self._held)
        vector = (
            request.vector
            if token_ids is None
            else hash_vector(token_ids, self.chunk_size, self._seed, request.extra_key)
        )
        if request_id in self._active:
            self._leave_batch(request)
        else:
            del self._held[request_id]
            self._detach(request)
        request.vector = vector
        self._attach(request)
        self._wait(request)

    # -- questions ---------------------------------------------------------------------------------------------

    def find_best(self) -> Candidate | None:
        """Return the waiting request first in (priority, missing chunks, age); None when nothing waits."""
        if self._best is None and self._root.heap:
            self._best = self._describe(self._root.heap[0][4])
        return self._best

    def candidate(self, request_id: Hashable) -> Candidate:
        """Return the figures of ``find_best`` for a given waiting request."""
        return self._describe(self._get(request_id, self._waiting))

    def missing_count(self, request_id: Hashable) -> int:
        """Return how many chunks of a request the active requests do not cover; 0 for an active one."""
        request = self._get(request_id, self._waiting, self._active, self._held)
        return len(request.vector) // DIGEST - self._matched(request).depth

    def order_key(self, request_id: Hashable) -> bytes:
        """Return the packed hash vector: sorting by it brings requests into a depth-first prefix order."""
        return self._get(request_id, self._waiting, self._active, self._held).vector

    def oldest(self) -> Hashable | None:
        """Return the waiting request that was inserted first; None when nothing waits."""
        while self._ages and self._ages[0][1].entry is None:
            heappop(self._ages)
        return self._ages[0][1].id if self._ages else None

    @property
    def tip(self) -> int:
        """Depth in chunks of the prefix shared by all active requests; 0 when none is active."""
        return self._tip_node().depth

    @property
    def waiting(self) -> KeysView[Hashable]:
        """Ids of the waiting requests, a live read-only set."""
        return self._waiting.keys()

    @property
    def active(self) -> KeysView[Hashable]:
        """Ids of the active requests, a live read-only set."""
        return self._active.keys()

    @property
    def held(self) -> KeysView[Hashable]:
        """Ids of the held requests, a live read-only set."""
        return self._held.keys()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._active) + len(self._held)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._waiting or request_id in self._active or request_id in self._held

    # -- the trie ----------------------------------------------------------------------------------------------

    def _attach(self, request: _Request) -> None:
        """Find or make the node where the request's vector ends."""
        vector = request.vector
        end = len(vector) // DIGEST
        node = self._root
        while node.depth < end:
            key = _at(vector, node.depth)
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(node, vector, end)
            elif child.depth > end or _at(vector, child.depth - 1) != _at(child.vector, child.depth - 1):
                fork = _agree(vector, child.vector, node.depth + 1, min(end, child.depth))
                child = self._split(node, child, key, fork)
            node = child
        node.ends += 1
        request.node = node

    def _detach(self, request: _Request) -> None:
        """Take the request's end out and drop the nodes that nothing needs any more."""
        node = request.node
        node.ends -= 1
        if not node.ends and not node.children and node.parent is not None:
            del node.parent.children[_at(node.vector, node.parent.depth)]
            node = node.parent
        parent = node.parent
        if parent is not None and not node.ends and len(node.children) == 1:  # nothing branches or ends here
            (child,) = node.children.values()
            parent.children[_at(node.vector, parent.depth)] = child
            child.parent = parent
            _hand_over(node, child, parent.heap)

    @staticmethod
    def _split(parent: _Node, child: _Node, key: bytes, depth: int) -> _Node:
        """Put a node at `depth` on the edge from `parent` to `child`."""
        middle = _Node(parent, child.vector, depth)
        middle.active, middle.waiting = child.active, child.waiting
        parent.children[key] = middle
        middle.children[_at(child.vector, depth)] = child
        child.parent = middle
        _hand_over(child, middle, parent.heap)
        if middle.entry is not None:
            priority, count, seq, _, request = middle.entry
            rebased = count + depth - parent.depth if child.active else count
            child.entry = (priority, rebased, seq, child, request)
            middle.heap.append(child.entry)
        return middle

    def _shift(self, node: _Node | None, waiting: int, active: int) -> None:
        """Change the counts of a node and all above it, and bring their places in the heaps up to date."""
        while node is not None:
            node.waiting += waiting
            node.active += active
            heap = node.heap
            if len(heap) > 2 * (len(node.children) + node.ends) + _SLACK:
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
        self._best = None
        if len(self._ages) > 2 * len(self._waiting) + _SLACK:
            self._ages = [(request.seq, request) for request in self._waiting.values()]
            heapify(self._ages)

    def _wait(self, request: _Request) -> None:
        """Enter an attached request into the queue."""
        node = request.node
        request.entry = (request.priority, node.depth, request.seq, request, request)
        heappush(node.heap, request.entry)
        heappush(self._ages, (request.seq, request))
        self._waiting[request.id] = request
        self._shift(node, 1, 0)

    def _leave_queue(self, request: _Request) -> None:
        """Take a request out of the queue if it waits; it stays attached."""
        if self._waiting.pop(request.id, None) is not None:
            request.entry = None
            self._shift(request.node, -1, 0)

    def _leave_batch(self, request: _Request) -> None:
        """Take an active request out of the batch and detach it."""
        del self._active[request.id]
        self._shift(request.node, 0, -1)
        self._detach(request)
        self._tip = None  # it can only deepen; looked for when next asked

    def _tip_node(self) -> _Node:
        """Return the deepest node that every active request passes."""
        if self._tip is None or not self._active:
            node = next(iter(self._active.values())).node if self._active else self._root
            while node.active < len(self._active):
                assert node.parent is not None
                node = node.parent
            self._tip = node
        return self._tip

    @staticmethod
    def _matched(request: _Request) -> _Node:
        """Return the deepest node of the working set on the request's path (the root if none)."""
        node = request.node
        while not node.active and node.parent is not None:
            node = node.parent
        return node

    def _describe(self, request: _Request) -> Candidate:
        """Return the candidate's figures (paper algorithm 4)."""
        tip, matched = self._tip_node(), self._matched(request)
        # Every active node lies on the tip's path or below the tip, so the shallower of the two is common to both.
        after = matched if matched.depth < tip.depth else tip
        missing = len(request.vector) // DIGEST - matched.depth
        return Candidate(request.id, missing, tip.depth, after.depth, after.waiting - 1)

    # -- states ------------------------------------------------------------------------------------------------

    def _state(self, request_id: Hashable) -> str:
        return "waiting" if request_id in self._waiting else "active" if request_id in self._active else "held"

    def _get(self, request_id: Hashable, *states: dict[Hashable, _Request]) -> _Request:
        """Return the request if it is in one of the states; raise otherwise."""
        for state in states:
            request = state.get(request_id)
            if request is not None:
                return request
        if request_id not in self:
            raise UnknownRequestError(f"request {request_id!r} is not in the tree")
        raise RequestStateError(f"request {request_id!r} is {self._state(request_id)}: operation not allowed")

    def check_invariants(self) -> None:
        """Recompute every derived figure from the requests alone and assert that it agrees (for tests; slow)."""
        ends: dict[_Node, list[_Request]] = {}
        for state in (self._waiting, self._active, self._held):
            for request_id, request in state.items():
                assert request.id == request_id and (request.entry is not None) == (state is self._waiting)
                ends.setdefault(request.node, []).append(request)
        assert sum(map(len, ends.values())) == len(self), "a request is in two states"
        nodes = [self._root]
        for node in nodes:  # grows while it is read: parents before children
            nodes.extend(node.children.values())
        assert ends.keys() <= set(nodes), "a request ends outside the tree"
        for node in nodes:
            _check_node(node, ends.get(node, []), self._active)
        shared = [node for node in nodes if node.active == len(self._active)] if self._active else [self._root]
        assert self._tip_node() is max(shared, key=lambda node: node.depth), "the tip is not the deepest common node"
        assert len(self._ages) <= 2 * len(self._waiting) + _SLACK, "the age heap grows"
        order = [(r.priority, self.missing_count(r.id), r.seq, r.id) for r in self._waiting.values()]
        best = self.find_best()
        assert (best and best.request_id) == (min(order)[3] if order else None), "find_best is not the best"
        assert best is None or best == self.candidate(best.request_id), "the cached candidate is stale"


def _check_node(node: _Node, ends: list[_Request], active: Mapping[Hashable, _Request]) -> None:
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
        assert child.parent is node and child.depth > node.depth and key == _at(child.vector, node.depth)
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
    """Return the cumulative hash after `chunk` + 1 chunks."""
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


def _hand_over(old: _Owner, new: _Owner, heap: list[Any]) -> None:
    """Let `new` take the place of `old` in the heap of their parent."""
    new.entry = None
    if old.entry is not None:
        priority, count, seq, _, request = old.entry
        old.entry, new.entry = None, (priority, count, seq, new, request)
        heappush(heap, new.entry)
