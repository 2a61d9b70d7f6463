"""The one place where SGLang's scheduling reads a clock of its own: the prefill delayer's longest delay."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from sglang.srt.managers import prefill_delayer


def delay_prefill_by(clock: Callable[[], float]) -> None:
    """Let the prefill delayer of this process count ``--prefill-delayer-max-delay-ms`` by ``clock``, in seconds."""
    state = prefill_delayer._State
    prefill_delayer._State = lambda: state(start_time=clock())
    prefill_delayer.time = SimpleNamespace(perf_counter=clock)
