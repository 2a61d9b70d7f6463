"""Request traces: arrival times, lengths, and the shared blocks of prompts.

The format is Mooncake's JSON lines: ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``,
one id per block of the prompt. A trace holds no tokens; they are made on demand, so a long trace stays small.

One extension: a further turn of a conversation says which request it comes ``after`` (lines count from 0) and how long
its user does ``think`` (ms). It is due that long after that request's end, and opens with its prompt and its answer.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import replace_chunks
from feather_sglang.replay.arrivals import Arrivals
from feather_sglang.replay.compression import bare, packed
from feather_sglang.replay.lines import json_rows

MOONCAKE_BLOCK = 512  # tokens in a block of the published traces
VOCABULARY = 32_000  # made tokens are below this,
FIRST_TOKEN = 10  # and at least this: smaller ids are control tokens in most vocabularies
LONGEST = 10_000_000  # tokens; a longer prompt or output is a mistake

_KINDS = VOCABULARY - FIRST_TOKEN
_LEAD = 5  # a block opens with its id in base _KINDS: five digits hold any id below 2**63
_PLACES = np.array([_KINDS**digit for digit in range(_LEAD)], dtype=np.uint64)
# Of a trace of at least so many requests, those a second beyond which its times are likely in another unit.
FEW_REQUESTS, LOW_RATE, HIGH_RATE = 20, 0.01, 500.0
_LATEST_MS = 1e13  # ms from the first request, 300 years


class TraceRequest(NamedTuple):
    """One request.

    Attributes
    ----------
    arrival_s : seconds from the trace's first request; of a further turn, when it would come if answers took no time.
    hash_ids : names the blocks of its prompt.
    after : the request whose prompt and answer this one's prompt opens with; None: it comes at `arrival_s`.
    think_s : seconds from the end of that request to this one.
    """

    request_id: int
    arrival_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    after: int | None = None
    think_s: float = 0.0


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

    def arrivals(self) -> Arrivals:
        """When its requests come, for one run."""
        return Arrivals(self.requests)

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
        return self.head(cut), self.part(cut, len(self.requests) - cut)

    def part(self, first: int, count: int) -> Trace:
        """Return `count` requests from number `first` on, from time 0.

        A turn whose conversation began before comes at its `arrival_s`.
        """
        kept = self.requests[first : first + count]
        start = kept[0].arrival_s if kept else 0.0
        ids = {request.request_id for request in kept}
        moved = [r._replace(arrival_s=r.arrival_s - start, after=r.after if r.after in ids else None) for r in kept]
        return self._with(moved)

    def least_pool(self, page_size: int) -> int:
        """KV tokens that a pool in pages must hold for every request to come to its end, beside nobody.

        SGLang shortens what a request may generate, without a word, where a page less is left than it takes.
        """
        spare = page_size + 7
        longest = max((-(-r.input_length // page_size) * page_size + r.output_length for r in self.requests), default=0)
        return -(-(longest + spare) // page_size) * page_size

    def tokens(self, request: TraceRequest) -> array[int]:
        """Make the prompt of `request`: `input_length` token ids, the same in every process.

        Where it quotes answers (``Arrivals.answers_in``), whoever knows their tokens puts them there.

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


def load_trace(path: str | os.PathLike[str], block_size: int = MOONCAKE_BLOCK, requests: int | None = None) -> Trace:
    """Read a trace in Mooncake's format.

    Parameters
    ----------
    block_size : tokens in a block where the file does not say (traces made by ``feather trace make`` do).
    requests : read only so many lines, and look at none behind them.

    Times are counted from the first request, to the microsecond. A bad line raises ``file:line: field: reason``;
    lines out of order are sorted, with a notice.
    """
    if block_size < 1:
        raise FeatherError(f"block size {block_size}: must be at least 1 token")
    source, notices = Path(path), list[str]()
    own: int | None = None
    made: list[TraceRequest] = []
    for index, (where, row) in enumerate(islice(json_rows(source, notices), requests)):
        size = _whole(row, "block_size", where, 1) if "block_size" in row else block_size
        if own not in (None, size):
            raise FeatherError(f"{where}: block_size: {size} differs from the lines before ({own})")
        own = size
        request = _request(index, where, row, size)
        _check_turn(where, request, made)
        made.append(request)
    if own is None:
        raise FeatherError(f"{source}: the trace is empty: expected one JSON object per line")
    return ordered(bare(source).stem, own, made, f"{source}", notices)


