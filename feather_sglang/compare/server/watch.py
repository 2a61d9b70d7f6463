"""What a server says while it is driven: the scheduler's own log lines, and the processor time of its process."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, NamedTuple

from feather_sglang.compare.server.process import Server

POLL_SECONDS = 0.1
_LINE = re.compile(r"(?:Decode|Prefill) batch.*#running-req: (\d+).*")
_USAGE = re.compile(r"token usage: ([\d.]+)")
_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+).*?gen throughput \(token/s\): ([\d.]+)")
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")
_TICKS = os.sysconf("SC_CLK_TCK")


class Line(NamedTuple):
    """A line of the scheduler about a batch; `at` is when it was read, on the monotonic clock."""

    at: float
    decode: bool
    running: int
    kv_use: float | None


def read_lines(text: str, before: float, now: float) -> list[Line]:
    """The lines about batches in what was printed between two moments; they are spread evenly between these."""
    found = list(_LINE.finditer(text))
    lines = []
    for index, line in enumerate(found, start=1):
        usage = _USAGE.search(line.group())
        at = before + (now - before) * index / len(found)
        kv_use = float(usage.group(1)) if usage else None
        lines.append(Line(at, line.group().startswith("Decode"), int(line.group(1)), kv_use))
    return lines


def read_log(text: str, batch: int | None = None) -> dict[str, Any]:
    """What the scheduler's own lines say of one case.

    Parameters
    ----------
    batch : throughput is the median of lines with so many requests running; by default with the most seen. The first
        such line is left out, as its interval began before.
    """
    lines = [(int(running), float(rate)) for running, rate in _DECODE.findall(text)]
    most = max((running for running, _ in lines), default=0)
    full = [rate for running, rate in lines if running == (batch or most)][1:]
    return {
        "peak_running": most or None,
        "full_batch_tok_s": round(median(full), 1) if full else None,
        "retractions": retracted(text),
    }


def retracted(text: str) -> int:
    """Requests that were retracted because the KV pool was full; one line may tell of several."""
    return sum(map(int, _RETRACTED.findall(text)))


class Watch:
    """``with Watch(server) as watch: ...``; then `watch` has what the server printed and used meanwhile.

    Attributes
    ----------
    lines : in order; the scheduler prints one for every prefill batch and one for every so many decode steps.
    retractions : requests that were retracted because the KV pool was full.
    fell_back : whether a feather policy failed and left the server to fcfs.
    scheduler_seconds : processor time of the busiest scheduler process; None if there was none to be found.
    """

    def __init__(self, server: Server) -> None:
        self.lines: list[Line] = []
        self.retractions = 0
        self.fell_back = False
        self.scheduler_seconds: float | None = None
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Watch:
        self._position = self._server.printed_bytes()
        self._cpu = scheduler_cpu(self._server.group)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        used = scheduler_cpu(self._server.group)
        self._over.set()
        self._thread.join()
        spent = [seconds - self._cpu[pid] for pid, seconds in used.items() if pid in self._cpu]
        self.scheduler_seconds = max(spent, default=None)

    def _follow(self) -> None:
        """Read the log as it grows: its own time stamps are whole seconds."""
        before, rest, over = time.monotonic(), b"", False
        with self._server.log.open("rb") as log:
            log.seek(self._position)
            while not over:
                over = self._over.wait(POLL_SECONDS)
                now = time.monotonic()
                *whole, rest = (rest + log.read()).split(b"\n")
                self._take(b"\n".join(whole).decode(errors="replace"), before, now)
                before = now

    def _take(self, text: str, before: float, now: float) -> None:
        self.lines += read_lines(text, before, now)
        self.retractions += retracted(text)
        self.fell_back = self.fell_back or "goes on as fcfs" in text


def scheduler_cpu(group: int) -> dict[int, float]:
    """Processor seconds so far of each scheduler process in a process group."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if not (folder / "cmdline").read_bytes().startswith(b"sglang::scheduler"):
                continue
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[2]) == group:
            found[int(folder.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found
