"""The page on speculative decoding: times of verify steps, and servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perf_results import ResultError, day, get, load
from perf_servers import setup
from perf_text import Page, Section, caption, command, number, table, term

VERIFY, SERVER = "verify_h200.json", "speculation_h200.json"
OURS, PEERS = "pat", ("fa3", "flashinfer")
CASES = {"500 requests, 5 groups \u00d7 5,000 tokens": "decode:500,5,5000,200",
         "256 requests, nothing shared, 500 tokens a prompt": "decode:256,0,500,300"}  # fmt: skip


def steps(folder: Path) -> str:
    """A row for each batch of drafts: the times of a verify step's attention in one layer."""
    heads = [
        "batch",
        f"`{OURS}`, µs",
        *(f"`{peer}`, µs" for peer in PEERS),
        f"`{OURS}` over the better",
        "over the floor",
    ]
    return table(heads, [_step(record) for record in get(load(folder, VERIFY), VERIFY, "records")])


def _step(record: dict[str, Any]) -> list[str]:
    ours, *peers = (get(record, VERIFY, "systems", name, "warm_us") for name in (OURS, *PEERS))
    requests, groups, drafts, tokens = (get(record, VERIFY, key) for key in ("requests", "groups", "drafts", "tokens"))
    shared = f"{groups} groups" if groups < requests else "nothing shared"
    return [
        f"{requests} requests, {shared}, {tokens:,} tokens each, {drafts} drafts",
        *(f"{time:.0f}" for time in (ours, *peers)),
        f"**{ours / min(peers):.2f}**",
        f"{ours / get(record, VERIFY, 'floor_us'):.2f}",
    ]


def server(folder: Path) -> list[list[str]]:
    """Tokens a second of servers with drafts: a batch that shares prefixes, and one that does not."""
    rows = _rows(folder)
    found = []
    for name, case in CASES.items():
        if missing := [backend for backend in (OURS, "fa3") if (case, backend) not in rows]:
            raise ResultError(f"{SERVER}: no {case} of {' and '.join(missing)}")
        ours, other = (get(rows[case, backend], SERVER, "tok_s") for backend in (OURS, "fa3"))
        found.append([name, number(ours), number(other), f"**{ours / other:.2f}**"])
    return found


def _rows(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["case"], row["backend"]): row for row in get(load(folder, SERVER), SERVER, "rows")}


def page(folder: Path) -> Page:
    """What speculation takes under pat."""
    verify = load(folder, VERIFY)
    on_server = server(folder)
    row = _rows(folder)[next(iter(CASES.values())), OURS]
    drafter, accepted = (get(row, SERVER, key) for key in ("drafter", "accepted"))
    layer = Section(
        "One layer",
        [
            f"The attention of a step that verifies drafts, over the better of FlashAttention-3 and FlashInfer, and "
            f"over the {term('floor')}; below 1, `{OURS}` is faster.",
            steps(folder),
            caption(f"{get(verify, VERIFY, 'machine', 'gpu')}, {day(verify, VERIFY)}", "floor", "group"),
        ],
        [VERIFY],
        [command(get(verify, VERIFY, "command"))],
    )
    servers = Section(
        "On servers",
        [
            f"Output tokens/s with {drafter.upper()}, where {accepted:.1f} tokens a step are accepted (simulated, as "
            "the weights are random).",
            table(["batch", f"`{OURS}`, tokens/s", "`fa3`, tokens/s", f"`{OURS}` over `fa3`"], on_server),
            caption(setup(folder, SERVER), "group"),
        ],
        [SERVER],
    )
    return Page(
        "What does `pat` bring with speculative decoding?",
        "A draft model proposes tokens, and one step of the served model verifies all of them.",
        [layer, servers],
    )
