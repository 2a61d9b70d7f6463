"""100 requests in 5 prefix groups, and a streaming client for the OpenAI API."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp

GROUPS, PER_GROUP = 5, 20
_calls = itertools.count()
WORDS = "alpha beta gamma delta omega river stone cloud ember frost".split()


@dataclass(frozen=True)
class Request:
    """One completion request; the options differ from request to request, so rows that are mixed up show."""

    name: str
    body: dict[str, Any]


@dataclass
class Answer:
    """The answer to one request, from its stream."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)


def grouped_requests(min_tokens: int = 16, max_tokens: int = 48, seed: int = 7) -> list[Request]:
    """The workload, the groups interleaved as requests of many users would be."""
    rng = random.Random(seed)
    prefixes = [" ".join(rng.choice(WORDS) for _ in range(100)) for _ in range(GROUPS)]
    options: tuple[dict[str, Any], ...] = (
        {},
        {"logprobs": 2},
        {"stop": ["zz", "y("]},
        {"logit_bias": {str(token): -4.0 for token in range(33, 60)}},
        {"regex": "[a-z0-9]{4,40}"},
    )
    requests = []
    for index in range(PER_GROUP):
        for group, prefix in enumerate(prefixes):
            question = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6)))
            body = {
                "prompt": f"{prefix} question {index} of group {group}: {question}",
                "max_tokens": rng.randint(min_tokens, max_tokens),
                "ignore_eos": True,
                **options[(index + group) % len(options)],
            }
            requests.append(Request(f"g{group}-r{index}", body))
    return requests


async def _stream(session: aiohttp.ClientSession, url: str, request: Request, stop_after: int | None) -> Answer:
    """Read one stream; with ``stop_after`` the client hangs up after that many events, or at once."""
    body = {
        "model": "tiny",
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        # SGLang aborts a stream's id again two seconds after the stream has ended, so no id may be used twice.
        "rid": f"{request.name}-{next(_calls)}",
        **request.body,
    }
    answer, pieces = Answer(), 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if stop_after is not None and pieces >= stop_after:
                break
            if line.startswith(b"data: {"):
                _read_event(request.name, json.loads(line[len(b"data: ") :]), answer)
                pieces += 1
    return answer


def _read_event(name: str, event: dict[str, Any], answer: Answer) -> None:
    if "error" in event:
        raise AssertionError(f"{name}: {event['error']}")
    for choice in event["choices"]:
        answer.text += choice["text"]
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        if choice.get("logprobs"):
            answer.logprobs += choice["logprobs"]["token_logprobs"]
    if usage := event.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


async def _stream_all(
    url: str, requests: list[Request], concurrency: int, stop_after: dict[str, int]
) -> dict[str, Answer]:
    gate = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=240)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(request: Request) -> tuple[str, Answer]:
            async with gate:
                return request.name, await _stream(session, url, request, stop_after.get(request.name))

        return dict(await asyncio.gather(*(one(request) for request in requests)))


def stream_all(
    url: str, requests: list[Request], concurrency: int = 1000, stop_after: dict[str, int] | None = None
) -> dict[str, Answer]:
    """Send all requests at once (or ``concurrency`` at a time) and return their answers by name.

    ``stop_after`` names the requests whose client disconnects, and after how many pieces of their stream.
    """
    return asyncio.run(_stream_all(url, requests, concurrency, stop_after or {}))
