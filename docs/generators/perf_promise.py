"""The page on gaps between tokens: cost and effect of a bound on servers, beside SGLang's own settings."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from perf_results import ResultError, get, load
from perf_servers import setup
from perf_text import Page, Section, caption, number, table, term

# Prompts of real traces, 500,000 KV tokens; prefixes that fill or exceed 200,000; both kinds with prefill graphs.
WITHOUT, SHARED, WITH = "bounds_h200_traces.json", "bounds_h200.json", "bounds_h200_graphs.json"
SHORT = "bounds_h200_short.json"  # short prompts too, not under each flag; 200,000 KV tokens, prefill graphs
FILES = {
    WITHOUT: "",
    SHARED: "",
    WITH: ", CUDA graphs for prefill, 500,000 KV tokens",
    SHORT: ", CUDA graphs for prefill, 200,000 KV tokens",
}
SETTINGS = (
    "CUDA graphs for prefill only where the figure says *graphs*; 500,000 KV tokens for the traces and where the "
    "figure says *500K*, 200,000 elsewhere"
)
PLAIN = "feather"
FLAGS = {"feather, tbt 250": "`--feather-tbt 250`", "feather, tbt 50": "`--feather-tbt 50`",
         "feather, slo mooncake": "`--feather-slo mooncake`"}  # fmt: skip
STATIC = ("interval", "chunks of")  # SGLang's own settings
NAMES = {"trace:mooncake_synthetic_first1800,500,150,2.7": "Mooncake's synthetic trace, 2.7 requests/s",
         "trace:mooncake_conversation,0,80,3": "Mooncake's conversation trace, 3 requests/s",
         "W2": "W2, prefixes exceed the KV pool", "W6": "W6, prefixes fill the KV pool", "W3": "W3, nothing shared",
         "few-shot, 1000 requests": "few-shot prompts, short answers, 200 requests/s"}  # fmt: skip
FITTING = "prefixes fit into the KV pool"  # of W2 and W6, where it is the larger one


class Bounded(NamedTuple):
    """One workload on a server under one setting; throughput in tokens/s, goodput in requests/s."""

    setting: str
    tok_s: float
    tbt_p99_ms: float
    longest_ms: float  # of a request's gaps, p99 of the requests
    ttft_s: float
    e2e_s: float
    goodput: float


def measured(folder: Path, file: str) -> dict[str, dict[str, Bounded]]:
    """The runs of a file, by workload and setting; of repeated ones the mean."""
    found: dict[str, dict[str, list[Bounded]]] = {}
    for record in get(load(folder, file), file, "records"):
        case, name = get(record, file, "case"), get(record, file, "server")
        overall: dict[str, Any] = get(record, file, "overall")
        if case in NAMES:
            paths = (("tbt_ms", "p99"), ("longest_gap_ms", "p99"), ("ttft_s", "mean"), ("e2e_s", "mean"))
            times = [get(overall, file, *path) for path in paths]
            run = Bounded(name, get(overall, file, "tok_s"), *times, get(record, file, "goodput"))
            found.setdefault(case, {}).setdefault(name, []).append(run)
    for case, runs in found.items():
        needed = (PLAIN,) if file == SHORT else (PLAIN, *FLAGS)
        if missing := [name for name in needed if name not in runs]:
            raise ResultError(f"{file}: {case}: no {missing[0]}")
    return {case: {name: _mean(repeated) for name, repeated in runs.items()} for case, runs in found.items()}


def _mean(runs: list[Bounded]) -> Bounded:
    setting = runs[0].setting
    return Bounded(setting, *(fmean(values) for values in zip(*(run[1:] for run in runs), strict=True)))


def best_static(runs: dict[str, Bounded]) -> Bounded | None:
    """SGLang's own setting with the best goodput."""
    static = [run for name, run in runs.items() if any(word in name for word in STATIC)]
    return max(static, key=lambda run: run.goodput, default=None)


def shown(runs: dict[str, Bounded]) -> list[tuple[str, Bounded]]:
    """The settings of a workload: no bound, the flags, and the best of SGLang's own settings."""
    best = best_static(runs)
    rows = [("no bound", runs[PLAIN]), *((text, runs[name]) for name, text in FLAGS.items() if name in runs)]
    return rows + ([(f"SGLang's best: {best.setting.partition(', ')[2]}", best)] if best is not None else [])


def gap_rows(runs: dict[str, Bounded]) -> list[list[str]]:
    """What each setting brings."""
    return [[text, f"{run.longest_ms / 1e3:.2f}", f"{run.tbt_p99_ms:,.0f}", f"{run.goodput:.2f}"]
            for text, run in shown(runs)]  # fmt: skip


def cost_rows(runs: dict[str, Bounded]) -> list[list[str]]:
    """What each setting costs."""
    return [[text, number(run.tok_s), f"{run.tok_s / runs[PLAIN].tok_s:.2f}", f"{run.ttft_s:.1f}", f"{run.e2e_s:.1f}"]
            for text, run in shown(runs)]  # fmt: skip


def titled(case: str, file: str) -> str:
    """What the workload and its server are."""
    name = NAMES[case]
    if file == WITH and case in ("W2", "W6"):
        name = f"{case}, {FITTING}"
    return name + FILES[file]


def all_runs(folder: Path) -> dict[str, dict[str, Bounded]]:
    """The runs of all files by what the workload and its server are."""
    return {titled(case, file): runs for file in FILES for case, runs in measured(folder, file).items()}


def beaten(folder: Path, name: str = "feather, tbt 250") -> tuple[int, int]:
    """In how many workloads SGLang's own setting has more goodput than a flag, and of how many with both."""
    both = [(runs[name], static) for runs in all_runs(folder).values()
            if name in runs and (static := best_static(runs))]  # fmt: skip
    return sum(static.goodput > run.goodput for run, static in both), len(both)


