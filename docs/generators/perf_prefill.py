"""Packed prefill beside SGLang's prefill kernels; a section of the performance page."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from perf_results import ResultError, day, get, load
from perf_text import Section, command, table

PREFILL, SERVERS, TRACE = "prefill_h200.json", "prefill_server_h200.json", "prefill_conversation_h200.json"
OURS, PEERS = "pat", ("fa3", "flashinfer")


def steps(folder: Path) -> str:
    """A row for each step: its attention in one layer."""
    return table(
        ["step", "requests", "tokens", *(f"{name},us" for name in (OURS, *PEERS, "cascade")), "to&nbsp;best", "/floor"],
        [_step(record) for record in get(load(folder, PREFILL), PREFILL, "records")],
    )


def _step(record: dict[str, Any]) -> list[str]:
    ours, *peers = (get(record, PREFILL, "systems", name, "warm_us") for name in (OURS, *PEERS))
    cascade = get(record, PREFILL, "systems").get("cascade", {}).get("warm_us")  # two calls, as nobody serves them
    return [
        get(record, PREFILL, "case"),
        *(f"{get(record, PREFILL, key):,}" for key in ("requests", "rows")),
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


def _verdict(ratios: dict[str, float]) -> str:
    gain = "no gain" if min(ratios.values()) < 1 else "a gain"
    return f"On servers, on/off: tokens/s {min(ratios.values()):.2f}-{max(ratios.values()):.2f}x, {gain}."


def section(folder: Path) -> Section:
    """What ``--feather-pat-prefill`` takes, and where auto has it."""
    content = load(folder, PREFILL)
    return Section(
        "Prefill",
        ["One layer, packed (`--feather-pat-prefill`):",
         steps(folder), _verdict(on_servers(folder))],
        f"{get(content, PREFILL, 'machine', 'gpu')}, {day(content, PREFILL)}.",
        [command(get(content, PREFILL, "command"))],
        [PREFILL, SERVERS, TRACE],
    )  # fmt: skip
