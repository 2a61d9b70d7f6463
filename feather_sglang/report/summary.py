"""The figures of one run that an operator compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any, NamedTuple

import numpy as np

RESULTS_VERSION = 1  # of the files that have summaries


class Figure(NamedTuple):
    """A figure in a table: its field, name, format, and whether more is better (None: neither)."""

    field: str
    name: str
    form: str
    more_is_better: bool | None = None


def _shown(name: str, form: str, more_is_better: bool | None = None, default: Any = None) -> Any:
    """A field, and how tables show it."""
    return field(default=default, metadata={"name": name, "form": form, "more_is_better": more_is_better})


@dataclass(frozen=True)
class RunSummary:
    """A run of one policy; figures that it did not measure are None. Times in seconds unless named otherwise.

    `kv_mean` and `kv_peak` are shares of the KV pool that running requests hold, `admission_share` is admission's
    processor time over the run's time, `admission_us` that of one admission round; `gpu_busy` is the share of the run
    in which anything ran on the GPU, `dram_use` the share of its DRAM's bandwidth that was used, `sm_ghz` the clock of
    its multiprocessors and `watt` what it drew, in the mean. `slo_share` of the requests met the SLO, `goodput` of them
    a second, and `slo_missed_*` came to their end above that bound; `slowdown_*` is the time to the first token over
    what the request takes alone on an idle server.
    `imbalance` is the GPU time of the busiest of several replicas over their mean.
    """

    policy: str
    requests: int
    output_tok_s: float = _shown("output tok/s", "{:,.0f}", True, default=MISSING)
    ttft_mean: float | None = _shown("TTFT mean s", "{:.2f}", False)
    ttft_p50: float | None = _shown("TTFT p50 s", "{:.2f}", False)
    ttft_p99: float | None = _shown("TTFT p99 s", "{:.2f}", False)
    tbt_mean_ms: float | None = _shown("TBT mean ms", "{:.1f}", False)
    tbt_p50_ms: float | None = _shown("TBT p50 ms", "{:.1f}", False)
    tbt_p99_ms: float | None = _shown("TBT p99 ms", "{:.1f}", False)
    e2e_mean: float | None = _shown("E2E mean s", "{:.2f}", False)
    e2e_p50: float | None = _shown("E2E p50 s", "{:.2f}", False)
    e2e_p99: float | None = _shown("E2E p99 s", "{:.2f}", False)
    mean_batch: float | None = _shown("mean batch", "{:.0f}")
    cache_hit: float | None = _shown("cache hit", "{:.1%}", True)
    scheduler_share: float | None = _shown("scheduler CPU", "{:.1%}", False)
    max_wait: float | None = _shown("max wait s", "{:.1f}", False)
    retractions: float | None = _shown("retractions", "{:,.0f}", False)
    stops: float | None = _shown("stops", "{:,.0f}")
    makespan: float | None = None
    kv_mean: float | None = _shown("KV use mean", "{:.0%}")
    kv_peak: float | None = _shown("KV use peak", "{:.0%}")
    admission_share: float | None = _shown("admission CPU", "{:.1%}", False)
    admission_us: float | None = _shown("admission us/round", "{:,.0f}", False)
    gpu_busy: float | None = _shown("GPU busy", "{:.1%}")
    dram_use: float | None = _shown("DRAM bandwidth used", "{:.0%}")
    sm_ghz: float | None = _shown("GPU clock GHz", "{:.2f}")
    watt: float | None = _shown("GPU power W", "{:.0f}")
    slo_share: float | None = _shown("within the SLO", "{:.1%}", True)
    slo_missed_ttft: float | None = _shown("TTFT bound missed", "{:.1%}", False)
    slo_missed_tbt: float | None = _shown("TBT bound missed", "{:.1%}", False)
    slo_missed_tpot: float | None = _shown("TPOT bound missed", "{:.1%}", False)
    goodput: float | None = _shown("goodput requests/s", "{:.2f}", True)
    slowdown_p50: float | None = _shown("TTFT slowdown p50", "{:.1f}x", False)
    slowdown_p99: float | None = _shown("TTFT slowdown p99", "{:.1f}x", False)
    imbalance: float | None = _shown("imbalance", "{:.2f}x", False)

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
            **_spread("ttft_{}", first),
            **_spread("tbt_{}_ms", gaps, 1e3),
            **_spread("e2e_{}", total),
            mean_batch=float((rows * seconds).sum() / seconds.sum()) if len(rows) else 0.0,
            cache_hit=cached_tokens / input_tokens if input_tokens else 0.0,
            scheduler_share=scheduler_seconds / makespan if makespan else 0.0,
            max_wait=float(first.max()) if len(first) else 0.0,
            retractions=retractions,
            stops=stops,
            makespan=makespan,
        )


def figures(*names: str) -> tuple[Figure, ...]:
    """These fields of ``RunSummary`` as tables show them."""
    known = RunSummary.__dataclass_fields__
    return tuple(Figure(name, **known[name].metadata) for name in names)


def _spread(name: str, values: np.ndarray, scale: float = 1.0) -> dict[str, Any]:
    """Mean, median and 99th percentile by field, times `scale`; 0 of nothing."""
    found = (values.mean(), *np.percentile(values, [50, 99])) if len(values) else (0.0, 0.0, 0.0)
    return {name.format(key): float(value) * scale for key, value in zip(("mean", "p50", "p99"), found, strict=True)}
