"""Forests from radix nodes and from block tables are the same forests."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import ONE_TILE, plan_of

from effort import samples
from feather_kernels.errors import PlanError
from feather_kernels.forest import Forest
from feather_kernels.trees import PAT_TREES, forest_table, named_forest, parse_tree, random_forest, tree_forest
from oracles.packing import prefix_forest


def from_nodes(forest, rng):
    """The forest through its radix-node constructor: nodes shuffled, with arbitrary ids."""
    ids = rng.permutation(10 * forest.n_nodes + 1)[: forest.n_nodes] + 5
    known = np.append(ids, -1)
    order = rng.permutation(forest.n_nodes)
    return Forest.from_nodes(
        ids[order], known[forest.parent][order], forest.length[order], known[forest.request_node], forest.seq_len,
        forest.row_offset,
    )  # fmt: skip


def from_table(forest, page_size, rng, dtype=np.int32):
    table, _ = forest_table(forest, page_size, rng=rng)
    pages = -(-int(forest.seq_len.max()) // page_size)
    rows = np.full((forest.n_requests, pages), -7, dtype)
    for request, row in enumerate(forest.row_offset.tolist()):
        used = -(-int(forest.seq_len[request]) // page_size)
        rows[request, :used] = table[row : row + used]
    return Forest.from_block_table(rows, forest.seq_len, page_size, row_offset=forest.row_offset)


def assert_equal(a, b):
    for name in ("parent", "length", "request_node", "seq_len", "row_offset"):
        assert getattr(a, name).tolist() == getattr(b, name).tolist(), name


@settings(max_examples=samples(600, 200))
@given(
    seed=st.integers(0, 2**32 - 1), requests=st.integers(1, 50), page_size=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from([np.int32, np.int64]),
)  # fmt: skip
def test_nodes_and_block_table_agree(seed, requests, page_size, dtype):
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, requests, max_node_tokens=200, page_size=page_size)
    nodes, table = from_nodes(forest, rng), from_table(forest, page_size, rng, dtype)
    assert_equal(nodes, table)
    assert (nodes.parent < np.arange(nodes.n_nodes)).all()
    expected = {(node.begin, node.end, node.requests) for node in prefix_forest(forest)[1]}
    assert {(node.begin, node.end, node.requests) for node in prefix_forest(nodes)[1]} == expected
    assert nodes.n_nodes == len(expected)


@settings(max_examples=samples(200, 80))
@given(seed=st.integers(0, 2**32 - 1), requests=st.integers(1, 30))
def test_a_plan_folds_as_the_constructors_do(seed, requests):
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, requests)
    plans = plan_of(forest), plan_of(from_nodes(forest, rng))
    assert plans[0].traffic == plans[1].traffic and plans[0].n_items == plans[1].n_items


def test_nodes_of_one_request_none_or_no_tokens_fold_away():
    # An empty root, a chain of two nodes, a node of one request below it, and one of nobody.
    forest = Forest.from_nodes(
        [10, 11, 12, 13, 14], [-1, 10, 11, 12, 10], [0, 30, 20, 7, 99], [12, 13, -1], [55, 60, 5], [0, 100, 200]
    )
    assert forest.parent.tolist() == [-1] and forest.length.tolist() == [50]
    assert forest.request_node.tolist() == [0, 0, -1] and forest.shared_length.tolist() == [50, 50, 0]


def test_a_partial_page_is_private():
    table = np.array([[3, 5, 9], [3, 5, 9]])
    assert Forest.from_block_table(table, [40, 45], 16).shared_length.tolist() == [32, 32]
    assert Forest.from_block_table(table, [3, 2], 1).shared_length.tolist() == [2, 2]  # one ends inside the other


def test_equal_pages_behind_different_ones_are_not_shared():
    forest = Forest.from_block_table(np.array([[1, 2, 3], [4, 2, 3], [1, 2, 7]]), [3, 3, 3], 1)
    assert forest.length.tolist() == [2] and forest.request_node.tolist() == [0, -1, 0]


def test_long_common_prefixes_end_at_the_first_difference():
    table = np.tile(np.arange(1000, dtype=np.int64), (5, 1))
    for request, position in enumerate([999, 64, 63, 500]):
        table[request, position] = -1
    forest = Forest.from_block_table(table, [1000] * 5, 1)
    assert forest.shared_length.tolist() == [999, 64, 63, 500, 999]


def test_a_table_in_which_each_row_shares_a_page_less_than_the_one_before_takes_time_by_its_size():
    n = 2048
    table = np.tile(np.arange(n, dtype=np.int32), (n, 1))
    behind = np.arange(n)[None, :] >= n - np.arange(n)[:, None]  # the last i pages of request i
    table[behind] = np.arange(n * n, 2 * n * n, dtype=np.int32).reshape(n, n)[behind]
    begun = time.perf_counter()
    forest = Forest.from_block_table(table, np.full(n, n), 1)
    taken = time.perf_counter() - begun
    assert taken < 0.5  # a hundredth of a second, of a few megabytes; each row with each on every level took two
    assert forest.shared_length.tolist() == [n - 1, *range(n - 1, 0, -1)]
    rng = np.random.default_rng(0)
    order = rng.permutation(n)
    mixed = Forest.from_block_table(table[order], np.full(n, n), 1)
    assert mixed.shared_length.tolist() == forest.shared_length[order].tolist()


def test_a_deep_chain_of_nodes():
    n = 3000  # each request ends one token below the last
    forest = Forest(np.arange(-1, n - 1), np.ones(n, int), np.arange(n), np.arange(n) + 2, np.zeros(n, int))
    assert plan_of(forest, strategy="naive", grow=False, fan_in=0, **ONE_TILE).n_items == n + n - 1


@pytest.mark.parametrize("name", PAT_TREES)
def test_pat_trees_share_what_their_name_says(name):
    nodes, tokens = parse_tree(name)
    forest = tree_forest(nodes, tokens)
    unique = sum(n * t for n, t in zip(nodes, tokens, strict=True))
    assert forest.n_requests == nodes[-1] and set(forest.seq_len.tolist()) == {sum(tokens)}
    assert forest.length.sum() + (forest.seq_len - forest.shared_length).sum() == unique
    assert forest_table(forest, room=3)[1] == unique + 3 * nodes[-1]


def test_trees_side_by_side_share_nothing():
    forest = named_forest("1,2_40,10+3_500+1,2_30,5")
    assert forest.seq_len.tolist() == [50, 50, 500, 500, 500, 35, 35]
    assert forest.parent.tolist() == [-1, -1] and forest.length.tolist() == [40, 30]
    assert forest.request_node.tolist() == [0, 0, -1, -1, -1, 1, 1]
    slots = [set(from_row(forest, request)) for request in range(7)]
    assert [len(slots[a] & slots[b]) for a, b in ((0, 1), (5, 6), (0, 5), (2, 3))] == [40, 30, 0, 0]
    one, alone = named_forest("1,2_40,10"), tree_forest((1, 2), (40, 10))
    assert all((getattr(one, name) == getattr(alone, name)).all() for name in ("parent", "seq_len", "row_offset"))


def test_lengths_spread_evenly_by_their_logarithms():
    forest = named_forest("1,2_500,1~10000+2_5")
    assert forest.seq_len.tolist() == [510, 1500, 5, 5]  # 10,000 to the power of 1/4 and 3/4
    assert forest.length.tolist() == [500] and forest.request_node.tolist() == [0, 0, -1, -1]


def from_row(forest, request):
    """The slots of a request's tokens."""
    table, _ = forest_table(forest)
    row = int(forest.row_offset[request])
    return table[row : row + int(forest.seq_len[request])].tolist()


