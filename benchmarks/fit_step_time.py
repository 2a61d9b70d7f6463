"""Fit the H200 profile of the step-time model to kernel times, and print the error at every point.

    python benchmarks/fit_step_time.py [--row-order F] [--groups F] [--steps F] [--packed DIR] [--servers DIR]
                                       [--write PROFILE.json]

The files (default: tests/data) hold decode attention by row order and by number of groups, and what
`measure_steps.py` measured; the folders what `bench_decode_kernel.py` (default: tests/data/h200_packed_kernel, of the
kernel that the servers ran) and `bench_server.py` (default: docs/measured) did. No figure of a scheduling policy
enters, and to a check nothing is fitted. `--write` puts the values into a profile, leaving names, kinds and sources as
they are. Needs SciPy.

    decode attention fa3         108 points   mean error   1.5%   largest   5.0%
    decode attention flashinfer   54 points   mean error   2.6%   largest   7.5%
    fa3, unequal rows (a check)   21 points   mean error   8.1%   largest  25.8%
    decode attention pat          22 points   mean error   6.9%   largest  23.8%
    pat, 64/8 heads (a check)     27 points   mean error   6.4%   largest  20.8%
    pat, few requests (a check)   25 points   mean error   4.6%   largest  12.3%
    pat, PAT's trees (a check)    15 points   mean error  12.6%   largest  29.9%
    pat, KV in the L2 (a check)   33 points   mean error  19.0%   largest  49.8%
    matrix products               13 points   mean error   1.6%   largest   3.9%
    prefill attention             39 points   mean error   6.5%   largest  24.4%
    whole steps                   26 points   mean error   3.1%   largest   9.9%
    server with pat (a check)     28 points   mean error   5.0%   largest  53.0%
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from feather_sglang.replay.attention_time import AttentionTime, Packed, RowByRow
from feather_sglang.replay.batch_sharing import BatchSharing
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.profiles import HardwareProfile, load_profile
from feather_sglang.replay.step_time import StepTimeModel

ROOT = Path(__file__).parent.parent
DATA, MEASURED = ROOT / "tests" / "data", ROOT / "docs" / "measured"
SUFFIX = 120  # tokens of its own that each row of the measured batches has
L2_BYTES = 62_914_560  # of an H200
KV_HEADS, HEAD_BYTES = 8, 2 * 128 * 2  # of the measured layer; a token is KV_HEADS * HEAD_BYTES bytes
QWEN3_LAYER_PRODUCTS = 192_937_984  # weights in a layer of Qwen3-8B


@dataclass(frozen=True)
class Point:
    """One measured kernel call."""

    label: str
    microseconds: float
    lengths: np.ndarray
    sharing: BatchSharing
    group: int = 4  # query heads to a KV head


def decode_point(rows: int, prefix: int, groups: int, order: str, microseconds: float) -> Point:
    """Rebuild the batch of a measurement: `groups` prefixes of equal share, rows in the named order."""
    members = [row % groups for row in range(rows)]
    if order == "grouped":
        members.sort()
    elif order == "shuffled":
        random.Random(0).shuffle(members)
    lengths = [prefix + SUFFIX] * rows
    paths = [(group, groups + row) for row, group in enumerate(members)]
    sharing = BatchSharing.from_paths(paths, prefix, lengths)
    label = f"{rows:4d} rows x {prefix:5d}, {groups:2d} groups {order}"
    return Point(label, microseconds, np.array(lengths, dtype=float), sharing)


def decode_points(row_order: Path, groups: Path) -> dict[str, list[Point]]:
    """Read both decode attention files: kernel -> points."""
    points: dict[str, list[Point]] = {"fa3": [], "flashinfer": []}
    for row in json.loads(row_order.read_text()):
        for column, kernel in (("fa3", "fa3"), ("fi", "flashinfer")):
            for order in ("grouped", "shuffled", "interleaved"):
                if f"{column}_{order}" in row:
                    time = row[f"{column}_{order}"]
                    points[kernel].append(decode_point(row["B"], row["P"], row["groups"], order, time))
    for row in json.loads(groups.read_text()):
        points["fa3"].append(decode_point(row["B"], row["P"], row["groups"], "grouped", row["fa3_p1"]))
    return points


def tree_point(name: str, heads: str, microseconds: float) -> Point:
    """Rebuild the batch of a tree as PAT writes it: nodes per level _ tokens per level, the last level the requests."""
    nodes, tokens = ([int(number) for number in part.split(",")] for part in name.split("_"))
    block = math.gcd(*tokens)
    members = np.arange(nodes[-1])
    levels = [members]
    for above, below in zip(nodes[-2::-1], nodes[:0:-1], strict=True):
        members = members * above // below
        levels.insert(0, members)
    # A block is told by its id and all before it, so a node's index among its level will do for each of its blocks.
    paths = [
        tuple(int(level[row]) for level, count in zip(levels, tokens, strict=True) for _ in range(count // block))
        for row in range(nodes[-1])
    ]
    lengths = [sum(tokens)] * nodes[-1]
    query, kv = map(int, heads.split("/"))
    sharing = BatchSharing.from_paths(paths, block, lengths)
    return Point(f"{name} at {heads}", microseconds, np.array(lengths, dtype=float), sharing, query // kv)


def tree_points(path: Path, heads: str) -> list[Point]:
    """Read the packed kernel's times at page size 1, L2 warm."""
    return [
        tree_point(record["name"], heads, record["systems"]["feather"]["warm_us"])
        for record in json.loads(path.read_text())["records"]
        if record["heads"] == heads and record["page_size"] == 1
    ]


