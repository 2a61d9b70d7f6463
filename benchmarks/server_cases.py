"""The cases of ``bench_server.py``: those of feather_sglang/compare/server/cases.py, slices of traces, and equal gaps.

- ``W1`` .. ``W7``: the project's workloads, requests arriving one by one; ``W5:1200`` takes the first 1,200 requests.
- ``trace:NAME,FIRST,COUNT,RATE``: COUNT requests of a trace from its request FIRST on, RATE a second in the mean with
  the gaps of the trace; the file is NAME.jsonl in the folder of traces.

``W2@7`` is another draw of prompts and arrivals, that of seed 7, and so is ``open:...@7``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from feather_sglang.compare.server.cases import Case, parse_case, whole_numbers
from feather_sglang.replay.traces import Trace, load_trace
from feather_sglang.replay.workloads import WORKLOADS


class Misfit(RuntimeError):
    """A case that a server cannot run as it is meant."""


class TooManyRequests(Misfit):
    """A batch has more requests than the server runs at once."""


def bench_case(text: str, seed: int = 0, arrivals: str = "poisson", traces: Path | None = None) -> Case:
    """Make the case of that name.

    Parameters
    ----------
    seed : of prompts and arrivals, where the name has none.
    arrivals : ``poisson``, or ``fixed`` for equal gaps at the same rate.
    traces : folder of the files of traces.

    Raises ``ValueError`` with the reason if there is no such case.
    """
    name, at, draw = text.partition("@")
    kind, colon, rest = name.partition(":")
    if kind == "trace":
        return Case(text, _slice(text, rest, traces))
    if at:
        if kind == "decode" or not draw.isdecimal():
            raise ValueError(f"{text}: give a whole number after '@', and none to a decode case, which draws nothing")
        seed = int(draw)
    if kind in WORKLOADS:
        trace = WORKLOADS[kind](seed=seed)
        case = Case(text, trace.head(whole_numbers(text, rest, 1)[0]) if colon else trace)
    elif kind in ("open", "decode"):
        case = replace(parse_case(name, seed), name=text)
    else:
        raise ValueError(f"{text}: no such case; {', '.join(WORKLOADS)}, trace:..., open:... or decode:...")
    if not case.trace.requests:
        raise ValueError(f"{text}: give at least one request")
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
