"""Replay against real servers, and the tail by replay: tables of the performance page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean

from perf_results import FIGURES, STOCK_POLICIES, Pair, ResultError, geometric_mean, get, load, pairs
from perf_text import Section, command, number, table

REPLAYS, TAIL_SERVER, TAIL = "replays.json", "tail_h200.json", "tail.json"
NAMES = {
    "output_tok_s": "tokens/s",
    "ttft_mean": "TTFT, mean",
    "ttft_p99": "TTFT, p99",
    "e2e_mean": "end to end, mean",
    "tbt_p99_ms": "TBT, p99",
}
BEHIND = 1.01
LISTED = 5
QUEUED = 1.0  # seconds of the server's mean TTFT from which requests wait for one another
FITTED = "qwen3-8b"  # the model whose steps the profile was fitted to
APART = 0.03  # from which on two policies differ on a server


def measured(folder: Path) -> list[Pair]:
    """Everything measured both ways."""
    return pairs(folder, REPLAYS, TAIL_SERVER)


def distance(found: Sequence[Pair], figure: str) -> float:
    """How far replay and server are apart: the mean of |replay / server - 1|."""
    return mean(abs(pair.ratio(figure) - 1) for pair in found)


def worst(found: Sequence[Pair], figure: str) -> tuple[float, Pair]:
    """The largest |replay / server - 1|, and whose it is."""
    pair = max(found, key=lambda one: abs(one.ratio(figure) - 1))
    return abs(pair.ratio(figure) - 1), pair


def split(found: Sequence[Pair]) -> dict[str, list[Pair]]:
    """All, by whether requests queue, by release, and those of a model that nothing was fitted to."""
    queued = [pair for pair in found if pair.server["ttft_mean"] >= QUEUED]
    parts = {
        "all runs": list(found),
        "with a queue": queued,
        "without a queue": [pair for pair in found if pair not in queued],
        **{f"SGLang {release}": [pair for pair in found if pair.release == release]
           for release in sorted({pair.release for pair in found})},
        "a model that nothing was fitted to": [pair for pair in found if pair.model != FITTED],
    }  # fmt: skip
    return {name: part for name, part in parts.items() if part}


def summary(found: Sequence[Pair]) -> str:
    """Of each part the geometric mean of replay over server in throughput, and the errors of each figure."""
    rows = []
    for name, part in split(found).items():
        level = geometric_mean(pair.ratio("output_tok_s") for pair in part)
        errors = [f"{distance(part, figure):.0%}, {worst(part, figure)[0]:.0%}" for figure in FIGURES]
        rows.append([name, str(len(part)), f"{level:.2f}", *errors])
    return table(["", "runs", "tokens/s, replay to server", *NAMES.values()], rows)


def order(found: Sequence[Pair], figure: str) -> tuple[int, int]:
    """How many pairs of policies differ on a server, and how many of those the replay has in the same order."""
    same = differ = 0
    for one, other in combinations(found, 2):
        ratio = one.server[figure] / other.server[figure]
        alike = (one.policy, one.options) == (other.policy, other.options)  # measured twice
        if one.bed == other.bed and not alike and abs(ratio - 1) >= APART:
            differ += 1
            same += (ratio > 1) == (one.replay[figure] > other.replay[figure])
    return same, differ


def furthest_apart(found: Sequence[Pair]) -> str:
    """Server, replay and replay over server of the runs whose throughput is furthest apart."""
    rows = []
    for pair in sorted(found, key=lambda pair: -abs(pair.ratio("output_tok_s") - 1))[:LISTED]:
        cells = [
            f"{number(pair.server[figure])} / {number(pair.replay[figure])} / {pair.ratio(figure):.2f}"
            for figure in ("output_tok_s", "ttft_mean", "ttft_p99")
        ]
        policy = pair.policy.replace("feather-bandit", "feather") + (f", {pair.options}" if pair.options else "")
        rows.append([pair.case, pair.attention, policy, pair.release, *cells])
    return table(["workload", "backend", "policy", "SGLang", "tokens/s", "TTFT mean, s", "TTFT p99, s"], rows)


def agreement(folder: Path) -> Section:
    """How near the replay is to a server."""
    found = measured(folder)
    replays = load(folder, REPLAYS)
    orders = [(*order(found, figure), name) for figure, name in
              (("output_tok_s", "throughput"), ("ttft_mean", "mean TTFT"))]  # fmt: skip
    said = " and ".join(f"{same} of {differ} pairs by {name}" for same, differ, name in orders)
    body = [
        "Each workload that was measured on a server was replayed, too. A cell has the mean and the largest distance "
        "of the replay from the server, |replay / server - 1|. Requests queue where the server's mean TTFT is a second "
        "or more. The profile was fitted to steps of other loads with Qwen3-8B on SGLang 0.5.23 (`feather calibrate`), "
        "and to none of these runs.",
        summary(found),
        f"Where two policies differ by 3% or more on a server, the replay has them in the same order in {said}.",
        "![Replay against server](performance/agreement.svg)",
        "The runs whose throughput is furthest apart, each as server / replay / ratio:",
        furthest_apart(found),
        "What binds: the host's speed changes by up to 1.7x from one half-minute to the next, which a short run "
        "without a queue shows; at the edge of overload, as W1 and W4 are under SGLang's policies with `pat`, a little "
        "decides whether a queue forms; FlashInfer's prefill is timed as FlashAttention-3's. Runs with more than "
        "1,000 single tokens a second in their streams are left out: a replay makes the front end pay for each what a "
        "piece of 16 costs, and has a third to two thirds of a busy server's throughput. Steps of 512 tokens are "
        "launched faster than by the model.",
    ]
    setup = (
        f"Replay: SGLang {get(replays, REPLAYS, 'sglang')}, profile {get(replays, REPLAYS, 'profile')}. Servers: "
        "NVIDIA H200; `conversation` is in the next section."
    )
    return Section("Replay against servers", body, setup, [command(get(replays, REPLAYS, "command"))])


def ratios(row: dict[str, dict[str, float]], policy: str) -> dict[str, float]:
    """A policy on one slice of a trace, beside SGLang's own."""
    mine = row[policy]
    best = max(row[stock]["output_tok_s"] for stock in STOCK_POLICIES if stock in row)
    return {
        "TTFT mean to fcfs's": mine["ttft_mean"] / row["fcfs"]["ttft_mean"],
        "TTFT mean to hrrn's": mine["ttft_mean"] / row["hrrn"]["ttft_mean"],
        "TTFT p99 to fcfs's": mine["ttft_p99"] / row["fcfs"]["ttft_p99"],
        "longest wait to fcfs's": mine["max_wait"] / row["fcfs"]["max_wait"],
        "tok/s to the best": mine["output_tok_s"] / best,
    }


