"""Plan, forward and merge in NumPy compute attention by its definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import TILE_SETS, plan_of

from effort import samples
from feather_kernels.forest import Forest
from feather_kernels.pack import MERGES, SPLITS, STRATEGIES
from feather_kernels.reference import direct_decode, merge, reference_decode
from feather_kernels.trees import forest_table, random_forest, tree_forest

CHECKED = {"rtol": 1e-9, "atol": 1e-11}


def tensors(forest, page_size, rng, heads=(4, 2), dim=8, room=0):
    table, pages = forest_table(forest, page_size, room, rng)
    q = rng.standard_normal((forest.n_requests, heads[0], dim))
    k, v = rng.standard_normal((2, pages * page_size, heads[1], dim))
    return q, k, v, table, page_size


@settings(max_examples=samples(300, 100))
@given(
    seed=st.integers(0, 2**32 - 1), requests=st.integers(1, 24), page_size=st.sampled_from([1, 4, 16]),
    strategy=st.sampled_from(list(STRATEGIES)), split=st.sampled_from(list(SPLITS)), grow=st.booleans(),
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2), (16, 1)]), cap=st.sampled_from([0.0, 3.0]),
    merge=st.sampled_from(list(MERGES)), tiles=st.sampled_from(TILE_SETS), fan_in=st.sampled_from([0, 1, 3, 16]),
    sinks=st.booleans(),
)  # fmt: skip
def test_reference_is_direct(seed, requests, page_size, strategy, split, grow, heads, cap, merge, tiles, fan_in, sinks):
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, requests, max_node_tokens=128, max_tail_tokens=128, page_size=page_size)
    data = tensors(forest, page_size, rng, heads)
    options = {"num_qo_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 8, "min_chunk": 16, "n_sm": 200}
    options |= {"grow": grow, "fan_in": fan_in}
    plan = plan_of(forest, strategy=strategy, split=split, merge=merge, tiles=tiles, **options)
    scores = {"sm_scale": 0.5, "logit_soft_cap": cap, "sinks": rng.normal(0, 4, heads[0]) if sinks else None}
    out, lse = reference_decode(plan, *data, **scores)
    expected, expected_lse = direct_decode(forest, *data, **scores)
    np.testing.assert_allclose(out, expected, **CHECKED)
    np.testing.assert_allclose(lse, expected_lse, **CHECKED)


@settings(max_examples=samples(100, 50))
@given(
    seed=st.integers(0, 2**32 - 1), strategy=st.sampled_from(list(STRATEGIES)), split=st.sampled_from(list(SPLITS)),
    merge=st.sampled_from(list(MERGES)), tiles=st.sampled_from(TILE_SETS), fan_in=st.sampled_from([0, 2, 16]),
)  # fmt: skip
def test_a_plan_serves_grown_tails(seed, strategy, split, merge, tiles, fan_in):
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, 20, max_node_tokens=128, max_tail_tokens=128, room=50)
    data = tensors(forest, 1, rng, room=50)
    options = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8, "min_chunk": 16, "fan_in": fan_in}
    plan = plan_of(forest, strategy=strategy, split=split, merge=merge, tiles=tiles, **options)
    later = forest.with_seq_len(forest.seq_len + rng.integers(0, 50, 20))
    assert plan.valid_for(later)[0]
    out, lse = reference_decode(plan, *data, seq_lens=later.seq_len)
    np.testing.assert_allclose(out, direct_decode(later, *data)[0], **CHECKED)
    np.testing.assert_allclose(lse, direct_decode(later, *data)[1], **CHECKED)


def small_plan():
    forest = tree_forest((1, 3), (40, 5))
    plan = plan_of(forest, num_qo_heads=4, num_kv_heads=2, head_dim=8, tiles=((64, 64),), strategy="naive")
    return plan, tensors(forest, 1, np.random.default_rng(2))


def test_waiting_for_a_later_item_is_found_out():
    plan, data = small_plan()
    plan.items[:] = plan.items[::-1].copy()
    with pytest.raises(AssertionError, match="request 2 takes in parts before all of them are there"):
        reference_decode(plan, *data)


def test_a_part_deposited_twice_is_found_out():
    plan, data = small_plan()
    plan.members[1, 1] = plan.members[0, 1]
    with pytest.raises(AssertionError, match="part 0 is deposited twice"):
        reference_decode(plan, *data)


def test_a_part_that_is_not_taken_in_is_found_out():
    plan, data = small_plan()
    plan.items[-1, 11] = 0
    with pytest.raises(AssertionError, match="a part is not taken in"):
        reference_decode(plan, *data)


def test_a_part_taken_in_twice_is_found_out():
    plan, data = small_plan()
    plan.items[-1, 10] = plan.items[-2, 10]
    with pytest.raises(AssertionError, match="a part of request 2 is taken in twice"):
        reference_decode(plan, *data)


def test_an_empty_sequence_gives_zero_and_minus_infinity():
    forest = Forest([], [], [-1, -1], [0, 3], [0, 0])
    data = tensors(Forest([], [], [-1], [3], [0]), 1, np.random.default_rng(0))
    q = np.ones((2, 4, 8))
    for grow in (True, False):
        plan = plan_of(forest, num_qo_heads=4, num_kv_heads=2, head_dim=8, grow=grow)
        out, lse = reference_decode(plan, q, *data[1:])
        assert (out[0] == 0).all() and np.isneginf(lse[0]).all() and np.isfinite(lse[1]).all()


def test_merge_ignores_empty_parts():
    out, lse = merge(np.array([[[2.0]], [[0.0]], [[4.0]]]), np.array([[1.0], [-np.inf], [1.0]]))
    assert out == pytest.approx(3.0) and lse == pytest.approx(1 + np.log(2))


def test_large_logits_do_not_overflow():
    forest = tree_forest((1, 3), (40, 5))
    data = tensors(forest, 1, np.random.default_rng(1))
    plan = plan_of(forest, num_qo_heads=4, num_kv_heads=2, head_dim=8)
    out, _ = reference_decode(plan, *data, sm_scale=1e4)
    np.testing.assert_allclose(out, direct_decode(forest, *data, sm_scale=1e4)[0], **CHECKED)
