"""Metrics of the pat backend, made when the backend is."""

from __future__ import annotations

import functools

from prometheus_client import Counter, Gauge, Histogram

from feather_sglang.adapter.scheduler.agreement import is_first_rank


class PatMetrics:
    """Counters over all decode steps. Tokens are KV tokens of one layer."""

    def __init__(self) -> None:
        self.plans = Counter("feather_pat_plans", "Decode steps that were planned anew.")
        self.kept = Counter("feather_pat_plans_kept", "Decode steps that kept the plan of the step before.")
        self.unshared = Counter(
            "feather_pat_plans_unshared",
            "Plans made without sharing, since a plan with sharing did not fit into the memory for partial results.",
        )
        self.seconds = Histogram(
            "feather_pat_plan_seconds",
            "Time to build the prefix forest and the plan of a decode step.",
            buckets=(50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1.6e-3, 3.2e-3, 6.4e-3, 12.8e-3),
        )
        self.attended = Counter(
            "feather_pat_attended_tokens", "KV tokens that the requests of all decode steps attended to."
        )
        self.read = Counter(
            "feather_pat_read_tokens",
            "KV tokens that the decode steps read; a shared one counts once for each tile of query rows that reads it.",
        )
        self.saved = Counter(
            "feather_pat_saved_bytes",
            "Bytes of KV that the first rank's packed layers did not have to read again, since requests share them.",
        )
        self.layers = Gauge(
            "feather_pat_layers",
            "Attention layers of the model, by the `backend` that decodes them.",
            ["backend"],
            multiprocess_mode="livemax",
        )
        self.token_bytes = 0  # of KV in all packed layers of a rank

    def step(self, seconds: float | None, attended: int, read: int) -> None:
        """Count a decode step that took so long to plan, or kept its plan (None), and its tokens."""
        if seconds is None:
            self.kept.inc()
        else:
            self.plans.inc()
            self.seconds.observe(seconds)
        self.attended.inc(attended)
        self.read.inc(read)
        self.saved.inc(max(0, attended - read) * self.token_bytes)


def pat_metrics() -> PatMetrics | None:
    """The first rank's metrics; other ranks have none, as all decode the same batches and SGLang adds up processes.

    One over ``read / attended`` is how often a KV token that is read is used.
    """
    return _metrics() if is_first_rank() else None


_metrics = functools.cache(PatMetrics)
