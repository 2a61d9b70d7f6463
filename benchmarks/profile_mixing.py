"""Cost of mixing prefix groups in a decode batch, and of its row order: times, DRAM bytes, L2 hits.

    PYTHONPATH=kernels python benchmarks/profile_mixing.py --json mixing.json
    PYTHONPATH=kernels python benchmarks/profile_mixing.py --from mixing.json

Needs a Hopper GPU and Nsight Compute (``ncu``; without it there are times only). One attention layer, float16,
head_dim 128, page size 1. A batch's groups share a prefix each; ``stranger`` is one request of another prefix among
all others (Feather's figure 3.2). Orders of rows: ``prefix`` has a group's rows next to each other, ``interleaved``
deals the groups in turn, ``arrival`` is shuffled. The orders of a batch are the same requests over the same table.

First every system's output is checked and its calls are timed, CUDA graphs in turn, L2 warm. Then ncu runs this script
again with ``--counted``: each system is called some times unseen, then a kernel that does nothing marks where its
counted calls begin, however many kernels a call launches. ncu's CSV stays beside the JSON; ``--from mixing.json --csv
mixing.csv`` joins the two again. Exit status: 0, 1 if something could not be measured, 2 if the GPU was lost.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import profile_decode_kernel
from bench_decode_kernel import BUILD_SECONDS, CASE_SECONDS, CHECKED, TOLERANCE, LostDevice, prepare, write
from decode_cases import Case, Heads, Ints, Watchdog, parse_heads
from finished import read_finished
from profile_decode_kernel import short

from feather_kernels.forest import Forest
from feather_kernels.trees import forest_table

STRANGER = "stranger"
ORDERS = ("prefix", "interleaved", "arrival")
HEAD_DIM, DTYPE = 128, "float16"
WARM_CALLS = 3
MARK = "spin_kernel"  # what torch.cuda._sleep launches

SECONDS, SECTORS = "gpu__time_duration.sum", "lts__t_sectors_srcunit_tex_op_read.sum"
SUMS = {  # of the kernels of a call: (ncu's name, factor)
    "us": (SECONDS, 1e6),
    "dram_read_bytes": ("dram__bytes_read.sum", 1),
    "sm_read_bytes": (SECTORS, 32),  # what the SMs read from L2
}
RATES = {  # weighted by time
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_pct": "lts__t_sector_hit_rate.pct",
}
METRICS = (*(metric for metric, _ in SUMS.values()), *RATES.values())
NCU_OPTIONS = (
    "--csv", "--print-units", "base", "--cache-control", "none", "--clock-control", "none", "--profile-from-start",
    "off", "--target-processes", "application-only",
)  # fmt: skip
NCU_SECONDS = 200  # after which the counted run counts as hung


class NoCounters(RuntimeError):
    """ncu gave no counters; the message says why in one line."""


class Batch(NamedTuple):
    """A batch, which is a row of the table."""

    requests: int
    groups: str  # how many, or STRANGER
    order: str  # one of ORDERS


def group_sizes(requests: int, groups: str) -> list[int]:
    """Requests of each group: dealt evenly, or all but one and that one."""
    if groups == STRANGER:
        return [requests - 1, 1]
    count = int(groups)
    return [(group + 1) * requests // count - group * requests // count for group in range(count)]


def batches(requests: Sequence[int], groups: Sequence[str], orders: Sequence[str]) -> list[Batch]:
    """What is measured, in order: one group has one order, a stranger stands wherever it arrived."""
    only = {"1": ("prefix",), STRANGER: ("arrival",)}
    return [Batch(rows, count, order) for rows in requests for count in groups for order in only.get(count, orders)]


def row_order(group: Ints, order: str, seed: int) -> Ints:
    """int64 [requests]: the requests as they stand in the batch.

    Parameters
    ----------
    group : int [requests]
        Group of each request, ascending.
    order : str
        One of `ORDERS`.
    seed : int
        Of the order of arrival.
    """
    if order == "prefix":
        return np.arange(len(group))
    if order == "arrival":
        return np.random.default_rng(seed).permutation(len(group))
    rank = np.arange(len(group)) - np.searchsorted(group, group)
    return np.lexsort((group, rank))


def grouped_case(sizes: Sequence[int], prefix: int, tail: int, heads: Heads, seed: int = 0) -> Case:
    """Groups of requests with a prefix each, rows in prefix order, slots scattered over a pool of just the needed size.

    Parameters
    ----------
    sizes : sequence of int
        Requests of each group.
    prefix, tail : int
        Tokens that a group shares, and that each request has alone.
    heads : Heads
    seed : int
        Of the slots.
    """
    requests, length = sum(sizes), prefix + tail
    forest = Forest(
        np.full(len(sizes), -1),
        np.full(len(sizes), prefix),
        np.repeat(np.arange(len(sizes)), sizes),
        np.full(requests, length),
        np.arange(requests) * length,
    )
    table, n_pages = forest_table(forest, rng=np.random.default_rng(seed))
    name = f"{len(sizes)},{requests}_{prefix},{tail}"
    return Case(name, forest, table, n_pages, heads, head_dim=HEAD_DIM)


def reordered(case: Case, rows: Ints) -> Case:
    """The same requests over the same table, in another order."""
    forest = case.forest
    moved = Forest(
        forest.parent, forest.length, forest.request_node[rows], forest.seq_len[rows], forest.row_offset[rows]
    )
    return replace(case, forest=moved)


def cases(options: argparse.Namespace) -> Iterator[tuple[Batch, Case]]:
    """All batches with what the systems are given."""
    for batch in batches(options.requests, options.groups, options.orders):
        sizes = group_sizes(batch.requests, batch.groups)
        case = grouped_case(sizes, options.prefix, options.tail, options.heads, options.seed)
        yield batch, reordered(case, row_order(case.forest.request_node, batch.order, options.seed))


def set_up(options: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """The systems by name, and K and V for the largest batch."""
    import torch
    from decode_systems import Pools, systems_on_gpu

    chosen = systems_on_gpu(options.systems)
    elements = max(Pools.elements(case) for _, case in cases(options))
    return chosen, Pools(elements, getattr(torch, DTYPE), seed=options.seed)


def measure(options: argparse.Namespace, content: dict[str, Any]) -> None:
    """Check and time all batches into ``content``."""
    from decode_systems import reference
    from decode_timing import machine, measure_in_turn

    begun = time.monotonic()
    with Watchdog() as watchdog:
        watchdog.on_stall = lambda: write(options.json, content)
        watchdog.expect(CASE_SECONDS, "K and V")
        chosen, pools = set_up(options)
        content["machine"] = machine() | {
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), "when": time.strftime("%Y-%m-%d %H:%M:%S"),
            "heads": str(options.heads), "head_dim": HEAD_DIM, "dtype": DTYPE, "prefix": options.prefix,
            "tail": options.tail, "rounds": options.rounds, "runs": options.runs, "seed": options.seed,
        }  # fmt: skip
        for batch, case in cases(options):
            label = f"{batch.requests} requests, {batch.groups}, {batch.order}"
            watchdog.expect(CASE_SECONDS, label)
            inputs = pools.inputs(case)
            sample = np.linspace(0, case.n_requests - 1, min(CHECKED, case.n_requests)).astype(int).tolist()
            checked = reference(inputs, sample), sample
            results: dict[str, Any] = {}
            record = {**batch._asdict(), "kv_bytes": case.kv_bytes, "systems": results}
            captured = {}
            for name, system in chosen.items():
                watchdog.expect(BUILD_SECONDS, f"{label}, {name}")
                ready, results[name] = prepare(name, system, inputs, checked, TOLERANCE[DTYPE])
                if ready is not None:
                    captured[name] = ready
            watchdog.expect(CASE_SECONDS, f"{label}, timing")
            for name, times in measure_in_turn(captured, options.rounds, None).items():
                results[name] |= times.summary()
            content["records"].append(record)
    content["machine"]["seconds"] = round(time.monotonic() - begun, 1)


def counted(options: argparse.Namespace) -> None:
    """What ncu runs: a mark and then the counted calls, for every batch and system."""
    with Watchdog() as watchdog:
        watchdog.expect(NCU_SECONDS, "the counted run")
        chosen, pools = set_up(options)
        for _, case in cases(options):
            inputs = pools.inputs(case)
            for system in chosen.values():
                count(system, inputs, options.runs)


def count(system: Any, inputs: Any, runs: int) -> None:
    """One mark, and ``runs`` calls; of a system that fails here the mark alone."""
    import torch

    try:
        call = system(inputs).call
        for _ in range(WARM_CALLS):
            call()
        torch.cuda.synchronize()
    except Exception:  # the times have its error
        runs = 0
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    for _ in range(runs):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def run_ncu(ncu: str, arguments: Sequence[str], log: Path) -> str:
    """Run this script again under ncu; its CSV, which stays in ``log``.

    Raises
    ------
    NoCounters
        No ncu, no counters on this machine, or an error of either program.
    """
    program = shutil.which(ncu)
    if program is None:
        raise NoCounters(f"no {ncu}: install Nsight Compute, or name it with --ncu")
    log.parent.mkdir(parents=True, exist_ok=True)
    child = [sys.executable, str(Path(__file__).resolve()), *arguments, "--counted"]
    metrics = list(METRICS)
    while True:
        log.unlink(missing_ok=True)
        command = [program, *NCU_OPTIONS, "--metrics", ",".join(metrics), "--log-file", str(log), *child]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=NCU_SECONDS + 30)
        except subprocess.TimeoutExpired:
            raise NoCounters(f"{ncu} took more than {NCU_SECONDS + 30} s") from None
        text = log.read_text(errors="replace") if log.exists() else ""
        if '"ID"' in text:
            return text
        said = [*text.splitlines(), *done.stdout.splitlines(), *done.stderr.splitlines()]
        errors = [line for line in said if line.startswith("==ERROR==")] or [line for line in said[::-1] if line]
        if SECTORS in metrics and re.search(r"find metric|metric.*\bnot\b", " ".join(errors)):
            metrics.remove(SECTORS)  # the others are known to exist on Hopper
            continue
        raise NoCounters(f"{ncu} ended with {done.returncode}: {errors[0] if errors else 'and said nothing'}"[:300])


def segments(text: str) -> list[list[dict[str, Any]]]:
    """ncu's CSV as the kernels after each mark, each with its name (``kernel``) and what was counted, in SI units."""
    launches: dict[int, dict[str, Any]] = {}
    try:
        for row, value in profile_decode_kernel.counted(text, METRICS):
            launch = launches.setdefault(int(row["ID"]), {"kernel": row["Kernel Name"]})
            if value is not None:
                launch[row["Metric Name"]] = value
    except ValueError as error:
        raise NoCounters(str(error)) from None
    found: list[list[dict[str, Any]]] = []
    for _, launch in sorted(launches.items()):
        if MARK in launch["kernel"]:
            found.append([])
        elif found:
            found[-1].append(launch)
    return found


