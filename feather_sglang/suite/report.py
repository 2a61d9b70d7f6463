"""The report of a suite, from its results alone: a page in Markdown, and tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from feather_sglang.report.tables import Figure
from feather_sglang.slo import NAMED

Results = dict[str, Any]


RATE, WITHIN = "output tokens/s", "requests within the bounds"
# Ratios to fcfs stand beside all but the last.
COLUMNS = (
    Figure("output_tok_s", RATE, "{:,.0f}"),
    Figure("ttft_mean", "TTFT mean, s", "{:.2f}"),
    Figure("ttft_p99", "TTFT p99, s", "{:.2f}"),
    Figure("tbt_p99_ms", "TBT p99, ms", "{:.0f}"),
    Figure("goodput", "goodput, requests/s", "{:.2f}"),
    Figure("slo_share", WITHIN, "{:.0%}"),
)
RATIOS = COLUMNS[:-1]
BASE = "fcfs"


def policies_of(results: Results) -> list[str]:
    """Those that any case ran under, in the order of the run."""
    return list(dict.fromkeys(policy for case in results["cases"].values() for policy in case["policies"]))


def ratio(case: Results, policy: str, field: str) -> float | None:
    """A figure to fcfs's; None where either is missing or fcfs's is 0."""
    own, base = (case["policies"].get(name, {}).get(field) for name in (policy, BASE))
    return own / base if own is not None and base else None


def summary(results: Results) -> list[list[str]]:
    """A row per policy: geometric means of the ratios to fcfs, and the mean share within the SLO.

    Over the cases that both came through. Goodput has no ratio here: it may be 0.
    """
    columns = [column for column in RATIOS if column.field != "goodput"]
    heads = [column.name.partition(",")[0] for column in columns]
    rows = [["policy", *heads, WITHIN, "cases"]]
    for policy in policies_of(results):
        cases = [
            case
            for case in results["cases"].values()
            if all("error" not in case["policies"].get(name, {"error": ""}) for name in (policy, BASE))
        ]
        row = [policy]
        for column in columns:
            ratios = [value for case in cases if (value := ratio(case, policy, column.field))]
            row.append(f"{geometric_mean(ratios):.2f}x" if ratios else "-")
        shares = [case["policies"][policy]["slo_share"] for case in cases]
        row.append(f"{sum(shares) / len(shares):.0%}" if shares else "-")
        rows.append([*row, str(len(cases))])
    return rows


def answer(results: Results) -> str:
    """Which policies serve most within the SLO, and what they cost in throughput, in one sentence."""
    head, *rows = summary(results)
    share, rate, count = head.index(WITHIN), head.index(RATE), head.index("cases")
    most = max((int(row[count]) for row in rows), default=0)
    whole = [row for row in rows if int(row[count]) == most > 0]  # a policy that failed in a case is not compared
    best = sorted(whole, key=lambda row: -int(row[share].rstrip("%")))[:3]
    told = "`{}` serves {} of its requests within the bounds, at {} the tokens a second of `{}`"
    return "; ".join(told.format(row[0], row[share], row[rate], BASE) for row in best)


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers, at least one."""
    return math.exp(sum(map(math.log, values)) / len(values))


def rows_of(case: Results) -> list[list[str]]:
    """A row per policy of a case: figures, and in brackets their ratio to fcfs's; equal policies share a row."""
    rows = [["policy", *(column.name for column in COLUMNS)]]
    alike: dict[tuple[Any, ...], list[str]] = {}
    for policy, figures in case["policies"].items():
        alike.setdefault(tuple(figures.get(column.field) for column in COLUMNS), []).append(policy)
    for policy, *others in alike.values():
        figures = case["policies"][policy]
        row = [", ".join([policy, *others])]
        for column in COLUMNS:
            value = figures.get(column.field)
            cell = "-" if value is None else column.form.format(value)
            to_base = ratio(case, policy, column.field) if column in RATIOS and policy != BASE else None
            row.append(cell if to_base is None else f"{cell} ({to_base:.2f}x)")
        rows.append(row)
    return rows