NODES = ([1, 2], [-1, 1], [5, 5], [2, 2], [20, 20], [0, 20])
TABLE = np.zeros((2, 3), np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: [1, 1]}, "node_ids has 1 twice"),
        ({1: [-1, 9]}, "node 2 has parent 9: no such node"),
        ({1: [2, 1]}, "is its own ancestor"),
        ({2: [5, -5]}, "node 2 has length -5"),
        ({3: [2, 7]}, "request 1 is at node 7: no such node"),
        ({4: [20, 9]}, "request 1 has 9 tokens and nodes of 10"),
        ({2: [5]}, "node_ids has 2 entries and lengths has 1"),
        ({5: [0.5, 1.5]}, "row_offset is float64"),
        ({4: [20, 2**40]}, "seq_lens has a value outside int32"),
        ({4: [[20, 20]]}, "seq_lens has 2 dimensions"),
        ({2: [2**31 - 1, 2]}, "beyond int32"),
        ({0: ["a", "b"]}, "node_ids is <U1: give integers"),
        ({0: [[1], [2, 3]]}, "node_ids is no vector of integers"),
        ({0: None}, "node_ids has 0 dimensions"),
        ({0: [1, 2**70]}, "node_ids is object: give integers"),
        ({2: [5, 5.5]}, "lengths is float64: give integers"),
        ({4: [True, True]}, "seq_lens is bool: give integers"),
    ],
)
def test_wrong_nodes(change, message):
    arguments = [change.get(i, argument) for i, argument in enumerate(NODES)]
    with pytest.raises(PlanError, match=message) as error:
        Forest.from_nodes(*arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TABLE.tolist(), [1, 1], 1), "table is list"),
        ((TABLE.astype(np.float32), [1, 1], 1), "table is float32"),
        ((TABLE, [1, 1], 3), "page_size is 3: give a power of two"),
        ((TABLE, [1, 1], 1.0), "page_size is 1.0: give a power of two"),
        ((TABLE, [1, 1], "1"), "page_size is '1': give a power of two"),
        ((TABLE, [1, 1], None), "page_size is None: give a power of two"),
        ((TABLE, [1, 1], 2**31), "page_size is 2147483648: give a power of two up to"),
        ((TABLE, [1, 1.5], 1), "seq_lens is float64: give integers"),
        ((TABLE, [1, 1], 1, [0, 0.5]), "row_offset is float64: give integers"),
        ((TABLE, [1, 1], 1, [[0], [0, 1]]), "row_offset is no vector"),
        ((TABLE, [1], 1), "table has 2 rows and seq_lens 1"),
        ((TABLE, [1, 49], 16), "request 1 has 49 tokens: its row has 3 pages of 16"),
        ((TABLE, [1, -1], 16), "request 1 has -1 tokens"),
    ],
)
def test_wrong_block_tables(arguments, message):
    with pytest.raises(PlanError, match=message):
        Forest.from_block_table(*arguments)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (([0], [5], [0], [9], [0]), "node 0 has parent 0: parents come before"),
        (([-2], [5], [0], [9], [0]), "node 0 has parent -2"),
        (([-1], [-5], [0], [9], [0]), "node 0 has length -5"),
        (([-1], [5], [1], [9], [0]), "request 0 is at node 1: the forest has 1"),
        (([-1], [5], [0], [4], [0]), "request 0 has 4 tokens and nodes of 5"),
        (([-1], [5], [0], [9], [-4]), "request 0 has row offset -4"),
    ],
)
def test_wrong_forests_are_found_by_the_plan(arrays, message):
    with pytest.raises(PlanError, match=message):
        plan_of(Forest(*arrays))


