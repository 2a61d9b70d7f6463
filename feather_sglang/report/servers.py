"""The record of a case on a server, as ``bench_server.py`` writes it: what counts of it."""

from __future__ import annotations

from typing import Any

CLIENT_BOUND = 0.7  # share of a processor from which on the client, not the server, may set the pace
Record = dict[str, Any]


def tok_s(record: Record) -> float | None:
    """Output tokens a second: of the steady window where the case has one, else over the whole run."""
    return counted(record).get("tok_s")


def incomplete(record: Record) -> bool:
    """Whether a measurement, or some of its requests, did not come to an end."""
    return "error" in record or bool(record["overall"]["failed"] or record["overall"]["unfinished"])


def counted(record: Record) -> dict[str, Any]:
    """The part of a record that its throughput and TPOT come from."""
    return (record.get("steady") if record.get("steady_case") else record.get("overall")) or {}
