"""``feather ab --engine server``: real servers, one at a time, each policy under the same requests."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import shlex
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from feather_sglang import __version__, ending
from feather_sglang.compare.policies import chosen_policies, options_of
from feather_sglang.compare.server.activity import Activity
from feather_sglang.compare.server.bench_serving import read_results
from feather_sglang.compare.server.cases import Case, Request, fold, probes
from feather_sglang.compare.server.client import HttpError, allow_open_files, call_all, drive
from feather_sglang.compare.server.machine import Clocks, machine
from feather_sglang.compare.server.process import (
    BACKENDS,
    POLICY_FLAG,
    Configuration,
    Server,
    ServerFailed,
    in_turns,
    shown,
    switch_flags,
)
from feather_sglang.compare.server.result import Admission, Seen, notes, summarize, together
from feather_sglang.compare.server.watch import Watch
from feather_sglang.errors import FeatherError
from feather_sglang.replay.arguments import check_fits, check_sglang, check_sizes, workload
from feather_sglang.replay.jobs import RESULTS_VERSION, make_folder, write_json
from feather_sglang.replay.traces import Trace
from feather_sglang.report import plots
from feather_sglang.report.summary import RunSummary
from feather_sglang.report.tables import SERVER_FIGURES, comparison
from feather_sglang.scheduling.policy_names import FEATHER

LEAST_RUN = 10.0  # seconds that must be left for another start
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_PROBLEMS = (ServerFailed, HttpError, OSError, EOFError, asyncio.TimeoutError)


@dataclass(frozen=True)
class Choice(Configuration):
    """A column of the table: a policy, on a server of some kind.

    Attributes
    ----------
    options : what a running server is told along with the policy.
    server : the flags that no running server can change, where configurations differ in them.
    """

    options: dict[str, Any] = field(default_factory=dict)
    server: tuple[str, ...] = ()


def run(args: argparse.Namespace) -> int:
    """Measure all configurations, print the table, write results and plots; 1 if something is missing."""
    policies = chosen_policies(args)
    if args.repeat < 1 or args.stream_interval < 1:
        raise FeatherError("--repeat and --stream-interval: must be at least 1")
    if not args.time_limit > 0 or not args.start_timeout > 0:
        raise FeatherError("--time-limit and --start-timeout: must be more than 0 seconds")
    check_sizes(args)
    vocabulary = check_model(args.model)
    chosen = configurations(args, policies)
    peers = read_results(args.bench_serving) if args.bench_serving else []
    version = check_sglang(policies)
    trace = workload(args)
    if args.kv_tokens:
        check_fits(trace, args.kv_tokens, args.page_size)
    out = make_folder(args.out)
    target = args.json or out / "results.json"
    if target.is_dir():
        raise FeatherError(f"--json {target}: is a folder")
    console = Console(highlight=False)
    for notice in trace.notices:
        console.print(f"[yellow]notice:[/yellow] {escape(notice)}")
    comparer = Comparison(args, trace, vocabulary, chosen, target, console)
    comparer.tell(f"feather {__version__}, sglang {version}, {comparer.title}")
    comparer.write()  # so that a place where nothing can be written is found now
    allow_open_files(len(trace.requests) + 200)
    comparer.run()
    return comparer.report(peers)


def check_model(model: str) -> int:
    """Vocabulary of the model in that folder."""
    path = Path(model) / "config.json"
    if not path.is_file():
        raise FeatherError(f"--model {model}: --engine server needs the folder of a model; there is no {path}")
    try:
        config = json.loads(path.read_bytes())
        vocabulary = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise FeatherError(f"{path}: not the configuration of a language model: no vocab_size") from None
    fold(array("q"), vocabulary)  # refuses one that is too small
    return vocabulary


def configurations(args: argparse.Namespace, policies: Sequence[str]) -> list[Choice]:
    """One per attention backend and policy; flags that the user gave come last, so they overrule."""
    try:
        given = shlex.split(args.server_flags)
    except ValueError as error:
        raise FeatherError(f"--server-flags {args.server_flags}: {error}") from None
    for flag, instead in (
        ("--schedule-policy", "--policies"),
        ("--model-path", "--model"),
        ("--model", "--model"),
        ("--port", None),
        ("--admin-api-key", None),
        ("--feather-allow-switch", None),
    ):
        if any(word == flag or word.startswith(f"{flag}=") for word in given):
            raise FeatherError(f"--server-flags: {flag} is set here" + (f"; use {instead}" if instead else ""))
    backends = [name.strip() for name in (args.attention or "").split(",") if name.strip()]
    unknown = [name for name in backends if name not in BACKENDS]
    if unknown or len(set(backends)) < len(backends):
        raise FeatherError(
            f"--attention {args.attention}: each once, of {', '.join(BACKENDS)}; for others use --server-flags"
        )
    options = options_of(args, list(policies))
    overruled = {word.partition("=")[0].removeprefix("--feather-").replace("-", "_") for word in given}
    found = []
    for backend in backends or [""]:
        decode = tuple(BACKENDS.get(backend, "").split())
        for policy in policies:
            taken = options[policy] if policy in FEATHER else {}
            flags = (*decode, POLICY_FLAG, policy, *feather_flags(taken), *given)
            told = {"policy_file": None, **taken} if policy in FEATHER else {}
            told = {option: value for option, value in told.items() if option not in overruled}
            name = f"{backend}+{policy}" if len(backends) > 1 else policy
            found.append(Choice(name, flags, told, decode))
    return found


def feather_flags(options: dict[str, Any]) -> list[str]:
    """The flags by which a server takes these options."""
    flags = []
    for name, value in options.items():
        text = ("on" if value else "off") if isinstance(value, bool) else "auto" if value is None else str(value)
        flags += [f"--feather-{name.replace('_', '-')}", text]
    return flags


def common_flags(args: argparse.Namespace) -> list[str]:
    """Flags of all servers. Prompts are token ids, so no server needs a tokenizer."""
    flags = ["--skip-tokenizer-init", "--max-running-requests", str(args.max_running)]
    flags += ["--chunked-prefill-size", str(args.chunked_prefill), "--page-size", str(args.page_size)]
    if args.kv_tokens:
        flags += ["--max-total-tokens", str(args.kv_tokens)]
    if dummy_weights(args.model):
        flags += ["--load-format", "dummy"]
    return flags


def dummy_weights(model: str) -> bool:
    """Whether the folder holds a configuration alone."""
    return not any(next(Path(model).glob(pattern), None) for pattern in WEIGHTS)


class Comparison:
    """The runs so far. Nothing cached or learned goes from one to the next.

    Every run has a server of its own; or, with ``--one-server``, that of the run before where only the policy differs.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        trace: Trace,
        vocabulary: int,
        chosen: Sequence[Choice],
        target: Path,
        console: Console,
    ) -> None:
        self.args, self.trace, self.chosen, self.target, self.console = args, trace, chosen, target, console
        self.begun = time.monotonic()
        self.logs = make_folder(args.out / "logs")
        self.requests: list[Request] = Case(trace.name, trace).requests(vocabulary, args.stream_interval)
        self.probes = probes().requests(vocabulary)
        self.title = f"{trace.name}: {len(trace.requests):,} requests, {Path(args.model).name}"
        self.title += ", dummy weights" if dummy_weights(args.model) else ""
        self.records: list[dict[str, Any]] = []
        self.seen: dict[str, list[Seen]] = {}
        self.server: Server | None = None
        self.shared: tuple[str, ...] = ()  # ``Choice.server`` of that server
        self.key = secrets.token_hex(16)
        self.facts = {
            "version": RESULTS_VERSION,
            "engine": "server",
            "command": shlex.join(["feather", *sys.argv[1:]]),
            "feather": __version__,
            "when": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": machine(sys.executable),
            "workload": {"name": trace.name, "requests": len(trace.requests), "block_size": trace.block_size},
            "model": args.model,
            "dummy_weights": dummy_weights(args.model),
            "stream_interval": args.stream_interval,
        }

    def run(self) -> None:
        """Measure all that time allows; the file is whole after every run."""
        try:
            for number, choice in in_turns(self.chosen, self.args.repeat):
                if self.remaining() < LEAST_RUN:
                    break
                record: dict[str, Any] = {"name": choice.name, "round": number}
                self.records.append(record)
                try:
                    self.measure(choice, record)
                except _PROBLEMS as problem:
                    self.stop()
                    record["error"] = self.explain(problem, Path(record["log"]), record.get("log_begin", 0))
                self.say(self.progress(record))
                self.write()
        finally:
            self.stop()

    def measure(self, choice: Choice, record: dict[str, Any]) -> None:
        """Run the workload under a policy; what was seen goes into the record."""
        if self.server is not None and choice.server == self.shared:
            server = self.switch(self.server, choice, record)
        else:
            self.stop()
            server = self.start(choice, record)
        self.warm_up(server)
        record |= {"kv_tokens": server.kv_tokens, "max_running": server.max_running}
        check_room(self.trace, server)
        self.drive(server, choice, record)
        if not self.args.one_server:
            self.stop()

    def start(self, choice: Choice, record: dict[str, Any]) -> Server:
        """Start a server under a policy and wait until it is up."""
        log = self.logs / f"{choice.name}.{record['round']}.log"
        log.unlink(missing_ok=True)
        record["log"] = str(log)
        self.say(f"starting {choice.name}")
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", self.args.model]
        command += [*common_flags(self.args), *switch_flags(self.key)]
        self.server = server = Server(choice, command, log, self.key)
        self.shared = choice.server
        record["command"] = shown(server.command, self.key)
        server.wait(time.monotonic() + min(self.args.start_timeout, self.remaining()))
        record["start_seconds"] = server.start_seconds
        self.say(f"{choice.name} is up after {server.start_seconds:.0f} s, {server.kv_tokens} KV tokens")
        return server

    def switch(self, server: Server, choice: Choice, record: dict[str, Any]) -> Server:
        """Empty the cache of a running server and go on under another policy, or afresh under the same."""
        record |= {"log": str(server.log), "log_begin": server.printed_bytes(), "switched": True}
        self.say(f"switching to {choice.name}")
        server.flush()
        server.switch(choice.policy, choice.options)
        return server

    def stop(self) -> None:
        """End the server, if there is one."""
        if self.server is not None:
            self.server.stop()
            self.server = None

    def warm_up(self, server: Server) -> None:
        """Cached prompts take other kernels, so each probe goes twice; then the cache is empty again."""
        for _ in range(2):
            limit = max(LEAST_RUN, min(self.args.start_timeout, self.remaining()))
            ending.run(call_all(server.address, self.probes, limit))
        server.flush()

    def drive(self, server: Server, choice: Choice, record: dict[str, Any]) -> None:
        """Send the workload and keep what came of it."""
        before = server.counters()
        with Watch(server) as watch, Clocks() as clocks, Activity() as activity:
            driven = ending.run(drive(server.address, self.requests, self.remaining(), alive=server.alive))
        server.check()
        admission = Admission.between(before, server.counters())
        if not any(stream.finished for stream in driven.streams):
            errors = [stream.error for stream in driven.streams if stream.error]
            raise ServerFailed(f"no request finished{': ' + errors[0] if errors else ' in time'}")
        seen = summarize(
            choice.name,
            driven,
            watch.lines,
            watch.scheduler_seconds,
            watch.retractions,
            admission,
            activity.summary,
            clocks.summary,
        )
        self.seen.setdefault(choice.name, []).append(seen)
        record |= {
            "summary": seen.summary.as_dict(),
            "counted": seen.counted,
            "admission": admission and admission._asdict(),
            "client_cpu": round(driven.cpu_share, 3),
            "fell_back": watch.fell_back,
            "clocks": clocks.summary,
            "activity": activity.summary,
            "steps": [[round(value, 3) if value is not None else None for value in step] for step in seen.steps],
            "latencies": [round(seconds, 4) for seconds in seen.latencies],
        }

    def explain(self, problem: BaseException, log: Path, begin: int) -> str:
        """One line: what happened, the last thing that the server said about an error since then, and where."""
        text = str(problem) if isinstance(problem, ServerFailed) else f"{type(problem).__name__}: {problem}"[:200]
        printed = log.read_bytes()[begin:].decode(errors="replace")
        lines = [line.strip() for line in printed.splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "")
        return f"{text}; its log ends with: {said[:200]} ({log})" if said else f"{text} ({log})"

    def progress(self, record: dict[str, Any]) -> str:
        """One line about one run."""
        if "error" in record:
            return f"{record['name']}: {record['error']}"
        counted, summary = record["counted"], record["summary"]
        return (
            f"{record['name']}: {summary['output_tok_s']:,.4g} tok/s, {counted['finished']} of {counted['requests']} "
            f"requests in {counted['seconds']:.1f} s, mean TTFT {summary['ttft_mean']:.2f} s"
        )

    def order(self) -> list[str]:
        """Configurations as they were started."""
        return [record["name"] for record in self.records]

    def missing(self) -> list[str]:
        """Runs that were asked for and not begun."""
        left = list(in_turns(self.chosen, self.args.repeat))[len(self.records) :]
        return [f"{configuration.name} (round {number})" for number, configuration in left]

    def columns(self) -> list[RunSummary]:
        """One column a configuration, in the order of the command line."""
        names = [configuration.name for configuration in self.chosen if configuration.name in self.seen]
        return [together([seen.summary for seen in self.seen[name]]) for name in names]

    def write(self) -> None:
        """Replace the results; whoever reads them sees the old ones or the new ones."""
        runs = {summary.policy: summary.as_dict() for summary in self.columns()}
        progress = {"order": self.order(), "missing": self.missing(), "runs": runs, "records": self.records}
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.target, {**self.facts, **progress, "seconds": round(self.elapsed(), 1)})
        except OSError as error:
            raise FeatherError(f"cannot write {self.target}: {error.strerror}") from None

    def report(self, peers: Sequence[RunSummary]) -> int:
        """Print table and notes, draw the plots; the exit status."""
        columns = self.columns()
        if not columns:
            failed = next((record["error"] for record in self.records if "error" in record), "no time was left")
            raise FeatherError(f"nothing was measured: {failed}")
        out = self.args.out
        self.console.print(comparison([*columns, *peers], self.title, SERVER_FIGURES))
        again = "" if self.args.repeat > 1 else "; --repeat 2 goes on with them backwards (A B B A)"
        self.tell(f"{self.servers()}: {' '.join(self.order())}{again}")
        for line in notes(self.records):
            self.tell(line)
        if peers:
            self.tell(f"{', '.join(peer.policy for peer in peers)}: as sglang.bench_serving saw its own workload")
        if self.missing():
            self.tell(f"not begun in time: {', '.join(self.missing())}")
        first = {name: seen[0] for name, seen in self.seen.items()}
        plots.throughput({one.policy: one.output_tok_s for one in columns}, out / "throughput.png")
        plots.batch_size({name: [s[:3] for s in seen.steps] for name, seen in first.items()}, out / "batch_size.png")
        plots.latency({name: seen.latencies for name, seen in first.items()}, out / "latency.png")
        self.tell(f"results are in {self.target}; plots and the servers' logs are in {out}")
        return int(bool(self.missing()) or any(incomplete(record) for record in self.records))

    def servers(self) -> str:
        """How many servers these were."""
        starts = sum("start_seconds" in record for record in self.records)
        if not self.args.one_server:
            return "servers were started one after the other"
        kept = "one server" if starts == 1 else f"{starts} servers, one after the other"
        return f"{kept}; the policy was switched between runs and the cache emptied"

    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    def remaining(self) -> float:
        return float(self.args.time_limit) - self.elapsed()

    def say(self, text: str) -> None:
        self.tell(f"[{self.elapsed():5.0f} s] {text}")

    def tell(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


def incomplete(record: dict[str, Any]) -> bool:
    """Whether a run, or some of its requests, did not come to an end."""
    return "error" in record or bool(record["counted"]["failed"] or record["counted"]["unfinished"])


def check_room(trace: Trace, server: Server) -> None:
    """Raise ``FeatherError`` if a request could never run, or not to its end, on that server."""
    longest = max(request.input_length + request.output_length for request in trace.requests)
    least = trace.least_pool(server.info.get("page_size") or 1)
    for needs, limit in ((longest, server.info.get("max_req_input_len")), (least, server.kv_tokens)):
        if limit and needs > limit:
            raise FeatherError(
                f"a request of {trace.name} needs {needs} tokens, the server takes {limit}; raise --kv-tokens, or "
                "--context-length in --server-flags"
            )