def per_call(launches: Sequence[dict[str, Any]], runs: int) -> dict[str, Any]:
    """What one of ``runs`` calls launched and counted; without what some kernel lacks."""
    names = Counter(short(launch["kernel"]) for launch in launches)
    counters: dict[str, Any] = {"kernels": {name: launched / runs for name, launched in names.items()}}
    for name, (metric, factor) in SUMS.items():
        if all(metric in launch for launch in launches):
            counters[name] = round(sum(launch[metric] for launch in launches) * factor / runs, 3)
    for name, metric in RATES.items():
        if all(metric in launch and SECONDS in launch for launch in launches):
            weights = [launch[SECONDS] for launch in launches]
            counters[name] = round(float(np.average([launch[metric] for launch in launches], weights=weights)), 2)
    return counters


def attach(content: dict[str, Any], text: str) -> None:
    """Give each measured system the counters of its calls.

    Raises
    ------
    NoCounters
        Marks are missing, and then what was counted in full is attached; or there are too many.
    """
    results = [result for record in content["records"] for result in record["systems"].values()]
    found = segments(text)
    if len(found) > len(results):
        raise NoCounters(f"ncu saw {len(found)} marks and this run has {len(results)} cells: not of the same run")
    missing = len(results) - len(found)
    for result, launches in zip(results, found[:-1] if missing else found, strict=False):
        if launches:
            result["counters"] = per_call(launches, content["machine"]["runs"])
    if missing:
        raise NoCounters(f"ncu saw {len(found)} of {len(results)} marks: the counted run ended early")


