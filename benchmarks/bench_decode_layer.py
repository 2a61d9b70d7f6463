"""Time of decode attention between the matrix products of a layer, as on a server.

    PYTHONPATH=kernels python benchmarks/bench_decode_layer.py --json layer.json
    PYTHONPATH=kernels python benchmarks/bench_decode_layer.py --from layer.json

A CUDA graph of six layers: Qwen3-8B's four products in bfloat16, with three sets of weights in turn, an elementwise
kernel where a server has its rotary embedding, and attention; less the same graph without attention. The weights of a
layer, 0.4 GB, leave nothing in L2, and their kernels little in the instruction caches. ``code`` is the same right after
a run of this package's kernel over other KV, 64 slots, and with another plan: its instructions are there, nothing else
is. Beside it, of attention alone: ``warm``, back to back, and ``flushed``, after other data filled L2. Medians, in
microseconds; all systems take turns. Every system's output is checked against a float32 reference first.

What the products' time could hide by asking L2 for the next layer's KV is no more than ``code`` less ``warm``, as only
that is from KV; and it costs the products the time in which memory delivers it, where they are bound by memory.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench_decode_kernel import CHECKED, TOLERANCE, prepare, write
from decode_cases import COPY_BANDWIDTH, Case, Heads, grid, tree_case
from finished import read_finished

BATCHES = (
    "1_2000", "1_8000", "4_8000", "16_8000", "5,32_1000,100", "1,32_5000,100", "1,128_5000,100", "20,128_5000,100",
    "36,160_5000,120", "5,500_5000,100",
)  # fmt: skip
HEADS = Heads(32, 8)
HIDDEN, INNER, HEAD_DIM, DTYPE = 4096, 12288, 128, "bfloat16"
PRODUCTS = ((HIDDEN, (HEADS.query + 2 * HEADS.kv) * HEAD_DIM), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN))
LAYERS, WEIGHTS = 6, 3
SLOTS = 64  # of the run that brings the instructions
COLUMNS = ("layer", "code", "warm", "flushed")
Call = Callable[[], Any]


def batch(name: str) -> Case:
    """The batch of a name, or the end of the program in one line."""
    try:
        return tree_case(name, HEADS)
    except ValueError:
        raise SystemExit(f"--batches {name}: give nodes and tokens of each level, such as 5,32_1000,100") from None


class Layers:
    """The products of some layers around a call, for one number of requests."""

    def __init__(self, weights: list[list[Any]], requests: int) -> None:
        import torch

        like = {"dtype": weights[0][0].dtype, "device": weights[0][0].device}
        self._weights = weights
        self._rows = [torch.randn(requests, width, **like) for width, _ in PRODUCTS]
        self._outs = [torch.empty(requests, width, **like) for _, width in PRODUCTS]

    def around(self, *calls: Call) -> Call:
        """A layer's first product, an elementwise kernel, the calls, the other products; `LAYERS` times."""
        import torch

        def run() -> Any:
            for layer in range(LAYERS):
                products = zip(self._rows, self._weights[layer % WEIGHTS], self._outs, strict=True)
                for index, (rows, weight, out) in enumerate(products):
                    torch.mm(rows, weight, out=out)
                    if index == 0:
                        rows.mul_(1.0)
                        for call in calls:
                            call()
            return self._outs[-1]

        return run


def other_run(inputs: Any) -> Call:
    """A run of this package's kernel on a batch of the same shape, whose KV is a few slots of its own."""
    import torch

    from feather_kernels import PackedDecodeWrapper

    case = inputs.case
    wrapper = PackedDecodeWrapper(
        case.heads.query, case.heads.kv, case.head_dim, dtype=inputs.q.dtype, device=inputs.q.device,
        max_requests=case.n_requests,
    )  # fmt: skip
    wrapper.plan(case.forest, (inputs.table % SLOTS).contiguous(), inputs.seq_lens)
    q, kv = inputs.q.clone(), torch.randn(2, SLOTS, case.heads.kv, case.head_dim).to(inputs.q)
    out = torch.empty_like(q)
    return lambda: wrapper.run(q, kv[0], kv[1], out=out)


