"""Teach a learner from whole passes: each under one fixed stopping rule, credited with the pass's throughput.

What STOP is worth shows only over the life of many requests: the running batch has to become homogeneous first, and
while a loaded server's batch is full there are hardly any decisions, and so hardly any rewards. A replay can do what
a server must not: serve the same requests again under another rule. Every state that a pass decided learns its action
with the return of the whole pass (Monte Carlo control with exploring policies; Sutton and Barto, 5.4).
"""

from __future__ import annotations

from feather_sglang.policies.base import Policy
from feather_sglang.policies.estimates import NEW_CELL, learn
from feather_sglang.policies.learner import Learner
from feather_sglang.policies.protocol import ADD, STOP, Action, PolicyState

# Batch sizes from which on a pass stops; the last never does.
RULES = (8, 32, 128, 1 << 30)
# Rewards that a pass counts for: a pass is thousands of steps, its throughput has next to no noise.
WEIGHT = 50.0


class Rehearsal(Policy):
    """Behave by one rule for one pass: STOP from ``threshold`` running requests on, if shared prefix would be lost.

    Parameters
    ----------
    learner : whose states are noted; it takes no part in the pass.
    """

    name = "rehearsal"

    def __init__(self, learner: Learner, threshold: int) -> None:
        super().__init__()
        self.threshold = threshold
        self._learner = learner
        self._decided: dict[int, Action] = {}

    def decide(self, state: PolicyState) -> Action:
        """Answer by the rule."""
        if state.tip_loss <= 0 or state.batch_size <= 0:
            self.adds += 1
            return ADD
        action = STOP if state.batch_size >= self.threshold else ADD
        self._decided[self._learner.discretiser.key(state)] = action
        if action is STOP:
            self.stops += 1
        else:
            self.adds += 1
        return action

    def teach(self, throughput: float) -> None:
        """Credit the pass's output tokens/s to every state that it decided."""
        for key, action in self._decided.items():
            cell = self._learner.table.setdefault(key, list(NEW_CELL))
            for _ in range(int(WEIGHT)):
                learn(cell, int(action is STOP), throughput, 1.0, float("inf"))
