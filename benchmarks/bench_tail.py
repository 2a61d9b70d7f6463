"""Time to the first token under every policy, on slices of two public traces, by replay.

    python benchmarks/bench_tail.py TRACES [--slices report|tune|NAMES] [--policies LIST] [--json FILE] [--known FILE]
    python benchmarks/bench_tail.py --show FILE

TRACES is a folder with Mooncake's ``mooncake_conversation.jsonl`` and ``mooncake_synthetic_first1800.jsonl``. A slice
is replayed at a share (*load*) of the rate that fcfs sustains on it, which is measured first, with all of its requests
at once. Constants were chosen on the slices of ``tune``; ``report`` shares no request with them. The tables are
Markdown; docs/lab/tail.md has those of docs/measured/tail.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import write_json
from feather_sglang.replay.arguments import check_fits, suited
from feather_sglang.replay.jobs import Job
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.processes import run_jobs
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import Trace, load_trace

STOCK = ("fcfs", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first")  # SGLang's own
# Not shortest-prefill-first: SGLang 0.5.23 runs out of memory under it on one of the slices, and ends.
POLICIES = (*STOCK[:4], "k-lpm", "feather")
FIGURES = ("ttft_mean", "ttft_p99", "max_wait", "output_tok_s", "cache_hit", "scheduler_share")
CONVERSATION, SYNTHETIC = "mooncake_conversation", "mooncake_synthetic_first1800"

Rows = dict[str, dict[str, Any]]  # slice -> "rate_scale", and policy -> figures


@dataclass(frozen=True)
class Slice:
    """Requests `first` to `first + count` of a trace, at `load` times the load that fcfs sustains, with `kv_tokens`."""

    trace: str
    first: int
    count: int
    load: float
    kv_tokens: int

    @property
    def name(self) -> str:
        kind = self.trace.split("_")[1]
        return f"{kind} {self.first}, load {self.load:g}, {self.kv_tokens // 1000}K"


REPORT = (
    Slice(CONVERSATION, 1000, 500, 0.5, 200_000),
    Slice(CONVERSATION, 1000, 500, 1.2, 824_000),
    Slice(CONVERSATION, 4000, 500, 0.8, 500_000),
    Slice(CONVERSATION, 4000, 500, 1.0, 200_000),
    Slice(CONVERSATION, 7000, 500, 0.8, 824_000),
    Slice(CONVERSATION, 7000, 500, 1.0, 500_000),
    Slice(CONVERSATION, 10000, 500, 1.2, 200_000),
    Slice(CONVERSATION, 10000, 500, 1.2, 500_000),
    Slice(SYNTHETIC, 0, 400, 0.8, 500_000),
    Slice(SYNTHETIC, 0, 400, 1.0, 824_000),
    Slice(SYNTHETIC, 800, 400, 0.5, 824_000),
    Slice(SYNTHETIC, 800, 400, 1.2, 500_000),
    Slice(SYNTHETIC, 1500, 300, 0.8, 200_000),
    Slice(SYNTHETIC, 1500, 300, 1.0, 200_000),
)
TUNE = (
    Slice(CONVERSATION, 0, 500, 0.8, 200_000),
    Slice(CONVERSATION, 2500, 500, 1.0, 500_000),
    Slice(CONVERSATION, 5500, 500, 1.2, 200_000),
    Slice(CONVERSATION, 8500, 500, 0.5, 500_000),
    Slice(CONVERSATION, 8500, 500, 1.0, 824_000),
    Slice(SYNTHETIC, 400, 400, 0.8, 500_000),
    Slice(SYNTHETIC, 400, 400, 1.2, 200_000),
    Slice(SYNTHETIC, 1200, 300, 1.0, 500_000),
)


def cut(trace: Trace, part: Slice) -> Trace:
    """The slice's requests, from time 0."""
    kept = trace.part(part.first, part.count)
    if len(kept.requests) < part.count:
        raise FeatherError(f"{part.name}: the trace ends after {len(trace.requests)} requests")
    return Trace(part.name, kept.block_size, kept.requests)


