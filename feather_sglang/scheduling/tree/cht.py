"""The Chunked Hash Tree: which waiting request fits the running batch best (paper section 4.2, appendix A).

A request is the vector of its cumulative chunk hashes. The chunks of it that the active requests cover (the
*working set*) are always a prefix of that vector, so ``missing(r) = chunks(r) - matched depth(r)`` and no missing
count has to be stored per request. The tree is a path-compressed trie over the vectors; each node knows the best
waiting request below it, so a change touches the nodes on one path and nothing else, however many requests wait.

Pure data: imports neither SGLang nor torch. This module keeps the states of the requests; ``chunk_hash.py`` makes the
vectors, ``prefix_trie.py`` keeps the trie.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from heapq import heappop, heappush
from operator import attrgetter, index
from typing import NamedTuple

from feather_sglang.scheduling.tree.chunk_hash import DIGEST, PROCESS_SEED, HashedPrompt, TokenIds, hash_vector
from feather_sglang.scheduling.tree.prefix_trie import (
    SLACK,
    Member,
    Node,
    Request,
    agree,
    attach,
    check,
    detach,
    mute,
    shift,
)

CHUNK_TOKENS = 64  # where nobody says otherwise
_SMALLEST_BRANCH = 64  # a main branch holds at least one in so many of the active requests


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


class ChunkedHashTree:
    """Waiting, active and held requests, and the waiting one closest to the active ones.

    Parameters
    ----------
    chunk_size : int
        Tokens per chunk (K in the paper).
    seed : int, optional
        Hash seed, 0 .. 2**64 - 1. None: random per process. Only ``row_order`` depends on its value, so ranks that
        must agree on row order share a seed.

    Attributes
    ----------
    waiting, active, held
        Ids of the requests in each state, live read-only sets.
    distinct_chunks
        Chunks of all requests in the tree, those that several share counted once.

    Notes
    -----
    With C chunks and P <= C nodes on a request's path: ``insert`` O(tokens + P log C), a change of state O(P log L)
    amortised with L different lengths below a node (requests that come back among younger ones count as one each),
    ``find_best`` O(P), and O(1) when nothing changed since. How many wait does not enter. A hash collision makes two
    prompts look alike; that can cost speed, never correctness, as the tree only ranks.
    """

    def __init__(self, chunk_size: int = CHUNK_TOKENS, seed: int | None = None) -> None:
        self.chunk_size = index(chunk_size)
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        self._seed = PROCESS_SEED if seed is None else _checked_seed(seed)
        self._root = Node(b"", 0)
        self._waiting: dict[Hashable, Request] = {}
        self._held: dict[Hashable, Request] = {}
        self._active: OrderedDict[Hashable, Request] = OrderedDict()  # its first key is O(1), a dict's is not
        self._ages: deque[Request] = deque()  # the waiting requests by age, with some that have left ...
        self._returned: list[tuple[int, Request]] = []  # ... and a heap of those that came back into their midst
        self.waiting, self.active, self.held = self._waiting.keys(), self._active.keys(), self._held.keys()
        self._arrivals = 0
        self.distinct_chunks = 0
        self._muted: list[Node] = []  # above the deferred requests
        self._best: Candidate | None = None
        self._tip: Node | None = None  # the deepest node on every active request's path; None: to be found again
        self._branch: bytes | int = b""  # first hash of the main branch below the tip

    def reseed(self, seed: int) -> None:
        """Take another hash seed, before any request has entered."""
        if len(self):
            raise ValueError("a tree that holds requests cannot take another seed")
        self._seed = _checked_seed(seed)

    # -- changes -----------------------------------------------------------------------------------------------

    def insert(
        self,
        request_id: Hashable,
        token_ids: TokenIds | HashedPrompt,
        extra_key: object = None,
        priority: int = 0,
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
        self.resume()
        request = Request(request_id, vector, extra_key, index(priority), self._arrivals)
        self._arrivals += 1
        self._attach(request)
        self._wait(request)

    def add_to_batch(self, request_id: Hashable) -> None:
        """Move a waiting request into the active batch."""
        request = self._get(request_id, self._waiting)
        del self._waiting[request_id]
        self._active[request_id] = request
        self._shift(request, -1, 1)
        if self._tip is not None:  # it can only rise: to the common ancestor of itself and the new request
            while self._tip.active < len(self._active):
                self._tip = self._tip.parent

    def finish(self, request_id: Hashable) -> None:
        """Forget an active request."""
        request = self._get(request_id, self._active)
        self.resume()
        self._leave_batch(request)
        self._detach(request)

    def remove(self, request_id: Hashable) -> None:
        """Forget a waiting or held request."""
        request = self._get(request_id, self._waiting, self._held)
        self.resume()
        self._leave_queue(request)
        self._held.pop(request_id, None)
        self._detach(request)

    def hold(self, request_id: Hashable) -> None:
        """Hide a waiting request from ``find_best`` and ``peers`` until it is requeued."""
        request = self._get(request_id, self._waiting)
        self._leave_queue(request)
        self._held[request_id] = request

    def requeue(self, request_id: Hashable, token_ids: TokenIds | None = None) -> None:
        """Let an active or held request wait again at its original age, with new tokens if given."""
        request = self._get(request_id, self._active, self._held)
        vector = request.vector
        if token_ids is not None:
            vector = hash_vector(token_ids, self.chunk_size, self._seed, request.extra_key)
        self.resume()
        if self._held.pop(request_id, None) is None:
            self._leave_batch(request)
        if vector is not request.vector:
            self._detach(request)
            request.vector, request.depth = vector, len(vector) // DIGEST
            self._attach(request)
        self._wait(request)

    def defer(self, request_id: Hashable, depth: int) -> None:
        """Leave out of the search the waiting requests that share ``depth`` chunks with an active or waiting one.

        For a prefix that the active request is about to compute: who comes after it finds it in the cache. Or for one
        that had better be computed later; a waiting request that shares so much with nobody is not deferred itself
        (see ``hold``). Deferred requests still wait: ``peers``, the tips and ``oldest`` count them.
        Lasts until ``resume``, or until a request enters or leaves the tree.
        """
        request = self._get(request_id, self._active, self._waiting)
        if not 1 <= depth:
            raise ValueError(f"depth must be at least 1, got {depth}")
        top = None
        node = request.parent
        while node.depth >= depth:
            top, node = node, node.parent
        if top is not None and not top.muted:
            mute(top, True)
            self._muted.append(top)
            self._best = None

    def resume(self) -> None:
        """End every ``defer``."""
        if self._muted:
            for node in self._muted:
                mute(node, False)
            self._muted = []
            self._best = None

    def is_deferred(self, request_id: Hashable) -> bool:
        """Return whether ``find_best`` leaves out a request that waits or is held."""
        return request_id in self._held or self._is_muted(self._get(request_id, self._waiting).parent)

    @property
    def deferred(self) -> int:
        """How many waiting requests are deferred."""
        return sum([node.waiting for node in self._muted if not self._is_muted(node.parent)])

    # -- questions ---------------------------------------------------------------------------------------------

    def find_best(self) -> Candidate | None:
        """Return the first waiting request by priority, missing chunks, age, but for the deferred; None without one."""
        if self._best is None and (best := self._root.best()):
            self._best = self._describe(best[4])
        return self._best

    def candidate(self, request_id: Hashable) -> Candidate:
        """Return the figures of ``find_best`` for a given waiting request."""
        return self._describe(self._get(request_id, self._waiting))

    def best_in_branch(self) -> Candidate | None:
        """Return the best waiting request inside the main branch; None without one, or when nothing waits there."""
        branch = self._main_branch()
        entry = None if branch is None or self._is_muted(branch) else branch.best()
        return None if entry is None else self._describe(entry[4])

    def branch_loss(self, request_id: Hashable) -> int:
        """Return how many chunks of the main branch a waiting request would not share; 0 without a main branch.

        The paper's tip says nothing about a batch that is mixed already: its tip is short whatever joins, so every
        addition looks free and the batch stays mixed for good. The *main branch* is the branch below the tip that
        most active requests pass: the tip would move to its end if the others left. It is kept until fewer than two
        active requests pass it, so that a batch does not waver between groups of equal size. Where no branch has two,
        it is the one that most deferred requests will join: a batch that is still small gathers around one prefix.
        """
        branch = self._main_branch()
        if branch is None:
            return 0
        request = self._get(request_id, self._waiting)
        return branch.depth - agree(request.vector, branch.vector, 0, min(request.depth, branch.depth))

    @property
    def shared_tip(self) -> int:
        """Depth of the tip that two requests at least share, active or waiting: what an addition can really cost.

        A lone request's tip is its whole prompt, of which nobody may have a part.
        """
        node = self._tip_node()
        while node.depth and node.active + node.waiting < 2:
            node = node.parent
        return node.depth

    def missing_count(self, request_id: Hashable) -> int:
        """Return how many chunks of a request the active requests do not cover; 0 for an active one."""
        request = self._get(request_id, self._waiting, self._active, self._held)
        return 0 if request.active else request.depth - self._matched(request).depth

    def covered(self, request_id: Hashable) -> int:
        """Return how many chunks of a request the active requests cover; all of an active one."""
        request = self._get(request_id, self._waiting, self._active, self._held)
        return request.depth if request.active else self._matched(request).depth

    def common(self, request_id: Hashable) -> int:
        """Return how many chunks of a request another one in the tree has, too."""
        return self._get(request_id, self._waiting, self._active, self._held).parent.depth

    @property
    def active_groups(self) -> int:
        """How many groups the active requests are of: those that share their first chunk are one."""
        tops: set[int] = set()
        for request in self._active.values():
            member: Member = request
            while member.parent.depth:
                member = member.parent
            tops.add(id(member))
        return len(tops)

    def path(self, request_id: Hashable) -> list[tuple[Hashable, int]]:
        """Return the parts of a request's prompt that others may have as well, the last one first.

        Each is what stands for it, alike for all that have it until a request enters or leaves the tree, and its
        chunks.
        """
        node = self._get(request_id, self._active, self._waiting, self._held).parent
        parts: list[tuple[Hashable, int]] = []
        while node.depth:
            parts.append((node, node.depth - node.parent.depth))
            node = node.parent
        return parts

    def sharing(self, request_id: Hashable, depth: int) -> int:
        """Return how many waiting requests share the first ``depth`` chunks of a request, itself included."""
        member: Member = self._get(request_id, self._waiting, self._active, self._held)
        while member.parent.depth >= max(depth, 1):
            member = member.parent
        return member.waiting

    def sharers(self, request_id: Hashable) -> list[tuple[int, int]]:
        """Return where waiting ones part from an active request, deepest first: (depth in chunks, how many share that).

        As far as no other active one shares it.
        """
        node = self._get(request_id, self._waiting, self._active, self._held).parent
        parting: list[tuple[int, int]] = []
        while node.depth and node.active < 2:
            if node.waiting:
                parting.append((node.depth, node.waiting))
            node = node.parent
        return parting

    def common_depth(self, one: Hashable, other: Hashable) -> int:
        """Return how many leading chunks two requests have in common, whatever their states."""
        a, b = (self._get(r, self._waiting, self._active, self._held) for r in (one, other))
        return agree(a.vector, b.vector, 0, min(a.depth, b.depth))

    def depth(self, request_id: Hashable) -> int:
        """Return the length of a request's prompt in chunks."""
        return self._get(request_id, self._waiting, self._active, self._held).depth

    def row_order(self, request_ids: Iterable[Hashable]) -> list[int] | None:
        """Return the permutation that brings requests into a depth-first prefix order; None if they are in one.

        At every level of the tree those that share a prefix become neighbours. Which branch comes first does not
        matter, so a request that joins its group at the end stays there. Unknown ones share nothing, and go first.
        """
        requests = map(self._find, request_ids)
        # Those below one node may stand in any order.
        nodes = [self._root if request is None else request.parent for request in requests]
        if _together(nodes, self._root):
            return None
        # A node's path begins those of the nodes below it: sorted by their paths they follow it.
        by_path = sorted(dict.fromkeys(nodes), key=lambda node: node.vector[: DIGEST * node.depth])
        ranks = {node: rank for rank, node in enumerate(by_path)}
        return sorted(range(len(nodes)), key=[ranks[node] for node in nodes].__getitem__)

    def oldest(self) -> Hashable | None:
        """Return the waiting request that was inserted first; None when nothing waits."""
        ages, returned = self._ages, self._returned
        while ages and not ages[0].waiting:
            ages.popleft().in_line = False
        while returned and not returned[0][1].waiting:
            heappop(returned)
        if returned and (not ages or returned[0][0] < ages[0].seq):
            return returned[0][1].id
        return ages[0].id if ages else None

    @property
    def tip(self) -> int:
        """Depth in chunks of the prefix shared by all active requests; 0 when none is active."""
        if len(self._active) == 1:
            return next(iter(self._active.values())).depth
        return self._tip_node().depth

    def __len__(self) -> int:
        return len(self._waiting) + len(self._active) + len(self._held)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._active or request_id in self._waiting or request_id in self._held

    # -- the trie ----------------------------------------------------------------------------------------------

    def _attach(self, request: Request) -> None:
        attach(self._root, request)
        self.distinct_chunks += request.depth - request.parent.depth

    def _detach(self, request: Request) -> None:
        self.distinct_chunks -= request.depth - request.parent.depth
        detach(request)

    def _shift(self, request: Request, waiting: int, active: int) -> None:
        """Change the counts on a request's path; every change of state passes here."""
        shift(request, waiting, active)
        self._best = None
        if not self._waiting or len(self._ages) + len(self._returned) > 2 * len(self._waiting) + SLACK:
            for stale in self._ages:
                stale.in_line = False
            self._ages = deque(sorted(self._waiting.values(), key=attrgetter("seq")))
            self._returned = []
            for waiting_request in self._ages:
                waiting_request.in_line = True

    def _wait(self, request: Request) -> None:
        """Enter an attached request into the queue."""
        self._waiting[request.id] = request
        ages = self._ages
        if not request.in_line:
            if ages and ages[0].seq < request.seq < ages[-1].seq:
                heappush(self._returned, (request.seq, request))
            else:
                request.in_line = True
                (ages.appendleft if ages and request.seq < ages[0].seq else ages.append)(request)
        self._shift(request, 1, 0)

    def _leave_queue(self, request: Request) -> None:
        """Take a request out of the queue if it waits; it stays attached."""
        if self._waiting.pop(request.id, None) is not None:
            self._shift(request, -1, 0)

    def _leave_batch(self, request: Request) -> None:
        """Take a request out of the batch; it stays attached."""
        del self._active[request.id]
        self._shift(request, 0, -1)
        self._tip = None  # it can only deepen; looked for when next asked

    def _tip_node(self) -> Node:
        """Return the deepest node that every active request passes; the root when none is active."""
        if self._tip is not None:
            return self._tip
        if not self._active:
            return self._root
        node = next(iter(self._active.values())).parent
        while node.active < len(self._active):
            node = node.parent
        if len(self._active) > 1:  # then active requests part or end there, so it stays as long as they do
            self._tip = node
        return node

    def _main_branch(self) -> Node | None:
        """Return the end of the main branch below the tip (see ``branch_loss``), None where the batch is not mixed."""
        tip = self._tip_node()
        if not tip.busy:
            return self._coming_branch()
        branch = tip.members.get(self._branch)
        if branch not in tip.busy:
            branch = max(tip.busy, key=attrgetter("active", "key"))  # the key decides alike on every rank
            self._branch = branch.key
        if branch.active * _SMALLEST_BRANCH < len(self._active):
            return None
        while len(branch.busy) == 1 and (inner := next(iter(branch.busy))).active == branch.active:
            branch = inner
        return branch

    def _coming_branch(self) -> Node | None:
        """Return the branch that most deferred requests will join as soon as its prefix is computed."""
        coming = [node for node in self._muted if 0 < node.active < len(self._active) and node.waiting]
        return max(coming, key=attrgetter("waiting", "vector"), default=None)

    @staticmethod
    def _is_muted(node: Node) -> bool:
        """Return whether a node or one above it is muted."""
        while not node.muted and node.depth:
            node = node.parent
        return node.muted

    @staticmethod
    def _matched(request: Request) -> Node:
        """Return the deepest node of the working set above a request that is not active (the root if none)."""
        node = request.parent
        while not node.active and node.depth:
            node = node.parent
        return node

    def _describe(self, request: Request) -> Candidate:
        """Return the candidate's figures (paper algorithm 4)."""
        tip, matched = self._tip_node(), self._matched(request)
        # Every active node lies above the tip or below it, so the shallower of the two is common to both.
        after = matched if matched.depth < tip.depth else tip
        before = tip.depth if len(self._active) != 1 else self.tip
        return Candidate(request.id, request.depth - matched.depth, before, after.depth, after.waiting - 1)

    # -- states ------------------------------------------------------------------------------------------------

    def _state(self, request_id: Hashable) -> str:
        return "waiting" if request_id in self._waiting else "active" if request_id in self._active else "held"

    def _find(self, request_id: Hashable) -> Request | None:
        """Return the request, whatever its state; most who ask have active ones."""
        return self._active.get(request_id) or self._waiting.get(request_id) or self._held.get(request_id)

    def _get(self, request_id: Hashable, *states: dict[Hashable, Request]) -> Request:
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
        members = check(self._root)
        requests = {id(member): member for member in members if isinstance(member, Request)}
        for state in (self._waiting, self._active, self._held):
            for request_id, request in state.items():
                assert requests.pop(id(request)) is request and request.id == request_id
                assert (request.waiting, request.active) == (state is self._waiting, state is self._active)
        assert not requests, "a request in the trie and in no state"
        assert self.distinct_chunks == sum(m.depth - m.parent.depth for m in members if m is not self._root)
        common = [m for m in members if m.active == len(self._active)] if self._active else [self._root]
        assert self.tip == max(member.depth for member in common), "the tip is not the deepest common point"
        oldest = min(self._waiting.values(), key=attrgetter("seq"), default=None)
        assert self.oldest() == (oldest and oldest.id), "oldest is not the oldest"
        assert len(self._ages) + len(self._returned) <= 2 * len(self._waiting) + SLACK, "the ages grow"
        ranked = [request for request in self._waiting.values() if not self._is_muted(request.parent)]
        order = [(r.priority, self.missing_count(r.id), r.seq, r.id) for r in ranked]
        best = self.find_best()
        assert (best and best.request_id) == (min(order)[3] if order else None), "find_best is not the best"
        assert best is None or best == self.candidate(best.request_id), "the cached candidate is stale"


def _checked_seed(seed: int) -> int:
    if not 0 <= index(seed) < 1 << 64:
        raise ValueError(f"seed must be in 0 .. 2**64 - 1, got {seed}")
    return index(seed)


def _together(nodes: Iterable[Node], root: Node) -> bool:
    """Whether these are in a depth-first order, of branches in any order."""
    path: list[Node] = [root]  # from the root to the last node
    places = {root: 0}  # in the path
    left: set[Node] = set()  # none of these, nor any below them, may follow
    for node in nodes:
        if node is path[-1]:
            continue
        entered = []
        while node not in places:
            if node in left:
                return False
            entered.append(node)
            node = node.parent
        for passed in path[places[node] + 1 :]:
            del places[passed]
            left.add(passed)
        del path[places[node] + 1 :]
        for inner in reversed(entered):
            places[inner] = len(path)
            path.append(inner)
    return True
