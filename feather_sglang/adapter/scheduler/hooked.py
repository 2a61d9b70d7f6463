"""The hooks of one scheduler under a feather policy, where SGLang has no extension points: its methods, wrapped.

==============  =========================================================================================
room            what of SGLang's is wrapped, on this one object
==============  =========================================================================================
``life_cycle``  ``_add_request_to_queue``: a request arrives or comes back
``rounds``      ``policy.calc_priority``, ``_get_new_batch_prefill_raw``, the round's ``adder.add_one_req``
``rows``        ``update_running_batch``, and within it the batch's ``prepare_for_decode``
``meters``      ``process_batch_result``: the reward
==============  =========================================================================================

``calc_priority`` opens a round and leaves an ``AdmissionQueue`` in the queue's place. SGLang's loop draws from it whom
``Admission`` proposes, looks each up in its cache, and asks the round's adder, which asks the rules first.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import AddReqResult

from feather_sglang.adapter.scheduler.state_slots import give_back
from feather_sglang.adapter.wrapping import Wrappings

if TYPE_CHECKING:
    from feather_sglang.adapter.scheduler.feather_scheduler import FeatherScheduler


class AdmissionQueue(list):
    """The waiting queue during one admission round.

    Parameters
    ----------
    admissions
        Gives the requests to the loop that admits them, of which it is handed the adder, and the LoRA adapters of the
        batch, or None.
    loop_code
        Of that loop. Every other reader sees the plain list: SGLang also iterates over the queue for LoRA draining and
        load reports, and asks in no other way that tells them apart.
    """

    def __init__(self, requests: list[Any], admissions: Callable[..., Iterator[Any]], loop_code: Any) -> None:
        super().__init__(requests)
        self._admissions: Callable[..., Iterator[Any]] | None = admissions
        self._loop_code = loop_code

    def __iter__(self) -> Iterator[Any]:
        caller = sys._getframe(1)
        if self._admissions is not None and caller.f_code is self._loop_code:
            admissions, self._admissions = self._admissions, None
            return admissions(caller.f_locals["adder"], caller.f_locals.get("running_loras"))
        return super().__iter__()


class Hooks:
    """Wraps one scheduler's own methods until ``undo``; SGLang's classes stay untouched."""

    def __init__(self, feather: FeatherScheduler) -> None:
        self.feather = feather
        scheduler = feather.scheduler
        self._loop_code = inspect.unwrap(type(scheduler)._get_new_batch_prefill_raw).__code__
        self._adder = Wrappings()  # of this round
        self._wrappings = Wrappings()
        wrap = self._wrappings.wrap
        wrap(scheduler.policy, "calc_priority", self._calc_priority)
        wrap(scheduler, "_add_request_to_queue", self._add_request_to_queue)
        wrap(scheduler, "_get_new_batch_prefill_raw", self._get_new_batch_prefill)
        wrap(scheduler, "update_running_batch", self._update_running_batch)
        if feather.policy is not None and hasattr(scheduler.policy, "waiting_queue_prefix_matched"):
            wrap(scheduler.policy, "waiting_queue_prefix_matched", self._waiting_queue_prefix_matched)
        if feather.policy is not None:  # else nobody learns from what is measured
            wrap(scheduler, "process_batch_result", self._process_batch_result)
        if feather.watches_decisions:
            wrap(scheduler, "get_next_batch_to_run", self._get_next_batch_to_run)

    def undo(self) -> None:
        """Leave the scheduler as SGLang made it."""
        self._wrappings.undo()

    def _add_request_to_queue(self, original: Callable[..., Any], req: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(req, *args, **kwargs)
        queue = self.feather.scheduler.waiting_queue
        if queue and queue[-1] is req:  # else it was rejected
            self.feather.life_cycle.queued(req)
        return result

    def _get_new_batch_prefill(
        self, original: Callable[..., Any], *args: Any, running_batch: Any, **kwargs: Any
    ) -> Any:
        scheduler, rounds = self.feather.scheduler, self.feather.rounds
        if not rounds.begin(running_batch):
            return None, running_batch
        batch = None
        try:
            plan = original(*args, running_batch=running_batch, **kwargs)
            batch = plan[0]
            return plan
        finally:
            self._adder.undo()
            if isinstance(scheduler.waiting_queue, AdmissionQueue):
                scheduler.waiting_queue = list(list.__iter__(scheduler.waiting_queue))
            rounds.end(batch)

    def _calc_priority(
        self, original: Callable[..., Any], waiting_queue: list[Any], running_batch: Any = None, **kwargs: Any
    ) -> None:
        opened = self.feather.rounds.open(running_batch)
        if not opened or self.feather.policy is None:
            original(waiting_queue, running_batch, **kwargs)
        else:
            self.feather.rounds.use_prefixes(waiting_queue)
        if opened:
            self.feather.scheduler.waiting_queue = AdmissionQueue(waiting_queue, self._propose, self._loop_code)

    def _waiting_queue_prefix_matched(self, original: Callable[..., Any], waiting_queue: list[Any]) -> bool:
        return self.feather.rounds.count_prefixes() or original(waiting_queue)

    def _propose(self, adder: Any, adapters: set[Any] | None) -> Iterator[Any]:
        self._adder.wrap(adder, "add_one_req", functools.partial(self._add_one_req, adder))
        proposed = self.feather.rounds.propose(list.__iter__(self.feather.scheduler.waiting_queue), adder)
        return proposed if adapters is None else self._with_adapters(proposed, adder, adapters)

    @staticmethod
    def _with_adapters(proposed: Iterator[Any], adder: Any, adapters: set[Any]) -> Iterator[Any]:
        """Take back the adapters of deferred requests, which SGLang's loop takes for admitted ones."""
        for req in proposed:
            before = set(adapters)
            yield req
            if not (adder.can_run_list and adder.can_run_list[-1] is req):
                adapters &= before

    def _add_one_req(self, adder: Any, original: Callable[..., Any], req: Any, *args: Any, **kwargs: Any) -> Any:
        result = self.feather.rounds.judge(req)
        if result is None:
            result = original(req, *args, **kwargs)
            if adder.can_run_list and adder.can_run_list[-1] is req:
                self.feather.rounds.admitted(req)
        elif result is AddReqResult.CONTINUE:
            give_back(req, self.feather.scheduler.req_to_token_pool)
        return result

    def _update_running_batch(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        # After SGLang has dropped what finished and retracted (which sorts the rest by length), and before it
        # allocates the step's tokens row by row: so the batch's own method is wrapped for the call.
        wrappings = Wrappings()
        wrappings.wrap(batch, "prepare_for_decode", functools.partial(self._prepare_for_decode, batch))
        try:
            return original(batch, *args, **kwargs)
        finally:
            wrappings.undo()

    def _prepare_for_decode(self, batch: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.feather.rows.order(batch)
        return original(*args, **kwargs)

    def _process_batch_result(self, original: Callable[..., Any], batch: Any, result: Any, *args: Any) -> Any:
        self.feather.meters.step_ending(batch)
        processed = original(batch, result, *args)
        self.feather.meters.step_ended(batch)
        return processed

    def _get_next_batch_to_run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        plan = original(*args, **kwargs)
        self.feather.decided(plan.running_batch, plan.batch_to_run)
        return plan
