"""Replays of measured server runs: the same requests, policy, attention backend, KV pool and row limit.

    python benchmarks/replay_servers.py docs/measured/servers_*.json --traces TRACES --json docs/measured/replays.json

Takes files of `bench_server.py`. Each workload (W1 .. W7, ``open:...``, ``trace:...``) under each policy and backend is
replayed once, by the calibrated model of the host, so that a second run writes the same; what the server showed is put
beside it, the mean of its rounds. What a replay cannot be is named and left out: steady batches, several GPUs, a
backend or model that the profile does not know, requests that the server was not given the time for.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from finished import read_finished
from rich.console import Console
from server_cases import bench_case
from server_names import server_of, words_of_start

from feather_sglang.adapter.options import FeatherOptions, parse_flag
from feather_sglang.compare.server.config import NO_PREFILL_GRAPHS
from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import replace_text
from feather_sglang.replay.arguments import check_fits, check_sglang, suited
from feather_sglang.replay.jobs import Job
from feather_sglang.replay.model_shape import MODELS
from feather_sglang.replay.processes import run_jobs
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.workloads import WORKLOADS

FIGURES = ("output_tok_s", "ttft_mean", "ttft_p99", "e2e_mean", "tbt_p99_ms")
SINGLE_TOKENS = 1000.0  # a second in a stream of single tokens, up to which their price counts for little
INTERVAL = "--prefill-decode-interval"
SHAPE = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
         "kv_heads": "num_key_value_heads"}  # fmt: skip


def model_name(config: dict[str, Any]) -> str:
    """The built-in shape of a model's config.json."""
    for shape in MODELS.values():
        if all(getattr(shape, ours) == config.get(theirs) for ours, theirs in SHAPE.items()):
            return shape.name
    raise FeatherError(f"no built-in shape for {' '.join(config.get('architectures', ['this model']))}")


def values(flags: Sequence[str]) -> dict[str, str]:
    """What these flags say, the last of each; "on" of one that is named alone."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    named = ((flag, value) for flag, value in pairwise([*words, "--"]) if flag.startswith("--"))
    return {flag: "on" if value.startswith("--") else value for flag, value in named}


def backend(flags: Mapping[str, str]) -> str | None:
    """The decode attention backend that these flags name."""
    return flags.get("--decode-attention-backend", flags.get("--attention-backend"))


def packed_prefill(flags: Mapping[str, str]) -> dict[str, str]:
    """How prefill is packed, where it is."""
    chosen = parse_flag("pat_prefill", flags.get("--feather-pat-prefill", FeatherOptions.pat_prefill))
    return {} if chosen == "off" else {"pat_prefill": chosen}


def own_settings(flags: Mapping[str, str]) -> dict[str, Any]:
    """SGLang's own settings of how prefill and decode alternate, as a replay takes them."""
    found: dict[str, Any] = {}
    if chunk := flags.get("--chunked-prefill-size"):
        found["chunked_prefill"] = int(chunk)
    if interval := flags.get(INTERVAL):
        found["server_flags"] = [INTERVAL, interval]
    return {"settings": found} if found else {}


SEEN = {"output_tok_s": ("tok_s",), "ttft_mean": ("ttft_s", "mean"), "ttft_p99": ("ttft_s", "p99"),
        "e2e_mean": ("e2e_s", "mean"), "tbt_p99_ms": ("tbt_ms", "p99")}  # fmt: skip


