"""Cases on server configurations, one after the other: servers are started, kept, switched and given up here."""

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
from feather_sglang.compare.server.cases import Case, Misfit, Request, probes
from feather_sglang.compare.server.client import HttpError, allow_open_files, call_all
from feather_sglang.compare.server.config import ServerConfig, shown
from feather_sglang.compare.server.measure import measure
from feather_sglang.compare.server.process import Server, ServerFailed
from feather_sglang.compare.server.result import RunResult

LEAST_RUN = 10.0  # seconds that must be left for another run
PROBLEMS = (ServerFailed, HttpError, OSError, EOFError, asyncio.TimeoutError)
T = TypeVar("T")


@dataclass(frozen=True)
class Terms:
    """How configurations are compared.

    Attributes
    ----------
    command : a server's, but for the flags of its own.
    vocabulary : of the model: prompts are made of its tokens.
    logs : folder for what the servers print.
    check : raises an error for a case that a server cannot run: ``Misfit`` ends this run alone.
    warm : what else is asked of a server that each run finds afresh, after the probes and before its cache is emptied.
    key : the servers' admin key, where they have one: then their policy can be switched.
    environment : the servers' variables; None: those of this process.
    rounds : every other one goes backwards.
    together : servers that start together and stay up together.
    switching : neighbours that differ in the policy alone are one server, which is switched before a run.
    afresh : each run finds a server as a start leaves it, a new one or one that was switched and warmed up again; one
        that fails costs its own run. Otherwise servers stay up as long as they are needed, with all of the cases, and
        one that fails is left out from then on.
    """

    command: Sequence[str]
    vocabulary: int
    logs: Path
    check: Callable[[Case, Server], None]
    key: str | None = None
    environment: Mapping[str, str] | None = None
    rounds: int = 1
    together: int = 1
    switching: bool = False
    afresh: bool = False
    stream_interval: int = 16
    time_limit: float = math.inf
    case_limit: float = math.inf
    start_timeout: float = 300.0
    warm: Callable[[Server], None] = lambda server: None


class Listener:
    """Is told of everything that a ``Driver`` does; each of these does nothing here."""

    def say(self, text: str) -> None:
        """Progress, in one line."""

    def starting(self, configuration: ServerConfig) -> None:
        """A server is about to start."""

    def up(self, server: Server, answers: Sequence[Any]) -> None:
        """A server is up; these are its answers to the probes."""

    def left_out(self, server: Server, reason: str) -> None:
        """A server did not come up or has failed, and is not started again."""

    def done(self, result: RunResult) -> None:
        """A run is over."""


