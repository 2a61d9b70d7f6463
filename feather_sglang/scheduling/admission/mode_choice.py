"""Chooses the mode of a round by the load, as far as the promise can be judged from the queue, or for a trial."""

from __future__ import annotations

from collections.abc import Hashable

from feather_sglang.scheduling.admission.queue_state import QueueState
from feather_sglang.scheduling.meters.readings import Readings
from feather_sglang.scheduling.modes.load import Load
from feather_sglang.scheduling.modes.mode import Mode
from feather_sglang.scheduling.modes.mode_policy import ModePolicy
from feather_sglang.scheduling.modes.outcomes import Outcomes
from feather_sglang.scheduling.modes.promise import Promise
from feather_sglang.scheduling.modes.trials import Trials

_ASKED = 64  # of the oldest waiting: who is late is among them


class ModeChoice:
    """The modes of one scheduler.

    Parameters
    ----------
    promise, policy
        What is aimed at, and what is chosen for it.
    trials
        Of other modes. ``None``: there are none.

    Attributes
    ----------
    outcomes
        What came of the promise, where trials need to know; the engine tells it of arrivals and of tokens.
    """

    def __init__(self, state: QueueState, promise: Promise, policy: ModePolicy, trials: Trials | None = None) -> None:
        self.state = state
        self.promise = promise
        self.policy = policy
        self.trials = trials
        self.outcomes = Outcomes(promise) if trials is not None else None

    def choose(self, readings: Readings) -> Mode:
        """Return the mode of the round that opens with these readings."""
        promise = self.promise
        token = readings.token_seconds
        fixed: float | None = max(readings.start_seconds or 0.0, readings.host_start_seconds or 0.0)
        if not token:  # else what steps take by their number, or their context, would count again in each token
            token, fixed = readings.prefill_seconds, readings.fixed_seconds
        promise.token_seconds, promise.fixed_seconds = token or 0.0, fixed or 0.0
        promise.idle_decode_seconds = readings.least_decode_seconds
        mode = self.policy.decide(self._load(readings) if self.policy.table else None)
        if self.trials is None:
            return mode
        alive = len(self.state.tree.waiting) + len(self.state.tree.active)
        judged, within = int(readings.judged or 0), int(readings.within or 0)
        return self.trials.choose(judged, within, alive, readings.now) or mode

    def admitted(self, request_id: Hashable) -> None:
        """Note a request that joins the batch."""
        if self.outcomes is not None:
            tokens = self.state.tokens(request_id)
            self.outcomes.admitted(request_id, self.state.work.of_prompt(tokens, tokens))

    def left(self, request_id: Hashable) -> None:
        """Forget a request that finished, was aborted or timed out."""
        if self.outcomes is not None:
            self.outcomes.forget(request_id)

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
