"""The running forest against the definition: requests share their longest common run of chunks, and nothing more."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.attention.running_forest import RunningForest
from oracles.sequences import common

CHUNK = 32
# Few symbols and lengths, so that examples share, end inside one another and repeat.
SEQUENCES = st.lists(st.integers(0, 2), max_size=7)
STEPS = st.lists(st.tuples(st.integers(0, 7), SEQUENCES), max_size=30)


def built(running, order):
    forest = RunningForest(CHUNK)
    for request in order:
        forest.join(request, np.array(running[request], np.int64))
    return forest


def shape(forest):
    """Requests by shared node, whatever the nodes' numbers: [(start, stop, requests)]."""
    requests = {}
    for request, node in enumerate(forest.request_node.tolist()):
        while node >= 0:
            requests.setdefault(node, []).append(request)
            node = int(forest.parent[node])
    ends = forest.node_end
    return sorted((int(ends[n] - forest.length[n]), int(ends[n]), tuple(r)) for n, r in requests.items())


def check(trie, running):
    order = sorted(running)
    lens = np.array([CHUNK * len(running[request]) + 5 for request in order], np.int32)
    forest = trie.forest([*order, 99], np.append(lens, 7).astype(np.int32), np.arange(len(order) + 1) * 1000)
    assert forest.request_node[-1] == -1  # one that has not joined shares nothing
    assert forest.row_offset.tolist() == [1000 * i for i in range(len(order) + 1)]
    assert (forest.parent < np.arange(forest.n_nodes)).all() and (forest.length > 0).all()

    def path(request):
        node, found = int(forest.request_node[request]), []
        while node >= 0:
            found.append(node)
            node = int(forest.parent[node])
        return set(found)

    for (i, a), (j, b) in combinations(enumerate(order), 2):
        shared = path(i) & path(j)
        assert sum(int(forest.length[n]) for n in shared) == CHUNK * common(running[a], running[b])
    return forest


@given(STEPS)
def test_sharing_is_the_longest_common_prefix_of_every_pair(steps):
    trie, running = RunningForest(CHUNK), {}
    for request, sequence in steps:
        if request in running:
            trie.leave(request)
            del running[request]
        else:
            trie.join(request, np.array(sequence, np.int64))
            running[request] = sequence
        forest = check(trie, running)
        # The same nodes as of a trie that has never seen anybody leave.
        fresh = built(running, sorted(running, reverse=True))
        assert shape(forest) == shape(check(fresh, running))
    for request in list(running):
        trie.leave(request)
    assert len(trie) == 0 and not trie._root.children and trie._root.count == 0


@given(STEPS)
def test_the_revision_tells_every_join_that_changes_the_sharing(steps):
    trie, running = RunningForest(CHUNK), {}
    for request, sequence in steps:
        if request in running:
            continue
        before, order = trie.revision, sorted(running)
        lens = np.full(len(order), 1000, np.int32)
        old = trie.forest(order, lens, np.zeros(len(order)))
        trie.join(request, np.array(sequence, np.int64))
        running[request] = sequence
        new = trie.forest(order, lens, np.zeros(len(order)))
        if trie.revision == before:
            assert old.parent.tolist() == new.parent.tolist() and old.length.tolist() == new.length.tolist()
            assert old.request_node.tolist() == new.request_node.tolist()


def test_a_request_joins_once():
    trie = RunningForest(CHUNK)
    trie.join(1, np.array([4, 5], np.int64))
    with pytest.raises(ValueError, match="request 1 has joined already"):
        trie.join(1, np.array([4], np.int64))
    assert 1 in trie and 2 not in trie and len(trie) == 1
