"""Whether greedy tokens with speculation are those without it, under pat and a backend of SGLang's, on one GPU.

    PYTHONPATH=.:kernels python benchmarks/checks/check_speculation.py --json speculation.json
    PYTHONPATH=.:kernels python benchmarks/checks/check_speculation.py --drafters eagle --shape qwen3-8b --accept 2.5 \\
        --case decode:500,5,5000,200 --running 500 --flags "--max-total-tokens 139000"
    ... --drafters none,nextn --shape deepseek-v3   # the layer that the model itself drafts with

For each way to draft, a server of the shape's first stock backend and one of pat are up together; ``none`` is without
speculation. All answer the prompts of ``check_models.py`` greedily and all at once, and must answer as the stock
backend does without speculation, within twice the spread that rounding causes between its answers at once and one by
one (`pat_compare`). Then requests come, go and are aborted at random (`Churn`), and each server decodes a steady batch
whose requests share prefixes, which is timed. Weights are random (`spread_weights`): a STANDALONE draft is the model
itself under noise, so that it is right now and then; an EAGLE or NEXTN draft is hardly ever. With ``--accept`` SGLang
accepts that many tokens a step, whatever they are: then only times mean something, and only they are taken.

Exit status: 0 if everything is right, 1 if something is wrong, 3 if nothing is wrong but a server did not come up or
never ran the whole steady batch.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import math
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pat_compare
from check_models import COMMON, FLOOR, HERE, PAT, SHARED, TOP, prompts, servers_of, share_read, write
from check_pat_server import FAILURES, PACE, read_answer, read_metrics
from model_shapes import SHAPES, VOCABULARY, Shape
from pat_churn import Churn
from pat_compare import Answers, Tolerance
from sending import body

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from server_cases import Misfit, TooManyRequests, bench_case, check_fit
from server_records import steady

from feather_sglang.compare.server.cases import Case
from feather_sglang.compare.server.client import allow_open_files, call
from feather_sglang.compare.server.config import ServerConfig
from feather_sglang.compare.server.process import Server, environment_with
from feather_sglang.compare.server.result import RunResult, measure
from feather_sglang.report.tables import grid

NONE = "none"
DRAFTS_TOO = f"{PAT}, drafts too"
BY_PAT = ("--speculative-draft-attention-backend", PAT)
ACCEPTED = re.compile(r"accept len: ([\d.]+)")  # in a server's log
SPECULATION = "--speculative-attention-mode {mode} --speculative-num-draft-tokens {drafts}"
CHAINS = "--speculative-num-steps {steps} --speculative-eagle-topk 1"
MODEL = "--speculative-draft-model-path {draft}"
DRAFTERS = {
    NONE: "",
    "standalone": f"--speculative-algorithm STANDALONE {CHAINS} {MODEL} {SPECULATION}",
    "eagle": f"--speculative-algorithm EAGLE {CHAINS} {MODEL} {SPECULATION}",
    "nextn": f"--speculative-algorithm NEXTN {CHAINS} {SPECULATION}",
    "ngram": f"--speculative-algorithm NGRAM --speculative-ngram-max-bfs-breadth 1 {SPECULATION}",
}
RUNNING = 64
SELDOM_USED = {
    "deep_gemm": {"deep_gemm.py": ""},
    "flash_mla": {
        "flash_mla/__init__.py": "fused_norm_rope_attn_rope_cast = None\n",
        "flash_mla/flash_mla_interface.py": "FlashMLASchedMeta = None\n",
    },
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", help="with commas (default: all that the shape has)")
    parser.add_argument("--shape", default="llama-3.2-1b", choices=SHAPES, help="the model (default: %(default)s)")
    parser.add_argument("--draft-layers", type=int, help="of a STANDALONE draft (default: all)")
    parser.add_argument("--draft-noise", type=float, default=0.05, help="share of its weights (default: %(default)s)")
    parser.add_argument("--drafts", type=int, default=4, help="tokens a verify step (default: %(default)s)")
    parser.add_argument("--drafts-by-pat", action="store_true", help="a third server, where pat decodes the draft "
                        "model, too")  # fmt: skip
    parser.add_argument("--mode", default="decode", choices=("decode", "prefill"), help="who verifies "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--new-tokens", type=int, default=48, help="of each answer (default: %(default)s)")
    parser.add_argument("--accept", type=float, help="tokens a step, simulated: times only")
    parser.add_argument("--running", type=int, default=RUNNING, help="most running requests (default: %(default)s)")
    parser.add_argument(
        "--case", default=SHARED.format(RUNNING, Shape.decoded), help="a steady case (default: %(default)s)"
    )
    parser.add_argument("--repeat", type=int, default=4, help="times of it, A B B A (default: %(default)s)")
    parser.add_argument("--churn", type=float, default=8.0, help="seconds of random requests (default: %(default)g)")
    parser.add_argument("--together", type=int, default=2, help="drafters whose servers are up together "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--flags", default="", help="further flags of all servers; they overrule the others")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds (default: %(default)g)")
    parser.add_argument("--json", type=Path, help="write all results there, anew after each drafter")
    parser.add_argument("--logs", type=Path, help="folder for the servers' output (default: a temporary one)")
    options = parser.parse_args(argv)
    possible = [name for name in DRAFTERS if name != "nextn" or drafts_itself(SHAPES[options.shape])]
    options.names = [name for name in options.drafters.split(",") if name] if options.drafters else possible
    if unknown := [name for name in options.names if name not in possible]:
        parser.error(f"--drafters: {', '.join(unknown)} is not among {', '.join(possible)}")
    options.names.sort(key=lambda name: name != NONE)  # the reference comes first
    if options.names[:1] != [NONE] and options.accept is None:
        options.names.insert(0, NONE)
    if options.drafts < 2:
        parser.error("--drafts: give at least 2")
    try:
        options.steady = bench_case(options.case)
    except ValueError as problem:
        parser.error(f"--case {problem}")
    if not options.steady.steady:
        parser.error(f"--case {options.case}: give a decode case, decode:B,G,L,N")
    if options.repeat and (misfit := misfit_of(options.steady, options.drafts, *room(options))):
        parser.error(f"--case {options.case}: {misfit}")
    return options


def shared_flags(options: argparse.Namespace) -> list[str]:
    """Flags that all servers have, but for those of their backend and their drafts; the last one of a name counts."""
    running = ("--max-running-requests", f"{options.running}", "--cuda-graph-max-bs-decode", f"{options.running}")
    return [*shlex.split(COMMON), *shlex.split(SHAPES[options.shape].flags), *running, *shlex.split(options.flags)]


def room(options: argparse.Namespace) -> tuple[int | None, int | None]:
    """KV tokens and running requests that the servers' flags give them."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--max-total-tokens", type=int)
    parser.add_argument("--max-running-requests", type=int)
    known, _ = parser.parse_known_args(shared_flags(options))
    return known.max_total_tokens, known.max_running_requests


