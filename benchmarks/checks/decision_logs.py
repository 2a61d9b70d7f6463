"""Compare the decision logs (``FEATHER_DECISION_LOG``) of several ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from feather_sglang.adapter.scheduler.decision_log import DECISION_LOG, HEAD, Decision
from feather_sglang.errors import FeatherError

# A rank decides at most two batches more than another has: one in flight, whose collective operations wait for the
# other rank, and with the overlap scheduler the next one.
AHEAD = 2


@dataclass
class Comparison:
    """The comparison of several ranks' files.

    Attributes
    ----------
    difference : the first one, or None; what follows it was not read.
    batches, rows : by mode, up to there.
    adds, stops, postponed : by the last batch before that; of all policies, if a file holds several.
    """

    difference: str | None = None
    batches: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    adds: int = 0
    stops: int = 0
    postponed: int = 0

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "batches": dict(self.batches), "rows": dict(self.rows)}


def compare(files: Sequence[Path], killed: bool = False) -> Comparison:
    """Compare the files of the ranks of one replica, line by line, until they differ.

    They are equal if all lines are, byte by byte, and no file has more than another. After the server was `killed`, a
    line that was not finished counts as not written, and the longest file may have up to ``AHEAD`` lines more than the
    shortest.

    Raises ``FeatherError`` for a file that is missing or is no such log.
    """
    may_end = False
    if killed:
        lengths = [sum(1 for _ in _lines(file, killed)) for file in files]
        may_end = max(lengths) - min(lengths) <= AHEAD
    found = Comparison()
    before = [0, 0, 0]  # counted by the policies before the present one
    last: Decision | None = None
    for number, lines in enumerate(zip_longest(*(_lines(file, killed) for file in files)), start=1):
        if len({line for line in lines if line is not None or not may_end}) > 1:
            found.difference = f"line {number}: " + ", ".join(
                f"{file.name} {'ends' if line is None else f'has {_shown(line)}'}"
                for file, line in zip(files, lines, strict=True)
            )
            break
        if None in lines:
            continue
        if lines[0].startswith(HEAD.encode()):
            before, last = _added(before, last), None
            continue
        last = _decision(lines[0], files[0], number)
        found.batches[last.mode] += 1
        found.rows[last.mode] += last.rows
    found.adds, found.stops, found.postponed = _added(before, last)
    return found


def _lines(file: Path, killed: bool) -> Iterator[bytes]:
    try:
        with file.open("rb") as stream:
            yield from (line for line in stream if line.endswith(b"\n") or not killed)
    except OSError as error:
        raise FeatherError(f"{file}: {error.strerror}; was the server started with {DECISION_LOG}?") from None


def _shown(line: bytes) -> str:
    return repr(line.decode(errors="replace"))


def _decision(line: bytes, file: Path, number: int) -> Decision:
    try:
        step, mode, rows, digested, *counts = line.decode().split()
        return Decision(int(step), mode, int(rows), digested, *map(int, counts))
    except (ValueError, TypeError):
        raise FeatherError(f"{file}: line {number} is no decision: {_shown(line)}") from None


def _added(counts: Sequence[int], last: Decision | None) -> list[int]:
    return [count + more for count, more in zip(counts, last[4:] if last else (0, 0, 0), strict=True)]
