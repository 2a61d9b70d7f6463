"""A moving mean."""

from __future__ import annotations


def follow(mean: float | None, measured: float, window: int) -> float:
    """The mean with one more measurement, which has 1 / ``window`` of it; None: this is the first."""
    return measured if mean is None else mean + (measured - mean) / window
