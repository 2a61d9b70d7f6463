"""``feather train``: replay the first part of a trace until the policy settles, then report it on the rest."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from feather_sglang import __version__
from feather_sglang.adapter.environment import sglang_variables
from feather_sglang.adapter.hooks import installed_version
from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import check_new, check_target, make_folder, write_json
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
from feather_sglang.replay.digests import code_digest, trace_digest
from feather_sglang.replay.given import check_positive
from feather_sglang.replay.jobs import Job, engine_of
from feather_sglang.replay.on_ray import add_ray, executor_of
from feather_sglang.replay.processes import Work, run_jobs
from feather_sglang.report import plots
from feather_sglang.report.summary import RESULTS_VERSION
from feather_sglang.report.tables import comparison
from feather_sglang.scheduling.policies import make_policy
from feather_sglang.scheduling.policies.policy_file import read_document, write_document
from feather_sglang.scheduling.policies.rehearsal import FIRST_RULES, NEVER, Rehearsal, StopRule, neighbours
from feather_sglang.scheduling.policies.rehearsal import teach as credit

SETTLED = 0.01  # change of the policy's throughput from one round to the next


class Pass(NamedTuple):
    """One pass over the training part: under a fixed rule, or (``rule`` None) under the policy as it was by then."""

    rule: StopRule | None
    rate: float  # output tokens/s
    stops: int


class Passes:
    """The passes of a training, each kept in a file as soon as it is done.

    Parameters
    ----------
    provenance : what they depend on.
    """

    def __init__(self, file: Path, provenance: dict[str, Any]) -> None:
        self.file, self.provenance = file, provenance
        self.done: dict[str, Pass] = {}  # by the names of their jobs, in order

    def resume(self) -> None:
        """Take over what an interrupted training with the same provenance has kept."""
        try:
            content = json.loads(self.file.read_bytes())
            if content["provenance"] != self.provenance:
                return
            for name, (rule, rate, stops) in content["passes"].items():
                self.done[name] = Pass(None if rule is None else StopRule(*rule), float(rate), int(stops))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.done.clear()  # nothing whole is there

    def add(self, name: str, one: Pass) -> None:
        """Keep one more."""
        self.done[name] = one
        write_json(self.file, {"provenance": self.provenance, "passes": self.done})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``feather train``."""
    add_workload_arguments(parser, without=("policy_file", "explore"))
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("policy.json"),
        metavar="FILE",
        help="policy file to write (%(default)s); results, plot and logs go to a folder beside it, as policy-training",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the policy file of an earlier run")
    parser.add_argument("--policy", required=True, choices=("bandit", "qlearning"), help="learner to train")
    parser.add_argument(
        "--rounds",
        type=int,
        default=4,
        metavar="N",
        help="limit of rounds, each of several passes over the training part (4)",
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="passes replayed at a time (%(default)s)")
    add_ray(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the passes that an interrupted training of these flags has kept",
    )
    parser.add_argument("--split", type=float, default=0.5, metavar="SHARE", help="share of requests to train on (0.5)")


def settled(passes: list[Pass]) -> bool:
    """Whether the policy's throughput stayed the same from the last round but one to the last."""
    own = [one.rate for one in passes if one.rule is None]
    return len(own) >= 2 and abs(own[-1] - own[-2]) <= SETTLED * own[-2]


def learned(passes: Sequence[Pass]) -> tuple[bool, str]:
    """Whether the policy at the end is worth serving with, and why, against never stopping."""
    never = next(one.rate for one in passes if one.rule == NEVER)
    last = [one for one in passes if one.rule is None][-1]
    gain = last.rate / never - 1
    if gain < -SETTLED:
        return False, f"the policy loses to never stopping on this trace, by {-gain:.1%}"
    if not last.stops:
        return False, "nothing was learned: the policy never stops on this trace (0 stops)"
    if last.rate <= (1 + SETTLED) * never:
        return (
            False,
            f"nothing was learned: a gain of {gain:.1%} over never stopping is within {SETTLED:.0%}, as noise is",
        )
    return True, f"the policy gains {gain:.1%} over never stopping on the training part, with {last.stops:,} stops"


def rehearse(rules: Mapping[str, StopRule], job: Job, tell: Any) -> Pass:
    """One pass, under the rule that goes with the job's name, or else under the policy of its options."""
    rule = rules.get(job.name)
    with engine_of(job) as engine:
        admission: Any = engine.feather.admission
        if rule is not None:
            admission.policy = Rehearsal(rule)
        outcome = engine.run(job.trace, tell)
        rate = sum(s.request.output_length for s in outcome.served) / outcome.makespan
        return Pass(rule, rate, admission.stops)