def spans(folder: Path) -> tuple[str, dict[str, tuple[str, str]]]:
    """The span of the longest gaps without a bound, and with each flag that of the gaps and of throughput to none."""
    found = [runs for file in FILES for runs in measured(folder, file).values()]
    before = sorted(runs[PLAIN].longest_ms / 1e3 for runs in found)
    flags = {}
    for name, text in FLAGS.items():
        costs = sorted(runs[name].tok_s / runs[PLAIN].tok_s for runs in found if name in runs)
        after = sorted(runs[name].longest_ms / 1e3 for runs in found if name in runs)
        flags[text] = f"{after[0]:.2f} to {after[-1]:.2f} s", f"{costs[0]:.2f}x to {costs[-1]:.2f}x"
    return f"{before[0]:.1f} to {before[-1]:.0f} s", flags


def summary(folder: Path) -> str:
    """What each flag costs and brings, in a line."""
    before, flags = spans(folder)
    lines = [f"Without a bound, one request in a hundred waited {before} for its next token."]
    lines += [f"With {text} it waited {gaps}, at {costs} of the throughput." for text, (gaps, costs) in flags.items()]
    return "\n".join(f"- {line}" for line in lines)


def guide_rows(folder: Path) -> str:
    """What docs/guide/goodput.md shows of the first flag: the loads without CUDA graphs for prefill."""
    rows = []
    for file in (WITHOUT, SHARED):
        for case, runs in measured(folder, file).items():
            plain, bounded = runs[PLAIN], runs["feather, tbt 250"]
            pairs = (
                (plain.tok_s, bounded.tok_s, "{:,.0f}"), (plain.longest_ms / 1e3, bounded.longest_ms / 1e3, "{:.2f}"),
                (plain.tbt_p99_ms, bounded.tbt_p99_ms, "{:,.0f}"), (plain.e2e_s, bounded.e2e_s, "{:.1f}"),
            )  # fmt: skip
            rows.append(
                [NAMES[case], *(f"{form.format(before)} / {form.format(after)}" for before, after, form in pairs)]
            )
    heads = ["tokens/s", "longest gap of a request, p99, s", "TBT p99, ms", "end to end, mean, s"]
    shown_ = table(["load", *(f"{head}: without / with the flag" for head in heads)], rows)
    _, flags = spans(folder)
    costs = "; ".join(f"with {text} the longest gap is {gaps}, at {cost} of the throughput"
                      for text, (gaps, cost) in flags.items())  # fmt: skip
    where = caption(f"{setup(folder, WITHOUT)}, `feather` with `pat`, no CUDA graphs for prefill", "workloads", "tbt")
    return f"{shown_}\n\n{where}\n\nOver all loads and settings that were measured, {costs}."


def readme_line(folder: Path) -> str:
    """The first flag's for README."""
    before, flags = spans(folder)
    text, (gaps, costs) = next(iter(flags.items()))
    return (
        f"- Under overload, one request in a hundred waits **{before}** for its next token, and **{gaps}** with "
        f"{text}, at **{costs}** of the throughput (H200 server)."
    )


def page(folder: Path) -> Page:
    """A bound's costs and gains under each workload."""
    overall = Section(
        "Over all loads",
        [
            summary(folder),
            "In all runs but those with CUDA graphs for prefill and 200,000 KV tokens, `feather` had two faults that "
            "have been mended since. A decode step followed every prefill step, however short. And `--feather-slo "
            "mooncake` did not bound the first burst of prefill on an idle server: its gaps of a second and more, on "
            "the conversation trace, W2 and W6, come from that.",
            "![The longest gap of a request by load and setting](between_tokens.svg)",
            caption(f"{setup(folder, WITHOUT)}, `feather` with `pat`; {SETTINGS}", "workloads"),
        ],
        list(FILES),
    )
    each = []
    for file in FILES:
        where = f"{setup(folder, file)}, `feather` with `pat`"
        for case, runs in measured(folder, file).items():
            body = [
                table(
                    ["setting", "longest gap of a request, p99, s", "TBT p99, ms", "requests/s within the bounds"],
                    gap_rows(runs),
                ),
                table(["setting", "output tokens/s", "over those without a bound", "TTFT mean, s",
                       "arrival to last token, mean, s"],
                      cost_rows(runs)),
                caption(where, "tbt", "ttft", "share-within-the-bounds"),
            ]  # fmt: skip
            if tried := [name.partition(", ")[2] for name in runs if any(word in name for word in STATIC)]:
                body.append(f"SGLang's own settings that were tried on this load: {', '.join(tried)}.")
            each.append(Section(titled(case, file), body, [file]))
    return Page(
        "How long do requests wait between tokens?",
        "Loads that a server cannot quite carry, each without a bound on the time between two tokens, with the flags "
        "that set one, and, where SGLang's own settings were tried, with the best of these. Of each request the "
        "longest gap counts, and the tables have its p99 over the requests. A request is "
        f"{term('share-within-the-bounds', 'within the bounds')} "
        "if its first token came within 10 s and 99% of its gaps were within 300 ms. Answers are streamed token by "
        "token. Each figure is of a single run; only those of W6 with CUDA graphs for prefill and 200,000 KV tokens "
        "are means of two. SGLang's own settings are the number of decode steps after each prefill step (*interval*, "
        "`--prefill-decode-interval`) and the most tokens of a prefill step (*chunks*, `--chunked-prefill-size`); "
        "they were tried with the policy `feather`. *SGLang's best* is the one, among those that a section names as "
        "tried, with the most requests a second within the bounds.",
        [overall, *each],
    )
