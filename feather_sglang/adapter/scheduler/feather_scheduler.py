"""A feather policy in charge of one SGLang ``Scheduler``: its rooms, and where each hooks in.

==============  =========================================================================================
room            what of SGLang's it wraps, on this one object
==============  =========================================================================================
``life_cycle``  ``_add_request_to_queue``: a request arrives or comes back
``rounds``      ``policy.calc_priority``, ``_get_new_batch_prefill_raw``, the round's ``adder.add_one_req``
``rows``        ``update_running_batch``, and within it the batch's ``prepare_for_decode``
``meters``      ``process_batch_result``: the reward
==============  =========================================================================================
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.adapter.scheduler import debug_check
from feather_sglang.adapter.scheduler.agreement import Agreement
from feather_sglang.adapter.scheduler.checks import decision_file
from feather_sglang.adapter.scheduler.construction import make_admission
from feather_sglang.adapter.scheduler.debug_check import DebugCheck
from feather_sglang.adapter.scheduler.decision_log import DecisionLog
from feather_sglang.adapter.scheduler.guard import Guard
from feather_sglang.adapter.scheduler.life_cycle import LifeCycle
from feather_sglang.adapter.scheduler.meters import Meters
from feather_sglang.adapter.scheduler.rounds import AdmissionRounds
from feather_sglang.adapter.scheduler.row_order import RowOrder
from feather_sglang.adapter.wrapping import Wrappings
from feather_sglang.scheduling.policies import StopPolicy


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
        self.guard = Guard()
        agreement = Agreement(scheduler.tp_cpu_group)
        self.life_cycle = LifeCycle(scheduler, self.guard)
        self.admission = make_admission(
            scheduler, name, options, policy, seed=agreement.secret(), outlook_of=self.life_cycle.outlook
        )
        self.life_cycle.admission = self.admission
        self.meters = Meters(scheduler, agreement, self.guard, lambda: self.clock())
        self.rounds = AdmissionRounds(scheduler, self.admission, self.life_cycle, self.meters, self.guard)
        self.rows = RowOrder(self.admission, self.guard, options.row_order)
        self._decisions: DecisionLog | None = None
        self._wrappings = Wrappings()

    @property
    def policy(self) -> StopPolicy | None:
        """The stop policy."""
        return self.admission.policy

    @property
    def failed(self) -> bool:
        """Whether it goes on as fcfs."""
        return self.guard.failed

    def install(self) -> None:
        """Wrap this scheduler's own methods; SGLang's classes stay untouched."""
        scheduler, wrap = self.scheduler, self._wrappings.wrap
        wrap(scheduler.policy, "calc_priority", self.rounds.calc_priority)
        wrap(scheduler, "_add_request_to_queue", self.life_cycle.add_request_to_queue)
        wrap(scheduler, "_get_new_batch_prefill_raw", self.rounds.get_new_batch_prefill)
        wrap(scheduler, "update_running_batch", self.rows.update_running_batch)
        if self.policy is not None:  # else nobody learns from what is measured
            wrap(scheduler, "process_batch_result", self.meters.process_batch_result)
        if os.environ.get(debug_check.VARIABLE) == "1":
            wrap(scheduler, "get_next_batch_to_run", DebugCheck(self).get_next_batch_to_run)
        if (file := decision_file(scheduler)) is not None:
            self._decisions = DecisionLog(file, self.name)
            wrap(scheduler, "get_next_batch_to_run", self._log_decision)

    def uninstall(self) -> None:
        """Leave the scheduler as SGLang made it."""
        self._wrappings.undo()
        if self._decisions is not None:
            self._decisions.close()

    def resumed(self) -> None:
        """SGLang goes on after a pause."""
        self.meters.resumed()

    def stats(self) -> dict[str, Any]:
        """Counters of admission, the policy, the row order, and whether the policy failed."""
        return {
            **self.admission.stats(),
            "policy": None if self.policy is None else self.policy.stats(),
            "permutations": self.rows.permutations,
            "permutation_seconds": self.rows.seconds,
            "failed": self.failed,
        }

    def _log_decision(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        plan = original(*args, **kwargs)
        if plan.batch_to_run is not None and self._decisions is not None and not self.failed:
            with self.guard("a decision could not be logged"):
                self._decisions.note(plan.batch_to_run, self.stats())
        return plan


def take_over(scheduler: Any, name: str, options: FeatherOptions, policy: StopPolicy | None) -> FeatherScheduler:
    """Put the feather policy ``name`` in charge of ``scheduler`` (also found as ``scheduler.feather``)."""
    feather = FeatherScheduler(scheduler, name, options, policy)
    feather.install()
    scheduler.feather = feather
    return feather
