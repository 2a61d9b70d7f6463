"""Measurements of a scheduler: decode throughput, the reward, and the price of prefill."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from feather_sglang.adapter.refusals import resolved
from feather_sglang.adapter.scheduler.agreement import Agreement
from feather_sglang.adapter.scheduler.guard import Guard, guarded
from feather_sglang.scheduling.meters.readings import Readings
from feather_sglang.scheduling.meters.steps import StepMeters
from feather_sglang.scheduling.prefill_bound.prefill_bound import OwnTime


class Meters(StepMeters):
    """The meters of one scheduler, read by the time between results.

    Parameters
    ----------
    clock : callable
        Seconds.
    """

    def __init__(self, scheduler: Any, agreement: Agreement, guard: Guard, clock: Callable[[], float]) -> None:
        super().__init__(scheduler.chunked_prefill_size)
        self.scheduler = scheduler
        self.agreement = agreement
        self.guard = guard
        self.clock = clock
        self.own = OwnTime()
        self._drafts = resolved(scheduler.server_args, "speculative_algorithm") is not None
        self._step = False, 0  # whether the step that ends decodes, and its tokens; with drafts, those before it

    @guarded("a step could not be measured")
    def step_ending(self, batch: Any) -> None:
        """SGLang processes a step's result next: a request that has finished gets no token of it."""
        is_decode, tokens = batch.forward_mode.is_decode(), 0
        if is_decode:
            tokens = _made(batch) if self._drafts else sum([not req.finished() for req in batch.reqs])
        self._step = is_decode, tokens

    @guarded("a step could not be measured")
    def step_ended(self, batch: Any) -> None:
        """SGLang has processed a step's result."""
        prefill = self.prefill
        is_decode, tokens = self._step
        if is_decode and self._drafts:
            tokens = _made(batch) - tokens
        new = () if is_decode else batch.extend_lens or ()
        gap = self.ended(self.clock(), tokens, is_decode, new, batch.prefix_lens or ())
        if gap is not None:
            self.own.note(gap, prefill.bare_seconds, prefill.pair_seconds, prefill.fixed_seconds or 0.0)
        # SGLang drops what has finished from the running batch when it forms the next one.
        if all(req.finished() for req in chain(batch.reqs, self.scheduler.running_batch.reqs)):
            prefill.idle()

    @guarded("a step could not be measured")
    def step_launched(self) -> None:
        """A prefill step is launched: a decode step still in flight belongs to the batch before it."""
        self.launched(self.clock(), in_flight=int(self.scheduler.enable_overlap))

    @guarded("a pause could not be left out")
    def resumed(self) -> None:
        """SGLang goes on after a pause, whose time is nobody's."""
        self.decode.restart()
        self.prefill.idle()

    def warmed_up(self, decode_seconds: float) -> None:
        """A replayed server has served its warm-up request, whose decode steps took so long."""
        self.decode.least_seconds = decode_seconds

    def readings(self) -> Readings:
        """Rank 0's, on every rank."""
        return self.agreement.readings(self.measured(self.clock(), self.own.seconds))


def _made(batch: Any) -> int:
    """Tokens that a batch's requests have generated."""
    return sum([len(req.output_ids) for req in batch.reqs])
