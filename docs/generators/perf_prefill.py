"""The page on packed prefill, beside SGLang's prefill kernels."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from perf_results import ResultError, day, get, load
from perf_servers import setup, titled
from perf_text import Page, Section, caption, command, table, term

PREFILL, SERVERS, TRACE = "prefill_h200.json", "prefill_server_h200.json", "prefill_conversation_h200.json"
OURS, PEERS = "pat", ("fa3", "flashinfer")


STEPS = {  # what the benchmark's cases are
    "short": "short prompts, nothing shared",
    "groups-5x5k": "5 groups \u00d7 5,000 tokens",
    "groups-20x10k": "20 groups \u00d7 10,000 tokens",
    "few-shot": "prompts behind shared examples",
    "samples-1": "samples of one prompt, 1 new token each",
    "samples-16": "samples of one prompt, 16 new tokens each",
    "long": "one long prompt",
    "chunk": "the second half of a longer prompt",
    "traces": "prompts of a real trace",
}


CONVERSATION = "70 requests of Mooncake's conversation trace"


def steps(folder: Path) -> tuple[str, str]:
    """What each step is, and its attention in one layer."""
    records = get(load(folder, PREFILL), PREFILL, "records")
    sizes = [
        [STEPS.get(name, name), *(f"{get(record, PREFILL, key):,}" for key in ("requests", "rows"))]
        for record in records
        for name in (get(record, PREFILL, "case"),)
    ]
    return (
        table(["prefill step", "requests", "tokens computed"], sizes),
        table(
            ["prefill step", *(f"`{name}`, µs" for name in (OURS, *PEERS)), "cascade, µs", "`pat` over the better",
             "over the floor"],
            [_step(record) for record in records],
        ),
    )  # fmt: skip


def _step(record: dict[str, Any]) -> list[str]:
    ours, *peers = (get(record, PREFILL, "systems", name, "warm_us") for name in (OURS, *PEERS))
    cascade = get(record, PREFILL, "systems").get("cascade", {}).get("warm_us")  # two calls, as nobody serves them
    name = get(record, PREFILL, "case")
    return [
        STEPS.get(name, name),
        *(f"{time:,.0f}" for time in (ours, *peers)),
        f"{cascade:,.0f}" if cascade else "-",
        f"**{ours / min(peers):.2f}**",
        f"{ours / get(record, PREFILL, 'floor_us'):.2f}",
    ]


def on_servers(folder: Path) -> dict[str, float]:
    """Output tokens/s with packed prefill to those without, by workload, means over rounds."""
    rates: dict[str, dict[str, list[float]]] = {}
    for record in get(load(folder, SERVERS), SERVERS, "records"):
        rate = get(record, SERVERS, "overall", "tok_s")
        rates.setdefault(record["case"], {}).setdefault(record["server"], []).append(rate)
    for run in get(load(folder, TRACE), TRACE, "runs"):
        rates.setdefault("conversation", {}).setdefault(run["server"], []).append(get(run, TRACE, "output_tok_s"))
    found = {case: mean(both["on"]) / mean(both["off"]) for case, both in rates.items() if both.keys() >= {"on", "off"}}
    if not found:
        raise ResultError(f"{SERVERS}: no workload both on and off")
    return found


def page(folder: Path) -> Page:
    """What packed prefill takes, and what it brings on servers."""
    content = load(folder, PREFILL)
    where = f"{get(content, PREFILL, 'machine', 'gpu')}, {day(content, PREFILL)}"
    sizes, times = steps(folder)
    layer = Section(
        "One layer",
        [
            "The prefill steps that were measured:",
            sizes,
            f"The time of one layer's attention, over the better of FlashAttention-3 and FlashInfer, and over the "
            f"{term('floor')}. The cascade is two calls of FlashAttention-3, one for the shared prefix and one for the "
            "rest. No backend of SGLang makes them, so it does not count in *the better*; it is shown where prompts "
            "share a prefix.",
            times,
            caption(where, "floor", "chunk", "group"),
        ],
        [PREFILL],
        [command(get(content, PREFILL, "command"))],
    )
    ratios = on_servers(folder)
    servers = Section(
        "On servers",
        [
            f"Output tokens/s with packed prefill over the same without it: {min(ratios.values()):.2f} to "
            f"{max(ratios.values()):.2f}.",
            table(["workload", "tokens/s with packed prefill over those without"],
                  [[CONVERSATION if case == "conversation" else titled(case), f"{ratio:.2f}"]
                   for case, ratio in ratios.items()]),
            caption(setup(folder, SERVERS), "workloads"),
        ],
        [SERVERS, TRACE],
    )  # fmt: skip
    return Page(
        "What does packed prefill bring?",
        "With `--feather-pat-prefill`, prefill steps read shared KV once, as decode steps do with `pat`.",
        [layer, servers],
    )
