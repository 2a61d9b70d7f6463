"""Methods of living objects, wrapped until the wrapping is undone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_CLASS = object()  # the object had no attribute of its own: its class's method was in charge


class Wrappings:
    """The wrapped methods, so that ``undo`` leaves each object exactly as it was.

    Several of these may wrap the same method; they must be undone in the reverse order.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, method: str, wrapper: Callable[..., Any]) -> None:
        """Call ``wrapper(original, *args, **kwargs)`` in place of this object's method; its class stays untouched."""
        self._before.append((owner, method, vars(owner).get(method, _CLASS)))
        setattr(owner, method, functools.partial(wrapper, getattr(owner, method)))

    def undo(self) -> None:
        """Put back what was there."""
        while self._before:
            owner, method, before = self._before.pop()
            if before is _CLASS:
                delattr(owner, method)
            else:
                setattr(owner, method, before)