def outgrows_l2(point: Point) -> bool:
    """Tell whether a batch's KV exceeds the L2: a server's layers never find theirs there."""
    return point.sharing.unique_tokens * KV_HEADS * HEAD_BYTES > L2_BYTES


def mixed_points(table: Sequence[dict[str, Any]]) -> list[Point]:
    """Read decode attention of rows of unequal length that share nothing."""
    points = []
    for row in table:
        lengths = row["lengths"]
        sharing = BatchSharing.from_paths([(i,) for i in range(len(lengths))], max(lengths), lengths)
        label = f"{len(lengths):4d} rows, {sum(lengths):7d} tokens, longest {max(lengths):6d}"
        points.append(Point(label, row["us"], np.array(lengths, dtype=float), sharing))
    return points


def relative(predicted: Sequence[float], measured: Sequence[float]) -> np.ndarray:
    """Return predicted / measured - 1."""
    return np.asarray(predicted) / np.asarray(measured) - 1


def minimise(errors: Callable[[np.ndarray], np.ndarray], start: Sequence[float], scale: Sequence[float]) -> np.ndarray:
    """Return the positive parameters with the least mean square of `errors`."""
    result = least_squares(errors, start, bounds=(0, np.inf), x_scale=list(scale))
    return np.round(result.x, 6)


def fit_row_by_row(points: Sequence[Point], known: RowByRow) -> RowByRow:
    """Fit launch, item and byte times, the window, the L2 and the overlap; the rest of `known` stays."""

    def kernel(x: np.ndarray) -> RowByRow:
        return RowByRow(
            launch_s=x[0] * 1e-6,
            item_s=x[1] * 1e-6,
            byte_s=x[2] * 1e-11,
            processors=known.processors,
            split_rows=known.split_rows,
            longest_share=known.longest_share,
            window_rows=x[3],
            l2_bytes=x[4] * 1e6,
            dram_bytes_per_s=known.dram_bytes_per_s,
            overlap=1 + x[5],
        )

    errors = lambda x: attention_errors(points, kernel(x))  # noqa: E731
    return kernel(minimise(errors, start=(8, 2, 1.7, 25, 45, 1), scale=(1, 1, 0.1, 3, 10, 0.3)))


def fit_packed(points: Sequence[Point], known: Packed) -> Packed:
    """Fit launch, tile and part times and the overlap to times with warm L2; the rest of `known` stays."""

    def kernel(x: np.ndarray) -> Packed:
        return replace(known, launch_s=x[0] * 1e-6, tile_byte_s=x[1] * 1e-11, part_s=x[2] * 1e-7, overlap=1 + x[3])

    errors = lambda x: attention_errors(points, kernel(x))  # noqa: E731
    return kernel(minimise(errors, start=(12, 2, 1, 1), scale=(5, 1, 1, 1)))


def attention_errors(points: Sequence[Point], kernel: AttentionTime) -> np.ndarray:
    """Return the relative error at each point."""
    predicted = [kernel.seconds(p.lengths, p.sharing, KV_HEADS, HEAD_BYTES, p.group) * 1e6 for p in points]
    return relative(predicted, [p.microseconds for p in points])


def product_times(rows: np.ndarray, weights: float, flop: float, overlap: float) -> np.ndarray:
    """Return microseconds of a layer's products at `weights` TB/s and `flop` PFLOP/s."""
    reading = QWEN3_LAYER_PRODUCTS * 2 / weights * 1e-6
    computing = QWEN3_LAYER_PRODUCTS * 2 * rows / flop * 1e-9
    return (reading**overlap + computing**overlap) ** (1 / overlap)


