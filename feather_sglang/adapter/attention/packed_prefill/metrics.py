"""Metrics of packed prefill. Tokens are KV tokens of one layer."""

from __future__ import annotations

import functools

from prometheus_client import Counter

from feather_sglang.adapter.scheduler.agreement import is_first_rank


def count(**numbers: int) -> None:
    """Add to counters by their names, where this is a first rank; others compute the same steps."""
    if is_first_rank():
        for name, number in numbers.items():
            counters()[name].inc(number)


@functools.cache
def counters() -> dict[str, Counter]:
    """All of them, over all prefill steps."""
    return {
        "packed": Counter("feather_pat_prefills", "Prefill steps that were packed (`--feather-pat-prefill`)."),
        "left": Counter(
            "feather_pat_prefills_left", "Prefill steps that SGLang's backend computed, since memory was short."
        ),
        "declined": Counter(
            "feather_pat_prefills_declined", "Prefill steps that `auto` left to SGLang, since it would not pay."
        ),
        "attended": Counter(
            "feather_pat_prefill_attended_tokens", "KV tokens that the new tokens of packed prefill attended to."
        ),
        "read": Counter("feather_pat_prefill_read_tokens", "KV tokens that the plans of packed prefill read."),
    }
