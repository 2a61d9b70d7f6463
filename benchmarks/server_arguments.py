"""The command line of ``bench_server.py``, and the run that it asks for."""

from __future__ import annotations

import argparse
import json
import math
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from server_cases import bench_case, check_fit
from server_driver import BenchTerms
from server_file import BenchFile
from server_names import COMMON_FLAGS, parse_server

from feather_sglang.compare.server.cases import vocabulary_of
from feather_sglang.compare.server.config import POLICY_FLAG, switch_flags
from feather_sglang.errors import FeatherError

RESERVE = 5.0  # seconds of the time limit that are kept for the end


def arguments(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="of the files of trace:... cases")
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
        options.cases = [
            bench_case(text, options.seed, options.arrivals, options.traces) for group in options.case for text in group
        ]
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


def bench(options: argparse.Namespace) -> BenchFile:
    """The run that these flags ask for; nothing is started yet."""
    key = secrets.token_hex(16) if options.one_server else None
    command = [options.python, "-m", "sglang.launch_server", "--model-path", str(options.model), *options.for_all]
    logs = options.logs or Path(tempfile.mkdtemp(prefix="bench_server_"))
    logs.mkdir(parents=True, exist_ok=True)
    terms = BenchTerms(
        command=[*command, *(switch_flags(key) if key else [])],
        vocabulary=vocabulary_of(str(options.model)),
        logs=logs,
        check=lambda case, server: check_fit(case, server.kv_tokens, server.max_running),
        key=key,
        rounds=options.repeat,
        together=options.overlap_starts,
        switching=options.one_server,
        stream_interval=options.stream_interval,
        time_limit=options.time_limit - RESERVE,
        case_limit=options.case_limit,
        start_timeout=options.start_timeout,
    )
    facts = {
        "model": json.loads((options.model / "config.json").read_text()),
        "seed": options.seed,
        "arrivals": options.arrivals,
        "stream_interval": options.stream_interval,
        "compare_tokens": options.compare_tokens,
    }
    return BenchFile(options.servers, options.cases, terms, options.json, facts, options.python)
