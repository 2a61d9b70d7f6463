"""A path-compressed trie over chunk hash vectors in which every node knows the best waiting request below it.

The mechanics of the Chunked Hash Tree: where vectors end, branch and merge, and how they rank. Which state a request is
in is the business of ``cht.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from heapq import heappop, heappush
from itertools import chain

from feather_sglang.scheduling.tree.chunk_hash import DIGEST

SLACK = 16  # stale entries that are not worth a clean-up

Entry = tuple[int, int, int, "Member", "Request"]  # priority, count, seq, member, request


class Member:
    """A child of a node: another node, or a request. Its edge covers the chunks from the parent's depth on.

    Nothing branches or ends inside an edge, so it is in the working set as a whole or not at all.
    """

    __slots__ = ("active", "depth", "entry", "key", "parent", "vector", "waiting")

    parent: Node
    key: bytes | int  # among the parent's members: the hash at the edge's first chunk; a request's seq if it ends there
    entry: Entry | None  # its live entry in the parent; all its older ones are stale

    def __init__(self, vector: bytes, depth: int) -> None:
        self.vector = vector  # of this request, or of any below this node
        self.depth = depth  # chunks
        self.active = 0  # active requests here and below
        self.waiting = 0  # waiting requests here and below
        self.entry = None

    def __lt__(self, other: object) -> bool:
        return False  # reached only between a live entry and its stale twin, whose order does not matter


class Request(Member):
    """A request in any state; ``seq`` is its rank by age, ``in_line`` whether the tree's line by age holds it."""

    __slots__ = ("extra_key", "id", "in_line", "priority", "seq")

    def __init__(self, request_id: Hashable, vector: bytes, extra_key: object, priority: int, seq: int) -> None:
        super().__init__(vector, len(vector) // DIGEST)
        self.id = request_id
        self.extra_key = extra_key
        self.priority = priority
        self.seq = seq
        self.in_line = False


class Node(Member):
    """A point where requests branch or several end; all but the root have at least two members.

    A node ranks its members. An entry's count, less this node's depth, is the missing count below an active node. For
    an inactive member it is a request's length, for an active one the missing count rebased on this node's depth; so
    activating a node changes the entries along its path only.

    Requests of one priority and length mostly come in order of age. Such a run waits in a line, and only its head is in
    the heap; so the heap grows with the number of different lengths, not with the number of requests.
    """

    __slots__ = ("busy", "entries", "heap", "lines", "members", "muted")

    def __init__(self, vector: bytes, depth: int) -> None:
        super().__init__(vector, depth)
        self.members: dict[bytes | int, Member] = {}
        self.busy: dict[Node, None] = {}  # members with two or more active requests, in the order they became so
        self.heap: list[Entry] = []
        self.lines: dict[tuple[int, int], deque[Entry]] = {}  # by priority and count; a line's head is also in the heap
        self.entries = 0  # in the heap and the lines, live or stale
        self.muted = False  # its parent does not rank it, though requests wait below it

    def put(self, key: bytes | int, member: Member) -> None:
        """Hang a member below this node."""
        member.parent, member.key = self, key
        self.members[key] = member
        if isinstance(member, Node) and member.active > 1:
            self.busy[member] = None

    def push(self, entry: Entry) -> None:
        """Rank a new entry."""
        self.entries += 1
        line = self.lines.get(entry[:2])
        if line is None:
            self.lines[entry[:2]] = deque((entry,))
        elif line[-1][2] < entry[2]:
            line.append(entry)
            return
        heappush(self.heap, entry)

    def best(self) -> Entry | None:
        """Return the first live entry; drop the stale ones before it, and all of them once they are the most."""
        if self.entries > 2 * len(self.members) + SLACK:
            self._drop_stale()
        heap = self.heap
        while heap:
            entry = heap[0]
            if entry[3].entry is entry:
                return entry
            heappop(heap)
            self.entries -= 1
            line = self.lines.get(entry[:2])
            if line is not None and line[0] is entry:  # the next in line takes its place
                line.popleft()
                if line:
                    heappush(heap, line[0])
                else:
                    del self.lines[entry[:2]]
        return None

    def _drop_stale(self) -> None:
        entries = {id(entry): entry for entry in chain(self.heap, *self.lines.values()) if entry[3].entry is entry}
        self.heap, self.lines, self.entries = [], {}, 0
        for entry in sorted(entries.values()):
            self.push(entry)


def attach(root: Node, request: Request) -> None:
    """Hang a request where its vector leaves the trie, or ends in it."""
    vector, depth = request.vector, request.depth
    node = root
    while node.depth < depth:
        key = _at(vector, node.depth)
        member = node.members.get(key)
        if member is None:
            node.put(key, request)
            return
        end = DIGEST * member.depth
        if isinstance(member, Node) and vector[end - DIGEST : end] == member.vector[end - DIGEST : end]:
            node = member
        else:
            node = _split(member, agree(vector, member.vector, node.depth + 1, min(depth, member.depth)))
    node.put(request.seq, request)


def detach(request: Request) -> None:
    """Take a request that neither waits nor is active out, and its node if that has one member left."""
    node = request.parent
    del node.members[request.key]
    if len(node.members) == 1 and node.depth:
        (member,) = node.members.values()
        node.parent.busy.pop(node, None)
        node.parent.put(node.key, member)
        _hand_over(node, member)


def shift(request: Request, waiting: int, active: int) -> None:
    """Change the counts of a request and of all nodes above it, and bring their ranks up to date."""
    request.waiting += waiting
    request.active += active
    node = request.parent
    if waiting:
        request.entry = None
        if waiting > 0:
            request.entry = (request.priority, request.depth, request.seq, request, request)
            node.push(request.entry)
    _climb(node, waiting, active)


def mute(node: Node, muted: bool) -> None:
    """Take a node out of its parent's ranking, or bring it back; the counts stay."""
    node.muted = muted
    _climb(node, 0, 0)


def _climb(node: Node, waiting: int, active: int) -> None:
    """Change the counts of a node and of all above it, and rank each anew."""
    while True:
        node.waiting += waiting
        node.active += active
        if not node.depth:
            return
        best = None if node.muted else node.best()
        parent = node.parent
        if active > 0 and node.active == 2:
            parent.busy[node] = None
        elif active < 0 and node.active == 1:
            del parent.busy[node]
        if best is None:
            node.entry = None
        else:
            priority, count, seq, _, first = best
            if node.active:
                count += parent.depth - node.depth
            entry = node.entry
            if entry is None or entry[2] != seq or entry[1] != count:
                node.entry = (priority, count, seq, node, first)
                parent.push(node.entry)
        node = parent


def agree(one: bytes, other: bytes, low: int, high: int) -> int:
    """Return how many chunks two vectors share, given that these are at least `low` and at most `high`."""
    while low < high:  # cumulative hashes: equal at a depth means equal everywhere above it
        middle = (low + high + 1) // 2
        end = DIGEST * middle
        if one[end - DIGEST : end] == other[end - DIGEST : end]:
            low = middle
        else:
            high = middle - 1
    return low


def check(root: Node) -> list[Member]:
    """Assert that every node agrees with its members; return all nodes and requests (for tests; slow)."""
    found: list[Member] = [root]
    for member in found:  # grows while it is read
        if isinstance(member, Node):
            found.extend(member.members.values())
            _check_node(member)
    return found


def _check_node(node: Node) -> None:
    members = list(node.members.values())
    assert not node.depth or len(members) > 1, "a node where nothing branches or ends"
    assert node.active == sum(member.active for member in members)
    assert set(node.busy) == {member for member in members if member.active > 1}
    assert node.waiting == sum(member.waiting for member in members)
    for key, member in node.members.items():
        assert member.parent is node and member.key == key
        assert member.vector.startswith(node.vector[: node.depth * DIGEST]), "a member on a foreign path"
        silent = member.muted or member.best() is None if isinstance(member, Node) else member.waiting == 0
        assert (member.entry is None) == silent
        if isinstance(member, Request) and member.depth == node.depth:
            assert key == member.seq
        else:
            assert member.depth > node.depth and key == _at(member.vector, node.depth)
    followers = [entry for line in node.lines.values() for entry in list(line)[1:]]
    assert node.entries == len(node.heap) + len(followers)
    assert {id(line[0]) for line in node.lines.values()} <= {id(entry) for entry in node.heap}
    live = [entry for entry in (*node.heap, *followers) if entry[3].entry is entry]
    assert sorted(live) == sorted(member.entry for member in members if member.entry is not None)
    for member in members:
        if isinstance(member, Node) and not member.muted and (best := member.best()):
            priority, count, seq, _, first = best
            count += node.depth - member.depth if member.active else 0
            assert member.entry == (priority, count, seq, member, first), "a stale place among its parent's members"
    assert (node.best() or None) == min(live, default=None)


def _split(member: Member, depth: int) -> Node:
    """Put a node at `depth` on the edge to a member, or at its end if that is a request's."""
    parent = member.parent
    middle = Node(member.vector, depth)
    middle.active, middle.waiting = member.active, member.waiting
    if isinstance(member, Node):
        parent.busy.pop(member, None)
    parent.put(member.key, middle)
    _hand_over(member, middle)
    if middle.entry is not None:
        priority, count, seq, _, request = middle.entry
        rebased = count + depth - parent.depth if member.active else count
        member.entry = (priority, rebased, seq, member, request)
        middle.push(member.entry)
    if isinstance(member, Request) and member.depth == depth:
        middle.put(member.seq, member)
    else:
        middle.put(_at(member.vector, depth), member)
    return middle


def _hand_over(old: Member, new: Member) -> None:
    """Let `new` take the place of `old` among the entries of the parent of `new`."""
    new.entry = None
    if old.entry is not None:
        priority, count, seq, _, request = old.entry
        old.entry, new.entry = None, (priority, count, seq, new, request)
        new.parent.push(new.entry)


def _at(vector: bytes, chunk: int) -> bytes:
    """Return the cumulative hash after `chunk` + 1 chunks; empty where the vector is shorter."""
    return vector[chunk * DIGEST : (chunk + 1) * DIGEST]
