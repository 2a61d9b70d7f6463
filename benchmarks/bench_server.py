"""Real SGLang servers on one GPU, driven over HTTP: attention backends and schedule policies side by side.

    PYTHONPATH=.:kernels python benchmarks/bench_server.py --model CONFIG_FOLDER --json server.json \\
        --server fa3 --server flashinfer --server pat --case decode:500,5,5000 --case W1

A server is a known name (``fa3``, ``flashinfer``, ``triton``, ``pat``; ``fa3+feather-order`` adds a policy) or
``NAME=FLAGS``. Cases: ``W1`` .. ``W7`` and ``open:...`` send requests one by one as they arrive; ``decode:B,G,L``
measures the time in which a batch of B requests in G groups with L shared tokens decodes, and nothing else (the
docstring of feather_sglang/compare/server/cases.py has them all). The cache is flushed before each case.

Servers run one after the other; one that does not come up, or ends, is left out. ``--repeat 2`` runs A B B A; with
``--overlap-starts N`` N servers start at once, before anything is measured, stay up and take turns case by case, if the
GPU's memory holds them all. With ``--one-server`` neighbours that differ in the policy and its options alone
(``paced=--schedule-policy feather --feather-pace 0.1``) are one server, which is switched before each case. The JSON
file is whole after every measurement; at ``--time-limit`` what is missing is named. ``--from server.json`` prints a
finished run again, several files as one: runs at the same time on GPUs of their own (``CUDA_VISIBLE_DEVICES``), say.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from finished import read_finished
from server_report import merged, plot, progress, report

from feather_sglang import ending
from feather_sglang.compare.on_servers import check_model
from feather_sglang.compare.server.activity import Activity
from feather_sglang.compare.server.cases import Case, Request, parse_case, probes
from feather_sglang.compare.server.client import HttpError, allow_open_files, call_all, drive
from feather_sglang.compare.server.machine import Clocks, machine
from feather_sglang.compare.server.process import (
    COMMON_FLAGS,
    POLICY_FLAG,
    Configuration,
    Server,
    ServerFailed,
    in_turns,
    parse_server,
    read_log,
    shown,
    switch_flags,
)
from feather_sglang.compare.server.result import Admission
from feather_sglang.compare.server.stats import overall, steady
from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import replace_text

LEAST_CASE, RESERVE = 10.0, 5.0  # seconds that a case must have, and that are kept for the end
TAIL_LINES = 30


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model, or of its config.json alone")
    parser.add_argument("--server", action="append", default=[], metavar="NAME[=FLAGS]", help="may be given often")
    parser.add_argument("--case", action="append", default=[], nargs="+", help="one or more; may be given often")
    parser.add_argument("--common", default=COMMON_FLAGS, help="flags of all servers (default: %(default)s)")
    parser.add_argument("--flags", default="", help="further flags of all servers; they overrule --common's")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the servers (default: this one)")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds for everything")
    parser.add_argument("--case-limit", type=float, default=120.0, help="seconds for a case (default: %(default)g)")
    parser.add_argument("--start-timeout", type=float, default=180.0, help="seconds (default: %(default)g)")
    parser.add_argument("--repeat", type=int, default=1, help="rounds, every other one backwards (default: 1)")
    parser.add_argument("--overlap-starts", type=int, default=1, metavar="N", help="servers that are up together")
    parser.add_argument("--one-server", action="store_true", help="switch the policy instead of starting anew")
    parser.add_argument("--arrivals", choices=("poisson", "fixed"), default="poisson")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    parser.add_argument("--stream-interval", type=int, default=16, help="tokens a piece (default: %(default)s)")
    parser.add_argument("--compare-tokens", action="store_true", help="compare the greedy tokens of fixed prompts")
    parser.add_argument("--json", type=Path, help="write everything here, anew after each measurement")
    parser.add_argument("--plot", type=Path, help="write bars of output tokens/s here")
    parser.add_argument("--logs", type=Path, help="folder for the servers' output (default: a temporary one)")
    parser.add_argument(
        "--from", dest="source", type=Path, nargs="+", metavar="JSON", help="print finished runs as one"
    )
    options = parser.parse_args(argv)
    if options.source:
        return options
    try:
        options.servers = [parse_server(text) for text in options.server]
        options.cases = [parse_case(text, options.seed, options.arrivals) for group in options.case for text in group]
        options.for_all = shlex.split(options.common) + shlex.split(options.flags)
    except (ValueError, FeatherError) as error:
        parser.error(str(error))
    names = [server.name for server in options.servers]
    if not names or not options.cases or options.model is None:
        parser.error("give --model, at least one --server and at least one --case")
    for what, given in (("--server", names), ("--case", [case.name for case in options.cases])):
        if len(set(given)) < len(given):
            parser.error(f"{what}: each name once; --repeat measures again")
    if min(options.repeat, options.overlap_starts, options.stream_interval) < 1:
        parser.error("--repeat, --overlap-starts and --stream-interval: give at least 1")
    if options.one_server and options.overlap_starts > 1:
        parser.error("--one-server starts servers one after the other: no --overlap-starts")
    if options.one_server and any(word.partition("=")[0] == POLICY_FLAG for word in options.for_all):
        parser.error("--one-server: name the policy in --server, not in --common or --flags")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: has no config.json")
    if shutil.which(options.python) is None:
        parser.error(f"--python {options.python}: no such program")
    return options


def plan(
    servers: Sequence[Configuration], rounds: int, together: int, one_server: bool = False
) -> Iterator[tuple[int, Sequence[Configuration]]]:
    """(round, servers that are up together) in order; every other round backwards, so that drift meets all alike."""
    groups: list[Sequence[Configuration]] = [servers[i : i + together] for i in range(0, len(servers), together)]
    if one_server:
        groups = [list(group) for _, group in groupby(servers, lambda server: server.server_flags)]
    for number, group in in_turns(groups, rounds):
        yield number, group if number % 2 else group[::-1]


class Bench:
    """One run: the servers that are up, and what was measured so far."""

    def __init__(self, options: argparse.Namespace, logs: Path) -> None:
        self.options, self.logs = options, logs
        self.begun = time.monotonic()
        self.up: dict[str, Server] = {}  # by configuration; several may have the same
        self.key = secrets.token_hex(16) if options.one_server else None
        self.vocabulary = check_model(str(options.model))
        self._probes = probes().requests(self.vocabulary)
        self._made: dict[str, tuple[list[Request], list[Request]]] = {}
        self.content: dict[str, Any] = {
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), "when": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": machine(options.python), "model": json.loads((options.model / "config.json").read_text()),
            "seed": options.seed, "arrivals": options.arrivals, "stream_interval": options.stream_interval,
            "compare_tokens": options.compare_tokens,
            "servers": {
                server.name: {
                    "flags": list(server.flags), "stock": server.stock, "start_seconds": [], "error": None, "probes": []
                }
                for server in options.servers
            },
            "order": [], "records": [], "missing": [],
        }  # fmt: skip

    def run(self) -> None:
        """Measure everything that time allows; servers are gone and the file is written afterwards."""
        try:
            options = self.options
            for number, group in plan(options.servers, options.repeat, options.overlap_starts, options.one_server):
                if self.remaining() < LEAST_CASE:
                    break
                self.ensure_up(group)
                for case in self.options.cases:
                    for configuration in group:
                        if configuration.name in self.up and self.remaining() >= LEAST_CASE:
                            self.measure(configuration, case, number)
        finally:
            for server in set(self.up.values()):
                self.stop(server)
            self.name_missing()
            self.write()

    def ensure_up(self, group: Sequence[Configuration]) -> None:
        """Stop the servers that are not of this group and start those that are missing, all at once."""
        wanted = {configuration.name for configuration in group}
        for server in {server for name, server in self.up.items() if name not in wanted}:
            self.stop(server)
        starting: list[Server] = []
        for configuration in group:
            name = configuration.name
            if name not in self.up and self.content["servers"][name]["error"] is None:
                if self.options.one_server and starting:
                    self.up[name] = starting[0]
                    continue
                self.say(f"starting {name}: {shlex.join(configuration.flags)}")
                self.content["order"].append(name)
                self.up[name] = self.launch(configuration)
                starting.append(self.up[name])
        for case in self.options.cases:
            self.requests(case)  # made while the servers start
        deadline = time.monotonic() + min(self.options.start_timeout, self.remaining())
        for server in starting:
            self.await_start(server, deadline)

    def launch(self, configuration: Configuration) -> Server:
        flags = [*self.options.for_all, *(switch_flags(self.key) if self.key else [])]
        command = [self.options.python, "-m", "sglang.launch_server", "--model-path", str(self.options.model), *flags]
        if self.key:  # it starts without what a switch to any of them sets
            configuration = Configuration(configuration.name, configuration.server_flags)
        return Server(configuration, command, self.logs / f"{configuration.name.replace('/', '_')}.log", self.key)

    def await_start(self, server: Server, deadline: float) -> None:
        """Wait until it is up and warm; its first answers to the probes are kept for comparison."""
        name = server.configuration.name
        entry = self.content["servers"][name]
        try:
            server.wait(deadline)
            timeout = max(LEAST_CASE, deadline - time.monotonic())
            answers = ending.run(call_all(server.address, self._probes, timeout))
            ending.run(call_all(server.address, self._probes, timeout))  # cached prompts take other kernels
        except (ServerFailed, HttpError, OSError, EOFError, asyncio.TimeoutError) as problem:
            self.give_up(server, describe(problem))
            return
        entry["start_seconds"].append(server.start_seconds)
        entry["command"] = shown(server.command, self.key)
        entry |= {"kv_tokens": server.kv_tokens, "max_running": server.max_running}
        entry["probes"] = entry["probes"] or [answer["output_ids"] for answer in answers]
        self.say(f"{name} is up after {server.start_seconds:.0f} s, {server.kv_tokens} KV tokens")

    def measure(self, configuration: Configuration, case: Case, number: int) -> None:
        """Run one case on one server and record it, whatever comes of it."""
        name, server = configuration.name, self.up[configuration.name]
        record: dict[str, Any] = {"server": name, "case": case.name, "round": number, "steady_case": case.steady}
        failure = None
        try:
            switched = configuration if self.options.one_server else None
            record |= self.measured(server, case, switched, min(self.options.case_limit, self.remaining()))
            server.check()
        except Misfit as problem:
            record["error"] = str(problem)
        except asyncio.TimeoutError:
            record["error"] = "the server did not answer in time"  # whether it ever will, the next flush shows
        except (ServerFailed, HttpError, OSError, EOFError) as problem:
            record["error"] = failure = describe(problem)
        self.content["records"].append(record | {"elapsed": round(self.elapsed(), 1)})
        self.say(progress(record))
        if failure is not None:
            self.give_up(server, failure)
        self.write()

    def measured(self, server: Server, case: Case, switched: Configuration | None, limit: float) -> dict[str, Any]:
        """Flush, switch to a configuration's policy, warm up, drive; the figures of a record."""
        check_fit(case, server.kv_tokens, server.max_running)
        begun = time.monotonic()
        server.flush()
        if switched is not None:
            server.switch(switched.policy, switched.policy_options)
        requests, prefixes = self.requests(case)
        ending.run(call_all(server.address, prefixes, limit))
        before = server.counters() if switched is not None else None
        mark = server.printed_bytes()
        with Clocks() as clocks, Activity() as activity:
            rest = limit - (time.monotonic() - begun)
            driven = ending.run(drive(server.address, requests, rest, case.steady, server.alive))
        admission = Admission.between(before, server.counters()) if switched is not None else None
        return {
            "overall": overall(driven.streams, driven.end),
            "admission": admission and admission._asdict(),
            "steady": steady(driven.streams) if case.steady else None,
            "log": read_log(server.printed(mark), case.batch if case.steady else None),
            "client_cpu": round(driven.cpu_share, 3), "held": driven.held, "clocks": clocks.summary,
            "activity": activity.summary,
            "seconds": round(time.monotonic() - begun, 2),
        }  # fmt: skip

    def requests(self, case: Case) -> tuple[list[Request], list[Request]]:
        """Requests and prefixes of a case, made once for all servers."""
        if case.name not in self._made:
            requests = case.requests(self.vocabulary, self.options.stream_interval)
            self._made[case.name] = requests, case.warm_up(self.vocabulary)
        return self._made[case.name]

    def give_up(self, server: Server, reason: str) -> None:
        """Show the end of its log and go on without it."""
        name = server.configuration.name
        self.content["servers"][name]["error"] = reason
        lines = server.printed().splitlines()[-TAIL_LINES:]
        self.say(f"{name} is left out: {reason}; the end of {server.log}:\n    " + "\n    ".join(lines))
        self.content["servers"][name]["log_end"] = lines
        self.stop(server)

    def stop(self, server: Server) -> None:
        server.stop()
        self.up = {name: other for name, other in self.up.items() if other is not server}

    def name_missing(self) -> None:
        """List what was asked for and not even tried."""
        tried = {(record["server"], record["case"], record["round"]) for record in self.content["records"]}
        self.content["missing"] = [
            f"{server.name} {case.name}" + (f" (round {number})" if number > 1 else "")
            for number in range(1, self.options.repeat + 1)
            for server in self.options.servers
            for case in self.options.cases
            if (server.name, case.name, number) not in tried
        ]

    def write(self) -> None:
        """Replace the file; whoever reads it sees the old one or the new one."""
        self.content["seconds"] = round(self.elapsed(), 1)
        path = self.options.json
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, json.dumps(self.content, indent=1) + "\n", "results")

    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    def remaining(self) -> float:
        return self.options.time_limit - RESERVE - self.elapsed()

    def say(self, text: str) -> None:
        print(f"[{self.elapsed():5.0f} s] {text}", flush=True)


