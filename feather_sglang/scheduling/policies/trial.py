"""Trials of STOP: a run of them, paid from an allowance of lost throughput.

One STOP changes nothing that a reward could show: the running batch stays what it was. Only a run of STOPs, about as
long as requests live, lets a mixed batch become homogeneous. So an exploratory STOP opens a *run* in which every
decision is STOP. A run ends when it is long enough or has lost more throughput than its allowance; ordinary operation
earns the allowance slowly, so that on a machine where STOP never pays the trials cost next to nothing.

For the same reason a reward counts for an action only as far as that action has been usual of late (`settled`):
throughput just after a change of habit is still that of the old habit's batch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from feather_sglang.scheduling.policies.policy_file import mapping, number

# All in rewards, that is, in decode intervals between admission rounds.
_HABIT_WINDOW = 64  # memory of what is usual: the share of STOP
_THROUGHPUT_WINDOW = 32  # memory of ordinary throughput, which a run is measured against
_REWARDS_BEFORE_RUN = 128.0  # ordinary operation before the first run, and after a pause
_SPARE_LOSS = 1.0  # what a run may lose beyond the allowance, so that noise does not end it at once
_EARNED_ALLOWANCE = 0.001  # allowance that one ordinary reward earns
_LARGEST_ALLOWANCE = 5.0  # allowance that can be saved up
_PAYING_GAIN = 0.02  # mean gain over ordinary throughput from which on a run has paid
# Ordinary operation that follows a run, as a multiple of its length: none if it paid, else this, doubling up to that.
_REST_FACTOR, _LARGEST_REST_FACTOR = 10.0, 200.0
_LARGEST_NUMBER = 1e300


@dataclass
class Trial:
    """Decides when a run of STOPs may start and when it ends, and how settled each action is.

    Attributes
    ----------
    longest : rewards after which a run ends.
    running : a run is under way.
    stopping : share of STOP among recent decisions that were not free.
    """

    longest: float
    running: bool = False
    stopping: float = 0.0
    allowance: float = 0.0
    length: float = 0.0
    gain: float = 0.0
    usual: float = 0.0
    rest: float = _REWARDS_BEFORE_RUN
    patience: float = _REST_FACTOR

    def may_start(self) -> bool:
        """Whether an exploratory STOP is in order: it starts a run, unless STOP is the habit already."""
        return self.rest <= 0 and not self.running

    def start(self) -> None:
        """Take an exploratory STOP."""
        if self.stopping < 0.5:
            self.running, self.length, self.gain = True, 0.0, 0.0

    def settled(self, stop: int) -> float:
        """Weight of a reward for ADD (`stop` 0) or STOP (1): the recent share of that action, 0 to 1."""
        return self.stopping if stop else 1.0 - self.stopping

    def decided(self, stops: int, decisions: int) -> None:
        """Note the decisions that a reward is credited to."""
        self.stopping += (stops / decisions - self.stopping) / _HABIT_WINDOW

    def observe(self, reward: float, known: float) -> None:
        """Take a reward into account; `known` is the mean under ADD of the states it is credited to, 0 if none."""
        if not self.running:
            self.usual += (reward - self.usual) / _THROUGHPUT_WINDOW if self.usual else reward
            self.allowance = min(self.allowance + _EARNED_ALLOWANCE, _LARGEST_ALLOWANCE)
            self.rest -= 1
            return
        # While load rises, throughput before the run is too low a measure: that of the states met is one more.
        expected = max(self.usual, known)
        gain = reward / expected - 1.0 if expected else 0.0
        self.length += 1
        self.gain += gain
        self.allowance = min(self.allowance + gain, _LARGEST_ALLOWANCE)
        if self.allowance < -_SPARE_LOSS or self.length >= self.longest:
            self._end()

    def _end(self) -> None:
        self.running = False
        self.allowance = max(self.allowance, 0.0)
        if self.gain > _PAYING_GAIN * self.length:
            self.rest, self.patience = 0.0, _REST_FACTOR
        else:
            self.rest, self.patience = self.patience * self.length, min(2 * self.patience, _LARGEST_REST_FACTOR)

    def pause(self) -> None:
        """End a run without judging it; what is ordinary is to be found anew."""
        self.running = False
        self.usual = 0.0
        self.rest = max(self.rest, _REWARDS_BEFORE_RUN)

    def export(self) -> dict[str, Any]:
        """Content for the policy file."""
        return {name: value for name, value in asdict(self).items() if name != "longest"}

    def restore(self, document: Any) -> None:
        """Take over what `export` wrote; ValueError names the first thing wrong."""
        fields = mapping(document, "trial")
        if not isinstance(fields.get("running"), bool):
            raise ValueError("trial running is not true or false")
        self.running = fields["running"]
        self.stopping = number(fields.get("stopping"), "trial stopping", high=1.0)
        self.usual = number(fields.get("usual"), "trial usual")
        for name in ("allowance", "length", "gain", "rest", "patience"):
            setattr(self, name, number(fields.get(name), f"trial {name}", low=-_LARGEST_NUMBER))
