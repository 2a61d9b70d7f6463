"""Forests to test and measure with: PAT's 20 trees, random ones, and tables of slots that fit them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from feather_kernels.errors import PlanError
from feather_kernels.forest import Forest

# PAT 8.2, figure 9: "nodes per level_tokens per level". The nodes of the last level are the requests with their tails.
PAT_TREES = (
    "1,10_4096,416",
    "1,256_256,32",
    "1,1024_2048,32",
    "1,2,64_1024,256,256",
    "1,4,256_32,256,32",
    "1,8,512_32,512,256",
    "1,8,512_32,2048,256",
    "1,8,512_512,512,256",
    "1,4,8,256_32,256,256,32",
    "1,4,16,512_1024,256,128,32",
    "1,4,16,64,256,1024_256,32,256,64,32,256",
    "1,16,32,64,128,1024_256,128,64,32,32,32",
    "1,16,32,64,256,1024_256,128,64,32,32,32",
    "1,8,16,32,64,128,1024_256,128,64,32,32,32,32",
    "1,8,16,32,64,256,1024_256,128,64,32,32,32,32",
    "2,8,16,256_256,256,32,32",
    "4,16,256,512_512,32,128,32",
    "8,16,32,256_512,512,256,32",
    "256_1024",
    "256_4096",
)
# What a server's batch often looks like: some prompts that equally many requests share, and short tails.
SERVING_TREES = tuple(
    f"{groups},{requests}_{tokens},100"
    for requests in (32, 128, 500)
    for groups in (1, 5, 20)
    for tokens in (1000, 5000, 10000)
)

# Few requests, and from one and a half to eight of them to a prompt: where packs are small.
SMALL_TREES = tuple(
    f"{round(requests / sharers)},{requests}_{tokens},60"
    for requests in (8, 24, 48, 96)
    for sharers in (1.5, 2, 4, 8)
    for tokens in (300, 2000, 6000)
)

# Few requests with long contexts: each its own, and then a prompt that they share and a quarter as much of their own.
LONG_TREES = tuple(
    f"{requests}_{tokens}" for requests in (1, 2, 4, 8, 16, 32) for tokens in (2000, 8000, 32000)
) + tuple(f"1,{requests}_{tokens},{tokens // 4}" for requests in (4, 16) for tokens in (2000, 8000, 32000))

# Those whose time is furthest from their floor, and two where a peer was ahead.
FAR_TREES = (
    "1,64_8192,64", "1,2,4,8,16,32,64,128_64,64,64,64,64,64,64,64", "1,500_5024,128", "3,48,384_4096,256,96",
    "1,900_64,2048", "64_32768",
)  # fmt: skip

# Requests of unlike length: a few with long contexts among many with short ones.
MIXED_TREES = (
    *(f"{few}+{many}" for few in ("1_32000", "4_8000", "4_32000") for many in ("16_500", "64_500", "64_2000")),
    "1_32000+2,32_2000,100", "4_8000+8,64_2000,100",
)  # fmt: skip

# Requests whose contexts, or tails behind a prompt, have lengths of every order of magnitude, as a server's have.
UNLIKE_TREES = (
    *(f"{count}_{lengths}" for count in (16, 48, 96, 192, 384) for lengths in ("100~10000", "500~4000", "50~800")),
    "1,32_4000,50~5000", "4,128_4000,50~5000", "16,256_2000,20~2000", "1,64_2000,100+128_100~10000",
)  # fmt: skip


def parse_tree(name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``"1,10_4096,416"`` as ((1, 10), (4096, 416)): nodes and tokens per level."""
    nodes, tokens = (tuple(int(number) for number in part.split(",")) for part in name.split("_"))
    return nodes, tokens


def named_forest(name: str, page_size: int = 1) -> Forest:
    """The forest of a benchmark's name: trees side by side, ``"1_32000+64_500"``.

    Each is as by `parse_tree`, or ends in ``low~high``: tails from the one to the other length, evenly spread by their
    logarithms.
    """
    trees = [_named_tree(part) for part in name.split("+")]
    before = np.cumsum([0, *(len(tree.length) for tree in trees[:-1])])

    def joined(of: str) -> npt.NDArray[np.int32]:
        lists = [getattr(tree, of) for tree in trees]
        return np.concatenate([np.where(ids < 0, ids, ids + first) for ids, first in zip(lists, before, strict=True)])

    length = np.concatenate([tree.length for tree in trees])
    seq_len = np.concatenate([tree.seq_len for tree in trees])
    return Forest(joined("parent"), length, joined("request_node"), seq_len, _rows(seq_len, page_size, 0))


def _named_tree(name: str) -> Forest:
    name, _, high = name.partition("~")
    nodes, tokens = parse_tree(name)
    forest, low = tree_forest(nodes, tokens), tokens[-1]
    if not high:
        return forest
    place = (np.arange(nodes[-1]) + 0.5) / nodes[-1]
    tails = low * (int(high) / low) ** place
    return forest.with_seq_len(forest.seq_len - low + np.rint(tails).astype(np.int32))


