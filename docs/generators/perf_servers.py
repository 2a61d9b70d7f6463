"""Attention backends and policies on real servers: the page of servers."""

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
    prefixes,
    server_runs,
)
from perf_text import Page, Section, caption, command, number, table, term
from server_names import COMMON_FLAGS, words_of_start

from feather_sglang.compare.server.config import NO_PREFILL_GRAPHS
from feather_sglang.replay.workloads import WORKLOADS

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
CASES = 8  # a command with more is cut


def setup(folder: Path, file: str) -> str:
    """Hardware and versions of a server run."""
    content = load(folder, file)
    gpu, sglang = get(content, file, "machine", "gpu"), get(content, file, "machine", "versions", "sglang")
    return f"{gpu}, SGLang {sglang}, {day(content, file)}"


def command_of(folder: Path, file: str, most: int = 1) -> str:
    """The command of a server run, the first where there were several, without flags that are the default."""
    typed = get(load(folder, file), file, "command").partition("; ")[0]
    return command(typed.replace(f" --common '{COMMON_FLAGS}'", ""), most)


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
    """A sentence on what the servers side by side do not have in common, where there is something."""
    without = [f"`{name}`" for name, file in SERVERS.items() if not prefill_graphs(folder, file)]
    return f"The servers of {' and '.join(without)} had no CUDA graphs for prefill. " if without else ""


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


def to_best(runs: dict[str, Run]) -> tuple[float, str]:
    """pat's tokens/s to the best other backend's, and which one that is."""
    best = max((run for name, run in runs.items() if name != "pat"), key=lambda run: run.tok_s)
    return runs["pat"].tok_s / best.tok_s, best.attention


def gain_rows(found: dict[str, dict[str, Run]]) -> list[list[str]]:
    """pat beside the best other backend."""
    rows = []
    for case, runs in sorted(found.items(), key=lambda item: by_size(item[0])):
        ratio, best = to_best(runs)
        rows.append(
            [shown(case), number(runs["pat"].tok_s), f"{number(runs[best].tok_s)} ({best})", f"**{ratio:.2f}**"]
        )
    return rows


def backend_rows(found: dict[str, dict[str, Run]]) -> list[list[str]]:
    """Tokens a second of each backend."""
    return [
        [shown(case), *(number(runs[name].tok_s) if name in runs else "-" for name in BACKENDS)]
        for case, runs in sorted(found.items(), key=lambda item: by_size(item[0]))
    ]


def by_size(case: str) -> tuple[str, list[int]]:
    """Workloads by name, steady batches the largest first."""
    kind, _, rest = case.partition(":")
    batch, *more = map(int, rest.split(",")) if kind == "decode" else (0,)
    return kind, [-batch, *more]


def shown(case: str) -> str:
    """A workload's name with what it is."""
    if case.startswith("decode:"):
        batch, groups, tokens, *_ = map(int, case.removeprefix("decode:").split(","))
        return f"{batch} {'requests' if batch > 1 else 'request'}, {prefixes(groups, tokens)}"
    if case.startswith("open:"):
        draw = case.partition("@")[2]
        return described(case) + (f", draw {draw}" if draw else "")
    name, _, first = case.partition(":")
    return f"{name}: {described(case)}" + (f", the first {int(first):,} requests" if first else "")


def behind_a_backend(folder: Path) -> dict[str, dict[str, Run]]:
    """The workloads in which another backend is faster by more than 1%."""
    found = {**by_backend(folder, list(SERVERS.values())), **by_backend(folder, DECODE), **by_backend(folder, [LONG])}
    return {case: runs for case, runs in found.items() if to_best(runs)[0] < SLOWER}


GAIN = ["workload", "`pat`, tokens/s", "fastest other backend, tokens/s", "`pat` over it"]