def in_turns(items: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """(round, item) in order: every other round backwards, so that drift meets all alike."""
    for number in range(1, rounds + 1):
        for item in items if number % 2 else items[::-1]:
            yield number, item


def plan(
    configurations: Sequence[ServerConfig], rounds: int, together: int = 1, switching: bool = False
) -> Iterator[tuple[int, Sequence[ServerConfig]]]:
    """(round, configurations whose servers are up together, or are one) in order."""
    groups: list[Sequence[ServerConfig]] = [
        configurations[i : i + together] for i in range(0, len(configurations), together)
    ]
    if switching:
        groups = [list(group) for _, group in groupby(configurations, lambda one: one.server_flags)]
    for number, group in in_turns(groups, rounds):
        yield number, group if number % 2 else group[::-1]


def describe(problem: BaseException) -> str:
    """One line, also for errors that carry no text."""
    return str(problem) if isinstance(problem, ServerFailed) else f"{type(problem).__name__}: {problem}"[:300]


class Driver:
    """One comparison: the servers that are up, and the results so far."""

    def __init__(
        self, configurations: Sequence[ServerConfig], cases: Sequence[Case], terms: Terms, listener: Listener
    ) -> None:
        self.configurations, self.cases, self.terms, self.listener = configurations, cases, terms, listener
        self.results: list[RunResult] = []
        self._begun = time.monotonic()
        self._up: dict[str, Server] = {}  # by configuration; several may have the same
        self._failed: set[str] = set()
        self._probes = probes().requests(terms.vocabulary)
        self._made: dict[str, tuple[list[Request], list[Request]]] = {}

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
                        self.attempt(configuration, case, number, group)
        finally:
            for server in set(self._up.values()):
                self.stop(server)
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

    # Servers ----------------------------------------------------------------------------------------------------

    def get_ready(self, group: Sequence[ServerConfig], number: int) -> None:
        """Stop the servers that are not of this group; start those that are missing, all at once, if they are to stay.

        A server that each run finds afresh is started by its run, whose error it is if it does not come up.
        """
        wanted = {configuration.name for configuration in group}
        for server in {server for name, server in self._up.items() if name not in wanted}:
            self.stop(server)
        if self.terms.afresh:
            return
        starting = []
        for configuration in group:
            if configuration.name not in self._up and configuration.name not in self._failed:
                starting.append(self.launch(configuration, number, group))
        for case in self.cases:
            self.requests(case)  # made while the servers start
        deadline = self.start_deadline()
        for server in starting:
            try:
                self.await_start(server, deadline)
                self.listener.up(server, self.ask_probes(server))
            except PROBLEMS as problem:
                self.leave_out(server, describe(problem))

    def launch(self, configuration: ServerConfig, number: int, group: Sequence[ServerConfig]) -> Server:
        """Start a server, for the whole group where one is switched."""
        name, terms = configuration.name, self.terms
        self.listener.starting(configuration)
        self.listener.say(f"starting {name}")
        if terms.switching and not terms.afresh:  # it starts without what a switch to any of them sets
            configuration = ServerConfig(name, configuration.server_flags)
        server = Server(configuration, terms.command, self.log_of(name, number), terms.key, terms.environment)
        for other in group if terms.switching else [configuration]:
            if other.name not in self._failed:
                self._up[other.name] = server
        return server

    def log_of(self, name: str, number: int) -> Path:
        """Where a server prints that is started for a configuration in a round."""
        return self.terms.logs / f"{name.replace('/', '_')}.{number}.log"

    def start_deadline(self) -> float:
        """When a server that starts now must be up."""
        return time.monotonic() + min(self.terms.start_timeout, self.remaining())

    def await_start(self, server: Server, deadline: float) -> None:
        """Return once it is up."""
        server.wait(deadline)
        self.listener.say(
            f"{server.configuration.name} is up after {server.start_seconds:.0f} s, {server.kv_tokens} KV tokens"
        )

    def ask_probes(self, server: Server) -> list[Any]:
        """Its first answers to the probes; it is asked twice, as cached prompts take other kernels."""
        limit = max(LEAST_RUN, min(self.terms.start_timeout, self.remaining()))
        answers = ending.run(call_all(server.address, self._probes, limit))
        ending.run(call_all(server.address, self._probes, limit))
        return answers

    def leave_out(self, server: Server, reason: str) -> None:
        """Go on without it."""
        self._failed.add(server.configuration.name)
        self.listener.left_out(server, reason)
        self.stop(server)

    def stop(self, server: Server) -> None:
        """End it."""
        server.stop()
        self._up = {name: other for name, other in self._up.items() if other is not server}

    # Runs -------------------------------------------------------------------------------------------------------

    def attempt(self, configuration: ServerConfig, case: Case, number: int, group: Sequence[ServerConfig]) -> None:
        """Run a case on the server of a configuration, if time is left for that, whatever comes of it."""
        terms, name = self.terms, configuration.name
        if self.remaining() < LEAST_RUN or (name not in self._up and not terms.afresh):
            return
        result, failed = RunResult(name, case.name, number), False
        try:
            result = self.measured(configuration, case, result, group)
        except Misfit as problem:
            result.error = str(problem)
        except PROBLEMS as problem:
            late = isinstance(problem, asyncio.TimeoutError) and not terms.afresh
            result.error = "the server did not answer in time" if late else describe(problem)
            failed = not late  # whether it ever will, the next flush shows
        self.results.append(result)
        server = self._up.get(name)
        if server is not None and terms.afresh and (failed or not terms.switching):
            self.stop(server)
        self.listener.done(result)
        if server is not None and failed and not terms.afresh:
            self.leave_out(server, result.error or "")

    def measured(
        self, configuration: ServerConfig, case: Case, result: RunResult, group: Sequence[ServerConfig]
    ) -> RunResult:
        """The figures of a run; how its server came to be goes into the given result."""
        terms, begun = self.terms, time.monotonic()
        server = self._up.get(configuration.name)
        if terms.afresh:
            server = self.refreshed(server, configuration, result, group)
        assert server is not None
        result.server |= {"kv_tokens": server.kv_tokens, "max_running": server.max_running}
        terms.check(case, server)
        if not terms.afresh:
            server.flush()
            if terms.switching:
                server.switch(configuration.policy, configuration.policy_options)
        limit = min(terms.case_limit - (time.monotonic() - begun), self.remaining())
        found = measure(server, configuration.name, case, *self.requests(case), limit, terms.key is not None)
        if terms.afresh and found.summary is None:
            errors = found.counted["errors"]
            raise ServerFailed(f"no request finished{': ' + errors[0] if errors else ' in time'}")
        found.case, found.round, found.server = result.case, result.round, result.server
        found.seconds = round(time.monotonic() - begun, 2)
        return found

    def refreshed(
        self, server: Server | None, configuration: ServerConfig, result: RunResult, group: Sequence[ServerConfig]
    ) -> Server:
        """A new server where there is none, else this one switched; warm, with nothing in its cache."""
        if server is None:
            result.server["log"] = str(self.log_of(configuration.name, result.round))
            server = self.launch(configuration, result.round, group)
            result.server["command"] = shown(server.command, self.terms.key)
            self.await_start(server, self.start_deadline())
            result.server["start_seconds"] = server.start_seconds
        else:
            result.server |= {"log": str(server.log), "log_begin": server.printed_bytes(), "switched": True}
            self.listener.say(f"switching to {configuration.name}")
            server.flush()
            server.switch(configuration.policy, configuration.policy_options)
        self.warm_up(server)
        return server

    def warm_up(self, server: Server) -> None:
        """Answer the probes, and forget them."""
        self.ask_probes(server)
        self.terms.warm(server)
        server.flush()

    def requests(self, case: Case) -> tuple[list[Request], list[Request]]:
        """Requests and prefixes of a case, made once for all servers."""
        if case.name not in self._made:
            vocabulary = self.terms.vocabulary
            made = case.requests(vocabulary, self.terms.stream_interval), case.warm_up(vocabulary)
            self._made[case.name] = made
        return self._made[case.name]
