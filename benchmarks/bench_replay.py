"""Time and memory of a long replay: 12,000 requests of a trace, four policies, at most 10 minutes and 4 GiB.

Run: ``python benchmarks/bench_replay.py TRACE [feather ab's arguments]``; exits with 1 if either bound is missed.
Memory is the sum over all processes of the replay of their proportional set size, sampled twice a second.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SECONDS, GIB = 600, 4.0


def memory_gib(session: int) -> float:
    """GiB that the processes of a session hold."""
    kib = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == session:
                lines = (folder / "smaps_rollup").read_text().splitlines()
                kib += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue  # it has just ended
    return kib / 2**20


def main() -> int:
    """Replay, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--requests", default="12000")
    parser.add_argument("--policies", default="fcfs,lpm,feather-order,feather-bandit")
    args, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "feather_sglang.cli", "ab", args.trace, "--requests", args.requests]
        command += ["--policies", args.policies, "--out", out, *rest]
        begun, most = time.monotonic(), 0.0
        process = subprocess.Popen(command, start_new_session=True)
        while process.poll() is None:
            most = max(most, memory_gib(process.pid))
            time.sleep(0.5)
        seconds = time.monotonic() - begun
    print(f"{args.requests} requests under {args.policies}:")
    print(f"{seconds:.0f} s (at most {SECONDS}), {most:.1f} GiB (at most {GIB:.1f})")
    return int(process.returncode != 0 or seconds > SECONDS or most > GIB)


if __name__ == "__main__":
    sys.exit(main())
