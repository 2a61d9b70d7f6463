"""Speculative decoding: what verifying drafts takes, and a server that does; a section of the performance page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perf_results import ResultError, get, load
from perf_servers import setup
from perf_text import Section, command, number, table

VERIFY, SERVER = "verify_h200.json", "speculation_h200.json"
OURS, PEERS = "pat", ("fa3", "flashinfer")
CASES = {"W1's batch": "decode:500,5,5000,200", "unshared": "decode:256,0,500,300"}


def steps(folder: Path) -> str:
    """A row for each batch of drafts: the times of a verify step's attention in one layer."""
    return table(
        [
            "requests",
            "groups",
            "drafts",
            "tokens",
            f"`{OURS}`, us",
            *(f"{peer}, us" for peer in PEERS),
            "to best",
            "/floor",
        ],
        [_step(record) for record in get(load(folder, VERIFY), VERIFY, "records")],
    )


def _step(record: dict[str, Any]) -> list[str]:
    ours, *peers = (get(record, VERIFY, "systems", name, "warm_us") for name in (OURS, *PEERS))
    return [
        *(f"{get(record, VERIFY, key):,}" for key in ("requests", "groups", "drafts", "tokens")),
        *(f"{time:.0f}" for time in (ours, *peers)),
        f"**{ours / min(peers):.2f}**",
        f"{ours / get(record, VERIFY, 'floor_us'):.2f}",
    ]


def server(folder: Path) -> str:
    """Tokens a second of servers with drafts, pat to fa3: a batch that shares prefixes, and one that does not."""
    rows = {(row["case"], row["backend"]): row for row in get(load(folder, SERVER), SERVER, "rows")}
    found = []
    for name, case in CASES.items():
        if missing := [backend for backend in (OURS, "fa3") if (case, backend) not in rows]:
            raise ResultError(f"{SERVER}: no {case} of {' and '.join(missing)}")
        ours, other = (get(rows[case, backend], SERVER, "tok_s") for backend in (OURS, "fa3"))
        found.append(f"{name} {number(ours)}, **{ours / other:.2f}**")
    drafter, accepted = (get(rows[CASES["W1's batch"], OURS], SERVER, key) for key in ("drafter", "accepted"))
    return f"{drafter.upper()}, {accepted:.1f} tokens a step simulated, tokens/s and to fa3: {'; '.join(found)}."


def section(folder: Path) -> Section:
    """What speculation takes under pat."""
    return Section(
        "Speculation",
        ["One layer's attention, drafts verified:", steps(folder), server(folder)],
        f"{setup(folder, SERVER)}.",
        [command(get(load(folder, VERIFY), VERIFY, "command"))],
        [VERIFY, SERVER],
    )
