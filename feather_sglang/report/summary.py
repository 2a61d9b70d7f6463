"""One run in figures: what an operator compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESULTS_VERSION = 1  # of the files that have summaries


@dataclass(frozen=True)
class RunSummary:
    """A run of one policy; None is what the run could not tell. Times in seconds unless named otherwise.

    `kv_mean` and `kv_peak` are shares of the KV pool that running requests hold, `admission_share` is admission's
    processor time over the run's time, `admission_us` that of one admission round; `gpu_busy` is the share of the run
    in which anything ran on the GPU, `dram_use` the share of its DRAM's bandwidth that was used, `sm_ghz` the clock of
    its multiprocessors and `watt` what it drew, in the mean. `slo_share` of the requests met the SLO, `goodput` of them
    a second; `slowdown_*` is the time to the first token over what the request takes alone on an idle server.
    """

    policy: str
    requests: int
    output_tok_s: float
    ttft_mean: float | None = None
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    tbt_mean_ms: float | None = None
    tbt_p50_ms: float | None = None
    tbt_p99_ms: float | None = None
    e2e_mean: float | None = None
    e2e_p50: float | None = None
    e2e_p99: float | None = None
    mean_batch: float | None = None
    cache_hit: float | None = None
    scheduler_share: float | None = None
    max_wait: float | None = None
    retractions: float | None = None
    stops: float | None = None
    makespan: float | None = None
    kv_mean: float | None = None
    kv_peak: float | None = None
    admission_share: float | None = None
    admission_us: float | None = None
    gpu_busy: float | None = None
    dram_use: float | None = None
    sm_ghz: float | None = None
    watt: float | None = None
    slo_share: float | None = None
    goodput: float | None = None
    slowdown_p50: float | None = None
    slowdown_p99: float | None = None

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
        token_gaps: Sequence[float] | np.ndarray,
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
            ttft_p50=_percentile(first, 50),
            ttft_p99=_percentile(first, 99),
            tbt_mean_ms=_mean(gaps) * 1e3,
            tbt_p50_ms=_percentile(gaps, 50) * 1e3,
            tbt_p99_ms=_percentile(gaps, 99) * 1e3,
            e2e_mean=_mean(total),
            e2e_p50=_percentile(total, 50),
            e2e_p99=_percentile(total, 99),
            mean_batch=float((rows * seconds).sum() / seconds.sum()) if len(rows) else 0.0,
            cache_hit=cached_tokens / input_tokens if input_tokens else 0.0,
            scheduler_share=scheduler_seconds / makespan if makespan else 0.0,
            max_wait=float(first.max()) if len(first) else 0.0,
            retractions=retractions,
            stops=stops,
            makespan=makespan,
        )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def _percentile(values: np.ndarray, share: float) -> float:
    return float(np.percentile(values, share)) if len(values) else 0.0
