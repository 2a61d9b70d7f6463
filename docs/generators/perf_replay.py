"""The pages on replays beside real servers, and on the tail by replay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean

import perf_promise
from perf_results import FIGURES, STOCK_POLICIES, Pair, ResultError, geometric_mean, get, load, pairs
from perf_servers import titled
from perf_text import Page, Section, caption, command, number, table, term

from feather_sglang.replay.workloads import WORKLOADS

REPLAYS, TAIL_SERVER, TAIL = "replays.json", "tail_h200.json", "tail.json"
NAMES = {
    "output_tok_s": "tokens/s",
    "ttft_mean": "TTFT mean",
    "ttft_p99": "TTFT p99",
    "e2e_mean": "end to end, mean",
    "tbt_p99_ms": "TBT p99",
}
BEHIND = 1.01
LISTED = 5
QUEUED = 1.0  # seconds of the server's mean TTFT from which requests wait for one another
FITTED = "qwen3-8b"  # the model whose steps the profile was fitted to
SINGLE_TOKENS = 1000  # streamed a second, from which on benchmarks/replay_servers.py leaves a run out
APART = 0.03  # from which on two policies differ on a server


def measured(folder: Path) -> list[Pair]:
    """Everything measured both ways."""
    return pairs(folder, REPLAYS, TAIL_SERVER)


def left_out(folder: Path) -> int:
    """How many runs stream too many single tokens to be replayed."""
    runs = {
        (file, record["case"], record["server"])
        for file in perf_promise.FILES
        for record in get(load(folder, file), file, "records")
        if record["case"].partition(":")[0] in {"open", *WORKLOADS} and record["overall"]["tok_s"] > SINGLE_TOKENS
    }
    return len(runs)


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
        "a model that the profile was not fitted to": [pair for pair in found if pair.model != FITTED],
    }  # fmt: skip
    return {name: part for name, part in parts.items() if part}


def summary(found: Sequence[Pair]) -> tuple[str, str]:
    """Of each part throughput, replay over server, and the errors of each time."""
    rates, times = [], []
    for name, part in split(found).items():
        level = geometric_mean(pair.ratio("output_tok_s") for pair in part)
        first, *errors = [f"{distance(part, figure):.0%}, {worst(part, figure)[0]:.0%}" for figure in FIGURES]
        rates.append([name, str(len(part)), f"{level:.2f}", first])
        times.append([name, *errors])
    first, *others = NAMES.values()
    return table(["runs", "number", f"{first}, replay / server", f"{first}: mean distance, largest"], rates), table(
        ["runs", *(f"{name}: mean distance, largest" for name in others)], times
    )


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
            f"{number(pair.server[figure])}, {number(pair.replay[figure])}, {pair.ratio(figure):.2f}"
            for figure in ("output_tok_s", "ttft_mean")
        ]
        policy = pair.policy.replace("feather-bandit", "feather") + (f", {pair.options}" if pair.options else "")
        rows.append([f"{titled(pair.case)}<br>{pair.attention}, {policy}", pair.release, *cells])
    return table(
        [
            "workload, backend and policy",
            "SGLang",
            "tokens/s: server, replay, ratio",
            "TTFT mean, s: server, replay, ratio",
        ],
        rows,
    )


def agreement(folder: Path) -> Page:
    """How near the replay is to a server."""
    found = measured(folder)
    replays = load(folder, REPLAYS)
    orders = [(*order(found, figure), name) for figure, name in
              (("output_tok_s", "throughput"), ("ttft_mean", "mean TTFT"))]  # fmt: skip
    said = " and ".join(f"{same} of {differ} pairs by {name}" for same, differ, name in orders)
    releases = " and ".join(sorted({pair.release for pair in found}))
    where = (
        f"Servers: NVIDIA H200, SGLang {releases}; replay: SGLang {get(replays, REPLAYS, 'sglang')}, profile "
        f"`{get(replays, REPLAYS, 'profile')}`"
    )
    rates, times = summary(found)
    replayed = len(get(replays, REPLAYS, "runs"))
    other = " and ".join(sorted({pair.model for pair in found if pair.model != FITTED})) or "none"
    close = Section(
        "How far apart are they?",
        [
            f"{len(found)} runs of workloads on servers were also replayed without a GPU. The command below replays "
            f"{replayed} of them. The other {len(found) - replayed} are of `{TAIL_SERVER}`, each the mean of a "
            "policy's runs on [a slice of a trace](../lab/tail.md#does-the-tail-hold-on-a-server), which has commands "
            "of its own. The profile of step times "
            "was fitted to steps of other loads with Qwen3-8B on SGLang 0.5.23 (`feather calibrate`), and to none of "
            f"these runs. Left out are {left_out(folder)} runs that stream more than {SINGLE_TOKENS:,} tokens a second "
            "one by one: the replay charges the front end for each token what a piece of 16 tokens costs, and "
            "reaches a third to two thirds of the server's throughput. A *distance* is |replay / server - 1|; "
            "each cell has the mean distance and the largest. A run has *a queue* if the server's "
            "mean TTFT is a second or more. The rows by release name the server's SGLang; the replay is the same in "
            "all rows. The model that the profile was not fitted to is "
            f"{other}.",
            "Throughput in output tokens/s. The third column is the geometric mean of replay / server:",
            rates,
            caption(where),
            f"Distances of {term('ttft')}, of the time from arrival to the last token, and of {term('tbt')}:",
            times,
            caption(where, "ttft", "tbt"),
            "In the figure a point is a run. On the line the replay gives what the server gave, and the grey band is "
            "10% to either side.",
            "![Replay against server](agreement.svg)",
            caption(where, "ttft", "tbt"),
        ],
        [REPLAYS, TAIL_SERVER],
        [command(get(replays, REPLAYS, "command"))],
    )
    ordered = Section(
        "Does the replay order policies as servers do?",
        [
            "Two runs on the same server under different policies are a pair. Where the server's figure differs by "
            f"{APART:.0%} or more in a pair, the replay has the two policies in the same order in {said}."
        ],
    )
    lost = Section(
        "Where they differ most",
        [
            "The runs whose throughput is furthest apart. A cell has the server's figure, the replay's and the ratio:",
            furthest_apart(found),
            caption(where, "workloads", "ttft"),
            "These are the causes that are known:",
            "- The speed of a server's host changes by up to 1.7x from one half-minute to the next, which shows in "
            "short runs without a queue.\n"
            "- At the edge of overload, where W1 and W4 are under SGLang's policies with `pat`, a small difference "
            "decides whether a queue forms.\n"
            "- The prefill of FlashInfer is timed as that of FlashAttention-3.\n"
            "- Prefill steps of 512 tokens are launched faster on a server than in the replay.\n"
            "- Where a server streams single tokens, the replay charges the front end for each of them what a piece of "
            f"16 tokens costs. Runs with more than {SINGLE_TOKENS:,} of them a second are left out above.",
        ],
    )
    return Page(
        "How near is the replay to a server?",
        "`feather ab` replays a workload in virtual time with SGLang's real scheduler. This page compares such replays "
        "with servers.",
        [close, ordered, lost],
    )


def guide_sentence(folder: Path) -> str:
    """What docs/guide/ab_replay.md says of the distances."""
    found = measured(folder)
    parts = split(found)
    rate, ttft = "output_tok_s", "ttft_mean"
    said = f"{len(found)} runs on servers, to none of which the profile was fitted, were replayed. The throughput was "
    said += f"off by {distance(found, rate):.0%} in the mean and by {worst(found, rate)[0]:.0%} at worst. "
    for name, words in (("with a queue", "Where requests queued"), ("without a queue", "Without a queue")):
        if name in parts:
            said += f"{words}, the mean TTFT was off by {distance(parts[name], ttft):.0%} in the mean. "
    same, differ = order(found, rate)
    return said + (
        f"Of two policies that differ by {APART:.0%} or more on a server, the replay named the faster one in {same} of "
        f"{differ} pairs. [How near is the replay to a server?](../performance/agreement.md) has the details."
    )


def ratios(row: dict[str, dict[str, float]], policy: str) -> dict[str, float]:
    """A policy on one slice of a trace, beside SGLang's own."""
    mine = row[policy]
    best = max(row[stock]["output_tok_s"] for stock in STOCK_POLICIES if stock in row)
    return {
        "TTFT mean to fcfs's": mine["ttft_mean"] / row["fcfs"]["ttft_mean"],
        "TTFT mean to hrrn's": mine["ttft_mean"] / row["hrrn"]["ttft_mean"],
        "TTFT p99 to fcfs's": mine["ttft_p99"] / row["fcfs"]["ttft_p99"],
        "longest wait to fcfs's": mine["max_wait"] / row["fcfs"]["max_wait"],
        "tokens/s to SGLang's best": mine["output_tok_s"] / best,
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


def slice_rows(folder: Path) -> list[list[str]]:
    """feather on each slice of a trace: its mean TTFT, p99 and longest wait to fcfs's."""
    names, found = list(load(folder, TAIL)), tail_ratios(folder)["feather"]
    shown = [slice_name(name) for name in names]
    keys = ("TTFT mean to fcfs's", "TTFT p99 to fcfs's", "longest wait to fcfs's")
    return [[name, *(f"{one[key]:.2f}" for key in keys)] for name, one in zip(shown, found, strict=True)]


def slice_name(name: str) -> str:
    """A slice in words: the trace, its first request, the load and the KV pool."""
    start, _, rest = name.partition(", load ")
    load_, _, pool = rest.partition(", ")
    trace, _, first = start.partition(" ")
    return (
        f"{trace} from request {int(first):,}, {load_} of the load, {pool.replace('K', ',000')} KV tokens"
        if rest
        else name
    )


def server_rows(folder: Path) -> list[list[str]]:
    """The same on a server, by policy, each the mean of its runs."""
    runs = get(load(folder, TAIL_SERVER), TAIL_SERVER, "server")
    rows = []
    for policy in dict.fromkeys(run["policy"] for run in runs):
        mine = [run for run in runs if run["policy"] == policy]
        values = [mean(run[figure] for run in mine) for figure in ("output_tok_s", "ttft_mean", "ttft_p99")]
        rows.append([f"`{policy}`", number(values[0]), *(f"{value:.2f}" for value in values[1:])])
    return rows


def lost_slices(folder: Path) -> dict[str, int]:
    """In how many slices feather is behind, by figure."""
    found = tail_ratios(folder)["feather"]
    return {name: sum(one[name] > BEHIND for one in found) for name in list(found[0])[:-1]}


def kinds_of_slices(folder: Path) -> str:
    """How many slices are of recorded traffic and how many of the synthetic trace."""
    names = list(load(folder, TAIL))
    synthetic = sum(name.startswith("synthetic") for name in names)
    return f"{len(names)} slices of Mooncake's traces, {len(names) - synthetic} recorded and {synthetic} synthetic"


def slice_on_server(folder: Path) -> str:
    """The slice that was measured on a server."""
    which, _, trace = get(load(folder, TAIL_SERVER), TAIL_SERVER, "slice").partition(" of mooncake_")
    return f"{which} of Mooncake's recorded {trace} trace"


def where_on_server(folder: Path) -> str:
    """The server that one slice was measured on."""
    server = load(folder, TAIL_SERVER)
    return f"{get(server, TAIL_SERVER, 'gpu')}, SGLang {get(server, TAIL_SERVER, 'versions', 'sglang')}"


WHERE = "Replayed without a GPU, profile `h200` of an NVIDIA H200, Qwen3-8B, `pat`"


def tail(folder: Path) -> Page:
    """How long requests of real traces wait, by replay and on a server."""
    found = tail_ratios(folder)
    slices = len(found["feather"])
    stock = " and ".join(f"`{policy}`" for policy in STOCK_POLICIES if policy in found)
    rows = []
    for name in next(iter(found.values()))[0]:
        cells = []
        for ratio in found.values():
            values = [one[name] for one in ratio]
            cells.append(f"{geometric_mean(values):.2f}<br>{min(values):.2f}\u2011{max(values):.2f}")
        rows.append([name.replace("SGLang's best", f"the better of {stock}"), *cells])
    lost = {name: count for name, count in lost_slices(folder).items() if count}
    overall = Section(
        "Over all slices",
        [
            f"{slices} slices, each some hundred requests in a row of one of Mooncake's two traces. The trace "
            "*conversation* was recorded in a chat service, the trace *synthetic* was generated. A load of 1 is as "
            "many requests a second as `fcfs` serves when all requests come at once, and the slices are replayed at "
            "loads of 0.5 to 1.2. A cell has the geometric mean of the ratios and, below it, the least and the "
            "greatest ratio of a slice; for times, below 1 is better. The last row compares with whichever of "
            f"{stock} has more throughput on the slice; no other policy of SGLang was replayed here.",
            table(["ratio", *(f"`{name}`" for name in found)], rows),
            caption(WHERE, "ttft"),
            "![Times of feather to those of fcfs on each slice](real_traffic.svg)",
            caption(WHERE, "ttft"),
        ],
        [TAIL],
        [f"python benchmarks/bench_tail.py TRACES --policies {','.join(found)}"],
    )
    each = Section(
        "Each slice",
        [
            "The times of `feather` to those of `fcfs`:",
            table(["slice", "TTFT mean", "TTFT p99", "longest wait"], slice_rows(folder)),
            caption(WHERE, "ttft"),
        ],
        [TAIL],
    )
    server = load(folder, TAIL_SERVER)
    on = Section(
        "On a server",
        [
            f"One slice was also measured on a server: {get(server, TAIL_SERVER, 'slice')}. Each figure is the mean of "
            "a policy's runs.",
            table(["policy", "output tokens/s", "TTFT mean, s", "TTFT p99, s"], server_rows(folder)),
            caption(where_on_server(folder), "ttft"),
        ],
        [TAIL_SERVER],
    )  # fmt: skip
    behind = Section(
        "Where `feather` is behind",
        [
            f"How many of the {slices} slices have a figure of `feather` that is longer by more than 1%:",
            table(
                ["figure of `feather`, and of whom it is longer than", "slices"],
                [[name, str(count)] for name, count in lost.items()],
            ),
            caption(WHERE, "ttft"),
        ],
        [TAIL],
    )
    return Page(
        "What does real traffic gain?",
        "How long requests of recorded and of synthetic traffic wait under `feather`, `fcfs` and `hrrn`.",
        [overall, each, on, *([behind] if lost else [])],
    )
