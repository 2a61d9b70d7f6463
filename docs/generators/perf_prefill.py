"""Packed prefill beside SGLang's prefill kernels; a section of the performance page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perf_results import ResultError, day, get, load
from perf_text import Section, command, table

PREFILL, SERVERS = "prefill_h200.json", "prefill_server_h200.json"
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


def on_servers(folder: Path) -> list[float]:
    """Output tokens/s under auto to those without, by workload."""
    rates: dict[str, dict[str, float]] = {}
    for record in get(load(folder, SERVERS), SERVERS, "records"):
        rates.setdefault(record["case"], {})[record["server"]] = get(record, SERVERS, "overall", "tok_s")
    found = [both["auto"] / both["off"] for both in rates.values() if both.keys() >= {"auto", "off"}]
    if not found:
        raise ResultError(f"{SERVERS}: no workload under both auto and off")
    return found


def _verdict(ratios: list[float]) -> str:
    gain = "no sure gain" if min(ratios) < 1 else "a gain"
    return f"On servers, `auto`: tokens/s {min(ratios):.2f}-{max(ratios):.2f}x, {gain}."


def section(folder: Path) -> Section:
    """What ``--feather-pat-prefill`` takes, and where auto has it."""
    content = load(folder, PREFILL)
    return Section(
        "Prefill",
        ["One layer, new tokens packed (`--feather-pat-prefill`; `auto`: below 0.91):",
         steps(folder), _verdict(on_servers(folder))],
        f"{get(content, PREFILL, 'machine', 'gpu')}, {day(content, PREFILL)}.",
        [command(get(content, PREFILL, "command"))],
        [PREFILL, SERVERS],
    )  # fmt: skip
