"""Attention backends and policies on real servers: tables of the performance page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from perf_results import (
    STOCK_POLICIES,
    Run,
    day,
    described,
    evicts,
    feather_policy,
    geometric_mean,
    get,
    load,
    server_runs,
)
from perf_text import Section, command, number, table
from server_names import COMMON_FLAGS, words_of_start

from feather_sglang.compare.server.config import NO_PREFILL_GRAPHS

SERVERS = {"pat": "servers_h200_pat.json", "fa3": "servers_h200_fa3.json", "flashinfer": "servers_h200_flashinfer.json"}
# The first file that has a workload counts: one has more policies than the backends' runs.
POLICIES = {name: (file,) for name, file in SERVERS.items()} | {
    "pat": ("servers_h200_policies.json", SERVERS["pat"]),
}
DECODE = ("server_h200_decode.json", "server_h200_decode_flashinfer.json", "server_h200_decode_triton.json")
TWO_GPUS, LONG = "server_h200_tp2.json", "server_h200_long.json"
LOADS = ("policies_h200_pat_sweeps.json", "policies_h200_fa3_sweeps.json", "policies_h200_small.json")
MODEL = "qwen3-8b"
BACKENDS = ("pat", "fa3", "flashinfer", "triton")
SLOWER, LATER = 0.99, 1.10  # a policy is behind from here on: tokens a second, times to the first token
RATES, WAITS = 4, 6  # so many of either are listed


def setup(folder: Path, file: str) -> str:
    """Hardware and versions of a server run."""
    content = load(folder, file)
    gpu, sglang = get(content, file, "machine", "gpu"), get(content, file, "machine", "versions", "sglang")
    return f"{gpu}, SGLang {sglang}, {day(content, file)}"


def command_of(folder: Path, file: str) -> str:
    """The command of a server run, the first where there were several, without flags that are the default."""
    typed = get(load(folder, file), file, "command").partition("; ")[0]
    return command(typed.replace(f" --common '{COMMON_FLAGS}'", ""))


def days(folder: Path, files: Sequence[str]) -> str:
    """From the first to the last of these files' days."""
    first, *_, last = sorted(datetime.fromisoformat(get(load(folder, file), file, "when")) for file in (*files, *files))
    begin = f"{first.day}" if (first.year, first.month) == (last.year, last.month) else f"{first.day} {first:%b %Y}"
    return f"{'' if first.date() == last.date() else f'{begin} to '}{last.day} {last:%b %Y}"


def prefill_graphs(folder: Path, file: str) -> bool:
    """Whether the servers of a run had CUDA graphs for prefill."""
    content = load(folder, file)
    typed = get(content, file, "command").partition("; ")[0]
    started = next((one for one in get(content, file, "servers").values() if "command" in one), {})
    return NO_PREFILL_GRAPHS not in words_of_start(typed, started)


def unlike(folder: Path) -> str:
    """What the servers side by side do not have in common."""
    without = [name for name, file in SERVERS.items() if not prefill_graphs(folder, file)]
    graphs = f", {' and '.join(f'`{name}`' for name in without)} without prefill CUDA graphs" if without else ""
    tokens = [server_runs(folder, file)[0].kv_tokens for file in (SERVERS["pat"], DECODE[0])]
    steady = f" Steady batches: {tokens[1]:,} KV tokens." if tokens[0] != tokens[1] else ""
    return f" W1-W7: separate runs{graphs}.{steady}"


def unshared(case: str) -> bool:
    """Whether no two prompts of a workload share anything."""
    return case == "W3" or (case.startswith("decode:") and case.split(",")[1] == "0")


def by_backend(folder: Path, files: Sequence[str]) -> dict[str, dict[str, Run]]:
    """Workload, backend and its run under fcfs; the first file that has one counts."""
    found: dict[str, dict[str, Run]] = {}
    for file in files:
        for run in server_runs(folder, file):
            if run.policy == "fcfs":
                found.setdefault(run.case, {}).setdefault(run.attention, run)
    return {case: runs for case, runs in found.items() if len(runs) > 1 and "pat" in runs}


