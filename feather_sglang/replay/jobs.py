"""Replays in child processes, one a job, and the folder that their results go to."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple, Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from feather_sglang import ending
from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import check_target, replace_text
from feather_sglang.replay.idle import IdleServer
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import Trace
from feather_sglang.report.summary import RunSummary
from feather_sglang.slo import SLO, Timing, judge

RESULTS_VERSION = 1


@dataclass(frozen=True)
class Job:
    """One run: everything a child process needs. ``label`` names it in the report; the policy's name if empty.

    Whether requests met the ``slo`` is reported where there is one.
    """

    policy: str
    trace: Trace
    model: StepTimeModel
    settings: dict[str, Any]
    options: dict[str, Any]
    label: str = ""
    slo: SLO | None = None

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.label or self.policy


@dataclass
class ReplayResult:
    """What a child process sends back; `prefills` counts prefill steps."""

    summary: RunSummary
    prefills: int
    batches: list[tuple[float, int, float]]
    latencies: list[float]
    feather: dict[str, Any] | None


def replay(job: Job, tell: Any) -> ReplayResult:
    """Run one job in this process (once per process: SGLang keeps global state)."""
    os.environ["FEATHER_OPTIONS"] = json.dumps(job.options)
    os.environ.pop("FEATHER_STEP_LOG", None)  # no step is one of a server's
    from feather_sglang.adapter import cpu_shims

    cpu_shims.install()
    from feather_sglang.adapter.replay_engine import Replay, ReplaySettings

    with tempfile.TemporaryDirectory() as folder:
        engine = Replay(Path(folder), job.policy, job.trace, job.model, ReplaySettings(**job.settings))
        idle = IdleServer(job.model, job.trace, engine.settings.chunked_prefill, engine.host)
        return result_of(job.name, engine.run(job.trace, tell), idle, job.slo)


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
    summary = replace(summary, gpu_busy=busy, **judge(slo, timings, alone, len(served), outcome.makespan)._asdict())
    every = max(1, len(outcome.batches) // 4000)
    latencies = [s.finish - s.due for s in served]
    return ReplayResult(summary, outcome.prefills, outcome.batches[::every], latencies, feather)


def _child(work: Callable[[Any, Any], Any], job: Named, log: Path, scratch: str, queue: Any) -> None:
    """Entry point of a child process; everything it prints goes to its log, temporary files into a folder."""
    tempfile.tempdir = scratch
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    parent = multiprocessing.parent_process()

    def tell(done: int) -> None:
        if parent is not None and not parent.is_alive():
            os._exit(1)  # the command was killed: nobody waits for this replay
        queue.put((job.name, "progress", done))

    try:
        queue.put((job.name, "done", work(job, tell)))
    except FeatherError as error:
        queue.put((job.name, "mistake", str(error)))
    except BaseException as error:
        traceback.print_exc()
        queue.put((job.name, "crash", f"{type(error).__name__}: {error}"))
    queue.close()
    queue.join_thread()
    os._exit(0)  # nothing of SGLang's interpreter shutdown is of use here


class Named(Protocol):
    """What ``events`` asks of a job."""

    @property
    def name(self) -> str:
        """Names its events and its log."""


class Event(NamedTuple):
    """What a job's process does: it is a "start", "progress", "done", a user's "mistake" or a "crash"."""

    job: str
    kind: str
    value: Any = None


def _start_fork_server() -> None:
    """Start what replays are forked from. Ctrl-C in a terminal is told to every process; this one ends the others."""
    resource_tracker.ensure_running()  # which lets SIGINT through again when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as which it is inherited
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def events(
    jobs: Sequence[Named], at_a_time: int, logs: Path, work: Callable[[Any, Any], Any]
) -> Generator[Event, None, None]:
    """Run ``work`` on the jobs in child processes; whoever stops listening ends those that run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["feather_sglang.adapter.preload"])
    _start_fork_server()
    queue = context.Queue()
    waiting = list(jobs)
    running: dict[str, Any] = {}
    # One folder for all: a child that is terminated removes nothing.
    with tempfile.TemporaryDirectory() as scratch:
        try:
            while waiting or running:
                while waiting and len(running) < at_a_time:
                    job = waiting.pop(0)
                    log = logs / f"{job.name}.log"
                    log.write_bytes(b"")  # a child that cannot write its log could not even say so
                    process = context.Process(target=_child, args=(work, job, log, scratch, queue))
                    with ending.put_off():  # a process whose number nobody has got yet cannot be ended
                        process.start()
                        running[job.name] = process
                    yield Event(job.name, "start")
                try:
                    event = Event(*queue.get(timeout=1.0))
                except Empty:
                    dead = [name for name, process in running.items() if not process.is_alive()]
                    if not dead or not queue.empty():
                        continue
                    event = Event(dead[0], "crash", "it ended without a result")
                if event.kind != "progress":
                    running.pop(event.job).join()
                yield event
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.join()


def run_jobs(
    jobs: list[Job],
    at_a_time: int,
    logs: Path,
    console: Console,
    work: Callable[[Any, Any], Any] = replay,
    passes: int = 1,
) -> dict[str, Any]:
    """Run ``work`` on the jobs in child processes, with a progress bar each; the first failure ends them all."""
    results: dict[str, Any] = {}
    columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, closing(events(jobs, at_a_time, logs, work)) as heard:
        bars = {
            job.name: progress.add_task(job.name, total=passes * len(job.trace.requests), start=False) for job in jobs
        }
        for name, kind, value in heard:
            if kind == "start":
                progress.start_task(bars[name])
            elif kind == "progress":
                progress.update(bars[name], completed=value)
            elif kind == "done":
                results[name] = value
                progress.update(bars[name], completed=progress.tasks[bars[name]].total)
                progress.stop_task(bars[name])
            elif kind == "mistake":
                raise FeatherError(value)
            else:
                raise FeatherError(f"the replay under {name} failed ({value}); see {logs / f'{name}.log'}")
    return {job.name: results[job.name] for job in jobs}


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically."""
    replace_text(path, json.dumps(content, indent=1), "results")


def make_folder(path: Path, *files: str) -> Path:
    """Make the output folder, in which files of these names can be written, or say in one line why not."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FeatherError(f"--out {path}: cannot make the folder: {error.strerror}") from error
    for name in files:
        check_target(path / name, "results")
    return path
