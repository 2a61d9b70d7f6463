"""``feather ab --engine server``: real servers, one at a time, each policy under the same requests."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from feather_sglang import __version__
from feather_sglang.adapter.environment import require_plugin
from feather_sglang.adapter.options import FeatherOptions, flag_of, has_flag
from feather_sglang.compare.policies import chosen_policies, options_of
from feather_sglang.compare.rates import Rates, draw
from feather_sglang.compare.results import PLOTS, RESULTS, facts_of, remove_earlier
from feather_sglang.compare.server.bench_serving import read_results
from feather_sglang.compare.server.cases import Case, vocabulary_of
from feather_sglang.compare.server.config import BACKENDS, POLICY_FLAG, ServerConfig, switch_flags
from feather_sglang.compare.server.driver import LEAST_RUN, Driver, Terms
from feather_sglang.compare.server.idle import IdleTimes, measure_idle
from feather_sglang.compare.server.machine import machine
from feather_sglang.compare.server.process import Server, environment_with
from feather_sglang.compare.server.result import RunResult, judged, notes, together
from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import make_folder, write_json
from feather_sglang.replay import server_flags
from feather_sglang.replay.arguments import check_fits, check_sglang, check_sizes, common_options, sweep
from feather_sglang.replay.given import check_positive
from feather_sglang.replay.traces import Trace
from feather_sglang.report.summary import RunSummary
from feather_sglang.report.tables import SERVER_FIGURES
from feather_sglang.scheduling.policy_names import FEATHER, served

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def run(args: argparse.Namespace) -> int:
    """Measure all configurations, print the table, write results and plots; 1 if something is missing."""
    policies = chosen_policies(args)
    check_positive(args, "repeat")
    if not args.time_limit > 0 or not args.start_timeout > 0:
        raise FeatherError("--time-limit and --start-timeout: must be more than 0 seconds")
    check_sizes(args)
    vocabulary = vocabulary_of(args.model)
    chosen = configurations(args, policies)
    peers = read_results(args.bench_serving) if args.bench_serving else []
    version = check_sglang(policies)
    if any("pat" in one.flags for one in chosen):
        require_plugin()
    rates = Rates([one.name for one in chosen], sweep(args), args.slo)
    trace = rates.trace
    check_fits(trace, args.kv_tokens, args.page_size)
    target = args.json or args.out / RESULTS
    remove_earlier(target, args.out, args.overwrite)
    make_folder(args.out, *PLOTS)
    if target.is_dir():
        raise FeatherError(f"--json {target}: is a folder")
    console = Console(highlight=False)
    for notice in trace.notices:
        console.print(f"[yellow]notice:[/yellow] {escape(notice)}")
    comparer = Comparison(args, rates, vocabulary, chosen, target, console)
    comparer.tell(f"feather {__version__}, sglang {version}, {comparer.title}")
    comparer.write()  # so that a place where nothing can be written is found now
    comparer.driver.run()
    return comparer.report(peers)


def configurations(args: argparse.Namespace, policies: Sequence[str]) -> list[ServerConfig]:
    """One per attention backend and policy; flags that the user gave overrule."""
    given = server_flags.split(args.server_flags)
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
            f"--attention {args.attention}: name each once, out of {', '.join(BACKENDS)}; for others use --server-flags"
        )
    options = options_of(args, list(policies))
    overruled = {word.partition("=")[0].removeprefix("--feather-").replace("-", "_") for word in given}
    found = []
    for backend in backends or [""]:
        decode = tuple(BACKENDS.get(backend, "").split())
        for policy in policies:
            told = {"policy_file": None, **options[policy]} if served(policy) in FEATHER else {}
            told = {option: value for option, value in told.items() if option not in overruled}
            flags = (POLICY_FLAG, served(policy), *feather_flags(told))
            name = f"{backend}+{policy}" if len(backends) > 1 else policy
            found.append(ServerConfig(name, (*decode, *given), served(policy), told, flags))
    return found


def feather_flags(options: dict[str, Any]) -> list[str]:
    """The flags by which a server takes these options; what is None needs none."""
    flags = []
    for name, value in options.items():
        if value is not None and has_flag(name):
            flags += [flag_of(name), ("on" if value else "off") if isinstance(value, bool) else str(value)]
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
        rates: Rates,
        vocabulary: int,
        chosen: Sequence[ServerConfig],
        target: Path,
        console: Console,
    ) -> None:
        self.args, self.rates, self.vocabulary, self.target, self.console = args, rates, vocabulary, target, console
        trace = rates.trace
        self.scales = {rates.label(scale, trace.name): scale for scale in rates.traces}  # by case
        self.idle: IdleTimes | None = None  # of the first server that is up: the same bounds for all
        key = secrets.token_hex(16)
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", args.model]
        environment = environment_with({})
        # What has no flag travels in the variable. Exploration is seeded as the workload is.
        replace(FeatherOptions.from_environment(), seed=args.seed).to_environment(environment)
        terms = Terms(
            command=[*command, *common_flags(args), *switch_flags(key)],
            vocabulary=vocabulary,
            logs=make_folder(args.out / "logs"),
            check=lambda case, server: check_room(case.trace, server),
            say=self.say,
            done=self.done,
            key=key,
            environment=environment,
            rounds=args.repeat,
            switching=args.one_server,
            stream_interval=args.stream_interval,
            time_limit=args.time_limit,
            start_timeout=args.start_timeout,
            warm=self.warm,
        )
        cases = [Case(name, rates.traces[scale]) for name, scale in self.scales.items()]
        self.driver = Driver(chosen, cases, terms)
        self.title = f"{trace.name}: {len(trace.requests):,} requests, {Path(args.model).name}"
        self.title += ", dummy weights" if dummy_weights(args.model) else ""
        self.records: list[dict[str, Any]] = []
        self.facts = {
            **facts_of(trace),
            "engine": "server",
            "when": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": machine(),
            "model": args.model,
            "dummy_weights": dummy_weights(args.model),
            "options": {name: value for name, value in common_options(args).items() if not has_flag(name)},
            "stream_interval": args.stream_interval,
        }

    def warm(self, server: Server) -> None:
        """Measure what requests take alone, where an SLO is judged and it is not known yet."""
        if self.rates.slo is not None and self.idle is None:
            self.say("measuring lone requests")
            limit = max(LEAST_RUN, min(self.args.start_timeout, self.driver.remaining()))
            self.idle = measure_idle(server, self.rates.trace, self.vocabulary, self.args.stream_interval, limit)

    def done(self, result: RunResult) -> None:
        """Add a run's record, say how it went, and write the file."""
        if result.error is not None:
            result.error = explain(result.error, Path(result.server["log"]), result.server.get("log_begin", 0))
        result.summary = judged(result, self.rates.slo, self.idle)
        record = record_of(result, self.label(result.case, result.name))
        self.records.append(record)
        self.say(progress(record))
        self.write()

    def label(self, case: str, name: str) -> str:
        """What the report calls the configuration at that rate."""
        return self.rates.labels[self.scales[case], name]

    def results(self) -> dict[str, list[RunResult]]:
        """Runs with figures, by label, in the order of the command line."""
        found: dict[str, list[RunResult]] = {label: [] for label in self.rates.labels.values()}
        for result in self.driver.results:
            if result.summary is not None and result.error is None:
                found[self.label(result.case, result.name)].append(result)
        return {label: results for label, results in found.items() if results}

    def columns(self) -> dict[str, RunSummary]:
        """One column a label."""
        return {
            label: together([one.summary for one in results if one.summary])
            for label, results in self.results().items()
        }

    def order(self) -> list[str]:
        """Runs as they were begun."""
        return [record["name"] for record in self.records]

    def missing(self) -> list[str]:
        """Runs that were asked for and not begun."""
        found = self.driver.missing()
        return [f"{self.label(case.name, one.name)} (round {number})" for number, one, case in found]

    def write(self) -> None:
        """Replace the results; whoever reads them sees the old ones or the new ones."""
        columns = self.columns()
        content = {
            **self.facts,
            **self.rates.facts(columns),
            "order": self.order(),
            "missing": self.missing(),
            "runs": {label: {**asdict(summary), "policy": label} for label, summary in columns.items()},
            "records": self.records,
            "seconds": round(self.driver.elapsed(), 1),
        }
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FeatherError(f"cannot write {self.target}: {error.strerror}") from None
        write_json(self.target, content)

    def report(self, peers: Sequence[RunSummary]) -> int:
        """Print table and notes, draw the plots; the exit status."""
        columns = self.columns()
        if not columns:
            failed = next((record["error"] for record in self.records if "error" in record), "no time was left")
            raise FeatherError(f"nothing was measured: {failed}")
        self.rates.show(self.console, columns, self.title, SERVER_FIGURES, peers)
        again = "" if self.args.repeat > 1 else "; --repeat 2 runs them again in reverse order (A B B A)"
        self.tell(f"{self.servers()}: {' '.join(self.order())}{again}")
        for line in notes(self.records):
            self.tell(line)
        if peers:
            self.tell(f"{', '.join(peer.policy for peer in peers)}: by sglang.bench_serving, of its own workload")
        if self.missing():
            self.tell(f"these runs did not begin within the time limit: {', '.join(self.missing())}")
        first = {name: results[0] for name, results in self.results().items()}
        out = self.args.out
        batches = {name: [step[:3] for step in one.steps] for name, one in first.items()}
        draw(out, columns, batches, {name: one.latencies for name, one in first.items()})
        self.tell(f"results are in {self.target}; plots and the servers' logs are in {out}")
        return int(bool(self.missing()) or any(result.incomplete for result in self.driver.results))

    def servers(self) -> str:
        """How many servers these were."""
        starts = sum("start_seconds" in record for record in self.records)
        if not self.args.one_server:
            return "servers were started one after the other"
        kept = "one server" if starts == 1 else f"{starts} servers, one after the other"
        return f"{kept}; the policy was switched between runs and the cache emptied"

    def say(self, text: str) -> None:
        """Print a line with the time."""
        self.tell(f"[{self.driver.elapsed():5.0f} s] {text}")

    def tell(self, text: str) -> None:
        """Print a line as it is."""
        self.console.print(text, markup=False, soft_wrap=True)