Records = dict[Batch, dict[str, Any]]


def by_batch(content: dict[str, Any]) -> Records:
    return {Batch(record["requests"], record["groups"], record["order"]): record for record in content["records"]}


def ratio(records: Records, system: str, above: Batch, below: Batch, *keys: str) -> float | None:
    """A figure of one batch over that of another; None where either was not measured."""
    values: list[Any] = [records.get(batch, {}).get("systems", {}).get(system) for batch in (above, below)]
    for key in keys:
        values = [value.get(key) if value else None for value in values]
    return values[0] / values[1] if all(values) else None


def cells(result: dict[str, Any], kv_bytes: int, times: float | None) -> list[str]:
    """A system's three columns of the table."""
    counters = result.get("counters", {})
    us = f"{result['warm_us']:,.0f}" if "warm_us" in result else "-"
    dram, l2 = "-", []
    if (read := counters.get("dram_read_bytes")) is not None:
        busy = f", {counters['dram_pct']:.0f}%" if "dram_pct" in counters else ""
        dram = f"{read / 1e9:.3f} ({read / kv_bytes:.2f}x{busy})"
    if "l2_hit_pct" in counters:
        l2.append(f"{counters['l2_hit_pct']:.0f}%")
    if "sm_read_bytes" in counters:
        l2.append(f"{counters['sm_read_bytes'] / 1e9:.2f} GB")
    return [us + (f" ({times:.2f}x)" if times else ""), dram, ", ".join(l2) or "-"]