def about(case: Results) -> str:
    """What a case is, in one line."""
    rate = f"at {case['rate']:.3g} a second" if case["rate"] else "all at once"
    return f"{case['requests']:,} requests {rate}, {case['kv_tokens']:,} KV tokens"


def tables(results: Results) -> Iterator[Table]:
    """For the terminal: each case, then the summary."""
    for name, case in results["cases"].items():
        yield _table(f"{name}: {about(case)}", rows_of(case))
    yield _table("to fcfs, geometric means over the cases", summary(results))


def _table(title: str, rows: list[list[str]]) -> Table:
    table = Table(title=escape(title), title_justify="left")
    for number, head in enumerate(rows[0]):
        table.add_column(head, justify="right" if number else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*map(escape, row))
    return table


def page(results: Results, command: str) -> str:
    """The page of the docs, and the command that wrote it."""
    slo = f"{results['slo']} ({NAMED[results['slo']]})" if results["slo"] in NAMED else results["slo"]
    lines = [
        "# Which policy serves which traffic within its bounds?",
        "",
        f"With the bounds {slo}, in the mean over the cases: {answer(results)}.",
        "",
        f"Replays of SGLang {results['sglang']} with the model {results['model']}, the profile {results['profile']}, "
        f"the attention kernel {results['attention']} and `--scheduler-cost {results['scheduler_cost']}`; the "
        f"{results['form']} form of the suite. The rate of a case is that of the arrival times that were drawn. A load "
        "of 1 is the rate that fcfs serves when all requests come at once. A policy with `+slo` is told of the bounds "
        f"(`--feather-slo`).{_server(results)}",
        "",
        "The table has geometric means of the ratios to fcfs, over the cases that a policy served to their end; "
        "the share of requests within the bounds is an arithmetic mean. In the tables below it, policies with equal "
        "figures share a row, and a slice is named by its trace, its first request, its load and its KV tokens:",
        "",
        *_markdown(summary(results)),
    ]
    if results["skipped"]:
        lines += ["", f"Left out: {'; '.join(results['skipped'])}."]
    kinds = dict.fromkeys(case["kind"] for case in results["cases"].values())
    for kind in kinds:
        lines += ["", f"## {kind[0].upper()}{kind[1:]}"]
        for name, case in results["cases"].items():
            if case["kind"] == kind:
                lines += [
                    "",
                    f"### {name}",
                    "",
                    f"{about(case)[0].upper()}{about(case)[1:]}.",
                    "",
                    *_markdown(rows_of(case)),
                ]
                errors = {policy: one["error"] for policy, one in case["policies"].items() if "error" in one}
                lines += [line for policy, error in errors.items() for line in ("", f"`{policy}`: {error}.")]
    short = "--short " if results["form"] == "short" else ""
    said = f"`feather suite {short}--traces DIR --slo {results['slo']}` runs the suite. This page was written by:"
    return "\n".join([*lines, "", said, "", "```", command, "```"]) + "\n"


def _server(results: Results) -> str:
    """What the servers were started with, where that was said: variables, then flags."""
    server = dict(results.get("server", {}))
    variables = [f"{name}={value}" for name, value in results.get("environment", {}).items()]
    flags = server.pop("server_flags", [])
    words = [*variables, *(f"--{name.replace('_', '-')}={value}" for name, value in server.items()), *flags]
    return f" Servers: `{' '.join(words)}`." if words else ""


def _markdown(rows: list[list[str]]) -> list[str]:
    """Policies that share a row stand under each other; a figure and its ratio stay on one line."""
    cells = [[row[0].replace(", ", "<br>"), *row[1:]] for row in rows]
    lines = [f"|{'|'.join(row)}|" for row in cells]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]