def misfit_of(case: Case, drafts: int, kv_tokens: int | None, running: int | None) -> str:
    """Why the case's batch could never be complete, and the flag with which it could; empty if it could as it is."""
    drafted = 2 * drafts * case.batch  # SGLang has room for two steps' drafts of each request
    try:
        check_fit(case, kv_tokens, running, drafted)
    except TooManyRequests as problem:
        return f"{problem}: give --running {case.batch}"
    except Misfit as problem:
        return f'{problem}: give --flags "--max-total-tokens {case.kv_tokens + drafted}"'
    return ""


def drafts_itself(shape: Shape) -> bool:
    """Whether the model has a layer that drafts (NEXTN)."""
    return bool(shape.config.get("num_nextn_predict_layers"))


def draft_of(shape: Shape, drafter: str, options: argparse.Namespace) -> Shape:
    """The draft model's shape."""
    if drafter == "eagle":
        return replace(shape, config={**shape.config, "architectures": ["LlamaForCausalLMEagle"], "model_type": "llama",
                                      "num_hidden_layers": 1})  # fmt: skip
    layers = options.draft_layers or shape.config["num_hidden_layers"]
    return replace(shape, config={**shape.config, "num_hidden_layers": layers, "draft_noise": options.draft_noise})


def environment(options: argparse.Namespace, drafter: str, folder: Path) -> dict[str, str]:
    """Of a server's process, with empty ones for modules that SGLang imports for every draft model and seldom uses."""
    made = {}
    if missing := [name for name in SELDOM_USED if importlib.util.find_spec(name) is None]:
        for name in missing:
            for file, text in SELDOM_USED[name].items():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(text)
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(folder))))
        made |= {"PYTHONPATH": path} | ({"SGLANG_ENABLE_JIT_DEEPGEMM": "0"} if "deep_gemm" in missing else {})
    if options.accept is not None and drafter != NONE:
        made["SGLANG_SIMULATE_ACC_LEN"] = str(options.accept)
    return environment_with(made)