def measure(case: Case, chosen: dict[str, Any], pools: Any, weights: Any, flush: Any, rounds: int) -> dict[str, Any]:
    """One batch, as a record of the JSON file."""
    from decode_systems import reference
    from decode_timing import Captured, elapsed_us, events, measure_in_turn

    inputs = pools.inputs(case)
    sample = sorted({index * (case.n_requests - 1) // (CHECKED - 1) for index in range(CHECKED)})
    checked = reference(inputs, sample), sample
    alone, results = {}, {}
    for system, set_up in chosen.items():
        ready, results[system] = prepare(system, set_up, inputs, checked, TOLERANCE[DTYPE])
        if ready is not None:
            alone[system] = ready
    layers, before = Layers(weights, case.n_requests), other_run(inputs)
    calls = {system: ready.call for system, ready in alone.items()}
    graphs = {("none", "layer"): layers.around(), ("none", "code"): layers.around(before)}
    graphs |= {(system, "layer"): layers.around(call) for system, call in calls.items()}
    graphs |= {(system, "code"): layers.around(before, call) for system, call in calls.items()}
    captured = {key: Captured(run) for key, run in graphs.items()}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in graphs}
    for _ in range(rounds):
        for key, graph in captured.items():
            pair = events()
            graph.single.replay()  # also lets the host get ahead
            pair[0].record()
            graph.single.replay()
            pair[1].record()
            pair[1].synchronize()
            times[key].append(elapsed_us(pair) / LAYERS)
    for system, apart in measure_in_turn(alone, rounds, flush).items():
        results[system] |= {
            "layer": median(times[system, "layer"]) - median(times["none", "layer"]),
            "code": median(times[system, "code"]) - median(times["none", "code"]),
            "warm": median(apart.warm), "flushed": median(apart.flushed),
        }  # fmt: skip
    return {
        "name": case.name, "requests": case.n_requests, "floor_us": case.floor() * 1e6,
        "products_us": median(times["none", "layer"]), "systems": results,
    }  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all batches; the JSON file's content."""
    import torch
    from decode_systems import Pools, systems_on_gpu
    from decode_timing import Flush, machine

    cases = [batch(name) for name in options.batches]
    chosen, dtype = systems_on_gpu(options.systems), getattr(torch, DTYPE)
    weights = [
        [torch.randn(*shape, dtype=dtype, device="cuda").mul_(0.02) for shape in PRODUCTS] for _ in range(WEIGHTS)
    ]
    pools = Pools(max(map(Pools.elements, cases)), dtype)
    flush = Flush()
    command, when = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), time.strftime("%Y-%m-%d %H:%M:%S")
    content: dict[str, Any] = {"machine": machine() | {"command": command, "when": when}, "records": []}
    for case in cases:
        content["records"].append(measure(case, chosen, pools, weights, flush, options.repeats))
        torch.cuda.empty_cache()
    return content


def report(content: dict[str, Any]) -> str:
    """The table of a run, as Markdown."""
    systems = list(content["records"][0]["systems"])
    heads = [f"{system}: {', '.join(COLUMNS)}" for system in systems]
    lines = [f"| batch | products | floor | {' | '.join(heads)} |", "|---" * (3 + len(heads)) + "|"]
    for record in content["records"]:
        results = [record["systems"][system] for system in systems]
        cells = [one.get("error") or ", ".join(f"{one[column]:.1f}" for column in COLUMNS) for one in results]
        row = [f"`{record['name']}`", f"{record['products_us']:.0f}", f"{record['floor_us']:.1f}", *cells]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def prefetch(content: dict[str, Any]) -> str:
    """What L2 can bring this package's kernel: warm over flushed, and the most that a prefetch of KV gains."""
    rows = [["batch", "warm/flushed", "most us", "of the layer", "KV for L2, MB", "its time in memory, us"]]
    shares, beyond = [], []
    for record in content["records"]:
        result = record["systems"].get("feather", {})
        if "warm" not in result:
            continue
        gain = max(0.0, result["code"] - result["warm"])
        kv = min(batch(record["name"]).kv_bytes, content["machine"]["l2_bytes"])
        memory_us = kv / COPY_BANDWIDTH * 1e6
        shares.append(gain / (record["products_us"] + result["layer"]))
        beyond += [record["name"]] if gain > memory_us else []
        cells = f"{result['warm'] / result['flushed']:.2f}", f"{gain:.1f}", f"{shares[-1]:.1%}", f"{kv / 1e6:.0f}"
        rows.append([record["name"], *cells, f"{memory_us:.1f}"])
    if not shares:
        return "no feather was measured"
    most, mean, names = max(shares), sum(shares) / len(shares), ", ".join(beyond) or "none"
    return f"{grid(rows)}\nof a layer {most:.1%} at most, {mean:.1%} in the mean; more than memory takes: {names}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", default=BATCHES, metavar="NAME", help=f"(default: {' '.join(BATCHES)})")
    parser.add_argument("--systems", default="feather,fa3-planned", help="names (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="rounds of measuring (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--from", dest="source", type=Path, metavar="JSON", help="report a finished run; no GPU needed")
    options = parser.parse_args()
    content = read_finished(options.source, "machine") if options.source else run(options)
    print(report(content))
    print(f"\n{prefetch(content)}")
    write(options.json, content)
    return int(any("error" in result for record in content["records"] for result in record["systems"].values()))


if __name__ == "__main__":
    sys.exit(main())
