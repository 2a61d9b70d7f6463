"""The step-time model: what must hold for any batch on any profile."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.errors import FeatherError
from feather_sglang.replay.batch_sharing import BatchSharing
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.profiles import list_profiles, load_profile
from oracles.decode_batches import grouped, step_model

KERNELS = [(name, kernel) for name in list_profiles() for kernel in load_profile(name).attention]


@pytest.mark.parametrize(("profile", "kernel"), KERNELS)
@given(data=st.data())
def test_a_longer_row_or_one_more_never_costs_less(profile, kernel, data):
    model = step_model(profile, kernel)
    lengths = data.draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=40))
    fewer, more = lengths[:-1], list(lengths)
    longer = list(lengths)
    longer[data.draw(st.integers(0, len(lengths) - 1))] += data.draw(st.integers(1, 5000))

    def seconds(rows):
        return model.decode(rows, BatchSharing.from_paths([(i,) for i in range(len(rows))], 40_000, rows))

    assert seconds(fewer) < seconds(more) < seconds(longer)


@pytest.mark.parametrize(("profile", "kernel"), KERNELS)
@given(
    rows=st.integers(1, 300),
    prefix=st.sampled_from([64, 1024, 10_240]),
    groups=st.integers(1, 24),
    order=st.sampled_from(["grouped", "shuffled", "interleaved"]),
)
def test_no_step_beats_the_memory(profile, kernel, rows, prefix, groups, order):
    hardware = load_profile(profile)
    model = step_model(profile, kernel)
    lengths, sharing = grouped(rows, prefix, min(groups, rows), order=order)
    bandwidth = {"h200": 4.8e12, "rtx6000ada": 9.6e11}[profile]  # data sheets
    unique = sharing.unique_tokens * model.model.kv_bytes_per_token + model.model.weight_bytes
    assert model.decode(lengths, sharing) >= unique / bandwidth
    assert hardware.copy_bytes_per_s < bandwidth and hardware.weight_bytes_per_s < bandwidth


@pytest.mark.parametrize(("profile", "kernel"), KERNELS)
@pytest.mark.parametrize("rows", [64, 200, 500])
@pytest.mark.parametrize("prefix", [1024, 5120, 10_240])
def test_one_group_is_best_and_order_never_hurts(profile, kernel, rows, prefix):
    model = step_model(profile, kernel)

    def seconds(groups, order):
        return model.decode(*grouped(rows, prefix, groups, order=order))

    for groups in (2, 5, 20):
        assert seconds(1, "grouped") <= seconds(groups, "grouped")
        assert seconds(groups, "grouped") <= seconds(groups, "shuffled") * (1 + 1e-9)
        assert seconds(groups, "shuffled") <= seconds(groups, "interleaved") * (1 + 1e-9)


@pytest.mark.parametrize(("profile", "kernel"), KERNELS)
def test_growth_costs_what_a_fresh_look_would(profile, kernel):
    model = step_model(profile, kernel)
    lengths, sharing = grouped(40, 5000, 4, own=20)
    grown, fresh = grouped(40, 5000, 4, own=180)
    assert model.decode(grown, sharing) == pytest.approx(model.decode(grown, fresh), rel=0.03)
    assert model.decode(grown, sharing) > model.decode(lengths, sharing)


@pytest.mark.parametrize("profile", list_profiles())
@given(rows=st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 30_000)), min_size=1, max_size=20), data=st.data())
def test_prefill_grows_with_every_token(profile, rows, data):
    model = step_model(profile)
    new, cached = (list(column) for column in zip(*rows, strict=True))
    base = model.prefill(new, cached)
    row = data.draw(st.integers(0, len(rows) - 1))
    more_new, more_cached = list(new), list(cached)
    more_new[row] += 100
    more_cached[row] += 1000
    assert base < model.prefill(more_new, cached)
    assert base < model.prefill(new, more_cached)
    assert base < model.prefill([*new, 1], [*cached, 0])
    # A prefix in the cache is cheaper than to compute it.
    assert model.prefill([100], [5000]) < model.prefill([5100], [0])


def test_nothing_to_do_takes_no_time():
    model = step_model("h200")
    assert model.decode([], BatchSharing.from_paths([], 10, [])) == 0
    assert model.prefill([], []) == 0


def test_arrays_and_lists_are_timed_alike():
    model = step_model("h200")
    lengths, sharing = grouped(50, 1000, 5)
    assert model.decode(np.array(lengths), sharing) == model.decode(lengths, sharing)


def test_a_hundred_thousand_steps_are_affordable():
    model = step_model("h200")
    lengths, sharing = grouped(500, 5000, 20, order="shuffled")
    array = np.array(lengths)
    start = time.process_time()
    for _ in range(1000):
        model.decode(array, sharing)
    assert time.process_time() - start < 0.5  # a run of 100,000 steps: under a minute even on a slow machine


def test_models_differ_as_their_sizes_do():
    assert load_model().kv_bytes_per_token == 131_072  # paper: 10K tokens are 1.2 GB
    assert load_model().stored_bytes == pytest.approx(2 * 8.03e9, rel=0.002)
    assert load_model("qwen3-8b").stored_bytes == pytest.approx(2 * 8.19e9, rel=0.002)
    assert load_model("qwen2.5-0.5b").stored_bytes == pytest.approx(2 * 494e6, rel=0.002)
    lengths, sharing = grouped(100, 5000, 1)
    assert step_model("h200", model="qwen2.5-0.5b").decode(lengths, sharing) < step_model("h200").decode(
        lengths, sharing
    )
    with pytest.raises(FeatherError, match="unknown model 'gpt'"):
        load_model("gpt")


def test_an_unknown_kernel_is_refused():
    with pytest.raises(FeatherError, match="profile rtx6000ada has no attention kernel 'fa3': choose from paper"):
        step_model("rtx6000ada", "fa3")
