"""Within bounds: the suite's policies beside feather that is told of them, by replay."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import perf_replay
from perf_results import get, load
from perf_text import Section, table

from feather_sglang.suite.report import summary

SUITE = "suite.json"
PROMISE = "feather+slo"  # the suite's name of it
SHOWN = ("fcfs", "hrrn", "shortest-prefill-first", "feather", PROMISE)


def share(results: dict[str, Any], policy: str) -> float:
    """Mean of the share of requests within the bounds over the cases that the policy came through."""
    cases = [get(case["policies"], f"{SUITE}, {name}", policy) for name, case in results["cases"].items()]
    return mean(figures["slo_share"] for figures in cases if "error" not in figures)


def measured(folder: Path) -> dict[str, Any]:
    """The suite's results, which have all that is shown."""
    results = load(folder, SUITE)
    for name in SHOWN:
        share(results, name)
    return results


def on_a_server(folder: Path) -> str:
    """What the promise cost where a server was measured with it and without."""
    found = perf_replay.measured(folder)
    kept = [one for one in found if "slo " in one.options]
    plain = {one.bed: one for one in found if one.policy == "feather" and not one.options}
    lines = [
        "Do not use `--feather-slo` in production yet. The table's row and the server's figures are of the mechanism "
        "before [the present one](guide/goodput.md#can-the-server-aim-at-them), which no server has confirmed."
    ]
    for one in kept:
        without = plain[one.bed]
        lost = 1 - one.server["output_tok_s"] / without.server["output_tok_s"]
        lines.append(
            f"An H200 server (SGLang {one.release}, `{one.case}`) had {one.server['output_tok_s']:.0f} tokens/s with "
            f"it and {without.server['output_tok_s']:.0f} without, {lost:.0%} less; its mean TTFT was "
            f"{one.server['ttft_mean']:.1f} s and {without.server['ttft_mean']:.1f} s, its TBT p99 "
            f"{one.server['tbt_p99_ms']:.0f} ms and {without.server['tbt_p99_ms']:,.0f} ms."
        )
    return " ".join(lines)


def section(folder: Path) -> Section:
    """The table of the page."""
    results = measured(folder)
    head, *rows = summary(results)
    shown = [["`--feather-slo`" if row[0] == PROMISE else row[0], *row[1:-1]] for row in rows if row[0] in SHOWN]
    body = [
        f"{len(results['cases'])} kinds of traffic, SLO {results['slo']}, replayed; to fcfs:",
        table(head[:-1], shown),
        on_a_server(folder),
    ]
    return Section("Within bounds", body, f"`{results['attention']}`.", ["feather suite --short --traces TRACES"])
