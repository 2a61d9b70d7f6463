"""The forest of new tokens against causal attention by its definition, and through plans of every strategy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import samples
from feather_kernels.errors import PlanError
from feather_kernels.forest import Forest
from feather_kernels.pack import SPLITS, STRATEGIES
from feather_kernels.plan import make_plan
from feather_kernels.reference import reference_decode
from feather_kernels.trees import forest_table, random_forest
from feather_sglang.attention.new_tokens import tokens_seen, with_new_tokens

HEADS, KV_HEADS, DIM = 4, 2, 8
BLOCKS = {"causal_tails": True, "grow": False}
SHAPE = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}


def batch(seed, most, counts, page_size=1):
    """A forest of what is committed, with slots for new tokens; their counts, the table, queries and caches."""
    rng = np.random.default_rng(seed)
    whole = random_forest(
        rng, int(rng.integers(1, most + 1)), max_node_tokens=40, max_tail_tokens=40, page_size=page_size
    )
    counts = rng.integers(*counts, whole.n_requests) if isinstance(counts, tuple) else np.full(whole.n_requests, counts)
    committed = whole.seq_len * (rng.random(whole.n_requests) > 0.1) if page_size == 1 else whole.seq_len
    committed = np.maximum(committed, whole.shared_length)
    stride = -(-int((committed + counts).max()) // page_size)
    rows = np.arange(whole.n_requests, dtype=np.int64) * stride
    full = Forest(whole.parent, whole.length, whole.request_node, committed + counts, rows)
    table, pages = forest_table(full, page_size, rng=rng)
    q = rng.standard_normal((int(counts.sum()), HEADS, DIM))
    k, v = rng.standard_normal((2, pages * page_size, KV_HEADS, DIM))
    return full.with_seq_len(committed), counts, table, q, k, v


def causal(forest, counts, table, q, k, v, page_size=1, cap=0.0, sinks=None):
    """Each request's new tokens over its whole sequence, with a mask."""
    out, begin = [], 0
    for request, count in enumerate(counts.tolist()):
        committed, row = int(forest.seq_len[request]), int(forest.row_offset[request])
        position = np.arange(committed + count)
        slots = table[row + position // page_size] * page_size + position % page_size
        keys, values = (np.repeat(cache[slots], HEADS // KV_HEADS, axis=1) for cache in (k, v))
        scores = np.einsum("qhd,khd->hqk", q[begin : begin + count], keys) * DIM**-0.5
        if cap:
            scores = cap * np.tanh(scores / cap)
        scores = np.where(np.tri(count, committed + count, committed, dtype=bool), scores, -np.inf)
        weights = np.exp(scores)
        total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks)[:, None, None])
        out.append(np.einsum("hqk,khd->qhd", weights / total, values))
        begin += count
    return np.concatenate(out)


def check_blocks(plan, forest):
    """Whoever does not see all of an item's tokens is in a tile of teams, among rows of one sequence."""
    for _, _, _, stop, grows, first, count, tile, *_ in plan.items.tolist():
        rows = plan.members[first : first + count, 0]
        assert grows < 0
        if (forest.seq_len[rows] < stop).any():
            assert plan.tiles[tile][0] > 16 and len(set(forest.row_offset[rows].tolist())) == 1


def positions_of(forest):
    """For each row (request, first position, end) of every run that it reads: its nodes', then its tail."""
    for row, node in enumerate(forest.request_node.tolist()):
        runs = [(int(forest.shared_length[row]), int(forest.seq_len[row]))]
        while node >= 0:
            end = int(forest.node_end[node])
            runs.append((end - int(forest.length[node]), end))
            node = int(forest.parent[node])
        yield runs[::-1]


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_each_row_reads_all_positions_up_to_its_own_once(seed, block):
    forest, counts, *_ = batch(seed, 12, (1, 70))
    new = with_new_tokens(forest, counts, block)
    last = np.repeat(forest.seq_len, counts) + np.concatenate([np.arange(count) for count in counts])
    assert new.n_requests == counts.sum() and (new.row_offset == np.repeat(forest.row_offset, counts)).all()
    for runs, end in zip(positions_of(new), (last + 1).tolist(), strict=True):
        assert [position for run in runs for position in range(*run)] == list(range(end))
        assert runs[-1][1] - runs[-1][0] <= block  # what a row reads alone


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_rows_share_a_node_with_rows_of_their_block_and_what_requests_share(seed, block):
    """And no slot of anybody else's: a node's rows begin with the same slots."""
    forest, counts, table, *_ = batch(seed, 12, (1, 70))
    new = with_new_tokens(forest, counts, block)
    slots = {}
    for row, node in enumerate(new.request_node.tolist()):
        above = node
        while above >= 0:
            end, begin = int(new.node_end[above]), int(new.row_offset[row])
            found = table[begin : begin + end]
            assert (slots.setdefault(above, found) == found).all()
            above = int(new.parent[above])
        assert new.parent[node] == forest.request_node[np.searchsorted(np.cumsum(counts), row, "right")]


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 20), st.sampled_from(sorted(STRATEGIES)), st.sampled_from([1, 4, 16]),
    st.sampled_from([0.0, 2.0]), st.booleans(), st.sampled_from([{}, BLOCKS]), st.sampled_from(sorted(SPLITS)),
    st.sampled_from([1, 132]),
)  # fmt: skip
@settings(max_examples=samples(100, 30))
def test_new_tokens_see_what_a_causal_mask_lets_them_see(
    seed, block, strategy, page_size, cap, sinks, tails, split, n_sm
):
    """Prompts, chunks of prompts, and rows that decode beside them."""
    forest, counts, table, q, k, v = batch(seed, 8, (1, 30), page_size)
    sinks = np.random.default_rng(seed).normal(0, 2, HEADS) if sinks else None
    new, how = with_new_tokens(forest, counts, block), {"strategy": strategy, "split": split, "n_sm": n_sm}
    plan = make_plan(new, min_chunk=16, **how, **SHAPE, **tails)
    if tails:
        check_blocks(plan, new)
    out, _ = reference_decode(plan, q, k, v, table, page_size, logit_soft_cap=cap, sinks=sinks)
    expected = causal(forest, counts, table, q, k, v, page_size, cap, sinks)
    assert out == pytest.approx(expected, abs=1e-9)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(0, 12))
