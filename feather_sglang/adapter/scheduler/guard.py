"""Never worse than off: an exception inside feather is logged once and counted, and the scheduler goes on as fcfs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from prometheus_client import Counter

logger = logging.getLogger(__name__)


@functools.cache
def failure_counter() -> Counter:
    """Metric: run-time failures after which a scheduler went on as fcfs."""
    return Counter("feather_policy_failures", "Run-time failures of a feather policy; the scheduler goes on as fcfs.")


class Guard:
    """Of one scheduler.

    Attributes
    ----------
    failed : bool
        Whether anything inside has failed: feather does nothing more.
    reason : str
        What failed first; empty if nothing did.
    """

    def __init__(self) -> None:
        self.failed = False
        self.reason = ""

    def fail(self, what: str, error: BaseException) -> None:
        """Log a failure, count it, and go on as fcfs; only the first one counts."""
        if not self.failed:
            self.failed = True
            self.reason = f"{what}: {error!r}"
            failure_counter().inc()
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
            try:
                return method(self, *args)
            except Exception as error:
                self.guard.fail(what, error)
                return otherwise

        return run

    return decorate
