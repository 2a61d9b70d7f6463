"""The object that owns the parts of a feather policy in one SGLang ``Scheduler``.

==============  ==============================================
room            what it does
==============  ==============================================
``life_cycle``  a request arrives, comes back, leaves
``rounds``      who is admitted
``rows``        prefix order of the running batch
``meters``      step times: the reward, the price of prefill
==============  ==============================================

SGLang calls them through ``hooked.Hooks``, or through ``registered.FeatherPolicy`` where it has extension points.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_policy import SchedulePolicy

from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.adapter.scheduler import debug_check
from feather_sglang.adapter.scheduler.agreement import Agreement, is_first_rank
from feather_sglang.adapter.scheduler.checks import decision_file
from feather_sglang.adapter.scheduler.construction import make_admission, make_prefill_bound
from feather_sglang.adapter.scheduler.debug_check import DebugCheck
from feather_sglang.adapter.scheduler.decision_log import DecisionLog
from feather_sglang.adapter.scheduler.guard import Guard, guarded
from feather_sglang.adapter.scheduler.hooked import Hooks
from feather_sglang.adapter.scheduler.life_cycle import LifeCycle
from feather_sglang.adapter.scheduler.meters import Meters
from feather_sglang.adapter.scheduler.metrics import PolicyMetrics
from feather_sglang.adapter.scheduler.prefill_limit import PrefillLimit
from feather_sglang.adapter.scheduler.rounds import AdmissionRounds
from feather_sglang.adapter.scheduler.row_order import RowOrder
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
        agreement = Agreement(scheduler.dp_tp_cpu_group)
        self.life_cycle = LifeCycle(scheduler, self.guard)
        self.admission = make_admission(
            scheduler, name, options, policy, seed=agreement.secret(), outlook_of=self.life_cycle.outlook
        )
        self.life_cycle.admission = self.admission
        self.meters = Meters(scheduler, agreement, self.guard, lambda: self.clock())
        bound = make_prefill_bound(options)
        limit = PrefillLimit(scheduler, self.admission, bound, lambda: self.clock()) if bound is not None else None
        self.metrics = PolicyMetrics(name, options) if is_first_rank() else None
        self.rounds = AdmissionRounds(
            scheduler, self.admission, self.life_cycle, self.meters, self.guard, limit, self.metrics
        )
        if self.metrics is not None:
            self.metrics.write(self.admission, 0)
        self.rows = RowOrder(self.admission, self.guard, options.row_order)
        self._check = DebugCheck(self) if os.environ.get(debug_check.VARIABLE) == "1" else None
        self._decisions: DecisionLog | None = None
        self._hooks: Hooks | None = None

    @property
    def policy(self) -> StopPolicy | None:
        """The stop policy."""
        return self.admission.policy

    @property
    def failed(self) -> bool:
        """Whether it goes on as fcfs."""
        return self.guard.failed

    def install(self) -> None:
        """Let SGLang call the rooms."""
        scheduler = self.scheduler
        if (file := decision_file(scheduler)) is not None:
            self._decisions = DecisionLog(file, self.name)
        if type(scheduler.policy) is SchedulePolicy:
            self._hooks = Hooks(self)
        else:  # SGLang has made the registered class
            scheduler.policy.feather = self

    def uninstall(self) -> None:
        """Leave the scheduler as SGLang made it."""
        if self._hooks is not None:
            self._hooks.undo()
        if self._decisions is not None:
            self._decisions.close()
        if self.metrics is not None:
            self.metrics.end()
        self.guard.end()

    @property
    def watches_decisions(self) -> bool:
        """Whether ``decided`` does anything."""
        return self._check is not None or self._decisions is not None

    def decided(self, running_batch: Any, batch: Any) -> None:
        """Check and log, where asked for, what SGLang runs next: ``batch``, or None."""
        if self._check is not None:
            self._check.check(running_batch, batch)
        if self._decisions is not None and batch is not None:
            self._log(self._decisions, batch)

    @guarded("a decision could not be logged")
    def _log(self, decisions: DecisionLog, batch: Any) -> None:
        decisions.note(batch, self.stats())

    def stats(self) -> dict[str, Any]:
        """Counters of admission, the policy, bounded prefill, the row order, and whether the policy failed."""
        return {
            **self.admission.stats(),
            "policy": None if self.policy is None else self.policy.stats(),
            "decoded_first": self.rounds.limit.decoded_first if self.rounds.limit is not None else 0,
            "bound_in_force": self.rounds.limit.bound.in_force if self.rounds.limit is not None else None,
            "permutations": self.rows.permutations,
            "permutation_seconds": self.rows.seconds,
            "failed": self.failed,
        }


def take_over(scheduler: Any, name: str, options: FeatherOptions, policy: StopPolicy | None) -> FeatherScheduler:
    """Put the feather policy ``name`` in charge of ``scheduler`` (also found as ``scheduler.feather``)."""
    feather = FeatherScheduler(scheduler, name, options, policy)
    feather.install()
    scheduler.feather = feather
    return feather
