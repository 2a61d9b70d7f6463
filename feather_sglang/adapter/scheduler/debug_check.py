"""``FEATHER_DEBUG_CHECK=1``: assert before every step that the tree equals SGLang's queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from feather_sglang.adapter.scheduler.row_order import rows_can_move

if TYPE_CHECKING:
    from feather_sglang.adapter.scheduler.feather_scheduler import FeatherScheduler

VARIABLE = "FEATHER_DEBUG_CHECK"


class DebugCheck:
    """The check of one scheduler."""

    def __init__(self, feather: FeatherScheduler) -> None:
        self.feather = feather

    def check(self, running_batch: Any, batch: Any) -> None:
        """Raise ``AssertionError`` if the tree differs; SGLang runs ``batch`` next, or None."""
        feather, life_cycle, admission = self.feather, self.feather.life_cycle, self.feather.admission
        if feather.failed:
            raise AssertionError("feather failed and went on as fcfs; see the log")
        running = [req for each in (running_batch, batch) if each is not None for req in each.reqs]
        life_cycle.synchronise(running)
        admission.check_invariants()
        alive, queue = life_cycle.alive(running), feather.scheduler.waiting_queue
        assert type(queue) is list
        assert set(admission.waiting) == {req.rid for req in queue}, "waiting requests differ"
        assert set(admission.running) == alive, f"running requests differ: {set(admission.running) ^ alive}"
        assert set(life_cycle.requests) == admission.waiting | admission.running
        decodes = batch is not None and batch.forward_mode.is_decode()
        if feather.rows.enabled and decodes and rows_can_move(batch):
            rows = [req.rid for req in batch.reqs if req.rid in life_cycle.requests]
            assert admission.row_order(rows) is None, "rows are not in prefix order"