def table(content: dict[str, Any]) -> str:
    """The docs' table: a line a batch, three columns a system."""
    records = by_batch(content)
    systems = list(content["records"][0]["systems"])
    columns = [f"{name} {what}" for name in systems for what in ("us", "DRAM GB", "L2")]
    rows = [["rows", "groups", "order", "unique KV GB", *columns], ["---"] * (4 + len(columns))]
    for batch, record in records.items():
        row = [str(batch.requests), batch.groups, batch.order, f"{record['kv_bytes'] / 1e9:.3f}"]
        for name in systems:
            times = ratio(records, name, batch, Batch(batch.requests, "1", "prefix"), "warm_us")
            row += cells(record["systems"][name], record["kv_bytes"], times)
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def findings(content: dict[str, Any]) -> list[str]:
    """What mixing costs and what order adds: a line for each system and number of requests."""
    records, lines = by_batch(content), []
    counts = [int(batch.groups) for batch in records if batch.groups != STRANGER]
    most = str(max(counts, default=1))
    if not content["records"] or most == "1":
        return []
    for name in content["records"][0]["systems"]:
        for rows in dict.fromkeys(batch.requests for batch in records):
            alone, mixed = Batch(rows, "1", "prefix"), Batch(rows, most, "prefix")

            def against(above: Batch, below: Batch, name: str = name) -> str | None:
                times = ratio(records, name, above, below, "warm_us")
                dram = ratio(records, name, above, below, "counters", "dram_read_bytes")
                if times is None:
                    return None
                return f"{times:.2f}x the time" + (f" and {dram:.2f}x the DRAM bytes" if dram else "")

            said = []
            if mixing := against(mixed, alone):
                unique = records[mixed]["kv_bytes"] / records[alone]["kv_bytes"]
                said.append(f"{most} groups in prefix order take {mixing} of one group (unique KV: {unique:.2f}x)")
            for order in ("interleaved", "arrival"):
                if added := against(Batch(rows, most, order), mixed):
                    said.append(f"{order} order {added} of that")
            if strange := against(Batch(rows, STRANGER, "arrival"), alone):
                said.append(f"one stranger among one group {strange} of the group alone")
            if said:
                lines.append(f"{name}, {rows} requests: {'; '.join(said)}.")
    return lines


