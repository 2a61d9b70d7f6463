"""The measurements of an engine at the opening of an admission round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Readings:
    """Rank 0's measurements, on every rank; None where nothing is known yet. All but ``now`` are at least 0.

    Attributes
    ----------
    now
        Its clock, seconds.
    reward
        Decode tokens/s since the last round that was not delayed.
    prefill_seconds
        What a token of prefill takes.
    fixed_seconds
        What a prefill step takes however few its tokens.
    bare_seconds
        What a token of prefill without context takes.
    pair_tokens, step_tokens
        What attention from a new token to an earlier one and what a decode step takes, in tokens of prefill.
    own_seconds
        What lies between two decode steps with prefill between them, beyond the prefilled tokens (``PrefillBound``).
    least_decode_seconds
        The shortest decode step so far.
    """

    now: float
    reward: float | None = None
    prefill_seconds: float | None = None
    fixed_seconds: float | None = None
    bare_seconds: float | None = None
    pair_tokens: float | None = None
    step_tokens: float | None = None
    own_seconds: float | None = None
    least_decode_seconds: float | None = None