def test_trees_refuse_what_is_no_tree():
    with pytest.raises(PlanError, match="give one of each per level"):
        tree_forest((1, 2), (5,))
    with pytest.raises(PlanError, match="no multiple of page_size 16"):
        forest_table(tree_forest((1, 2), (20, 4)), page_size=16)


def test_read_only_arrays_are_copied():
    seq_len = np.array([7], np.int32)
    seq_len.setflags(write=False)
    assert plan_of(Forest([], [], [-1], seq_len, [0])).n_items == 1


def test_a_table_that_may_not_be_written_is_read():
    table = np.array([[3, 4, 5], [3, 4, 9]])
    table.flags.writeable = False
    forest = Forest.from_block_table(table, [3, 3], 1)
    assert forest.length.tolist() == [2] and forest.seq_len.tolist() == [3, 3]


@pytest.mark.parametrize("lengths", [[2**32 + 12, 11], [12.7, 11], [2**40, 11], [[12, 11]]])
def test_new_lengths_are_checked_as_those_of_a_new_forest(lengths):
    forest = Forest([-1], [5], [0, 0], [10, 10], [0, 10])
    for seq_len in (lengths, np.array(lengths)):
        with pytest.raises(PlanError):
            forest.with_seq_len(seq_len)
    assert forest.with_seq_len(np.array([12, 11])).seq_len.tolist() == [12, 11]
