"""The record of a case on a server, as ``bench_server.py`` writes it, and the figures that count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from feather_sglang.compare.server.stats import Stream, spread

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


def steady(streams: Sequence[Stream]) -> dict[str, Any] | None:
    """The time in which all requests run: from the last one's first piece to the first one's last piece.

    None where some request had not begun when another was over, or did not answer.
    """
    if not streams or any(len(stream.events) < 2 for stream in streams):
        return None
    begin = max(stream.span[0] for stream in streams)
    end = min(stream.span[1] for stream in streams)
    if begin >= end:
        return None
    counts = [_tokens_at(stream, end) - _tokens_at(stream, begin) for stream in streams]
    return {
        "seconds": round(end - begin, 4),
        "output_tokens": round(sum(counts), 1),
        "tok_s": round(sum(counts) / (end - begin), 1),
        "tpot_ms": spread(((end - begin) / count for count in counts if count), 1e3),
    }


def _tokens_at(stream: Stream, moment: float) -> float:
    """Output tokens up to a moment, evenly spread between two pieces."""
    times, counts = zip(*stream.events, strict=True)
    return float(np.interp(moment, times, counts))
