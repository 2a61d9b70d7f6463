"""The gate: whether a prefill step is worth it now, or those who wait are delayed for a moment.

SGLang runs a prefill step of its own whenever anybody waits and fits. However few tokens it computes, it reads all
weights and launches all kernels, and all running requests wait for that. Where requests arrive one by one with most of
their prompts cached, such steps follow each other. This is the economic order quantity (F. W. Harris, 1913): with
arrivals at a rate r, a prefill step of fixed cost F every T seconds, and B running requests, a second costs those who
wait ``r T / 2`` and those who run ``B F / T``. The sum is least where both are equal, that is, after an interval in
which so many came that

    waiting x T / 2  =  running x F

A round asks once between two steps, and is asked again a step later: about F, since a step reads the same weights. By
then more have come, at the rate of those that came before. So it is delayed only if that is not too late.

By default nobody is delayed where prefill steps take little of the time all the same: where requests come so seldom
that a step for each of them would take less than ``SHARE`` of it.

Ours, not the paper's. A relative is vLLM v0's ``--scheduler-delay-factor``, with a fixed multiple of the last prefill.
"""

from __future__ import annotations

import math

LONGEST = 0.1  # seconds, where nobody says otherwise: longer ones bring no more (docs/lab/policies_on_servers.md)
SHARE = 1 / 3  # of the time, that a prefill step for each request would take beyond its tokens
_SECONDS = 1.0  # over which requests are counted


class PrefillDelay:
    """When somebody was admitted last, how many of late, and the rule.

    Parameters
    ----------
    bound : seconds since then after which nobody is delayed; 0: never.
    share : of the time, that a prefill step for each request would take at least where anybody is delayed.
    """

    def __init__(self, bound: float, share: float = 0.0) -> None:
        self.bound = bound
        self.share = share
        self._admitted: float | None = None
        self._rate = 0.0  # requests a second until then, those of late most

    def admitted(self, now: float) -> None:
        """Note a request that was admitted."""
        self._rate = self._rate_at(now) + 1 / _SECONDS
        self._admitted = now

    def _rate_at(self, now: float) -> float:
        since = 0.0 if self._admitted is None else max(0.0, now - self._admitted)
        return self._rate * math.exp(-since / _SECONDS)

    def delays(self, now: float, waiting: int, running: int, fixed_seconds: float | None) -> bool:
        """Whether those who wait had better wait for more of them.

        Parameters
        ----------
        now : seconds, on the clock of ``admitted``.
        waiting : requests that could be proposed.
        running : requests in the batch.
        fixed_seconds : what a prefill step takes however few its tokens; None: not known yet.
        """
        if self._admitted is None or not fixed_seconds or not waiting:
            return False
        if self._rate_at(now) * fixed_seconds < self.share:
            return False
        since = now - self._admitted  # below 0: the clock was set back
        until_next = since + fixed_seconds
        waiting_then = waiting * until_next / max(since, fixed_seconds)
        return 0 <= since < self.bound and waiting_then * until_next / 2 < running * fixed_seconds
