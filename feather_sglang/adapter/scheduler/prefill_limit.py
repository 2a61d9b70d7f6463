"""``--feather-tbt``, ``--feather-slo``: SGLang's chunk size in a round, and whether the running batch decodes first.

SGLang reads ``scheduler.chunked_prefill_size`` when it makes the round's ``PrefillAdder``, and the adder counts down
what is left of it. The first is set for the round, the second lowered for a request with much context, whose tokens
take longer.
"""

from __future__ import annotations

from typing import Any

from feather_sglang.adapter.scheduler.life_cycle import cached_tokens, total_tokens
from feather_sglang.scheduling.admission.stand_still import FLOOR_TOKENS, StandStill, chunk_tokens, with_others
from feather_sglang.scheduling.meters.prefill_prices import Load, PrefillPrices
from feather_sglang.scheduling.meters.readings import Readings
from feather_sglang.scheduling.modes.mode import Prefill


class PrefillLimit:
    """The limit of one scheduler's prefill steps while requests decode.

    Attributes
    ----------
    deferrals : int
        Rounds in which the running batch decoded first.
    """

    def __init__(self, scheduler: Any, still: StandStill) -> None:
        self.scheduler = scheduler
        self.still = still
        self.deferrals = 0
        self._full = scheduler.chunked_prefill_size
        page = scheduler.page_size
        least = max(FLOOR_TOKENS, getattr(scheduler, "truncation_align_size", None) or 0)
        # A smaller chunk than the operator's, and of whole pages, as SGLang cuts prompts there.
        self._floor = min(self._full, -(-least // page) * page)
        self._forget_round()

    def _forget_round(self) -> None:
        self._opened: float | None = None  # when the round was
        self._stands = False  # somebody decodes, and stands still during this round's prefill step
        self._prices: PrefillPrices | None = None  # None: the step is not limited by time
        self._seconds = 0.0  # that the step may take
        self._load = Load()  # of those who are in the batch
        self._adder: Any = None
        self._left = 0  # the adder's tokens before the request that it is asked about
        self._withheld = 0  # tokens that this request may not have, and others may

    def wanted(self, running_batch: Any) -> bool:
        """Whether this round needs readings: somebody decodes, and somebody has a prompt to compute."""
        self.still.forget(int(self.scheduler.enable_overlap))
        self._forget_round()
        self._stands = not running_batch.is_prefill_only and any(not req.finished() for req in running_batch.reqs)
        if not self._stands:
            return False
        # Who joins the queue in the middle of a round is not passed a whole chunk.
        self.scheduler.chunked_prefill_size = self._floor
        return bool(self.scheduler.waiting_queue) or self.scheduler.chunked_req is not None

    def begin(self, running_batch: Any, readings: Readings, prefill: Prefill = Prefill.BOUNDED) -> bool:
        """Set the round's chunk size; False lets the running batch decode first."""
        stood, self._opened = readings.stood_seconds or 0.0, readings.now
        if prefill is Prefill.AT_ONCE or (prefill is Prefill.SPACED and self.still.may_stall(stood)):
            self.restore()
            return True
        chunked = self.scheduler.chunked_req
        context = 0 if chunked is None else cached_tokens(chunked)
        room = self.still.room(stood, readings.decode_seconds)
        prices = prices_of(readings)
        alone = self.still.times_alone(stood, prices)
        tokens = 0 if alone else chunk_tokens(room, stood, prices, context, self._floor)
        if not tokens and not self._must_go_on(running_batch):
            self.deferrals += 1
            self.restore()
            self.still.launch(None)
            return False
        tokens = min(self._full, max(tokens, self._floor))
        if prices is not None:
            self._prices = prices
            self._seconds = with_others(room, Load().plus(tokens, context), prices)
        page = self.scheduler.page_size
        self.scheduler.chunked_prefill_size = tokens // page * page
        return True

    def _must_go_on(self, running_batch: Any) -> bool:
        """Whether a decode step would take memory that a half-computed prompt needs: SGLang made sure of it only once.

        Without a bound no step comes between the chunks, and SGLang ends the server where a chunk finds no memory.
        """
        scheduler, chunked = self.scheduler, self.scheduler.chunked_req
        if chunked is None:
            return False
        page = scheduler.page_size
        rest = (total_tokens(chunked) - cached_tokens(chunked) + page) // page * page
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        return bool(free - running_batch.new_tokens_required_next_decode() < rest)

    def open(self, adder: Any) -> None:
        """Note the round's adder, which may hold the next chunk of a prompt by now."""
        self._adder, chunked = adder, self.scheduler.chunked_req
        if self._prices is not None and adder.can_run_list:
            first = chunked if chunked is not None else adder.can_run_list[0]
            tokens = self.scheduler.chunked_prefill_size - adder.rem_chunk_tokens
            self._load = Load().plus(tokens, cached_tokens(first))

    def allow(self, req: Any) -> bool:
        """Lower what is left of the chunk to what a proposed request may have in time; False: nothing."""
        adder = self._adder
        if self._prices is None or adder is None:
            return True
        tokens = self._prices.tokens(self._seconds, cached_tokens(req), self._load)
        if not adder.can_run_list:
            tokens = max(tokens, self._floor)
        page = self.scheduler.page_size
        self._left = min(adder.rem_chunk_tokens, tokens // page * page)
        self._withheld, adder.rem_chunk_tokens = adder.rem_chunk_tokens - self._left, self._left
        return self._left > 0

    def admitted(self, req: Any) -> None:
        """Count what a request takes that is in the batch now."""
        adder = self._adder
        if self._prices is not None and adder is not None:
            self._load = self._load.plus(self._left - adder.rem_chunk_tokens, cached_tokens(req))
            if adder.new_chunked_req is None:  # else nobody may follow: SGLang knows one such request at a time
                adder.rem_chunk_tokens += self._withheld

    def end(self, new_batch: Any) -> None:
        """The round is over, and ``new_batch`` is launched, or a decode step."""
        if new_batch is None:
            self.still.launch(None)
        elif self._stands:
            said = 0.0 if self._prices is None else self._prices.step(self._load)
            self.still.launch(said, self._opened)
        else:
            self.still.launch(None)
        self._forget_round()

    def restore(self) -> None:
        """Give SGLang its chunk size back."""
        self.scheduler.chunked_prefill_size = self._full


def prices_of(readings: Readings) -> PrefillPrices | None:
    """What prefill takes by these readings; None: not known yet."""
    fields = Readings._fields
    begin, end = fields.index("start_seconds"), fields.index("pace_seconds")
    return PrefillPrices.of(readings[begin : end + 1])
