"""One run of a case on a server: measurements of client, server and GPU, and the figures of the report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import mean
from typing import Any, NamedTuple

from feather_sglang import ending
from feather_sglang.compare.server.cases import Case, Request
from feather_sglang.compare.server.client import Driven, call_all, drive
from feather_sglang.compare.server.gpu_meter import GpuMeter
from feather_sglang.compare.server.idle import IdleTimes
from feather_sglang.compare.server.process import Server
from feather_sglang.compare.server.stats import overall, token_gaps
from feather_sglang.compare.server.watch import Line, Watch
from feather_sglang.report.summary import RunSummary
from feather_sglang.slo import SLO, Timing, judge

CLIENT_BOUND = 0.7  # share of a processor from which on the client, not the server, may set the pace
FEW_STEPS = 20  # lines about decode batches below which their means are coarse


class Step(NamedTuple):
    """The decode batch at one moment: seconds from the beginning, rows, seconds since the step before, KV use."""

    at: float
    rows: int
    seconds: float
    kv_use: float | None


class Admission(NamedTuple):
    """The scheduler's counters over a run: admission rounds, their processor time, and decisions to stop."""

    rounds: int
    seconds: float
    stops: int

    @classmethod
    def between(cls, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Admission | None:
        """From two readings of ``Server.counters``; None where there was none."""
        if before is None or after is None:
            return None
        return cls(*(after[name] - before[name] for name in ("rounds", "admission_seconds", "stops")))


@dataclass
class RunResult:
    """One run of a case on a server, and its results.

    Attributes
    ----------
    name, case, round : the server's configuration, what was sent, and which time it was.
    server : what is noted of the server: its log, and how it was started or switched.
    error : why the run has no figures, in one line.
    summary : None where no request finished.
    counted : what `stats.overall` counts.
    latencies : end-to-end seconds of the finished requests.
    timings : of the finished requests, with the tokens of their prompts.
    client_cpu : share of a processor that the client used.
    fell_back : whether a feather policy failed and left the server to fcfs.
    """

    name: str
    case: str = ""
    round: int = 1
    server: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    summary: RunSummary | None = None
    counted: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    timings: list[tuple[int, Timing]] = field(default_factory=list)
    admission: Admission | None = None
    activity: dict[str, Any] | None = None
    clocks: dict[str, Any] | None = None
    client_cpu: float = 0.0
    fell_back: bool = False

    @property
    def incomplete(self) -> bool:
        """Whether it, or some of its requests, did not come to an end."""
        return self.error is not None or bool(self.counted["failed"] or self.counted["unfinished"])


def decode_steps(lines: Sequence[Line], begin: float) -> list[Step]:
    """The decode batch wherever the scheduler printed a line about it."""
    found, before = [], begin
    for line in lines:
        if line.decode and line.at > before:
            found.append(Step(line.at - begin, line.running, line.at - before, line.kv_use))
            before = line.at
    return found


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
    counts = Admission.between(before, server.counters()) if admission else None
    return summarize(name, driven, watch, gpu, counts), driven


def summarize(
    name: str,
    driven: Driven,
    watch: Watch,
    gpu: GpuMeter | None = None,
    admission: Admission | None = None,
) -> RunResult:
    """Figures of a run; there is no summary where no request finished.

    Latencies are those of finished requests and count from the moment a request was due. The longest wait for a first
    token also counts requests that had none by the end, with the time that they had waited by then.
    """
    result = RunResult(
        name,
        counted=overall(driven.streams, driven.end),
        admission=admission,
        activity=gpu.activity if gpu else None,
        clocks=gpu.clocks if gpu else None,
        client_cpu=round(driven.cpu_share, 3),
        fell_back=watch.fell_back,
    )
    counted, lines = result.counted, watch.lines
    done = [stream for stream in driven.streams if stream.finished]
    if not done:
        return result
    answered = [stream for stream in driven.streams if stream.events]
    steps = decode_steps(lines, min(stream.sent for stream in driven.streams if stream.sent is not None))
    gaps = token_gaps(done)
    summary = RunSummary.from_times(
        name,
        arrivals=[stream.due for stream in done],
        first_tokens=[stream.span[0] for stream in done],
        finishes=[stream.span[1] for stream in done],
        output_tokens=counted["output_tokens"],
        input_tokens=sum(stream.prompt_tokens for stream in answered),
        cached_tokens=sum(stream.cached_tokens for stream in answered),
        token_gaps=gaps.tolist(),
        batch_rows=[step.rows for step in steps],
        batch_seconds=[step.seconds for step in steps],
        makespan=counted["seconds"],
        scheduler_seconds=watch.scheduler_seconds or 0.0,
        retractions=watch.retractions,
    )
    waits = [
        (stream.span[0] if stream.events else driven.end) - stream.due
        for stream in driven.streams
        if stream.error is None and stream.due < driven.end
    ]
    held = [(step.kv_use, step.seconds) for step in steps if step.kv_use is not None]
    worked, clocks = result.activity or {}, result.clocks
    figures: dict[str, Any] = {
        "max_wait": max(waits),
        "kv_mean": sum(use * seconds for use, seconds in held) / sum(seconds for _, seconds in held) if held else None,
        "kv_peak": max((line.kv_use for line in lines if line.kv_use is not None), default=None),
        "stops": admission.stops if admission else None,
        "admission_share": admission.seconds / counted["seconds"] if admission else None,
        "admission_us": admission.seconds / admission.rounds * 1e6 if admission and admission.rounds else None,
        "gpu_busy": worked["busy"] / 100 if "busy" in worked else None,
        "dram_use": worked["dram"] / 100 if "dram" in worked else None,
        "sm_ghz": clocks["sm_mhz"]["mean"] / 1e3 if clocks else None,
        "watt": clocks["watt"]["mean"] if clocks else None,
    }
    if not len(gaps):
        figures |= dict.fromkeys(("tbt_mean_ms", "tbt_p50_ms", "tbt_p99_ms"))
    if not steps:
        figures["mean_batch"] = None
    if not lines:  # a server that logs so little would not tell of retractions either
        figures["retractions"] = None
    if watch.scheduler_seconds is None:
        figures["scheduler_share"] = None
    result.summary, result.steps = replace(summary, **figures), steps
    result.latencies = [stream.span[1] - stream.due for stream in done]
    result.timings = [
        (stream.prompt_tokens, Timing.of(stream.span[0] - stream.due, token_gaps([stream]))) for stream in done
    ]
    return result


def judged(result: RunResult, slo: SLO | None, idle: IdleTimes | None) -> RunSummary | None:
    """The summary with what it says of an SLO; who failed or was cut has not met it."""
    if result.summary is None:
        return None
    timings = [timing for _, timing in result.timings]
    alone = None if idle is None else [idle.timing(tokens) for tokens, _ in result.timings]
    counted = result.counted
    return replace(result.summary, **judge(slo, timings, alone, counted["requests"], counted["seconds"]))


def together(rounds: Sequence[RunSummary]) -> RunSummary:
    """The mean of each figure over the rounds; of the longest wait and the peak the largest."""
    figures: dict[str, Any] = {}
    for name in (one.name for one in fields(RunSummary)):
        values = [getattr(one, name) for one in rounds]
        if name == "policy" or any(value is None for value in values):
            figures[name] = values[0] if name == "policy" else None
        elif name in ("max_wait", "kv_peak"):
            figures[name] = max(values)
        else:
            figures[name] = values[0] if len(set(values)) == 1 else mean(values)
    return RunSummary(**figures)


def notes(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know of the runs to trust the table, one line each."""
    lines = []
    for record in records:
        head = f"{record['name']} (round {record['round']})"
        if "error" in record:
            lines.append(f"{head}: not measured: {record['error']}")
            continue
        counted = record["counted"]
        if record["fell_back"]:
            lines.append(f"{head}: the feather policy failed during the run and the server went on as fcfs")
        if counted["failed"]:
            lines.append(
                f"{head}: {counted['failed']} of {counted['requests']} requests failed: {counted['errors'][0]}"
            )
        if counted["unfinished"]:
            lines.append(
                f"{head}: cut while {counted['unfinished']} requests ran; tok/s up to then, latencies leave them out"
            )
        if record["client_cpu"] >= CLIENT_BOUND:
            lines.append(f"{head}: the client used {record['client_cpu']:.0%} of a processor; the server may be faster")
        if len(record["steps"]) < FEW_STEPS:
            lines.append(f"{head}: only {len(record['steps'])} lines on decode batches: batch and KV use are coarse")
    return lines + _apart(records)


def _apart(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """How far the rounds lie apart in throughput."""
    rates: dict[str, list[float]] = {}
    for record in records:
        if "error" not in record:
            rates.setdefault(record["name"], []).append(record["summary"]["output_tok_s"])
    shown = [f"{name} {', '.join(f'{rate:,.4g}' for rate in found)}" for name, found in rates.items() if len(found) > 1]
    return [f"output tok/s by round: {'; '.join(shown)}"] if shown else []