def backend_rows(found: dict[str, dict[str, Run]], label: str = "") -> list[list[str]]:
    """Tokens a second of each backend, and pat's to the best other."""
    rows = []
    for case, runs in sorted(found.items(), key=lambda item: by_size(item[0])):
        best = max(run.tok_s for name, run in runs.items() if name != "pat")
        cells = [number(runs[name].tok_s) if name in runs else "-" for name in BACKENDS]
        name = f"{case.partition(':')[0]}, {label}" if label else shown(case)
        rows.append([name, f"**{runs['pat'].tok_s / best:.2f}**", *cells])
    return rows


def by_size(case: str) -> tuple[str, list[int]]:
    """Workloads by name, steady batches the largest first."""
    kind, _, rest = case.partition(":")
    batch, *more = map(int, rest.split(",")) if kind == "decode" else (0,)
    return kind, [-batch, *more]


def shown(case: str) -> str:
    """A workload's name with what it is."""
    if case.startswith("decode:"):
        batch, groups, tokens, *_ = map(int, case.removeprefix("decode:").split(","))
        if not groups:
            return f"decode {batch}, {tokens // 1000}K unshared"
        return f"decode {batch}, {groups} x {tokens // 1000}K"
    if case.startswith("open:"):
        draw = case.partition("@")[2]
        return described(case) + (f", draw {draw}" if draw else "")
    name, _, first = case.partition(":")
    return f"{name}: {described(case)}" + (f", first {first}" if first else "")


def backends(folder: Path) -> Section:
    """Decode backends under fcfs."""
    steady = by_backend(folder, DECODE)
    full = {
        case: runs
        for case, runs in steady.items()
        if len(runs) == len(BACKENDS) and case.startswith(("decode:500", "decode:32"))
    }
    rows = backend_rows(by_backend(folder, list(SERVERS.values())))
    rows += backend_rows(by_backend(folder, [TWO_GPUS]), "2 GPUs")
    rows += backend_rows(full)
    ratios = [runs["pat"].tok_s / max(r.tok_s for n, r in runs.items() if n != "pat") for runs in steady.values()]
    lost = {
        case: runs
        for case, runs in {**steady, **by_backend(folder, [LONG])}.items()
        if full.get(case) is not runs  # else it stands in the table above
        and runs["pat"].tok_s < SLOWER * max(run.tok_s for run in runs.values())
    }
    body = [
        "Output tokens/s under fcfs, and the ratio of `pat` to the best other backend. 5 x 5K: five prefixes of "
        f"5,000 tokens.{unlike(folder)}",
        table(["workload", "ratio", *BACKENDS], rows),
        "![Decode throughput by batch](performance/backends.svg)",
        f"All {len(ratios)} steady batches: {geometric_mean(ratios):.2f}x the best other (geometric mean), "
        f"{min(ratios):.2f}x to {max(ratios):.2f}x.",
    ]
    if lost:
        body += ["Others behind:", table(["workload", "ratio", *BACKENDS], backend_rows(lost))]
    files = [SERVERS["flashinfer"], *DECODE, TWO_GPUS, LONG]
    where = f"{setup(folder, SERVERS['pat'])}; others: {days(folder, [SERVERS['fa3'], *files])}."
    return Section("Decode backends on servers", body, where, [command_of(folder, DECODE[0])], files)


class Policies(NamedTuple):
    """What was measured on one backend.

    `names` are the policies in the order of the table, the default's last; `runs` is by case and policy, `model` a name
    where it is not the page's.
    """

    attention: str
    names: list[str]
    runs: dict[str, dict[str, Run]]
    model: str = ""


def policies(folder: Path, attention: str, files: Sequence[str]) -> Policies:
    """The runs of server files by workload, those that evict first; the first file that has a workload counts."""
    runs: list[Run] = []
    for file in files:
        known = {run.case for run in runs}
        runs += [run for run in server_runs(folder, file) if run.case not in known]
    default = feather_policy(runs)
    names = [name for name in STOCK_POLICIES if any(run.policy == name for run in runs)] + [default]
    cases: dict[str, dict[str, Run]] = {}
    for run in runs:
        if run.attention == attention and run.policy in names:
            cases.setdefault(run.case, {})[run.policy] = run
    whole = {case: found for case, found in cases.items() if "fcfs" in found and default in found}
    order = sorted(whole, key=lambda case: (not evicts(case, whole[case]["fcfs"].kv_tokens), case))
    words = shlex.split(get(load(folder, files[0]), files[0], "command"))
    model = words[words.index("--model") + 1] if "--model" in words[:-1] else ""
    return Policies(attention, names, {case: whole[case] for case in order}, "" if model == MODEL else f"{model} ")


