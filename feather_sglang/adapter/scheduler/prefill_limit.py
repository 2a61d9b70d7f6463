"""``--feather-tbt``, ``--feather-slo``: SGLang's chunk size in a round, and whether the running batch decodes first.

SGLang reads ``scheduler.chunked_prefill_size`` when it makes the round's ``PrefillAdder``, and the adder counts down
what is left of it. The first is set for the round, the second lowered for a request with much context, whose tokens
take longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from feather_sglang.adapter.scheduler.life_cycle import cached_tokens, total_tokens
from feather_sglang.adapter.scheduler.metrics import bound_gauges
from feather_sglang.scheduling.admission.admission import Admission
from feather_sglang.scheduling.meters.readings import Readings
from feather_sglang.scheduling.prefill_bound.prefill_bound import PrefillBound, tokens_for

FLOOR_TOKENS = 512  # of a step: fewer take hardly less time, as its launch takes as long


class PrefillLimit:
    """The limit of one scheduler's prefill steps while requests decode.

    Parameters
    ----------
    clock : callable
        Seconds; this rank's own, as no decision depends on it.

    Attributes
    ----------
    decoded_first : int
        Rounds in which the running batch decoded first.
    """

    def __init__(self, scheduler: Any, admission: Admission, bound: PrefillBound, clock: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.admission = admission
        self.bound = bound
        self.decoded_first = 0
        self._gauges = bound_gauges()
        self._told: tuple[float | None, float | None] | None = None
        self._full = scheduler.chunked_prefill_size
        page = scheduler.page_size
        least = max(FLOOR_TOKENS, getattr(scheduler, "truncation_align_size", None) or 0)
        # A smaller chunk than the operator's, and of whole pages, as SGLang cuts prompts there.
        self._floor = min(self._full, -(-least // page) * page)
        self._decodes = False  # somebody does
        self._planned = 0.0  # work of the round's step, at most
        self._work: float | None = None  # what is left of it; None: no limit
        self._pair_tokens = 0.0
        self._adder: Any = None
        self._left = 0  # the adder's tokens before the request that it is asked about
        self._withheld = 0  # tokens that this request may not have, and others may

    def wanted(self, running_batch: Any) -> bool:
        """Whether this round needs readings: somebody decodes, and somebody has a prompt to compute."""
        self._tell()
        self._work = self._adder = None
        self._decodes = not running_batch.is_prefill_only and any(not req.finished() for req in running_batch.reqs)
        if not self._decodes:
            return False
        # Who joins the queue in the middle of a round is not passed a whole chunk.
        self.scheduler.chunked_prefill_size = self._floor
        return bool(self.scheduler.waiting_queue) or self.scheduler.chunked_req is not None

    def begin(self, running_batch: Any, readings: Readings) -> bool:
        """Set the round's chunk size; False lets the running batch decode first."""
        chunked, known, waiting = self.scheduler.chunked_req, self.bound.look(readings), 0.0
        requests = len(self.scheduler.waiting_queue) + (chunked is not None)
        last = self.scheduler.last_batch
        if last is not None and last.forward_mode.is_decode():
            self.bound.begin_gap()  # in no round of ours, under --prefill-decode-interval
        self._pair_tokens, self._planned = readings.pair_tokens or 0.0, 0.0
        if known:
            waiting = self._waiting(chunked)
            self._planned = self.bound.work(waiting, requests)
        # Little is left of the gap; or a bound that is relative to a decode step is to be timed: two of them in a row.
        due = self.bound.steps and self._planned < min(self._floor, waiting)
        if (due or not known) and not self._must_go_on(running_batch):
            self.decoded_first += 1
            self.bound.begin_gap()
            self.restore()
            return False
        if not known:
            self.restore()
            return True
        if due:  # no decode step can come: the prompt goes on as in a gap of its own
            self.bound.begin_gap()
            self._planned = self.bound.work(waiting, requests)
        self._work = self._planned
        context = 0 if chunked is None else cached_tokens(chunked)
        page = self.scheduler.page_size
        tokens = max(self._floor, tokens_for(self._work, context, self._pair_tokens))
        self.scheduler.chunked_prefill_size = int(min(self._full, tokens)) // page * page
        return True

    def _tell(self) -> None:
        self.bound.tell_in_force(self.clock())
        told = self.bound.asked, self.bound.in_force
        if self._gauges is not None and told != self._told:
            self._told = told
            for gauge, seconds in zip(self._gauges, told, strict=True):
                gauge.set(seconds or 0.0)

    def _waiting(self, chunked: Any) -> float:
        """Work of all that waits; infinite where it does not fit into memory."""
        free, work = self._free_tokens(), 0.0
        if chunked is not None:
            total = total_tokens(chunked)
            rest = total - cached_tokens(chunked)
            free, work = free - rest, self.admission.prefill_work(rest, total)
        return work + self.admission.waiting_work(free)

    def _must_go_on(self, running_batch: Any) -> bool:
        """Whether a decode step would take memory that a half-computed prompt needs: SGLang made sure of it only once.

        Without a bound no step comes between the chunks, and SGLang ends the server where a chunk finds no memory.
        """
        scheduler, chunked = self.scheduler, self.scheduler.chunked_req
        if chunked is None:
            return False
        page = scheduler.page_size
        rest = (total_tokens(chunked) - cached_tokens(chunked) + page) // page * page
        return bool(self._free_tokens() - running_batch.new_tokens_required_next_decode() < rest)

    def _free_tokens(self) -> int:
        """KV tokens that are free, or that the cache would give back."""
        scheduler = self.scheduler
        return int(scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size())

    def open(self, adder: Any) -> None:
        """Note the round's adder, which may hold the next chunk of a prompt by now."""
        self._adder, chunked = adder, self.scheduler.chunked_req
        if self._work is not None and adder.can_run_list:
            first = chunked if chunked is not None else adder.can_run_list[0]
            self._take(self.scheduler.chunked_prefill_size - adder.rem_chunk_tokens, cached_tokens(first))

    def _take(self, tokens: int, context: int) -> None:
        assert self._work is not None
        self._work -= self.admission.prefill_work(tokens, context + tokens)

    def allow(self, req: Any) -> bool:
        """Lower what is left of the chunk to what a proposed request may have in time; False: nothing."""
        adder = self._adder
        if self._work is None or adder is None:
            return True
        tokens = tokens_for(max(0.0, self._work), cached_tokens(req), self._pair_tokens)
        if not adder.can_run_list:
            tokens = max(tokens, self._floor)
        page = self.scheduler.page_size
        self._left = int(min(adder.rem_chunk_tokens, tokens)) // page * page
        self._withheld, adder.rem_chunk_tokens = adder.rem_chunk_tokens - self._left, self._left
        return self._left > 0

    def admitted(self, req: Any) -> None:
        """Count what a request takes that is in the batch now."""
        adder = self._adder
        if self._work is not None and adder is not None:
            self._take(self._left - adder.rem_chunk_tokens, cached_tokens(req))
            if adder.new_chunked_req is None:  # else nobody may follow: SGLang knows one such request at a time
                adder.rem_chunk_tokens += self._withheld

    def end(self, new_batch: Any) -> None:
        """The round is over, and ``new_batch`` is launched, or a decode step."""
        if not self._decodes or new_batch is None:
            self.bound.begin_gap()
        elif self._work is not None:
            self.bound.launched(self._planned - self._work)
        self._adder = None

    def restore(self) -> None:
        """Give SGLang its chunk size back."""
        self.scheduler.chunked_prefill_size = self._full