def seen(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of a run on a server, the mean of its rounds."""
    figures = {}
    for name, path in SEEN.items():
        values: list[Any] = [record["overall"] for record in records]
        for key in path:
            values = [value[key] for value in values]
        figures[name] = round(mean(values), 4)
    return figures


def runs_of(content: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """What to replay of one server file, each case and server once, and what cannot be, with the reason."""
    runs: list[dict[str, Any]] = []
    left_out: dict[str, None] = {}
    started: dict[str, Any] = {}  # the last server that came up itself: those after it were it, switched
    of_server = {}
    for name, server in content["servers"].items():
        started = server if "kv_tokens" in server else started
        of_server[name] = started
    records: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in content["records"]:
        records.setdefault((record["case"], record["server"]), []).append(record)
    for (case, name), rounds in records.items():
        start, flags = of_server[name], content["servers"][name]["flags"]
        configuration = server_of(name, flags)
        words = words_of_start(content["command"], start)
        given = values([*words, *flags])
        attention = backend(given)
        if case.startswith("decode:"):
            left_out[f"{case}: a steady batch"] = None
        elif case.partition(":")[0].partition("@")[0] not in (*WORKLOADS, "open", "trace"):
            left_out[f"{case}: not of bench_server.py's cases"] = None
        elif any("error" in record or record["overall"]["unfinished"] for record in rounds):
            left_out[f"{case}, {name}: not to its end"] = None
        elif content["stream_interval"] == 1 and seen(rounds)["output_tok_s"] > SINGLE_TOKENS:
            left_out[f"{case}, {name}: too many single tokens streamed, whose price no profile has"] = None
        elif any(flag in words for flag in ("--tp", "--tp-size", "--tensor-parallel-size")):
            left_out[f"{name}: several GPUs"] = None
        elif attention not in load_profile("h200").attention:
            left_out[f"{name}: the profile has no {attention}"] = None
        else:
            runs.append({
                "case": case,
                "attention": attention,
                "policy": configuration.policy,
                "options": configuration.policy_options,
                "model": model_name(content["model"]),
                "seed": content["seed"],
                "arrivals": content["arrivals"],
                "kv_tokens": start["kv_tokens"],
                "max_running": start["max_running"],
                "stream_interval": content["stream_interval"],
                "prefill_graphs": "off" if NO_PREFILL_GRAPHS in words else "on",
                **packed_prefill(given),
                **own_settings(given),
                "sglang": content["machine"]["versions"]["sglang"],
                "gpu": content["machine"]["gpu"],
                "server": seen(rounds),
            })  # fmt: skip
    return runs, list(left_out)


def job_of(run: dict[str, Any], label: str, traces: Path | None = None) -> Job:
    """The replay of one run."""
    trace = bench_case(run["case"], run["seed"], run["arrivals"], traces).trace
    check_fits(trace, run["kv_tokens"], 1)
    model = StepTimeModel(
        load_profile("h200"), MODELS[run["model"]], run["attention"], run["prefill_graphs"] == "on",
        run.get("pat_prefill", "off"),
    )  # fmt: skip
    settings = {name: run[name] for name in ("kv_tokens", "max_running", "stream_interval")} | run.get("settings", {})
    options: dict[str, Any] = {}
    if run["policy"].startswith("feather"):
        options = suited(run["policy"], {"seed": run["seed"], **run["options"]})
        FeatherOptions().updated(options)
    return Job(run["policy"], trace, model, settings, options, label)


def keep(runs: Sequence[dict[str, Any]], replayed: Sequence[dict[str, Any]]) -> None:
    """Give runs the replays that were made of them before."""
    for run in runs:
        for known in replayed:
            if {name: value for name, value in known.items() if name != "replay"} == run:
                run["replay"] = known["replay"]


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, and write what came out."""
    parser = argparse.ArgumentParser(description="Replays of what servers were measured on.")
    parser.add_argument("servers", type=Path, nargs="+", help="files of bench_server.py")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="write the replays there")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="of the files of trace:... cases")
    parser.add_argument("--keep", action="store_true", help="runs that FILE of --json holds are not replayed again")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="replays at a time (2)")
    args = parser.parse_args(argv)
    console = Console(file=sys.stderr)
    runs: list[dict[str, Any]] = []
    for path in args.servers:
        found, left_out = runs_of(read_finished(path, "servers", "model"))
        runs += [run for run in found if run not in runs]
        for reason in left_out:
            console.print(f"{path.name}: left out: {reason}", highlight=False)
    if not runs:
        raise FeatherError("nothing to replay in these files")
    version = check_sglang()
    if args.keep:
        keep(runs, json.loads(args.json.read_text())["runs"])
    asked = [run for run in runs if "replay" not in run]
    jobs = [
        job_of(run, f"{number} {run['attention']} {run['policy']}", args.traces) for number, run in enumerate(asked)
    ]
    with tempfile.TemporaryDirectory() as logs:
        results = run_jobs(jobs, args.jobs, Path(logs), console)
    for run, result in zip(asked, results.values(), strict=True):
        summary = asdict(result.summary)
        run["replay"] = {name: round(summary[name], 4) for name in FIGURES if summary.get(name) is not None}
    typed = [word for word in (sys.argv[1:] if argv is None else argv) if word != "--keep"]
    command = ["python", "benchmarks/replay_servers.py", *typed]
    head = {
        "version": 1,
        "command": shlex.join(command),
        "profile": "h200",
        "sglang": version,
        "python": platform.python_version(),
    }
    lines = ",\n".join(json.dumps(run) for run in runs)
    replace_text(args.json, f'{json.dumps(head)[:-1]}, "runs": [\n{lines}\n]}}\n', "results")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FeatherError as error:
        sys.exit(f"replay_servers: {error}")
