"""Record the scheduler's decisions and the planner's plans, so that a refactoring can show that neither changed.

    python tests/behaviour/record.py [--traces FOLDER] [--only NAME ...] [--check]

Writes ``reference.json`` beside this file: a digest of the decision log of a deterministic replay for each workload and
feather policy, and of the plans of 3,000 random forests for each strategy. ``--check`` compares instead, and names what
differs. The two public traces are replayed only where ``--traces`` names a folder that has them. Decisions are those on
the newest supported SGLang; on another they are entries of their own, of which the tests need some on the oldest:
``--only decisions feather-bandit``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from feather_kernels.pack import STRATEGIES
from feather_kernels.plan import make_plan
from feather_kernels.tiles import TILES
from feather_kernels.trees import random_forest
from feather_sglang.adapter.hooks import SUPPORTED, installed_version

REFERENCE = Path(__file__).with_name("reference.json")
POLICIES = ("feather-bandit", "feather-heuristic", "feather-qlearning", "feather-order")
QWEN = "--model qwen3-8b --attention pat"
WORKLOADS = {
    "fits": "--groups 5 --requests 300",
    "levels": f"--groups 6 --levels 3 --requests 300 {QWEN}",
    "exceeds": f"--groups 50 --requests 300 --rate 50 --kv-tokens 200000 {QWEN}",
    "fills": f"--groups 20 --prefix-tokens 10000 --requests 240 --kv-tokens 200000 {QWEN}",
    "short": "--groups 40 --prefix-tokens 240 --requests 600 --rate 100000 --output-tokens 20",
    "unshared": "--no-sharing --requests 200 --rate 50 --kv-tokens 100000",
    "bounded": f"--groups 40 --prefix-tokens 6000 --requests 200 --rate 20 --kv-tokens 400000 --feather-tbt 100 {QWEN}",
    "priorities": f"--groups 12 --requests 240 --kv-tokens 60000 {QWEN}",
}
TRACES = {
    "conversation": f"mooncake_conversation.jsonl --requests 200 --rate-scale 0.5 --kv-tokens 300000 {QWEN}",
    "synthetic": f"mooncake_synthetic_first1800.jsonl --requests 250 --rate-scale 0.5 --kv-tokens 300000 {QWEN}",
}
FORESTS, FORESTS_AT_ONCE = 3000, 500


def new_python(arguments: list[str], variables: dict[str, str]) -> tuple[str, str]:
    """What this file prints in a Python of its own, and what it prints as errors."""
    variables = {name: value for name, value in variables.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ran = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=variables)
    return ran.stdout, ran.stderr


def decisions(
    workload: str,
    policy: str,
    folder: str | None = None,
    run: Callable[[list[str], dict[str, str]], tuple[str, str]] = new_python,
) -> str:
    """Digest of the decision log of one replay, made in a process of its own, which ``run`` makes."""
    words = {**WORKLOADS, **TRACES}[workload].split()
    if folder is not None and workload in TRACES:
        words[0] = str(Path(folder, words[0]))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [__file__, "--replay", workload, "ab", *words, "--policies", policy]
        arguments += ["--scheduler-cost", "off", "--jobs", "1", "--out", scratch]
        _, errors = run(arguments, {**os.environ, "FEATHER_DECISION_LOG": scratch})
        log = Path(scratch, "rank0.log")
        if not log.is_file() or not Path(scratch, "results.json").is_file():  # which is written at the end
            raise SystemExit(f"{workload}, {policy}: {errors.strip().splitlines()[-1:]}")
        return hashlib.sha256(log.read_bytes()).hexdigest()[:16]


def replay(workload: str, arguments: list[str]) -> int:
    """Run ``feather ab``; where priorities are asked for, every third request is more urgent than the others."""
    from feather_sglang.cli import main

    if workload == "priorities":
        from feather_sglang.adapter import replay_engine as engine

        made, build = engine.TokenizedGenerateReqInput, engine.build_scheduler

        def with_priority(**given: object) -> object:
            return made(**given, priority=0 if int(str(given["rid"])) % 3 == 0 else 5)

        with_priority.__signature__ = __import__("inspect").signature(made)  # type: ignore[attr-defined]
        engine.TokenizedGenerateReqInput = with_priority  # type: ignore[misc]
        engine.build_scheduler = partial(
            build, enable_priority_scheduling=True, schedule_low_priority_values_first=True
        )
    return main(arguments)


def plans(strategy: str, first: int, count: int) -> str:
    """Digest of the plans of some random forests."""
    digest = hashlib.sha256()
    for seed in range(first, first + count):
        rng = np.random.default_rng(seed)
        forest = random_forest(rng, int(rng.integers(1, 48)), max_node_tokens=int(rng.choice((16, 256, 4096))))
        path = str(rng.choice(sorted(TILES)))
        plan = make_plan(forest, num_qo_heads=32, num_kv_heads=8, head_dim=128, strategy=strategy, tiles=TILES[path])
        for name in ("items", "members"):
            digest.update(np.ascontiguousarray(getattr(plan, name)).tobytes())
    return digest.hexdigest()[:16]


def decisions_of(workload: str, policy: str) -> str:
    """Name of that entry; a replay runs SGLang's own loop, which not all releases turn alike."""
    version = installed_version()
    return f"decisions {workload} {policy}" + ("" if version in (None, SUPPORTED[-1]) else f" sglang {version}")


def entries(folder: str | None, only: list[str]) -> Iterator[tuple[str, object]]:
    """(name, what computes its digest)."""
    for workload in [*WORKLOADS, *(TRACES if folder else ())]:
        for policy in POLICIES:
            yield decisions_of(workload, policy), partial(decisions, workload, policy, folder)
    for strategy in STRATEGIES:
        for first in range(0, FORESTS, FORESTS_AT_ONCE):
            name = f"plans {strategy} {first}"
            yield name, partial(plans, strategy, first, FORESTS_AT_ONCE)


def main() -> int:
    """Record or compare."""
    if sys.argv[1:2] == ["--replay"]:
        return replay(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", metavar="FOLDER", help="holds the two public traces")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="words that an entry's name must have")
    parser.add_argument("--check", action="store_true", help="compare with reference.json")
    options = parser.parse_args()
    chosen = {
        name: work for name, work in entries(options.traces, options.only) if set(options.only) <= set(name.split())
    }
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(chosen, pool.map(lambda work: work(), chosen.values()), strict=True))  # type: ignore[operator]
    known = json.loads(REFERENCE.read_text()) if REFERENCE.is_file() else {}
    if options.check:
        changed = [name for name, digest in found.items() if known.get(name) != digest]
        print(f"{len(found)} compared, {len(changed)} differ", *changed, sep="\n")
        return 1 if changed or not found else 0
    REFERENCE.write_text(json.dumps({**known, **found}, indent=1) + "\n")
    print(f"{len(found)} recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
