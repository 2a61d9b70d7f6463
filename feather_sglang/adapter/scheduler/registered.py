"""The feather policies as classes that a patched SGLang calls: its extension points (``patches/``), nothing wrapped.

Imported only where SGLang has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.managers.schedule_policy import SchedulePolicy

from feather_sglang.adapter.scheduler.feather_scheduler import FeatherScheduler
from feather_sglang.adapter.start_up import offer, refuse_arguments, start_policy
from feather_sglang.scheduling.policy_names import FEATHER


class FeatherPolicy(SchedulePolicy):
    """One scheduler's policy: hands each callback to the room it belongs to.

    Attributes
    ----------
    feather : FeatherScheduler
        In charge from ``attach`` on.
    """

    supports_priority_scheduling = True
    feather: FeatherScheduler
    _opened = False

    @classmethod
    def add_cli_args(cls, parser: Any) -> None:
        """Offer the backend and the ``--feather-*`` flags."""
        offer(parser)

    @classmethod
    def check_server_args(cls, server_args: Any) -> None:
        """Refuse what flags alone tell."""
        refuse_arguments(server_args)

    def attach(self, scheduler: Any) -> None:
        """Take over, unless a switch is about to, with the options of its order."""
        if not hasattr(scheduler, "feather_switch"):
            start_policy(scheduler)

    def on_request_queued(self, req: Any) -> None:
        """Enter a request that arrives, or comes back."""
        self.feather.life_cycle.queued(req)

    def should_defer_prefill(self, running_batch: Any) -> bool:
        """Whether decode goes first; else a full batch is open again where somebody may fit by now."""
        return not self.feather.rounds.begin(running_batch)

    def calc_priority(self, waiting_queue: list[Any], running_batch: Any = None, **kwargs: Any) -> None:
        """Open a round; who leaves admission to SGLang lets it sort the queue, too."""
        self._opened = self.feather.rounds.open(running_batch)
        if not self._opened or self.feather.policy is None:
            super().calc_priority(waiting_queue, running_batch, **kwargs)
        else:
            self.feather.rounds.use_prefixes(waiting_queue)

    def waiting_queue_prefix_matched(self, waiting_queue: list[Any]) -> bool:
        """Whether it is known how much of the prompts that wait is cached; a load report is about to count it."""
        counted = self.feather.policy is not None and self.feather.rounds.count_prefixes()
        return counted or super().waiting_queue_prefix_matched(waiting_queue)

    def propose(self, waiting_queue: list[Any], running_batch: Any, adder: Any) -> Iterator[Any]:
        """Who is next."""
        return self.feather.rounds.propose(waiting_queue, adder) if self._opened else iter(waiting_queue)

    def check_admission(self, req: Any, adder: Any) -> Any:
        """What the rules say of a proposed request."""
        return self.feather.rounds.judge(req)

    def on_request_admitted(self, req: Any) -> None:
        """Note it."""
        self.feather.rounds.admitted(req)

    def end_admission(self, new_batch: Any) -> None:
        """Close the round."""
        self.feather.rounds.end(new_batch)

    def order_rows(self, batch: Any) -> None:
        """Put the rows of a decode step in prefix order."""
        self.feather.rows.order(batch)

    def on_step_start(self, batch: Any) -> None:
        """Check and log, where asked for."""
        self.feather.decided(self.feather.scheduler.running_batch, batch)

    def on_step_result(self, batch: Any, result: Any) -> None:
        """Count the tokens that a step is about to bring."""
        if self.feather.policy is not None:  # else nobody learns from what is measured
            self.feather.meters.step_ending(batch)

    def on_step_end(self, batch: Any, result: Any) -> None:
        """Measure the step."""
        if self.feather.policy is not None:
            self.feather.meters.step_ended(batch)

    def on_continue(self) -> None:
        """A pause is over."""
        self.feather.meters.resumed()


def register_policies() -> None:
    """Offer all feather policies to SGLang."""
    from sglang.srt.managers.schedule_policy_registry import register_schedule_policy

    register_schedule_policy(*FEATHER)(FeatherPolicy)
