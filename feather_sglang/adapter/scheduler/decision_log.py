"""The decision log: a line in a rank's file for each batch that it formed.

Under tensor parallelism every rank forms its batches itself, and all must form the same. With the variable
``FEATHER_DECISION_LOG`` naming a folder each rank writes there what it decided; nothing in a line depends on the rank,
so the files are to be equal. Each line is written at once: that is a system call of two microseconds, and what a
killed rank decided last is the line that matters most.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from feather_sglang.errors import FeatherError

logger = logging.getLogger(__name__)

DECISION_LOG = "FEATHER_DECISION_LOG"
HEAD = "# step mode rows digest adds stops postponed"  # begins what one scheduler wrote under one policy
_MODES = {"EXTEND": "prefill"}  # SGLang's names that are not said here as they are there


class Decision(NamedTuple):
    """One line of the log.

    Attributes
    ----------
    step : number of the batch.
    mode : prefill, decode, mixed.
    digest : of the rows, see ``digest``.
    adds, stops : how often the policy had said ADD and STOP by then.
    postponed : prefixes that had been made to wait by then.
    """

    step: int
    mode: str
    rows: int
    digest: str
    adds: int
    stops: int
    postponed: int


def digest(request_ids: Sequence[str], extends: Sequence[int]) -> str:
    """64 bits of the ids in the order of the rows, and of the tokens that each row is extended by (none to decode)."""
    ids = "\0".join(request_ids).encode(errors="surrogatepass")  # a client may send any string as an id
    return xxhash.xxh3_64_hexdigest(ids + b"\n" + array("q", extends).tobytes())


def log_file(tp_rank: int, dp_rank: int | None) -> Path | None:
    """Where this rank of this replica writes; None where nobody asked for it.

    Raises ``FeatherError`` if it cannot.
    """
    folder = os.environ.get(DECISION_LOG)
    if not folder:
        return None
    file = Path(folder, f"rank{tp_rank}.log" if dp_rank is None else f"dp{dp_rank}-rank{tp_rank}.log")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
    except OSError as error:
        raise FeatherError(
            f"{DECISION_LOG}={folder}: {file} cannot be written ({error.strerror}); name another folder"
        ) from None
    return file


class DecisionLog:
    """Appends a rank's decisions to its file.

    Parameters
    ----------
    file : from ``log_file``.
    policy : name of the schedule policy.
    """

    def __init__(self, file: Path, policy: str) -> None:
        self._file = file
        self._stream: Any = file.open("ab", buffering=0)
        self._step = 0
        self._write(f"{HEAD}: {policy}\n")

    def note(self, batch: Any, stats: dict[str, Any]) -> None:
        """Write down a batch of SGLang's, with what ``FeatherScheduler.stats`` has counted."""
        if self._stream is None:
            return
        mode = batch.forward_mode.name
        extends = () if mode == "DECODE" else batch.extend_lens or ()
        policy = stats["policy"] or {"adds": 0, "stops": 0}
        line = Decision(
            self._step,
            _MODES.get(mode, mode.lower()),
            len(batch.reqs),
            digest([req.rid for req in batch.reqs], extends),
            policy["adds"],
            policy["stops"],
            stats["deferrals"]["batching"],
        )
        self._write(" ".join(map(str, line)) + "\n")
        self._step += 1

    def close(self) -> None:
        """Write no more."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _write(self, line: str) -> None:
        """A log that cannot be written any more ends; the policy goes on, as it does on the other ranks."""
        rest = line.encode()
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError as error:
            logger.warning("feather: decisions are no longer logged: %s: %s", self._file, error.strerror)
            self.close()