def fit_products(table: Sequence[dict[str, float]]) -> tuple[dict[str, float], np.ndarray]:
    """Fit both rates and their overlap to the sum of a layer's four products."""
    rows = np.array([line["rows"] for line in table])
    measured = np.array([sum(line[name] for name in ("qkv", "o", "gate_up", "down")) for line in table])
    x = minimise(lambda x: relative(product_times(rows, *x), measured), start=(3.6, 0.66, 4), scale=(1, 0.1, 1))
    values = {"weight_bytes_per_s": x[0] * 1e12, "gemm_flop_per_s": x[1] * 1e15, "products_overlap": x[2]}
    return values, relative(product_times(rows, *x), measured)


def prefill_flop(row: dict[str, float], tile_keys: float) -> float:
    """Return the FLOP of a measured call, queries padded to whole tiles: 128 rows are 32 tokens x 4 heads."""
    padded = np.ceil(row["new"] / 32) * 32
    return row["rows"] * 4 * 32 * 128 * padded * (row["cached"] + (row["new"] + 1) / 2 + tile_keys)


def fit_prefill_attention(table: Sequence[dict[str, float]]) -> tuple[dict[str, float], np.ndarray]:
    """Fit the rate and the set-up of a tile; a launch time beside them is dropped: the step's overhead holds it."""

    def errors(x: np.ndarray) -> np.ndarray:
        predicted = [x[0] + prefill_flop(row, x[1]) / x[2] * 1e-9 for row in table]  # us, keys, PFLOP/s
        return relative(predicted, [row["us"] for row in table])

    x = minimise(errors, start=(20, 100, 0.6), scale=(10, 100, 0.1))
    return {"prefill_tile_keys": x[1], "prefill_attention_flop_per_s": x[2] * 1e15}, errors(x)


