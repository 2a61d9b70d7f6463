"""Cost of forming batches: feather's processor time and Python calls for each request, beside fcfs's.

    python benchmarks/bench_scheduler.py [--point GROUPS PREFIX RATE OUTPUT ...] [--rounds 8] [--calls] [--json FILE]

Replays bursts of short prompts, in which a scheduler's own time counts most. Each policy has a process, and they replay
in turn: fcfs, feather, fcfs, feather; the least of all rounds is compared. Measured is what SGLang's scheduler does
between steps, without the replay's clients and GPU: it takes requests in, forms batches and processes results. How far
times vary depends on the machine; ``--calls`` counts Python calls instead, the same in each run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import feather_sglang
from feather_sglang.replay.jobs import Job, engine_of
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.workloads import shared_prefix

POLICIES = ("fcfs", "feather")
ARRIVE, FORM, RESULT = PARTS = ("process_input_requests", "get_next_batch_to_run", "process_batch_result")
PACKAGE = str(Path(feather_sglang.__file__).parent)
SCHEDULER = tuple(f"{PACKAGE}/{part}" for part in ("scheduling/", "adapter/scheduler/", "adapter/wrapping.py"))


class Point(NamedTuple):
    """A workload: prefixes, their tokens, requests a second, and tokens of each output."""

    groups: int
    prefix: int
    rate: int
    output: int

    def __str__(self) -> str:
        return f"{self.groups} x {self.prefix} tokens, {self.rate:,}/s, {self.output} output tokens"


SWEEP = (
    Point(12, 255, 20_000, 10),
    Point(5, 20, 4_000, 10),
    Point(5, 255, 100_000, 60),
    Point(40, 100, 20_000, 30),
    Point(200, 20, 100_000, 10),
    Point(200, 255, 4_000, 60),
)


@contextmanager
def replayed(policy: str, point: Point, requests: int, running: int) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A server in this process (once per process), and what replays the workload once."""
    model, profile = load_model("qwen3-8b"), load_profile("h200")
    groups, prefix, rate, output = point
    trace = shared_prefix(groups=groups, prefix_tokens=prefix, requests=requests, rate=rate, output_tokens=output)
    settings = {"kv_tokens": profile.kv_tokens(model), "max_running": running}
    with engine_of(Job(policy, trace, StepTimeModel(profile, model, "pat"), settings, {})) as engine:
        yield engine.scheduler, lambda: engine.run(trace)


def around(scheduler: Any, enter: Callable[[], None], leave: Callable[[str], None]) -> None:
    """Call `enter` before each part of the scheduler's own work, and `leave` with its name after it."""

    def wrap(name: str, original: Callable[..., Any]) -> None:
        def run(*args: Any, **kwargs: Any) -> Any:
            enter()
            try:
                return original(*args, **kwargs)
            finally:
                leave(name)

        setattr(scheduler, name, run)

    for name in PARTS:
        wrap(name, getattr(scheduler, name))


def times(policy: str, point: Point, requests: int, running: int) -> Iterator[dict[str, float]]:
    """Microseconds of processor time for each request, by part, of one replay after the other."""
    begun, spent = 0.0, dict.fromkeys(PARTS, 0.0)

    def enter() -> None:
        nonlocal begun
        begun = time.thread_time()

    def leave(name: str) -> None:
        spent[name] += (time.thread_time() - begun) / requests * 1e6

    with replayed(policy, point, requests, running) as (scheduler, replay):
        around(scheduler, enter, leave)
        while True:
            replay()
            yield dict(spent)
            spent.update(dict.fromkeys(PARTS, 0.0))


def calls(policy: str, point: Point, requests: int, running: int) -> dict[str, float]:
    """Python calls for each request: all of them, and those that are the policy's own."""
    counts: dict[CodeType, int] = {}

    def count(frame: Any, event: str, _argument: Any) -> None:
        if event == "call":
            counts[frame.f_code] = counts.get(frame.f_code, 0) + 1

    with replayed(policy, point, requests, running) as (scheduler, replay):
        around(scheduler, lambda: sys.setprofile(count), lambda name: sys.setprofile(None))
        replay()
    made = {code: number / requests for code, number in counts.items() if code.co_filename != __file__}
    own = sum(number for code, number in made.items() if code.co_filename.startswith(SCHEDULER))
    replays = sum(number for code, number in made.items() if code.co_filename.startswith(PACKAGE)) - own
    return {"all": sum(made.values()) - replays, "own": own}


def alone(options: argparse.Namespace) -> None:
    """One policy in this process: its calls, or its times whenever a line is read."""
    policy, point = options.alone, Point(*options.point[0])
    if options.calls:
        print(json.dumps(calls(policy, point, options.requests, options.running)))
        return
    measured = times(policy, point, options.requests, options.running)
    for _ in sys.stdin:
        print(json.dumps(next(measured)), flush=True)


def compared(point: Point, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The least figures of each policy, measured in turn."""
    command = [sys.executable, __file__, "--requests", str(options.requests), "--running", str(options.running)]
    command += ["--point", *map(str, point), *(["--calls"] if options.calls else [])]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    processes = {policy: subprocess.Popen([*command, "--alone", policy], text=True, **pipes) for policy in POLICIES}
    least: dict[str, dict[str, float]] = {}
    for _ in range(1 if options.calls else options.rounds):
        for policy, process in processes.items():
            if not options.calls:
                process.stdin.write("\n")
                process.stdin.flush()
            while not (line := process.stdout.readline()).startswith("{"):  # SGLang prints, too
                if not line:
                    raise SystemExit(f"{policy}, {point}: the replay failed; run it by --alone {policy} to see why")
            found = json.loads(line)
            least[policy] = {name: min(value, least.get(policy, found)[name]) for name, value in found.items()}
    for process in processes.values():
        process.communicate()
    return least


def main() -> int:
    """Measure each point, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", nargs=4, type=int, action="append", metavar=("GROUPS", "PREFIX", "RATE", "OUTPUT"))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--running", type=int, default=500, help="requests that may run at a time (%(default)s)")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--calls", action="store_true", help="count Python calls instead of measuring times")
    parser.add_argument("--alone", choices=POLICIES, help="measure one policy in this process")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to it")
    options = parser.parse_args()
    if options.alone:
        alone(options)
        return 0
    results = {}
    unit = "calls a request" if options.calls else "us a request"
    print(f"{unit:55} {'fcfs':>7} {'feather':>8} {'ratio':>6}   {'own' if options.calls else 'forming alone'}")
    for point in [Point(*given) for given in options.point or SWEEP]:
        found = results[str(point)] = compared(point, options)
        fcfs, feather = (found[policy] for policy in POLICIES)
        one, other = (row["all"] if options.calls else sum(row.values()) for row in (fcfs, feather))
        part = f"{feather['own']:.0f}" if options.calls else f"{feather[FORM] / fcfs[FORM]:.2f}"
        print(f"{point!s:55} {one:7.0f} {other:8.0f} {other / one:6.2f}   {part}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