class SpeculationCheck:
    """One way to draft on two backends or three, and the rows that are found out about them."""

    def __init__(self, drafter: str, options: argparse.Namespace, logs: Path) -> None:
        self.drafter, self.options, self.logs = drafter, options, logs
        self.shape = SHAPES[options.shape]
        self.stock = self.shape.stock[0]
        self.prompts = prompts()
        self.servers: dict[str, Server] = {}
        drafts_too = [DRAFTS_TOO] if options.drafts_by_pat and CHAINS in DRAFTERS[drafter] else []
        self.rows: dict[str, dict[str, Any]] = {
            backend: {
                "drafter": drafter,
                "backend": backend,
                "case": options.case,
                "problems": [],
                "left_out": "",
                "not_timed": "",
            }
            for backend in (self.stock, PAT, *drafts_too)
        }

    def start(self) -> None:
        """Start the servers."""
        target = self.shape.write(self.logs / "model")
        draft = draft_of(self.shape, self.drafter, self.options).write(self.logs / f"draft-{self.drafter}")
        speculation = DRAFTERS[self.drafter].format(
            steps=self.options.drafts - 1, drafts=self.options.drafts, mode=self.options.mode, draft=draft
        )
        for backend in self.rows:
            flags = ["--attention-backend", self.stock, *shlex.split(speculation)]
            flags += ["--decode-attention-backend", PAT] if backend != self.stock else []
            flags += BY_PAT if backend == DRAFTS_TOO else ()
            flags += shared_flags(self.options)
            command = [sys.executable, str(HERE / "spread_weights.py"), "--model-path", str(target)]
            log = self.logs / f"{self.drafter}-{backend.replace(', ', '-').replace(' ', '-')}.log"
            configuration = ServerConfig(f"{self.drafter}-{backend}", tuple(flags))
            environ = environment(self.options, self.drafter, self.logs / "absent")
            self.servers[backend] = Server(configuration, command, log, environment=environ)

    def wait(self) -> None:
        """Find out which servers come up."""
        deadline = time.monotonic() + self.options.start_timeout
        for backend, server in list(self.servers.items()):
            try:
                server.wait(deadline)
                self.rows[backend]["start_seconds"] = server.start_seconds
            except FAILURES as problem:
                self.rows[backend]["left_out"] = f"{problem}"[:200]
                print(f"{self.drafter}: {backend} is left out: {problem}", *server.tail(25), sep="\n    ", flush=True)
                self.servers.pop(backend).stop()

    def stop(self) -> None:
        """End the servers."""
        for server in self.servers.values():
            server.stop()

    # What is checked -------------------------------------------------------------------------------------------

    def answers(self, backend: str, together: bool = True) -> Answers:
        """Answers to all prompts, sent at once or one after the other."""
        return asyncio.run(self._answers(backend, together))

    async def _answers(self, backend: str, together: bool) -> Answers:
        address, verified = self.servers[backend].address, [0, 0]

        async def one(tokens: list[int]) -> pat_compare.Answer:
            request = body(tokens, self.options.new_tokens, logprobs=TOP)
            answer = await call(address, "/generate", request, 120.0)
            verified[0] += answer["meta_info"]["completion_tokens"]
            verified[1] += answer["meta_info"].get("spec_verify_ct", 0)
            return read_answer(answer)

        if together:
            made = await asyncio.gather(*map(one, self.prompts.values()))
        else:
            made = [await one(tokens) for tokens in self.prompts.values()]
        if verified[1]:
            self.rows[backend]["accepted"] = round(verified[0] / verified[1], 3)
        return dict(zip(self.prompts, made, strict=True))

    def judge(self, reference: dict[str, Answers], tolerance: Tolerance) -> None:
        """Ask the servers and compare."""
        for backend, server in self.servers.items():
            row = self.rows[backend]
            try:
                self.answers(backend)  # what is compiled at first use is compiled now
                server.flush()
                before = read_metrics(server)
                verdict = pat_compare.judge(self.answers(backend), reference["together"], tolerance)
                row["answers"] = verdict.as_json()
                row["problems"] += verdict.wrong
                if backend != self.stock and (self.drafter == NONE or self.options.mode == "decode"):
                    row["read"] = share_read(before, read_metrics(server))
                    if not 0 < row["read"] < 1:
                        row["problems"].append(f"{row['read']:.2f} of the KV tokens were read: nothing is shared")
                self.churn(backend, reference["alone"], tolerance)
                server.check()
            except FAILURES as problem:
                row["problems"].append(f"{type(problem).__name__}: {problem}"[:300])
                print(*server.tail(25), sep="\n    ", flush=True)

    def churn(self, backend: str, alone: Answers, tolerance: Tolerance) -> None:
        """Random requests, some given up while drafts are in flight."""
        if not self.options.churn:
            return
        address = self.servers[backend].address
        churn = Churn(address, self.prompts, alone, tolerance, min(RUNNING, self.options.running), PACE, 0)
        asyncio.run(churn.run(self.options.churn))
        self.rows[backend]["churn"] = churn.verdict.as_json() | {"fates": dict(churn.fates)}
        self.rows[backend]["problems"] += [f"churn: {problem}" for problem in churn.problems]

    def time(self) -> None:
        """Decode the steady batch on the servers in turn, every other time backwards."""
        case, drafts = self.options.steady, 0 if self.drafter == NONE else self.options.drafts
        before = read_metrics(self.servers[PAT]) if PAT in self.servers else {}
        found: dict[str, list[float]] = {}
        for backend, server in self.servers.items():  # which may have less room than their flags ask for
            self.rows[backend]["not_timed"] = misfit = misfit_of(case, drafts, server.kv_tokens, server.max_running)
            found |= {} if misfit else {backend: []}
        for number in range(self.options.repeat):
            for backend in list(found)[:: -1 if number % 2 else 1]:
                server = self.servers[backend]
                try:
                    server.flush()
                    requests = case.requests(VOCABULARY, 8), case.warm_up(VOCABULARY)
                    result, driven = measure(server, backend, case, *requests, 120.0, admission=False)
                    if window := steady(driven.streams):
                        found[backend].append(window["tok_s"])
                    else:
                        self.rows[backend]["not_timed"] = incomplete(case, result, server.kv_tokens)
                except FAILURES as problem:
                    self.rows[backend]["problems"].append(f"steady case: {type(problem).__name__}: {problem}"[:300])
        for backend, rates in found.items():
            self.rows[backend]["all_tok_s"] = rates
            if rates:
                self.rows[backend] |= {"tok_s": statistics.median_low(rates), "not_timed": ""}
            if accepted := ACCEPTED.findall(self.servers[backend].printed()):
                self.rows[backend].setdefault("accepted", statistics.median(map(float, accepted)))
        if PAT in self.servers and self.options.mode == "decode":
            self.rows[PAT].setdefault("read", share_read(before, read_metrics(self.servers[PAT])))


