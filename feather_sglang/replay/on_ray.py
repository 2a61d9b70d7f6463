"""Jobs on a Ray cluster: each is a task, which runs it in a child process of its node as ``processes`` does.

A node that dies costs its tasks only: Ray runs them again on another one. What a task says on its way goes through a
mailbox on the command's own node, and its log comes with its end.
"""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import tempfile
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from feather_sglang import __version__, ending
from feather_sglang.adapter.environment import sglang_variables
from feather_sglang.adapter.hooks import installed_version
from feather_sglang.errors import FeatherError
from feather_sglang.replay.digests import code_digest
from feather_sglang.replay.processes import Event, Executor, Work, events

RETRIES = 3  # of a task whose node or worker died
_POLL = 0.5  # seconds
_ANSWERS_WITHIN = 10.0  # seconds


def add_ray(parser: argparse._ActionsContainer) -> None:
    """Add ``--ray``."""
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run replays on this Ray cluster (auto: the one of this machine), as many at a time as it has CPUs; its "
        "nodes need this package and this SGLang",
    )


def executor_of(address: str | None) -> Executor:
    """What runs jobs: child processes, or the Ray cluster at an address."""
    if address is None:
        return events
    try:
        import ray  # noqa: F401
    except ImportError:
        raise FeatherError(f"--ray {address}: Ray is not installed: pip install 'feather-sglang[ray]'") from None
    return partial(_events, address)


class Mailbox:
    """What tasks say on their way, until somebody takes it."""

    def __init__(self) -> None:
        self._said: list[Event] = []

    def put(self, event: Event) -> None:
        """Say it."""
        self._said.append(event)

    def take(self) -> list[Event]:
        """All that was said since the last time."""
        said, self._said = self._said, []
        return said


def _versions() -> str:
    return f"feather-sglang {__version__} (code {code_digest()}) and sglang {installed_version()}"


def _task(versions: str, job: Any, work: Work, mailbox: Any) -> tuple[Event, bytes]:
    """One job, on a node of the cluster; how it ended, and its log."""
    if (here := _versions()) != versions:
        return Event(job.name, "mistake", f"--ray: a node has {here}, this machine {versions}: install the same"), b""
    last = Event(job.name, "crash", "it ended without a result")
    with tempfile.TemporaryDirectory() as logs:
        with closing(events([job], 1, Path(logs), work)) as heard:
            for last in heard:
                if last.kind in ("start", "progress"):
                    mailbox.put.remote(last)
        return last, Path(logs, f"{job.name}.log").read_bytes()


def _connect(address: str) -> None:
    import ray

    before = signal.getsignal(signal.SIGTERM)
    variables = {"env_vars": sglang_variables()}
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), _ANSWERS_WITHIN).close()
        with ending.put_off():
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=variables)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise FeatherError(f"--ray {address}: no such cluster: {str(error).splitlines()[0]}") from None
    finally:
        if signal.getsignal(signal.SIGTERM) is not before:  # Ray takes it, and would end without a word
            signal.signal(signal.SIGTERM, before)


def _events(address: str, jobs: Sequence[Any], at_a_time: int, logs: Path, work: Work) -> Generator[Event, None, None]:
    """Run the jobs as tasks: an ``Executor``; the cluster says how many at a time."""
    import ray as package
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray: Any = package  # its annotations know no strategy for a node
    _connect(address)
    try:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        mailbox = ray.remote(num_cpus=0, scheduling_strategy=here)(Mailbox).remote()
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_task)
        waiting = list(jobs)
        running: dict[Any, Any] = {}
        try:
            while waiting or running:
                free = max(1, int(ray.cluster_resources().get("CPU", 1))) - len(running)
                for job in waiting[: max(0, free)]:
                    (logs / f"{job.name}.log").write_bytes(b"")
                    running[task.remote(_versions(), job, work, mailbox)] = job
                del waiting[: max(0, free)]
                done, _ = ray.wait(list(running), timeout=_POLL)
                yield from ray.get(mailbox.take.remote())
                for ref in done:
                    job = running.pop(ref)
                    try:
                        event, log = ray.get(ref)
                    except ray.exceptions.RayError as error:
                        event, log = Event(job.name, "crash", str(error).strip().splitlines()[-1]), str(error).encode()
                    (logs / f"{job.name}.log").write_bytes(log)
                    yield event
        finally:
            for ref in running:
                ray.cancel(ref, force=True)
    finally:
        ray.shutdown()
