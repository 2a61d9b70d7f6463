"""Cases on server configurations, one after the other: each run finds a server as a start leaves it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from feather_sglang import ending
from feather_sglang.compare.server.cases import Case, Request, probes
from feather_sglang.compare.server.client import HttpError, allow_open_files, call_all
from feather_sglang.compare.server.config import ServerConfig, shown
from feather_sglang.compare.server.process import Server, ServerFailed
from feather_sglang.compare.server.result import RunResult, measure

LEAST_RUN = 10.0  # seconds that must be left for another run
PROBLEMS = (ServerFailed, HttpError, OSError, EOFError, asyncio.TimeoutError)
T = TypeVar("T")


@dataclass(frozen=True)
class Terms:
    """The settings of a comparison of configurations.

    Attributes
    ----------
    command : a server's, but for the flags of its own.
    vocabulary : of the model: prompts are made of its tokens.
    logs : folder for what the servers print.
    check : raises an error for a case that a server cannot run.
    say, done : are told of progress, in one line, and of each run once it is over.
    warm : what else is asked of a server that each run finds afresh, after the probes and before its cache is emptied.
    key : the servers' admin key, where they have one: then their policy can be switched.
    environment : the servers' variables; None: those of this process.
    rounds : every other one goes backwards.
    switching : neighbours that differ in the policy alone are one server, which is switched before a run.
    """

    command: Sequence[str]
    vocabulary: int
    logs: Path
    check: Callable[[Case, Server], None]
    key: str | None = None
    environment: Mapping[str, str] | None = None
    rounds: int = 1
    switching: bool = False
    stream_interval: int = 16
    time_limit: float = math.inf
    start_timeout: float = 300.0
    warm: Callable[[Server], None] = lambda server: None
    say: Callable[[str], None] = lambda text: None
    done: Callable[[RunResult], None] = lambda result: None


def in_turns(items: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """(round, item) in order: every other round backwards, so that drift meets all alike."""
    for number in range(1, rounds + 1):
        for item in items if number % 2 else items[::-1]:
            yield number, item


def alike(configurations: Sequence[ServerConfig]) -> list[list[ServerConfig]]:
    """Neighbours that differ in the policy and its options alone."""
    return [list(group) for _, group in groupby(configurations, lambda one: one.server_flags)]


def describe(problem: BaseException) -> str:
    """One line, also for errors that carry no text."""
    return str(problem) if isinstance(problem, ServerFailed) else f"{type(problem).__name__}: {problem}"[:300]


class Driver:
    """One comparison: the server that is up, and the results so far. A failure costs its own run."""

    def __init__(self, configurations: Sequence[ServerConfig], cases: Sequence[Case], terms: Terms) -> None:
        self.configurations, self.cases, self.terms = configurations, cases, terms
        self.results: list[RunResult] = []
        self._begun = time.monotonic()
        self._server: Server | None = None
        self._probes = probes().requests(terms.vocabulary)
        self._made: dict[str, tuple[list[Request], list[Request]]] = {}

    def run(self) -> list[RunResult]:
        """Measure all that time allows; no server is left afterwards."""
        allow_open_files(max(case.batch for case in self.cases) + 200)
        groups = alike(self.configurations) if self.terms.switching else [[one] for one in self.configurations]
        before = None
        try:
            for number, group in in_turns(groups, self.terms.rounds):
                if group is not before:
                    self.stop()
                before = group
                for case in self.cases:
                    for configuration in group if number % 2 else group[::-1]:
                        self.attempt(configuration, case, number)
        finally:
            self.stop()
        return self.results

    def missing(self) -> list[tuple[int, ServerConfig, Case]]:
        """Runs that were asked for and not even tried."""
        tried = {(result.round, result.name, result.case) for result in self.results}
        return [
            (number, configuration, case)
            for number, configuration in in_turns(self.configurations, self.terms.rounds)
            for case in self.cases
            if (number, configuration.name, case.name) not in tried
        ]

    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begun

    def remaining(self) -> float:
        """Seconds that are left of the limit."""
        return self.terms.time_limit - self.elapsed()

    def attempt(self, configuration: ServerConfig, case: Case, number: int) -> None:
        """Run a case under a configuration, if time is left for that, whatever comes of it."""
        if self.remaining() < LEAST_RUN:
            return
        result = RunResult(configuration.name, case.name, number)
        try:
            result = self.measured(configuration, case, result)
        except PROBLEMS as problem:
            result.error = describe(problem)
        self.results.append(result)
        if result.error is not None or not self.terms.switching:
            self.stop()
        self.terms.done(result)

    def measured(self, configuration: ServerConfig, case: Case, result: RunResult) -> RunResult:
        """The figures of a run; how its server came to be goes into the given result."""
        server = self.refreshed(configuration, result)
        result.server |= {"kv_tokens": server.kv_tokens, "max_running": server.max_running}
        self.terms.check(case, server)
        admission = self.terms.key is not None
        found, _ = measure(server, configuration.name, case, *self.requests(case), self.remaining(), admission)
        if found.summary is None:
            errors = found.counted["errors"]
            raise ServerFailed(f"no request finished{': ' + errors[0] if errors else ' in time'}")
        found.case, found.round, found.server = result.case, result.round, result.server
        return found

    def refreshed(self, configuration: ServerConfig, result: RunResult) -> Server:
        """A new server where none is up, else that one switched; warm, with nothing in its cache."""
        if self._server is None:
            log = self.log_of(configuration.name, result.round)
            result.server["log"] = str(log)
            self._server = server = self.launch(configuration, log)
            result.server["command"] = shown(server.command, self.terms.key)
            self.await_start(server, self.start_deadline())
            result.server["start_seconds"] = server.start_seconds
        else:
            server = self._server
            result.server |= {"log": str(server.log), "log_begin": server.printed_bytes(), "switched": True}
            self.terms.say(f"switching to {configuration.name}")
            server.flush()
            server.switch(configuration.policy, configuration.policy_options)
        self.warm_up(server)
        return server

    def launch(self, configuration: ServerConfig, log: Path) -> Server:
        """Start a server."""
        self.terms.say(f"starting {configuration.name}")
        return Server(configuration, self.terms.command, log, self.terms.key, self.terms.environment)

    def log_of(self, name: str, number: int) -> Path:
        """Where a server prints that is started for a configuration in a round."""
        return self.terms.logs / f"{name.replace('/', '_')}.{number}.log"

    def start_deadline(self) -> float:
        """When a server that starts now must be up."""
        return time.monotonic() + min(self.terms.start_timeout, self.remaining())

    def await_start(self, server: Server, deadline: float) -> None:
        """Return once it is up."""
        server.wait(deadline)
        self.terms.say(
            f"{server.configuration.name} is up after {server.start_seconds:.0f} s, {server.kv_tokens} KV tokens"
        )

    def warm_up(self, server: Server) -> None:
        """Answer the probes, and forget them."""
        self.ask_probes(server)
        self.terms.warm(server)
        server.flush()

    def ask_probes(self, server: Server) -> list[Any]:
        """Its first answers to the probes; it is asked twice, as cached prompts take other kernels."""
        limit = max(LEAST_RUN, min(self.terms.start_timeout, self.remaining()))
        answers = ending.run(call_all(server.address, self._probes, limit))
        ending.run(call_all(server.address, self._probes, limit))
        return answers

    def stop(self) -> None:
        """End the server that is up, if there is one."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def requests(self, case: Case) -> tuple[list[Request], list[Request]]:
        """Requests and prefixes of a case, made once for all servers."""
        if case.name not in self._made:
            vocabulary = self.terms.vocabulary
            made = case.requests(vocabulary, self.terms.stream_interval), case.warm_up(vocabulary)
            self._made[case.name] = made
        return self._made[case.name]
