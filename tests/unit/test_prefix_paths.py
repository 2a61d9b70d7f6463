"""The prefix forest of paths in a radix tree, against the paths themselves."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.attention.packed_prefill.prefix_paths import forest_of_paths


@st.composite
def trees(draw):
    """Paths of requests in a random tree, some cut short of what their requests have, and some beyond it."""
    ends, above = [0], [None]
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(0, len(ends) - 1))
        above.append(parent)
        ends.append(ends[parent] + draw(st.integers(1, 9)))
    paths = []
    for _ in range(draw(st.integers(1, 8))):
        node, path = draw(st.integers(0, len(ends) - 1)), []
        while node:
            path.append((f"node {node}", ends[node]))
            node = above[node]
        paths.append(path[::-1])
    committed = [max(0, (path[-1][1] if path else 0) + draw(st.integers(-9, 9))) for path in paths]
    return paths, np.array(committed)


def nodes_of(forest, request):
    """(node, end) on a request's way up, from the root."""
    node, found = int(forest.request_node[request]), []
    while node >= 0:
        found.append((node, int(forest.node_end[node])))
        node = int(forest.parent[node])
    return found[::-1]


@given(trees())
def test_two_requests_share_what_both_have_of_the_path_that_they_have_in_common(drawn):
    paths, committed = drawn
    forest = forest_of_paths(paths, committed, np.arange(len(paths)) * 100)
    assert forest.seq_len.tolist() == committed.tolist()
    for one in range(len(paths)):
        assert forest.shared_length[one] <= committed[one]
        for other in range(one):
            common = [
                end
                for node, end in paths[one]
                if (node, end) in paths[other] and end <= min(committed[one], committed[other])
            ]
            ours = set(nodes_of(forest, one)) & set(nodes_of(forest, other))
            assert max((end for _, end in ours), default=0) == max(common, default=0)


def test_without_paths_nothing_is_shared():
    forest = forest_of_paths([[], []], np.array([5, 0]), [0, 9])
    assert forest.n_nodes == 0 and forest.request_node.tolist() == [-1, -1] and forest.row_offset.tolist() == [0, 9]
