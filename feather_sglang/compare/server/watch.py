"""A watch on a server during a run: the scheduler's log lines, and the processor time of its process."""

from __future__ import annotations

import re
import threading
import time
from typing import NamedTuple

from feather_sglang.compare.server.process import Server, processes_of

POLL_SECONDS = 0.1
_LINE = re.compile(r"(?:Decode|Prefill) batch.*#running-req: (\d+).*")
_USAGE = re.compile(r"token usage: ([\d.]+)")
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")


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


def retracted(text: str) -> int:
    """Requests that were retracted because the KV pool was full; one line may tell of several."""
    return sum(map(int, _RETRACTED.findall(text)))


class Watch:
    """``with Watch(server) as watch: ...``; then `watch` has the server's log lines and processor time meanwhile.

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

    def __exit__(self, *problem: object) -> None:
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
    return {one.pid: one.cpu_seconds for one in processes_of(group) if one.schedules}