def tree_forest(nodes: Sequence[int], tokens: Sequence[int], page_size: int = 1, room: int = 0) -> Forest:
    """The forest of a tree given by its levels; the last level's nodes are private tails, one request each.

    Parameters
    ----------
    nodes : sequence of int
        Nodes per level, from the roots on; each level's nodes are dealt evenly, and in order, to those above.
    tokens : sequence of int
        Tokens in each node of a level.
    page_size : int
        Tokens a table entry stands for.
    room : int
        Tokens that every row has left for growth.
    """
    if len(nodes) != len(tokens) or not nodes or min(nodes) < 1:
        raise PlanError(f"a tree of nodes {tuple(nodes)} and tokens {tuple(tokens)}: give one of each per level")
    parent: list[npt.NDArray[np.int64]] = []
    first = -1  # index of the first node one level up
    for level, count in enumerate(nodes[:-1]):
        above = first + np.arange(count) * nodes[level - 1] // count if level else np.full(count, -1)
        parent.append(above)
        first = sum(nodes[:level])
    requests = nodes[-1]
    request_node = first + np.arange(requests) * nodes[-2] // requests if len(nodes) > 1 else np.full(requests, -1)
    seq_len = np.full(requests, sum(tokens))
    return Forest(
        np.concatenate(parent).astype(np.int32) if parent else np.empty(0, np.int32),
        np.repeat(np.asarray(tokens[:-1], np.int32), nodes[:-1]),
        request_node.astype(np.int32),
        seq_len.astype(np.int32),
        _rows(seq_len, page_size, room),
    )


def random_forest(
    rng: np.random.Generator,
    requests: int,
    *,
    max_roots: int = 3,
    max_branch: int = 4,
    max_node_tokens: int = 64,
    max_tail_tokens: int = 64,
    page_size: int = 1,
    room: int = 0,
) -> Forest:
    """A random forest with several roots, requests that end inside the tree, duplicates and empty tails.

    Every node has at least two requests. Node lengths are multiples of ``page_size``, from one page to
    ``max_node_tokens``; tails have 0 to ``max_tail_tokens`` tokens, but no sequence is empty.
    """
    parent: list[int] = []
    length: list[int] = []
    request_node = np.full(requests, -1)
    groups = [(-1, part) for part in _deal(rng, rng.permutation(requests), int(rng.integers(1, max_roots + 1)))]
    while groups:
        above, members = groups.pop()
        if len(members) < 2 or rng.random() < 0.1:
            continue
        node = len(parent)
        parent.append(above)
        length.append(page_size * int(rng.integers(1, max(1, max_node_tokens // page_size) + 1)))
        request_node[members] = node
        stay = int(rng.integers(0, len(members) + 1)) if rng.random() < 0.5 else 0
        groups += [(node, part) for part in _deal(rng, members[stay:], int(rng.integers(2, max_branch + 1)))]
    forest = Forest(np.array(parent, np.int32), np.array(length, np.int32), request_node, *np.zeros((2, requests), int))
    tail = rng.integers(0, max_tail_tokens + 1, requests) * (rng.random(requests) > 0.2)
    seq_len = np.maximum(forest.shared_length + tail, 1)
    return Forest(forest.parent, forest.length, forest.request_node, seq_len, _rows(seq_len, page_size, room))


def forest_table(
    forest: Forest, page_size: int = 1, room: int = 0, rng: np.random.Generator | None = None
) -> tuple[npt.NDArray[np.int32], int]:
    """A flat table of page ids in which exactly the forest's nodes are shared.

    Parameters
    ----------
    forest : Forest
        Node boundaries at multiples of ``page_size``.
    page_size : int
        Tokens a page.
    room : int
        Tokens of private pages behind every sequence.
    rng : numpy.random.Generator, optional
        Shuffles the pages; without it they lie in order.

    Returns
    -------
    table : int32 [entries]
        Row of request r from ``forest.row_offset[r]`` on; entries of no row hold -1.
    n_pages : int
        Page ids are 0 .. n_pages - 1, all in use.
    """
    if np.any(forest.length % page_size):
        raise PlanError(f"a node's length is no multiple of page_size {page_size}: choose other tokens per node")
    shared = forest.shared_length // page_size
    pages = -(-(forest.seq_len.astype(np.int64) + room) // page_size)
    node_pages = forest.length // page_size
    fresh = np.append(np.cumsum(node_pages) - node_pages, node_pages.sum())  # first page of each node, and of the tails
    n_pages = int(fresh[-1] + (pages - shared).sum())
    ids = np.arange(n_pages, dtype=np.int32) if rng is None else rng.permutation(n_pages).astype(np.int32)
    table = np.full(int((forest.row_offset + pages).max(initial=0)), -1, np.int32)
    chains = _chains(forest, fresh, node_pages)
    tail = int(fresh[-1])
    for request, row in enumerate(forest.row_offset.tolist()):
        own = int(pages[request] - shared[request])
        chain = chains[forest.request_node[request]]
        table[row : row + len(chain)] = ids[chain]
        table[row + len(chain) : row + len(chain) + own] = ids[tail : tail + own]
        tail += own
    return table, n_pages


def _chains(forest: Forest, fresh: npt.NDArray[np.int64], node_pages: npt.NDArray) -> list[npt.NDArray[np.int64]]:
    """Page numbers from the root to each node's end; the last entry, found by -1, is the empty chain."""
    chains: list[npt.NDArray[np.int64]] = []
    empty = np.empty(0, np.int64)
    for node, above in enumerate(forest.parent.tolist()):
        own = np.arange(fresh[node], fresh[node] + node_pages[node])
        chains.append(np.concatenate([chains[above] if above >= 0 else empty, own]))
    return [*chains, empty]


def _rows(seq_len: npt.NDArray, page_size: int, room: int) -> npt.NDArray[np.int64]:
    stride = -(-(int(seq_len.max(initial=0)) + room) // page_size)
    return np.arange(len(seq_len), dtype=np.int64) * stride


def _deal(rng: np.random.Generator, members: npt.NDArray, parts: int) -> list[npt.NDArray]:
    """``members`` cut at random places into ``parts`` groups, some of them perhaps empty."""
    return np.split(members, np.sort(rng.integers(0, len(members) + 1, parts - 1)))
