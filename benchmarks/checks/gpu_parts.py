"""The parts of ``check_gpu.py``: their commands, in an environment that needs no installation, and their outcomes."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from gpu_found import Gpu
from gpu_report import BOUND_MS, CASES, NOT_RUN, OURS, PROMISE, RIGHT, STOCK, WRONG
from model_shapes import SHAPES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from server_names import parse_server
from server_records import incomplete, tok_s

from feather_sglang import __version__
from feather_sglang.compare.server.config import NO_PREFILL_GRAPHS
from feather_sglang.compare.server.process import environment_with

ROOT = Path(__file__).resolve().parents[2]
TESTS, ANSWERS = "GPU tests", "answers of pat+feather"
ANSWERS_FILE, SERVERS_FILE = "answers.json", "servers.json"
SHAPE, VOCABULARY = "qwen3-8b", 151936
PLUGINS, PLUGIN = "sglang.srt.plugins", "feather = feather_sglang.adapter.plugin:register"
START_SECONDS, CASE_SECONDS = 200, 180  # in which a server is up and a case is over, unless something hangs
ROOMY_MIB = 110_000
WORKERS, FEW_WORKERS = 8, 6  # processes that run tests, beside the servers whose answers are compared meanwhile
# Both servers of the comparison of answers, and the tests, are on the GPU at once; finer logits than bfloat16's.
ANSWERS_FLAGS = f"--max-total-tokens 40000 --mem-fraction-static 0.9 {NO_PREFILL_GRAPHS} --enable-fp32-lm-head"


class Outcome(NamedTuple):
    """The outcome of a check, in a word and in a line."""

    result: str
    said: str


def environment(folder: Path) -> dict[str, str]:
    """This environment, in which Python finds the checkout's packages, and SGLang the plugin."""
    paths = [ROOT, ROOT / "kernels"]
    if not any(point.name == "feather" for point in metadata.entry_points(group=PLUGINS)):
        paths.append(written_entry_point(folder / "plugin"))
    before = os.environ.get("PYTHONPATH")
    found = os.pathsep.join([*map(str, paths), *([before] if before else [])])
    return environment_with({"PYTHONPATH": found, "HF_HUB_OFFLINE": "1"})


def written_entry_point(folder: Path) -> Path:
    """A folder with what an installation of this package would say of it."""
    info = folder / f"feather_sglang-{__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: feather-sglang\nVersion: {__version__}\n")
    (info / "entry_points.txt").write_text(f"[{PLUGINS}]\n{PLUGIN}\n")
    return folder


def tests_command(gpu: Gpu) -> list[str]:
    """Pytest on the GPU's tests, in several processes where pytest-xdist is there: most of the time is compilation."""
    workers = WORKERS if gpu.memory_mib >= ROOMY_MIB else FEW_WORKERS
    several = ["-n", str(workers)] if find_spec("xdist") else []
    return [sys.executable, "-m", "pytest", "-q", *several, str(ROOT / "tests" / "gpu")]


def answers_command(folder: Path, limit: float) -> list[str]:
    """A pat server under feather beside fa3, whose answers alone and together say what rounding does."""
    model = SHAPES[SHAPE].write(folder / "model-answers")
    flags = {
        "--model": model, "--variants": "feather", "--reference": STOCK, "--spread": "", "--rounds": 1,
        "--new-tokens": 32, "--overlap-starts": 2, "--time-limit": f"{limit:.0f}", "--start-timeout": f"{limit:.0f}",
        "--json": folder / ANSWERS_FILE, "--logs": folder / "answers",
    }  # fmt: skip
    return program("benchmarks/checks/check_pat_server.py", flags, f"--flags={ANSWERS_FLAGS}")


def servers_command(folder: Path, limit: float) -> list[str]:
    """All servers and cases; the one that keeps a promise is the one that makes none, switched."""
    shape = SHAPES[SHAPE]
    model = replace(shape, config={**shape.config, "vocab_size": VOCABULARY}).write(folder / "model")
    flags = {
        "--model": model, "--time-limit": f"{limit:.0f}", "--case-limit": CASE_SECONDS, "--stream-interval": 1,
        "--start-timeout": START_SECONDS, "--json": folder / SERVERS_FILE, "--logs": folder / "servers",
    }  # fmt: skip
    promise = f"{PROMISE}={shlex.join([*parse_server(OURS).flags, '--feather-tbt', str(BOUND_MS)])}"
    names = [word for server in (STOCK, OURS, promise) for word in ("--server", server)]
    cases = ["--case", *(case.name for case in CASES)]
    graphs = f"--flags={NO_PREFILL_GRAPHS}"
    return program("benchmarks/bench_server.py", flags, "--one-server", graphs, *names, *cases)


