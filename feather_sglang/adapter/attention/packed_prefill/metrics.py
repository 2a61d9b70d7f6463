"""Metrics of packed prefill. Tokens are KV tokens of one layer."""

from __future__ import annotations

import functools
from typing import NamedTuple

from prometheus_client import Counter

from feather_sglang.adapter.scheduler.agreement import is_first_rank


class PrefillMetrics(NamedTuple):
    """Counters over all prefill steps."""

    packed: Counter
    left: Counter
    declined: Counter
    attended: Counter
    read: Counter


def prefill_metrics() -> PrefillMetrics | None:
    """The first rank's metrics, as `pat_metrics`."""
    return _metrics() if is_first_rank() else None


@functools.cache
def _metrics() -> PrefillMetrics:
    return PrefillMetrics(
        Counter("feather_pat_prefills", "Prefill steps that were packed (`--feather-pat-prefill`)."),
        Counter("feather_pat_prefills_left", "Prefill steps that SGLang's backend computed for want of memory."),
        Counter("feather_pat_prefills_declined", "Prefill steps that `auto` left to SGLang for want of a gain."),
        Counter("feather_pat_prefill_attended_tokens", "KV tokens that the new tokens of packed prefill attended to."),
        Counter("feather_pat_prefill_read_tokens", "KV tokens that the plans of packed prefill read."),
    )
