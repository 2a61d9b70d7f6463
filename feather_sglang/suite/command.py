"""``feather suite``: its flags, what they run, and where the report goes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.compare.policies import available, named
from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import make_folder, replace_text
from feather_sglang.replay import server_flags
from feather_sglang.replay.arguments import (
    add_scheduler_cost,
    add_server_flags,
    add_slo,
    check_pages,
    check_sglang,
    check_sizes,
    common_options,
)
from feather_sglang.replay.given import check_positive
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.on_ray import add_ray, executor_of
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.scheduling.policy_names import FEATHER, PROMISING, REPLAYED, STOCK
from feather_sglang.suite.cases import chosen, patterns
from feather_sglang.suite.report import page, tables
from feather_sglang.suite.results_file import read
from feather_sglang.suite.runner import Suite, Terms

EVERY = (*STOCK, *REPLAYED, *(name for name in FEATHER if name != "feather-bandit"), PROMISING)  # feather is that one
# Of all cases' servers, by --server-flags.
SERVED = ("max_running", "chunked_prefill", "page_size", "stream_interval", "prefill_graphs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``feather suite``."""
    parser.add_argument("--short", action="store_true", help="a short form: half an hour on two cores")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder with Mooncake's two trace files")
    parser.add_argument("--cases", default="*", metavar="NAMES", help="kinds of traffic, with commas; * is any text")
    parser.add_argument("--policies", help="policies, with commas (default: all of SGLang, feather and the replay)")
    add_slo(parser, "mooncake")
    parser.add_argument("--profile", default="h200", help="hardware profile (%(default)s)")
    parser.add_argument("--model", default="qwen3-8b", help="model whose steps are timed (%(default)s)")
    parser.add_argument("--attention", default="pat", help="decode kernel of the profile (%(default)s)")
    add_server_flags(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the generated workload and of exploration")
    add_scheduler_cost(parser)
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="policies replayed at a time (%(default)s)")
    add_ray(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("feather-suite"), help="folder of results; those up to date are kept"
    )
    parser.add_argument("--show", type=Path, metavar="FILE", help="run nothing and report these results")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the report as Markdown too")


def run(args: argparse.Namespace) -> int:
    """Run what is missing, write ``suite.json``, print the report; 1 if a cell has no figures."""
    console = Console(highlight=False)
    results = read(args.show) if args.show else measure(args, console)
    for table in tables(results):
        console.print(table)
    if args.page:
        command = f"feather suite --show {args.show or args.out / 'suite.json'} --page {args.page}"
        replace_text(args.page, page(results, command), "page")
    cells = [cell for case in results["cases"].values() for cell in case["policies"].values()]
    return int(not cells or any("error" in cell for cell in cells))


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the suite that the flags ask for."""
    check_positive(args, "jobs")
    executor = executor_of(args.ray)
    if args.traces is not None and not args.traces.is_dir():
        raise FeatherError(f"--traces {args.traces}: no such folder")
    names = patterns(args.cases)
    if not names:
        raise FeatherError(f"--cases {args.cases}: name at least one; * stands for every kind")
    cases = chosen(args.short, names)
    policies = policies_of(args.policies)
    sglang = check_sglang(policies)
    flags = server_flags.take(args, add_arguments, SERVED)
    server = {name: flags.own[name] for name in SERVED if name in flags.own} | flags.settings()
    check_sizes(argparse.Namespace(**server))
    check_pages(server.get("page_size", 1))
    graphs = server.get("prefill_graphs") != "off"
    profile = load_profile(args.profile)
    if args.scheduler_cost != "off":
        profile.known_host()
    usual = {**FeatherOptions().of_policy(), "seed": args.seed}
    terms = Terms(
        StepTimeModel(profile, load_model(args.model), args.attention, graphs),
        args.slo,
        sglang,
        args.traces,
        args.seed,
        args.short,
        args.scheduler_cost,
        server,
        {name: value for name, value in common_options(args).items() if value != usual[name]},
    )
    out = make_folder(args.out, "suite.json")

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    for notice in flags.notices():
        say(notice)
    results = Suite(cases, policies, terms, out, say).run(args.jobs, console, executor)
    replace_text(out / "suite.json", json.dumps(results, separators=(",", ":")) + "\n", "results")
    say(f"results are in {out / 'suite.json'}")
    return results


def policies_of(text: str | None) -> list[str]:
    """The policies that ``--policies`` names, fcfs first: ratios are to it."""
    if text is None:
        return available(EVERY)
    return list(dict.fromkeys(["fcfs", *named(text, (*STOCK, *REPLAYED, *FEATHER, PROMISING))]))
