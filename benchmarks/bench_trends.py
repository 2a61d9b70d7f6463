"""The paper's trends (section 5.2) on its card, by replay: which come out, and which do not.

One row per workload: a policy is trained on the first half of it and reported on the second, beside fcfs and beside
prefix row order alone. Run: ``python benchmarks/bench_trends.py [--requests 3000] [--out trends.json]``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

CARD = ["--profile", "rtx6000ada", "--kv-tokens", "200000", "--feather-max-wait", "600"]
CARD += ["--feather-max-overtaking", "inf", "--feather-pace", "0"]
WORKLOADS = {
    "default: 100/s, 5 groups x 5K, 200 tokens": [],
    "5/s": ["--rate", "5"],
    "2 groups": ["--groups", "2"],
    "20 groups": ["--groups", "20"],
    "50 groups (prefixes exceed the KV)": ["--groups", "50"],
    "100 groups": ["--groups", "100"],
    "20 output tokens": ["--output-tokens", "20"],
    "1K prefix": ["--prefix-tokens", "1000"],
    "10K prefix": ["--prefix-tokens", "10000"],
    "no sharing": ["--no-sharing"],
    "default on an H200": ["--profile", "h200"],
}


def measure(flags: list[str], requests: int, folder: Path) -> dict[str, dict[str, float]]:
    """Held-out figures of one workload."""
    out = folder / "policy.json"
    command = [sys.executable, "-m", "feather_sglang.cli", "train", "--policy", "bandit"]
    command += ["--requests", str(requests), "--out", str(out), *CARD, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return json.loads((folder / "policy-training" / "results.json").read_text())["held_out"]


def main() -> None:
    """Print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000, help="half to train on, half to report (3000)")
    parser.add_argument("--only", help="workloads whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("trends.json"))
    args = parser.parse_args()
    table = Table("workload", "fcfs tok/s", "feather-order", "bandit, trained", "batch: fcfs", "bandit", "p99 TTFT")
    figures = {}
    for name, flags in WORKLOADS.items():
        if args.only and args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            held_out = measure(flags, args.requests, Path(folder))
        fcfs, order, trained = (held_out[run] for run in ("fcfs", "feather-order", "feather-bandit trained"))
        figures[name] = held_out
        base = fcfs["output_tok_s"]
        table.add_row(
            name,
            f"{base:,.0f}",
            f"{order['output_tok_s'] / base:.2f}x",
            f"{trained['output_tok_s'] / base:.2f}x",
            f"{fcfs['mean_batch']:.0f}",
            f"{trained['mean_batch']:.0f}",
            f"{trained['ttft_p99'] / fcfs['ttft_p99']:.2f}x",
        )
        print(f"{name}: done", file=sys.stderr, flush=True)
    args.out.write_text(json.dumps(figures, indent=1))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
