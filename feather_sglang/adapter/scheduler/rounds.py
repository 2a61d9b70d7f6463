"""Admission rounds: SGLang's loop over its waiting queue, request by request.

``calc_priority`` opens a round and leaves an ``AdmissionQueue`` in the queue's place. SGLang's loop draws from it whom
``Admission`` proposes, looks each up in its cache, and asks the round's adder, which asks the rules first. STOP ends
the iteration and nothing else; only ``KV_BUDGET`` lets SGLang mark the batch full, as its own budgets do.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult

from feather_sglang.adapter.scheduler.guard import Guard
from feather_sglang.adapter.scheduler.life_cycle import LifeCycle, cached_tokens, total_tokens
from feather_sglang.adapter.scheduler.meters import Meters
from feather_sglang.adapter.wrapping import Wrappings
from feather_sglang.scheduling.admission.admission import Admission
from feather_sglang.scheduling.admission.verdict import Batch, Proposal, Verdict

# A deferred request leaves the loop to the next one; where memory is the reason SGLang ends it.
_RESULTS = {Verdict.KV_BUDGET: AddReqResult.NO_TOKEN}


class AdmissionQueue(list):
    """The waiting queue during one admission round.

    Parameters
    ----------
    admissions
        Gives the requests to the loop that admits them, of which it is handed the adder.
    loop_code
        Of that loop. Every other reader sees the plain list: SGLang also iterates over the queue for LoRA draining and
        load reports, and asks in no other way that tells them apart.
    """

    def __init__(self, requests: list[Any], admissions: Callable[[Any], Iterator[Any]], loop_code: Any) -> None:
        super().__init__(requests)
        self._admissions: Callable[[Any], Iterator[Any]] | None = admissions
        self._loop_code = loop_code

    def __iter__(self) -> Iterator[Any]:
        caller = sys._getframe(1)
        if self._admissions is not None and caller.f_code is self._loop_code:
            admissions, self._admissions = self._admissions, None
            return admissions(caller.f_locals["adder"])
        return super().__iter__()


class AdmissionRounds:
    """Leads SGLang's admission loop."""

    def __init__(
        self, scheduler: Any, admission: Admission, life_cycle: LifeCycle, meters: Meters, guard: Guard
    ) -> None:
        self.scheduler = scheduler
        self.admission = admission
        self.life_cycle = life_cycle
        self.meters = meters
        self.guard = guard
        self._loop_code = inspect.unwrap(type(scheduler)._get_new_batch_prefill_raw).__code__
        self._adder = Wrappings()  # of this round
        self._running_rows = self._computed_tokens = 0

    def get_new_batch_prefill(self, original: Callable[..., Any], *args: Any, running_batch: Any, **kwargs: Any) -> Any:
        """One round, if SGLang opens one; around its ``_get_new_batch_prefill_raw``."""
        if self.admission.state.deferrals.in_flight and not self.guard.failed:
            # Else a batch that had no room for somebody else's prefix would be closed, until a request leaves it, to
            # those whose prefix has been computed since.
            running_batch.batch_is_full = False
        try:
            plan = original(*args, running_batch=running_batch, **kwargs)
            if plan[0] is not None:
                self.meters.batch_changes()
            return plan
        finally:
            self._adder.undo()
            if isinstance(self.scheduler.waiting_queue, AdmissionQueue):
                self.scheduler.waiting_queue = list(list.__iter__(self.scheduler.waiting_queue))
            if not self.guard.failed:
                with self.guard("an admission round could not be closed"):
                    self.admission.close_round()

    def calc_priority(
        self, original: Callable[..., Any], waiting_queue: list[Any], running_batch: Any = None, **kwargs: Any
    ) -> None:
        """Open a round; who leaves admission to SGLang lets it sort the queue, too."""
        opened = False
        if not self.guard.failed:
            with self.guard("an admission round could not be opened"):
                self._open(running_batch)
                opened = True
        if not opened or self.admission.policy is None:
            original(waiting_queue, running_batch, **kwargs)
        if opened:
            self.scheduler.waiting_queue = AdmissionQueue(waiting_queue, self._admissions, self._loop_code)

    def _open(self, running_batch: Any) -> None:
        self._running_rows, self._computed_tokens = len(running_batch.reqs), 0
        self.life_cycle.synchronise(running_batch.reqs)
        self.life_cycle.note_computed()
        chunked = self.scheduler.chunked_req
        pending = 0 if chunked is None else max(1, total_tokens(chunked) - cached_tokens(chunked))
        self.admission.open_round(self.meters.readings(), pending_tokens=pending)
        if not self.admission.round.delayed:
            self.meters.decode.take()

    def _admissions(self, adder: Any) -> Iterator[Any]:
        """Requests in the order they are proposed, until nobody is or SGLang's budgets end the loop."""
        admission, scheduler = self.admission, self.scheduler
        self._adder.wrap(adder, "add_one_req", functools.partial(self._add_one_req, adder))
        if admission.policy is None:
            yield from list.__iter__(scheduler.waiting_queue)
            return
        room = scheduler.get_num_allocatable_reqs(self._running_rows)
        while not self.guard.failed:
            with self.guard("no request could be proposed"):
                # Of the KV pool: free or evictable, and not promised to running requests.
                headroom = max(0.0, adder.rem_total_tokens / scheduler.max_total_num_tokens)
                rid = admission.propose(Batch(len(admission.tree.active), headroom, len(adder.can_run_list) < room))
                if rid is None:
                    return
                yield self.life_cycle.requests[rid]
                if admission.round.open_proposal is not None:
                    admission.settle(rid, Verdict.ENGINE)
        yield from [req for req in list.__iter__(scheduler.waiting_queue) if req not in adder.can_run_list]

    def _add_one_req(self, adder: Any, original: Callable[..., Any], req: Any, *args: Any, **kwargs: Any) -> Any:
        """Ask the rules, then SGLang's budgets; around the round's ``PrefillAdder.add_one_req``."""
        if not self.guard.failed and self.admission.policy is not None:
            with self.guard("a proposed request could not be judged"):
                verdict = self.check(req)
                if verdict is not Verdict.ADMIT:
                    return _RESULTS.get(verdict, AddReqResult.CONTINUE)
        result = original(req, *args, **kwargs)
        if not self.guard.failed and adder.can_run_list and adder.can_run_list[-1] is req:
            with self.guard("an admission could not be noted"):
                self.admission.settle(req.rid, Verdict.ADMIT, cached_tokens(req))
                self.life_cycle.admitted(req)
                self._computed_tokens += total_tokens(req) - cached_tokens(req)
        return result

    def check(self, req: Any) -> Verdict:
        """What the rules say of a proposed request that SGLang has looked up."""
        # What a hierarchical cache has on the host is not in its place yet, but will not be computed.
        cached = cached_tokens(req) + getattr(req, "host_hit_length", 0)
        free = self.scheduler.token_to_kv_pool_allocator.available_size()
        evictable = self.scheduler.tree_cache.evictable_size()
        missing = total_tokens(req) - cached
        return self.admission.check(Proposal(req.rid, cached, missing, free - self._computed_tokens, free + evictable))
