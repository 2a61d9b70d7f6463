"""Check whether the ranks of a tensor-parallel server decide alike under load, and whether it hangs or leaks.

    PYTHONPATH=.:kernels python benchmarks/checks/check_ranks.py --model MODEL                  # two GPUs, 10 minutes
    PYTHONPATH=.:kernels python benchmarks/checks/check_ranks.py --model MODEL --phase short    # 50,000 requests alone
    PYTHONPATH=.:kernels python benchmarks/checks/check_ranks.py --model MODEL \\
        --device cpu --requests 1000 --seconds 120

MODEL is a folder with a config.json; weights are dummies. One server runs under a feather policy, each rank with a log
of its decisions (`FEATHER_DECISION_LOG`), through two phases of load: so many short requests, as fast as a bounded
number of open ones lets them; then, for the rest of the time, requests that arrive at random, most with prefixes that
together exceed the KV pool, so that requests wait, are retracted, and find their prefixes evicted. In both some are
aborted, and some clients hang up. ``ranks_load`` has the details.

Right is: every request ends, answered in full or given up by us; the schedulers' memory does not grow by more than
``ALLOWED_BYTES`` with each short request; afterwards the server is idle and holds nothing; no policy has failed and the
log has no traceback; and the ranks' logs are equal, line by line.

Exit status: 0 if everything is right, 1 if something is wrong, 3 if nothing is wrong but time was too short.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import ranks_memory
from decision_logs import Comparison, compare
from ranks_load import Jobs, Load
from ranks_memory import SCHEDULER, Growth, Sample

from feather_sglang.adapter.scheduler.decision_log import DECISION_LOG
from feather_sglang.compare.server.client import HttpError, allow_open_files, call
from feather_sglang.compare.server.config import BACKENDS, NO_PREFILL_GRAPHS, ServerConfig, shown, switch_flags
from feather_sglang.compare.server.machine import machine
from feather_sglang.compare.server.process import Server, ServerFailed, environment_with
from feather_sglang.compare.server.watch import retracted
from feather_sglang.errors import FeatherError
from feather_sglang.report.tables import grid
from feather_sglang.scheduling.policy_names import FEATHER, STOCK

ALLOWED_BYTES = 1024  # that a scheduler may grow by with each short request after the warm-up
SLACK_KIB = 16 * 1024  # and once: heaps are not returned page by page
WARM_UP = 0.2  # of the short requests
SAMPLE_SECONDS = 3.0
SAMPLES_SHOWN = 24
RESERVE = 60.0  # seconds of --time-limit that are kept for the open requests to end, and for the checks
IDLE_SECONDS = 60.0  # in which the server must be idle after the last request
FAILURES = (ServerFailed, FeatherError, HttpError, OSError, EOFError, asyncio.TimeoutError)
COMMON = "--load-format dummy --skip-tokenizer-init --sampling-backend pytorch --log-level-http warning"
DEVICES = {
    "cuda": "--context-length 32768 --cuda-graph-max-bs-decode 512 --mem-fraction-static 0.8 "
    f"{NO_PREFILL_GRAPHS} --disable-custom-all-reduce",
    "cpu": "--device cpu --dtype float32 --disable-cuda-graph --mem-fraction-static 0.3 --grammar-backend llguidance "
    "--sleep-on-idle",
}
# Estimating one token of output a request admits far too many, so the pool runs full and SGLang retracts.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "NCCL_NVLS_ENABLE": "0", "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1"}
ON_CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "FEATHER_PAT_REFERENCE": "1",
}
CPU_BACKENDS = {
    "torch_native": "--attention-backend torch_native",
    "pat": "--attention-backend torch_native --decode-attention-backend pat",
}
# By device: attention, KV tokens, most running requests, most open short requests, their number, arrivals a second.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"attention": "pat", "kv_tokens": 200_000, "running": 500, "open": 1500, "requests": 50_000, "rate": 50.0},
    "cpu": {
        "attention": "torch_native", "kv_tokens": 12_000, "running": 32, "open": 100, "requests": 1000, "rate": 8.0,
    },
}  # fmt: skip


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    gpu, cpu = DEFAULTS["cuda"], DEFAULTS["cpu"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with the model's config.json")
    parser.add_argument("--device", choices=tuple(DEVICES), default="cuda")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="of tensor parallelism (default: 2)")
    parser.add_argument("--policy", choices=(*FEATHER, *STOCK), default="feather", help="a stock one has no decisions "
                        "to compare, but memory (default: %(default)s)")  # fmt: skip
    parser.add_argument("--attention", choices=tuple(BACKENDS | CPU_BACKENDS), help="(default: pat; on a CPU "
                        "torch_native)")  # fmt: skip
    parser.add_argument("--phase", choices=("both", "short", "mixed"), default="both")
    parser.add_argument("--requests", type=int, metavar="N", help=f"short ones (default: {gpu['requests']}; on a CPU "
                        f"{cpu['requests']})")  # fmt: skip
    parser.add_argument("--open", type=int, metavar="N", help=f"short requests at a time (default: {gpu['open']}; on a "
                        f"CPU {cpu['open']})")  # fmt: skip
    parser.add_argument("--rate", type=float, help=f"arrivals a second of the mixed load (default: {gpu['rate']:g}; on "
                        f"a CPU {cpu['rate']:g}); they pause while twice --running are open")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=600.0, help="of load: both phases, or the mixed one alone; "
                        "short requests have no end but their number (default: %(default)g)")  # fmt: skip
    parser.add_argument("--kv-tokens", type=int, help=f"of the KV pool (default: {gpu['kv_tokens']}; on a CPU "
                        f"{cpu['kv_tokens']})")  # fmt: skip
    parser.add_argument("--running", type=int, help=f"most running requests (default: {gpu['running']}; on a CPU "
                        f"{cpu['running']})")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flags", default="", help="further flags of the server; they overrule the others")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds (default: %(default)g)")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds for everything: the load ends "
                        f"{RESERVE:g} s before")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--logs", type=Path, help="folder for the server's output and the ranks' decisions; it must "
                        "hold none yet (default: a temporary one)")  # fmt: skip
    options = parser.parse_args(argv)
    for name, value in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    backends = CPU_BACKENDS if options.device == "cpu" else BACKENDS
    if options.attention not in backends:
        parser.error(f"--attention: with --device {options.device} one of {', '.join(backends)}")
    if min(options.ranks, options.requests, options.open, options.kv_tokens, options.running) < 1 or options.rate <= 0:
        parser.error("--ranks, --requests, --open, --rate, --kv-tokens, --running: more than 0")
    try:
        config = json.loads((options.model / "config.json").read_bytes())
        options.vocabulary = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        parser.error(f"--model: {options.model}/config.json names no vocab_size ({type(error).__name__})")
    # Servers find the plugin by its entry point, which a folder on PYTHONPATH alone does not have.
    if not any(point.name == "feather" for point in metadata.entry_points(group="sglang.srt.plugins")):
        parser.error("feather-sglang is not installed here: pip install --no-deps .")
    if options.logs is not None and any(options.logs.glob("decisions/*.log")):
        parser.error(f"--logs {options.logs}: has the decisions of an earlier run; name another folder")
    return options


class Check:
    """One run of the check: the server, its load, and the findings so far."""

    def __init__(self, options: argparse.Namespace, logs: Path) -> None:
        self.options, self.logs = options, logs
        self.begun = time.monotonic()
        self.key = secrets.token_hex(16)
        self.stock = options.policy in STOCK
        self.phase = "mixed" if options.phase == "mixed" else "short"
        self.up_at = 0  # bytes of output
        self.samples: list[Sample] = []
        self.problems: list[str] = []
        self.cut: list[str] = []  # what time did not allow
        self.result: dict[str, Any] = {}

    def run(self) -> int:
        """Everything; the exit status."""
        server = self.launch()
        try:
            server.wait(time.monotonic() + min(self.options.start_timeout, self.remaining()))
            self.up_at = server.printed_bytes()
            self.say(f"up after {server.start_seconds:.0f} s with {server.kv_tokens} KV tokens")
            asyncio.run(self.drive(server))
            server.check()
            self.look_at(server)
        except FAILURES as problem:
            self.problems.append(f"{type(problem).__name__}: {problem}"[:300])
        finally:
            failed = bool(self.problems)
            server.stop()
        self.judge_log(server)
        if not self.stock:
            self.judge_decisions(failed)
        self.judge_memory()
        if self.problems:
            print("\n".join(f"    {line[:200]}" for line in server.tail(25)))
        print(table(self.samples))
        for line in self.summary():
            print(line)
        self.write(server)
        for words in self.problems:
            print(f"WRONG: {words}")
        for words in self.cut:
            print(f"not run: {words}")
        self.say("wrong" if self.problems else "not all was run" if self.cut else "right")
        return 1 if self.problems else 3 if self.cut else 0

    def launch(self) -> Server:
        """Start the server."""
        options = self.options
        backends = CPU_BACKENDS if options.device == "cpu" else BACKENDS
        flags = [*shlex.split(COMMON), *shlex.split(DEVICES[options.device]), *backends[options.attention].split()]
        flags += ["--tp", str(options.ranks), "--schedule-policy", options.policy, *switch_flags(self.key)]
        flags += ["--max-total-tokens", str(options.kv_tokens), "--max-running-requests", str(options.running)]
        flags += shlex.split(options.flags)
        environment = {**ENVIRONMENT, DECISION_LOG: str(self.logs / "decisions")}
        if options.device == "cpu":
            environment |= ON_CPU
            if options.ranks > 1:
                environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(options.ranks)))
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(options.model)]
        self.say(f"starting: {shown(flags, self.key)}")
        self.environment = environment
        return Server(
            ServerConfig("ranks", tuple(flags)), command, self.logs / "server.log", self.key,
            environment=environment_with(environment),
        )  # fmt: skip

    # Load ------------------------------------------------------------------------------------------------------

    async def drive(self, server: Server) -> None:
        """Both phases, watched; raises ``ServerFailed`` where the server ends or hangs."""
        load = Load(server.address)
        self.load_begun = time.monotonic()
        watch = asyncio.create_task(self.watch(server, load))
        work = asyncio.create_task(self.work(load))
        await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
        for task in (work, watch):
            task.cancel()
        results = await asyncio.gather(work, watch, return_exceptions=True)
        with contextlib.suppress(*FAILURES):
            await self.sample(server, load)
        self.result["fates"] = dict(load.fates)
        self.problems += load.lost
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def work(self, load: Load) -> None:
        """The phases one after the other."""
        options = self.options
        jobs = Jobs(options.vocabulary, options.kv_tokens, options.seed)
        latest = self.begun + options.time_limit - RESERVE
        if options.phase != "mixed":
            begun, cpu = time.monotonic(), time.process_time()
            await load.keep_open(itertools.islice(jobs.short(), options.requests), options.open, latest)
            seconds, busy = time.monotonic() - begun, time.process_time() - cpu
            self.say(f"{load.ended} short requests in {seconds:.0f} s, {load.ended / seconds:.0f}/s; the client used "
                     f"{busy / seconds:.0%} of a processor")  # fmt: skip
            self.result["short"] = {"requests": load.ended, "seconds": round(seconds, 1)}
            if load.ended < options.requests:
                self.cut.append(f"{options.requests - load.ended} of {options.requests} short requests")
        if options.phase != "short":
            self.phase = "mixed"
            ended, begun = load.ended, time.monotonic()
            until = (self.load_begun if options.phase == "both" else begun) + options.seconds
            if min(until, latest) < begun + 1:
                self.cut.append("the mixed load: no time was left")
            elif latest < until:
                self.cut.append(f"the last {until - latest:.0f} s of the mixed load")
            await load.arrive(jobs.mixed(), options.rate, 2 * options.running, min(until, latest))
            seconds = time.monotonic() - begun
            self.say(f"{load.ended - ended} requests of the mixed load in {seconds:.0f} s")
            self.result["mixed"] = {"requests": load.ended - ended, "seconds": round(seconds, 1)}

    async def watch(self, server: Server, load: Load) -> None:
        """Take samples, and raise once the server has ended or seems to hang."""
        told = 0.0
        while True:
            sample = await self.sample(server, load)
            if sample.at >= told:
                self.say(describe(sample))
                told = sample.at + 20
            await asyncio.sleep(SAMPLE_SECONDS)
            server.check()
            if load.stalled:
                raise ServerFailed(f"the server hangs: {load.open} requests are open and none ends")

    async def sample(self, server: Server, load: Load) -> Sample:
        running = waiting = None
        with contextlib.suppress(OSError, EOFError, HttpError, asyncio.TimeoutError):
            loads = (await call(server.address, "/v1/loads", timeout=10.0))["loads"]
            running, waiting = (sum(one[key] for one in loads) for key in ("num_running_reqs", "num_waiting_reqs"))
        at = round(time.monotonic() - self.load_begun, 1)
        sizes = ranks_memory.resident(server.group)
        self.samples.append(Sample(at, self.phase, load.ended, load.open, running, waiting, sizes))
        return self.samples[-1]

    # Verdict ---------------------------------------------------------------------------------------------------

    def look_at(self, server: Server) -> None:
        """The idle server: what is left in it, and what its scheduler counted."""
        deadline = time.monotonic() + IDLE_SECONDS
        keys = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
        while True:
            loads = asyncio.run(call(server.address, "/v1/loads"))["loads"]
            left = [load[key] for load in loads for key in keys]
            if not any(left) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        if any(left):
            self.problems.append(f"left in the server (running, waiting, KV tokens): {left}")
        counters = server.counters()
        self.result["counters"] = counters
        if not self.stock and (counters is None or counters["failed"] or not counters["rounds"]):
            self.problems.append(f"the scheduler's counters: {counters}")

    def judge_log(self, server: Server) -> None:
        """What the server's output should say, and should not."""
        options, whole, since_up = self.options, server.printed(), server.printed(self.up_at)
        self.result["retractions"] = retracted(whole)
        active = [] if self.stock else [options.policy]
        active += ["pat"] if options.attention == "pat" else []
        for name in active:
            if (count := whole.count(f" {name} is active")) != options.ranks:
                self.problems.append(f"{count} ranks, not {options.ranks}, say in the log that {name} is active")
        for words in ("Traceback", "goes on as fcfs", "no longer logged"):
            if count := since_up.count(words):
                self.problems.append(f"the log has {count} times: {words}")

    def judge_decisions(self, killed: bool) -> None:
        """Compare the ranks' logs, which are complete unless the server was `killed` while it had work."""
        files = [self.logs / "decisions" / f"rank{rank}.log" for rank in range(self.options.ranks)]
        try:
            found = compare(files, killed)
        except FeatherError as error:
            self.problems.append(str(error))
            return
        self.result["decisions"] = found.as_json()
        if found.difference is not None:
            self.problems.append(f"the ranks decided differently: {found.difference}")
        missing = [mode for mode in ("prefill", "decode") if not found.batches[mode]]
        if missing or (self.options.policy != "feather-order" and not found.adds):
            self.problems.append(f"too little was decided to be compared: {describe_decisions(found)}")
        self.decisions = found

    def judge_memory(self) -> None:
        """Whether a scheduler has grown with every short request."""
        short = [sample for sample in self.samples if sample.phase == "short"]
        self.growths = ranks_memory.growths(short, int(WARM_UP * self.options.requests))
        self.result["growths"] = [growth._asdict() for growth in self.growths]
        for growth in self.growths:
            allowed = SLACK_KIB + growth.requests * ALLOWED_BYTES / 1024
            if growth.name.startswith(SCHEDULER) and growth.kib > allowed:
                self.problems.append(f"a leak? {describe_growth(growth)}; {allowed / 1024:.0f} MiB are allowed")
        if self.options.phase != "mixed" and not any(one.name.startswith(SCHEDULER) for one in self.growths):
            self.cut.append("the judgement of memory: too few samples")

    # Report ----------------------------------------------------------------------------------------------------

    def summary(self) -> list[str]:
        """What was seen, a line for each kind."""
        waiting = [sample.waiting for sample in self.samples if sample.waiting is not None]
        lines = [
            "requests: " + ", ".join(f"{count} {fate}" for fate, count in self.result.get("fates", {}).items()),
            f"at most {max(waiting, default=0)} requests waited; retractions: {self.result['retractions']}",
            *map(describe_growth, self.growths),
        ]
        if hasattr(self, "decisions"):
            lines.append(describe_decisions(self.decisions))
        return lines

    def write(self, server: Server) -> None:
        options = self.options
        if options.json is None:
            return
        variables = ["env", *(f"{name}={value}" for name, value in self.environment.items())]
        content = {
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), "when": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": machine(), "device": options.device, "ranks": options.ranks,
            "policy": options.policy, "server": shown([*variables, *server.command], self.key),
            "start_seconds": server.start_seconds, **self.result, "samples": [one._asdict() for one in self.samples],
            "problems": self.problems, "not_run": self.cut, "seconds": round(time.monotonic() - self.begun, 1),
        }  # fmt: skip
        options.json.write_text(json.dumps(content, indent=1))

    def remaining(self) -> float:
        return self.options.time_limit - (time.monotonic() - self.begun)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:5.0f} s] {text}", flush=True)


