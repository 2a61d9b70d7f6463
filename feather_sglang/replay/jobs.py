"""A replay's job and its result, as they pass between processes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from feather_sglang.replay.idle import IdleServer
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import Trace
from feather_sglang.report.summary import RunSummary
from feather_sglang.slo import SLO, Timing, judge


@dataclass(frozen=True)
class Job:
    """One run: everything a child process needs. ``label`` names it in the report; the policy's name if empty.

    Whether requests met the ``slo`` is reported where there is one. ``settings`` are those of each replica.
    """

    policy: str
    trace: Trace
    model: StepTimeModel
    settings: dict[str, Any]
    options: dict[str, Any]
    label: str = ""
    slo: SLO | None = None
    replicas: int = 1
    router: str = ""  # in front of the replicas (``replicas.serve``)

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.label or self.policy


@dataclass
class ReplayResult:
    """The result that a child process sends back; `prefills` counts prefill steps."""

    summary: RunSummary
    prefills: int
    batches: list[tuple[float, int, float]]
    latencies: list[float]
    feather: dict[str, Any] | None


@contextmanager
def engine_of(job: Job) -> Iterator[Any]:
    """The replayed server of a job, in this process (once per process: SGLang keeps global state)."""
    os.environ["FEATHER_OPTIONS"] = json.dumps(job.options)
    os.environ.pop("FEATHER_STEP_LOG", None)  # no step is one of a server's
    from feather_sglang.adapter import cpu_shims

    cpu_shims.install()
    from feather_sglang.adapter.replay_engine import Replay, ReplaySettings

    with tempfile.TemporaryDirectory() as folder:
        yield Replay(Path(folder), job.policy, job.trace, job.model, ReplaySettings(**job.settings))


def replay(job: Job, tell: Any) -> ReplayResult:
    """Run one job."""
    with engine_of(job) as engine:
        return result_of(job.name, engine.run(job.trace, tell), idle_of(job, engine), job.slo)


def idle_of(job: Job, engine: Any) -> IdleServer:
    """The job's server when it has no other request."""
    return IdleServer(job.model, job.trace, engine.settings.chunked_prefill, engine.host)


def result_of(policy: str, outcome: Any, idle: IdleServer | None = None, slo: SLO | None = None) -> ReplayResult:
    """Turn what the engine measured into figures; without an idle server there is no slowdown."""
    served = outcome.served
    feather = outcome.feather
    summary = RunSummary.from_times(
        policy,
        arrivals=[s.due for s in served],
        first_tokens=[s.first_token for s in served],
        finishes=[s.finish for s in served],
        output_tokens=sum(s.request.output_length for s in served),
        input_tokens=sum(s.request.input_length for s in served),
        cached_tokens=sum(s.cached_tokens for s in served),
        token_gaps=np.concatenate([np.empty(0), *(s.gaps for s in served)]),
        batch_rows=[rows for _, rows, _ in outcome.batches],
        batch_seconds=[seconds for _, _, seconds in outcome.batches],
        makespan=outcome.makespan,
        scheduler_seconds=outcome.scheduler_seconds,
        retractions=outcome.retractions,
        stops=feather["stops"] if feather else 0,
    )
    timings = [Timing.of(s.first_token - s.due, s.gaps) for s in served]
    alone = [idle.timing(s.request) for s in served] if idle is not None else None
    busy = outcome.gpu_busy / outcome.makespan if outcome.makespan else None
    summary = replace(summary, gpu_busy=busy, **judge(slo, timings, alone, len(served), outcome.makespan))
    every = max(1, len(outcome.batches) // 4000)
    latencies = [s.finish - s.due for s in served]
    return ReplayResult(summary, outcome.prefills, outcome.batches[::every], latencies, feather)