def train(
    rounds: int, learner: Any, out: Path, job: Job, passes: Passes, run_passes: Callable[..., None]
) -> list[Pass]:
    """Train, and write the policy file.

    A round replays the training part under each rule that is new, the first the same few, then the neighbours of the
    best so far, and then under the policy that has learnt from them. It ends early once that one has settled.
    """

    def replayed(jobs: Sequence[Job], rules: Mapping[str, StopRule]) -> list[Pass]:
        missing = [one for one in jobs if one.name not in passes.done]
        if missing:
            run_passes(missing, partial(rehearse, rules))
        return [passes.done[one.name] for one in jobs]

    found: list[Pass] = []
    rates: dict[StopRule, float] = {}
    for number in range(1, rounds + 1):
        tried = neighbours(max(rates, key=rates.__getitem__)) if rates else FIRST_RULES
        rules = {str(rule): rule for rule in tried if rule not in rates}
        one_each = replayed([replace(job, label=name) for name in rules], rules)
        rates |= {rule: one.rate for rule, one in zip(rules.values(), one_each, strict=True)}
        credit(learner, rates)
        learner.save(out)
        frozen = {**job.options, "policy_file": str(out.absolute()), "explore": False}
        found += one_each + replayed([replace(job, label=f"the policy, round {number}", options=frozen)], {})
        if settled(found):
            break
    write_document(out, learner.name, {**read_document(out), "trained": passes.provenance})
    return found


def provenance(job: Job, seed: int) -> dict[str, Any]:
    """What a training depends on: for its passes, and for whoever finds its policy file."""
    model = job.model
    return {
        "feather": __version__,
        "code": code_digest(),
        "sglang": installed_version(),
        "profile": model.profile.name,
        "model": model.model.name,
        "attention": model.attention_name,
        "workload": {"name": job.trace.name, "requests": len(job.trace.requests), "digest": trace_digest(job.trace)},
        "settings": job.settings,
        "options": job.options,
        "seed": seed,
        "environment": sglang_variables(),
    }


def run(args: argparse.Namespace) -> int:
    """Train, show the learning curve, write the policy file, report on the held-out part."""
    if not 0.1 <= args.split <= 0.9:
        raise FeatherError(f"--split {args.split:g}: must lie between 0.1 and 0.9")
    if args.rounds < 2:
        raise FeatherError(f"--rounds {args.rounds}: must be at least 2, to see whether the policy settles")
    if args.out.suffix != ".json":
        raise FeatherError(f"--out {args.out}: must be a .json file, the policy file to write")
    check_positive(args, "jobs")
    check_target(args.out, "policy file")
    check_new(args.out, args.overwrite or args.resume)
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
    executor = executor_of(args.ray)
    folder = make_folder(args.out.parent / f"{args.out.stem}-training", "results.json", "learning_curve.png")
    name = f"feather-{args.policy}"
    console = Console()
    for notice in (*first.notices, *flags.notices()):
        console.print(f"[yellow]notice:[/yellow] {escape(notice)}")
    console.print(f"training {name} on {len(first.requests):,} requests of {escape(f'{first.name}, {args.profile}')}")
    job = Job(name, first, model, settings, options, "training")
    passes = Passes(folder / "passes.json", json.loads(json.dumps(provenance(job, args.seed))))
    if args.resume:
        passes.resume()
        console.print(f"{len(passes.done)} passes are kept from before")

    def run_passes(jobs: Sequence[Job], work: Work) -> None:
        run_jobs(jobs, args.jobs, folder, console, work, executor=executor, keep=passes.add)

    taken = train(args.rounds, make_policy(args.policy, seed=args.seed), args.out, job, passes, run_passes)
    never = next(one.rate for one in taken if one.rule == NEVER)
    own = [one.rate for one in taken if one.rule is None]
    curve = Table("pass", "rule", "output tok/s", "to never", "stops", title="learning curve", title_justify="left")
    for number, one in enumerate(taken, 1):
        rule = "[bold]the policy[/bold]" if one.rule is None else str(one.rule)
        curve.add_row(str(number), rule, f"{one.rate:,.0f}", f"{one.rate / never:.3f}x", f"{one.stops:,d}")
    console.print(curve)
    plots.learning_curve(own, never, folder / "learning_curve.png")
    if not settled(taken):
        console.print(f"[yellow]notice:[/yellow] not settled after {len(own)} rounds; raise --rounds")
    worth, why = learned(taken)
    console.print(
        why if worth else f"[yellow]notice:[/yellow] {why}: do not serve with it, serve with feather as it is"
    )

    frozen = {**options, "policy_file": out, "explore": False}
    base = Job("fcfs", rest, model, settings, options, slo=args.slo)
    jobs = [
        base,
        replace(base, policy="feather-order", options=suited("feather-order", options)),
        replace(base, policy=name, label=f"{name} untrained"),
        replace(base, policy=name, label=f"{name} trained", options=frozen),
    ]
    results = run_jobs(jobs, args.jobs, folder, console, executor=executor)
    title = f"held out: {len(rest.requests):,} requests of {rest.name}, {args.profile}"
    console.print(comparison([r.summary for r in results.values()], title))
    write_json(
        folder / "results.json",
        {
            "version": RESULTS_VERSION,
            **({"slo": args.slo.text} if args.slo is not None else {}),
            **passes.provenance,
            "training": [one._asdict() for one in taken],
            "learned": worth,
            "held_out": {label: asdict(r.summary) for label, r in results.items()},
        },
    )
    told = f"wrote {args.out}; results.json, learning_curve.png and the logs are in {folder}"
    console.print(told, markup=False, soft_wrap=True)
    return 0