def backends(folder: Path) -> list[Section]:
    """Decode backends under fcfs."""
    steady = by_backend(folder, DECODE)
    some = {case: runs for case, runs in steady.items()
            if len(runs) == len(BACKENDS) and case.startswith(("decode:500", "decode:32"))}  # fmt: skip
    workloads, two = by_backend(folder, list(SERVERS.values())), by_backend(folder, [TWO_GPUS])
    lost = behind_a_backend(folder)
    ratios = [to_best(runs)[0] for runs in steady.values()]
    where = setup(folder, SERVERS["pat"])
    older = f"{setup(folder, DECODE[0]).rpartition(', ')[0]}, {days(folder, DECODE)}"
    first = Section(
        "Decode backends under load",
        [
            "Output tokens/s under SGLang's policy `fcfs`, on servers that differ in the decode attention backend "
            f"alone. {unlike(folder)}The first table is of one GPU, the second of two GPUs with tensor parallelism.",
            table(GAIN, gain_rows(workloads)),
            caption(where, "workloads", "group"),
            table(GAIN, gain_rows(two)),
            caption(f"Two GPUs: {setup(folder, TWO_GPUS)}", "workloads", "group"),
            "Each backend of the servers with one GPU:",
            table(["workload", *(f"`{name}`" for name in BACKENDS if name != "triton")],
                  [row[:-1] for row in backend_rows(workloads)]),
            caption(where, "workloads", "group"),
        ],
        [*SERVERS.values(), TWO_GPUS],
        [command_of(folder, file, CASES) for file in (*SERVERS.values(), TWO_GPUS)],
    )  # fmt: skip
    second = Section(
        "Decode backends on steady batches",
        [
            f"A batch whose requests all decode at once. {len(ratios)} batches ran on `pat` and on at least one other "
            f"backend. Over these, `pat` has {geometric_mean(ratios):.2f}x the throughput of the fastest other backend "
            f"(geometric mean; {min(ratios):.2f}x to {max(ratios):.2f}x). "
            f"[The lab](../lab/backends.md#how-much-faster-are-decode-steps-alone) has all of them.",
            "![Decode throughput by batch](backends.svg)",
            caption(older, "group"),
            "Those of 500 and of 32 requests that ran on all four backends, in output tokens/s:",
            table(GAIN, gain_rows(some)),
            caption(older, "group"),
            table(["batch", *(f"`{name}`" for name in BACKENDS)], backend_rows(some)),
            caption(older, "group"),
            "In the command below, `...` stands for the other batches, each written "
            "`decode:REQUESTS,GROUPS,PREFIX_TOKENS,OUTPUT_TOKENS`; `decode:500,0,1000,64` shares nothing.",
        ],
        DECODE,
        [command_of(folder, DECODE[0])],
    )
    third = Section(
        "Where another backend is faster",
        [
            "All workloads and steady batches in which another backend is faster by more than 1%.",
            table(GAIN, gain_rows(lost)),
            caption(f"{older}; of one request: {setup(folder, LONG)}", "group"),
        ],
        [*DECODE, LONG],
    )
    return [first, second, *([third] if lost else [])]


def titled(case: str) -> str:
    """A workload in words where it is one of W1 to W7 or drawn like them, else its name."""
    known = case.partition(":")[0].partition("@")[0] in {"open", *WORKLOADS}
    return shown(case) if known else f"`{case}`"


class Policies(NamedTuple):
    """The measurements of policies on one backend.

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


def policy_tables(one: Policies) -> list[tuple[str, str, str]]:
    """(which workloads, tokens a second, time to the first token) of one backend, a column a workload."""
    tables = []
    for text, full in (("whose prefixes fill or exceed the KV pool", True), ("whose prefixes fit", False)):
        cases = [case for case, runs in one.runs.items() if evicts(case, runs["fcfs"].kv_tokens) is full]
        if not cases:
            continue
        rates, waits = [], []
        for name in one.names:
            runs = [one.runs[case].get(name) for case in cases]
            shown_as = "`feather`" if name == one.names[-1] else f"`{name}`"
            rates.append([shown_as, *(number(run.tok_s) if run else "-" for run in runs)])
            waits.append([shown_as, *(f"{run.ttft_mean:.2f} / {run.ttft_p99:.1f}" if run else "-" for run in runs)])
        heads = ["policy", *cases]
        tables.append((text, table(heads, rates), table(heads, waits)))
    return tables


def to_stock(one: Policies, case: str) -> tuple[float, float, str]:
    """feather's tokens/s to fcfs's, to those of the best of SGLang's policies, and which one that is."""
    runs = one.runs[case]
    ours = runs[one.names[-1]].tok_s
    best = max((name for name in one.names[:-1] if name in runs), key=lambda name: runs[name].tok_s)
    return ours / runs["fcfs"].tok_s, ours / runs[best].tok_s, best


def policy_gains(measured: Sequence[Policies]) -> list[list[str]]:
    """feather beside fcfs and beside the best of SGLang's policies."""
    rows = []
    for one in measured:
        for case, runs in one.runs.items():
            of_fcfs, of_best, best = to_stock(one, case)
            place = f"{case}, `{one.attention}`"
            ours = number(runs[one.names[-1]].tok_s)
            rows.append([place, ours, f"**{of_fcfs:.2f}**", f"{of_best:.2f} (`{best}`)"])
    return rows


