"""Times of lone requests on a real server: a few lengths are measured, and those between are interpolated."""

from __future__ import annotations

import time

import numpy as np

from feather_sglang import ending
from feather_sglang.compare.server.cases import Case
from feather_sglang.compare.server.client import drive
from feather_sglang.compare.server.process import Server, ServerFailed
from feather_sglang.compare.server.stats import token_gaps
from feather_sglang.replay.traces import Trace, TraceRequest
from feather_sglang.slo import Timing

LENGTHS = 6  # prompts that are measured, from the shortest to the longest of the trace
OUTPUT_TOKENS = 64
UNSEEN = 2**62  # ids of their blocks begin here, so that none is one of the trace's


class IdleTimes:
    """Timing by prompt length."""

    def __init__(self, lengths: list[int], timings: list[Timing]) -> None:
        self._lengths, self._columns = lengths, list(zip(*timings, strict=True))

    def timing(self, prompt_tokens: int) -> Timing:
        """Of a prompt of that many tokens."""
        return Timing(*(float(np.interp(prompt_tokens, self._lengths, column)) for column in self._columns))


def lone_requests(trace: Trace) -> Trace:
    """Prompts from the shortest to the longest of a trace that share nothing with it or with each other."""
    lengths = [request.input_length for request in trace.requests]
    chosen = sorted({round(length) for length in np.geomspace(min(lengths), max(lengths), LENGTHS)})
    output = min(OUTPUT_TOKENS, max(request.output_length for request in trace.requests))
    made, used = [], 0
    for number, length in enumerate(chosen):
        blocks = -(-length // trace.block_size)
        made.append(TraceRequest(number, 0.0, length, output, tuple(range(UNSEEN + used, UNSEEN + used + blocks))))
        used += blocks
    return Trace("lone requests", trace.block_size, made)


def measure_idle(server: Server, trace: Trace, vocabulary: int, stream_interval: int, limit: float) -> IdleTimes:
    """Send each lone request when the one before has come to its end.

    Raises ``ServerFailed`` where one does not within the limit (s).
    """
    lone, deadline = lone_requests(trace), time.monotonic() + limit
    timings = []
    for request in Case(lone.name, lone).requests(vocabulary, stream_interval):
        driven = ending.run(drive(server.address, [request], deadline - time.monotonic(), alive=server.alive))
        (stream,) = driven.streams
        if not stream.finished:
            raise ServerFailed(f"a lone request of {request.prompt_tokens} tokens failed: {stream.error or 'no time'}")
        timings.append(Timing.of(stream.span[0] - stream.due, token_gaps([stream])))
    return IdleTimes([request.input_length for request in lone.requests], timings)
