"""The front page of performance: four claims, each a sentence with its figure, a chart and what loses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import perf_kernel
import perf_prefill
import perf_promise
import perf_replay
import perf_servers
from perf_results import evicts, geometric_mean, server_runs, trees
from perf_text import MADE, caption, table, term


class Claim(NamedTuple):
    """One part of the front page; `loses` are sentences on where the claim does not hold."""

    name: str  # of its page
    title: str
    sentence: str
    chart: str
    loses: list[str]
    where: str
    terms: tuple[str, ...]
    anchors: tuple[str, ...] = ()  # that older links to this page lead to

    def markdown(self) -> str:
        """The part as it stands on the page."""
        anchors = "".join(f'<a id="{name}"></a>' for name in self.anchors)
        parts = [
            anchors,
            f"## {self.title}",
            self.sentence,
            self.chart,
            caption(self.where, *self.terms, up=""),
            f"**Where it is not faster.** {' '.join(self.loses)}" if self.loses else "",
            f"[All tables](performance/{self.name}.md)",
        ]
        return "\n\n".join(part for part in parts if part)


def between(values: Iterable[float], digits: int = 2) -> str:
    """The least and the greatest of some ratios."""
    known = sorted(values)
    ends = f"{known[0]:.{digits}f}x", f"{known[-1]:.{digits}f}x"
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def kernel(folder: Path) -> Claim:
    """Decode attention of one layer."""
    rows = perf_kernel.measured(folder)
    lost = [row for row in rows if row.ratio > perf_kernel.BEHIND]
    alone = [row.ratio for row in trees(folder, perf_kernel.PAT) if perf_kernel.unshared(row)]
    loses = []
    if lost:
        worst = max(lost, key=lambda row: row.ratio)
        loses.append(
            f"In {len(lost)} of {len(rows)} batches one of these kernels is faster by more than 1%, and in the worst "
            f"of them `pat` takes {worst.ratio:.2f} times as long."
        )
    loses.append(
        f"Where nothing is shared, `pat` takes {geometric_mean(alone):.2f} of the time of the fastest of these kernels "
        "(geometric mean)."
    )
    return Claim(
        "kernel",
        "The kernel",
        "On the 20 prefix trees of the PAT paper, decode attention with `pat` takes "
        f"**{perf_kernel.headline(folder):.2f}** of the time of the fastest of FlashAttention-3, FlashInfer and "
        "FlashInfer's cascade (geometric mean, 32 query heads and 8 KV heads).",
        "![Time over the floor by tree](performance/kernel.svg)",
        loses,
        perf_kernel.setup(folder),
        ("floor", "tree-notation"),
    )


def to_best_policy(folder: Path) -> list[float]:
    """Throughput of `feather` over that of SGLang's fastest policy, where prefixes fill the KV pool or exceed it."""
    return [perf_servers.to_stock(one, case)[1] for one in perf_servers.headline_policies(folder)
            for case, runs in one.runs.items() if evicts(case, runs["fcfs"].kv_tokens)]  # fmt: skip


def papers_rows(folder: Path) -> str:
    """The gains in docs/design/papers.md."""
    rows = [
        ("Feather, with this project's admission rules: output tokens/s of a server whose KV pool the prefixes fill or "
         "exceed, over those under SGLang's fastest policy", between(to_best_policy(folder)), "servers"),
        ("PAT: time of a layer's decode attention over that of the fastest other kernel, on the 20 trees of the paper "
         "with 32/8 heads (geometric mean)", f"{perf_kernel.headline(folder):.2f}x", "kernel"),
        ("PackInfer's packed prefill: output tokens/s of a server over those without it",
         between(perf_prefill.on_servers(folder).values()), "prefill"),
    ]  # fmt: skip
    return table(
        ["what was measured on an H200", "ratio", "page"],
        [[what, ratio, f"[{page}](../performance/{page}.md)"] for what, ratio, page in rows],
    )


def servers(folder: Path) -> Claim:
    """Throughput of servers."""
    main, other = perf_servers.headline_policies(folder), perf_servers.further_policies(folder)
    full = to_best_policy(folder)
    loaded = perf_servers.by_backend(folder, list(perf_servers.SERVERS.values()))
    steady = perf_servers.by_backend(folder, perf_servers.DECODE)
    shared = [perf_servers.to_best(runs)[0] for case, runs in loaded.items() if not perf_servers.unshared(case)]
    alone = [perf_servers.to_best(runs)[0] for found in (loaded, steady) for case, runs in found.items()
             if perf_servers.unshared(case)]  # fmt: skip
    sentences = []
    if shared:
        sentences.append(
            f"Under load from requests that share prefixes, `pat` has **{between(shared)}** the throughput of the "
            "fastest other backend."
        )
    if full:
        sentences.append(
            f"Where these prefixes fill the KV pool or exceed it, `feather` has **{between(full)}** the throughput of "
            "the fastest of SGLang's policies on the same backend."
        )
    slower, later = perf_servers.behind([*main, *other])
    behind = [perf_servers.to_best(runs)[0] for runs in perf_servers.behind_a_backend(folder).values()]
    loses = []
    if alone:
        loses.append(
            f"Where nothing is shared, `pat` has {between(alone)} the throughput of the fastest other backend."
        )
    if behind:
        loses.append(
            f"In {len(behind)} workloads and batches another backend is faster by more than 1%, and `pat` has "
            f"{between(behind)} its throughput."
        )
    if slower or later:
        loads = sum(len(one.runs) for one in (*main, *other))
        loses.append(
            f"In {len(slower)} of {loads} loads (a workload on a backend), a policy of SGLang's has over 1% more "
            f"throughput. In {len(later)} of their {2 * loads} "
            f"{term('ttft', 'times to the first token', up='')} (mean and p99 of each load), a policy of SGLang's is "
            "shorter by over 10%."
        )
    return Claim(
        "servers",
        "Servers",
        " ".join(sentences),
        "![Output tokens a second: SGLang at its best, with pat, with pat and feather](readme_chart.svg)",
        loses,
        perf_servers.setup(folder, perf_servers.SERVERS["pat"]),
        ("group", "workloads"),
        ("decode-backends-on-servers", "policies-on-servers"),
    )


