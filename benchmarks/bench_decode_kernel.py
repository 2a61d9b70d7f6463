"""Packed decode attention beside FlashAttention-3 and FlashInfer: PAT's 20 trees, 4 head configurations, side by side.

    PYTHONPATH=kernels python benchmarks/bench_decode_kernel.py --json decode.json --plot decode.png

Needs a Hopper GPU; FlashAttention-3 comes with sgl-kernel, FlashInfer with flashinfer-python (where one is missing, the
report says so). Every system's output is checked against a float32 reference before it is timed. ``warm`` is the
time of a run among back-to-back runs in a CUDA graph, ``flushed`` that of a single run after L2 was filled with other
data; both are medians over ``--repeats`` rounds in which all systems take turns. The floor is the larger of unique KV
bytes over copy bandwidth and FLOP over the matrix rate. ``--from decode.json`` prints and plots a finished run again.

    PYTHONPATH=kernels python benchmarks/bench_decode_kernel.py --kv fp8 --systems fp8 --dtype bfloat16

Caches in e4m3: beside the peers that take them, our kernel on the same values in 16 bits.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from decode_cases import (
    COPY_BANDWIDTH,
    MATRIX_RATE,
    TREE_SETS,
    Case,
    Heads,
    Watchdog,
    choose_trees,
    parse_heads,
    tree_case,
)
from decode_report import markdown, plot, row_header, row_line, summary
from finished import read_finished

from feather_kernels.errors import PlanError
from feather_kernels.trees import named_forest

TOLERANCE = {"float16": 5e-3, "bfloat16": 2e-2}  # of |out - reference| / |reference|, both over all checked rows
PEER_FP8_TOLERANCE = 6e-2  # of peers on a cache in fp8: some cast queries or probabilities to fp8, too
CHECKED = 8  # requests
BUILD_SECONDS, CASE_SECONDS = 900, 60  # after which a step counts as hung


class WrongResult(RuntimeError):
    """An output that does not agree with the reference."""


class LostDevice(RuntimeError):
    """An error after which CUDA answers nothing any more."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="pat", choices=tuple(TREE_SETS), help="the trees (default: %(default)s)")
    parser.add_argument("--trees", default="all", help="numbers from 1 on, such as 1,3,19-20 (default: all)")
    parser.add_argument("--heads", default="32/8,64/8,32/32,16/8", help="query/KV heads (default: %(default)s)")
    parser.add_argument("--pages", default="1,32", help="page sizes (default: %(default)s)")
    parser.add_argument("--systems", default="all", help="names, or peers, ablations, all (default: %(default)s)")
    parser.add_argument("--ablation-pages", default="1", help="page sizes of the ablations (default: %(default)s)")
    parser.add_argument("--cascade-backend", default="fa2", choices=("fa2", "fa3", "auto"))
    parser.add_argument("--repeats", type=int, default=20, help="rounds of measuring (default: %(default)s)")
    parser.add_argument("--flush", action=argparse.BooleanOptionalAction, default=True, help="time flushed runs too")
    parser.add_argument("--copy-bandwidth", default="measure", help="bytes per second, or measure, or h200 (4.3e12)")
    parser.add_argument("--matrix-rate", type=float, default=MATRIX_RATE, help="FLOP per second (default: %(default)g)")
    parser.add_argument("--dtype", default="float16", choices=tuple(TOLERANCE))
    parser.add_argument("--kv", default="16bit", choices=("16bit", "fp8"), help="the caches (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no further case begins")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--plot", type=Path, help="write bars of time over floor here")
    parser.add_argument("--quiet", action="store_true", help="print the summaries only")
    parser.add_argument("--markdown", action="store_true", help="print the docs' table instead of rows")
    parser.add_argument("--from", dest="source", type=Path, metavar="JSON", help="report a finished run; no GPU needed")
    options = parser.parse_args(argv)
    try:
        options.trees = choose_trees(options.trees, TREE_SETS[options.set])
        options.heads = [parse_heads(text) for text in options.heads.split(",")]
        options.pages = [int(text) for text in options.pages.split(",")]
        options.ablation_pages = [int(text) for text in options.ablation_pages.split(",") if text]
        if options.copy_bandwidth not in ("measure", "h200"):
            options.copy_bandwidth = float(options.copy_bandwidth)
    except ValueError as error:
        parser.error(str(error))
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: give at least 1")
    if any(page < 1 or page & (page - 1) for page in options.pages):
        parser.error(f"--pages {options.pages}: give powers of two")
    return options


def cases(options: argparse.Namespace) -> list[tuple[int, Heads, int]]:
    """(tree, heads, page size) in the order of the run."""
    return [(tree, heads, page) for page in options.pages for heads in options.heads for tree in options.trees]


