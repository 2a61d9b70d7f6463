"""Metrics of a feather policy, which exist from the start of a server; ``--enable-metrics`` exposes them.

The policy counts in plain attributes; they are written at the end of an admission round, at most twice a second.
"""

from __future__ import annotations

import functools
import json
import time
from typing import Any

from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.adapter.scheduler.agreement import is_first_rank
from feather_sglang.scheduling.admission.admission import Admission

WRITE_EVERY_SECONDS = 0.5


class _Written:
    """The metrics, created once in a process."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram  # see `guard.failure_counter`

        worst: dict[str, Any] = {"multiprocess_mode": "livemax"}  # of a server's schedulers, which are one to a replica
        self.info = Gauge(
            "feather_policy_info",
            "1 for the feather policy in force, with its options that are not the defaults; 0 for earlier ones.",
            ["policy", "options"],
            **worst,
        )
        self.decisions = Counter(
            "feather_decisions",
            "Requests and admission rounds, by the `decision` about them; docs/reference/metrics.md has its values.",
            ["decision"],
        )
        self.wait = Histogram(
            "feather_wait_seconds",
            "Time that an admitted request waited, from the first admission round after its arrival on.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 2, 5, 10, 20, 30, 60, 120, 300),
        )
        self.round = Histogram(
            "feather_round_seconds",
            "Time that the policy takes in an admission round; SGLang's own work in the round is not included.",
            buckets=(20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3),
        )
        self.groups = Gauge(
            "feather_running_groups",
            "Prefix groups in the running batch: requests whose first 64 tokens are equal are in one group.",
            multiprocess_mode="livesum",
        )
        self.overtaken = Gauge(
            "feather_overtaken_tokens",
            "Work of later requests that were admitted before the oldest waiting request, in tokens of prefill.",
            **worst,
        )
        self.overtaking = Gauge(
            "feather_overtaking_ratio",
            "`feather_overtaken_tokens` over its bound (`--feather-max-overtaking`); 1 is the bound.",
            **worst,
        )
        self.asked = Gauge(
            "feather_bound_asked_seconds",
            "Time between two tokens that `--feather-tbt` or `--feather-slo` aims at; 0 without them.",
            **worst,
        )
        self.in_force = Gauge(
            "feather_bound_in_force_seconds",
            "The longest time between two tokens that was planned in the last 10 to 20 s, and at least "
            "`feather_bound_asked_seconds`; 0 without a bound.",
            **worst,
        )


_written = functools.cache(_Written)


class PolicyMetrics:
    """The metrics of one scheduler under one policy.

    Attributes
    ----------
    waits, rounds : lists of float
        Seconds since the last writing: of requests until they were admitted, and of the policy in admission rounds.
    """

    def __init__(self, policy: str, options: FeatherOptions) -> None:
        self.waits: list[float] = []
        self.rounds: list[float] = []
        usual = FeatherOptions().of_policy()
        changed = {name: value for name, value in options.of_policy().items() if value != usual[name]}
        self._info = _written().info.labels(policy, json.dumps(changed))
        self._info.set(1)
        self._counted: dict[str, int] = {}
        self._due = 0.0

    def write(self, admission: Admission, decoded_first: int) -> None:
        """Write what has changed, unless that was done a moment ago."""
        if (now := time.monotonic()) < self._due:
            return
        self._due, written, stats = now + WRITE_EVERY_SECONDS, _written(), admission.stats()
        counts = {
            "admitted": self._counted.get("admitted", 0) + len(self.waits),
            "overdue": stats["overdue_admissions"],
            **stats["deferrals"],
            "stop": stats["stops"],
            "delayed_round": stats["delayed_rounds"],
            "decode_first": decoded_first,
        }
        for name, count in counts.items():
            written.decisions.labels(name).inc(count - self._counted.get(name, 0))
        self._counted = counts
        for histogram, seconds in ((written.wait, self.waits), (written.round, self.rounds)):
            for each in seconds:
                histogram.observe(each)
            seconds.clear()
        self._show(admission.tree.active_groups, *admission.overtaken())

    @staticmethod
    def _show(groups: int, overtaken: float, bound: float) -> None:
        written = _written()
        written.groups.set(groups)
        written.overtaken.set(overtaken)
        written.overtaking.set(overtaken / bound)

    def end(self) -> None:
        """Another policy takes over, and bounds nothing of this one's."""
        self._info.set(0)
        self._show(0, 0.0, 1.0)
        for gauge in (_written().asked, _written().in_force):
            gauge.set(0)


def bound_gauges() -> tuple[Any, Any] | None:
    """Of the time between two tokens: asked, in force; None on other ranks, as all bound the same steps."""
    return (_written().asked, _written().in_force) if is_first_rank() else None