def behind(measured: Sequence[Policies]) -> tuple[list[list[str]], list[list[str]]]:
    """Where the default is behind the best of SGLang's policies, in tokens a second and in TTFT, the worst first."""
    rates, waits = [], []
    for one in measured:
        for case, runs in one.runs.items():
            ours, stock = runs[one.names[-1]], [runs[name] for name in one.names[:-1] if name in runs]
            place = f"{one.model}{shown(case)}, `{one.attention}`"
            best = max(run.tok_s for run in stock)
            if ours.tok_s < SLOWER * best:
                rates.append((ours.tok_s / best, [place, "output tokens/s", number(ours.tok_s), number(best)]))
            for what, name in (("TTFT mean, s", "ttft_mean"), ("TTFT p99, s", "ttft_p99")):
                least = min(run.figure(name) for run in stock)
                if ours.figure(name) > LATER * least:
                    waits.append((ours.figure(name) / least,
                                  [place, what, f"{ours.figure(name):.3f}", f"{least:.3f}"]))  # fmt: skip
    rates.sort(key=lambda pair: pair[0])
    waits.sort(key=lambda pair: -pair[0])
    first, second = ([[*cells, f"{ratio:.2f}"] for ratio, cells in found] for found in (rates, waits))
    return first, second


def headline_policies(folder: Path) -> list[Policies]:
    """The workloads on both backends."""
    return [policies(folder, attention, POLICIES[attention]) for attention in ("pat", "fa3")]


def further_policies(folder: Path) -> list[Policies]:
    """Other loads, and another model."""
    return [policies(folder, name, [file]) for name, file in zip(("pat", "fa3", "fa3"), LOADS, strict=True)]


def policy_sections(folder: Path) -> list[Section]:
    """Policies on both backends, the workloads that evict first."""
    main, other = headline_policies(folder), further_policies(folder)
    where = setup(folder, SERVERS["pat"])
    files = [*POLICIES["pat"], *POLICIES["fa3"]]
    gains = Section(
        "Policies: `feather` beside SGLang's",
        [
            "Output tokens/s of `feather`, and their ratios to those of SGLang's `fcfs` and of the fastest of SGLang's "
            "policies on the same backend. The prefixes of W2 and W6 fill the KV pool or exceed it.",
            table(
                ["workload, backend", "`feather`, tokens/s", "over `fcfs`", "over SGLang's fastest policy"],
                policy_gains(main),
            ),
            caption(where, "workloads"),
            "![Throughput of each policy to fcfs](policies.svg)",
            caption(where, "workloads"),
        ],
        files,
        [command_of(folder, file, CASES) for file in files],
    )
    each = []
    for one in main:
        body = []
        for which, rates, waits in policy_tables(one):
            body += [
                f"Output tokens/s of the workloads {which}:",
                rates,
                caption(where, "workloads"),
                f"{term('ttft', 'Time to the first token')} of the same, mean / p99, in seconds:",
                waits,
                caption(where, "workloads", "ttft"),
            ]
        each.append(Section(f"Every policy on the backend `{one.attention}`", body))
    slower, later = behind([*main, *other])
    lost = Section(
        "Where a policy of SGLang's is better",
        [
            f"A load is a workload on a backend. Of the {sum(len(one.runs) for one in main)} loads above and "
            f"{sum(len(one.runs) for one in other)} others, the fastest of SGLang's policies has more throughput by "
            f"over 1% in {len(slower)}. Each load has a mean and a p99 of the time to the first token, and in "
            f"{len(later)} of these figures the best of SGLang's policies is shorter by over 10%. The worst:",
            table(["workload, backend", "figure", "`feather`", "SGLang's best", "ratio"],
                  [*slower[:RATES], *later[:WAITS]]),
            "The times to the first token are of loads on which requests hardly queue. There `feather` "
            "[delays](../design/admission.md#the-gate) prefill steps by up to 0.1 s so that more requests share one, "
            "which makes the whole answers come sooner ([the lab](../lab/policies_on_servers.md#what-does-pacing-bring-"
            "and-what-does-it-cost)). Why the p99 of one run is several times these 0.1 s is not known; it is that of "
            "the three slowest of 300 requests.",
            caption(f"{where}; other loads: NVIDIA H200, SGLang {_release(folder, LOADS[0])}, {days(folder, LOADS)}",
                    "group", "ttft"),
        ],
        [*files, *LOADS],
    )  # fmt: skip
    return [gains, *each, *([lost] if slower or later else [])]


def _release(folder: Path, file: str) -> str:
    return str(get(load(folder, file), file, "machine", "versions", "sglang"))


def page(folder: Path) -> Page:
    """Backends and policies on servers."""
    tokens = [server_runs(folder, file)[0].kv_tokens for file in (SERVERS["pat"], DECODE[0])]
    return Page(
        "What do servers gain?",
        f"Servers of Qwen3-8B's shapes with random weights. The KV pool has {tokens[0]:,} tokens under load and "
        f"{tokens[1]:,} for steady batches. Each figure is of a single run unless a table says otherwise.",
        [*backends(folder), *policy_sections(folder)],
    )
