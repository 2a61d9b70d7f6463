"""Contextual bandit with upper confidence bounds (paper 4.3.3)."""

from __future__ import annotations

from math import log, sqrt
from typing import Any, ClassVar

from feather_sglang.scheduling.policies.estimates import FORGOTTEN, lead, learn
from feather_sglang.scheduling.policies.learner import MARGIN, TRIAL, Learner
from feather_sglang.scheduling.policies.parameters import Number, Spec
from feather_sglang.scheduling.policies.policy_file import integer


class Bandit(Learner):
    """Every decision stands alone: take the action with the larger ``mean + c * sqrt(ln S / n)``.

    ``S`` counts rewards credited, ``n`` those of the action in this state. A server's load changes (paper 5.3.6), so a
    mean follows the last `window` rewards or so, and each reward in a state multiplies the counts there by `discount`:
    an action not taken for long is tried again. Means are divided by the larger mean of the state, so `c` is a share of
    throughput whatever the hardware and the batch size.
    """

    name = "bandit"
    SPEC: ClassVar[Spec] = {
        "c": Number(0.05, 0.0, 10.0),
        "window": Number(100, 1, 1e9),
        "discount": Number(0.9999, 0.5, 1.0),
        "margin": MARGIN,
        "trial": TRIAL,
    }

    def __init__(self, *, seed: int = 0, explore: bool = True, **params: Any) -> None:
        super().__init__(seed=seed, explore=explore, **params)
        self._c: float = self.params["c"]
        self._window: float = self.params["window"]
        self._discount: float = self.params["discount"]
        self._set_credited(0)

    def _set_credited(self, credited: int) -> None:
        self._credited = credited
        self._confidence = self._c * sqrt(log(credited)) if credited > 1 else 0.0

    def _wants_stop(self, key: int, cell: list[float]) -> bool:
        if self._trial.running and self.explore:
            return True
        n_add, n_stop = cell[1], cell[3]
        if n_add < FORGOTTEN:
            return False
        if n_stop < FORGOTTEN:
            return self._c > 0 and self._may_try()
        gain, proven = lead(cell, self._margin)
        if not self.explore:
            return proven
        if gain + self._confidence * (1.0 / sqrt(n_stop) - 1.0 / sqrt(n_add)) <= 0:
            return False
        return proven or self._may_try()

    def _learn(self, reward: float) -> None:
        for code in self._waiting:
            learn(self.table[code >> 1], code & 1, reward, self._trial.settled(code & 1), self._window, self._discount)
        self._set_credited(self._credited + len(self._waiting))

    def _export(self) -> dict[str, Any]:
        return {**super()._export(), "credited": self._credited}

    def _restore(self, document: dict[str, Any]) -> None:
        super()._restore(document)
        self._set_credited(integer(document.get("credited"), "credited"))
