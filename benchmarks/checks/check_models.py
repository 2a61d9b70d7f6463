"""Check whether pat serves models of every kind of attention as SGLang's own backends do, and how fast, on one GPU.

    PYTHONPATH=.:kernels python benchmarks/checks/check_models.py --json models.json
    PYTHONPATH=.:kernels python benchmarks/checks/check_models.py --shapes gpt-oss-20b,gemma-3-4b --repeat 3
    ... --shapes llama-3.2-1b,qwen2.5-7b --stock triton --flags "--kv-cache-dtype fp8_e4m3"
    ... --shapes qwen2.5-7b --stock fa3,flashinfer,triton,trtllm_mha,hpc_ops   # whoever is not there is named, with why
    ... --shapes qwen3-8b --stock fa3 --flags "--tp 2 --dp 2 --enable-dp-attention"   # two GPUs; not of SGLang's Qwen2

For each shape of `model_shapes`, with weights that are random but not negligible (`spread_weights`): one server for
each of its stock backends and one of pat, up together. All answer prompts that share prefixes, greedily and all at
once; pat's tokens and logprobs must be the first stock backend's within twice the spread that rounding causes between
two stock backends (`pat_compare`), or where there is one only, between its answers at once and one by one. Then each
decodes a steady batch whose requests share prefixes, and one whose requests share nothing.

Exit status: 0 if every shape is right; 1 if one is wrong, or slower without sharing than ``--slack`` allows; 3 if
nothing is wrong but a server did not come up or time ran out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pat_compare
from check_pat_server import FAILURES, read_answer, read_metrics
from model_shapes import SHAPES, VOCABULARY, Shape
from pat_compare import Answers, Tolerance
from sending import body

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from server_cases import bench_case
from server_records import steady

from feather_sglang.compare.server.cases import Case
from feather_sglang.compare.server.client import allow_open_files, call
from feather_sglang.compare.server.config import NO_PREFILL_GRAPHS, ServerConfig
from feather_sglang.compare.server.machine import machine
from feather_sglang.compare.server.process import Server, environment_with
from feather_sglang.compare.server.result import measure
from feather_sglang.report.tables import grid

HERE = Path(__file__).resolve().parent
SHARED, PRIVATE = "decode:{},2,3000,{}", "decode:{},0,800,{}"
COMMON = (
    "--load-format dummy --skip-tokenizer-init --sampling-backend pytorch --enable-metrics --log-level-http warning "
    "--dtype bfloat16 --context-length 16384 --max-running-requests 64 --cuda-graph-max-bs-decode 64 "
    f"--max-total-tokens 76000 --mem-fraction-static 0.9 --random-seed 1 --sleep-on-idle "
    f"--stream-interval 8 {NO_PREFILL_GRAPHS}"
)
PAT = "pat"
DECODES_ONLY = (PAT, "trtllm_mha", "hpc_ops")  # on Hopper
TOP = 8  # most likely tokens that the reference names at each position
FLOOR = 0.01  # accepted of a logprob in any case: a spread may be small by chance
SHARES = 0.6  # of the KV tokens that the shared case attends to, at most, are read
LEAST = 60.0  # seconds that must be left for another shape


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="with commas (default: all)")
    parser.add_argument("--new-tokens", type=int, default=32, help="of each answer (default: %(default)s)")
    parser.add_argument("--shared", default=SHARED, help="a steady case; {} stands for a shape's requests "
                        "and for the tokens that each decodes (default: %(default)s)")  # fmt: skip
    parser.add_argument("--private", default=PRIVATE, help="a steady case without sharing (default: %(default)s)")
    parser.add_argument("--further", nargs="+", default=[], help="more steady cases")
    parser.add_argument("--repeat", type=int, default=4, help="times of each case, A B B A (default: %(default)s)")
    parser.add_argument("--together", type=int, default=1, help="shapes whose servers start and stay up together, if "
                        "the GPU's memory holds them (default: %(default)s)")  # fmt: skip
    parser.add_argument("--slack", type=float, default=0.02, help="share that pat may be slower without sharing")
    parser.add_argument("--flags", default="", help="further flags of all servers; they overrule the others")
    parser.add_argument("--stock", help="backends to compare with, with commas (default: each shape's own)")
    parser.add_argument("--start-timeout", type=float, default=180.0, help="seconds (default: %(default)g)")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds for everything")
    parser.add_argument("--json", type=Path, help="write all results there, anew after each shape")
    parser.add_argument("--logs", type=Path, help="folder for the servers' output (default: a temporary one)")
    options = parser.parse_args(argv)
    options.names = [name for name in options.shapes.split(",") if name]
    if unknown := [name for name in options.names if name not in SHAPES]:
        parser.error(f"--shapes: {', '.join(unknown)} is not among {', '.join(SHAPES)}")
    if options.stock and not set(options.stock.split(",")) - set(DECODES_ONLY):
        parser.error(f"--stock {options.stock}: name one that prefills, too")
    try:
        if not all(case.steady for shape in SHAPES.values() for case in cases_of(options, shape).values()):
            parser.error("--shared and --private: give cases named decode:...")
    except (ValueError, IndexError, KeyError) as error:
        parser.error(f"--shared and --private: {error}")
    if not any(point.name == "feather" for point in metadata.entry_points(group="sglang.srt.plugins")):
        parser.error("feather-sglang is not installed here: pip install --no-deps .")
    return options


def shape_of(options: argparse.Namespace, name: str) -> Shape:
    """A shape, with the stock backends that are asked for."""
    shape = SHAPES[name]
    return replace(shape, stock=tuple(options.stock.split(",")), spread=()) if options.stock else shape


def cases_of(options: argparse.Namespace, shape: Shape) -> dict[str, Case]:
    """The steady cases of a shape."""
    texts = {"shared": options.shared, "private": options.private, **{text: text for text in options.further}}
    return {which: bench_case(text.format(shape.requests, shape.decoded)) for which, text in texts.items()}


def prompts(count: int = 24, seed: int = 0) -> dict[str, list[int]]:
    """Prompts by name in four groups; a group's share some 700 tokens, and its first half 300 more."""
    draw = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [draw.randrange(16, VOCABULARY) for _ in range(number)]

    groups = [(tokens(701), tokens(301)) for _ in range(4)]
    made = {}
    for i in range(count):
        prefix, branch = groups[i % 4]
        made[f"p{i:02}"] = [*prefix, *(branch if i % 8 < 4 else []), *tokens(5 + 37 * i % 150)]
    return made


