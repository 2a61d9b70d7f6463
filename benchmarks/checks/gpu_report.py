"""The report of ``check_gpu.py``: its figures beside the performance page's or an older run's, and the failures.

Pure functions of result files; no GPU is needed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from server_records import tok_s

from feather_sglang.report.tables import grid

Content = Mapping[str, Any]
STOCK, OURS = "fa3", "pat+feather"  # servers; the first one's policy is SGLang's fcfs
PROMISE, BOUND_MS = "promise", 250  # OURS with --feather-tbt
PROMISED = "W6"  # the case in which it is judged
KEPT = 0.93  # of the throughput without it: under overload the bound takes a twentieth, and runs lie 2% apart
RIGHT, WRONG, NOT_RUN = "right", "wrong", "not run"
RATIO_SLACK = 0.05  # by which throughput beside fa3 may be worse than in the older file
SPEED_SLACK = 0.10  # of tokens/s: one configuration lay so far apart on several GPUs of a kind


class Case(NamedTuple):
    """A case of ``bench_server.py``, and where the page has it: for each server a file, its name there and the case's.

    A lone request is on the page with `pat` alone, whose policy has nothing to choose there.
    """

    name: str
    what: str
    page: Mapping[str, tuple[str, str, str]]


CASES = (
    Case(
        "W6",
        "W6, prefixes fill the KV pool",
        {STOCK: ("servers_h200_fa3.json", "fa3", "W6"), OURS: ("servers_h200_pat.json", "pat+feather", "W6")},
    ),
    Case(
        "W3",
        "W3, nothing shared",
        {STOCK: ("servers_h200_fa3.json", "fa3", "W3"), OURS: ("servers_h200_pat.json", "pat+feather", "W3")},
    ),
    Case(
        "decode:1,0,8000,768",
        "a lone request of 8,000 tokens",
        {
            STOCK: ("server_h200_long.json", "fa3", "decode:1,0,8000,256"),
            OURS: ("server_h200_long.json", "pat", "decode:1,0,8000,256"),
        },
    ),
)


class Line(NamedTuple):
    """A row of the table; `failure` says in one line why it fails, if it does."""

    check: str
    result: str
    here: str
    there: str
    verdict: str
    failure: str | None = None


def page_figures(measured: Path) -> dict[str, Any]:
    """The performance page's figures, laid out as a result file."""
    files = {name for case in CASES for name, _, _ in case.page.values()}
    contents = {name: json.loads((measured / name).read_text()) for name in files}

    def figure(file: str, server: str, case: str) -> float:
        found = [one for one in contents[file]["records"] if (one["server"], one["case"]) == (server, case)]
        return mean(rate for one in found if (rate := tok_s(one)) is not None)

    machine = contents[CASES[0].page[OURS][0]]["machine"]
    cases = {case.name: {server: figure(*where) for server, where in case.page.items()} for case in CASES}
    return {"machine": machine, "checks": {}, "cases": cases}


