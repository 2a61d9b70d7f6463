"""``feather ab``: one trace under several scheduling policies, side by side, by replay or on real servers."""

from __future__ import annotations

import argparse
import math
import platform
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from feather_sglang import __version__
from feather_sglang.compare import on_servers, sizes
from feather_sglang.compare.policies import DEFAULT_POLICIES, chosen_policies, options_of
from feather_sglang.compare.rates import Rates, draw
from feather_sglang.compare.results import PLOTS, RESULTS, facts_of, remove_earlier
from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import make_folder, write_json
from feather_sglang.replay import replicas, server_flags
from feather_sglang.replay.arguments import (
    add_workload_arguments,
    check_fits,
    check_sglang,
    feather_options,
    step_model,
    sweep,
)
from feather_sglang.replay.given import check_positive, flag, given
from feather_sglang.replay.jobs import Job, replay
from feather_sglang.replay.on_ray import add_ray, executor_of
from feather_sglang.replay.processes import run_jobs
from feather_sglang.scheduling.policy_names import PROMISING, served

REPLAY_ONLY = (
    *("profile", "prefill_graphs", "feather_pat_prefill", "scheduler_cost", "jobs", "ray"),
    *("replicas", "router"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``feather ab``."""
    add_workload_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("feather-ab-results"), help="folder for results and plots")
    parser.add_argument(
        "--engine",
        choices=("replay", "server"),
        default="replay",
        help="replay in virtual time, or real servers (%(default)s)",
    )
    parser.add_argument(
        "--policies",
        help=f"names with commas ({DEFAULT_POLICIES}, as far as SGLang has them); {PROMISING} is told --slo",
    )
    sizes.add_arguments(parser)
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="policies replayed at a time (%(default)s)")
    add_ray(parser)
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the results, plots and logs of an earlier run in --out"
    )
    add_server_arguments(parser)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only real servers take."""
    add = parser.add_argument_group(
        "with --engine server",
        "--model is the folder of a model; with its config.json alone, the weights are dummies. --attention is one or "
        "more of fa3, flashinfer, triton and pat, separated by commas",
    ).add_argument
    add("--repeat", type=int, metavar="N", help="rounds, every second in reverse order: 2 gives A B B A (%(default)s)")
    add("--one-server", action="store_true", help="start each backend once and switch its policy between the runs")
    add("--time-limit", type=float, metavar="SECONDS", help="limit for all runs; what it cuts is named (none)")
    add("--start-timeout", type=float, metavar="SECONDS", help="time within which a server must be up (%(default)g)")
    add("--json", type=Path, metavar="FILE", help="file of the results, rewritten after each run (OUT/results.json)")
    add("--bench-serving", type=Path, metavar="FILE", help="show this output of sglang.bench_serving, too")
    parser.set_defaults(repeat=1, time_limit=math.inf, start_timeout=300.0)


def check_engine(args: argparse.Namespace) -> None:
    """Raise ``FeatherError`` for a flag that the chosen engine would silently ignore."""
    if args.engine == "replay":
        other, foreign = "server", given(args, add_server_arguments)
    else:
        other, foreign = "replay", [name for name in given(args, add_arguments) if name in REPLAY_ONLY]
    if foreign:
        raise FeatherError(f"{flag(foreign[0])} goes with --engine {other}")


def run(args: argparse.Namespace) -> int:
    """Run the trace under all policies, print the table, write results and plots."""
    check_engine(args)
    if args.engine == "server":
        return on_servers.run(args)
    policies = chosen_policies(args)
    routers = sizes.chosen_routers(args)
    check_positive(args, "jobs")
    executor = executor_of(args.ray)
    version = check_sglang(policies)
    traces = sweep(args)
    runs = sizes.named_runs(policies, routers)
    several = len(args.replicas) > 1
    trace = next(iter(traces.values()))
    rates = sizes.Sizes(list(runs), args.replicas, trace, args.slo) if several else Rates(list(runs), traces, args.slo)
    flags = server_flags.take(args, add_arguments)
    model, settings = step_model(args)
    settings |= flags.settings()
    check_fits(trace, settings["kv_tokens"], args.page_size)
    by_policy = options_of(args, policies)
    remove_earlier(args.out / RESULTS, args.out, args.overwrite)
    out = make_folder(args.out, RESULTS, *PLOTS)
    console = Console()
    for notice in (*trace.notices, *flags.notices()):
        console.print(f"[yellow]notice:[/yellow] {escape(notice)}")
    title = f"{trace.name}: {len(trace.requests):,} requests, {args.profile}, {settings['kv_tokens']:,} KV tokens"
    if routers:
        title += " each" + ("" if several else f", replicas: {args.replicas[0]}")
    console.print(f"feather {__version__}, sglang {version}, {escape(title)}")
    jobs = []
    for (at, name), label in rates.labels.items():
        policy, router = runs[name]
        count = int(at) if several else next(iter(args.replicas), 1)
        options = by_policy[policy]
        jobs.append(Job(served(policy), rates.traces[at], model, settings, options, label, args.slo, count, router))
    work = replicas.serve if routers else replay
    failed: dict[str, str] = {}
    results = run_jobs(jobs, args.jobs, out, console, work, failed=failed, executor=executor)
    if not results:
        raise FeatherError(f"nothing was measured: {next(iter(failed.values()))}")
    columns = {label: result.summary for label, result in results.items()}
    rates.show(console, columns, title)
    write_json(
        out / RESULTS,
        {
            **facts_of(trace),
            "sglang": version,
            "python": platform.python_version(),
            "profile": args.profile,
            "model": args.model,
            "attention": model.attention_name,
            "prefill_graphs": args.prefill_graphs,
            "pat_prefill": feather_options(args).pat_prefill,
            "settings": settings,
            "options": by_policy,
            **({"replicas": args.replicas, "routers": routers} if routers else {}),
            **rates.facts(columns),
            "runs": {
                name: {**asdict(r.summary), "prefills": r.prefills, "feather": r.feather} for name, r in results.items()
            },
            **({"failed": failed} if failed else {}),
        },
    )
    batches = {name: result.batches for name, result in results.items()}
    draw(out, columns, batches, {name: result.latencies for name, result in results.items()})
    console.print(f"results.json, throughput.png, batch_size.png and latency.png are in {escape(str(out))}")
    for label, reason in failed.items():
        console.print(f"[red]failed:[/red] {escape(f'{label}: {reason}')}", soft_wrap=True)
    return int(bool(failed))
