"""What decode attention takes between the matrix products of a layer, where a server runs it.

    PYTHONPATH=kernels python benchmarks/bench_decode_layer.py --json layer.json
    PYTHONPATH=kernels python benchmarks/bench_decode_layer.py --from layer.json

A CUDA graph of six layers: Qwen3-8B's four products in bfloat16, with three sets of weights in turn, an elementwise
kernel where a server has its rotary embedding, and attention; less the same graph without attention. The weights of a
layer, 0.4 GB, leave nothing in L2, and their kernels little in the instruction caches. ``code`` is the same right after
a run of this package's kernel over other KV, 64 slots, and with another plan: its instructions are there, nothing else
is. Beside it, of attention alone: ``warm``, back to back, and ``flushed``, after other data filled L2. Medians, in
microseconds; all systems take turns.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from decode_cases import Heads, tree_case
from finished import read_finished

BATCHES = (
    "1_2000", "1_8000", "4_8000", "16_8000", "5,32_1000,100", "1,32_5000,100", "1,128_5000,100", "20,128_5000,100",
    "36,160_5000,120", "5,500_5000,100",
)  # fmt: skip
HEADS = Heads(32, 8)
HIDDEN, INNER, HEAD_DIM = 4096, 12288, 128
PRODUCTS = ((HIDDEN, (HEADS.query + 2 * HEADS.kv) * HEAD_DIM), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN))
LAYERS, WEIGHTS = 6, 3
SLOTS = 64  # of the run that brings the instructions
COLUMNS = ("layer", "code", "warm", "flushed")
Call = Callable[[], Any]


class Layers:
    """The products of some layers around a call, for one number of requests."""

    def __init__(self, weights: list[list[Any]], requests: int) -> None:
        import torch

        like = {"dtype": weights[0][0].dtype, "device": "cuda"}
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


def measure(name: str, chosen: dict[str, Any], pools: Any, weights: Any, flush: Any, rounds: int) -> dict[str, Any]:
    """One batch, as a record of the JSON file."""
    from decode_timing import Captured, elapsed_us, events, measure_in_turn

    case = tree_case(name, HEADS)
    inputs = pools.inputs(case)
    layers, before = Layers(weights, case.n_requests), other_run(inputs)
    calls = {system: set_up(inputs).call for system, set_up in chosen.items()}
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
    alone = measure_in_turn({system: Captured(call) for system, call in calls.items()}, rounds, flush)
    return {
        "name": name, "requests": case.n_requests, "floor_us": case.floor() * 1e6,
        "products_us": median(times["none", "layer"]),
        "systems": {
            system: {
                "layer": median(times[system, "layer"]) - median(times["none", "layer"]),
                "code": median(times[system, "code"]) - median(times["none", "code"]),
                "warm": median(alone[system].warm), "flushed": median(alone[system].flushed),
            }
            for system in calls
        },
    }  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all batches; the JSON file's content."""
    import torch
    from decode_systems import Pools, choose_systems
    from decode_timing import Flush, machine

    try:
        chosen = choose_systems(options.systems)
    except ValueError as error:
        raise SystemExit(f"--systems: {error}") from None
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: this benchmark measures a GPU (--from reports a finished run without one)")
    weights = [
        [torch.randn(*shape, dtype=torch.bfloat16, device="cuda").mul_(0.02) for shape in PRODUCTS]
        for _ in range(WEIGHTS)
    ]
    pools = Pools(max(Pools.elements(tree_case(name, HEADS)) for name in options.batches), torch.bfloat16)
    flush = Flush()
    command, when = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), time.strftime("%Y-%m-%d %H:%M:%S")
    content: dict[str, Any] = {"machine": machine() | {"command": command, "when": when}, "records": []}
    for name in options.batches:
        content["records"].append(measure(name, chosen, pools, weights, flush, options.repeats))
        torch.cuda.empty_cache()
    return content


def report(content: dict[str, Any]) -> str:
    """The table of a run, as Markdown."""
    systems = list(content["records"][0]["systems"])
    heads = [f"{system}: {', '.join(COLUMNS)}" for system in systems]
    lines = [f"| batch | products | floor | {' | '.join(heads)} |", "|---" * (3 + len(heads)) + "|"]
    for record in content["records"]:
        cells = [", ".join(f"{record['systems'][system][column]:.1f}" for column in COLUMNS) for system in systems]
        row = [f"`{record['name']}`", f"{record['products_us']:.0f}", f"{record['floor_us']:.1f}", *cells]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


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
    if options.json:
        options.json.write_text(json.dumps(content) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
