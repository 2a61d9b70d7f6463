"""The cases of ``bench_server.py``: those of feather_sglang/compare/server/cases.py, slices of traces, and equal gaps.

- ``trace:NAME,FIRST,COUNT,RATE``: COUNT requests of a trace from its request FIRST on, RATE a second in the mean with
  the gaps of the trace; the file is NAME.jsonl in the folder of traces.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from feather_sglang.compare.server.cases import Case, parse_case
from feather_sglang.replay.traces import Trace, load_trace


class Misfit(RuntimeError):
    """A case that a server cannot run as it is meant."""


class TooManyRequests(Misfit):
    """Of a batch, more than the server runs."""


def bench_case(text: str, seed: int = 0, arrivals: str = "poisson", traces: Path | None = None) -> Case:
    """Make the case of that name.

    Parameters
    ----------
    seed : of prompts and arrivals, where the name has none.
    arrivals : ``poisson``, or ``fixed`` for equal gaps at the same rate.
    traces : folder of the files of traces.

    Raises ``ValueError`` with the reason if there is no such case.
    """
    kind, _, rest = text.partition("@")[0].partition(":")
    if kind == "trace":
        return Case(text, _slice(text, rest, traces))
    case = parse_case(text, seed)
    return replace(case, trace=evenly_spaced(case.trace)) if arrivals == "fixed" and not case.steady else case


def check_fit(case: Case, kv_tokens: int | None, max_running: int | None, drafted: int = 0) -> None:
    """Raise ``Misfit`` if a steady batch could never be complete.

    Parameters
    ----------
    kv_tokens, max_running : of the server; None: not known.
    drafted : KV tokens that drafts take besides those of the case.
    """
    needed = case.kv_tokens + drafted
    if case.steady and kv_tokens is not None and needed > kv_tokens:
        raise Misfit(f"does not fit: needs {needed:,} KV tokens, the server has {kv_tokens:,}")
    if case.steady and max_running is not None and case.batch > max_running:
        raise TooManyRequests(f"does not fit: {case.batch} requests, the server runs {max_running}")


def _slice(text: str, rest: str, traces: Path | None) -> Trace:
    """Requests of a trace's file, by name, place, number and rate."""
    name, *numbers = rest.split(",")
    try:
        first, count, rate = int(numbers[0]), int(numbers[1]), float(numbers[2])
    except (IndexError, ValueError):
        raise ValueError(f"{text}: give NAME,FIRST,COUNT,RATE after ':'") from None
    if traces is None:
        raise ValueError(f"{text}: say where the file {name}.jsonl is: --traces FOLDER")
    part = load_trace(traces / f"{name}.jsonl").part(first, count)
    if first < 0 or len(part.requests) < max(count, 2) or not 0 < rate < math.inf:
        raise ValueError(f"{text}: the trace has no such requests, or the rate is not above 0")
    scaled = part.scaled(rate * part.requests[-1].arrival_s / count)
    return Trace(text, scaled.block_size, scaled.requests)


def evenly_spaced(trace: Trace) -> Trace:
    """Return the trace with its last arrival where it was and equal gaps before it."""
    gap = trace.requests[-1].arrival_s / max(1, len(trace.requests) - 1)
    requests = [request._replace(arrival_s=round(i * gap, 6)) for i, request in enumerate(trace.requests)]
    return Trace(trace.name, trace.block_size, requests)
