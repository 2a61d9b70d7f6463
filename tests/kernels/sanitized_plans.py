"""Random plans and forests with the planner under the address and undefined-behaviour sanitizers.

    python tests/kernels/sanitized_plans.py [--plans 28000] [--checked 5000] [--first 0]

So many plans are of batches as they come, and held against what must hold of any plan; the others have options and
forests at the ends of their ranges, damaged ones too, and must be plans or refused in one line. It ends with the
sanitizer's report and another status than 0 where something is wrong. Needs g++ with libasan and libubsan.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
INSIDE = "FEATHER_SANITIZED"  # set in the process whose planner is sanitized
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g1"
LARGEST = 2**31 - 1


def libraries(compiler: str) -> list[str] | None:
    """What must be loaded first; None where the compiler lacks it."""
    names = ("libasan.so", "libubsan.so", "libstdc++.so.6")
    ran = [subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True) for name in names]
    found = [answer.stdout.strip() for answer in ran]
    return found if all(os.path.isabs(path) for path in found) else None


def environment() -> dict[str, str] | None:
    """Variables with which Python has a sanitized planner, which is kept compiled; None where that cannot be."""
    from feather_kernels.build import cache_dir

    compiler = shutil.which("g++")
    preload = libraries(compiler) if compiler else None
    if preload is None:
        return None
    folder = cache_dir() / f"sanitized-{zlib.crc32(SANITIZERS.encode()):08x}"
    folder.mkdir(parents=True, exist_ok=True)
    wrapper = folder / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" {SANITIZERS}\n')
    wrapper.chmod(0o755)
    paths = [str(HERE), str(ROOT / "tests"), str(ROOT / "kernels"), str(ROOT)]
    variables = {
        **os.environ, INSIDE: "1", "CXX": str(wrapper), "FEATHER_KERNELS_CACHE": str(folder),
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    # Compiled first, as nothing is to be loaded into the compiler; that this process cannot load it is no matter.
    build = [sys.executable, "-c", "from feather_kernels.build import load_planner; load_planner()"]
    subprocess.run(build, env=variables, capture_output=True)
    options = {
        "LD_PRELOAD": ":".join(preload), "UBSAN_OPTIONS": "print_stacktrace=1",
        # Python leaks by design; what is asked for beyond memory is to be refused by the planner.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    }  # fmt: skip
    return variables | options


def plan_as_it_comes(rng: np.random.Generator) -> None:
    """A batch within the ranges of servers, in any way that it can be planned, against the oracle."""
    from plan_checks import TILE_SETS, check_plan, plan_of

    from feather_kernels.pack import MERGES, SPLITS, STRATEGIES
    from feather_kernels.trees import random_forest

    kv_heads, group = int(rng.integers(1, 5)), int(rng.choice([1, 2, 3, 4, 5, 7, 8, 16, 48]))
    forest = random_forest(rng, int(rng.integers(1, 40)), max_node_tokens=400, max_tail_tokens=600)
    plan = plan_of(
        forest, num_qo_heads=group * kv_heads, num_kv_heads=kv_heads, strategy=str(rng.choice(list(STRATEGIES))),
        split=str(rng.choice(list(SPLITS))), merge=str(rng.choice(list(MERGES))), grow=bool(rng.integers(2)),
        tiles=TILE_SETS[rng.integers(len(TILE_SETS))], min_chunk=int(rng.choice([1, 16, 200])),
        n_sm=int(rng.choice([1, 20])), fan_in=int(rng.choice([0, 1, 2, 5, 16])),
    )  # fmt: skip
    check_plan(plan, forest)


def damaged(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    """The same, or with an entry that may be anything."""
    array = np.array(array)
    if len(array) and rng.random() < 0.1:
        array[rng.integers(len(array))] = rng.choice([-2, -1, 0, 1, len(array), LARGEST])
    return array


def plan_at_the_ends(rng: np.random.Generator) -> None:
    """A forest and options at the ends of their ranges, or beyond: planned, or refused in one line."""
    from feather_kernels.costs import UnitCosts
    from feather_kernels.errors import PlanError
    from feather_kernels.forest import Forest
    from feather_kernels.options import UNLIMITED
    from feather_kernels.pack import MERGES, SPLITS, STRATEGIES
    from feather_kernels.plan import Planner
    from feather_kernels.tiles import TILES
    from feather_kernels.trees import random_forest

    def of(*choices: object) -> object:
        return choices[rng.integers(len(choices))]

    tokens = int(rng.choice([1, 64, 5000, 2**26]))
    forest = random_forest(rng, int(rng.integers(1, 300)), max_node_tokens=tokens, max_tail_tokens=tokens)
    names = ("parent", "length", "request_node", "seq_len", "row_offset")
    tiles = of(*TILES.values(), ((64, 64),), ((1 << 20, 1 << 20),), ((1, 1), (3, 5), (1024, 7)))
    try:
        forest = Forest(*(damaged(rng, getattr(forest, name)) for name in names))
        if rng.random() < 0.5:
            forest = rebuilt(rng, forest)
        planner = Planner(
            of(1, 8, 32, 128), of(1, 1, 2, 4, 8), of(16, 64, 128, 256, 1 << 16), max_requests=of(1, 300, 5000),
            strategy=of(*STRATEGIES), split=of(*SPLITS), merge=of(*MERGES), grow=of(True, False), tiles=tiles,
            alpha=of(None, *((2.0**-power,) * len(tiles) for power in (-3, 0, 4, 16, 57))),
            min_chunk=of(1, 64, 5000, UNLIMITED), n_sm=of(1, 7, 132, 4096), fan_in=of(0, 1, 16, UNLIMITED),
            shared_chunk=of(1, 64, UNLIMITED), tail_warps=of(None, 1, UNLIMITED), item_overhead=of(0, 4096, UNLIMITED),
            compute_split_cost=of(0.0, 64.0, 1e300), profit_factor=of(None, 1e-300, 4, 1e300),
            group_capacity=of(1, 8192, UNLIMITED), max_items=of(None, None, 50, 3000),
            max_members=of(None, None, 500), max_parts=of(None, 0, 300), kv_value_bytes=of(1, 2),
            costs=of(None, None, UnitCosts(part=0, part_row=0), UnitCosts(part=1e300)),
            causal_tails=bool(rng.random() < 0.2),
        )  # fmt: skip
        planner.plan(forest)
        planner.plan(forest)
    except PlanError as error:
        assert "\n" not in str(error), error


def rebuilt(rng: np.random.Generator, forest: object) -> object:
    """The forest from nodes in any order, perhaps damaged, or another one from a table."""
    from feather_kernels.forest import Forest

    if rng.random() < 0.5:
        ids = rng.permutation(forest.n_nodes) * int(rng.choice([1, 2**40])) + 5
        known = np.append(ids, -1)  # -1 finds the last
        return Forest.from_nodes(
            damaged(rng, ids), damaged(rng, known[forest.parent.clip(-1, len(ids) - 1)]), forest.length,
            damaged(rng, known[forest.request_node.clip(-1, len(ids) - 1)]), forest.seq_len, forest.row_offset,
        )  # fmt: skip
    requests, pages, size = int(rng.integers(0, 60)), int(rng.integers(0, 40)), 1 << int(rng.integers(0, 6))
    table = rng.integers(0, int(rng.choice([1, 2, 2**31 - 1])), (requests, pages)).astype(rng.choice(["i4", "i8"]))
    return Forest.from_block_table(table, damaged(rng, rng.integers(0, pages * size + 1, requests)), size)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, default=28_000, help="in all (%(default)s)")
    parser.add_argument("--checked", type=int, default=5_000, help="of them against the oracle (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (%(default)s)")
    options = parser.parse_args(arguments)
    if INSIDE not in os.environ:
        if (variables := environment()) is None:
            print("sanitized_plans: error: needs g++ with libasan and libubsan: install them", file=sys.stderr)
            return 2
        return subprocess.run([sys.executable, str(Path(__file__)), *arguments], env=variables).returncode
    begun = time.monotonic()
    for seed in range(options.first, options.first + options.plans):
        rng = np.random.default_rng(seed)
        try:
            (plan_as_it_comes if seed - options.first < options.checked else plan_at_the_ends)(rng)
        except BaseException:
            print(f"sanitized_plans: seed {seed}", file=sys.stderr)
            raise
    print(f"{options.plans} plans, {options.checked} of them checked, {time.monotonic() - begun:.0f} s: nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
