"""``feather ab``: one trace under several scheduling policies, side by side.

Here the replay, each policy in a process of its own; ``--engine server`` is in ``feather_sglang.live``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from feather_sglang import __version__
from feather_sglang.adapter.hooks import SUPPORTED, installed_version, lacks_policy
from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import check_target, replace_text
from feather_sglang.live.arguments import SERVER_ONLY, add_server_arguments
from feather_sglang.pacing import BOUND
from feather_sglang.policy_names import FEATHER, K_LPM, SINCE, STOCK
from feather_sglang.replay import workloads
from feather_sglang.replay.model_shape import DEFAULT_MODEL, MODELS, load_model
from feather_sglang.replay.profiles import list_profiles, load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import Trace, load_trace
from feather_sglang.report import plots
from feather_sglang.report.summary import RunSummary
from feather_sglang.report.tables import comparison

DEFAULT_POLICIES = "fcfs,lpm,dfs-weight,hrrn,feather-order,feather"  # without what SGLang is too old for
RESULTS_VERSION = 1
REPLAY_ONLY = {"profile": "h200", "prefill_graphs": "on", "scheduler_cost": "on", "jobs": 2}


@dataclass(frozen=True)
class Job:
    """One run: everything a child process needs. ``label`` names it in the report; the policy's name if empty."""

    policy: str
    trace: Trace
    model: StepTimeModel
    settings: dict[str, Any]
    options: dict[str, Any]
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.policy


@dataclass
class RunResult:
    """What a child process sends back; `prefills` counts prefill steps."""

    summary: RunSummary
    prefills: int
    batches: list[tuple[float, int, float]]
    latencies: list[float]
    feather: dict[str, Any] | None


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that say what is replayed and on what."""
    parser.add_argument(
        "trace", nargs="?", help="trace in Mooncake's JSON lines; none: the paper's workload, generated"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="replay the first N requests (generated: 1000)")
    parser.add_argument("--rate-scale", type=float, default=1.0, metavar="X", help="X times the requests per second")
    parser.add_argument("--block-size", type=int, default=512, metavar="TOKENS", help="tokens per hash id of the trace")
    made = parser.add_argument_group("generated workload", "used when no trace is given (paper 5.2)")
    workloads.add_arguments(made)
    server = parser.add_argument_group("server and hardware")
    server.add_argument(
        "--profile",
        default=REPLAY_ONLY["profile"],
        help=f"hardware profile: {', '.join(list_profiles())} or a .json file",
    )
    server.add_argument(
        "--model", default=DEFAULT_MODEL, help=f"model whose steps are timed: {', '.join(sorted(MODELS))} (%(default)s)"
    )
    server.add_argument("--attention", help="decode kernel of the profile (its first)")
    server.add_argument("--kv-tokens", type=int, metavar="N", help="KV capacity in tokens (what the profile leaves)")
    server.add_argument("--max-running", type=int, default=500, metavar="N", help="most running requests (500)")
    server.add_argument("--chunked-prefill", type=int, default=8192, metavar="TOKENS", help="prefill chunk (8192)")
    server.add_argument("--page-size", type=int, default=1, metavar="TOKENS", help="KV page size (1)")
    server.add_argument(
        "--prefill-graphs",
        choices=("on", "off"),
        default=REPLAY_ONLY["prefill_graphs"],
        help="off: no prefill step is shorter than the profile's without CUDA graphs (%(default)s)",
    )
    server.add_argument("--seed", type=int, default=0, help="of the generated workload and of exploration")
    server.add_argument(
        "--scheduler-cost",
        choices=("on", "off"),
        default=REPLAY_ONLY["scheduler_cost"],
        help="charge the measured CPU time of scheduling to the clock; off: the same decisions and times in each run",
    )
    policy = parser.add_argument_group("feather policies")
    policy.add_argument(
        "--feather-chunk-size", type=int, default=64, metavar="TOKENS", help="of a chunk of the tree (%(default)s)"
    )
    policy.add_argument(
        "--feather-max-wait",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="from then on a request is next once as many passed it as were ahead (%(default)g)",
    )
    policy.add_argument(
        "--feather-max-overtaking",
        type=float,
        default=2.0,
        metavar="SHARE",
        help="what later requests take before one, in queues that it found (2); inf: no bound",
    )
    policy.add_argument(
        "--feather-gather", choices=("on", "off"), default="on", help="mind prefixes where memory is short (on)"
    )
    policy.add_argument(
        "--feather-pace",
        type=_seconds_or_auto,
        metavar="SECONDS|auto",
        help=f"let those who wait gather for a prefill step, for so long at most (0: never; auto: {BOUND}); "
        "not feather-order",
    )
    parser.add_argument("--out", type=Path, default=Path("feather-ab-results"), help="folder for results and plots")


def _seconds_or_auto(text: str) -> float | None:
    try:
        return None if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, or auto") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``feather ab``."""
    add_workload_arguments(parser)
    parser.add_argument(
        "--engine",
        choices=("replay", "server"),
        default="replay",
        help="virtual time with a model of the GPU, or real servers (%(default)s)",
    )
    parser.add_argument("--policies", help=f"comma-separated (default {DEFAULT_POLICIES}; as far as SGLang has them)")
    parser.add_argument("--feather-policy-file", metavar="FILE", help="policy file written by `feather train`")
    parser.add_argument(
        "--feather-explore", choices=("on", "off"), default="on", help="off: the policy learns nothing (%(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=REPLAY_ONLY["jobs"], metavar="N", help="policies replayed at a time (%(default)s)"
    )
    add_server_arguments(parser)


