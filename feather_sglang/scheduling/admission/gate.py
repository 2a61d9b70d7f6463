"""The gate: whether a prefill step is worth it now, or those who wait are delayed for a moment.

SGLang runs a prefill step of its own whenever anybody waits and fits. However few tokens it computes, it reads all
weights and launches all kernels, and all running requests wait for that. Where requests arrive one by one with most of
their prompts cached, such steps follow each other. This is the economic order quantity (F. W. Harris, 1913): with
arrivals at a rate r, a prefill step of fixed cost F every T seconds, and B running requests, a second costs those who
wait ``r T / 2`` and those who run ``B F / T``. The sum is least where both are equal, that is, after an interval in
which so many came that

    waiting x T / 2  =  running x F

Ours, not the paper's. A relative is vLLM v0's ``--scheduler-delay-factor``, with a fixed multiple of the last prefill.
"""

from __future__ import annotations

BOUND = 0.1  # seconds, where nobody says otherwise: longer ones bring no more (docs/lab/policies_on_servers.md)


class PrefillDelay:
    """When somebody was admitted last, and the rule.

    Parameters
    ----------
    bound : seconds since then after which nobody is delayed; 0: never.
    """

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self._admitted: float | None = None

    def admitted(self, now: float) -> None:
        """Note a round in which somebody was admitted."""
        self._admitted = now

    def delays(self, now: float, waiting: int, running: int, fixed_seconds: float | None) -> bool:
        """Whether those who wait had better wait for more of them.

        Parameters
        ----------
        now : seconds, on the clock of ``admitted``.
        waiting : requests that could be proposed.
        running : requests in the batch.
        fixed_seconds : what a prefill step takes however few its tokens; None: not known yet.
        """
        if self._admitted is None or fixed_seconds is None or not waiting:
            return False
        since = now - self._admitted  # below 0: the clock was set back
        return 0 <= since < self.bound and waiting * since / 2 < running * fixed_seconds
