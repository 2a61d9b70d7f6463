"""The batches that the decode benchmarks measure: their floor by hand, and one KV set seen by every system."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from decode_cases import Case, Heads, tree_case

from feather_kernels.forest import Forest
from feather_kernels.trees import PAT_TREES, forest_table, random_forest


def slots_of(case: Case, request: int) -> np.ndarray:
    """int64 [tokens]: the slots of one request, straight from the definition of the table."""
    positions = np.arange(case.forest.seq_len[request])
    entries = case.forest.row_offset[request] + positions // case.page_size
    return case.table[entries].astype(np.int64) * case.page_size + positions % case.page_size


def slots_in(paged, sequence: int, page_size: int) -> np.ndarray:
    """int64 [tokens]: the slots of one sequence in FlashInfer's form."""
    pages = paged.indices[paged.indptr[sequence] : paged.indptr[sequence + 1]].astype(np.int64)
    tokens = (pages[:, None] * page_size + np.arange(page_size)).ravel()
    return tokens[: len(tokens) - page_size + paged.last_page_len[sequence]]


def test_the_floor_of_the_first_tree_by_hand():
    case = tree_case(PAT_TREES[0], Heads(32, 8))
    assert case.unique_tokens == 4096 + 10 * 416 == 8256
    assert case.kv_bytes == 8256 * 4096  # 33.8 MB: K and V, 8 heads of 128 elements of 2 bytes
    assert case.flop == 4 * 128 * 32 * 10 * (4096 + 416)
    assert case.floor(4.3e12) == pytest.approx(33.8e6 / 4.3e12, rel=1e-3)  # 7.9 us: bound by memory
    assert case.floor(4.3e12, 1e12) == case.flop / 1e12


def test_a_large_shared_node_is_bound_by_arithmetic():
    case = tree_case(PAT_TREES[2], Heads(64, 8))
    assert case.floor(4.3e12, 790e12) == pytest.approx(88.3e-6, rel=1e-2)


@pytest.mark.parametrize("page_size", [1, 32])
@pytest.mark.parametrize("tree", [0, 3, 15, 18])
def test_every_system_sees_the_same_slots(tree, page_size):
    case = tree_case(PAT_TREES[tree], Heads(8, 2), page_size)
    table = case.page_table
    assert table.shape == (case.n_requests, case.pages.max())
    for request in {0, 1, case.n_requests // 2, case.n_requests - 1}:
        mine = slots_of(case, request)
        assert len(set(mine.tolist())) == len(mine) == case.forest.seq_len[request]
        pages = table[request].astype(np.int64)
        tokens = (pages[:, None] * page_size + np.arange(page_size)).ravel()[: len(mine)]
        assert np.array_equal(tokens, mine)
        assert np.array_equal(slots_in(case.paged, request, page_size), mine)
        if case.levels is not None:
            shared, rest = case.levels.paged
            both = np.concatenate([slots_in(shared, 0, page_size), slots_in(rest, request, page_size)])
            assert np.array_equal(both, mine)


@pytest.mark.parametrize("tree", range(len(PAT_TREES)))
def test_the_pool_is_full_and_scattered_and_only_the_nodes_are_shared(tree):
    case = tree_case(PAT_TREES[tree], Heads(16, 8), 32)
    assert case.n_slots == case.unique_tokens  # every length of the 20 trees is a multiple of 32
    used = np.unique(case.table[case.table >= 0])
    assert np.array_equal(used, np.arange(case.n_pages))
    row = case.page_table[0].astype(np.int64)
    assert len(row) < 3 or not np.all(np.diff(row) == 1)


def test_a_cascade_needs_one_root_that_all_share():
    assert tree_case("1,10_4096,416", Heads(8, 8)).levels is not None
    assert tree_case("2,8_64,32", Heads(8, 8)).levels is None
    assert tree_case("256_1024", Heads(8, 8)).levels is None
    levels = tree_case("1,4,256_32,256,32", Heads(8, 8)).levels
    assert levels is not None
    assert levels.qo_indptr[0].tolist() == [0, 256] and levels.qo_indptr[1].tolist() == list(range(257))
    assert levels.paged[0].indptr.tolist() == [0, 32]


@pytest.mark.parametrize("page_size", [1, 4])
def test_ragged_requests(page_size):
    rng = np.random.default_rng(7)
    for _ in range(20):
        forest = random_forest(rng, 12, page_size=page_size)
        table, n_pages = forest_table(forest, page_size, rng=rng)
        case = Case("random", forest, table, n_pages, Heads(4, 2), page_size)
        distinct = {slot for request in range(12) for slot in slots_of(case, request).tolist()}
        assert case.unique_tokens == len(distinct)
        for request in range(12):
            assert np.array_equal(slots_in(case.paged, request, page_size), slots_of(case, request))


def test_a_request_that_ends_at_the_root_leaves_no_cascade():
    forest = Forest([-1], [4], [0, 0], [4, 6], [0, 6])
    table, n_pages = forest_table(forest)
    assert Case("", forest, table, n_pages, Heads(4, 2)).levels is None