def record_of(result: RunResult, label: str) -> dict[str, Any]:
    """A run as the results file has it."""
    record: dict[str, Any] = {"name": label, "round": result.round, **result.server}
    if result.error is not None or result.summary is None:
        return record | {"error": result.error}
    return record | {
        "summary": asdict(result.summary),
        "counted": result.counted,
        "admission": result.admission and result.admission._asdict(),
        "client_cpu": result.client_cpu,
        "fell_back": result.fell_back,
        "clocks": result.clocks,
        "activity": result.activity,
        "steps": [[round(value, 3) if value is not None else None for value in step] for step in result.steps],
        "latencies": [round(seconds, 4) for seconds in result.latencies],
    }


def progress(record: dict[str, Any]) -> str:
    """One line about one run."""
    if "error" in record:
        return f"{record['name']}: {record['error']}"
    counted, summary = record["counted"], record["summary"]
    return (
        f"{record['name']}: {summary['output_tok_s']:,.4g} tok/s, {counted['finished']} of {counted['requests']} "
        f"requests in {counted['seconds']:.1f} s, mean TTFT {summary['ttft_mean']:.2f} s"
    )


def explain(problem: str, log: Path, begin: int) -> str:
    """One line: what happened, the last thing that the server said about an error since then, and where."""
    printed = log.read_bytes()[begin:].decode(errors="replace")
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "")
    return f"{problem}; its log ends with: {said[:200]} ({log})" if said else f"{problem} ({log})"


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