def report(content: dict[str, Any]) -> str:
    """The table, its findings, and what is missing."""
    if not content["records"]:
        return content.get("fatal", "nothing was measured")
    errors = {
        f"{name}: {result['error']}"
        for record in content["records"]
        for name, result in record["systems"].items()
        if "error" in result
    }
    notes = [
        "us of a call (to one group); GB that it reads from DRAM (over unique KV, DRAM % of peak); L2 hit rate of all "
        "its traffic, and GB that the SMs read from it.",
        *findings(content),
        *sorted(errors),
    ]
    if "counters_error" in content:
        notes.append(f"counters are missing: {content['counters_error']}")
    if "fatal" in content:
        notes.append(f"ended by an error that CUDA does not recover from: {content['fatal']}")
    return "\n\n".join([table(content), *notes])


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="128,500", help="rows of a batch (default: %(default)s)")
    parser.add_argument("--groups", default="1,stranger,5,20", help="numbers, or stranger (default: %(default)s)")
    parser.add_argument("--orders", default=",".join(ORDERS), help="of two groups or more (default: %(default)s)")
    parser.add_argument("--systems", default="fa3,flashinfer,feather", help="of bench_decode_kernel.py's (%(default)s)")
    parser.add_argument("--heads", default="32/8", help="query/KV heads (default: %(default)s)")
    parser.add_argument("--prefix", type=int, default=5120, help="tokens that a group shares (default: %(default)s)")
    parser.add_argument("--tail", type=int, default=120, help="tokens of each request alone (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="of timing (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=2, help="calls that are counted (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ncu", default="ncu", help="Nsight Compute's command line (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("mixing.json"), help="write everything here (%(default)s)")
    parser.add_argument("--csv", type=Path, help="ncu's CSV: kept here (default: beside --json); with --from, joined")
    parser.add_argument("--from", dest="source", type=Path, metavar="JSON", help="report a finished run; no GPU needed")
    parser.add_argument("--counted", action="store_true", help="what ncu runs: only the calls to count")
    options = parser.parse_args(argv)
    try:
        options.requests = [int(text) for text in options.requests.split(",")]
        options.groups, options.orders = options.groups.split(","), options.orders.split(",")
        options.heads = parse_heads(options.heads)
        fewest = min(options.requests)
        if fewest < 2 or min(options.prefix, options.tail, options.rounds, options.runs) < 1:
            raise ValueError("give at least 2 requests, and at least 1 of tokens, rounds and runs")
        if wrong := [text for text in options.groups if text != STRANGER and not 1 <= int(text) <= fewest]:
            raise ValueError(f"groups {wrong[0]}: give 1 to {fewest}, or {STRANGER}")
        if wrong := [text for text in options.orders if text not in ORDERS]:
            raise ValueError(f"order {wrong[0]!r}: use {', '.join(ORDERS)}")
    except ValueError as error:
        parser.error(str(error))
    return options


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    options = arguments(given)
    status = 0
    try:
        if options.counted:
            counted(options)
            return 0
        if options.source:
            content = read_finished(options.source, "machine")
            if options.csv:
                content.pop("counters_error", None)
                attach(content, options.csv.read_text(errors="replace"))
                write(options.source, content)
        else:
            content = {"machine": {}, "records": []}
            measure(options, content)
            write(options.json, content)
            begun = time.monotonic()
            attach(content, run_ncu(options.ncu, given, options.csv or options.json.with_suffix(".csv")))
            content["machine"]["counted_seconds"] = round(time.monotonic() - begun, 1)
    except NoCounters as error:
        content["counters_error"] = str(error)
        status = 1
    except LostDevice as error:
        content["fatal"] = str(error)
        status = 2
    if not options.source:
        write(options.json, content)
        if any("error" in result for record in content["records"] for result in record["systems"].values()):
            status = max(status, 1)
    print(report(content))
    return status


if __name__ == "__main__":
    sys.exit(main())
