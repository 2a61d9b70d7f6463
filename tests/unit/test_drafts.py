"""The forest of drafts against causal attention by its definition, and through plans of every strategy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feather_kernels.forest import Forest
from feather_kernels.options import STRATEGIES
from feather_kernels.plan import make_plan
from feather_kernels.reference import reference_decode
from feather_kernels.trees import forest_table, random_forest
from feather_sglang.attention.drafts import draft_lengths, with_drafts

HEADS, KV_HEADS, DIM = 4, 2, 8


def batch(seed, most, drafts):
    """Requests with slots for their drafts: a forest of what is committed, the table, queries and caches."""
    rng = np.random.default_rng(seed)
    whole = random_forest(rng, int(rng.integers(1, most + 1)), max_node_tokens=40, max_tail_tokens=40)
    tail = whole.seq_len - whole.shared_length
    whole = whole.with_seq_len((whole.shared_length + np.maximum(tail, drafts + 1)).astype(np.int32))
    table, pages = forest_table(whole)
    forest = Forest(
        whole.parent, whole.length, whole.request_node, whole.seq_len - drafts, np.asarray(whole.row_offset)
    )
    rows = whole.n_requests * drafts
    q = rng.standard_normal((rows, HEADS, DIM))
    k, v = rng.standard_normal((2, pages, KV_HEADS, DIM))
    return forest, table, q, k, v


def causal(forest, table, drafts, q, k, v):
    """Each request's drafts over its whole sequence, with a mask."""
    out = []
    for request in range(forest.n_requests):
        committed, row = int(forest.seq_len[request]), int(forest.row_offset[request])
        slots = table[row : row + committed + drafts]
        keys, values = (np.repeat(cache[slots], HEADS // KV_HEADS, axis=1) for cache in (k, v))
        mine = q[request * drafts : (request + 1) * drafts]
        scores = np.einsum("qhd,khd->hqk", mine, keys) * DIM**-0.5
        scores = np.where(np.tri(drafts, committed + drafts, committed, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out.append(np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values))
    return np.concatenate(out)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from(sorted(STRATEGIES)))
@settings(max_examples=60)
def test_drafts_see_what_a_causal_mask_lets_them_see(seed, drafts, strategy):
    forest, table, q, k, v = batch(seed, 12, drafts)
    heads = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    plan = make_plan(with_drafts(forest, drafts), strategy=strategy, **heads)
    out, _ = reference_decode(plan, q, k, v, table, 1)
    assert out == pytest.approx(causal(forest, table, drafts, q, k, v), abs=1e-9)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(0, 12))
@settings(max_examples=30)
def test_a_plan_holds_while_drafts_are_accepted(seed, drafts, accepted):
    """Committed since the plan was made: any number of tokens of each request."""
    forest, table, q, k, v = batch(seed, 8, drafts)
    tails = forest.seq_len - forest.shared_length
    before = forest.with_seq_len((forest.seq_len - np.minimum(accepted, tails - 1).clip(0)).astype(np.int32))
    heads = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    plan = make_plan(with_drafts(before, drafts), **heads)
    now = draft_lengths(forest.seq_len, drafts)
    assert plan.valid_for(now) == (True, "")
    out, _ = reference_decode(plan, q, k, v, table, 1, seq_lens=now)
    assert out == pytest.approx(causal(forest, table, drafts, q, k, v), abs=1e-9)


def test_what_a_request_has_committed_is_read_once_for_all_its_drafts():
    forest = Forest([-1], [100], [0, 0], [150, 130], [0, 1000])
    drafts = with_drafts(forest, 4)
    assert drafts.seq_len.tolist() == [151, 152, 153, 154, 131, 132, 133, 134]
    assert drafts.shared_length.tolist() == [150] * 4 + [130] * 4
    assert drafts.row_offset.tolist() == [0] * 4 + [1000] * 4
    plan = make_plan(drafts, num_qo_heads=8, num_kv_heads=2, head_dim=64, strategy="naive")
    assert plan.tokens_read == 100 + 50 + 30 + 2 * (1 + 2 + 3 + 4)