def whole_steps(model: StepTimeModel, table: Sequence[dict[str, float]]) -> tuple[list[str], list[float], list[float]]:
    """Return labels, predicted and measured microseconds of SGLang's one-batch benchmark, a batch without sharing.

    Its prefill ran without CUDA graphs; steps of under 4,096 tokens are bound by that and left out.
    """
    labels, predicted, measured = [], [], []
    for row in table:
        rows, new = int(row["rows"]), int(row["input"])
        lengths = [new + int(row["output"]) // 2] * rows
        sharing = BatchSharing.from_paths([(i,) for i in range(rows)], lengths[0], lengths)
        labels.append(f"decode  {rows:4d} rows x {new:5d}")
        predicted.append(model.decode(lengths, sharing) * 1e6)
        measured.append(row["decode_us"])
        if rows * new >= 4096:
            labels.append(f"prefill {rows:4d} rows x {new:5d}")
            predicted.append(model.prefill([new] * rows, [0] * rows) * 1e6)
            measured.append(row["prefill_us"])
    return labels, predicted, measured


def server_steps(model: StepTimeModel, path: Path) -> tuple[list[str], list[float], list[float]]:
    """Return labels, predicted and measured output tokens/s of a server with `pat` whose whole batch decodes.

    The first two steps of these runs shared nothing (docs/lab/step_time.md).
    """
    labels, predicted, measured = [], [], []
    for record in json.loads(path.read_text())["records"]:
        kind, _, figures = record["case"].partition(":")
        if (record["server"], kind) != ("pat", "decode") or not record["steady"]:
            continue
        rows, groups, prefix, output = map(int, figures.split(","))
        lengths = [prefix + 20 + output // 2] * rows
        shared = BatchSharing.from_paths([(i % (groups or rows), rows + i) for i in range(rows)], prefix, lengths)
        alone = BatchSharing.from_paths([(i,) for i in range(rows)], prefix, lengths)
        steps = record["steady"]["output_tokens"] / rows
        seconds = 2 * model.decode(lengths, alone) + (steps - 2) * model.decode(lengths, shared)
        labels.append(f"{rows:4d} rows x {prefix:5d}, {groups:2d} groups")
        predicted.append(rows * steps / seconds)
        measured.append(record["steady"]["tok_s"])
    return labels, predicted, measured


def fit_rest(profile: HardwareProfile, table: Sequence[dict[str, float]]) -> dict[str, float]:
    """Fit the overhead of a step and the elementwise traffic of a token to whole steps, all else given."""

    def changed(x: np.ndarray) -> HardwareProfile:
        return replaced(profile, step_overhead_s=x[0] * 1e-3, elementwise_vectors=x[1])

    def errors(x: np.ndarray) -> np.ndarray:
        _, predicted, measured = whole_steps(StepTimeModel(changed(x), load_model("qwen3-8b")), table)
        return relative(predicted, measured)

    x = minimise(errors, start=(1, 20), scale=(1, 10))
    return {"step_overhead_s": x[0] * 1e-3, "elementwise_vectors": x[1]}


def replaced(profile: HardwareProfile, **values: Any) -> HardwareProfile:
    """Return the profile with other values."""
    return HardwareProfile(**{**vars(profile), **values})


def packed_kernel(known: Packed, folder: Path, each: bool) -> Packed:
    """Fit the packed kernel to a server's batches at 32/8 heads, and print it beside those and all others."""
    serving = tree_points(folder / "decode_h200_serving.json", "32/8")
    small = tree_points(folder / "decode_h200_small.json", "32/8")
    trees = tree_points(folder / "decode_h200.json", "32/8")
    large = [point for point in serving if outgrows_l2(point)]
    kernel = fit_packed(large, known)
    for title, points in (
        ("decode attention pat", large),
        ("pat, 64/8 heads (a check)", tree_points(folder / "decode_h200_serving.json", "64/8")),
        ("pat, few requests (a check)", [point for point in small if outgrows_l2(point)]),
        ("pat, PAT's trees (a check)", [point for point in trees if outgrows_l2(point)]),
        ("pat, KV in the L2 (a check)", [point for point in [*serving, *small, *trees] if not outgrows_l2(point)]),
    ):
        report_attention(title, points, kernel, each)
    return kernel


def report_attention(title: str, points: Sequence[Point], kernel: AttentionTime, each: bool) -> None:
    """Print the errors of a decode kernel."""
    report(title, [p.label for p in points], attention_errors(points, kernel), each)


def report(title: str, labels: Sequence[str], errors: np.ndarray, each: bool) -> None:
    """Print one line for the term, and one for each point."""
    mean, largest = np.abs(errors).mean(), np.abs(errors).max()
    print(f"{title:28} {len(errors):3d} points   mean error {mean:6.1%}   largest {largest:6.1%}")
    for label, error in zip(labels, errors, strict=True):
        if each:
            print(f"    {label:44} {error:+7.1%}")


def main() -> None:
    """Fit, print, and write the values if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row-order", type=Path, default=DATA / "h200_decode_attention_by_row_order.json")
    parser.add_argument("--groups", type=Path, default=DATA / "h200_decode_attention_by_groups.json")
    parser.add_argument("--steps", type=Path, default=DATA / "h200_steps.json")
    parser.add_argument(
        "--packed", type=Path, default=DATA / "h200_packed_kernel", help="folder of measurements of the packed kernel"
    )
    parser.add_argument("--servers", type=Path, default=MEASURED, help="folder of server measurements")
    parser.add_argument("--write", type=Path, help="profile to put the values into")
    parser.add_argument("--summary", action="store_true", help="print no single points")
    args = parser.parse_args()
    each = not args.summary
    profile = load_profile(args.write or DATA / "h200_base.json")
    steps = json.loads(args.steps.read_text())

    kernels: dict[str, AttentionTime] = {}
    for name, points in decode_points(args.row_order, args.groups).items():
        kernels[name] = fit_row_by_row(points, profile.attention[name])
        report_attention(f"decode attention {name}", points, kernels[name], each)
    mixed = mixed_points(steps["decode_attention_mixed"])
    report_attention("fa3, unequal rows (a check)", mixed, kernels["fa3"], each)
    kernels["pat"] = packed_kernel(profile.attention["pat"], args.packed, each)

    values = {"copy_bytes_per_s": steps["copy"]["bytes"] / steps["copy"]["us"] * 1e6}
    products, errors = fit_products(steps["products"])
    report("matrix products", [f"{line['rows']:5d} rows" for line in steps["products"]], errors, each)
    values.update(products)
    table = steps["prefill_attention"]
    attention, errors = fit_prefill_attention(table)
    values.update(attention)
    labels = [f"{row['rows']:3d} rows x {row['new']:5d} after {row['cached']:5d}" for row in table]
    report("prefill attention", labels, errors, each)
    fitted = replaced(profile, attention=kernels, **values)
    values.update(fit_rest(fitted, steps["whole_steps"]))
    fitted = replaced(fitted, **values)
    model = StepTimeModel(fitted, load_model("qwen3-8b"))
    labels, predicted, measured = whole_steps(model, steps["whole_steps"])
    report("whole steps", labels, relative(predicted, measured), each)
    labels, predicted, measured = server_steps(
        StepTimeModel(fitted, load_model("qwen3-8b"), "pat"), args.servers / "server_h200_decode.json"
    )
    report("server with pat (a check)", labels, relative(predicted, measured), each)

    for name, value in values.items():
        print(f"{name} = {value:.4g}")
    for name, kernel in kernels.items():
        print(f"{name}: {kernel}")
    if args.write:
        document = json.loads(args.write.read_text())
        for name, value in values.items():
            document["parameters"][name]["value"] = float(f"{value:.4g}")
        for name, kernel in kernels.items():
            for parameter, value in vars(kernel).items():
                document["attention"][name]["parameters"][parameter]["value"] = float(f"{value:.4g}")
        args.write.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
