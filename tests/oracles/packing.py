"""Prefix packing from its definition, in sets of requests: the oracle of ``feather_kernels``' planner.

A pack is (start, stop, requests). Shares no code and no data structure with the product.
"""

from itertools import product


class Node:
    """Positions [begin, end) that the same requests share; ``tails`` are the requests that hang here."""

    def __init__(self, begin, end, requests):
        self.begin, self.end, self.requests = begin, end, requests
        self.children, self.tails = [], []

    def edges(self):
        return [*self.children, *self.tails]


def prefix_forest(forest):
    """Roots, nodes, and requests without a node, from a forest's arrays; nodes of the same requests are one."""
    parent, length = forest.parent.tolist(), forest.length.tolist()
    below = [set() for _ in parent]
    begin = []
    for above in parent:
        begin.append(0 if above < 0 else begin[above] + length[above])
    for request, node in enumerate(forest.request_node.tolist()):
        while node >= 0:
            below[node].add(request)
            node = parent[node]
    ranges = {}
    for node, requests in enumerate(below):
        if len(requests) > 1 and length[node]:
            low, high = ranges.pop(frozenset(requests), (begin[node], 0))
            ranges[frozenset(requests)] = min(low, begin[node]), max(high, begin[node] + length[node])
    nodes = [Node(*span, requests) for requests, span in ranges.items()]  # siblings in order of their last node
    roots, loose = [], []
    for node in nodes:
        above = [other for other in nodes if other.requests > node.requests]
        if above:
            max(above, key=lambda other: other.end).children.append(node)
        else:
            roots.append(node)
    for request in range(len(forest.request_node)):
        on = [node for node in nodes if request in node.requests]
        (max(on, key=lambda node: node.end).tails if on else loose).append(request)
    return roots, nodes, loose


def packs_of(forest, merges, grow=True):
    """The packs that a decision per edge makes; ``merges(node, child, start)`` with a Node or a request as child."""
    roots, _, loose = prefix_forest(forest)
    lengths = forest.seq_len.tolist()
    packs = [(0, lengths[request], frozenset([request])) for request in loose]

    def visit(node, start):
        stay = set()
        for child in node.edges():
            own = isinstance(child, Node)
            merged = merges(node, child, start)
            first = start if merged else node.end
            if not merged:
                stay |= child.requests if own else {child}
            if own:
                visit(child, first)
            elif grow or lengths[child] > first:
                packs.append((first, lengths[child], frozenset([child])))
        if stay:
            packs.append((start, node.end, frozenset(stay)))

    for root in roots:
        visit(root, root.begin)
    return packs


def deposits(packs, request, merge="fused"):
    """How many parts of a request are written and read, for another to combine them."""
    mine = sorted((start, stop, len(members)) for start, stop, members in packs if request in members)
    if len(mine) == 1:
        return 0
    closes = merge == "fused" and mine[-1][2] == 1  # the last part is the request's alone, as its tail is
    return len(mine) - closes


def part_bytes(head_dim, group_size):
    """Of a part of one KV head, written and read: 16 bits a value, and two float32 a row."""
    return group_size * (head_dim * 2 + 8) * 2


def traffic(packs, head_dim, group_size, merge="fused"):
    """Bytes of KV and of partial results, one KV head: every token of a pack once, deposited parts written and read."""
    kv = sum(stop - start for start, stop, _ in packs) * 2 * head_dim * 2
    requests = {request for _, _, members in packs for request in members}
    parts = sum(deposits(packs, request, merge) for request in requests)
    return kv, parts * part_bytes(head_dim, group_size)


def algorithm_1(forest, head_dim, group_size, grow=True, factor=None, merge="fused"):
    """PAT's TreeHeuristic, with its published rule for a given factor, else with bytes in its place."""
    lengths = forest.seq_len.tolist()

    def merges(node, child, start):
        size = len(child.requests) if isinstance(child, Node) else 1
        leaf = not isinstance(child, Node)
        ends = leaf and not grow and lengths[child] == node.end
        carried = node.end - start
        if ends and (factor is not None or merge == "kernel" or start == 0):
            return False  # saves nothing: a part here or there, or the only one
        if factor is not None:
            return factor * size >= carried
        saved = 2 if leaf and start == 0 and merge == "kernel" else size
        return saved * part_bytes(head_dim, group_size) >= carried * 2 * head_dim * 2

    return packs_of(forest, merges, grow)


def least(forest, cost, grow=True):
    """The least ``cost(packs)`` over all assignments of the edges."""
    _, nodes, _ = prefix_forest(forest)
    edges = [(node.begin, min(node.requests), i) for node in nodes for i in range(len(node.edges()))]
    best = None
    for choice in product((False, True), repeat=len(edges)):
        chosen = dict(zip(edges, choice, strict=True))

        def merges(node, child, start, chosen=chosen):
            return chosen[node.begin, min(node.requests), node.edges().index(child)]

        now = cost(packs_of(forest, merges, grow))
        best = now if best is None else min(best, now)
    return best


def cheapest(forest, head_dim, group_size, grow=True, item_overhead=0, merge="fused"):
    """The least traffic over all assignments of the edges."""
    return least(
        forest, lambda packs: sum(traffic(packs, head_dim, group_size, merge)) + item_overhead * len(packs), grow
    )


class Processor:
    """The cost of packs on one processor for one KV head, in ns.

    Parameters
    ----------
    tiles : sequence of (m, n), of ascending m
    unit, step : sequence of float
        Of a work unit of each tile, and of each step of its n tokens.
    part, part_row : float
        Of a part that a request deposits, and of each of its rows.
    """

    def __init__(self, tiles, group_size, unit, step, part, part_row):
        self.tiles, self.group_size, self.unit, self.step = tiles, group_size, unit, step
        self.part = part + group_size * part_row

    def tile(self, requests):
        """The smallest tile with the requests' rows, and more than 8 for several; the largest if none has them."""
        rows = max(requests * self.group_size, 9 if requests > 1 else 1)
        return next((t for t, (m, _) in enumerate(self.tiles) if m >= rows), len(self.tiles) - 1)

    def pack_time(self, requests, tokens):
        """Whole largest tiles, then one for the rest."""
        rows, _ = self.tiles[-1]
        most, time = (rows // self.group_size if rows > 8 else 1), 0
        while requests > 0:
            tile = self.tile(min(requests, most))
            time += self.unit[tile] + self.step[tile] * -(-tokens // self.tiles[tile][1])
            requests -= most
        return time

    def own_time(self, tokens):
        """A request's last pack, where it is in it alone: the part of a step that its tokens are."""
        tile = self.tile(1)
        return self.unit[tile] + self.step[tile] * tokens / self.tiles[tile][1]

    def time(self, packs, merge="fused"):
        requests = {request for _, _, members in packs for request in members}
        last = {
            request: max((start, stop) for start, stop, members in packs if request in members) for request in requests
        }
        total = self.part * sum(deposits(packs, request, merge) for request in requests)
        for start, stop, members in packs:
            own = len(members) == 1 and last[min(members)] == (start, stop)
            total += self.own_time(stop - start) if own else self.pack_time(len(members), stop - start)
        return total
