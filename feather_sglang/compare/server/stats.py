"""Figures of a client's streams: throughput, latencies, and the window in which all requests run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass
class Stream:
    """One request as its client saw it; times in seconds on one clock.

    Attributes
    ----------
    due, sent : when it should be sent, and when it was; for a held server both are the moment of its release. A further
        turn of a conversation is never due where the answer before it did not come.
    answer : the output tokens.
    events : time of each piece and the number of output tokens up to it.
    """

    due: float
    prompt_tokens: int
    sent: float | None = None
    events: list[tuple[float, int]] = field(default_factory=list)
    cached_tokens: int = 0
    finished: bool = False
    error: str | None = None
    answer: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Output tokens that arrived."""
        return self.events[-1][1] if self.events else 0

    @property
    def span(self) -> tuple[float, float]:
        """Times of the first and the last piece; there must be one."""
        return self.events[0][0], self.events[-1][0]

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first piece; None where there was no second one."""
        tokens = self.tokens - self.events[0][1] if self.events else 0
        return (self.span[1] - self.span[0]) / tokens if tokens else None


def spread(values: Iterable[float], scale: float = 1.0) -> dict[str, float] | None:
    """Mean, median and 99th percentile, times `scale`; None of nothing."""
    data = np.array(list(values), dtype=float) * scale
    if not len(data):
        return None
    p50, p99 = np.percentile(data, [50, 99])
    return {"mean": round(float(data.mean()), 4), "p50": round(float(p50), 4), "p99": round(float(p99), 4)}


def token_gaps(streams: Iterable[Stream]) -> np.ndarray:
    """Seconds between the tokens of each request; those of one piece share the time since the piece before it."""
    gaps, counts = [], []
    for stream in streams:
        for (before, fewer), (now, more) in pairwise(stream.events):
            if more > fewer:
                gaps.append((now - before) / (more - fewer))
                counts.append(more - fewer)
    return np.repeat(gaps, counts) if counts else np.empty(0)


def longest_gaps(streams: Iterable[Stream]) -> list[float]:
    """Seconds of each request's longest time between two pieces; nothing of requests with one piece."""
    return [
        max(now - before for (before, _), (now, _) in pairwise(stream.events))
        for stream in streams
        if len(stream.events) > 1
    ]


def peak_running(streams: Iterable[Stream]) -> int:
    """The most requests that were between their first and their last piece at one time."""
    spans = [stream.span for stream in streams if stream.events]
    starts, ends = (np.sort([span[side] for span in spans]) for side in (0, 1))
    over = np.searchsorted(ends, starts)  # at equal times a start comes before an end
    return int(max(np.arange(1, len(spans) + 1) - over, default=0))


def overall(streams: Sequence[Stream], end: float) -> dict[str, Any]:
    """All that was received up to `end`; throughput is over the time from the first request sent to the last piece.

    Latencies are those of finished requests and count from the moment a request was due, so a client that lags does not
    make a server look fast. Where requests are still open, throughput is over the time up to `end`.
    """
    done = [stream for stream in streams if stream.finished]
    failed = [stream for stream in streams if stream.error is not None]
    answered = [stream for stream in streams if stream.events]
    unfinished = len(streams) - len(done) - len(failed)
    begin = min((stream.sent for stream in streams if stream.sent is not None), default=end)
    last = end if unfinished else max((stream.span[1] for stream in answered), default=end)
    tokens = sum(stream.tokens for stream in streams)
    prompts = sum(stream.prompt_tokens for stream in answered)
    lateness = [stream.sent - stream.due for stream in streams if stream.sent is not None]
    return {
        "requests": len(streams), "finished": len(done), "failed": len(failed), "unfinished": unfinished,
        "output_tokens": tokens, "seconds": round(last - begin, 3),
        "tok_s": round(tokens / (last - begin), 1) if last > begin else None,
        "ttft_s": spread(stream.span[0] - stream.due for stream in done),
        "tpot_ms": spread((tpot for stream in done if (tpot := stream.tpot) is not None), 1e3),
        "tbt_ms": spread(token_gaps(streams), 1e3),
        "longest_gap_ms": spread(longest_gaps(streams), 1e3),
        "e2e_s": spread(stream.span[1] - stream.due for stream in done),
        "cache_hit": round(sum(stream.cached_tokens for stream in answered) / prompts, 4) if prompts else None,
        "peak_running": peak_running(streams),
        "late_ms": spread(lateness, 1e3),
        "errors": sorted({stream.error for stream in failed if stream.error})[:5],
    }  # fmt: skip
