"""The errors a user can cause: each message says what is wrong, where, and what to do."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any


class BuildError(RuntimeError):
    """A kernel could not be built or found: a missing compiler, missing headers, an unsupported GPU."""


class PlanError(ValueError):
    """A batch that cannot be planned, or a plan that does not fit what it is used with."""


def is_whole(value: Any) -> bool:
    """Whether it is an integer, Python's or NumPy's: no float, which would be cut, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is an integer or a float."""
    return isinstance(value, Real) and not isinstance(value, bool)
