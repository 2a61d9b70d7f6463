"""The one exception a user is meant to read, and how it quotes what the user gave."""

from __future__ import annotations

from typing import Any


class FeatherError(Exception):
    """A mistake the user can mend: says what is wrong, where, and what to do, in one line."""


def quoted(value: Any, most: int = 40) -> str:
    """What the user gave, as Python writes it, and no longer than that: it may have any length."""
    text = repr(value[:most] if isinstance(value, str) else value)
    cut = len(text) > most or (isinstance(value, str) and len(value) > most)
    return f"{text[: most - 3]}..." if cut else text
