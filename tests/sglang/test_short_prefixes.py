"""Short prefixes: where they are not worth a wait one by one, feather is to compute no more than fcfs and be as fast.

One replayed server per policy, which serves all traces one after the other. In the first the host takes no time, so
that the figures are the policy's and the GPU's alone; in bursts its time is modelled, and binds.
"""

import json
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console

from effort import FULL, newest_is_enough
from feather_sglang.replay import jobs as replays
from feather_sglang.replay import processes
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import Trace
from feather_sglang.replay.workloads import shared_prefix

pytestmark = newest_is_enough
POLICIES = "fcfs", "feather-bandit"
BURST = 100_000  # requests per second: all at once


class Case(NamedTuple):
    groups: int
    prefix_tokens: int
    rate: float
    output_tokens: int = 20
    requests: int = 400

    @property
    def trace(self) -> Trace:
        return shared_prefix(**self._asdict())

    def __str__(self) -> str:
        when = "at once" if self.rate == BURST else f"at {self.rate:g} a second"
        return f"{self.groups} groups x {self.prefix_tokens}, {self.requests} {when}, {self.output_tokens} out"


# At a moderate rate the end of the trace is the last arrival and what paced prefill lets that one wait (0.1 s at most):
# five seconds of arrivals, so that this is not taken for throughput.
CASES = [
    Case(1, 64, BURST),
    Case(40, 240, BURST),
    Case(200, 64, BURST),
    Case(200, 64, 300, requests=1500),
    Case(40, 600, 300, output_tokens=200),
    Case(1, 300, 60),
]
# Between those, and larger.
MORE_CASES = [
    Case(1, 600, BURST),
    Case(5, 128, BURST),
    Case(5, 300, BURST),
    Case(40, 64, BURST),
    Case(40, 128, BURST),
    Case(40, 240, BURST, requests=600),
    Case(40, 240, BURST, output_tokens=200),
    Case(40, 300, BURST),
    Case(200, 240, BURST),
    Case(200, 600, BURST),
    Case(5, 240, 300, requests=1500),
    Case(40, 128, 300, requests=1500),
    Case(200, 128, 60),
    Case(5, 600, 60, output_tokens=200),
]
CASES += MORE_CASES if FULL else []
BURSTS = [
    Case(12, 255, 20_000, 10, 2000),
    Case(40, 100, 4000, 10, 2000),
    Case(200, 100, 20_000, 60, 2000),
]
MORE_BURSTS = [
    Case(5, 20, 4000, 10, 2000),
    Case(5, 100, 4000, 30, 2000),
    Case(5, 255, 20_000, 10, 2000),
    Case(5, 255, BURST, 60, 2000),
    Case(40, 20, BURST, 60, 2000),
    Case(40, 100, 20_000, 30, 2000),
    Case(40, 255, BURST, 30, 2000),
    Case(200, 20, BURST, 10, 2000),
    Case(200, 255, 4000, 60, 2000),
]
BURSTS += MORE_BURSTS if FULL else []


class Served(NamedTuple):
    tokens_a_second: float
    computed_tokens: int  # of prompts


@dataclass(frozen=True)
class Sweep(replays.Job):
    cases: tuple[Case, ...] = ()


def serve(job, tell):
    """All cases on one server, in a process of its own."""
    os.environ["FEATHER_OPTIONS"] = json.dumps(job.options)
    from feather_sglang.adapter.replay_engine import Replay, ReplaySettings

    served = []
    with tempfile.TemporaryDirectory() as folder:
        engine = Replay(Path(folder), job.policy, job.trace, job.model, ReplaySettings(**job.settings))
        for case in job.cases:
            trace = case.trace
            engine._block_size = trace.block_size  # it is taken from the trace that a server is made for
            outcome = engine.run(trace)
            computed = sum(one.request.input_length - one.cached_tokens for one in outcome.served)
            served.append(Served(replays.result_of(job.name, outcome).summary.output_tok_s, computed))
    return served


def serve_all(cases, attention, cost, folder):
    """What each policy served, by case."""
    shape, profile = load_model("qwen3-8b"), load_profile("h200")
    settings = {"kv_tokens": profile.kv_tokens(shape), "scheduler_cost": cost}
    longest = max((case.trace for case in cases), key=lambda trace: trace.least_pool(1))
    model = StepTimeModel(profile, shape, attention)
    jobs = [Sweep(name, longest, model, settings, {"explore": False}, cases=tuple(cases)) for name in POLICIES]
    results = processes.run_jobs(jobs, 2, folder, Console(quiet=True), serve)
    return {case: [results[name][i] for name in POLICIES] for i, case in enumerate(cases)}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return serve_all(CASES, "pat", "off", tmp_path_factory.mktemp("logs"))


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in CASES])
def test_short_prefixes_cost_no_more_than_under_fcfs(served, case):
    fcfs, feather = served[case]
    faster, more = feather.tokens_a_second / fcfs.tokens_a_second, feather.computed_tokens / fcfs.computed_tokens
    says = f"{case}: {faster:.3f} x the tokens a second, {more:.3f} x the computed tokens ({fcfs}, {feather})"
    assert faster >= 0.99 and more <= 1.02, says


def test_a_burst_of_short_prompts_is_served_as_fast_as_under_fcfs(tmp_path):
    """Four cohorts of 500: where one begins a step later, a run of a few seconds ends a step later."""
    served = serve_all(BURSTS, "fa3", "model", tmp_path)
    faster = {str(case): feather.tokens_a_second / fcfs.tokens_a_second for case, (fcfs, feather) in served.items()}
    assert min(faster.values()) >= 0.985, faster
    assert math.prod(faster.values()) >= 1.0, faster
