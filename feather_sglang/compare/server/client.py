"""HTTP client of a server: many streams at once on plain asyncio, in one thread.

Written on bare streams because it must run wherever SGLang does, and because a general client spends several times as
much on a piece of a stream as the few lines below.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from feather_sglang.compare.server.cases import Request, Turn
from feather_sglang.compare.server.stats import Stream

HOLD_SECONDS = 60.0  # in which a held server must have taken in all requests
_BUFFER = 1 << 22


class Address(NamedTuple):
    """The address and the API key of a server."""

    host: str
    port: int
    key: str | None = None


class HttpError(RuntimeError):
    """An answer with a status other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Driven:
    """The results of one run of the client.

    Attributes
    ----------
    end : when it ended, on the clock of the streams.
    cpu_share : of one processor that the client used.
    held : whether the server was held until it had taken in all requests.
    """

    streams: list[Stream]
    end: float
    cpu_share: float
    held: bool


async def call(address: Address, path: str, body: bytes | None = None, timeout: float = 30.0) -> Any:
    """GET, or POST where there is a body; the answer, decoded if it is JSON."""

    async def whole() -> bytes:
        reader, writer = await _send(address, path, body)
        try:
            return b"".join([piece async for piece in await _answer(reader)])
        finally:
            writer.close()

    content = await asyncio.wait_for(whole(), timeout)
    return json.loads(content) if content[:1] in (b"{", b"[") else content.decode(errors="replace")


async def call_all(address: Address, requests: Sequence[Request], timeout: float) -> list[Any]:
    """POST all requests to ``/generate`` at once; their answers in the same order."""
    return await asyncio.gather(*(call(address, "/generate", request.body, timeout) for request in requests))


async def drive(
    address: Address,
    requests: Sequence[Request],
    limit: float,
    hold: bool = False,
    alive: Callable[[], bool] = lambda: True,
) -> Driven:
    """Send each request when it is due and read all streams.

    Parameters
    ----------
    limit : seconds after which what is left is given up; its streams are neither finished nor failed.
    hold : let the server take in all requests before it computes any. Reading long prompts takes a server longer
        than many decode steps, so otherwise the first requests would be over before the last ones begin.
    alive : asked every second; what is left is given up once it says no.
    """
    begun, cpu = time.monotonic(), time.process_time()
    held = hold and await _pause(address)
    start = time.monotonic()
    streams = [Stream(start + request.due, request.prompt_tokens) for request in requests]
    accepted, ended = ([asyncio.Event() for _ in requests] for _ in range(2))

    async def send(place: int) -> None:
        request, stream = requests[place], streams[place]
        body: bytes | None = request.body
        try:
            if request.turn is not None:
                await ended[request.turn.after].wait()
                body = _after_answer(request.turn, stream, streams)
            if body is not None:
                await _stream(address, body, stream, accepted[place])
        finally:
            accepted[place].set()
            ended[place].set()

    tasks = [asyncio.create_task(send(place)) for place in range(len(requests))]
    try:
        if held:
            try:
                await asyncio.wait_for(_all_set(accepted), min(limit, HOLD_SECONDS))
            except asyncio.TimeoutError:
                pass  # some request hangs; the others will show what they can
            finally:
                await call(address, "/continue_generation", b"{}")
            released = time.monotonic()
            for stream in streams:
                stream.due = stream.sent = released
        pending = set(tasks)
        while pending and alive() and (rest := limit - (time.monotonic() - begun)) > 0:
            _, pending = await asyncio.wait(pending, timeout=min(1.0, rest))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    end = time.monotonic()
    return Driven(streams, end, (time.process_time() - cpu) / (end - begun), held)


def allow_open_files(count: int) -> None:
    """Raise this process's limit as far as that is allowed: each open request is a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def _pause(address: Address) -> bool:
    """Whether this server can be held."""
    try:
        await call(address, "/pause_generation", b'{"mode": "in_place"}')
    except HttpError:
        return False
    return True


async def _all_set(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


def _after_answer(turn: Turn, stream: Stream, streams: Sequence[Stream]) -> bytes | None:
    """The body of a turn, and when it is due, once the request before has ended; None where that has failed."""
    before, (_, begin, end) = streams[turn.after], turn.quotes[0]
    if not before.finished:
        stream.error = "the turn before this one failed"
        return None
    if len(before.answer) != end - begin:
        stream.error = f"its prompt holds {end - begin} tokens of an answer that has {len(before.answer)}"
        return None
    stream.due = before.span[1] + turn.think_s
    return turn.body([one.answer for one in streams])


async def _stream(address: Address, body: bytes, stream: Stream, accepted: asyncio.Event) -> None:
    """Send one request when it is due and note every piece of its answer.

    `accepted` is set once the server has taken the request in, or nobody needs to wait for it any more.
    """
    while (early := stream.due - time.monotonic()) > 0:  # the loop wakes up to a tick of its clock too soon
        await asyncio.sleep(early)
    writer = None
    try:
        stream.sent = time.monotonic()
        reader, writer = await _send(address, "/generate", body)
        pieces = await _answer(reader)
        accepted.set()  # the server sends its header once it has read the request
        async for event in _events(pieces):
            _note(event, stream)
        if not stream.finished and stream.error is None:
            stream.error = "the stream ended early"
    except (OSError, EOFError, ValueError, KeyError, HttpError) as problem:
        if not stream.finished:  # all of it is here, however the connection ends
            stream.error = f"{type(problem).__name__}: {problem}"[:200]
    finally:
        accepted.set()
        if writer is not None:
            writer.close()


def _note(event: bytes, stream: Stream) -> None:
    """Take the counts from one server-sent event."""
    content = json.loads(event)
    if "error" in content:
        stream.error = str(content["error"])[:200]
        return
    meta = content["meta_info"]
    stream.events.append((time.monotonic(), meta["completion_tokens"]))
    ids = content.get("output_ids") or []
    # All so far, or with --incremental-streaming-output the latest.
    stream.answer = ids if len(ids) == meta["completion_tokens"] else stream.answer + ids
    stream.cached_tokens = meta["cached_tokens"]
    reason = meta["finish_reason"]
    if reason is not None:
        stream.finished = reason["type"] == "length"
        if not stream.finished:
            stream.error = str(reason)[:200]


async def _send(address: Address, path: str, body: bytes | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection and write one request."""
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=_BUFFER)
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {address.host}\r\nConnection: close\r\n"
    if address.key is not None:
        head += f"Authorization: Bearer {address.key}\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    try:
        writer.write(head.encode() + b"\r\n" + (body or b""))
        await writer.drain()
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def _answer(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Read the header; the pieces of the content. A status other than 200 raises ``HttpError``."""
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines if ": " in line)
    pieces = _pieces(reader, fields)
    number = int(status.split()[1])
    if number != 200:
        content = b"".join([piece async for piece in pieces])
        raise HttpError(number, f"{status}: {content[:300].decode(errors='replace')}")
    return pieces


async def _pieces(reader: asyncio.StreamReader, fields: dict[str, str]) -> AsyncIterator[bytes]:
    if "content-length" in fields:
        yield await reader.readexactly(int(fields["content-length"]))
    elif fields.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    else:
        yield await reader.read()


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Data of the server-sent events, wherever they are cut; ``[DONE]`` is left out."""
    rest = b""
    async for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data != b"[DONE]":
                yield data
