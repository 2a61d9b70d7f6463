"""The default delay of prefill, in replays with host times: where it costs more than it gains, there is none."""

from functools import partial

import pytest
from rich.console import Console

from effort import FULL, newest_is_enough
from feather_sglang.replay import traffic
from feather_sglang.replay.jobs import Job
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.processes import run_jobs
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.workloads import shared_prefix
from feather_sglang.slo import parse

pytestmark = newest_is_enough
GROUPS = partial(shared_prefix, 5, 1000, output_tokens=100, requests=150)
LOADS = {
    "chat": lambda: traffic.chat(12, 1.0, 5.0),
    "100 a second": partial(GROUPS, rate=100),
    **({"20 a second": partial(GROUPS, rate=20)} if FULL else {}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Summaries by load and pace; nobody explores, so that nothing but the delay differs."""
    model = StepTimeModel(load_profile("h200"), load_model("qwen3-8b"), "pat", True)
    jobs = [
        Job(
            "feather",
            make(),
            model,
            {"kv_tokens": 200_000},
            {"explore": False, **told},
            f"{load} {pace}",
            parse("mooncake"),
        )
        for load, make in LOADS.items()
        for pace, told in (("default", {}), ("never", {"pace": 0}))
    ]
    results = run_jobs(jobs, 2, tmp_path_factory.mktemp("logs"), Console(quiet=True))
    return {name: result.summary for name, result in results.items()}


@pytest.mark.parametrize("load", LOADS)
def test_the_default_delays_no_more_than_it_earns(runs, load):
    default, never = runs[f"{load} default"], runs[f"{load} never"]
    assert default.e2e_mean <= 1.005 * never.e2e_mean
    assert default.slo_share >= never.slo_share - 0.01
    assert default.output_tok_s >= 0.99 * never.output_tok_s
    assert default.ttft_mean <= 1.05 * never.ttft_mean or default.e2e_mean <= 0.9 * never.e2e_mean


def test_it_delays_where_prefill_would_take_the_time_and_not_where_it_would_not(runs):
    assert runs["chat default"].ttft_mean <= 1.01 * runs["chat never"].ttft_mean
    assert runs["100 a second default"].e2e_mean <= 0.8 * runs["100 a second never"].e2e_mean