def program(path: str, flags: Mapping[str, Any], *words: str) -> list[str]:
    """A program of the checkout's, with its flags."""
    return [sys.executable, str(ROOT / path), *(str(word) for pair in flags.items() for word in pair), *words]


# What came of it ------------------------------------------------------------------------------------------------------


def tests_outcome(status: int | None, printed: str) -> Outcome:
    """Of pytest; `status` is None where time ran out."""
    if status is None:
        return Outcome(NOT_RUN, f"time ran out; the end of what it printed: {last_line(printed)}")
    ends = [line for line in printed.splitlines() if re.search(r"\d (passed|failed|errors?|skipped)\b.* in \d", line)]
    counted = re.findall(r"(\d+) (passed|failed|errors?|skipped)", ends[-1]) if ends else []
    counts = {word: int(count) for count, word in counted}
    said = ", ".join(f"{count} {word}" for word, count in counts.items())
    if status == 0 and counts.get("passed"):
        return Outcome(RIGHT, said)
    if status == 0:
        return Outcome(NOT_RUN, f"{said or 'nothing was tested'}: torch sees no GPU, or it is too old")
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if status == 1 and counts:
        return Outcome(WRONG, f"{said}; {failed[0][:300]}" if failed else said)
    return Outcome(NOT_RUN, f"pytest ended with status {status}: {last_line(printed)}")


def answers_outcome(status: int | None, printed: str, file: Path) -> Outcome:
    """Of ``check_pat_server.py``, whose exit status says whether anything is wrong."""
    said = printed.splitlines()
    if wrong := [line for line in said if line.startswith("WRONG feather:")]:
        return Outcome(WRONG, wrong[0].partition(": ")[2][:300])
    if status != 0:
        reasons = [line for line in said if line.startswith(("WRONG", "not run:"))]
        ended = "time ran out" if status is None else f"it ended with status {status}"
        return Outcome(NOT_RUN, f"{ended}: {reasons[0][:300] if reasons else last_line(printed)}")
    content = json.loads(file.read_text())
    (row,) = content["variants"]
    found, allowed = row["together"]["spread"], content["allowed"]["largest"]
    return Outcome(
        RIGHT,
        f"{found['equal']} of {found['answers']} answers equal, {len(row['together']['near_ties'])} part at near ties, "
        f"log-probabilities within {found['largest']:.3f} (allowed: {allowed:.3f})",
    )


def servers_outcome(status: int | None, printed: str, file: Path) -> dict[str, dict[str, Any]]:
    """Tokens a second and the p99 of requests' longest gaps of each server in each case, and why one is missing."""
    content = json.loads(file.read_text()) if file.is_file() else {"records": [], "servers": {}}
    return {case.name: of_case(case.name, content, status, printed) for case in CASES}


def of_case(name: str, content: Mapping[str, Any], status: int | None, printed: str) -> dict[str, Any]:
    """One case."""
    found: dict[str, Any] = {"longest_gap_ms": {}}
    reasons = []
    for server in (STOCK, OURS, PROMISE):
        records = [one for one in content["records"] if (one["server"], one["case"]) == (server, name)]
        complete = [one for one in records if not incomplete(one)]
        found[server] = tok_s(complete[0]) if complete else None
        gaps = complete[0]["overall"].get("longest_gap_ms") if complete else None
        found["longest_gap_ms"][server] = gaps["p99"] if gaps else None
        if found[server] is None:
            reasons.append(f"{server}: {why_missing(server, records, content, status, printed)}")
    return found | {"said": "; ".join(reasons)}


def why_missing(
    server: str, records: Sequence[Mapping[str, Any]], content: Mapping[str, Any], status: int | None, printed: str
) -> str:
    """Why a server has no figure in a case."""
    if records and "error" in records[0]:
        return str(records[0]["error"])
    if records:
        return "some requests failed or were cut, or never ran together"
    about = content["servers"].get(server, {})
    if about.get("error"):
        said = next((f": {line.strip()}" for line in reversed(about.get("log_end", [])) if "rror" in line), "")
        return f"{about['error']}{said}"[:300]
    if content["servers"]:
        return "time ran out"
    return "time ran out" if status is None else f"no results: {last_line(printed)}"


def last_line(printed: str) -> str:
    """The last line that is not empty."""
    return next((line.strip() for line in reversed(printed.splitlines()) if line.strip()), "it printed nothing")[:300]
