"""One request to a server, which its client may give up: by aborting its id, or by hanging up."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

from feather_sglang.compare.server.client import Address, HttpError, call

_ids = itertools.count()


def body(tokens: Sequence[int], count: int, rid: str | None = None, logprobs: int = 0, stream: bool = False) -> bytes:
    """A request for so many greedy tokens to ``/generate``."""
    content: dict[str, Any] = {
        "input_ids": list(tokens),
        "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
        # SGLang aborts a stream's id again some time after its end, so no id is used twice; and it aborts all ids that
        # begin with the one that is named, so all are of one length.
        "rid": rid or _new_id(),
        "stream": stream,
    }
    if logprobs:
        content |= {"return_logprob": True, "top_logprobs_num": logprobs}
    return json.dumps(content).encode()


async def send(
    address: Address, prompt: Sequence[int], tokens: int, fate: str, after: float, limit: float
) -> dict[str, Any] | str:
    """Send a request; its answer, or what became of it where that is all there is to say.

    Parameters
    ----------
    fate : "finish"; "abort" or "hang up": `after` so many seconds.
    limit : seconds after which a request without an answer is lost.
    """
    rid, hangs_up = _new_id(), fate == "hang up"
    request = body(prompt, tokens, rid, stream=hangs_up)
    giving_up = asyncio.create_task(_abort(address, rid, after)) if fate == "abort" else None
    try:
        answer = await call(address, "/generate", request, after if hangs_up else limit)
    except HttpError as problem:
        # An abort is answered with an error where the request had not begun.
        return "aborted" if fate == "abort" else f"lost ({problem})"[:120]
    except asyncio.TimeoutError:
        return "hung up" if hangs_up else f"lost (no end in {limit:.0f} s)"
    except (OSError, EOFError) as problem:
        return f"lost ({type(problem).__name__})"
    finally:
        if giving_up is not None:
            giving_up.cancel()
            await asyncio.gather(giving_up, return_exceptions=True)
    return "over before it was given up" if hangs_up else answer


def outcome(fate: str, wanted: int, made: int, reason: str | None) -> str:
    """What an answer of `made` tokens says of a request, whose end SGLang gives that `reason`."""
    if reason == "abort" and fate == "abort":
        return "aborted"
    if reason != "length" or made != wanted:
        return f"lost (ended by {reason} after {made} of {wanted} tokens)"
    return "over before it was given up" if fate == "abort" else "answered"


def reason_of(answer: dict[str, Any]) -> str | None:
    """Why SGLang ended the request."""
    return (answer["meta_info"]["finish_reason"] or {}).get("type")


async def _abort(address: Address, rid: str, after: float) -> None:
    await asyncio.sleep(after)
    await call(address, "/abort_request", json.dumps({"rid": rid, "abort_all": False}).encode())


def _new_id() -> str:
    return f"check-{next(_ids):09}"