def read(path: Path) -> Any:
    """What `main` wrote; a mistake raises ``FeatherError``."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise FeatherError(f"{path}: cannot read: {error.strerror}") from None
    except ValueError as error:
        raise FeatherError(f"{path}: not JSON: {error}") from None


def measure(parts: Sequence[Slice], policies: Sequence[str], args: argparse.Namespace, rows: Rows) -> None:
    """Replay what `rows` lacks, and put it there."""
    options: dict[str, Any] = {}
    for pair in args.option:
        key, _, value = pair.partition("=")
        options[key] = json.loads(value)
    FeatherOptions().updated(options)
    traces = {name: load_trace(args.traces / f"{name}.jsonl") for name in {part.trace for part in parts}}
    slices = {part: cut(traces[part.trace], part) for part in parts}
    model = StepTimeModel(load_profile("h200"), load_model("qwen3-8b"), "pat")

    def job(part: Slice, rate_scale: float, policy: str, label: str) -> Job:
        own = suited(policy, options) if policy.startswith("feather") else {}
        settings = {"kv_tokens": part.kv_tokens, "scheduler_cost": "model"}
        return Job(policy, slices[part].scaled(rate_scale), model, settings, own, label)

    def run(jobs: list[Job]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as logs:
            return run_jobs(jobs, args.jobs, Path(logs), Console(file=sys.stderr))

    for part, trace in slices.items():
        check_fits(trace, part.kv_tokens, 1)
    new = [part for part in parts if part.name not in rows]
    for name, result in run([job(part, 1e6, "fcfs", part.name) for part in new]).items():
        part = next(part for part in new if part.name == name)
        rows[name] = {"rate_scale": part.load * slices[part].requests[-1].arrival_s / result.summary.makespan}
    jobs = {
        f"{part.name} {policy}": (part, policy)
        for part in parts
        for policy in policies
        if policy not in rows[part.name]
    }
    results = run([job(part, rows[part.name]["rate_scale"], policy, label) for label, (part, policy) in jobs.items()])
    for label, (part, policy) in jobs.items():
        summary = asdict(results[label].summary)
        rows[part.name][policy] = {figure: round(summary[figure], 4) for figure in FIGURES}


def tables(rows: Rows) -> str:
    """What docs/lab/tail.md shows of the results: each slice, and how the policies compare over all."""
    policies = [policy for policy in (*STOCK, *POLICIES[4:]) if all(policy in row for row in rows.values())]
    lines = ["| slice | " + " | ".join(policies) + " |", "|---" * (len(policies) + 1) + "|"]
    for name, row in rows.items():
        cells = (f"{row[p]['ttft_mean']:.2f} / {row[p]['ttft_p99']:.1f} / {row[p]['max_wait']:.1f}" for p in policies)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| ratio | " + " | ".join(policies) + " |", "|---" * (len(policies) + 1) + "|"]
    stock = [policy for policy in policies if policy in STOCK]
    for what, ratio in RATIOS.items():
        cells = []
        for policy in policies:
            values = [ratio(row, policy) for row in rows.values()]
            cells.append(f"{geometric_mean(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        what = f"tok/s to the better of {' and '.join(stock)}" if ratio is _to_best_throughput else what
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def server_table(path: Path) -> str:
    """What docs/lab/tail.md shows of a slice on a real server, beside its replay."""
    results = read(path)
    versions = results["versions"]
    lines = [
        f"The slice has {results['slice']}. One server ran it four times, in the order {', '.join(results['order'])}, "
        f"on an {results['gpu']} with dummy weights and SGLang {versions['sglang']}. The replay runs SGLang "
        f"{results['replay_sglang']}.",
        "",
        "| run | TTFT mean, s | TTFT p50, s | TTFT p99, s | longest wait, s | E2E mean, s | output tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    figures = ("ttft_mean", "ttft_p50", "ttft_p99", "max_wait", "e2e_mean", "output_tok_s")
    for place in sorted(range(len(results["server"])), key=lambda place: results["server"][place]["policy"]):
        run = results["server"][place]
        cells = " | ".join(f"{run[figure]:.2f}" for figure in figures[:-1])
        lines.append(f"| server, {run['policy']}, run {place + 1} | {cells} | {run['output_tok_s']:.0f} |")
    for policy, run in results["replay"].items():
        cells = " | ".join(f"{run[figure]:.2f}" for figure in figures[:-1])
        lines.append(f"| replay, {policy} | {cells} | {run['output_tok_s']:.0f} |")
    return "\n".join([*lines, "", "```", results["command"], results["replay_command"], "```"])


def _to(figure: str, base: str) -> Callable[[dict[str, Any], str], float]:
    return lambda row, policy: row[policy][figure] / row[base][figure]


def _to_better_p99(row: dict[str, Any], policy: str) -> float:
    return row[policy]["ttft_p99"] / min(row["fcfs"]["ttft_p99"], row["hrrn"]["ttft_p99"])


def _to_best_throughput(row: dict[str, Any], policy: str) -> float:
    return row[policy]["output_tok_s"] / max(row[stock]["output_tok_s"] for stock in STOCK if stock in row)


RATIOS: dict[str, Callable[[dict[str, Any], str], float]] = {
    "mean TTFT to hrrn's": _to("ttft_mean", "hrrn"),
    "p99 TTFT to fcfs's": _to("ttft_p99", "fcfs"),
    "p99 TTFT to the lower of fcfs's and hrrn's": _to_better_p99,
    "longest wait to fcfs's": _to("max_wait", "fcfs"),
    "tok/s to the best of SGLang's": _to_best_throughput,
}


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> int:
    """Measure and print, or print what was measured."""
    parser = argparse.ArgumentParser(description="TTFT on slices of public traces under all policies, by replay.")
    parser.add_argument("traces", type=Path, nargs="?", help="folder of the two traces")
    parser.add_argument("--slices", default="report", help="report, tune, or names separated by semicolons")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--option", action="append", default=[], metavar="KEY=JSON", help="one of FEATHER_OPTIONS")
    parser.add_argument("--known", type=Path, metavar="FILE", help="results to complete: nothing in there is replayed")
    parser.add_argument("--jobs", type=int, default=2, help="replays at a time (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of these results, replay nothing")
    args = parser.parse_args()
    if args.show:
        print(tables(read(args.show)))
        return 0
    if args.traces is None:
        parser.error("name the folder of the traces, or --show FILE")
    parts = {"report": REPORT, "tune": TUNE}.get(args.slices)
    if parts is None:
        parts = tuple(part for part in REPORT + TUNE if part.name in args.slices.split(";"))
    rows: Rows = read(args.known) if args.known else {}
    measure(parts, args.policies.split(","), args, rows)
    if args.json:
        write_json(args.json, rows)
    print(tables({part.name: rows[part.name] for part in parts}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FeatherError as error:
        sys.exit(f"bench_tail: {error}")
