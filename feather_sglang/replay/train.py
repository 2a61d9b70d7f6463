"""``feather train``: replay the first part of a trace until the policy settles, then report it on the rest."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from feather_sglang.adapter.environment import sglang_variables
from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import check_target, make_folder, write_json
from feather_sglang.replay import server_flags
from feather_sglang.replay.arguments import (
    add_workload_arguments,
    check_fits,
    check_sglang,
    common_options,
    step_model,
    suited,
    workload,
)
from feather_sglang.replay.jobs import Job, engine_of
from feather_sglang.replay.processes import run_jobs
from feather_sglang.report import plots
from feather_sglang.report.summary import RESULTS_VERSION
from feather_sglang.report.tables import comparison
from feather_sglang.scheduling.policies.rehearsal import FIRST_RULES, NEVER, Rehearsal, StopRule, neighbours
from feather_sglang.scheduling.policies.rehearsal import teach as credit

SETTLED = 0.01  # change of the policy's throughput from one round to the next


class Pass(NamedTuple):
    """One pass over the training part: under a fixed rule, or (``rule`` None) under the policy as it was by then."""

    rule: StopRule | None
    rate: float  # output tokens/s
    stops: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``feather train``."""
    add_workload_arguments(parser, without=("policy_file", "explore"))
    parser.set_defaults(out=Path("policy.json"))
    parser.add_argument("--policy", required=True, choices=("bandit", "qlearning"), help="learner to train")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="limit of passes over the training part (4)")
    parser.add_argument("--split", type=float, default=0.5, metavar="SHARE", help="share of requests to train on (0.5)")


def settled(passes: list[Pass]) -> bool:
    """Whether the policy's throughput stayed the same from the last round but one to the last."""
    own = [one.rate for one in passes if one.rule is None]
    return len(own) >= 2 and abs(own[-1] - own[-2]) <= SETTLED * own[-2]


def teach(rounds: int, out: str, job: Job, tell: Any) -> list[Pass]:
    """Train in this process and write the policy file.

    A round replays the training part under each rule that is new, the first the same few, then the neighbours of the
    best so far, and then under the policy that has learnt from them.
    """
    passes: list[Pass] = []
    with engine_of(job) as engine:
        admission: Any = engine.feather.admission
        learner = admission.policy
        learner.explore = False

        def replay(policy: Any, rule: StopRule | None) -> float:
            admission.policy = policy
            stops = admission.stops
            done = len(passes) * len(job.trace.requests)
            outcome = engine.run(job.trace, lambda n: tell(done + n))
            rate = sum(s.request.output_length for s in outcome.served) / outcome.makespan
            passes.append(Pass(rule, rate, admission.stops - stops))
            return rate

        rates: dict[StopRule, float] = {}
        for _ in range(rounds):
            for rule in neighbours(max(rates, key=rates.__getitem__)) if rates else FIRST_RULES:
                if rule not in rates:
                    rates[rule] = replay(Rehearsal(rule), rule)
            credit(learner, rates)
            replay(learner, None)
            if settled(passes):
                break
        learner.explore = True
        learner.save(out)
    return passes


def run(args: argparse.Namespace) -> int:
    """Train, show the learning curve, write the policy file, report on the held-out part."""
    if not 0.1 <= args.split <= 0.9:
        raise FeatherError(f"--split {args.split:g}: must lie between 0.1 and 0.9")
    if args.rounds < 2:
        raise FeatherError(f"--rounds {args.rounds}: must be at least 2, to see whether the policy settles")
    if args.out.suffix != ".json":
        raise FeatherError(f"--out {args.out}: must be a .json file, the policy file to write")
    check_target(args.out, "policy file")
    check_sglang()
    first, rest = workload(args).split(args.split)
    if not first.requests or not rest.requests:
        raise FeatherError(f"{first.name}: too few requests to train on one part and report on another")
    flags = server_flags.take(args, add_arguments)
    model, settings = step_model(args)
    settings |= flags.settings()
    for part in (first, rest):
        check_fits(part, settings["kv_tokens"], args.page_size)
    options, out = common_options(args), str(args.out.absolute())
    folder = make_folder(args.out.parent / f"{args.out.stem}-training", "results.json", "learning_curve.png")
    name = f"feather-{args.policy}"
    console = Console()
    for notice in (*first.notices, *flags.notices()):
        console.print(f"[yellow]notice:[/yellow] {escape(notice)}")
    console.print(f"training {name} on {len(first.requests):,} requests of {escape(f'{first.name}, {args.profile}')}")
    job = Job(name, first, model, settings, options, "training")
    most = len(FIRST_RULES) + 1 + (args.rounds - 1) * (len(neighbours(FIRST_RULES[-1])) + 1)
    passes: list[Pass] = run_jobs([job], 1, folder, console, partial(teach, args.rounds, out), passes=most)["training"]

    never = next(one.rate for one in passes if one.rule == NEVER)
    own = [one.rate for one in passes if one.rule is None]
    curve = Table("pass", "rule", "output tok/s", "to never", "stops", title="learning curve", title_justify="left")
    for number, one in enumerate(passes, 1):
        rule = "[bold]the policy[/bold]" if one.rule is None else str(one.rule)
        curve.add_row(str(number), rule, f"{one.rate:,.0f}", f"{one.rate / never:.3f}x", f"{one.stops:,d}")
    console.print(curve)
    plots.learning_curve(own, never, folder / "learning_curve.png")
    if not settled(passes):
        console.print(f"[yellow]notice:[/yellow] not settled after {len(own)} rounds; raise --rounds")
    if own[-1] < (1 - SETTLED) * never:
        console.print("[yellow]notice:[/yellow] the policy loses to never stopping on this trace: do not serve with it")

    frozen = {**options, "policy_file": out, "explore": False}
    base = Job("fcfs", rest, model, settings, options, slo=args.slo)
    jobs = [
        base,
        replace(base, policy="feather-order", options=suited("feather-order", options)),
        replace(base, policy=name, label=f"{name} untrained"),
        replace(base, policy=name, label=f"{name} trained", options=frozen),
    ]
    results = run_jobs(jobs, 2, folder, console)
    title = f"held out: {len(rest.requests):,} requests of {rest.name}, {args.profile}"
    console.print(comparison([r.summary for r in results.values()], title))
    write_json(
        folder / "results.json",
        {
            "version": RESULTS_VERSION,
            **({"slo": args.slo.text} if args.slo is not None else {}),
            "environment": sglang_variables(),
            "settings": settings,
            "training": [one._asdict() for one in passes],
            "held_out": {label: asdict(r.summary) for label, r in results.items()},
        },
    )
    console.print(f"wrote {escape(str(args.out))}; learning_curve.png and results.json are in {escape(str(folder))}")
    return 0
