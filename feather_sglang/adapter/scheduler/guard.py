"""Never worse than off: an exception inside feather is logged once and counted, and the scheduler goes on as fcfs."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from feather_sglang.adapter.scheduler.agreement import is_first_rank

logger = logging.getLogger(__name__)


@functools.cache
def failure_counter() -> Any:
    """Metric: run-time failures after which a scheduler went on as fcfs."""
    from prometheus_client import Counter  # not before SGLang has said where processes share their metrics

    return Counter("feather_policy_failures", "Run-time failures of a feather policy; the scheduler goes on as fcfs.")


@functools.cache
def failure_gauge() -> Any:
    """Metric: whether a scheduler has gone on as fcfs."""
    from prometheus_client import Gauge

    return Gauge(
        "feather_policy_failed",
        "1 if a feather policy has failed on any rank, so that its scheduler goes on as fcfs; else 0.",
        multiprocess_mode="livemax",
    )


class Guard:
    """The guard of one scheduler.

    Attributes
    ----------
    failed : bool
        Whether anything inside has failed: feather does nothing more.
    reason : str
        What failed first; empty if nothing did.
    seconds : float
        That were spent inside.
    """

    def __init__(self) -> None:
        self.failed = False
        self.reason = ""
        self.seconds = 0.0
        failure_gauge().set(0)
        self._failures = failure_counter() if is_first_rank() else None  # all ranks fail alike, and count as one

    def end(self) -> None:
        """The scheduler goes on under another policy, and no longer as a failed one's fcfs."""
        failure_gauge().set(0)

    def fail(self, what: str, error: BaseException) -> None:
        """Log a failure, count it, and go on as fcfs; only the first one counts."""
        if not self.failed:
            self.failed = True
            self.reason = f"{what}: {error!r}"
            failure_gauge().set(1)
            if self._failures is not None:
                self._failures.inc()
            logger.error("feather: %s (%r); this scheduler goes on as fcfs", what, error, exc_info=error)


def guarded(what: str, otherwise: Any = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method that does nothing once its object's ``guard`` has failed; where it raises, ``what`` is the failure.

    Either way it returns ``otherwise`` then.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(self: Any, *args: Any) -> Any:
            if self.guard.failed:
                return otherwise
            before, start = self.guard.seconds, time.perf_counter()
            try:
                return method(self, *args)
            except Exception as error:
                self.guard.fail(what, error)
                return otherwise
            finally:  # what was called within is counted once
                self.guard.seconds = before + time.perf_counter() - start

        return run

    return decorate
