"""Replay against real servers, and the tail by replay: tables of the performance page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from perf_results import FIGURES, STOCK_POLICIES, Pair, ResultError, geometric_mean, get, load, pairs
from perf_servers import SERVERS
from perf_text import Section, command, number, table

REPLAYS, TAIL_SERVER, TAIL = "replays.json", "tail_h200.json", "tail.json"
NAMES = {"output_tok_s": "tok/s", "ttft_mean": "TTFT mean", "ttft_p99": "TTFT p99", "e2e_mean": "E2E mean"}
BEHIND = 1.01
LISTED = 4
QUEUED = 1.0  # seconds of the server's mean TTFT from which requests wait for one another


def measured(folder: Path) -> list[Pair]:
    """Everything measured both ways."""
    return pairs(folder, list(SERVERS.values()), REPLAYS, TAIL_SERVER)


def distance(found: Sequence[Pair], figure: str) -> float:
    """How far replay and server are apart: the mean of |replay / server - 1|."""
    return mean(abs(pair.ratio(figure) - 1) for pair in found)


def worst(found: Sequence[Pair], figure: str) -> tuple[float, Pair]:
    """The largest |replay / server - 1|, and whose it is."""
    pair = max(found, key=lambda one: abs(one.ratio(figure) - 1))
    return abs(pair.ratio(figure) - 1), pair


def split(found: Sequence[Pair]) -> dict[str, list[Pair]]:
    """All, those where requests queue, and the others."""
    queued = [pair for pair in found if pair.server["ttft_mean"] >= QUEUED]
    parts = {"all": list(found), "queueing": queued, "no queue": [pair for pair in found if pair not in queued]}
    return {name: part for name, part in parts.items() if part}


def summary(found: Sequence[Pair]) -> str:
    """Geometric mean of replay over server, and mean and worst distance, of each figure."""
    rows = []
    for name, part in split(found).items():
        cells = [
            f"{geometric_mean(pair.ratio(figure) for pair in part):.2f}<br>{distance(part, figure):.0%}/"
            f"{worst(part, figure)[0]:.0%}"
            for figure in FIGURES
        ]
        rows.append([name, str(len(part)), *cells])
    return table(["", "runs", *NAMES.values()], rows)


def furthest_apart(found: Sequence[Pair]) -> str:
    """Server, replay and replay over server of the runs whose throughput is furthest apart."""
    throughput = next(iter(FIGURES))
    rows = []
    for pair in sorted(found, key=lambda pair: -abs(pair.ratio(throughput) - 1))[:LISTED]:
        cells = [
            f"{number(pair.server[figure])}/{number(pair.replay[figure])}/{pair.ratio(figure):.2f}"
            for figure in FIGURES
        ]
        rows.append([pair.case, pair.attention, pair.policy.replace("feather-bandit", "feather"), *cells])
    return table(["workload", "backend", "policy", *NAMES.values()], rows)


def agreement(folder: Path) -> Section:
    """How near the replay is to a server."""
    found = measured(folder)
    replays = load(folder, REPLAYS)
    body = [
        "Every workload measured both ways: geometric mean of replay/server; mean/worst |replay/server-1|. "
        "*Queueing*: server's mean TTFT a second or more. Without a queue replayed TTFT is far too low.",
        summary(found),
        "![Replay against server](performance/agreement.svg)",
        "Furthest apart in tokens/s, server/replay/ratio:",
        furthest_apart(found),
    ]
    setup = (
        f"Replay: SGLang {get(replays, REPLAYS, 'sglang')}, profile {get(replays, REPLAYS, 'profile')}; "
        "servers as above, `conversation` in the next section."
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
