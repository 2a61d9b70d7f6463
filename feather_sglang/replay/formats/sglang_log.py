"""SGLang's log of requests: ``--log-requests --log-requests-format json``; from level 3 on it has whole prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from feather_sglang.errors import FeatherError
from feather_sglang.replay.formats.found import Format, Found, Source, moment, whole
from feather_sglang.replay.lines import lines


def read(source: Source) -> Iterator[Found]:
    """Its requests as they finished; lines of other kinds are passed over."""
    came: dict[str, float] = {}
    for line in lines(source.path):
        row = parsed(line.text)
        event = row.get("event")
        if event not in ("request.received", "request.finished") or not isinstance(rid := row.get("rid"), str):
            continue
        now = moment(row.get("timestamp"), line.where)
        if event == "request.received":
            came[rid] = now
            continue
        out, obj = row.get("out"), row.get("obj")
        meta = out.get("meta_info") if isinstance(out, dict) else None
        if not isinstance(meta, dict):
            raise FeatherError(f"{line.where}: out: says nothing of lengths (meta_info)")
        latency = meta.get("e2e_latency")
        arrival = came.pop(rid, now - latency if isinstance(latency, (int, float)) else now)
        prompt = whole(meta, "prompt_tokens", line.where)
        ids = _ids(obj if isinstance(obj, dict) else {}, prompt, source)
        yield Found(line.where, arrival, prompt, whole(meta, "completion_tokens", line.where), ids)


def parsed(text: str) -> dict[str, Any]:
    """The object that a line of a log has, behind whatever begins the line; empty where it has none."""
    try:
        row = json.loads(text[max(text.find("{"), 0) :])
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _ids(obj: dict[str, Any], length: int, source: Source) -> tuple[int, ...] | None:
    """Ids of the prompt's blocks, where the log has all of it."""
    tokens, text = obj.get("input_ids"), obj.get("text")
    if isinstance(text, str) and source.tokenizer is not None and not tokens:
        tokens = source.tokenizer.text(text)
    if not isinstance(tokens, list) or len(tokens) != length:
        return None  # none, or cut: what is too long for the log's level has "..." within
    return source.blocks.of(tokens) if all(type(one) is int and 0 <= one < 2**31 for one in tokens) else None


SGLANG_LOG = Format("sglang-log", lambda row: "event" in row and "rid" in row, read)
