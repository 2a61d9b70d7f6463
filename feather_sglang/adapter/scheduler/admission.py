"""Where SGLang's admission loop asks feather: the queue that it iterates over, and the adder that it asks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import PrefillAdder

if TYPE_CHECKING:
    from feather_sglang.adapter.scheduler.feather_scheduler import FeatherScheduler


class AdmissionQueue(list):
    """The waiting queue during one admission round.

    The loop that admits requests draws them from ``admissions``; every other reader sees the plain list. The loop
    is told apart by its code object, because SGLang also iterates over the queue for LoRA draining and load reports.
    """

    def __init__(self, requests: list[Any], admissions: Callable[[], Iterator[Any]], loop_code: Any) -> None:
        super().__init__(requests)
        self._admissions: Callable[[], Iterator[Any]] | None = admissions
        self._loop_code = loop_code

    def __iter__(self) -> Iterator[Any]:
        if self._admissions is not None and sys._getframe(1).f_code is self._loop_code:
            admissions, self._admissions = self._admissions, None
            return admissions()
        return super().__iter__()


_admitting: FeatherScheduler | None = None  # the scheduler inside an admission round, for the adder it has made
_add_one_req: Callable[..., Any] | None = None  # SGLang's own, while it is wrapped


def admitting(feather: FeatherScheduler | None) -> None:
    """Name the scheduler inside an admission round, for the adder that SGLang makes in it; None after the round."""
    global _admitting
    _admitting = feather


def watch_adder() -> None:
    """Report every ``PrefillAdder.add_one_req`` of an admission round; SGLang makes a new adder per round."""
    global _add_one_req
    if _add_one_req is not None:
        return
    _add_one_req = original = PrefillAdder.add_one_req

    @functools.wraps(original)
    def add_one_req(adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        if _admitting is not None and (verdict := _admitting.judge(adder, req)) is not None:
            return verdict
        result = original(adder, req, *args, **kwargs)
        if _admitting is not None:
            _admitting.after_add(adder, req)
        return result

    PrefillAdder.add_one_req = add_one_req


def leave_adder() -> None:
    """Leave the adder as SGLang made it."""
    global _add_one_req
    if _add_one_req is not None:
        PrefillAdder.add_one_req, _add_one_req = _add_one_req, None
