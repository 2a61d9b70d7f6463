"""Processor time of a work unit and of each of its steps, by tile, for the pack strategy `time`.

    PYTHONPATH=kernels python benchmarks/measure_unit_costs.py --json costs.json
    PYTHONPATH=kernels python benchmarks/measure_unit_costs.py --from costs.json

Each tile's queue of a plan is launched alone, with ``merge="kernel"``, so that nobody waits. What a kernel takes
beyond an empty one, times the processors, is taken as units * unit + steps * step (least squares of relative errors, by
tile, over launches with at least a unit for every team of warps). The batches are none of PAT's trees, on which the
kernel is reported. The costs in `feather_kernels.costs` are near these.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from decode_cases import Heads, grid, parse_heads, tree_case

from feather_kernels.options import DEFAULT_ALPHA, tail_warps_of

BATCHES = (
    "1,12_6000,300", "1,384_512,48", "1,6,96_700,200,64", "1,3,24,384_128,384,64,48", "1,10,40,80,640_300,96,48,40,24",
    "3,12,192_400,200,40", "200_700", "1,6,400_64,800,200", "1,12,24,48,192,768_200,100,50,50,30,40", "1,768_1500,40",
    "2,32_900,150", "1,24,120,480_400,64,100,48",
)  # fmt: skip
HEADS = ("32/8", "64/8", "32/32", "16/8")
STRATEGIES = ("naive", "profit", "compute")
HEAD_DIM = 128
# Of a processor on the Hopper path, by m.
TEAMS = {m: round(1 / share) for m, share in DEFAULT_ALPHA.items()} | {8: tail_warps_of("hopper", HEAD_DIM)}
ROUNDS = 5


class Launch(NamedTuple):
    """One tile's queue, run alone. Units and steps are counted per KV head, over all of them."""

    tree: str
    heads: str
    strategy: str
    m: int
    n: int
    units: int
    steps: int
    us: float


def launches_of(plan: Any, tree: str, heads: Heads) -> Iterable[tuple[int, Launch]]:
    """The plan's queues with work, and what each has to do; `us` is still to be measured."""
    begin = plan.queue_begin.tolist()
    for queue, (m, n) in enumerate(reversed(plan.tiles)):
        items = plan.items[begin[queue] : begin[queue + 1]]
        if len(items):
            steps = int((-(-(items[:, 3] - items[:, 2]) // n)).sum())
            yield queue, Launch(tree, str(heads), plan.strategy, m, n, len(items) * heads.kv, steps * heads.kv, 0.0)


def measure(heads: Sequence[Heads]) -> dict[str, Any]:
    """Run all batches; needs a Hopper GPU."""
    import torch
    from decode_systems import Pools
    from decode_timing import Captured, graph_overhead_us, machine, measure_in_turn

    from feather_kernels import PackedDecodeWrapper

    cases = [tree_case(tree, h) for h in heads for tree in BATCHES]
    pools = Pools(max(map(Pools.elements, cases)), torch.float16)
    found: list[Launch] = []
    for case in cases:
        inputs = pools.inputs(case)
        out = torch.empty_like(inputs.q)
        for strategy in STRATEGIES:
            decode = PackedDecodeWrapper(
                case.heads.query, case.heads.kv, HEAD_DIM, max_requests=case.n_requests, strategy=strategy,
                merge="kernel", path="hopper",
            )  # fmt: skip
            plan = decode.plan(case.forest, inputs.table, inputs.seq_lens)
            for queue, launch in launches_of(plan, case.name, case.heads):

                def call(decode: Any = decode, inputs: Any = inputs, out: Any = out, queue: int = queue) -> Any:
                    decode.run_queue(queue, inputs.q, inputs.k, inputs.v, out)
                    return out

                times = measure_in_turn({"queue": Captured(call)}, ROUNDS, None)
                found.append(launch._replace(us=times["queue"].summary()["warm_us"]))
    return {"machine": {**machine(), "empty_us": graph_overhead_us()}, "launches": [row._asdict() for row in found]}


def fit(launches: Iterable[Launch], processors: int, empty_us: float) -> dict[int, tuple[float, float, int]]:
    """By m: ns of a unit and of a step for one KV head of one processor, and how many launches say so."""
    rows: dict[int, list[Launch]] = {}
    for launch in launches:
        if launch.units >= processors * TEAMS[launch.m]:
            rows.setdefault(launch.m, []).append(launch)
    found = {}
    for m, some in sorted(rows.items()):
        ns = np.array([(launch.us - empty_us) * 1e3 * processors for launch in some])
        counts = np.array([(launch.units, launch.steps) for launch in some], float)
        unit, step = np.linalg.lstsq(counts / ns[:, None], np.ones(len(some)), rcond=None)[0]
        found[m] = (float(unit), float(step), len(some))
    return found


def report(data: dict[str, Any]) -> str:
    processors, empty = data["machine"]["processors"], data["machine"]["empty_us"]
    rows = [["m", "unit ns", "step ns", "launches"]]
    for m, (unit, step, count) in fit([Launch(**row) for row in data["launches"]], processors, empty).items():
        rows.append([str(m), f"{unit:.0f}", f"{step:.0f}", str(count)])
    return f"{data['machine']['gpu']}, head_dim {HEAD_DIM}, empty launch {empty:.1f} us\n\n{grid(rows)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default=",".join(HEADS), help="query/KV heads (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="keep what was measured here")
    parser.add_argument("--from", type=Path, dest="source", help="print an earlier run again, without a GPU")
    options = parser.parse_args(argv)
    if options.source:
        data = json.loads(options.source.read_text())
    else:
        data = measure([parse_heads(text) for text in options.heads.split(",")])
        if options.json:
            options.json.write_text(json.dumps(data))
    print(report(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
