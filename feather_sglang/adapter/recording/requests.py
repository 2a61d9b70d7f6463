"""A finished request as a line of a trace: lengths, times, and keyed hashes of its blocks; no token, no text.

An id is 63 bits of BLAKE2b over all tokens up to the end of a block. Its key is drawn when a recording begins, held in
memory and never written. So equal prefixes have equal ids within a recording, and without the key nobody can try which
tokens give an id, however short the prompt.

A request that opens with prompt and answer of an earlier one, token by token, is a further turn: its line says which
line it comes ``after``, and how long its user did ``think``. Its ids open with that line's, as the format wants it.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

BLOCK = 64  # tokens
_BYTES = 8 * BLOCK
_KEPT = 4096  # requests of which a further turn is known
_SAME_START = 16  # of them, those whose last whole block is the same


class Finished(NamedTuple):
    """A request that the scheduler has finished; times in seconds of one clock.

    Attributes
    ----------
    isolation : what keeps its prefixes apart from others': adapter, salt.
    """

    arrival: float
    finish: float
    prompt: Sequence[int]
    output: Sequence[int]
    priority: int | None = None
    isolation: tuple[Any, ...] = ()


class _Turn(NamedTuple):
    """What is remembered of a line."""

    line: int
    rest: bytes  # tokens of prompt and answer behind the last whole block
    ids: array[int]
    finish: float


class TraceLines:
    """Makes the lines of one file at a time.

    Parameters
    ----------
    start : time of the recording's start.
    """

    def __init__(self, start: float) -> None:
        self._start = start
        self._key = secrets.token_bytes(32)
        self.begin_file()

    def begin_file(self) -> None:
        """Lines are counted anew, and follow none of the file before."""
        self._line = 0
        self._turns: OrderedDict[bytes, list[_Turn]] = OrderedDict()

    def line(self, request: Finished) -> dict[str, Any]:
        """The next line."""
        prompt = _numbers(request.prompt)
        content = (prompt + _numbers(request.output)).tobytes()
        ids, states = self._hashed(content, len(prompt) * prompt.itemsize, request.isolation)
        before = self._before(request.arrival, prompt.tobytes(), states)
        if before is not None:
            ids[: len(before.ids)] = before.ids
        row: dict[str, Any] = {
            "timestamp": _milliseconds(request.arrival - self._start),
            "input_length": len(prompt),
            "output_length": len(request.output),
            "hash_ids": ids.tolist(),
            "block_size": BLOCK,
        }
        if before is not None:
            row |= {"after": before.line, "think": _milliseconds(request.arrival - before.finish)}
        if request.priority is not None:
            row["priority"] = request.priority
        self._remember(states[-1], _Turn(self._line, content[len(content) // _BYTES * _BYTES :], ids, request.finish))
        self._line += 1
        return row

    def _hashed(self, content: bytes, end: int, isolation: tuple[Any, ...]) -> tuple[array[int], list[bytes]]:
        """Ids of the blocks of a prompt, which ends at byte `end`, and hashes of what is before each whole block."""
        hasher = hashlib.blake2b(repr(isolation).encode(), key=self._key, digest_size=8)
        ids, states = array("q"), [hasher.digest()]
        for start in range(0, len(content), _BYTES):
            stop = start + _BYTES
            if start < end < stop:  # the prompt's last block, which answer or nothing follows
                last = hasher.copy()
                last.update(content[start:end])
                ids.append(_number(last.digest()))
            if stop <= len(content):
                hasher.update(content[start:stop])
                states.append(hasher.digest())
                if stop <= end:
                    ids.append(_number(states[-1]))
        return ids, states

    def _before(self, arrival: float, prompt: bytes, states: list[bytes]) -> _Turn | None:
        """The longest earlier request with whose prompt and answer a prompt opens."""
        for block in reversed(range(min(len(states), len(prompt) // _BYTES + 1))):
            rest = prompt[block * _BYTES : (block + 1) * _BYTES]
            known = self._turns.get(states[block], ())
            if found := [turn for turn in known if rest.startswith(turn.rest) and turn.finish <= arrival]:
                return max(found, key=lambda turn: (len(turn.rest), turn.line))
        return None

    def _remember(self, state: bytes, turn: _Turn) -> None:
        same = self._turns.setdefault(state, [])
        same[: -_SAME_START + 1] = []
        same.append(turn)
        self._turns.move_to_end(state)
        if len(self._turns) > _KEPT:
            self._turns.popitem(last=False)


def _numbers(tokens: Sequence[int]) -> array[int]:
    return tokens if isinstance(tokens, array) and tokens.typecode == "q" else array("q", tokens)


def _number(digest: bytes) -> int:
    """63 bits, as a trace's ids have at most."""
    return int.from_bytes(digest, "little") >> 1


def _milliseconds(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1e3, 3)
