"""Logs of requests to an API like OpenAI's, JSON lines: a body with ``messages`` or a ``prompt``, and a time.

The body is the line itself, or its ``body`` or ``request``; the answer is its ``response``, of which ``usage`` is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from feather_sglang.errors import FeatherError
from feather_sglang.replay.formats.found import Format, Found, Source, moment, whole
from feather_sglang.replay.lines import json_rows

_TIMES = ("timestamp", "time", "created_at", "created")


def read(source: Source) -> Iterator[Found]:
    """Its requests; an answer's length is what ``usage`` says, or that of its text, or the request's limit."""
    for where, row in json_rows(source.path, source.notices):
        body, answer = _body(row), _answer(row)
        if body is None:
            raise FeatherError(f"{where}: has neither messages nor a prompt")
        if source.tokenizer is None:
            raise FeatherError(f"{where}: is text, of which blocks are made by a tokenizer: give --tokenizer MODEL")
        try:
            tokens = source.tokenizer.prompt(body)
            ids = source.blocks.of(tokens)
        except FeatherError:
            raise
        except Exception as error:  # a chat template raises whatever it likes
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise FeatherError(f"{where}: the prompt cannot be made into tokens: {reason}") from None
        time = next((part[name] for part in (row, body, answer) for name in _TIMES if part.get(name) is not None), None)
        yield Found(
            where,
            None if time is None else moment(time, where),
            len(tokens),
            _output(row, body, answer, where, source),
            ids,
        )


def _body(row: dict[str, Any]) -> dict[str, Any] | None:
    parts = [row, row.get("body"), row.get("request")]
    parts += [part.get("body") for part in parts if isinstance(part, dict)]
    return next((part for part in parts if isinstance(part, dict) and {"messages", "prompt"} & part.keys()), None)


def _answer(row: dict[str, Any]) -> dict[str, Any]:
    answer = row.get("response")
    inner = answer.get("body", answer) if isinstance(answer, dict) else None
    return inner if isinstance(inner, dict) else {}


def _output(row: dict[str, Any], body: dict[str, Any], answer: dict[str, Any], where: str, source: Source) -> int:
    for part in (row, answer):
        if isinstance(usage := part.get("usage"), dict):
            return whole(usage, "completion_tokens", where)
    for choice in answer.get("choices") or ():
        if not isinstance(choice, dict):
            continue
        message = choice.get("message")
        text = choice.get("text") or (message.get("content") if isinstance(message, dict) else None)
        if isinstance(text, str) and source.tokenizer is not None:
            return len(source.tokenizer.text(text))
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            return whole(body, name, where)
    raise FeatherError(f"{where}: says nothing of the answer's length: no usage, response or max_tokens")


OPENAI = Format("openai", lambda row: _body(row) is not None, read)