class ShapeCheck:
    """The check of one shape: its servers, and the row of the table that results."""

    def __init__(self, name: str, shape: Shape, options: argparse.Namespace, logs: Path, limit: float) -> None:
        self.name, self.shape, self.options, self.logs = name, shape, options, logs
        self.deadline = time.monotonic() + limit
        self.prompts = prompts()
        self.servers: dict[str, Server] = {}
        self.up: dict[str, Server] = {}
        self.row: dict[str, Any] = {
            "shape": name, "kind": shape.kind, "cut": shape.cut, "flags": options.flags, "problems": [], "left_out": {},
            "tok_s": {}, "start_seconds": {},
        }  # fmt: skip

    def start(self) -> None:
        """Start all servers."""
        folder = self.shape.write(self.logs / f"config-{self.name}")
        for backend in (*self.shape.stock, *self.shape.spread, PAT):
            self.servers[backend] = self.launch(backend, folder)

    def run(self) -> dict[str, Any]:
        """The row, whatever comes of it; the servers have been waited for."""
        begun = time.monotonic()
        try:
            if PAT in self.up and self.shape.stock[0] in self.up:
                self.compare(self.up)
                self.time(self.up)
        except FAILURES as problem:
            self.row["problems"].append(f"{type(problem).__name__}: {problem}"[:300])
        finally:
            self.stop()
        return self.row | {"seconds": round(time.monotonic() - begun, 1)}

    def stop(self) -> None:
        """End all servers."""
        for server in self.servers.values():
            server.stop()

    def launch(self, backend: str, folder: Path) -> Server:
        """Start a server; one that only decodes prefills with the first stock backend that can."""
        flags = [*shlex.split(COMMON), *shlex.split(self.shape.flags)]
        if backend in DECODES_ONLY:
            prefills = next(name for name in self.shape.stock if name not in DECODES_ONLY)
            flags += ["--attention-backend", prefills, "--decode-attention-backend", backend]
        else:
            flags += ["--attention-backend", backend]
        flags += shlex.split(self.options.flags)
        command = [sys.executable, str(HERE / "spread_weights.py"), "--model-path", str(folder)]
        log = self.logs / f"{self.name}-{backend}.log"
        return Server(ServerConfig(backend, tuple(flags)), command, log, environment=environment_with({}))

    def wait(self) -> None:
        """Find out which servers come up."""
        deadline = min(time.monotonic() + self.options.start_timeout, self.deadline)
        for backend, server in self.servers.items():
            try:
                server.wait(deadline)
                self.row["start_seconds"][backend] = server.start_seconds
                self.up[backend] = server
            except FAILURES as problem:
                lines = server.tail(40)
                said = next((f": {line.strip()}" for line in reversed(lines) if "error" in line.lower()), "")
                self.row["left_out"][backend] = why = f"{problem}{said}"[:300]
                print(f"{self.name}: {backend} is left out: {why}", *lines[-12:], sep="\n    ", flush=True)
                server.stop()

    # Answers ---------------------------------------------------------------------------------------------------

    def ask(self, server: Server, together: bool = True) -> Answers:
        """Answers to all prompts, sent at once or one after the other."""
        return asyncio.run(self._ask(server, together))

    async def _ask(self, server: Server, together: bool) -> Answers:
        count, limit = self.options.new_tokens, max(10.0, self.deadline - time.monotonic())

        async def one(tokens: list[int]) -> pat_compare.Answer:
            return read_answer(await call(server.address, "/generate", body(tokens, count, logprobs=TOP), limit))

        if together:
            answers = await asyncio.gather(*map(one, self.prompts.values()))
        else:
            answers = [await one(tokens) for tokens in self.prompts.values()]
        return dict(zip(self.prompts, answers, strict=True))

    def compare(self, up: dict[str, Server]) -> None:
        """Ask all servers; judge pat by the spread of the stock ones."""
        stock = [backend for backend in (*self.shape.stock, *self.shape.spread) if backend in up]
        got = {}
        for backend in (*stock, PAT):
            self.ask(up[backend])  # what is compiled at first use is compiled now
            up[backend].flush()
            got[backend] = self.ask(up[backend])
        reference = got[stock[0]]
        if len(stock) > 1:
            spread, between = pat_compare.spread(got[stock[1]], reference), " and ".join(stock[:2])
        else:
            alone = self.ask(up[stock[0]], together=False)
            spread, between = pat_compare.spread(alone, reference), f"{stock[0]} at once and one by one"
        verdict = pat_compare.judge(got[PAT], reference, Tolerance(spread, FLOOR))
        verdict.wrong += pat_compare.shown_nothing(reference)
        self.row |= {
            "reference": stock[0], "between": between, "spread": spread._asdict(),
            "answers": verdict.as_json(),
        }  # fmt: skip
        self.row["problems"] += verdict.wrong

    # Times -----------------------------------------------------------------------------------------------------

    def time(self, up: dict[str, Server]) -> None:
        """Decode both steady batches on the servers in turn, every other time backwards."""
        timed = [backend for backend in up if backend not in self.shape.spread]
        for which, case in cases_of(self.options, self.shape).items():
            before = read_metrics(up[PAT])
            found: dict[str, list[float]] = {backend: [] for backend in timed}
            for number in range(self.options.repeat):
                for backend in timed[:: -1 if number % 2 else 1]:
                    found[backend] += self.measured(up[backend], backend, case)
            # A client that is held up counts too many tokens a second, never too few.
            middle = {backend: statistics.median_low(rates) for backend, rates in found.items() if rates}
            self.row["tok_s"][which] = middle
            self.row.setdefault("all_tok_s", {})[which] = found
            self.row["problems"] += [
                f"{which}: {backend} never ran all {case.batch} requests at once; it says that it runs "
                f"{up[backend].max_running}, with {up[backend].kv_tokens} KV tokens"
                for backend, rates in found.items()
                if not rates
            ]
            self.row.setdefault("read", {})[which] = read = share_read(before, read_metrics(up[PAT]))
            if which == "shared" and not 0 < read < SHARES:
                self.row["problems"].append(f"{read:.2f} of the shared case's KV tokens were read, at most {SHARES}")

    def measured(self, server: Server, backend: str, case: Case) -> list[float]:
        """Tokens/s while all requests of the case run; empty where that never was."""
        server.flush()
        limit = max(10.0, self.deadline - time.monotonic())
        requests = case.requests(VOCABULARY, 8), case.warm_up(VOCABULARY)
        _, driven = measure(server, backend, case, *requests, limit, admission=False)
        window = steady(driven.streams)
        return [window["tok_s"]] if window else []


