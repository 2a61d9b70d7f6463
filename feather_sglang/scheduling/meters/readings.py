"""What an engine has measured when an admission round opens."""

from __future__ import annotations

from typing import NamedTuple


class Readings(NamedTuple):
    """Rank 0's, on every rank; None where nothing is known yet.

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
    pair_tokens, step_tokens
        What attention from a new token to an earlier one and what a decode step takes, in tokens of prefill.
    judged, within
        Requests of which it is known whether they were within the promised bounds, and those that were (``Outcomes``).
    start_seconds, token_seconds, pair_seconds, prefix_seconds
        What a prefill step takes of the GPU, as fitted (``PrefillPrices``).
    host_start_seconds, host_token_seconds, host_pair_seconds, host_prefix_seconds
        Of the host.
    launch_seconds, trusted_tokens, pace_seconds
        Of the host for any step in the mean, how far all that holds, and the pace of the fastest steps.
    stood_seconds, decode_seconds, least_decode_seconds
        How long running requests have stood still for prefill, what a decode step takes just now, and the least that it
        took so far (``StandStill``).
    """

    now: float
    reward: float | None = None
    prefill_seconds: float | None = None
    fixed_seconds: float | None = None
    pair_tokens: float | None = None
    step_tokens: float | None = None
    judged: float | None = None
    within: float | None = None
    start_seconds: float | None = None
    token_seconds: float | None = None
    pair_seconds: float | None = None
    prefix_seconds: float | None = None
    host_start_seconds: float | None = None
    host_token_seconds: float | None = None
    host_pair_seconds: float | None = None
    host_prefix_seconds: float | None = None
    launch_seconds: float | None = None
    trusted_tokens: float | None = None
    pace_seconds: float | None = None
    stood_seconds: float | None = None
    decode_seconds: float | None = None
    least_decode_seconds: float | None = None
