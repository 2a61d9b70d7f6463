"""Within bounds: the suite's policies beside feather that is told of them, by replay."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from perf_results import get, load
from perf_text import Section, table

from feather_sglang.suite.report import summary

SUITE = "suite.json"
PROMISE = "feather+slo"  # the suite's name of it
ON_A_SERVER = (
    "Do not use `--feather-slo` yet. An H200 server with `--feather-slo mooncake` (SGLang 0.5.23, 150 requests of real "
    "prompt structure, 2.7 requests/s, 500,000 KV tokens) reached 189 tok/s where its replay has 379, and served 3% of "
    "the requests within the bounds where the replay has 17%."
)
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


def section(folder: Path) -> Section:
    """The table of the page."""
    results = measured(folder)
    head, *rows = summary(results)
    shown = [["`--feather-slo`" if row[0] == PROMISE else row[0], *row[1:-1]] for row in rows if row[0] in SHOWN]
    body = [
        f"{len(results['cases'])} kinds of traffic, SLO {results['slo']}, replayed; to fcfs:",
        table(head[:-1], shown),
        ON_A_SERVER,
    ]
    return Section("Within bounds", body, f"`{results['attention']}`.", ["feather suite --short --traces TRACES"])
