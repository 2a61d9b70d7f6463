"""Request traces: who asks when, how long, and which blocks of the prompt are shared.

The format is Mooncake's JSON lines: ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``,
one id per block of the prompt. A trace holds no tokens; they are made on demand, so a long trace stays small.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import replace_text

MOONCAKE_BLOCK = 512  # tokens in a block of the published traces
VOCABULARY = 32_000  # made tokens are below this,
FIRST_TOKEN = 10  # and at least this: smaller ids are control tokens in most vocabularies
LONGEST = 10_000_000  # tokens; a longer prompt or output is a mistake

_KINDS = VOCABULARY - FIRST_TOKEN
_LEAD = 5  # a block opens with its id in base _KINDS: five digits hold any id below 2**63
_PLACES = np.array([_KINDS**digit for digit in range(_LEAD)], dtype=np.uint64)
_LATEST_MS = 1e13  # ms from the first request, 300 years


class TraceRequest(NamedTuple):
    """One request. `arrival_s` counts from the trace's first request; `hash_ids` names the blocks of its prompt."""

    request_id: int
    arrival_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival; `notices` says what was mended while the trace was read."""

    name: str
    block_size: int
    requests: list[TraceRequest]
    notices: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Requests a second; 0 where all come at once."""
        duration = self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0
        return (len(self.requests) - 1) / duration if duration else 0.0

    def head(self, count: int) -> Trace:
        """Return the first `count` requests."""
        return self._with(self.requests[: max(count, 0)])

    def scaled(self, rate: float) -> Trace:
        """Return the trace with `rate` times as many requests per second."""
        if not (math.isfinite(rate) and rate > 0):
            raise FeatherError(f"rate scale {rate:g}: must be a positive number")
        return self._with([r._replace(arrival_s=r.arrival_s / rate) for r in self.requests])

    def split(self, fraction: float) -> tuple[Trace, Trace]:
        """Cut after `fraction` of the requests; the second part starts anew at time 0."""
        if not 0 <= fraction <= 1:
            raise FeatherError(f"trace split {fraction:g}: must lie between 0 and 1")
        cut = int(len(self.requests) * fraction)
        rest = self.requests[cut:]
        start = rest[0].arrival_s if rest else 0.0
        return self._with(self.requests[:cut]), self._with([r._replace(arrival_s=r.arrival_s - start) for r in rest])

    def least_pool(self, page_size: int) -> int:
        """KV tokens that a pool in pages must hold for every request to come to its end, beside nobody.

        SGLang shortens what a request may generate, without a word, where a page less is left than it takes.
        """
        spare = page_size + 7
        longest = max((-(-r.input_length // page_size) * page_size + r.output_length for r in self.requests), default=0)
        return -(-(longest + spare) // page_size) * page_size

    def tokens(self, request: TraceRequest) -> array[int]:
        """Make the prompt of `request`: `input_length` token ids, the same in every process.

        A block's tokens follow from its hash id alone, so two prompts agree exactly as far as their ids do and differ
        within the first five tokens after. (A block shorter than that cannot spell every id: such ids may collide.)
        """
        ids = np.array(request.hash_ids, dtype=np.uint64)[:, None]
        offsets = np.arange(min(self.block_size, request.input_length), dtype=np.uint64)
        words = _mix(ids * np.uint64(0x9E3779B97F4A7C15) + offsets * np.uint64(0xD1B54A32D192ED03))
        blocks = ((words >> np.uint64(40)) * np.uint64(_KINDS)) >> np.uint64(24)
        lead = min(_LEAD, len(offsets))
        blocks[:, :lead] = ids // _PLACES[:lead] % np.uint64(_KINDS)
        numbers = blocks.ravel()[: request.input_length].astype(np.int64) + FIRST_TOKEN
        made = array("q")
        made.frombytes(numbers.tobytes())
        return made

    def _with(self, requests: list[TraceRequest]) -> Trace:
        return Trace(self.name, self.block_size, requests, self.notices)


def load_trace(path: str | os.PathLike[str], block_size: int = MOONCAKE_BLOCK) -> Trace:
    """Read a trace in Mooncake's format.

    Parameters
    ----------
    block_size : tokens in a block where the file does not say (traces made by ``feather trace make`` do).

    Times are counted from the first request, to the microsecond. A bad line raises ``file:line: field: reason``;
    lines out of order are sorted, with a notice.
    """
    if block_size < 1:
        raise FeatherError(f"block size {block_size}: must be at least 1 token")
    source = Path(path)
    try:
        with source.open("rb") as stream:
            rows = _rows(source, stream)
    except IsADirectoryError:
        raise FeatherError(f"{source}: is a directory, not a trace file") from None
    except FileNotFoundError:
        raise FeatherError(f"{source}: no such trace file") from None
    except OSError as error:
        raise FeatherError(f"{source}: cannot read: {error.strerror or error}") from error
    if not rows:
        raise FeatherError(f"{source}: the trace is empty: expected one JSON object per line")
    block_size = _block_size(source, rows, block_size)
    requests = [_request(index, f"{source}:{number}", row, block_size) for index, (number, row) in enumerate(rows)]
    late = sum(b.arrival_s < a.arrival_s for a, b in pairwise(requests))
    notices = []
    if late:
        notices.append(f"{source}: {late} of {len(requests)} requests were out of order: sorted by timestamp")
        requests.sort(key=lambda request: request.arrival_s)
    start = requests[0].arrival_s
    requests = [r._replace(arrival_s=round(r.arrival_s - start, 6)) for r in requests]
    return Trace(source.stem, block_size, requests, notices)


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace in Mooncake's format; a reader sees the old file or the new one, never a part of one."""
    replace_text(path, "".join(f"{line}\n" for line in _lines(trace)), "trace")


def _lines(trace: Trace) -> Iterable[str]:
    # Each line says the block size where it is not Mooncake's, so that a cut or concatenated file still reads right.
    extra = {} if trace.block_size == MOONCAKE_BLOCK else {"block_size": trace.block_size}
    for request in trace.requests:
        milliseconds = round(request.arrival_s * 1e3, 3)
        row: dict[str, Any] = {
            "timestamp": int(milliseconds) if milliseconds.is_integer() else milliseconds,
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": request.hash_ids,
            **extra,
        }
        yield json.dumps(row, allow_nan=False)


def _rows(source: Path, stream: Iterable[bytes]) -> list[tuple[int, dict[str, Any]]]:
    rows = []
    for number, raw in enumerate(stream, start=1):
        where = f"{source}:{number}"
        try:
            line = raw.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise FeatherError(f"{where}: line: not UTF-8 (byte {error.start + 1})") from None
        if not line:
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise FeatherError(f"{where}: line: not JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:
            raise FeatherError(f"{where}: line: not usable JSON: {str(error).splitlines()[0]}") from None
        if not isinstance(row, dict):
            raise FeatherError(f"{where}: line: not a JSON object")
        rows.append((number, row))
    return rows


def _block_size(source: Path, rows: list[tuple[int, dict[str, Any]]], default: int) -> int:
    sizes = set()
    for number, row in rows:
        sizes.add(_whole(row, "block_size", f"{source}:{number}", 1) if "block_size" in row else default)
        if len(sizes) > 1:
            raise FeatherError(f"{source}:{number}: block_size: differs from the lines before ({sorted(sizes)})")
    return sizes.pop()


def _request(index: int, where: str, row: dict[str, Any], block_size: int) -> TraceRequest:
    milliseconds = _field(row, "timestamp", where)
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, (int, float)):
        raise FeatherError(f"{where}: timestamp: must be a number of milliseconds, not {_shown(milliseconds)}")
    if not 0 <= milliseconds <= _LATEST_MS:  # false for NaN too
        raise FeatherError(f"{where}: timestamp: must lie between 0 and {_LATEST_MS:g} ms, not {_shown(milliseconds)}")
    input_length = _whole(row, "input_length", where, 1)
    output_length = _whole(row, "output_length", where, 1)
    hash_ids = _field(row, "hash_ids", where)
    if not isinstance(hash_ids, list):
        raise FeatherError(f"{where}: hash_ids: must be a list, not {_shown(hash_ids)}")
    for value in hash_ids:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise FeatherError(f"{where}: hash_ids: must be whole numbers from 0 to 2**63 - 1, not {_shown(value)}")
    blocks = -(-input_length // block_size)
    if len(hash_ids) != blocks:
        raise FeatherError(
            f"{where}: hash_ids: {len(hash_ids)} ids, but input_length {input_length} has {blocks} blocks of "
            f"{block_size} tokens"
        )
    return TraceRequest(index, milliseconds / 1e3, input_length, output_length, tuple(hash_ids))


def _field(row: dict[str, Any], name: str, where: str) -> Any:
    try:
        return row[name]
    except KeyError:
        raise FeatherError(f"{where}: {name}: missing") from None


def _whole(row: dict[str, Any], name: str, where: str, least: int) -> int:
    value = _field(row, name, where)
    if isinstance(value, bool) or not isinstance(value, int):
        raise FeatherError(f"{where}: {name}: must be a whole number, not {_shown(value)}")
    if not least <= value <= LONGEST:
        raise FeatherError(f"{where}: {name}: must lie between {least} and {LONGEST}, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """Return `value` as its JSON text, cut short: an error message is one line."""
    try:
        text = json.dumps(value)
    except ValueError:  # an integer too long to print
        text = "a number of thousands of digits"
    return text if len(text) <= 40 else text[:37] + "..."


def _mix(words: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser to each word, in place: neighbouring inputs give unrelated outputs."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words
