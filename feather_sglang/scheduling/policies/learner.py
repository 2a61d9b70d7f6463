"""The base of both learners: the table, decisions that wait for a reward, and rules that keep regret small."""

from __future__ import annotations

import math
from typing import Any

from feather_sglang.scheduling.policies import discretiser
from feather_sglang.scheduling.policies.base import Policy
from feather_sglang.scheduling.policies.estimates import NEW_CELL
from feather_sglang.scheduling.policies.parameters import Number
from feather_sglang.scheduling.policies.policy_file import mapping, number, pairs, sequence
from feather_sglang.scheduling.policies.protocol import ADD, STOP, Action, PolicyState
from feather_sglang.scheduling.policies.trial import Trial

# By how much, relative to ADD, STOP must be better before it is preferred. Within a bin the two often tie, and the
# reward sees neither the request that STOP keeps waiting nor the batch that shrinks by many STOPs in a row.
MARGIN = Number(0.02, 0.0, 1.0)
# Rewards that a trial lasts at most: a batch becomes homogeneous within the lifetime of its requests.
TRIAL = Number(300, 1, 1e6, integer=True)


class Learner(Policy):
    """A table of measured throughputs by (state, action).

    Rules common to both learners, beyond the paper (docs/lab/learning.md): an addition that costs no shared
    prefix, or into an empty batch, is ADD and teaches nothing; where ADD was never measured, ADD; STOP is explored in
    runs (trial.py) and preferred when proven (estimates.py).

    A decision code is ``2 * key + (1 for STOP)``.
    """

    def __init__(self, *, seed: int = 0, explore: bool = True, **params: Any) -> None:
        super().__init__(seed=seed, explore=explore, **params)
        self.table: dict[int, list[float]] = {}
        self.rewards = 0
        self.free_adds = 0
        self.trials = 0
        self._margin: float = self.params["margin"]
        self._trial = Trial(self.params["trial"])
        self._waiting: dict[int, int] = {}  # decision code -> how many such decisions wait for a reward
        self._last: int | None = None

    def decide(self, state: PolicyState) -> Action:
        """Answer ADD or STOP, and remember the decision until its reward comes."""
        if state.tip_loss <= 0 or state.batch_size <= 0:
            self.free_adds += 1
            self.adds += 1
            self._last = None
            return ADD
        key = discretiser.key_of(state)
        cell = self.table.get(key)
        if cell is None:
            cell = list(NEW_CELL)
            if self.explore:
                self.table[key] = cell
        stop = self._wants_stop(key, cell)
        self.stops += stop
        self.adds += not stop
        if self.explore:
            code = 2 * key + stop
            self._waiting[code] = self._waiting.get(code, 0) + 1
            self._last = code
        return STOP if stop else ADD

    def cancel(self) -> None:
        """Take back the last decision; a free addition, or one already rewarded, leaves nothing to take back."""
        code, self._last = self._last, None
        if code is not None:
            if self._waiting[code] > 1:
                self._waiting[code] -= 1
            else:
                del self._waiting[code]

    def observe(self, reward: float) -> None:
        """Credit `reward` (decode tokens/s, finite, not negative) to every decision since the previous one.

        A reward is one measurement: a (state, action) decided several times since the last reward learns it once.
        """
        if not (math.isfinite(reward) and reward >= 0):
            raise ValueError(f"a reward is a finite throughput, not {reward!r}")
        if self.explore:
            self.rewards += 1
            known = max((self.table[code >> 1][0] for code in self._waiting), default=0.0)
            self._trial.observe(float(reward), known)
            if self._waiting:
                stops = sum(count for code, count in self._waiting.items() if code & 1)
                self._trial.decided(stops, sum(self._waiting.values()))
            self._learn(float(reward))
            self._waiting.clear()
            self._last = None

    def end_episode(self) -> None:
        """Drop the decisions that wait for a reward."""
        self._trial.pause()
        self._waiting.clear()
        self._last = None

    def stats(self) -> dict[str, float]:
        """Return counters: decisions by action, free additions, trials of STOP, rewards, states met."""
        return {
            **super().stats(),
            "free_adds": self.free_adds,
            "trials": self.trials,
            "rewards": self.rewards,
            "states": len(self.table),
        }

    def _wants_stop(self, key: int, cell: list[float]) -> bool:
        """Whether to STOP in the state of `cell`."""
        raise NotImplementedError

    def _may_try(self) -> bool:
        """Whether an exploratory STOP is in order; it starts a run."""
        if not self.explore or not self._trial.may_start():
            return False
        self._trial.start()
        self.trials += self._trial.running
        return True

    def _learn(self, reward: float) -> None:
        """Take `reward` into the table for the waiting decisions."""
        raise NotImplementedError

    def _export(self) -> dict[str, Any]:
        return {
            "discretiser": discretiser.DESCRIPTION,
            "table": {discretiser.name_of(key): cell for key, cell in sorted(self.table.items())},
            "waiting": sorted(self._waiting.items()),
            "trial": self._trial.export(),
        }

    def _restore(self, document: dict[str, Any]) -> None:
        if document.get("discretiser") != discretiser.DESCRIPTION:
            raise ValueError("the bins of its states are not those of this release: train it again")
        for name, row in mapping(document.get("table"), "table").items():
            cell = [number(x, f"table[{name}]") for x in sequence(row, name, len(NEW_CELL))]
            self.table[discretiser.key_named(name)] = cell
        self._trial.restore(document.get("trial"))
        self._waiting = dict(self._read_codes(document.get("waiting"), "waiting"))

    def _read_codes(self, value: Any, what: str) -> list[tuple[int, int]]:
        codes = pairs(value, what)
        if any(code // 2 not in self.table or count < 1 for code, count in codes):
            raise ValueError(f"{what} names a state that the table lacks")
        return codes
