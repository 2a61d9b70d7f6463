"""One run of a case on a server that is up: what client, server and GPU saw of it."""

from __future__ import annotations

import time

from feather_sglang import ending
from feather_sglang.compare.server.cases import Case, Request
from feather_sglang.compare.server.client import Driven, call_all, drive
from feather_sglang.compare.server.gpu_meter import GpuMeter
from feather_sglang.compare.server.process import Server
from feather_sglang.compare.server.result import Admission, RunResult, summarize
from feather_sglang.compare.server.watch import Watch


def measure(
    server: Server,
    name: str,
    case: Case,
    requests: list[Request],
    prefixes: list[Request],
    limit: float,
    admission: bool = True,
) -> tuple[RunResult, Driven]:
    """Put the prefixes into the cache, then send the requests; the figures, and what they are of.

    Parameters
    ----------
    name : of the configuration.
    limit : seconds after which what is left is given up.
    admission : whether the server counts what admission takes; it does where its policy can be switched.
    """
    begun = time.monotonic()
    if prefixes:
        ending.run(call_all(server.address, prefixes, limit))
    before = server.counters() if admission else None
    with Watch(server) as watch, GpuMeter() as gpu:
        rest = limit - (time.monotonic() - begun)
        driven = ending.run(drive(server.address, requests, rest, case.steady, server.alive))
    server.check()
    result = summarize(
        name,
        driven,
        watch.lines,
        watch.scheduler_seconds,
        watch.retractions,
        Admission.between(before, server.counters()) if admission else None,
        gpu.activity,
        gpu.clocks,
    )
    result.fell_back = watch.fell_back
    return result, driven
