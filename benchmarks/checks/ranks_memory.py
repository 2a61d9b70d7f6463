"""Memory of a server's processes while it is under load, and whether it grows with every request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

SCHEDULER = "scheduler"
LEAST_SAMPLES = 3
_UNBACKED = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)
_ALL = re.compile(r"^VmRSS:\s+(\d+) kB", re.MULTILINE)


class Sample(NamedTuple):
    """One look at the server.

    Attributes
    ----------
    at : seconds since the load began.
    phase : of the load.
    ended : requests that had ended by then.
    open : requests that had not.
    running, waiting : of those, as the server counts them; None where it did not answer.
    kib : resident memory of each process that no file backs, by name and id.
    """

    at: float
    phase: str
    ended: int
    open: int
    running: int | None
    waiting: int | None
    kib: dict[str, int]


class Growth(NamedTuple):
    """The growth of one process, and the requests that ended meanwhile."""

    name: str
    kib: int
    requests: int

    @property
    def bytes_per_request(self) -> float:
        return self.kib * 1024 / max(self.requests, 1)


def resident(group: int) -> dict[str, int]:
    """KiB of each process in a process group that are resident and backed by no file.

    Code and data of libraries that come in at their first use would look like a leak, and are none. Where the system
    does not tell them apart (gVisor), all that is resident counts.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) != group:
                continue
            words = (folder / "cmdline").read_bytes().split(b"\0")
            status = (folder / "status").read_text()
        except OSError:
            continue  # it has just ended
        if sizes := _UNBACKED.findall(status) or _ALL.findall(status):
            found[f"{process_name(words)} {folder.name}"] = sum(map(int, sizes))
    return found


def process_name(words: Sequence[bytes]) -> str:
    """From a command line: ``scheduler_TP0``, ``launch_server``, ``resource_tracker``."""
    text = b" ".join(words).decode(errors="replace")
    if text.startswith("sglang::"):
        return text.split()[0].removeprefix("sglang::")
    modules = re.findall(r"-m ([\w.]+)|from ([\w.]+) import", text)
    return (modules[0][0] or modules[0][1]).split(".")[-1] if modules else text.split()[0].rpartition("/")[2][:24]


def growths(samples: Sequence[Sample], warm_up: int) -> list[Growth]:
    """Growth of every process after the first `warm_up` requests: the medians of the first and the last third.

    Heaps swell and shrink by some MiB all the time, so single samples say little. Fewer than ``LEAST_SAMPLES`` in a
    third give no growth; a process that came or went meanwhile has none.
    """
    after = [sample for sample in samples if sample.ended >= warm_up]
    third = len(after) // 3
    if third < LEAST_SAMPLES:
        return []
    first, last = after[:third], after[-third:]
    requests = round(mean(one.ended for one in last) - mean(one.ended for one in first))
    lasting = set.intersection(*(set(one.kib) for one in after))
    return [
        Growth(name, round(median(one.kib[name] for one in last) - median(one.kib[name] for one in first)), requests)
        for name in sorted(lasting)
    ]
