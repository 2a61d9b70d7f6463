"""The errors a user can cause: each message says what is wrong, where, and what to do."""

from __future__ import annotations


class BuildError(RuntimeError):
    """A kernel could not be built or found: a missing compiler, missing headers, an unsupported GPU."""


class PlanError(ValueError):
    """A batch that cannot be planned, or a plan that does not fit what it is used with."""
