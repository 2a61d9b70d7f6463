"""Packed prefill in the step-time model."""

import json
from pathlib import Path

import pytest

from feather_sglang.errors import FeatherError
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel

RECORDS = json.loads((Path(__file__).parents[2] / "docs" / "measured" / "prefill_h200.json").read_text())["records"]


def model(packed_prefill="off", attention="pat", graphs=False):
    return StepTimeModel(load_profile("h200"), load_model("qwen3-8b"), attention, graphs, packed_prefill)


@pytest.mark.parametrize(("case", "groups", "prefix"), [("groups-5x5k", 5, 5000), ("groups-20x10k", 20, 10000)])
def test_a_step_gains_what_was_measured(case, groups, prefix):
    (record,) = (one for one in RECORDS if one["case"] == case)
    requests, systems = record["requests"], record["systems"]
    paths = [(i % groups,) for i in range(requests)]
    off, auto, on = (
        model(name).prefill([20] * requests, [prefix] * requests, paths, prefix) for name in ("off", "auto", "on")
    )
    gain = 36 * (systems["fa3"]["warm_us"] - systems["pat"]["warm_us"]) - record["host_us"]
    assert off - auto == pytest.approx(gain * 1e-6, rel=0.3) and on == auto


def test_auto_leaves_a_step_that_on_makes_slower():
    """Requests that share nothing, as what else is cached, or their paths, are not the same."""
    paths = [(i,) for i in range(100)]
    off, auto, on = (model(name).prefill([80] * 100, [1000] * 100, paths, 1000) for name in ("off", "auto", "on"))
    assert off == auto < on
    assert model("on").prefill([80] * 100, [1000] * 100) == on


@pytest.mark.parametrize("packed_prefill", ["on", "auto"])
def test_it_needs_what_a_server_needs(packed_prefill):
    with pytest.raises(FeatherError, match=rf"^--feather-pat-prefill {packed_prefill}: give --attention pat, too$"):
        model(packed_prefill, "fa3")
    with pytest.raises(FeatherError, match=rf"^--feather-pat-prefill {packed_prefill}: give --prefill-graphs off, too"):
        model(packed_prefill, graphs=True)


def test_requests_share_the_blocks_that_are_cached_of_both():
    """A step takes what its requests' common blocks take, whether these are one node or several."""
    new, cached, few = [20] * 4, [30_000, 29_000, 30_000, 25_000], 1000
    paths = [(1,) * 30, (1,) * 30, (1,) * 29 + (2,), (5,) * 30]
    apart = [(number,) * 30 for number in range(4)]
    on = model("on")
    assert on.prefill(new, cached, paths, few) < on.prefill(new, cached, apart, few)
    new = [8] * 4  # together one tile
    whole = on.prefill(new, [30_000] * 4, [(1,)] * 4, 30_000)
    assert whole == pytest.approx(on.prefill(new, [30_000] * 4, [(1,) * 30] * 4, few))
    private = on.prefill(new, [29_999] * 4, [(1,)] * 4, 30_000)  # of a block that is cached in part
    assert private == on.prefill(new, [29_999] * 4, [(1,), (2,), (3,), (4,)], 30_000) and private > 1.1 * whole
