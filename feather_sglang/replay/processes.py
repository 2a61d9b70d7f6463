"""Work in child processes, one a job: each has SGLang's global state for itself. ``on_ray`` has them on a cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from feather_sglang import ending
from feather_sglang.errors import FeatherError
from feather_sglang.replay.jobs import Job, replay

_READY = "FEATHER_PRELOADED"  # adapter/preload.py
_HAS_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT


class Event(NamedTuple):
    """An event of a job's process: "start", "progress", "done", a user's "mistake" or a "crash"."""

    job: str
    kind: str
    value: Any = None


Work = Callable[[Any, Any], Any]  # of a job and of what hears of its progress; what it gives
# Runs the work on the jobs, by name, so many at a time, their logs in a folder; whoever stops listening ends those that
# run.
Executor = Callable[[Sequence[Any], int, Path, Work], Generator[Event, None, None]]


def _child(work: Work, job: Any, log: Path, scratch: str, queue: Any) -> None:
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
        queue.put((job.name, "crash", f"{type(error).__name__}: {error}".partition("\n")[0]))  # the log has the rest
    queue.close()
    queue.join_thread()
    os._exit(0)  # nothing of SGLang's interpreter shutdown is of use here


def _start_fork_server() -> None:
    """Start what replays are forked from, and wait until it has imported SGLang; a signal ends the wait at once.

    Ctrl-C in a terminal is told to every process; this one ends the others.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        return forkserver.ensure_running()  # it is ready, or starts again if it has died
    resource_tracker.ensure_running()  # which lets SIGINT through again when it starts
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready")
        os.environ[_READY] = str(ready)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as which it is inherited
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            del os.environ[_READY]
        pid = server._forkserver_pid
        while not ready.exists() and pid is not None and not os.waitid(os.P_PID, pid, _HAS_ENDED):
            time.sleep(0.02)


def events(jobs: Sequence[Any], at_a_time: int, logs: Path, work: Work) -> Generator[Event, None, None]:
    """Run the jobs in child processes: an ``Executor``."""
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
    jobs: Sequence[Job],
    at_a_time: int,
    logs: Path,
    console: Console,
    work: Work = replay,
    failed: dict[str, str] | None = None,
    executor: Executor = events,
    keep: Callable[[str, Any], None] = lambda name, result: None,
) -> dict[str, Any]:
    """Run ``work`` on the jobs, with a progress bar each; what it gave, by name.

    `failed` is told why a job failed, by name; without it the first failure ends all jobs. `keep` hears each result as
    soon as it is there.
    """
    results: dict[str, Any] = {}
    columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, closing(executor(jobs, at_a_time, logs, work)) as heard:
        bars = {job.name: progress.add_task(job.name, total=len(job.trace.requests), start=False) for job in jobs}
        for name, kind, value in heard:
            if kind == "start":
                progress.start_task(bars[name])
            elif kind == "progress":
                progress.update(bars[name], completed=value)
            elif kind == "done":
                results[name] = value
                keep(name, value)
                progress.update(bars[name], completed=progress.tasks[bars[name]].total)
                progress.stop_task(bars[name])
            else:
                reason = value if kind == "mistake" else f"{value.rstrip('.')}; see {logs / f'{name}.log'}"
                if failed is None:
                    raise FeatherError(reason if kind == "mistake" else f"the replay under {name} failed: {reason}")
                failed[name] = reason
                progress.stop_task(bars[name])
    return {job.name: results[job.name] for job in jobs if job.name in results}
