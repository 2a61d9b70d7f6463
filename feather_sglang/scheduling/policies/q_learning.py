"""Tabular Q-learning over scheduling rounds (paper 4.3.4)."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from feather_sglang.scheduling.policies import discretiser
from feather_sglang.scheduling.policies.estimates import FORGOTTEN, lead, learn
from feather_sglang.scheduling.policies.learner import MARGIN, TRIAL, Learner
from feather_sglang.scheduling.policies.parameters import Number, Spec
from feather_sglang.scheduling.policies.policy_file import integer, mapping, number, sequence

_WORDS = 625  # of a generator's state
_CLOSED = 0.01  # weight of the next state below which a return counts as complete


class QLearning(Learner):
    """An episode is the decisions between two rewards, all of which get one Bellman update.

    ``Q(s, a) += alpha_n * [(1 - gamma) * r + gamma * max Q(s', .) - Q(s, a)]``, where ``s'`` is the first state decided
    after the reward. Rewards that come with no decision in between (a batch that only decodes) join the return,
    discounted. ``1 - gamma`` keeps Q a throughput, tokens/s; ``alpha_n = max(alpha, 1 / n)``.
    """

    name = "qlearning"
    SPEC: ClassVar[Spec] = {
        "alpha": Number(0.02, 1e-6, 1.0),
        "gamma": Number(0.3, 0.0, 0.999),
        "eps_min": Number(0.0005, 0.0, 1.0),
        "eps_decay": Number(0.9, 0.0, 1.0),
        "margin": MARGIN,
        "trial": TRIAL,
    }

    def __init__(self, *, seed: int = 0, explore: bool = True, **params: Any) -> None:
        super().__init__(seed=seed, explore=explore, **params)
        self._alpha: float = self.params["alpha"]
        self._gamma: float = self.params["gamma"]
        self._eps_min: float = self.params["eps_min"]
        self._eps_decay: float = self.params["eps_decay"]
        self._random = random.Random(seed)
        self._epsilon: dict[int, float] = {}  # exploration rate of a state, by its key; 1 where not in it
        self._open: list[int] = []  # codes of the rewarded episode whose next state is not known yet
        self._return = 0.0  # its discounted reward so far
        self._weight = 0.0  # what the next state's value counts for

    def _wants_stop(self, key: int, cell: list[float]) -> bool:
        if self._open and self.explore:
            self._close(cell)
        if self._trial.running and self.explore:
            return True
        if cell[1] < FORGOTTEN:
            return False
        if self.explore and self._trial.may_start():  # epsilon decays with the chances to explore
            epsilon = self._epsilon.get(key, 1.0)
            self._epsilon[key] = max(epsilon * self._eps_decay, self._eps_min)
            if self._random.random() < epsilon:
                return self._random.random() < 0.5 and self._may_try()
        if cell[3] < FORGOTTEN:
            return False
        gain, proven = lead(cell, self._margin)
        return proven or (gain > 0 and self._may_try())

    def _learn(self, reward: float) -> None:
        if self._waiting:
            self._open = list(self._waiting)
            self._return, self._weight = 0.0, 1.0
        elif not self._open:
            return
        self._return += self._weight * (1.0 - self._gamma) * reward
        self._weight *= self._gamma
        if self._weight < _CLOSED:
            self._close(None)

    def _close(self, cell: list[float] | None) -> None:
        """Update the open episode; `cell` is its next state, None where the return is complete without one."""
        values = [] if cell is None else [cell[i] for i in (0, 2) if cell[i + 1] >= FORGOTTEN]
        if values:
            target = self._return + self._weight * max(values)
        else:
            target = self._return / (1.0 - self._weight)  # an unmeasured next state: as good as what was seen
        for code in self._open:
            learn(self.table[code >> 1], code & 1, target, self._trial.settled(code & 1), 1.0 / self._alpha)
        self._open = []

    def end_episode(self) -> None:
        """Drop waiting decisions; close the rewarded episode without a next state."""
        super().end_episode()
        if self._open and self.explore:
            self._close(None)
        self._open = []

    def reseed(self, seed: int) -> None:
        """Start new random numbers."""
        super().reseed(seed)
        self._random = random.Random(seed)

    def _export(self) -> dict[str, Any]:
        rates = {discretiser.name_of(key): rate for key, rate in sorted(self._epsilon.items())}
        episode = {"codes": [(code, 1) for code in self._open], "return": self._return, "weight": self._weight}
        return {**super()._export(), "epsilon": rates, "episode": episode, "random": list(self._random.getstate()[1])}

    def _restore(self, document: dict[str, Any]) -> None:
        super()._restore(document)
        for state, rate in mapping(document.get("epsilon"), "epsilon").items():
            self._epsilon[discretiser.key_named(state)] = number(rate, f"epsilon[{state}]", high=1.0)
        episode = mapping(document.get("episode"), "episode")
        self._open = [code for code, _ in self._read_codes(episode.get("codes"), "episode")]
        self._return = number(episode.get("return"), "episode return")
        self._weight = number(episode.get("weight"), "episode weight", high=0.999)
        words = tuple(
            integer(word, "random", high=2**32 - 1) for word in sequence(document.get("random"), "random", _WORDS)
        )
        self._random.setstate((random.Random.VERSION, words, None))