def pool_elements(name: str, heads: Heads, page_size: int, head_dim: int = 128) -> int:
    """Elements of K, without building the batch."""
    forest = named_forest(name)
    runs = (forest.length, forest.seq_len - forest.shared_length)
    return sum(int((-(-run // page_size)).sum()) for run in runs) * page_size * heads.kv * head_dim


def systems_for(chosen: dict[str, Any], page_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """The ablations run on their own page sizes only."""
    from decode_systems import ABLATIONS

    return {
        name: system for name, system in chosen.items() if name not in ABLATIONS or page_size in options.ablation_pages
    }


def check(captured: Any, expected: Any, requests: list[int], tolerance: float) -> float:
    """Replay into a poisoned output and compare; the relative error."""
    out = captured.poisoned_run()
    if out.isnan().any():
        raise WrongResult(f"wrong: {int(out.isnan().any(-1).sum())} rows of the output are NaN or not written")
    error = float((out[requests].float() - expected).norm() / expected.norm())
    if not error <= tolerance:
        raise WrongResult(f"wrong: relative error {error:.1e}, at most {tolerance:g} is right")
    return error


def prepare(name: str, system: Any, inputs: Any, checked: tuple[Any, list[int]], tolerance: float) -> tuple[Any, dict]:
    """Set up, capture and check one system; (captured, result), or (None, result with the error)."""
    import torch
    from decode_systems import Unavailable, describe
    from decode_timing import Captured

    try:
        ready = system(inputs)
        captured = Captured(ready.call)
        error = check(captured, *checked, tolerance)
    except (Unavailable, WrongResult) as problem:
        return None, {"error": str(problem)}
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None, {"error": "out of GPU memory"}
    except Exception as problem:  # a peer may fail in any way; the others are still measured
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise LostDevice(f"{name}: {describe(problem)}") from problem
        return None, {"error": f"{type(problem).__name__}: {describe(problem)}"}
    result: dict[str, Any] = {"relative_error": error, "runs": captured.runs}
    if ready.bytes_moved is not None:
        plan = ready.wrapper.pack_plan
        result |= {"bytes_moved": ready.bytes_moved, "items": plan.n_items, "parts": plan.n_parts}
    return captured, result


def measure_case(case: Case, tree: int, chosen: dict, pools: Any, flush: Any, watchdog: Watchdog, setting: Any) -> dict:
    """Everything about one case, as a record of the JSON file."""
    import torch
    from decode_systems import is_peer, reference
    from decode_timing import measure_in_turn

    options, bandwidth = setting
    label = f"tree {tree + 1} {case.heads} page size {case.page_size}"
    watchdog.expect(CASE_SECONDS, f"{label}, inputs")
    inputs = pools.inputs(case)
    draw = torch.Generator().manual_seed(options.seed)
    sample = torch.randint(case.n_requests, (CHECKED - 2,), generator=draw).tolist()
    sample = [0, case.n_requests - 1, *sample]
    checked = reference(inputs, sample), sample
    captured, results = {}, {}
    for name, system in chosen.items():
        compiles = name in ("flashinfer", "cascade", "triton", "trtllm_mha")
        watchdog.expect(BUILD_SECONDS if compiles else CASE_SECONDS, f"{label}, {name}")
        wide = options.kv == "fp8" and is_peer(name)
        tolerance = PEER_FP8_TOLERANCE if wide else TOLERANCE[options.dtype]
        ready, results[name] = prepare(name, system, inputs, checked, tolerance)
        if ready is not None:
            captured[name] = ready
    watchdog.expect(CASE_SECONDS, f"{label}, timing")
    for name, times in measure_in_turn(captured, options.repeats, flush).items():
        results[name] |= times.summary()
    floor = case.floor(bandwidth, options.matrix_rate)
    return {
        "tree": tree + 1, "name": case.name, "heads": str(case.heads), "page_size": case.page_size,
        "requests": case.n_requests, "unique_tokens": case.unique_tokens, "kv_bytes": case.kv_bytes, "flop": case.flop,
        "floor_us": floor * 1e6, "bound": "memory" if floor == case.kv_bytes / bandwidth else "matrix units",
        "systems": results,
    }  # fmt: skip


def allocate(options: argparse.Namespace, planned: list, watchdog: Watchdog) -> tuple[Any, int]:
    """Random K and V as large as the largest case that fits into memory; (pools, elements of each)."""
    import torch
    from decode_systems import Pools

    names = TREE_SETS[options.set]
    for elements in sorted({pool_elements(names[tree], *rest) for tree, *rest in planned}, reverse=True):
        watchdog.expect(CASE_SECONDS, "random K and V")
        try:
            fp8 = options.kv == "fp8"
            return Pools(elements, getattr(torch, options.dtype), seed=options.seed, fp8=fp8), elements
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    raise SystemExit("not even the smallest case's K and V fit into this GPU's memory")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Measure; (the JSON file's content, exit status)."""
    import torch
    from decode_systems import systems_on_gpu
    from decode_timing import Flush, copy_bandwidth, graph_overhead_us, machine

    from feather_kernels.build import load_kernel
    from feather_kernels.device import Device

    begun = time.monotonic()
    chosen = systems_on_gpu(options.systems, options.cascade_backend)
    torch.backends.cuda.matmul.allow_tf32 = False
    watchdog, planned = Watchdog(), cases(options)
    gpu = Device.of()
    if any(name.startswith("feather") for name in chosen):
        watchdog.expect(BUILD_SECONDS, "building the kernels")
        load_kernel(options.dtype, 128, gpu.capability, shared_kb=gpu.limited_kb)
        if options.kv == "fp8":
            load_kernel(options.dtype, 128, gpu.capability, fp8_kv=True, shared_kb=gpu.limited_kb)
    watchdog.expect(CASE_SECONDS, "copy bandwidth")
    measured = copy_bandwidth()
    bandwidth = {"measure": measured, "h200": COPY_BANDWIDTH}.get(options.copy_bandwidth, options.copy_bandwidth)
    torch.cuda.empty_cache()
    facts = machine() | {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "kv": options.kv, "copy_bandwidth": measured, "floor_bandwidth": bandwidth, "matrix_rate": options.matrix_rate,
        "graph_overhead_us": graph_overhead_us(), "dtype": options.dtype, "head_dim": 128, "repeats": options.repeats,
        "seed": options.seed, "cascade_backend": options.cascade_backend,
    }  # fmt: skip
    print(
        f"{facts['gpu']}, driver {facts['driver']}: copy {measured / 1e12:.2f} TB/s; floor at {bandwidth / 1e12:.2f} "
        f"TB/s, {options.matrix_rate / 1e12:.0f} TFLOP/s; graph of a tiny kernel {facts['graph_overhead_us']:.1f} us; "
        f"{len(planned)} cases",
        flush=True,
    )
    flush = Flush() if options.flush else None
    pools, room = allocate(options, planned, watchdog)
    facts["setup_seconds"] = round(time.monotonic() - begun, 1)
    content: dict[str, Any] = {"machine": facts, "records": [], "left_out": []}
    watchdog.on_stall = lambda: write(options.json, content)
    status, block = 0, None
    batches: dict[tuple[int, int], Case] = {}
    for number, (tree, heads, page) in enumerate(planned):
        label = f"{tree + 1} {heads} p{page}"
        if time.monotonic() - begun > options.budget:
            content["left_out"] += [f"{t + 1} {h} p{p}: over the budget" for t, h, p in planned[number:]]
            status = 1
            break
        name = TREE_SETS[options.set][tree]
        if pool_elements(name, heads, page) > room:
            content["left_out"].append(f"{label}: out of GPU memory for K and V")
            status = 1
            continue
        now = systems_for(chosen, page, options)
        if (tree, page) not in batches:
            element_size = 1 if options.kv == "fp8" else 2
            try:
                batches[tree, page] = tree_case(name, heads, page, seed=options.seed, element_size=element_size)
            except PlanError as error:  # nodes that are no whole pages
                content["left_out"].append(f"{label}: {error}")
                status = 1
                continue
        case, started = batches[tree, page].with_heads(heads), time.monotonic()
        try:
            record = measure_case(case, tree, now, pools, flush, watchdog, (options, bandwidth))
        except LostDevice as error:
            content["left_out"] += [f"{t + 1} {h} p{p}: the device was lost" for t, h, p in planned[number:]]
            content["fatal"] = f"{label}: {error}"
            status = 2
            break
        record["seconds"] = round(time.monotonic() - started, 2)
        content["records"].append(record)
        if any(str(result.get("error", "")).startswith("wrong") for result in record["systems"].values()):
            status = 1
        if not options.quiet:
            if block != (heads, page):
                print(f"\n{row_header(list(now))}")
                block = heads, page
            print(row_line(record, list(now)), flush=True)
        if number % 10 == 9:
            write(options.json, content)
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > 32 << 30:
            torch.cuda.empty_cache()
    watchdog.stop()
    facts["seconds"] = round(time.monotonic() - begun, 1)
    return content, status


def write(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")


def report(content: dict[str, Any], options: argparse.Namespace) -> None:
    """Summaries on standard output, the plot where it is asked for."""
    if content["records"]:
        print(f"\n{summary(content['records'])}")
        if options.plot:
            plot(content["records"], options.plot)
    if content["left_out"]:
        print(f"\nleft out: {len(content['left_out'])} cases\n  " + "\n  ".join(content["left_out"][:10]))
    if "fatal" in content:
        print(f"\nended by an error that CUDA does not recover from: {content['fatal']}")
    print(f"\n{len(content['records'])} cases in {content['machine'].get('seconds', 0):.0f} s")


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    if options.source:
        content, status = read_finished(options.source, "machine", "left_out"), 0
        if options.markdown:
            print(markdown(content["records"]))
        elif not options.quiet:
            block = None
            for record in content["records"]:
                if block != (record["heads"], record["page_size"]):
                    block = record["heads"], record["page_size"]
                    print(f"\n{row_header(list(record['systems']))}")
                print(row_line(record, list(record["systems"])))
    else:
        content, status = run(options)
        write(options.json, content)
    report(content, options)
    return status


if __name__ == "__main__":
    sys.exit(main())