def incomplete(case: Case, result: RunResult, kv_tokens: int | None) -> str:
    """What kept a batch from being complete."""
    counted, retracted = result.counted, result.summary and result.summary.retractions
    return (
        f"{counted['peak_running']} of {case.batch} requests ran at once at most, {retracted or 0} were retracted, "
        f"{counted['failed'] + counted['unfinished']} had no whole answer; {kv_tokens} KV tokens for {case.kv_tokens}"
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The verdicts."""
    lines = [["drafter", "backend", "answers", "equal", "near ties", "largest", "churn", "tokens a step", "KV read",
              "tok/s", "to SGLang's"]]  # fmt: skip
    rates = {row["drafter"]: row.get("tok_s", math.nan) for row in rows if row["backend"] not in (PAT, DRAFTS_TOO)}
    for row in rows:
        if row["left_out"]:
            lines.append([row["drafter"], row["backend"], "not run"])
            continue
        compared = ["wrong" if row["problems"] else "-", "-", "-", "-"]
        if "answers" in row:
            spread, ties = row["answers"]["spread"], len(row["answers"]["near_ties"])
            compared = ["wrong" if row["problems"] else "right", f"{spread['equal']}/{spread['answers']}", str(ties),
                        f"{spread['largest']:.3f}"]  # fmt: skip
        fates = row.get("churn", {}).get("fates", {})
        rate, stock = row.get("tok_s", math.nan), rates.get(row["drafter"], math.nan)
        lines.append([
            row["drafter"], row["backend"], *compared, f"{fates.get('equal', 0)}+{fates.get('near tie', 0)}",
            f"{row.get('accepted', 1):.2f}", shown(row.get("read", math.nan), ".2f"),
            "not timed" if row["not_timed"] else shown(rate, ",.0f"), shown(rate / stock, ".3f", "x"),
        ])  # fmt: skip
    return grid(lines)


def shown(value: float, form: str, unit: str = "") -> str:
    """The number, or a dash where there is none."""
    return "-" if math.isnan(value) else f"{value:{form}}{unit}"


def status(rows: Sequence[dict[str, Any]]) -> int:
    """The exit status."""
    if any(row["problems"] for row in rows):
        return 1
    return 3 if any(row["left_out"] or row["not_timed"] for row in rows) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Check the drafters one after the other."""
    options = arguments(argv)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="check_speculation_"))
    logs.mkdir(parents=True, exist_ok=True)
    allow_open_files(400)
    begun, rows = time.monotonic(), []
    reference: dict[str, Answers] = {}
    tolerance: Tolerance | None = None
    for first in range(0, len(options.names), options.together):
        checks = [SpeculationCheck(name, options, logs) for name in options.names[first : first + options.together]]
        print(f"[{time.monotonic() - begun:4.0f} s] starting {', '.join(c.drafter for c in checks)}", flush=True)
        with servers_of(checks):
            for check in checks:
                if tolerance is None and options.accept is None:
                    stock = check.stock
                    if stock not in check.servers:
                        print("the reference did not come up")
                        return 3
                    check.answers(stock)
                    check.servers[stock].flush()
                    reference = {"together": check.answers(stock), "alone": check.answers(stock, together=False)}
                    spread = pat_compare.spread(reference["alone"], reference["together"])
                    tolerance = Tolerance(spread, FLOOR)
                    print(f"spread of {stock} at once and one by one: {spread}", flush=True)
                if tolerance is not None:
                    check.judge(reference, tolerance)
                if options.repeat:
                    check.time()
                rows += check.rows.values()
                print(f"[{time.monotonic() - begun:4.0f} s]", table(list(check.rows.values())), sep="\n", flush=True)
                write(options.json, rows, drafters=DRAFTERS)
    print("", table(rows), sep="\n")
    for row in rows:
        for words in row["problems"][:8]:
            print(f"WRONG {row['drafter']} {row['backend']}: {words}")
        if row["not_timed"]:
            print(f"NOT TIMED {row['drafter']} {row['backend']}: {row['not_timed']}")
    print(f"{time.monotonic() - begun:.0f} s; logs: {logs}")
    return status(rows)


if __name__ == "__main__":
    sys.exit(main())
