"""The figures of a window of time, from what a server's ``/metrics`` said at its two ends."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from feather_sglang.errors import FeatherError

TTFT, TBT = "sglang:time_to_first_token_seconds", "sglang:inter_token_latency_seconds"
TOKENS = "sglang:generation_tokens_total"

# Name and upper bound of a bucket (None where it is none) -> sum over ranks and replicas since the server's start.
Totals = Mapping[tuple[str, float | None], float]


class Shown(NamedTuple):
    """How a figure is shown."""

    name: str
    form: str


FIGURES = {
    "requests/s": Shown("requests/s", "{:,.2f}"),
    "tok/s": Shown("output tok/s", "{:,.0f}"),
    **{f"ttft_{one}": Shown(f"TTFT {one} s", "{:.3f}") for one in ("mean", "p50", "p99")},
    **{f"tbt_{one}": Shown(f"TBT {one} ms", "{:.1f}") for one in ("mean", "p50", "p99")},
}
Figures = dict[str, float | None]


def totals(text: str) -> Totals:
    """Read an answer of ``/metrics``; ``FeatherError`` where it is none of SGLang's."""
    found: dict[tuple[str, float | None], float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith((TTFT, TBT, TOKENS)):
                    found[sample.name, float(sample.labels["le"]) if "le" in sample.labels else None] += sample.value
    except (ValueError, LookupError) as error:
        raise FeatherError(f"/metrics is no text of Prometheus: {error}") from None
    return found


def figures(before: Totals, after: Totals, seconds: float) -> Figures:
    """What happened between two readings, `seconds` apart: a figure is None where nothing tells of it."""
    if any(after.get(key, 0) < value for key, value in before.items()):
        raise FeatherError("the server was started anew while it was watched: its counters went back")
    gained = {key: value - before.get(key, 0) for key, value in after.items()}
    found: Figures = {
        "requests/s": gained.get((f"{TTFT}_count", None), 0) / seconds,
        "tok/s": gained.get((TOKENS, None), 0) / seconds,
    }
    for short, name, scale in (("ttft", TTFT, 1.0), ("tbt", TBT, 1e3)):
        count = gained.get((f"{name}_count", None), 0)
        buckets = {le: value for (one, le), value in gained.items() if one == f"{name}_bucket" and le is not None}
        found[f"{short}_mean"] = gained[f"{name}_sum", None] / count * scale if count else None
        for percent in (50, 99):
            found[f"{short}_p{percent}"] = quantile(buckets, percent / 100) * scale if count else None
    return found


def quantile(buckets: Mapping[float, float], share: float) -> float:
    """Of a histogram's cumulative buckets, as PromQL's ``histogram_quantile`` has it, but inf beyond the last bound."""
    wanted, lower, below = share * max(buckets.values(), default=0.0), 0.0, 0.0
    for upper, count in sorted(buckets.items()):
        if count >= wanted:
            return lower + (upper - lower) * (wanted - below) / (count - below) if upper < math.inf else math.inf
        lower, below = upper, count
    return math.inf