def read_older(path: Path) -> dict[str, Any]:
    """An older result file; raises ``ValueError`` with the reason where it is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or not {"machine", "checks", "cases"} <= set(content):
        raise ValueError(f"{path} is no result file of this check")
    return content


def lines(new: Content, old: Content, is_page: bool) -> list[Line]:
    """The rows of the table.

    Parameters
    ----------
    old : the page's figures, which decide nothing, or an older file, than which nothing may be worse.
    """
    made = [check_line(name, check, old["checks"].get(name)) for name, check in new["checks"].items()]
    made += [line for case in CASES for line in case_lines(case, new, old, is_page)]
    return made + promise_lines(new["cases"].get(PROMISED, {}))


def check_line(name: str, check: Content, older: Content | None) -> Line:
    """What is right or wrong."""
    right = check["result"] == RIGHT
    failure = None if right else f"{name}: {check['result']}: {check['said']}"
    there = older["result"] if older else "-"
    return Line(name, check["result"], shortened(check["said"]), there, "passes" if right else "FAILS", failure)


def case_lines(case: Case, new: Content, old: Content, is_page: bool) -> list[Line]:
    """A case's throughput beside the stock server's, and where machines are alike by itself."""
    here, there = new["cases"].get(case.name, {}), old["cases"].get(case.name, {})
    ratio, older_ratio = beside_stock(here), beside_stock(there)
    what = f"{case.what}: tok/s to {STOCK}'s"
    if ratio is None:
        said = here.get("said") or NOT_RUN
        failure = f"{case.what}: not measured: {said}"
        return [Line(what, NOT_RUN, shortened(said), times(older_ratio), "FAILS", failure)]
    made = [compared(what, ratio, older_ratio, RATIO_SLACK, is_page, times)]
    what = f"{case.what}: tok/s of {OURS}"
    if alike(new, old):
        made.append(compared(what, here[OURS], there.get(OURS), SPEED_SLACK, is_page, number))
    else:
        made.append(Line(what, "measured", number(here[OURS]), "-", "not compared"))
    return made


def promise_lines(figures: Content) -> list[Line]:
    """What the bound between tokens costs in tokens/s and what it brings; nothing where the case was not measured."""
    what = f"{PROMISED} with --feather-tbt {BOUND_MS}"
    plain, bound = figures.get(OURS), figures.get(PROMISE)
    if not plain or not bound:
        failure = f"{what}: not measured: {figures.get('said') or NOT_RUN}" if plain else None
        return [Line(f"{what}: tok/s to none", NOT_RUN, "-", "-", "FAILS", failure)] if plain else []
    gaps = figures["longest_gap_ms"]
    here, there = gaps[PROMISE], gaps[OURS]
    costs = None if bound >= KEPT * plain else f"{what}: {times(bound / plain)} the throughput without it"
    brings = (
        None
        if 2 * here < there
        else f"{what}: longest gap of a request, p99, {number(here)} ms, without it {number(there)} ms"
    )
    return [
        Line(f"{what}: tok/s to none", "measured", times(bound / plain), "-", "FAILS" if costs else "passes", costs),
        Line(f"{what}: longest gap, p99, ms", "measured", f"{number(here)}, without it {number(there)}", "-",
             "FAILS" if brings else "passes", brings),
    ]  # fmt: skip


def compared(what: str, here: float, there: float | None, slack: float, is_page: bool, form: Any) -> Line:
    """A figure of which more is better."""
    if there is None:
        return Line(what, "measured", form(here), "-", "not compared")
    worse = here < there * (1 - slack)
    if is_page:
        return Line(what, "measured", form(here), form(there), "below the page" if worse else "as on the page")
    failure = f"{what}: {form(here)}, more than {slack:.0%} below the older file's {form(there)}" if worse else None
    return Line(what, "measured", form(here), form(there), "FAILS" if worse else "passes", failure)


def beside_stock(figures: Content) -> float | None:
    """How many times the stock server's throughput; None where one was not measured."""
    ours, stock = figures.get(OURS), figures.get(STOCK)
    return ours / stock if ours and stock else None


def alike(new: Content, old: Content) -> bool:
    """Whether both are of one GPU and one SGLang release, so that their times can be compared."""
    return hardware(new) == hardware(old)


def hardware(content: Content) -> tuple[str | None, str | None]:
    """GPU and SGLang release."""
    machine = content["machine"]
    return machine.get("gpu"), machine.get("versions", {}).get("sglang")


def report(new: Content, old: Content, is_page: bool) -> str:
    """The table, and what it is compared with."""
    rows = lines(new, old, is_page)
    other = "the page" if is_page else "older file"
    head = ["check", "result", "this machine", other, "verdict"]
    text = grid([head, *([*row[:5]] for row in rows)])
    graphs = ["without", "with" if is_page else "without"]
    kinds = [
        f"{whose}: {gpu}, SGLang {release}, {how} CUDA graphs for prefill"
        for whose, (gpu, release), how in zip(head[2:4], map(hardware, (new, old)), graphs, strict=True)
    ]
    return "\n".join([text, "", *kinds])


def failures(new: Content, old: Content, is_page: bool) -> list[str]:
    """One line for each check that fails."""
    return [line.failure for line in lines(new, old, is_page) if line.failure]


def shortened(text: str, most: int = 60) -> str:
    """The beginning, so that a table stays a table."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def times(value: float | None) -> str:
    """A ratio."""
    return "-" if value is None else f"{value:.2f}x"


def number(value: float) -> str:
    """Tokens a second."""
    return f"{value:,.0f}"
