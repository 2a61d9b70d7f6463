"""Texts as tokens, and tokens as ids of blocks."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

from feather_sglang.adapter.tokenizer import load_tokenizer


class BlockIds:
    """Names the blocks of prompts: two prompts have equal ids as far as whole blocks of them agree from the start."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._ids: dict[bytes, int] = {}

    def of(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The ids of a prompt's blocks, the last one included."""
        so_far, ids = hashlib.blake2b(digest_size=16), []
        for start in range(0, len(tokens), self.block_size):
            so_far.update(array("q", tokens[start : start + self.block_size]).tobytes())
            ids.append(self._ids.setdefault(so_far.digest(), len(self._ids)))
        return tuple(ids)


class Tokenizer:
    """A model's tokenizer, loaded when a text is there to be read."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loaded: Any = None

    def prompt(self, body: dict[str, Any]) -> list[int]:
        """The tokens of a request's ``messages``, by the model's chat template where it has one, or its ``prompt``."""
        if "messages" not in body:
            return self.text(body["prompt"])
        loaded, messages = self._tokenizer(), body["messages"]
        if getattr(loaded, "chat_template", None):
            tools = body.get("tools")
            text = loaded.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
            return list(loaded.encode(text, add_special_tokens=False))
        return self.text("".join(f"{one.get('role')}: {_content(one)}\n" for one in messages))

    def text(self, text: str | list[int]) -> list[int]:
        """The tokens of a text; what is tokens already stays as it is."""
        return list(self._tokenizer().encode(text)) if isinstance(text, str) else list(text)

    def _tokenizer(self) -> Any:
        if self._loaded is None:
            self._loaded = load_tokenizer(self._name)
        return self._loaded


def _content(message: dict[str, Any]) -> str:
    """The text of a message: a string, or parts, of which some have a text."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
