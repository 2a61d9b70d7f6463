"""One run in figures: what an operator compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RunSummary:
    """A run of one policy. Times in seconds unless named otherwise; see ``COLUMNS`` for what each figure means."""

    policy: str
    requests: int
    output_tok_s: float
    ttft_mean: float
    ttft_p99: float
    tbt_mean_ms: float
    tbt_p99_ms: float
    e2e_mean: float
    e2e_p99: float
    mean_batch: float
    cache_hit: float
    scheduler_share: float
    max_wait: float
    retractions: int
    stops: int
    makespan: float

    @classmethod
    def from_times(
        cls,
        policy: str,
        *,
        arrivals: Sequence[float],
        first_tokens: Sequence[float],
        finishes: Sequence[float],
        output_tokens: int,
        input_tokens: int,
        cached_tokens: int,
        token_gaps: Sequence[float],
        batch_rows: Sequence[int],
        batch_seconds: Sequence[float],
        makespan: float,
        scheduler_seconds: float,
        retractions: int = 0,
        stops: int = 0,
    ) -> RunSummary:
        """Summarise a run.

        Parameters
        ----------
        arrivals, first_tokens, finishes : shape [requests], one clock.
        token_gaps : time between successive tokens of a request, all requests together.
        batch_rows, batch_seconds : shape [decode steps]; the mean batch is weighted by time.
        """
        arrived = np.asarray(arrivals, dtype=float)
        first = np.asarray(first_tokens, dtype=float) - arrived
        total = np.asarray(finishes, dtype=float) - arrived
        gaps = np.asarray(token_gaps, dtype=float)
        rows, seconds = np.asarray(batch_rows, dtype=float), np.asarray(batch_seconds, dtype=float)
        return cls(
            policy=policy,
            requests=len(arrived),
            output_tok_s=output_tokens / makespan if makespan else 0.0,
            ttft_mean=_mean(first),
            ttft_p99=_p99(first),
            tbt_mean_ms=_mean(gaps) * 1e3,
            tbt_p99_ms=_p99(gaps) * 1e3,
            e2e_mean=_mean(total),
            e2e_p99=_p99(total),
            mean_batch=float((rows * seconds).sum() / seconds.sum()) if len(rows) else 0.0,
            cache_hit=cached_tokens / input_tokens if input_tokens else 0.0,
            scheduler_share=scheduler_seconds / makespan if makespan else 0.0,
            max_wait=float(first.max()) if len(first) else 0.0,
            retractions=retractions,
            stops=stops,
            makespan=makespan,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``results.json``."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def _p99(values: np.ndarray) -> float:
    return float(np.percentile(values, 99)) if len(values) else 0.0