def workload(args: argparse.Namespace) -> Trace:
    """The trace that the flags ask for."""
    if args.requests is not None and args.requests < 1:
        raise FeatherError(f"--requests {args.requests}: must be at least 1")
    if args.trace is not None:
        if ignored := workloads.given(args):
            instead = "; with a trace use --rate-scale" if ignored == ["rate"] else ", not with a trace"
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in ignored)
            raise FeatherError(f"{flags}: for a generated workload{instead}")
        trace = load_trace(args.trace, args.block_size)
        trace = trace.head(args.requests) if args.requests else trace
    elif args.no_sharing:
        trace = workloads.no_sharing(
            output_tokens=args.output_tokens, rate=args.rate, requests=args.requests or 1000, seed=args.seed
        )
    else:
        trace = workloads.shared_prefix(
            groups=args.groups,
            prefix_tokens=args.prefix_tokens,
            levels=args.levels,
            output_tokens=args.output_tokens,
            rate=args.rate,
            requests=args.requests or 1000,
            seed=args.seed,
        )
    return trace.scaled(args.rate_scale)


def step_model(args: argparse.Namespace) -> tuple[StepTimeModel, dict[str, Any]]:
    """The step-time model and the replayed server's settings."""
    profile, shape = load_profile(args.profile), load_model(args.model)
    model = StepTimeModel(profile, shape, args.attention, prefill_graphs=args.prefill_graphs == "on")
    check_sizes(args)
    settings = {
        "kv_tokens": args.kv_tokens or profile.kv_tokens(shape),
        "max_running": args.max_running,
        "chunked_prefill": args.chunked_prefill,
        "page_size": args.page_size,
        "charge_scheduler": args.scheduler_cost == "on",
    }
    return model, settings


