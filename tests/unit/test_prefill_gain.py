"""Predicted prefill times beside the measured ones, and what they are made of; no GPU."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feather_kernels.trees import random_forest
from feather_sglang.attention.new_tokens import with_new_tokens
from feather_sglang.attention.packed_prefill import gain as gain_module
from feather_sglang.attention.packed_prefill.gain import MARGIN, SLOWEST, PrefillGain

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_prefill as bench
from decode_cases import Heads

SHAPE, BLOCK = (32, 8, 128), 32
LAYERS = 36  # Qwen3-8B's
RECORDS = json.loads((Path(__file__).parents[2] / "docs" / "measured" / "prefill_h200.json").read_text())["records"]


@pytest.fixture(scope="module")
def batches():
    return {name: bench.cases(8192, Heads(32, 8))[name]() for name in bench.cases(1, Heads(1, 1))}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["case"])
def test_every_measured_step_is_decided_as_it_was_measured(batches, record):
    batch = batches[record["case"]]
    assert batch.rows == record["rows"] and len(batch.counts) == record["requests"]
    packed, stock = (record["systems"][name]["warm_us"] for name in ("pat", "fa3"))
    layer = PrefillGain([SHAPE], BLOCK)
    assert layer.packed_seconds(batch.forest, batch.counts) * 1e6 == pytest.approx(packed, rel=0.03)
    assert layer.stock_seconds(batch.forest.seq_len, batch.counts) * 1e6 == pytest.approx(stock, rel=0.13)
    assert PrefillGain([SHAPE] * LAYERS, BLOCK).pays(batch.forest, batch.counts) == (stock / packed >= MARGIN)


@pytest.mark.parametrize("case", ["short", "long", "chunk", "traces"])
def test_where_nothing_is_shared_lengths_tell(batches, case):
    batch = batches[case]
    assert not PrefillGain([SHAPE] * LAYERS, BLOCK).may_pay(batch.forest.seq_len, batch.counts)


def test_a_gain_must_be_worth_the_plan(batches):
    batch = batches["groups-5x5k"]
    assert not PrefillGain([SHAPE], BLOCK).pays(batch.forest, batch.counts)
    assert PrefillGain([SHAPE] * LAYERS, BLOCK).pays(batch.forest, batch.counts)


def test_a_slower_host_packs_larger_steps_only(batches):
    small = bench.batch_of([12] * 5, 5000, np.full(60, 20), Heads(32, 8))
    gain = PrefillGain([SHAPE] * LAYERS, BLOCK)
    assert gain.may_pay(small.forest.seq_len, small.counts) and gain.pays(small.forest, small.counts)
    gain.plan_time.pace = SLOWEST
    assert not gain.pays(small.forest, small.counts)
    large = batches["groups-5x5k"]
    assert gain.pays(large.forest, large.counts)  # so that the pace is still learned


@given(st.integers(0, 2**32 - 1), st.integers(1, 200), st.sampled_from([1, 8, 32]))
@settings(max_examples=60, deadline=None)
def test_packed_products_are_those_of_the_forest_that_is_planned(seed, most, block):
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, int(rng.integers(1, 40)), max_node_tokens=400, max_tail_tokens=400)
    counts = rng.integers(1, most + 1, forest.n_requests)
    rows = with_new_tokens(forest, counts, block)
    below = np.zeros(rows.n_nodes, np.int64)
    for node in rows.request_node.tolist():
        while node >= 0:
            below[node] += 1
            node = int(rows.parent[node])
    pairs = int((-(-below // block) * block * rows.length).sum())
    heads, _, dim = SHAPE
    products = 4 * heads * dim * pairs / gain_module.PACKED_FLOP_PER_S
    tails = heads * dim * int(counts.sum()) * gain_module.PACKED_VALUE_S
    gain = PrefillGain([SHAPE], block)
    assert gain.packed_seconds(forest, counts) == pytest.approx(gain_module.PACKED_S + products + tails)
    many = PrefillGain([SHAPE] * 1000, block)
    assert many.may_pay(forest.seq_len, counts) or not many.pays(forest, counts)


def test_layers_of_other_shapes_add_up_by_their_products(batches):
    batch = batches["few-shot"]
    one, half, both = (PrefillGain(layers, BLOCK) for layers in ([SHAPE], [(16, 4, 128)], [SHAPE, (16, 4, 128)]))
    stock = [gain.stock_seconds(batch.forest.seq_len, batch.counts) for gain in (one, half, both)]
    packed = [gain.packed_seconds(batch.forest, batch.counts) for gain in (one, half, both)]
    assert stock[1] == pytest.approx(stock[0] / 2) and stock[2] == pytest.approx(stock[0] * 1.5)
    assert packed[1] - gain_module.PACKED_S == pytest.approx((packed[0] - gain_module.PACKED_S) / 2)
    assert packed[2] == pytest.approx(packed[0] + packed[1])
    wide = PrefillGain([(32, 2, 128)], 8)  # 16 heads to a KV head: 8 tokens fill a tile
    few = np.full(64, 8)
    assert wide.stock_seconds(batch.forest.seq_len, few) < 0.3 * one.stock_seconds(batch.forest.seq_len, few)
