"""A wrapper around one of SGLang's attention backends, to which it delegates what it does not override."""

from __future__ import annotations

from typing import Any


class AroundBackend:
    """An attention backend that delegates to one of SGLang's whatever a subclass does not define.

    SGLang asks for its backends' classes, too: by them it decides whether to capture a draft model's pass over verified
    tokens in CUDA graphs (0.5.17 does not with fa3, 0.5.23 does), and lets the tokens of an image see each other.
    """

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # which `isinstance` asks after the type itself
        return type(self._stock)
