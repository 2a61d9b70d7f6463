"""Admission rounds: SGLang's loop over its waiting queue, request by request.

A round opens before SGLang orders its queue. Its loop then draws from ``propose`` whom ``Admission`` proposes, looks
each up in its cache, and asks ``judge`` before its own budgets. STOP ends the iteration and nothing else; only
``KV_BUDGET`` lets SGLang mark the batch full, as its own budgets do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult

from feather_sglang.adapter.scheduler.guard import Guard, guarded
from feather_sglang.adapter.scheduler.life_cycle import LifeCycle, cached_tokens, total_tokens
from feather_sglang.adapter.scheduler.meters import Meters
from feather_sglang.adapter.scheduler.metrics import PolicyMetrics
from feather_sglang.adapter.scheduler.prefill_limit import PrefillLimit
from feather_sglang.adapter.scheduler.waiting_prefixes import WaitingPrefixes
from feather_sglang.scheduling.admission.admission import Admission
from feather_sglang.scheduling.admission.types import Batch, Proposal, Verdict
from feather_sglang.scheduling.meters.readings import Readings

# A deferred request leaves the loop to the next one; where memory is the reason SGLang ends it.
_RESULTS = {Verdict.KV_BUDGET: AddReqResult.NO_TOKEN}


class AdmissionRounds:
    """Leads SGLang's admission loop.

    Parameters
    ----------
    limit
        Of prefill while requests decode; None: there is none.
    metrics
        None: another rank has them.
    """

    def __init__(
        self,
        scheduler: Any,
        admission: Admission,
        life_cycle: LifeCycle,
        meters: Meters,
        guard: Guard,
        limit: PrefillLimit | None = None,
        metrics: PolicyMetrics | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.admission = admission
        self.life_cycle = life_cycle
        self.meters = meters
        self.guard = guard
        self.limit = limit
        self.metrics = metrics
        self.prefixes = WaitingPrefixes(scheduler, admission)
        self._readings: Readings | None = None  # where this round needed them before it opened
        self._running_rows = self._computed_tokens = 0
        self._opened: float | None = None  # what the guard had measured when this round was opened, if one was

    def begin(self, running_batch: Any) -> bool:
        """SGLang is about to look for a prefill batch; False lets the running batch decode first.

        It does not look where the running batch is marked full.
        """
        if self.admission.in_flight and not self.guard.failed:
            # Else a batch that had no room for somebody else's prefix would be closed, until a request leaves it, to
            # those whose prefix has been computed since.
            running_batch.batch_is_full = False
        self._readings = None
        if self.limit is None:
            return True
        begun = self._begin(self.limit, running_batch)
        if begun is None:
            self.limit.restore()
        return begun is not False

    @guarded("prefill could not be bounded")
    def _begin(self, limit: PrefillLimit, running_batch: Any) -> bool:
        if not limit.wanted(running_batch):
            return True
        self._readings = readings = self.meters.readings()
        return limit.begin(running_batch, readings)

    @guarded("an admission round could not be opened", False)
    def open(self, running_batch: Any) -> bool:
        """Open a round; False where feather has failed, and SGLang admits."""
        self._running_rows, self._computed_tokens = len(running_batch.reqs), 0
        self._opened = self.guard.seconds
        self.life_cycle.synchronise(running_batch.reqs)
        self.life_cycle.computed()
        chunked = self.scheduler.chunked_req
        pending = 0 if chunked is None else max(1, total_tokens(chunked) - cached_tokens(chunked))
        readings = self._readings
        if readings is None:
            readings = self.meters.readings()
        if self.admission.open_round(readings, pending_tokens=pending):
            self.meters.reward_paid()
        return True

    @guarded("the prefixes of waiting requests could not be used")
    def use_prefixes(self, queue: list[Any]) -> None:
        """Keep the prefixes of those who wait in the cache, as SGLang's own policies do."""
        self.prefixes.use(queue)

    @guarded("the prefixes of waiting requests could not be counted", False)
    def count_prefixes(self) -> bool:
        """Whether each request that waits says how much of its prompt is cached."""
        self.prefixes.count()
        return True

    def propose(self, queue: Iterable[Any], adder: Any) -> Iterator[Any]:
        """Requests in the order they are proposed, until nobody is or SGLang's budgets end the loop.

        Parameters
        ----------
        queue : SGLang's, in its order.
        adder : PrefillAdder
            Of this round.
        """
        if self.admission.policy is None:
            yield from queue
            return
        room = self.scheduler.get_num_allocatable_reqs(self._running_rows)
        if self.limit is not None:
            self._bound(self.limit, adder)
        while (req := self._next(adder, room)) is not None:
            yield req
        if self.guard.failed:
            yield from [req for req in queue if req not in adder.can_run_list]

    @guarded("prefill could not be bounded")
    def _bound(self, limit: PrefillLimit, adder: Any) -> None:
        limit.open(adder)

    @guarded("no request could be proposed")
    def _next(self, adder: Any, room: int) -> Any:
        rid = self.admission.propose(Batch(len(self.admission.running), len(adder.can_run_list) < room))
        return None if rid is None else self.life_cycle.requests[rid]

    @guarded("a proposed request could not be judged")
    def judge(self, req: Any) -> AddReqResult | None:
        """What keeps a proposed request out of the batch; None leaves it to SGLang's budgets."""
        if self.admission.policy is None:
            return None
        # What a hierarchical cache has on the host is not in its place yet, but will not be computed.
        cached = cached_tokens(req) + getattr(req, "host_hit_length", 0)
        free = self.scheduler.token_to_kv_pool_allocator.available_size()
        available = free + self.scheduler.tree_cache.evictable_size()
        missing = total_tokens(req) - cached
        verdict = self.admission.check(Proposal(req.rid, cached, missing, free - self._computed_tokens, available))
        if verdict is not Verdict.ADMIT:
            return _RESULTS.get(verdict, AddReqResult.CONTINUE)
        return None if self.limit is None or self.limit.allow(req) else AddReqResult.OTHER

    @guarded("an admission could not be noted")
    def admitted(self, req: Any) -> None:
        """SGLang has added a request to its prefill batch."""
        cached = cached_tokens(req)
        self.life_cycle.admitted(req, cached)
        if self.metrics is not None:
            self.metrics.waits.append(self.admission.waited(req.rid))
        if self.limit is not None:
            self.limit.admitted(req)
        self._computed_tokens += total_tokens(req) - cached

    def end(self, new_batch: Any) -> None:
        """SGLang has looked, and found ``new_batch`` or None."""
        if self.limit is not None:
            self.limit.restore()
        self._end(new_batch)

    @guarded("an admission round could not be closed")
    def _end(self, new_batch: Any) -> None:
        if self.limit is not None:
            self.limit.end(new_batch)
        if new_batch is not None:
            self.meters.step_launched()
        self.admission.close_round()
        if self.metrics is not None:
            if self._opened is not None:
                self.metrics.rounds.append(self.guard.seconds - self._opened)
                self._opened = None
            self.metrics.write(self.admission, 0 if self.limit is None else self.limit.decoded_first)
