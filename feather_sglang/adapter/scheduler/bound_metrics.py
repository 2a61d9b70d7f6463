"""Metrics of the bound between tokens: what is asked, and what is in force."""

from __future__ import annotations

import functools
from typing import NamedTuple

from prometheus_client import Gauge

from feather_sglang.adapter.scheduler.agreement import is_first_rank


class BoundMetrics(NamedTuple):
    """Seconds between two tokens of a request."""

    asked: Gauge
    in_force: Gauge


def bound_metrics() -> BoundMetrics | None:
    """The first rank's metrics; other ranks have none, as all bound the same steps."""
    return _metrics() if is_first_rank() else None


@functools.cache
def _metrics() -> BoundMetrics:
    # A server has one scheduler to a data-parallel rank: the slowest is what a user meets.
    return BoundMetrics(
        Gauge("feather_bound_asked_seconds", "Time between two tokens that is aimed at.", multiprocess_mode="livemax"),
        Gauge(
            "feather_bound_in_force_seconds",
            "The same, or the longest time between two tokens that was launched in the last 10 to 20 s, where the load "
            "does not allow what is aimed at.",
            multiprocess_mode="livemax",
        ),
    )