def describe(sample: Sample) -> str:
    sizes = [f"{size / 1024:.0f}" for name, size in sorted(sample.kib.items()) if name.startswith(SCHEDULER)]
    return (
        f"{sample.phase}: {sample.ended} ended, {sample.open} open, {sample.running} running, {sample.waiting} "
        f"waiting; schedulers {', '.join(sizes)} MiB"
    )


def describe_growth(growth: Growth) -> str:
    return (
        f"{growth.name} grew by {growth.kib / 1024:.1f} MiB over {growth.requests} requests: "
        f"{growth.bytes_per_request:.0f} bytes each"
    )


def describe_decisions(found: Comparison) -> str:
    batches = ", ".join(f"{count} {mode} ({found.rows[mode]} rows)" for mode, count in sorted(found.batches.items()))
    return (
        f"decisions compared: {found.batches.total()} batches: {batches or 'none'}; {found.adds} ADD, "
        f"{found.stops} STOP, {found.postponed} prefixes made to wait"
    )


def table(samples: Sequence[Sample]) -> str:
    """Memory of every process over time, in MiB; where there are many samples, not all."""
    step = max(1, math.ceil(len(samples) / SAMPLES_SHOWN))
    shown_samples = [*samples[:-1:step], *samples[-1:]]
    names = sorted({name for sample in samples for name in sample.kib})
    lines = [["s", "phase", "ended", "open", "running", "waiting", *names]]
    for sample in shown_samples:
        sizes = [f"{sample.kib[name] / 1024:.1f}" if name in sample.kib else "" for name in names]
        counts = (sample.ended, sample.open, sample.running, sample.waiting)
        lines.append([f"{sample.at:.0f}", sample.phase, *("" if x is None else str(x) for x in counts), *sizes])
    return grid(lines)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    allow_open_files(options.open + 4 * options.running + 1000)
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
        return Check(options, options.logs.resolve()).run()
    with tempfile.TemporaryDirectory() as folder:
        return Check(options, Path(folder)).run()


if __name__ == "__main__":
    sys.exit(main())