@settings(max_examples=samples(30, 15))
def test_a_plan_holds_while_drafts_are_accepted(seed, drafts, accepted):
    """Committed since the plan was made: any number of tokens of each request."""
    forest, counts, table, q, k, v = batch(seed, 8, drafts)
    tails = forest.seq_len - forest.shared_length
    before = forest.with_seq_len((forest.seq_len - np.minimum(accepted, tails)).astype(np.int32))
    plan = make_plan(with_new_tokens(before, drafts), **SHAPE)
    now = tokens_seen(forest.seq_len, drafts)
    assert plan.valid_for(now) == (True, "")
    out, _ = reference_decode(plan, q, k, v, table, 1, seq_lens=now)
    assert out == pytest.approx(causal(forest, counts, table, q, k, v), abs=1e-9)


def test_what_a_request_has_committed_is_read_once_for_all_its_drafts():
    forest = Forest([-1], [100], [0, 0], [150, 130], [0, 1000])
    drafts = with_new_tokens(forest, 4)
    assert drafts.seq_len.tolist() == [151, 152, 153, 154, 131, 132, 133, 134]
    assert drafts.shared_length.tolist() == [150] * 4 + [130] * 4
    assert drafts.row_offset.tolist() == [0] * 4 + [1000] * 4
    plan = make_plan(drafts, num_qo_heads=8, num_kv_heads=2, head_dim=64, strategy="naive")
    assert plan.tokens_read == 100 + 50 + 30 + 2 * (1 + 2 + 3 + 4)


def test_a_prompt_behind_a_shared_prefix_is_read_block_by_block():
    forest = Forest([-1], [100], [0, 0], [100, 100], [0, 1000])
    prompts = with_new_tokens(forest, np.array([5, 1]), 2)
    assert prompts.seq_len.tolist() == [101, 102, 103, 104, 105, 101]
    assert prompts.shared_length.tolist() == [100, 100, 102, 102, 104, 100]
    plan = make_plan(prompts, num_qo_heads=8, num_kv_heads=2, head_dim=64, strategy="naive")
    assert plan.tokens_read == 100 + (1 + 2) + (2 + 1 + 2) + (4 + 1) + 1


def test_a_block_is_one_item_with_its_tails():
    forest = Forest([-1], [100], [0, 0], [100, 100], [0, 1000])
    prompts = with_new_tokens(forest, np.array([5, 1]), 2)
    plan = make_plan(prompts, num_qo_heads=8, num_kv_heads=2, head_dim=64, strategy="naive", n_sm=1, **BLOCKS)
    ranges = sorted((start, stop, count) for _, _, start, stop, _, _, count, *_ in plan.items.tolist() if stop > start)
    assert ranges == [(0, 100, 6), (100, 101, 1), (100, 102, 2), (100, 104, 2), (100, 105, 1)]


def test_blocks_need_tails_that_do_not_grow_and_a_tile_of_teams():
    forest = with_new_tokens(Forest([-1], [100], [0], [100], [0]), np.array([5]), 4)
    with pytest.raises(PlanError, match="causal_tails is for tails that do not grow: give grow=False"):
        make_plan(forest, causal_tails=True, **SHAPE)
    with pytest.raises(PlanError, match="causal_tails needs a tile of more than 16 rows"):
        make_plan(forest, tiles=((16, 16),), **BLOCKS, **SHAPE)


def test_of_no_requests_there_are_no_rows():
    nothing = np.empty(0, np.int32)
    assert with_new_tokens(Forest(nothing, nothing, nothing, nothing, nothing), nothing, 8).n_requests == 0