class Misfit(RuntimeError):
    """A case that a server cannot run as it is meant."""


def check_fit(case: Case, kv_tokens: int | None, max_running: int | None) -> None:
    """Raise ``Misfit`` if a steady batch could never be complete."""
    if case.steady and kv_tokens is not None and case.kv_tokens > kv_tokens:
        raise Misfit(f"does not fit: needs {case.kv_tokens:,} KV tokens, the server has {kv_tokens:,}")
    if case.steady and max_running is not None and case.batch > max_running:
        raise Misfit(f"does not fit: {case.batch} requests, the server runs {max_running}")


def describe(problem: BaseException) -> str:
    """One line, also for errors that carry no text."""
    return str(problem) if isinstance(problem, ServerFailed) else f"{type(problem).__name__}: {problem}"[:300]


def incomplete(record: dict[str, Any]) -> bool:
    """Whether a measurement, or some of its requests, did not come to an end."""
    return "error" in record or bool(record["overall"]["failed"] or record["overall"]["unfinished"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or read a finished run; print its report. The status is 1 where something is missing."""
    options = arguments(argv)
    if options.source:
        try:
            content = merged([read_finished(path, "servers", "machine", "missing") for path in options.source])
        except ValueError as error:
            raise SystemExit(f"--from {' '.join(map(str, options.source))}: {error}") from None
        print(report(content))
    else:
        logs = options.logs or Path(tempfile.mkdtemp(prefix="bench_server_"))
        logs.mkdir(parents=True, exist_ok=True)
        try:
            bench = Bench(options, logs)
        except FeatherError as error:
            raise SystemExit(str(error)) from None
        allow_open_files(max(case.batch for case in options.cases) + 200)
        try:
            with ending.on_signals():
                bench.run()
        finally:
            print(f"\n{report(bench.content)}", flush=True)
        content = bench.content
    if options.plot and any("error" not in record for record in content["records"]):
        plot(content["records"], options.plot)
    return int(bool(content["missing"]) or any(incomplete(record) for record in content["records"]))


if __name__ == "__main__":
    sys.exit(main())
