"""Contextual bandit with upper confidence bounds (paper 4.3.3)."""

from __future__ import annotations

from math import log, sqrt
from typing import Any, ClassVar

from feather_sglang.policies.learner import FEATURE_SET, MARGIN, Learner
from feather_sglang.policies.parameters import Number, Spec
from feather_sglang.policies.policy_file import number

_FORGOTTEN = 1e-9  # a discounted count below this says nothing any more


class Bandit(Learner):
    """Every decision stands alone: take the action with the larger ``mean + c * sqrt(ln S / n)``.

    ``S`` counts measurements, ``n`` those of the action in this state, discounted: each new measurement in a state
    multiplies the older ones there by `discount`, because a server's load changes (paper 5.3.6). Means are divided by
    the larger mean of the state, so `c` is a share of throughput whatever the hardware and the batch size.
    """

    name = "bandit"
    SPEC: ClassVar[Spec] = {
        "c": Number(0.05, 0.0, 10.0),
        "discount": Number(0.9998, 0.5, 1.0),
        "margin": MARGIN,
        "features": FEATURE_SET,
    }
    CELL = (0.0, 0.0, 0.0, 0.0)  # sum of rewards and count for ADD, then for STOP

    def __init__(self, *, seed: int = 0, explore: bool = True, **params: Any) -> None:
        super().__init__(seed=seed, explore=explore, **params)
        self._c: float = self.params["c"]
        self._discount: float = self.params["discount"]
        self._measurements = 0
        self._log = 0.0

    def _wants_stop(self, cell: list[float], stop_code: int) -> bool:
        add_sum, add_count, stop_sum, stop_count = cell
        if add_count < _FORGOTTEN:
            return False
        if stop_count < _FORGOTTEN:
            gain = -self._margin
            bonus = 2.0 if self._c > 0 else 0.0  # untried: nothing it could show is out of bounds
        else:
            add_mean, stop_mean = add_sum / add_count, stop_sum / stop_count
            scale = add_mean if add_mean > stop_mean else stop_mean
            gain = (stop_mean - add_mean) / scale - self._margin if scale > 0 else -self._margin
            bonus = self._c * (sqrt(self._log / stop_count) - sqrt(self._log / add_count))
        if not self.explore:
            return gain > 0
        if gain + bonus <= 0:
            return False
        if gain <= 0:
            if stop_code in self._waiting:  # one exploratory STOP is under way: wait for what it shows
                return False
            self.explored_stops += 1
        return True

    def _learn(self, reward: float) -> None:
        for code in self._waiting:
            cell = self.table[code >> 1]
            for i in range(4):
                cell[i] *= self._discount
            at = 2 * (code & 1)
            cell[at] += reward
            cell[at + 1] += 1.0
        self._measurements += len(self._waiting)
        self._log = log(self._measurements) if self._measurements else 0.0

    def _export(self) -> dict[str, Any]:
        return {**super()._export(), "measurements": self._measurements}

    def _restore(self, document: dict[str, Any]) -> None:
        super()._restore(document)
        self._measurements = int(number(document.get("measurements"), "measurements", high=2**62))
        self._log = log(self._measurements) if self._measurements else 0.0
