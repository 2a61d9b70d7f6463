"""The servers of ``bench_server.py``: they stay up with all of the cases, and one that fails is left out."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from server_cases import Misfit
from server_records import steady

from feather_sglang.compare.server.cases import Case
from feather_sglang.compare.server.client import allow_open_files
from feather_sglang.compare.server.config import ServerConfig
from feather_sglang.compare.server.driver import LEAST_RUN, PROBLEMS, Driver, Terms, alike, describe, in_turns
from feather_sglang.compare.server.process import Server
from feather_sglang.compare.server.result import RunResult, measure
from feather_sglang.compare.server.watch import retracted

_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+).*?gen throughput \(token/s\): ([\d.]+)")


@dataclass(frozen=True)
class BenchTerms(Terms):
    """The settings of a comparison; a case that raises ``Misfit`` costs its run alone.

    Attributes
    ----------
    together : servers that start together and stay up together.
    case_limit : seconds for a case.
    starting : is told which configuration's server is about to start.
    up : is told of a server that is up, and its answers to the probes.
    left_out : is told of a server that did not come up or has failed, which is not started again, and why.
    """

    together: int = 1
    case_limit: float = math.inf
    starting: Callable[[ServerConfig], None] = lambda configuration: None
    up: Callable[[Server, Sequence[Any]], None] = lambda server, answers: None
    left_out: Callable[[Server, str], None] = lambda server, reason: None


def plan(
    configurations: Sequence[ServerConfig], rounds: int, together: int = 1, switching: bool = False
) -> Iterator[tuple[int, Sequence[ServerConfig]]]:
    """(round, configurations whose servers are up together, or are one) in order."""
    groups = [configurations[i : i + together] for i in range(0, len(configurations), together)]
    for number, group in in_turns(alike(configurations) if switching else groups, rounds):
        yield number, group if number % 2 else group[::-1]


class BenchDriver(Driver):
    """A comparison whose servers are kept: each takes all of the cases, with its cache emptied before each."""

    terms: BenchTerms

    def __init__(self, configurations: Sequence[ServerConfig], cases: Sequence[Case], terms: BenchTerms) -> None:
        super().__init__(configurations, cases, terms)
        self._up: dict[str, Server] = {}  # by configuration; several may have the same
        self._failed: set[str] = set()

    def run(self) -> list[RunResult]:
        """Measure all that time allows; no server is left afterwards."""
        allow_open_files(max(case.batch for case in self.cases) + 200)
        terms = self.terms
        try:
            for number, group in plan(self.configurations, terms.rounds, terms.together, terms.switching):
                if self.remaining() < LEAST_RUN:
                    break
                self.get_ready(group, number)
                for case in self.cases:
                    for configuration in group:
                        self.attempt(configuration, case, number)
        finally:
            for server in set(self._up.values()):
                self.end(server)
        return self.results

    def get_ready(self, group: Sequence[ServerConfig], number: int) -> None:
        """Stop the servers that are not of this group; start those that are missing, all at once."""
        wanted = {configuration.name for configuration in group}
        for server in {server for name, server in self._up.items() if name not in wanted}:
            self.end(server)
        starting = []
        for configuration in group:
            if configuration.name not in self._up and configuration.name not in self._failed:
                starting.append(self.launch_for(configuration, self.log_of(configuration.name, number), group))
        for case in self.cases:
            self.requests(case)  # made while the servers start
        deadline = self.start_deadline()
        for server in starting:
            try:
                self.await_start(server, deadline)
                self.terms.up(server, self.ask_probes(server))
            except PROBLEMS as problem:
                self.leave_out(server, describe(problem))

    def launch_for(self, configuration: ServerConfig, log: Path, group: Sequence[ServerConfig]) -> Server:
        """Start a server, for the whole group where one is switched."""
        self.terms.starting(configuration)
        switching = self.terms.switching
        if switching:  # it starts without what a switch to any of them sets
            configuration = ServerConfig(configuration.name, configuration.server_flags)
        server = self.launch(configuration, log)
        for other in group if switching else [configuration]:
            if other.name not in self._failed:
                self._up[other.name] = server
        return server

    def leave_out(self, server: Server, reason: str) -> None:
        """Go on without it."""
        self._failed.add(server.configuration.name)
        self.terms.left_out(server, reason)
        self.end(server)

    def end(self, server: Server) -> None:
        """Stop it."""
        server.stop()
        self._up = {name: other for name, other in self._up.items() if other is not server}

    def attempt(self, configuration: ServerConfig, case: Case, number: int) -> None:
        """Run a case on the server of a configuration, if both it and time are left, whatever comes of it."""
        server = self._up.get(configuration.name)
        if self.remaining() < LEAST_RUN or server is None:
            return
        result, failed = RunResult(configuration.name, case.name, number), False
        try:
            result = self.measured_on(server, configuration, case, number)
        except Misfit as problem:
            result.error = str(problem)
        except asyncio.TimeoutError:
            result.error = "the server did not answer in time"  # whether it ever will, the next flush shows
        except PROBLEMS as problem:
            result.error, failed = describe(problem), True
        self.results.append(result)
        self.terms.done(result)
        if failed:
            self.leave_out(server, result.error or "")

    def measured_on(self, server: Server, configuration: ServerConfig, case: Case, number: int) -> RunResult:
        """The figures of a run."""
        terms, begun = self.terms, time.monotonic()
        terms.check(case, server)
        server.flush()
        if terms.switching:
            server.switch(configuration.policy, configuration.policy_options)
        mark = server.printed_bytes()
        limit = min(terms.case_limit - (time.monotonic() - begun), self.remaining())
        found, driven = measure(server, configuration.name, case, *self.requests(case), limit, terms.key is not None)
        log = read_log(server.printed(mark), case.batch if case.steady else None)
        found.case, found.round = case.name, number
        found.server = {
            "log": log,
            "seconds": round(time.monotonic() - begun, 2),
            "steady": steady(driven.streams) if case.steady else None,
            "held": driven.held,
        }
        return found


def read_log(text: str, batch: int | None = None) -> dict[str, Any]:
    """What the scheduler's own lines say of one case.

    Parameters
    ----------
    batch : throughput is the median of lines with so many requests running; by default with the most seen. The first
        such line is left out, as its interval began before.
    """
    lines = [(int(running), float(rate)) for running, rate in _DECODE.findall(text)]
    most = max((running for running, _ in lines), default=0)
    full = [rate for running, rate in lines if running == (batch or most)][1:]
    return {
        "peak_running": most or None,
        "full_batch_tok_s": round(median(full), 1) if full else None,
        "retractions": retracted(text),
    }