def share_read(before: dict[str, float], after: dict[str, float]) -> float:
    """KV tokens that pat read in between, over those that its requests attended to."""
    attended, read = (after.get(name, 0.0) - before.get(name, 0.0) for name in ("attended_tokens", "read_tokens"))
    return read / attended if attended else math.nan


def ratio(row: dict[str, Any], which: str) -> float:
    """pat's tokens/s over the best stock backend's; NaN where either is missing."""
    rates = row["tok_s"].get(which, {})
    stock = [rate for backend, rate in rates.items() if backend != PAT]
    return rates[PAT] / max(stock) if PAT in rates and stock else math.nan


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The verdicts."""
    lines = [
        [
            "shape",
            "answers",
            "equal",
            "compared",
            "largest",
            "allowed",
            "KV read",
            "shared tok/s",
            "",
            "private tok/s",
            "",
        ]
    ]
    for row in rows:
        if "answers" not in row:
            lines.append([row["shape"], "not run"])
            continue
        spread = row["answers"]["spread"]
        cells = [
            row["shape"], "wrong" if row["answers"]["wrong"] else "right", f"{spread['equal']}/{spread['answers']}",
            str(spread["positions"]),
            f"{spread['largest']:.3f}", f"{max(FLOOR, pat_compare.FACTOR * row['spread']['largest']):.3f}",
            f"{row.get('read', {}).get('shared', math.nan):.2f}",
        ]  # fmt: skip
        for which in ("shared", "private"):
            rates = row["tok_s"].get(which, {})
            shown = " ".join(f"{backend} {rate:,.0f}" for backend, rate in rates.items())
            cells += [shown or "-", f"{ratio(row, which):.3f}x" if shown else "-"]
        lines.append(cells)
    return grid(lines)


def judged(row: dict[str, Any], slack: float) -> dict[str, Any]:
    """The row, with what is to be said of its times."""
    if ratio(row, "private") < 1 - slack:
        row["problems"].append(f"without sharing {ratio(row, 'private'):.3f} of the best stock backend's tokens/s")
    return row


def write(path: Path | None, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """Keep what is known so far, if there is a file for it."""
    if path is None:
        return
    content = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), "machine": machine(),
        "when": time.strftime("%Y-%m-%d %H:%M:%S"), "common": COMMON, **more, "rows": list(rows),
    }  # fmt: skip
    path.write_text(json.dumps(content, indent=1))


@contextmanager
def servers_of(checks: Sequence[Any]) -> Iterator[None]:
    """The servers of several checks, started at once; they have been waited for, and are stopped at the end."""
    try:
        for check in checks:
            check.start()
        for check in checks:
            check.wait()
        yield
    finally:
        for check in checks:
            check.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Check the shapes that time allows."""
    options = arguments(argv)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="check_models_"))
    logs.mkdir(parents=True, exist_ok=True)
    allow_open_files(400)
    begun = time.monotonic()
    rows: list[dict[str, Any]] = []
    for first in range(0, len(options.names), options.together):
        remaining = options.time_limit - (time.monotonic() - begun)
        if remaining < LEAST:
            break
        names = options.names[first : first + options.together]
        print(f"[{time.monotonic() - begun:4.0f} s] starting the servers of {', '.join(names)}", flush=True)
        checks = [ShapeCheck(name, shape_of(options, name), options, logs, remaining) for name in names]
        with servers_of(checks):
            for check in checks:
                print(f"[{time.monotonic() - begun:4.0f} s] {check.name} {check.shape.cut}".rstrip(), flush=True)
                rows.append(judged(check.run(), options.slack))
                print(table(rows[-1:]), flush=True)
                write(options.json, rows)
    print("", table(rows), sep="\n")
    for row in rows:
        for text in options.further:
            print(f"{row['shape']} {text}: {row['tok_s'].get(text, 'not run')}, {ratio(row, text):.3f}x")
        for words in row["problems"][:12]:
            print(f"WRONG {row['shape']}: {words}")
        for backend, why in row["left_out"].items():
            print(f"left out {row['shape']}: {backend} ({why})")
    missing = [name for name in options.names if name not in {row["shape"] for row in rows if "answers" in row}]
    print(
        f"{len(rows)} shapes in {time.monotonic() - begun:.0f} s; not run: {', '.join(missing) or 'none'}; logs: {logs}"
    )
    return 1 if any(row["problems"] for row in rows) else 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