def ordered(name: str, block_size: int, requests: list[TraceRequest], where: str, notices: list[str]) -> Trace:
    """The trace of requests as a file has them: sorted, from time 0, with notices of what was mended or looks wrong."""
    late = sum(b.arrival_s < a.arrival_s for a, b in pairwise(requests))
    if late:
        notices.append(f"{where}: {late} of {len(requests)} requests were out of order: sorted by timestamp")
        requests.sort(key=lambda request: request.arrival_s)
    start = requests[0].arrival_s
    trace = Trace(name, block_size, [r._replace(arrival_s=round(r.arrival_s - start, 6)) for r in requests], notices)
    if len(requests) >= FEW_REQUESTS and not LOW_RATE <= trace.rate <= HIGH_RATE:
        unit = "s" if trace.rate > HIGH_RATE else "ms"
        notices.append(
            f"{where}: {trace.rate:,.4g} requests a second: if this is not so, its times are in another unit: "
            f"feather trace import --time-unit {unit}"
        )
    return trace


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace in Mooncake's format; a reader sees the old file or the new one, never a part of one."""
    replace_chunks(path, packed((f"{line}\n".encode() for line in _lines(trace)), path), "trace")


def _lines(trace: Trace) -> Iterable[str]:
    # Each line says the block size where it is not Mooncake's, so that a cut or concatenated file still reads right.
    extra = {} if trace.block_size == MOONCAKE_BLOCK else {"block_size": trace.block_size}
    lines = {request.request_id: number for number, request in enumerate(trace.requests)}
    for request in trace.requests:
        milliseconds = round(request.arrival_s * 1e3, 3)
        turn: dict[str, Any] = {}
        if request.after is not None:
            turn = {"after": lines[request.after], "think": round(request.think_s * 1e3, 3)}
        row: dict[str, Any] = {
            "timestamp": int(milliseconds) if milliseconds.is_integer() else milliseconds,
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": request.hash_ids,
            **turn,
            **extra,
        }
        yield json.dumps(row, allow_nan=False)


def _request(index: int, where: str, row: dict[str, Any], block_size: int) -> TraceRequest:
    arrival_s = _seconds(row, "timestamp", where)
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
            f"{block_size} tokens{fitting(input_length, len(hash_ids))}"
        )
    after = _whole(row, "after", where, 0) if "after" in row else None
    think_s = round(_seconds(row, "think", where), 6) if "think" in row else 0.0
    if after is None and think_s:
        raise FeatherError(f"{where}: think: goes with after, the line of the request that this one answers")
    return TraceRequest(index, arrival_s, input_length, output_length, tuple(hash_ids), after, think_s)


def fitting(tokens: int, ids: int) -> str:
    """What to do where so many ids do not fit a prompt in blocks of the size assumed."""
    if ids < 2:
        return ""
    least, most = -(-tokens // ids), (tokens - 1) // (ids - 1)
    likely = [size for size in (1 << power for power in range(14)) if least <= size <= most]
    return f"; blocks of {likely[0] if likely else least} would fit: --block-size" if least <= most else ""


def _check_turn(where: str, request: TraceRequest, requests: list[TraceRequest]) -> None:
    """Raise ``FeatherError`` where a further turn does not fit the request that it comes after."""
    if request.after is None:
        return
    if request.after >= request.request_id:
        raise FeatherError(f"{where}: after: must be an earlier line, counted from 0, not {request.after}")
    before = requests[request.after]
    least = before.input_length + before.output_length
    if request.arrival_s < before.arrival_s:
        raise FeatherError(f"{where}: timestamp: is before that of line {request.after}, which it comes after")
    if request.input_length < least:
        raise FeatherError(
            f"{where}: input_length: must be at least {least}, prompt and answer of line {request.after}, not "
            f"{request.input_length}"
        )
    if request.hash_ids[: len(before.hash_ids)] != before.hash_ids:
        raise FeatherError(f"{where}: hash_ids: must open with those of line {request.after}, which it comes after")


def _seconds(row: dict[str, Any], name: str, where: str) -> float:
    value = _field(row, name, where)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FeatherError(f"{where}: {name}: must be a number of milliseconds, not {_shown(value)}")
    if not 0 <= value <= _LATEST_MS:  # false for NaN too
        raise FeatherError(f"{where}: {name}: must lie between 0 and {_LATEST_MS:g} ms, not {_shown(value)}")
    return value / 1e3


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
    """A value as the trace has it, in JSON, cut short: an error message is one line."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _mix(words: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser to each word, in place: neighbouring inputs give unrelated outputs."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words
