"""A feather policy inside one SGLang scheduler: request life cycle, admission rounds, row order, reward.

How a request walks through: ``_add_request_to_queue`` enters it into the tree; an admission round
(``_get_new_batch_prefill_raw``) iterates over the waiting queue, and that iteration is ours: each step asks the
``BatchBuilder`` for the next request, SGLang's own ``PrefillAdder`` admits it or not, and STOP simply ends the
iteration, so the batch is never marked full by us. Requests that finish or are aborted are found by comparing the
tree with the queues when a round opens.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from typing import Any

from prometheus_client import Counter
from sglang.srt.managers.schedule_policy import AddReqResult, CacheAwarePolicy

from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.adapter.scheduler.admission import AdmissionQueue, admitting, leave_adder, watch_adder
from feather_sglang.adapter.scheduler.agreement import Agreement
from feather_sglang.adapter.scheduler.checks import decision_file
from feather_sglang.adapter.scheduler.construction import make_forecast, make_gathering, pace_bound
from feather_sglang.adapter.scheduler.decision_log import DecisionLog
from feather_sglang.adapter.scheduler.prefix_use import tokens_to_share
from feather_sglang.adapter.scheduler.row_order import permute_rows
from feather_sglang.adapter.wrapping import Wrappings
from feather_sglang.scheduling.admission.batch_builder import BatchBuilder
from feather_sglang.scheduling.admission.kv_forecast import Outlook
from feather_sglang.scheduling.admission.overtaking import Overtaking
from feather_sglang.scheduling.admission.pacing import Pacing
from feather_sglang.scheduling.admission.work import Work
from feather_sglang.scheduling.meters.decode import DecodeMeter
from feather_sglang.scheduling.meters.prefill import PrefillMeter
from feather_sglang.scheduling.policies import StopPolicy
from feather_sglang.scheduling.tree.cht import ChunkedHashTree

logger = logging.getLogger(__name__)

DEBUG_CHECK = "FEATHER_DEBUG_CHECK"
_ENDLESS = 1 << 40  # tokens of a request without a limit


@functools.cache
def failure_counter() -> Counter:
    """Metric: run-time failures after which a scheduler went on as fcfs."""
    return Counter("feather_policy_failures", "Run-time failures of a feather policy; the scheduler goes on as fcfs.")


class FeatherScheduler:
    """Takes over admission and row order of one SGLang ``Scheduler``.

    Attributes
    ----------
    clock : callable
        Seconds; ``time.monotonic``, or a replay's virtual clock.
    policy : StopPolicy or None
        None under ``feather-order``.
    failed : bool
        After a run-time failure: the scheduler goes on as fcfs for good.
    """

    def __init__(self, scheduler: Any, name: str, options: FeatherOptions, policy: StopPolicy | None) -> None:
        self.scheduler = scheduler
        self.name = name
        self.options = options
        self.clock: Callable[[], float] = time.monotonic
        self.failed = False
        self.permutations = 0
        self.permutation_seconds = 0.0
        self._requests: dict[Hashable, Any] = {}  # every request the tree knows, by id
        self._twins = False  # whether two of one id may wait
        self._ordered: list[Any] | None = None  # the row list last seen in order
        self._meter, self._prefill_meter = DecodeMeter(), PrefillMeter(scheduler.chunked_prefill_size)
        self._adder: Any = None
        self._running_rows = self._computed_tokens = 0
        self._outputs: dict[Hashable, int] = {}  # tokens that requests in prefill had when they were admitted
        self._agreement = Agreement(scheduler.tp_cpu_group)
        self._decisions: DecisionLog | None = None
        self._wrappings = Wrappings()
        pace = pace_bound(scheduler.server_args, name, options)
        gathering = make_gathering(scheduler, options) if policy is not None else None
        self.builder = BatchBuilder(
            ChunkedHashTree(options.chunk_size, seed=self._agreement.secret()),
            policy,
            max_wait=options.max_wait,
            max_wait_rounds=options.max_wait_rounds,
            gathering=gathering,
            forecast=make_forecast(scheduler) if gathering is not None else None,
            outlook_of=self._outlook,
            pacing=Pacing(pace) if pace else None,
            overtaking=Overtaking(options.max_overtaking),
            work=Work(scheduler.max_total_num_tokens),
        )

    @property
    def policy(self) -> StopPolicy | None:
        return self.builder.policy

    def install(self) -> None:
        """Wrap this scheduler's own methods; the classes stay untouched, but for the adder (see below)."""
        scheduler = self.scheduler
        self._loop_code = inspect.unwrap(type(scheduler)._get_new_batch_prefill_raw).__code__
        for owner, method, wrapper in (
            (scheduler.policy, "calc_priority", self._calc_priority),
            (scheduler, "_add_request_to_queue", self._add_request_to_queue),
            (scheduler, "_get_new_batch_prefill_raw", self._get_new_batch_prefill_raw),
            (scheduler, "update_running_batch", self._update_running_batch),
        ):
            self._wrappings.wrap(owner, method, wrapper)
        if self.policy is not None:  # else nobody learns from what is measured
            self._wrappings.wrap(scheduler, "process_batch_result", self._process_batch_result)
        if os.environ.get(DEBUG_CHECK) == "1":
            self._wrappings.wrap(scheduler, "get_next_batch_to_run", self._checked)
        if (file := decision_file(scheduler)) is not None:
            self._decisions = DecisionLog(file, self.name)
            self._wrappings.wrap(scheduler, "get_next_batch_to_run", self._logged)
        watch_adder()

    def uninstall(self) -> None:
        """Leave scheduler and adder as SGLang made them."""
        self._wrappings.undo()
        leave_adder()
        if self._decisions is not None:
            self._decisions.close()

    # Life cycle -----------------------------------------------------------------------------------------------

    def _add_request_to_queue(self, original: Callable[..., Any], req: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(req, *args, **kwargs)
        queue = self.scheduler.waiting_queue
        if not self.failed and queue and queue[-1] is req:  # else it was rejected
            with self._guard("a request could not be entered"):
                self._enter(req)
        return result

    def _enter(self, req: Any) -> None:
        tree, tokens = self.builder.cht, tokens_to_share(req, self.options.chunk_size)
        if req.rid in tree.active and self._requests[req.rid] is req:
            # Retracted or preempted: it now owes its prompt and what it has generated.
            self.builder.requeue(req.rid, tokens)
        else:
            # The id of a request that has finished or was aborted since the last round may be used again.
            if req.rid in tree.active:
                self.builder.leave_batch(req.rid, len(self._requests[req.rid].output_ids))
            elif req.rid in tree.waiting:
                self.builder.leave_queue(req.rid)
                self._twins = True
            isolation = (req.extra_key, getattr(req, "cache_salt", None), req.lora_id)
            self.builder.arrive(
                req.rid,
                tokens,
                extra_key=isolation if any(isolation) else None,
                priority=(req.priority or 0) * self.scheduler.policy.priority_sign
                if self.scheduler.enable_priority_scheduling
                else 0,
                most_tokens=req.sampling_params.max_new_tokens or 0,
                cached_tokens=self._look_up(req),
            )
        self._requests[req.rid] = req

    def _look_up(self, req: Any) -> int:
        """Tokens of a prompt in the prefix cache, where others wait; who waits alone is proposed next anyway."""
        scheduler = self.scheduler
        # A look-up in the cache of a model with recurrent state takes one of the few places for such states.
        if self.policy is None or len(scheduler.waiting_queue) < 2 or getattr(scheduler, "is_hybrid_ssm", False):
            return 0
        scheduler.policy._compute_prefix_matches([req], CacheAwarePolicy.LPM)
        return int(req.num_matched_prefix_tokens)

    def _synchronise(self, running: Any) -> None:
        """Drop from the tree what finished, was aborted or timed out since the last round.

        Requests enter the queue through ``_add_request_to_queue`` only, so equal counts mean equal queues, unless two
        of one id wait: tokenizer workers do not know of each other's.
        """
        builder, chunked = self.builder, self.scheduler.chunked_req
        alive = {req.rid for req in running if not req.finished()}
        if chunked is not None and not chunked.finished():
            alive.add(chunked.rid)
        for rid in [rid for rid in builder.cht.active if rid not in alive]:
            builder.leave_batch(rid, len(self._requests.pop(rid).output_ids))
        queue = self.scheduler.waiting_queue
        if self._twins or len(builder.cht.waiting) != len(queue):
            queued = {req.rid for req in list.__iter__(queue)}
            for rid in [rid for rid in builder.cht.waiting if rid not in queued]:
                builder.leave_queue(rid)
                del self._requests[rid]
            for req in list.__iter__(queue):
                if req.rid not in builder.cht:
                    self._enter(req)
            self._twins = len(queued) != len(queue)

    def _note_computed(self) -> None:
        """A request's first new token says that its prompt is computed and in the cache."""
        for rid, outputs in list(self._outputs.items()):
            if rid not in self.builder.passing_over.computing:
                del self._outputs[rid]
            elif len(self._requests[rid].output_ids) > outputs:
                self.builder.passing_over.computed(rid)
                del self._outputs[rid]

    # One admission round --------------------------------------------------------------------------------------

    def _calc_priority(
        self, original: Callable[..., Any], waiting_queue: list[Any], running_batch: Any = None, **kwargs: Any
    ) -> None:
        if not self.failed:
            with self._guard("an admission round could not be opened"):
                self._running_rows = len(running_batch.reqs)
                self._synchronise(running_batch.reqs)
                self._note_computed()
                prefill = self._prefill_meter
                bare, step = prefill.bare_seconds, self._meter.step_seconds
                measured = (
                    self._meter.rate,
                    prefill.seconds_per_token,
                    prefill.fixed_seconds,
                    prefill.pair_seconds / bare if bare else None,
                    step / bare if bare and step is not None else None,
                )
                readings = self._agreement.readings(self.clock(), *measured)
                chunked, self._computed_tokens = self.scheduler.chunked_req, 0
                pending = 0 if chunked is None else max(1, _tokens(chunked) - _cached_tokens(chunked))
                self.builder.begin_round(*readings, pending_tokens=pending)
                if not self.builder.held:
                    self._meter.take()
                if self.policy is not None:
                    self.scheduler.waiting_queue = AdmissionQueue(waiting_queue, self._admissions, self._loop_code)
                    return
        original(waiting_queue, running_batch, **kwargs)

    def _admissions(self) -> Iterator[Any]:
        """Requests in the order the builder proposes them, until it stops or SGLang's budgets end the loop."""
        scheduler, tree = self.scheduler, self.builder.cht
        room = scheduler.get_num_allocatable_reqs(self._running_rows)
        while not self.failed:
            with self._guard("no request could be proposed"):
                admitted = len(self._adder.can_run_list) if self._adder else int(scheduler.chunked_req is not None)
                rid = self.builder.propose(len(tree.active), self._headroom(), has_room=admitted < room)
                if rid is None:
                    return
                yield self._requests[rid]
                if not self.builder.is_settled(rid):
                    self.builder.skipped(rid)
        yield from [req for req in list.__iter__(scheduler.waiting_queue) if req not in self._taken()]

    def _taken(self) -> list[Any]:
        return self._adder.can_run_list if self._adder else []

    def _headroom(self) -> float:
        """Share of the KV pool that is free or evictable and not promised to running requests."""
        scheduler = self.scheduler
        if self._adder is not None:
            tokens = self._adder.rem_total_tokens
        else:
            allocator = scheduler.token_to_kv_pool_allocator
            # With sliding windows there are two pools; the adder counts the full one.
            free = getattr(allocator, "full_available_size", allocator.available_size)
            tokens = free() + scheduler.tree_cache.evictable_size()
        return max(0.0, tokens / scheduler.max_total_num_tokens)

    def judge(self, adder: Any, req: Any) -> AddReqResult | None:
        """What becomes of a proposed request before SGLang's adder is asked; None: nothing.

        It is passed over, to wait for others of its prefix or to go last, or memory will not suffice for it.
        """
        self._adder = adder
        if not self.failed and self.policy is not None:
            with self._guard("a proposed request could not be judged"):
                # What a hierarchical cache has on the host is not in its place yet, but will not be computed.
                cached = _cached_tokens(req) + getattr(req, "host_hit_length", 0)
                free = self.scheduler.token_to_kv_pool_allocator.available_size()
                missing = _tokens(req) - cached
                if self.builder.passes_over(req.rid, cached, missing, free - self._computed_tokens):
                    return AddReqResult.CONTINUE
                if not self.builder.fits(req.rid, free + self.scheduler.tree_cache.evictable_size()):
                    return AddReqResult.NO_TOKEN
        return None

    def after_add(self, adder: Any, req: Any) -> None:
        """SGLang's adder has judged ``req``: note whether it is in."""
        self._adder = adder
        if not self.failed and adder.can_run_list and adder.can_run_list[-1] is req:
            with self._guard("an admission could not be noted"):
                self.builder.admitted(req.rid, _cached_tokens(req))
                self._outputs[req.rid] = len(req.output_ids)
                self._computed_tokens += _tokens(req) - _cached_tokens(req)

    def _outlook(self, rid: Hashable) -> Outlook:
        req = self._requests[rid]
        params = req.sampling_params
        most = params.max_new_tokens
        may_stop = not params.ignore_eos or params.stop_strs or getattr(params, "stop_regex_strs", None)
        fixed = most is not None and not may_stop
        return Outlook(_tokens(req), len(req.output_ids), _ENDLESS if most is None else most, fixed)

    def _get_new_batch_prefill_raw(
        self, original: Callable[..., Any], *args: Any, running_batch: Any, **kwargs: Any
    ) -> Any:
        self._adder = None
        admitting(self)
        if self.builder.passing_over.computing and not self.failed:
            # Else a batch that had no room for somebody else's prefix would be closed, until a request leaves it, to
            # those whose prefix has been computed since.
            running_batch.batch_is_full = False
        try:
            plan = original(*args, running_batch=running_batch, **kwargs)
            if plan[0] is not None:  # the batch changes: a decode step still in flight belongs to the old one
                self._meter.restart(in_flight=int(self.scheduler.enable_overlap))
                self._prefill_meter.begin(self.clock())
            return plan
        finally:
            admitting(None)
            if isinstance(self.scheduler.waiting_queue, AdmissionQueue):
                self.scheduler.waiting_queue = list(list.__iter__(self.scheduler.waiting_queue))
            if not self.failed:
                with self._guard("an admission round could not be closed"):
                    self.builder.end_round()

    # Row order and reward -------------------------------------------------------------------------------------

    def _update_running_batch(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        # Rows are ordered after SGLang has dropped what finished and retracted (which sorts the rest by length), and
        # before it allocates the step's tokens row by row.
        prepare = batch.prepare_for_decode

        def order_and_prepare(*args: Any, **kwargs: Any) -> Any:
            self._order_rows(batch)
            return prepare(*args, **kwargs)

        batch.prepare_for_decode = order_and_prepare
        try:
            return original(batch, *args, **kwargs)
        finally:
            del batch.prepare_for_decode

    def _order_rows(self, batch: Any) -> None:
        # SGLang makes a new row list whenever the composition changes, so the same list is in order already.
        if not self.options.row_order or self.failed or batch.reqs is self._ordered:
            return
        with self._guard("rows could not be ordered"):
            start = time.perf_counter()
            order = self.builder.row_order([req.rid for req in batch.reqs])
            if order is not None and permute_rows(batch, order):
                self.permutations += 1
            self._ordered = batch.reqs
            self.permutation_seconds += time.perf_counter() - start

    def _process_batch_result(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        is_decode = batch.forward_mode.is_decode()
        tokens = sum(not req.finished() for req in batch.reqs) if is_decode else 0
        result = original(batch, *args, **kwargs)
        now = self.clock()
        self._meter.step(now, tokens, is_decode)
        lens = () if is_decode else batch.extend_lens or ()
        pairs = sum(new * (old + new / 2) for new, old in zip(lens, batch.prefix_lens or (), strict=False))
        self._prefill_meter.step(now, sum(lens), pairs)
        # SGLang drops what has finished from the running batch when it forms the next one.
        if all(req.finished() for req in chain(batch.reqs, self.scheduler.running_batch.reqs)):
            self._prefill_meter.idle()
        return result

    def resumed(self) -> None:
        """SGLang goes on after a pause, whose time is nobody's."""
        self._meter.restart()
        self._prefill_meter.idle()

    # Never worse than off -------------------------------------------------------------------------------------

    def _guard(self, what: str) -> _Guard:
        return _Guard(self, what)

    def fail(self, what: str, error: BaseException) -> None:
        """Log a run-time failure once, count it, and go on as fcfs."""
        if not self.failed:
            self.failed = True
            failure_counter().inc()
            logger.error("feather: %s (%r); this scheduler goes on as fcfs", what, error, exc_info=error)

    def stats(self) -> dict[str, Any]:
        """Counters of the builder, the policy, the row order, and whether the policy failed."""
        return {
            **self.builder.stats(),
            "policy": None if self.policy is None else self.policy.stats(),
            "permutations": self.permutations,
            "permutation_seconds": self.permutation_seconds,
            "failed": self.failed,
        }

    # Debug check and decision log -----------------------------------------------------------------------------

    def _logged(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        plan = original(*args, **kwargs)
        if plan.batch_to_run is not None and self._decisions is not None and not self.failed:
            with self._guard("a decision could not be logged"):
                self._decisions.note(plan.batch_to_run, self.stats())
        return plan

    def _checked(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        plan = original(*args, **kwargs)
        self.check(plan)
        return plan

    def check(self, plan: Any) -> None:
        """Assert that the tree equals the scheduler's queues (``plan``: what SGLang runs next)."""
        if self.failed:
            raise AssertionError("feather failed and went on as fcfs; see the log")
        batches = [batch for batch in (plan.running_batch, plan.batch_to_run) if batch is not None]
        running = [req for batch in batches for req in batch.reqs]
        self._synchronise(running)
        tree, scheduler = self.builder.cht, self.scheduler
        tree.check_invariants()
        alive = {req.rid for req in running if not req.finished()}
        if scheduler.chunked_req is not None and not scheduler.chunked_req.finished():
            alive.add(scheduler.chunked_req.rid)
        assert type(scheduler.waiting_queue) is list
        assert set(tree.waiting) == {req.rid for req in scheduler.waiting_queue}, "waiting requests differ"
        assert set(tree.active) == alive, f"running requests differ: {set(tree.active) ^ alive}"
        assert self.builder.passing_over.computing <= tree.active, "a request is being computed that does not run"
        assert not tree.held and set(self._requests) == set(tree.waiting) | set(tree.active)
        if self.options.row_order and plan.batch_to_run is not None and plan.batch_to_run.forward_mode.is_decode():
            rows = [req.rid for req in plan.batch_to_run.reqs if req.rid in tree]
            assert self.builder.row_order(rows) is None, "rows are not in prefix order"


class _Guard:
    """Turns an exception inside feather into a logged failure instead of a dead server."""

    def __init__(self, owner: FeatherScheduler, what: str) -> None:
        self.owner, self.what = owner, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Exception):
            self.owner.fail(self.what, error)
            return True
        return False


def _cached_tokens(req: Any) -> int:
    return int(req.prefix_len if hasattr(req, "prefix_len") else len(req.prefix_indices))  # since 0.5.22


def _tokens(req: Any) -> int:
    """Prompt and output of a request: what it holds, or has to compute before it goes on."""
    return len(req.origin_input_ids) + len(req.output_ids)


def take_over(scheduler: Any, name: str, options: FeatherOptions, policy: StopPolicy | None) -> FeatherScheduler:
    """Put the feather policy ``name`` in charge of ``scheduler`` (also found as ``scheduler.feather``)."""
    feather = FeatherScheduler(scheduler, name, options, policy)
    feather.install()
    scheduler.feather = feather
    return feather
