"""Changing the schedule policy of a running SGLang scheduler (``--feather-allow-switch``).

An order travels in SGLang's own ``SetInternalStateReq``, which every rank handles between the same two steps. Its
values can only be numbers and its answer only yes or no, so the order, a JSON object, is its one key, and what came
of it stands in the state that ``GetInternalStateReq`` reads, under ``feather``. ``endpoint.py`` sends both.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from sglang.srt.managers.io_struct import SetInternalStateReqOutput
from sglang.srt.runtime_context import get_context

from feather_sglang.adapter.hooks import installed_version, lacks_policy, require_fit
from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.adapter.refusals import DISAGGREGATION, PIPELINE, Limit, attention_data_parallel, first_limit
from feather_sglang.adapter.scheduler.agreement import Agreement
from feather_sglang.adapter.scheduler.checks import refuse_unsupported
from feather_sglang.adapter.scheduler.construction import make_stop_policy
from feather_sglang.adapter.scheduler.feather_scheduler import take_over
from feather_sglang.adapter.scheduler.state import tell_state
from feather_sglang.adapter.switch.admission_clock import AdmissionClock
from feather_sglang.adapter.wrapping import Wrappings
from feather_sglang.errors import FeatherError, quoted
from feather_sglang.scheduling.policies import StopPolicy
from feather_sglang.scheduling.policy_names import FEATHER, SINCE, STOCK

logger = logging.getLogger(__name__)

FOR_PRIORITIES = ("fcfs", "lof")  # what SGLang allows together with --enable-priority-scheduling


class Busy(FeatherError):
    """The scheduler has requests; the same order may do later."""


@dataclass(frozen=True)
class Order:
    """A policy, the options that differ from those at start, and whether it may wait for running requests to end."""

    schedule_policy: str
    options: dict[str, Any] = field(default_factory=dict)
    drain: bool = False

    @classmethod
    def from_json(cls, text: str | bytes) -> Order:
        """Read ``{"schedule_policy": NAME, "options": {...}, "drain": true}``; raise ``FeatherError`` for others."""
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FeatherError(f'not JSON ({error}); send {{"schedule_policy": "lpm"}}') from None
        name = given.get("schedule_policy") if isinstance(given, dict) else None
        if not isinstance(name, str) or set(given) - {"schedule_policy", "options", "drain"}:
            raise FeatherError('expected {"schedule_policy": NAME}, with "options": {...} where they differ')
        if name not in STOCK + FEATHER:
            raise FeatherError(f"unknown schedule policy {quoted(name)}; choose from {', '.join(STOCK + FEATHER)}")
        options = given.get("options", {})
        if not isinstance(options, dict) or (options and name not in FEATHER):
            raise FeatherError(f'"options" must be an object, and {name} takes {"them" if name in FEATHER else "none"}')
        if nested := [key for key, value in options.items() if isinstance(value, dict | list)]:
            raise FeatherError(f"options: {quoted(nested[0])} must be a number, a name, true, false or null")
        if not isinstance(drain := given.get("drain", False), bool):
            raise FeatherError('"drain" must be true or false')
        return cls(name, options, drain)

    def as_message(self) -> dict[str, int]:
        """The arguments of ``SetInternalStateReq``."""
        return {json.dumps(asdict(self)): 1}

    @classmethod
    def in_message(cls, arguments: dict[str, Any]) -> Order | None:
        """The order in a ``SetInternalStateReq``, or None where SGLang itself is meant."""
        keys = list(arguments)
        return cls.from_json(keys[0]) if len(keys) == 1 and keys[0].startswith("{") else None


class _Plan(NamedTuple):
    """An order that this rank can carry out."""

    name: str
    options: FeatherOptions
    stop_policy: StopPolicy | None


class Switch:
    """Carries out orders on one scheduler, and measures the processor time of its admission.

    ``initialise`` is SGLang's ``init_schedule_policy`` of this scheduler.
    """

    def __init__(self, scheduler: Any, initialise: Callable[[], Any]) -> None:
        self.scheduler = scheduler
        self._initialise = initialise
        self._options = FeatherOptions.from_environment()
        self._agreement = Agreement(scheduler.tp_cpu_group)
        self._refused: dict[str, Any] | None = None
        self._drains_for: _Plan | None = None  # what is carried out once no request runs
        self._held = Wrappings()  # until then
        self._clock = AdmissionClock()

    def install(self) -> None:
        """Take orders; SGLang binds its handlers of messages after its policy is set up, so it binds this one."""
        Wrappings().wrap(self.scheduler, "set_internal_state", self._set_internal_state)
        tell_state(self.scheduler, self._state)
        self._clock.install(self.scheduler)
        self.scheduler.feather_switch = self

    def _set_internal_state(self, original: Callable[..., Any], recv_req: Any) -> Any:
        plan = self._refused = None
        try:
            order = Order.in_message(recv_req.server_args)
            if order is None:
                return original(recv_req)
            plan = self._plan(order)
        except FeatherError as error:
            self._refused = {"status": 409 if isinstance(error, Busy) else 400, "reason": str(error)}
            logger.warning("feather: the schedule policy stays %s: %s", self.scheduler.schedule_policy, error)
        except Exception as error:  # no order may end the server, and other ranks wait for this one's vote
            self._refused = {"status": 400, "reason": f"the order could not be checked: {quoted(error, 200)}"}
            logger.exception("feather: the schedule policy stays %s", self.scheduler.schedule_policy)
        # One rank alone must not switch: the ranks would form different batches from then on.
        if self._agreement.all(plan is not None) and plan is not None:
            # SGLang's policies keep no books; those of feather's begin with the requests that wait.
            if plan.name in FEATHER and self._runs():
                self._drain(plan)
            else:
                self._carry_out(plan)
        elif plan is not None:
            self._refused = {"status": 400, "reason": "another rank refused; its log says why"}
        return SetInternalStateReqOutput(updated=self._refused is None)

    def _plan(self, order: Order) -> _Plan:
        """Check everything that can be wrong, and change nothing; raise ``FeatherError`` if something is."""
        scheduler, name = self.scheduler, order.schedule_policy
        if not (order.drain or scheduler.is_fully_idle()):
            raise Busy('requests are running or waiting: switch when idle, or send "drain": true')
        refuse_unswitchable(scheduler)
        options = self._options.updated(order.options)
        if name in FEATHER:
            require_fit(f"--schedule-policy {name}")
            refuse_unsupported(scheduler, name, options)
            return _Plan(name, options, make_stop_policy(name, options))
        if scheduler.enable_priority_scheduling and name not in FOR_PRIORITIES:
            raise FeatherError(f"--enable-priority-scheduling does not allow {name}; choose fcfs, lof or a feather one")
        try:
            meant = scheduler.policy._validate_and_adjust_policy(name, scheduler.tree_cache).value
        except ValueError:
            version = installed_version()
            if name in SINCE and not lacks_policy(version, name):  # SGLang says the same of both
                raise FeatherError(f"{name} needs a prefix cache, and this server has none") from None
            raise FeatherError(f"sglang {version} has no schedule policy {name}") from None
        if meant != name:
            raise FeatherError(f"this server would run {meant} in place of {name}: it has no prefix cache")
        return _Plan(name, options, None)

    def _runs(self) -> bool:
        """Whether requests run, or the last step is not over; others may wait, for their grammar too."""
        scheduler, grammars = self.scheduler, self.scheduler.grammar_manager
        queues = scheduler.waiting_queue, grammars.grammar_queue
        scheduler.waiting_queue, grammars.grammar_queue = [], []
        try:
            return not scheduler.is_fully_idle()
        finally:
            scheduler.waiting_queue, grammars.grammar_queue = queues

    def _drain(self, plan: _Plan) -> None:
        """Admit nobody until no request runs, and carry out the plan then; who waits goes on waiting."""
        self._held.undo()
        self._drains_for = plan
        self._held.wrap(self.scheduler, "_get_new_batch_prefill_raw", self._hold_back)
        self._held.wrap(self.scheduler, "get_next_batch_to_run", self._when_drained)
        logger.info("feather: the schedule policy will be %s once the running requests have ended", plan.name)

    def _hold_back(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Look for a prefill batch among nobody: only a prompt that is computed chunk by chunk goes on."""
        scheduler = self.scheduler
        waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
        try:
            return original(*args, **kwargs)
        finally:
            scheduler.waiting_queue = waiting + scheduler.waiting_queue

    def _when_drained(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._drains_for is None or self._runs():
            return original(*args, **kwargs)
        self._carry_out(self._drains_for)
        return self.scheduler.get_next_batch_to_run(*args, **kwargs)

    def _carry_out(self, plan: _Plan) -> None:
        """Undo all of the old policy, then start the new one as SGLang's start-up does."""
        scheduler, self._drains_for = self.scheduler, None
        self._held.undo()
        self._clock.uninstall()
        if hasattr(scheduler, "feather"):
            scheduler.feather.uninstall()
            del scheduler.feather
        scheduler.schedule_policy = plan.name
        self._initialise()
        get_context().override("feather.switch", schedule_policy=plan.name)
        if plan.name in FEATHER:
            take_over(scheduler, plan.name, plan.options, plan.stop_policy)
        self._clock = AdmissionClock()
        self._clock.install(scheduler)
        logger.info("feather: the schedule policy is now %s", plan.name)

    def _state(self) -> dict[str, Any]:
        """What came of the last order, and what was counted under every policy since the last switch."""
        return {
            "refused": self._refused,
            "draining": self._drains_for and self._drains_for.name,
            "rounds": self._clock.rounds,
            "admission_seconds": self._clock.seconds,
        }


def refuse_unswitchable(scheduler: Any) -> None:
    """Raise ``FeatherError`` where the schedulers of a server do not all handle an order between the same two steps."""
    limits = PIPELINE, DISAGGREGATION, Limit("data-parallel attention", attention_data_parallel)
    if limit := first_limit(limits, scheduler.server_args):
        raise FeatherError(f"the schedule policy cannot be switched under {limit.what}")