def check_sizes(args: argparse.Namespace) -> None:
    """Raise ``FeatherError`` for a size of the server that cannot be."""
    for name in ("kv_tokens", "max_running", "page_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise FeatherError(f"--{name.replace('_', '-')} {value}: must be at least 1")


def check_sglang(policies: Sequence[str] = ()) -> str:
    """Version of the installed SGLang; one clear line if there is none, or none that fits and has these policies."""
    if importlib.util.find_spec("sglang") is None:
        raise FeatherError("SGLang is not installed here; see README, or run `feather doctor`")
    version = installed_version()
    if version not in SUPPORTED:
        raise FeatherError(f"sglang {version} is not supported; install one of {SUPPORTED[0]} to {SUPPORTED[-1]}")
    for name in policies:
        if lacks_policy(version, name):
            raise FeatherError(
                f"--policies: sglang {version} has no {name}; leave it out, or install sglang {SINCE[name]} or later"
            )
    return version


def check_fits(trace: Trace, kv_tokens: int, page_size: int) -> None:
    """Raise ``FeatherError`` if a request could never run, or not to its end."""
    least = trace.least_pool(page_size)
    if least > kv_tokens:
        pages = f" in pages of {page_size}" if page_size > 1 else ""
        raise FeatherError(
            f"a request of {trace.name} needs {least} tokens of KV{pages}, --kv-tokens is {kv_tokens}; raise it"
        )


def replay(job: Job, tell: Any) -> RunResult:
    """Run one job in this process (once per process: SGLang keeps global state)."""
    os.environ["FEATHER_OPTIONS"] = json.dumps(job.options)
    from feather_sglang.adapter import cpu_shims

    cpu_shims.install()
    from feather_sglang.adapter.replay_engine import Replay, ReplaySettings

    with tempfile.TemporaryDirectory() as folder:
        engine = Replay(Path(folder), job.policy, job.trace, job.model, ReplaySettings(**job.settings))
        return result_of(job.name, engine.run(job.trace, tell))


def result_of(policy: str, outcome: Any) -> RunResult:
    """Turn what the engine measured into figures."""
    served = outcome.served
    feather = outcome.feather
    summary = RunSummary.from_times(
        policy,
        arrivals=[s.request.arrival_s for s in served],
        first_tokens=[s.first_token for s in served],
        finishes=[s.finish for s in served],
        output_tokens=sum(s.request.output_length for s in served),
        input_tokens=sum(s.request.input_length for s in served),
        cached_tokens=sum(s.cached_tokens for s in served),
        token_gaps=outcome.token_gaps,
        batch_rows=[rows for _, rows, _ in outcome.batches],
        batch_seconds=[seconds for _, _, seconds in outcome.batches],
        makespan=outcome.makespan,
        scheduler_seconds=outcome.scheduler_seconds,
        retractions=outcome.retractions,
        stops=feather["stops"] if feather else 0,
    )
    every = max(1, len(outcome.batches) // 4000)
    latencies = [s.finish - s.request.arrival_s for s in served]
    return RunResult(summary, outcome.prefills, outcome.batches[::every], latencies, feather)


def _child(work: Callable[[Job, Any], Any], job: Job, log: Path, scratch: str, queue: Any) -> None:
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


def run_jobs(
    jobs: list[Job],
    at_a_time: int,
    logs: Path,
    console: Console,
    work: Callable[[Any, Any], Any] = replay,
    passes: int = 1,
) -> dict[str, Any]:
    """Run ``work`` on the jobs in child processes, with a progress bar each; the first failure ends them all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["feather_sglang.adapter.preload"])
    queue = context.Queue()
    waiting = list(jobs)
    running: dict[str, Any] = {}
    results: dict[str, Any] = {}
    columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # One folder for all: a child that is terminated removes nothing.
    with tempfile.TemporaryDirectory() as scratch, Progress(*columns, console=console) as progress:
        bars = {
            job.name: progress.add_task(job.name, total=passes * len(job.trace.requests), start=False) for job in jobs
        }
        try:
            while waiting or running:
                while waiting and len(running) < at_a_time:
                    job = waiting.pop(0)
                    log = logs / f"{job.name}.log"
                    log.write_bytes(b"")  # a child that cannot write its log could not even say so
                    process = context.Process(target=_child, args=(work, job, log, scratch, queue))
                    process.start()
                    running[job.name] = process
                    progress.start_task(bars[job.name])
                try:
                    policy, kind, value = queue.get(timeout=1.0)
                except Empty:
                    dead = [name for name, process in running.items() if not process.is_alive()]
                    if dead and queue.empty():
                        raise FeatherError(f"the replay under {dead[0]} ended without a result; see its log") from None
                    continue
                if kind == "progress":
                    progress.update(bars[policy], completed=value)
                elif kind == "done":
                    results[policy] = value
                    progress.update(bars[policy], completed=progress.tasks[bars[policy]].total)
                    progress.stop_task(bars[policy])
                    running.pop(policy).join()
                elif kind == "mistake":
                    raise FeatherError(value)
                else:
                    raise FeatherError(f"the replay under {policy} failed ({value}); see {logs / f'{policy}.log'}")
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.join()
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


def chosen_policies(args: argparse.Namespace) -> list[str]:
    """The policies that ``--policies`` names, or else those of the default that the installed SGLang has."""
    if args.policies is None:
        version = installed_version()
        return [name for name in DEFAULT_POLICIES.split(",") if not lacks_policy(version, name)]
    policies = [name.strip() for name in args.policies.split(",") if name.strip()]
    if args.engine == "server" and K_LPM in policies:
        raise FeatherError(f"--policies {args.policies}: no server has {K_LPM}; leave it out, or use --engine replay")
    known = (*STOCK, *FEATHER) if args.engine == "server" else (*STOCK, K_LPM, *FEATHER)
    unknown = [name for name in policies if name not in known]
    if unknown or not policies:
        raise FeatherError(f"--policies {args.policies}: unknown {unknown or 'empty list'}; choose from {known}")
    if len(set(policies)) < len(policies):
        raise FeatherError(f"--policies {args.policies}: a policy is named twice")
    return policies


def common_options(args: argparse.Namespace) -> dict[str, Any]:
    """What FEATHER_OPTIONS holds for nearly all policies (``suited``), whether they are compared or trained."""
    if args.feather_pace is not None and not 0 <= args.feather_pace < math.inf:
        raise FeatherError(f"--feather-pace {args.feather_pace:g}: expected seconds, 0 or more")
    options = {
        "seed": args.seed,
        "chunk_size": args.feather_chunk_size,
        "gather": args.feather_gather == "on",
        "pace": args.feather_pace,
        "max_wait": args.feather_max_wait,
        "max_overtaking": "inf" if args.feather_max_overtaking == math.inf else args.feather_max_overtaking,
    }
    FeatherOptions().updated(options)  # a mistake ends the command here, not a replay after minutes
    return options


def suited(policy: str, options: dict[str, Any]) -> dict[str, Any]:
    """These options as that policy takes them: under feather-order SGLang admits, and nothing is paced."""
    return {**options, "pace": 0.0} if policy == "feather-order" else dict(options)


def options_of(args: argparse.Namespace, policies: list[str]) -> dict[str, dict[str, Any]]:
    """What FEATHER_OPTIONS holds for each policy; the policy file goes to the policy that it was trained for."""
    options = {**common_options(args), "explore": args.feather_explore == "on"}
    by_policy: dict[str, dict[str, Any]] = {name: suited(name, options) for name in policies}
    if args.feather_policy_file:
        kind = check_policy_file(args.feather_policy_file)
        takers = [name for name in policies if name in (f"feather-{kind}", "feather" if kind == "bandit" else "")]
        if not takers:
            raise FeatherError(f"{args.feather_policy_file} holds a {kind} policy; --policies names no feather-{kind}")
        for name in takers:
            by_policy[name]["policy_file"] = os.path.abspath(args.feather_policy_file)
    return by_policy


def check_engine(args: argparse.Namespace) -> None:
    """Raise ``FeatherError`` for a flag that the chosen engine would silently ignore."""
    other, foreign = ("server", SERVER_ONLY) if args.engine == "replay" else ("replay", REPLAY_ONLY)
    for name, default in foreign.items():
        if getattr(args, name) != default:
            raise FeatherError(f"--{name.replace('_', '-')} goes with --engine {other}")


def run(args: argparse.Namespace) -> int:
    """Run the trace under all policies, print the table, write results and plots."""
    check_engine(args)
    if args.engine == "server":
        # Imported late: a replay does without it, and it takes the workload from here.
        from feather_sglang.live import ab as on_servers

        return on_servers.run(args)
    policies = chosen_policies(args)
    if args.jobs < 1:
        raise FeatherError(f"--jobs {args.jobs}: must be at least 1")
    version = check_sglang(policies)
    trace = workload(args)
    model, settings = step_model(args)
    check_fits(trace, settings["kv_tokens"], args.page_size)
    by_policy = options_of(args, policies)
    out = make_folder(args.out, "results.json", "throughput.png", "batch_size.png", "latency.png")
    console = Console()
    for notice in trace.notices:
        console.print(f"[yellow]notice:[/yellow] {escape(notice)}")
    title = f"{trace.name}: {len(trace.requests):,} requests, {args.profile}, {settings['kv_tokens']:,} KV tokens"
    console.print(f"feather {__version__}, sglang {version}, {escape(title)}")
    jobs = [Job(name, trace, model, settings, by_policy[name]) for name in policies]
    results = run_jobs(jobs, args.jobs, out, console)
    console.print(comparison([r.summary for r in results.values()], title))
    write_json(
        out / "results.json",
        {
            "version": RESULTS_VERSION,
            "command": shlex.join(["feather", *sys.argv[1:]]),
            "feather": __version__,
            "sglang": version,
            "python": platform.python_version(),
            "workload": {"name": trace.name, "requests": len(trace.requests), "block_size": trace.block_size},
            "profile": args.profile,
            "model": args.model,
            "attention": model.attention_name,
            "prefill_graphs": args.prefill_graphs,
            "settings": settings,
            "options": by_policy,
            "runs": {
                name: {**r.summary.as_dict(), "prefills": r.prefills, "feather": r.feather}
                for name, r in results.items()
            },
        },
    )
    plots.throughput({name: r.summary.output_tok_s for name, r in results.items()}, out / "throughput.png")
    plots.batch_size({name: r.batches for name, r in results.items()}, out / "batch_size.png")
    plots.latency({name: r.latencies for name, r in results.items()}, out / "latency.png")
    console.print(f"results.json, throughput.png, batch_size.png and latency.png are in {escape(str(out))}")
    return 0


def check_policy_file(path: str) -> str:
    """Kind of policy that a policy file holds; ``FeatherError`` for a file that is none."""
    from feather_sglang.policies import load_policy

    return load_policy(path).name
