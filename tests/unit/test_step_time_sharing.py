"""Shared prefixes of a batch's rows, against a comparison of all pairs."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.replay.batch_sharing import BatchSharing


def test_sharing_of_a_small_batch():
    paths = [(1, 2, 3), (1, 2, 4), (9,), (1, 5)]
    sharing = BatchSharing.from_paths(paths, 10, [30, 25, 8, 20])
    assert (sharing.rows, sharing.total_tokens) == (4, 83)
    assert sharing.unique_tokens == 30 + 5 + 8 + 10
    assert sharing.common_tokens == 0
    assert sharing.reuse == ((1, 20), (2, 10))
    assert sharing.shared == ((2, 10), (3, 10))
    assert sharing.parts == 3 + 3 + 1 + 2


def test_common_tokens_end_where_any_two_rows_part():
    assert BatchSharing.from_paths([(1, 2, 3), (1, 2, 4), (1, 2)], 10, [30, 30, 18]).common_tokens == 18
    assert BatchSharing.from_paths([(1, 2), (1, 3)], 10, [20, 20]).common_tokens == 10
    assert BatchSharing.from_paths([(1, 2)], 10, [25]).common_tokens == 25
    assert BatchSharing.from_paths([], 10, []).common_tokens == 0


def test_equal_prompts_share_all_but_what_they_generated():
    sharing = BatchSharing.from_paths([(1, 2), (1, 2)], 10, [15, 15])
    assert (sharing.unique_tokens, sharing.common_tokens) == (15, 15)
    assert (sharing.shared, sharing.parts) == (((2, 15),), 4)  # what a row generates is a part of its own


def lcp(a, b, block, la, lb):
    blocks = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return min(blocks * block, la, lb)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=8))
def test_sharing_agrees_with_comparing_all_pairs(walks):
    # A node's id says the whole way to it, as hash ids do.
    ids: dict[tuple[int, ...], int] = {}
    paths = [tuple(ids.setdefault(tuple(walk[: i + 1]), len(ids)) for i in range(len(walk))) for walk in walks]
    lengths = [10 * len(path) for path in paths]
    sharing = BatchSharing.from_paths(paths, 10, lengths)
    pairs = list(zip(paths, lengths, strict=True))
    before = [[lcp(a, b, 10, la, lb) for b, lb in pairs[:i]] for i, (a, la) in enumerate(pairs)]
    assert sharing.unique_tokens == sum(lengths) - sum(max(row, default=0) for row in before) == 10 * len(ids)
    assert dict(sharing.reuse).get(1, 0) == sum(row[-1] for row in before if row)
    assert sharing.common_tokens == min([lcp(paths[0], b, 10, lengths[0], lb) for b, lb in pairs])
    assert sum(tokens for _, tokens in sharing.reuse) == sum(lengths) - sharing.unique_tokens
    rows_of = Counter(node for path in paths for node in path)
    assert sharing.shared == tuple(
        (rows, 10 * blocks) for rows, blocks in sorted(Counter(rows_of.values()).items()) if rows > 1
    )
    # Fewer rows from a node on: another part; and what a row generates beyond a shared node is its own.
    assert sharing.parts == sum(len({rows_of[node] for node in path} | {1}) for path in paths)