def tail_ratios(folder: Path) -> dict[str, list[dict[str, float]]]:
    """By policy, its ratios on every slice."""
    rows = load(folder, TAIL)
    if not rows:
        raise ResultError(f"{TAIL}: no slice in it")
    names = [name for name in next(iter(rows.values())) if name != "rate_scale"]
    for name, row in rows.items():
        for policy in ("fcfs", "hrrn", "feather"):
            for figure in ("ttft_mean", "ttft_p99", "max_wait", "output_tok_s"):
                get(row, f"{TAIL}, {name}", policy, figure)
    return {policy: [ratios(row, policy) for row in rows.values()] for policy in names}


def on_server(folder: Path, figure: str) -> float:
    """feather's figure to fcfs's on a real server under a real trace, each the mean of its runs."""
    runs = get(load(folder, TAIL_SERVER), TAIL_SERVER, "server")
    figures = {name: [run[figure] for run in runs if run["policy"] == name] for name in ("fcfs", "feather")}
    if missing := [name for name, values in figures.items() if not values]:
        raise ResultError(f"{TAIL_SERVER}: no run of {missing[0]} on a server")
    return mean(figures["feather"]) / mean(figures["fcfs"])


def tail(folder: Path) -> Section:
    """Who waits on real traces, by replay."""
    found = tail_ratios(folder)
    what = list(next(iter(found.values()))[0])
    rows = []
    for name in what:
        cells = []
        for ratio in found.values():
            values = [one[name] for one in ratio]
            cells.append(f"{geometric_mean(values):.2f}<br>{min(values):.2f}\u2011{max(values):.2f}")
        rows.append([name, *cells])
    lost = {name: sum(one[name] > BEHIND for one in found["feather"]) for name in what[:-1]}
    slices = len(found["feather"])
    counts = ", ".join(f"{name} in {count}" for name, count in lost.items() if count)
    server = load(folder, TAIL_SERVER)
    body = [
        f"{slices} slices of Mooncake's traces at 0.5 to 1.2 of what fcfs sustains, replayed: "
        "geometric mean, least-most.",
        table(["", *found], rows),
    ]
    if counts:
        body.append(f"`feather` is behind on {counts} of {slices} slices.")
    setup = (
        f"Profile h200, Qwen3-8B, `pat`. The `conversation` rows: {get(server, TAIL_SERVER, 'slice')}, "
        f"{get(server, TAIL_SERVER, 'gpu')}, SGLang {get(server, TAIL_SERVER, 'versions', 'sglang')}."
    )
    return Section("Real traces", body, setup, ["python benchmarks/bench_tail.py TRACES"])