def policy_tables(measured: Sequence[Policies]) -> tuple[str, str]:
    """Tokens a second, and time to the first token."""
    rate_rows, wait_rows = [], []
    names = max((one.names for one in measured), key=len)
    for one in measured:
        for case, runs in one.runs.items():
            ours, fcfs = runs[one.names[-1]], runs["fcfs"]
            best = max(runs[name].tok_s for name in one.names[:-1] if name in runs)
            cells = [runs.get(name) for name in (*names[:-1], one.names[-1])]
            place = [f"{case.partition(':')[0]}, `{one.attention}`"]
            rates = [number(run.tok_s) if run else "-" for run in cells]
            rate_rows.append([*place, f"**{ours.tok_s / fcfs.tok_s:.2f}**", f"{ours.tok_s / best:.2f}", *rates])
            waits = [f"{run.ttft_mean:.2f} / {run.ttft_p99:.1f}" if run else "-" for run in cells]
            wait_rows.append([*place, *waits])
    heads = [*names[:-1], "feather"]
    return table(["workload, backend", "feather to fcfs", "to SGLang's best", *heads], rate_rows), table(
        ["workload, backend", *heads], wait_rows
    )


def behind(measured: Sequence[Policies]) -> tuple[list[list[str]], list[list[str]]]:
    """Where the default is behind the best of SGLang's policies, in tokens a second and in TTFT, the worst first."""
    rates, waits = [], []
    for one in measured:
        for case, runs in one.runs.items():
            ours, stock = runs[one.names[-1]], [runs[name] for name in one.names[:-1] if name in runs]
            place = f"{one.model}{shown(case)}, `{one.attention}`"
            best = max(run.tok_s for run in stock)
            if ours.tok_s < SLOWER * best:
                rates.append((ours.tok_s / best, [place, "tok/s", number(ours.tok_s), number(best)]))
            for what, name in (("TTFT mean, s", "ttft_mean"), ("TTFT p99, s", "ttft_p99")):
                least = min(run.figure(name) for run in stock)
                if ours.figure(name) > LATER * least:
                    waits.append((ours.figure(name) / least,
                                  [place, what, f"{ours.figure(name):.3f}", f"{least:.3f}"]))  # fmt: skip
    rates.sort(key=lambda pair: pair[0])
    waits.sort(key=lambda pair: -pair[0])
    first, second = ([[*cells, f"{ratio:.2f}"] for ratio, cells in found] for found in (rates, waits))
    return first, second


def policy_section(folder: Path) -> Section:
    """Policies on both backends, the workloads that evict first."""
    main = [policies(folder, attention, POLICIES[attention]) for attention in ("pat", "fa3")]
    other = [policies(folder, attention, [file]) for attention, file in zip(("pat", "fa3", "fa3"), LOADS, strict=True)]
    rates, waits = policy_tables(main)
    body = [
        "Workloads as above, those whose prefixes fill or exceed the KV pool first. Output tokens/s:",
        rates,
        "![Throughput of each policy to fcfs](performance/policies.svg)",
        "Time to the first token, mean / p99, seconds:",
        waits,
    ]
    slower, later = behind([*main, *other])
    if slower or later:
        body += [
            f"Behind SGLang's best measured policy, these and {sum(len(one.runs) for one in other)} other loads: "
            f"throughput in {len(slower)}, TTFT mean or p99 in {len(later)}; the worst:",
            table(["workload", "figure", "feather", "best", "ratio"], [*slower[:RATES], *later[:WAITS]]),
        ]
    where = f"{setup(folder, SERVERS['pat'])}; other loads: {days(folder, LOADS)}."
    files = [*POLICIES["pat"], *POLICIES["fa3"], *LOADS]
    return Section("Policies on servers", body, where, [command_of(folder, SERVERS["pat"])], files)