def real_traffic(folder: Path) -> Claim:
    """Waiting of recorded requests."""
    found = perf_replay.tail_ratios(folder)["feather"]
    recorded = sum(name.startswith("conversation") for name in perf_replay.load(folder, perf_replay.TAIL))
    means = [one["TTFT mean to fcfs's"] for one in found]
    seen = perf_replay.on_server(folder, "ttft_mean")
    late, longest, of_hrrn = (
        geometric_mean(one[name] for one in found)
        for name in ("TTFT p99 to fcfs's", "longest wait to fcfs's", "TTFT mean to hrrn's")
    )
    lost = {name: count for name, count in perf_replay.lost_slices(folder).items() if count}
    loses = [
        f"Over the slices, the p99 of the time to the first token is {late:.2f}x that of `fcfs`, the longest wait "
        f"{longest:.2f}x that of `fcfs`, and the mean {of_hrrn:.2f}x that of SGLang's `hrrn`."
    ]
    if lost:
        pairs = [(count, *name.removesuffix("'s").split(" to ")) for name, count in lost.items()]
        counts = ", ".join(f"the {figure} in {count} (than `{policy}`'s)" for count, figure, policy in pairs)
        loses.append(f"Of the {len(found)} slices, `feather` is longer by more than 1% by {counts}.")
    return Claim(
        "real_traffic",
        "Real traffic",
        f"On {len(found)} slices of Mooncake's traces ({recorded} of recorded and {len(found) - recorded} of synthetic "
        "traffic), replayed without a GPU, the mean "
        f"{term('ttft', 'time to the first token', up='')} under `feather` is **{geometric_mean(means):.2f}x** that of "
        f"`fcfs` ({between(means)} by slice); on a server, one slice gave **{seen:.2f}x**.",
        "![Times of feather to those of fcfs on each slice](performance/real_traffic.svg)",
        loses,
        f"{perf_replay.WHERE}; server: {perf_replay.where_on_server(folder)}",
        ("ttft",),
        ("real-traces", "replay-against-servers"),
    )


def between_tokens(folder: Path) -> Claim:
    """Gaps between tokens."""
    before, flags = perf_promise.spans(folder)
    flag, (gaps, costs) = next(iter(flags.items()))
    runs = [runs for runs in perf_promise.all_runs(folder).values() if "feather, tbt 250" in runs]
    first = max(one["feather, tbt 250"].ttft_s / one[perf_promise.PLAIN].ttft_s for one in runs)
    better, compared = perf_promise.beaten(folder)
    loses = [
        f"The bound interrupts prefill, which costs throughput (it is {costs} of that without a bound), and the mean "
        f"time to the first token is up to {first:.2f}x that without one."
    ]
    if better:
        loses.append(
            f"In {better} of {compared} loads, the best of SGLang's own settings serves more requests a second "
            f"{term('share-within-the-bounds', 'within 10 s to the first token and 300 ms between tokens', up='')} "
            f"than {flag}."
        )
    return Claim(
        "between_tokens",
        "Between tokens",
        f"Under loads that a server cannot quite carry, one request in a hundred waited **{before}** for its next "
        f"token; with {flag} it waited **{gaps}**, at **{costs}** of the throughput.",
        "![The longest gap of a request by load and setting](performance/between_tokens.svg)",
        loses,
        f"{perf_servers.setup(folder, perf_promise.WITHOUT)}, `feather` with `pat`; {perf_promise.SETTINGS}",
        ("workloads", "tbt"),
        ("between-tokens-on-servers",),
    )


CLAIMS = (kernel, servers, real_traffic, between_tokens)


def page(folder: Path, titles: Mapping[str, str]) -> str:
    """The Markdown of docs/performance.md; `titles` of the pages below it."""
    claims = [claim(folder) for claim in CLAIMS]
    kv_tokens = server_runs(folder, perf_servers.SERVERS["pat"])[0].kv_tokens
    head = [
        f"{MADE}\n# Performance",
        "Every figure on this page and on those below it is generated from the result files in `docs/measured`. A "
        "ratio of throughputs is better above 1, a ratio of times below 1. Servers have the shapes of Qwen3-8B with "
        f"random weights and a KV pool of {kv_tokens:,} tokens, unless a table says otherwise.",
    ]
    more = [f"- [{title}](performance/{name}.md)" for name, title in titles.items()]
    anchors = "".join(f'<a id="{name}"></a>' for name in ("prefill", "speculation", "other-models"))
    return (
        "\n\n".join([*head, *(claim.markdown() for claim in claims), anchors, "## All pages", "\n".join(more)]) + "\n"
    )
