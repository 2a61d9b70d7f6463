"""A live server's decode batches on file, for ``feather explain-plan``; off unless ``record_plan`` names a folder."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from feather_kernels.plan import PackPlan
from feather_kernels.plans.batch_file import LATEST, batch_text
from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.adapter.scheduler.agreement import is_first_rank

logger = logging.getLogger(__name__)

INTERVAL = 5.0  # seconds between two writings


class PlanRecorder:
    """Keeps the batch of a recent plan in a folder's ``batch-latest.json``."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / LATEST
        self._draft = folder / f".{LATEST}.{os.getpid()}"  # replicas of a server may share the folder
        self._written: PackPlan | None = None
        self._due = 0.0

    def offer(self, plan: PackPlan, requests: int) -> None:
        """Write the plan in force, whose rows from ``requests`` on are padding, unless it has been, or one was lately.

        A reader finds the file whole at any time. If it cannot be written, that is logged once, and serving goes on.
        """
        now = time.monotonic()
        if plan is self._written or now < self._due:
            return
        try:
            self._draft.write_text(batch_text(plan, requests), encoding="utf-8")
            self._draft.replace(self._file)
            self._written, self._due = plan, now + INTERVAL
        except OSError as error:
            logger.warning("feather: batches are no longer recorded: %s: %s", self._file, error.strerror)
            self._due = float("inf")


def plan_recorder() -> PlanRecorder | None:
    """This process's recorder: the first rank's if it was asked for, as all ranks have the same batch."""
    folder = FeatherOptions.from_environment().record_plan
    if folder is None or not is_first_rank():
        return None
    return PlanRecorder(Path(folder))
