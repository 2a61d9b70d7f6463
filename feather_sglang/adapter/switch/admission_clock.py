"""Processor time of admission in one SGLang scheduler, measured alike under every schedule policy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from feather_sglang.adapter.wrapping import Wrappings


class AdmissionClock:
    """Processor time that the scheduler's thread spends on admission.

    That is taking requests into the queue, and admission rounds: ordering the queue, admitting from it, making the
    prefill batch. Looking for a batch where nobody waits or nobody fits is no round; an idle scheduler does it all
    the time. The clock must be installed after a feather policy, so that it lies outside of it.
    """

    def __init__(self) -> None:
        self.rounds = 0  # how often the queue was ordered
        self.seconds = 0.0
        self._in_round = False
        self._wrappings = Wrappings()

    def install(self, scheduler: Any) -> None:
        """Begin to count and time, around whatever policy is in force."""
        self._wrappings.wrap(scheduler.policy, "calc_priority", self._count)
        self._wrappings.wrap(scheduler, "_get_new_batch_prefill_raw", self._time_round)
        self._wrappings.wrap(scheduler, "_add_request_to_queue", self._time_arrival)

    def uninstall(self) -> None:
        """Leave the scheduler as it was."""
        self._wrappings.undo()

    def _count(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.rounds += 1
        return original(*args, **kwargs)

    def _time_round(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rounds, self._in_round = self.rounds, True
        start = time.thread_time()
        try:
            return original(*args, **kwargs)
        finally:
            self._in_round = False
            if self.rounds > rounds:
                self.seconds += time.thread_time() - start

    def _time_arrival(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._in_round:  # a round puts a preempted request back: its time is the round's
            return original(*args, **kwargs)
        start = time.thread_time()
        try:
            return original(*args, **kwargs)
        finally:
            self.seconds += time.thread_time() - start
