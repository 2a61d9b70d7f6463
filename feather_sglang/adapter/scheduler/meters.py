"""What a scheduler measures of itself: decode throughput, the reward, and the price of prefill."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import chain
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from feather_sglang.adapter.refusals import resolved
from feather_sglang.adapter.scheduler.agreement import Agreement
from feather_sglang.adapter.scheduler.guard import Guard
from feather_sglang.scheduling.admission.stand_still import FLOOR_TOKENS, StandStill
from feather_sglang.scheduling.meters.decode import DecodeMeter
from feather_sglang.scheduling.meters.prefill import PrefillMeter
from feather_sglang.scheduling.meters.prefill_prices import Load, PrefillFit
from feather_sglang.scheduling.meters.readings import Readings
from feather_sglang.scheduling.modes.outcomes import Outcomes


class Meters:
    """The meters of one scheduler, read by the time between results.

    Parameters
    ----------
    clock : callable
        Seconds.
    still
        Told of results where the time that running requests stand still is bounded.
    outcomes
        Told of arrivals and tokens where it counts who is within the bounds.
    """

    def __init__(
        self,
        scheduler: Any,
        agreement: Agreement,
        guard: Guard,
        clock: Callable[[], float],
        still: StandStill | None = None,
        outcomes: Outcomes | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.agreement = agreement
        self.guard = guard
        self.clock = clock
        self.decode = DecodeMeter()
        self.still = still
        self.outcomes = outcomes
        chunk = scheduler.chunked_prefill_size
        # Where chunks are cut, the smallest must tell what a token takes.
        self.prefill = PrefillMeter(chunk if still is None else min(chunk, 2 * FLOOR_TOKENS))
        self.fit = PrefillFit()  # where time is bounded
        self.on_gpu = resolved(scheduler.server_args, "device") == "cuda"
        self._drafts = resolved(scheduler.server_args, "speculative_algorithm") is not None
        self._looked: float | None = None  # when SGLang began to wait for the step that ends
        self._step = False, 0  # whether the step that ends decodes, and its tokens; with drafts, those before it

    def arrived(self, rid: Hashable) -> None:
        """A request has come; what is promised is no matter of SGLang's own, which ask whether it is healthy."""
        if self.outcomes is not None and not str(rid).startswith(HEALTH_CHECK_RID_PREFIX):
            self.outcomes.arrived(rid, self.clock())

    def result_comes(self, batch: Any, result: Any) -> None:
        """SGLang processes a step's result next: a request that has finished gets no token of it."""
        is_decode, tokens = batch.forward_mode.is_decode(), 0
        if is_decode:
            tokens = _made(batch) if self._drafts else sum(not req.finished() for req in batch.reqs)
        self._step = is_decode, tokens
        if self.still is not None:
            self._looked = self.clock()
            self.fit.waited(self._wait(result, self._looked, is_decode))

    def _wait(self, result: Any, looked: float, is_decode: bool) -> float | None:
        """Wait for a step's result, as SGLang does as soon as it processes it; seconds of it that tell whether the GPU
        was the slower, None where nobody knows.

        Without a GPU the engine computes what it launches, and never waits; without overlap it waits for every decode
        step, where it waits at all.
        """
        done = getattr(result, "copy_done", None)
        if done is None or not self.on_gpu:
            return None
        done.synchronize()
        return 0.0 if is_decode and not self.scheduler.enable_overlap else self.clock() - looked

    def result_came(self, batch: Any) -> None:
        """SGLang has processed a step's result."""
        if not self.guard.failed:
            with self.guard("a step could not be measured"):
                is_decode, tokens = self._step
                self._note(batch, is_decode, _made(batch) - tokens if is_decode and self._drafts else tokens)

    def _note(self, batch: Any, is_decode: bool, tokens: int) -> None:
        now = self.clock()
        self.decode.step(now, tokens, is_decode)
        if self.outcomes is not None:
            self._tell(self.outcomes, now, batch, is_decode)
        lens = () if is_decode else batch.extend_lens or ()
        pairs = sum(new * (old + new / 2) for new, old in zip(lens, batch.prefix_lens or (), strict=False))
        seconds = self.prefill.step(now, sum(lens), pairs)
        if self.still is not None:
            if lens:
                self.fit.add(Load(sum(lens), pairs, sum(batch.prefix_lens or ())))
            took = self.still.result(now, is_decode, self._looked)
            if took is None and not self.still.decodes:
                took = seconds or 0.0
            if took is not None:
                self.fit.took(took)
        # SGLang drops what has finished from the running batch when it forms the next one.
        if all(req.finished() for req in chain(batch.reqs, self.scheduler.running_batch.reqs)):
            self.prefill.idle()
            if self.still is not None:
                self.still.idle()
                self.fit.drop()

    def _tell(self, outcomes: Outcomes, now: float, batch: Any, is_decode: bool) -> None:
        """Who has a first token, a further one, and the last."""
        if is_decode:
            outcomes.decoded(now)
        for req in batch.reqs:
            if not is_decode and req.output_ids:
                outcomes.computed(req.rid, now)
            if not req.finished():
                continue
            if req.finished_reason.to_json()["type"] == "abort":
                outcomes.forget(req.rid)
            else:
                outcomes.ended(req.rid, len(req.output_ids))

    def batch_changes(self) -> None:
        """Requests were admitted: a decode step still in flight belongs to the old batch."""
        with self.guard("a step could not be measured"):
            self.decode.restart(in_flight=int(self.scheduler.enable_overlap))
            self.prefill.begin(self.clock())

    def resumed(self) -> None:
        """SGLang goes on after a pause, whose time is nobody's."""
        self.decode.restart()
        self.prefill.idle()
        self.fit.drop()
        if self.still is not None:
            self.still.restart()

    def readings(self) -> Readings:
        """Rank 0's, on every rank."""
        prefill, bare, step = self.prefill, self.prefill.bare_seconds, self.decode.step_seconds
        mine = Readings(
            self.clock(),
            self.decode.rate,
            prefill.seconds_per_token,
            prefill.fixed_seconds,
            prefill.pair_seconds / bare if bare else None,
            step / bare if bare and step is not None else None,
            *((self.outcomes.judged, self.outcomes.within) if self.outcomes is not None else (None, None)),
            *(self.still.readings(self.fit.prices) if self.still is not None else ()),
        )
        return Readings(*self.agreement.readings(*mine))


def _made(batch: Any) -> int:
    """Tokens that a batch's requests have generated."""
    return sum(len(req.output_ids) for req in batch.reqs)
