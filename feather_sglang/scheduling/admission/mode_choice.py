"""Chooses the mode of a round by the load, as far as the operator's promise can be judged from the queue."""

from __future__ import annotations

from collections.abc import Hashable

from feather_sglang.scheduling.admission.queue_state import QueueState
from feather_sglang.scheduling.meters.readings import Readings
from feather_sglang.scheduling.modes.load import Load
from feather_sglang.scheduling.modes.mode import Mode
from feather_sglang.scheduling.modes.mode_policy import ModePolicy
from feather_sglang.scheduling.modes.promise import Promise

_ASKED = 64  # of the oldest waiting: who is late is among them


class ModeChoice:
    """The modes of one scheduler.

    Parameters
    ----------
    promise, policy
        What is aimed at, and what is chosen for it.
    """

    def __init__(self, state: QueueState, promise: Promise, policy: ModePolicy) -> None:
        self.state = state
        self.promise = promise
        self.policy = policy

    def choose(self, readings: Readings) -> Mode:
        """Return the mode of the round that opens with these readings."""
        promise = self.promise
        promise.token_seconds = readings.token_seconds or readings.prefill_seconds or 0.0
        promise.fixed_seconds = readings.fixed_seconds or 0.0
        promise.idle_decode_seconds = readings.least_decode_seconds
        return self.policy.decide(self._load(readings))

    def in_time(self, request_id: Hashable, now: float, work: float) -> bool:
        """Whether a waiting request with so much work left can have its first token in time."""
        state = self.state
        tokens = state.tokens(request_id)
        return self.promise.can_come_in_time(state.waited(request_id, now), work, state.work.of_prompt(tokens, tokens))

    def _load(self, readings: Readings) -> Load:
        state = self.state
        oldest = state.overtaking.first(_ASKED)
        late = sum(not self.in_time(r, readings.now, state.prefill_now(r)) for r in oldest)
        bound, decode = self.promise.between_tokens(), readings.decode_seconds
        return Load(
            tight=state.deferrals.memory_is_tight(),
            short=state.deferrals.memory_is_short(),
            late=late / len(oldest) if oldest else 0.0,
            step=decode / bound if decode and bound else 0.0,
        )
