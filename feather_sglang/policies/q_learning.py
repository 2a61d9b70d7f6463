"""Tabular Q-learning over scheduling rounds (paper 4.3.4)."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from feather_sglang.policies.learner import FEATURE_SET, MARGIN, Learner
from feather_sglang.policies.parameters import Number, Spec
from feather_sglang.policies.policy_file import mapping, number, sequence

_CLOSED = 0.01  # weight of the next state below which a return counts as complete


class QLearning(Learner):
    """An episode is what was decided between two rewards; all its decisions get one Bellman update.

    ``Q(s, a) += alpha_n * [(1 - gamma) * r + gamma * max Q(s', .) - Q(s, a)]``, where ``s'`` is the first state decided
    after the reward. Rewards that come with no decision in between (a batch that only decodes) join the return,
    discounted. ``1 - gamma`` keeps Q a throughput, tokens/s; ``alpha_n = max(alpha, 1 / n)``.
    """

    name = "qlearning"
    SPEC: ClassVar[Spec] = {
        "alpha": Number(0.02, 1e-6, 1.0),
        "gamma": Number(0.5, 0.0, 0.999),
        "eps_min": Number(0.004, 0.0, 1.0),
        "eps_decay": Number(0.95, 0.0, 1.0),
        "margin": MARGIN,
        "features": FEATURE_SET,
    }
    CELL = (0.0, 0.0, 0.0, 0.0, 1.0)  # Q and count of updates for ADD, then for STOP; epsilon of this state

    def __init__(self, *, seed: int = 0, explore: bool = True, **params: Any) -> None:
        super().__init__(seed=seed, explore=explore, **params)
        self._alpha: float = self.params["alpha"]
        self._gamma: float = self.params["gamma"]
        self._eps_min: float = self.params["eps_min"]
        self._eps_decay: float = self.params["eps_decay"]
        self._random = random.Random(seed)
        self._open: list[int] = []  # codes of the rewarded episode whose next state is not known yet
        self._return = 0.0  # its discounted reward so far
        self._weight = 1.0  # what the next state's value counts for

    def _wants_stop(self, cell: list[float], stop_code: int) -> bool:
        if self._open:
            self._close(cell)
        q_add, n_add, q_stop, n_stop, epsilon = cell
        if not n_add:
            return False
        if self.explore:
            cell[4] = max(epsilon * self._eps_decay, self._eps_min)
            if self._random.random() < epsilon:
                # One exploratory STOP at a time in a state: the next one waits for what this one shows.
                stop = self._random.random() < 0.5 and stop_code not in self._waiting
                self.explored_stops += stop
                return stop
        return n_stop > 0 and q_stop > q_add * (1.0 + self._margin)

    def _learn(self, reward: float) -> None:
        if self._waiting:
            self._open = list(self._waiting)
            self._return, self._weight = 0.0, 1.0
        self._return += self._weight * (1.0 - self._gamma) * reward
        self._weight *= self._gamma
        if self._open and self._weight < _CLOSED:
            self._close(None)

    def _close(self, cell: list[float] | None) -> None:
        """Update the open episode; `cell` is its next state, None where the return is complete without one."""
        values = [] if cell is None else [cell[i] for i in (0, 2) if cell[i + 1]]
        if values:
            target = self._return + self._weight * max(values)
        else:
            target = self._return / (1.0 - self._weight)  # an unmeasured next state: as good as what was seen
        for code in self._open:
            row = self.table[code >> 1]
            at = 2 * (code & 1)
            row[at + 1] += 1.0
            row[at] += max(self._alpha, 1.0 / row[at + 1]) * (target - row[at])
        self._open = []

    def end_episode(self) -> None:
        """Drop waiting decisions; close the rewarded episode without a next state."""
        super().end_episode()
        if self._open:
            self._close(None)

    def reseed(self, seed: int) -> None:
        """Start new random numbers."""
        super().reseed(seed)
        self._random = random.Random(seed)

    def _export(self) -> dict[str, Any]:
        version, words, gauss = self._random.getstate()
        episode = {"codes": [(code, 1) for code in self._open], "return": self._return, "weight": self._weight}
        return {**super()._export(), "episode": episode, "random": [version, list(words), gauss]}

    def _restore(self, document: dict[str, Any]) -> None:
        super()._restore(document)
        if any(cell[4] > 1.0 for cell in self.table.values()):
            raise ValueError("an exploration rate exceeds 1")
        episode = mapping(document.get("episode"), "episode")
        self._open = [code for code, _ in self._read_codes(episode.get("codes"), "episode")]
        self._return = number(episode.get("return"), "episode return")
        self._weight = number(episode.get("weight"), "episode weight", high=1.0)
        version, words, gauss = sequence(document.get("random"), "random", 3)
        try:
            self._random.setstate((version, tuple(sequence(words, "random words")), gauss))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"random: {error}") from error
