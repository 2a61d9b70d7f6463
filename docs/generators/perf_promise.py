"""Within bounds: the suite's policies beside feather that is told of them, by replay."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from perf_results import ResultError, get, load
from perf_text import Section, table

from feather_sglang.suite.judgement import LEARNT
from feather_sglang.suite.report import summary

SUITE, MODES = "suite.json", "modes.json"
SAME = ("sglang", "profile", "model", "attention", "slo", "seed", "form")
PROMISE = "`--feather-slo`"
SHOWN = ("fcfs", "hrrn", "shortest-prefill-first", "feather", PROMISE)


def together(folder: Path) -> dict[str, Any]:
    """The suite's results, with what the shipped modes have on its cases."""
    suite, modes = load(folder, SUITE), load(folder, MODES)
    for name in SAME:
        if get(suite, SUITE, name) != get(modes, MODES, name):
            raise ResultError(f"{MODES}: {name} is {modes[name]!r}, {SUITE} has {suite[name]!r}")
    own = get(modes, MODES, "cases")
    if own.keys() != get(suite, SUITE, "cases").keys():
        raise ResultError(f"{MODES}: its cases are not those of {SUITE}")
    cases = {
        name: {**case, "policies": {**case["policies"], PROMISE: get(own[name], f"{MODES}, {name}", LEARNT)}}
        for name, case in suite["cases"].items()
    }
    return {**suite, "cases": cases}


def share(results: dict[str, Any], policy: str) -> float:
    """Mean of the share of requests within the bounds over the cases that the policy came through."""
    cases = [case["policies"][policy] for case in results["cases"].values()]
    return mean(figures["slo_share"] for figures in cases if "error" not in figures)


def best_stock(results: dict[str, Any]) -> str:
    """SGLang's policy that serves most within the bounds."""
    return max((name for name in SHOWN if name not in ("feather", PROMISE)), key=lambda name: share(results, name))


def section(folder: Path) -> Section:
    """The table of the page."""
    results = together(folder)
    head, *rows = summary(results)
    shown = [row[:-1] for row in rows if row[0] in SHOWN]
    body = [
        f"{len(results['cases'])} kinds of traffic, SLO {results['slo']}, replayed; to fcfs:",
        table(head[:-1], shown),
    ]
    setup = f"`{results['attention']}`."
    return Section("Within bounds", body, setup, ["feather learn --traces TRACES"])
