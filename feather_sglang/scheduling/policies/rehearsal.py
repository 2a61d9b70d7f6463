"""Teach a learner from whole passes: each under one fixed stopping rule, credited with the pass's throughput.

What STOP is worth shows only over the life of many requests: the running batch has to become homogeneous first, and
while a loaded server's batch is full there are hardly any decisions, and so hardly any rewards. A replay can do what
a server must not: serve the same requests again under another rule. Each state learns what the rule does in it with the
return of the whole pass, and keeps the best return of each action (Monte Carlo search over policies). The table that
comes out behaves like the best rule, of those that stand on firm ground (``firm``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from feather_sglang.scheduling.policies import discretiser
from feather_sglang.scheduling.policies.base import Policy
from feather_sglang.scheduling.policies.estimates import NEW_CELL
from feather_sglang.scheduling.policies.learner import Learner
from feather_sglang.scheduling.policies.protocol import ADD, STOP, Action, PolicyState

# Rewards that a pass counts for: a pass is thousands of steps.
WEIGHT = 50.0


class StopRule(NamedTuple):
    """STOP where shared prefix would be lost, from ``batch`` requests and ``peers`` peers on (powers of two, or 0)."""

    batch: int
    peers: int = 0

    def action(self, state: PolicyState) -> Action:
        """Answer a state."""
        loses = state.tip_loss > 0 and state.batch_size > 0
        return STOP if loses and state.batch_size >= self.batch and state.peers >= self.peers else ADD

    def __str__(self) -> str:
        if self == NEVER:
            return "never stop"
        return f"stop from {self.batch}" + (f", {self.peers} peers" if self.peers else "")


NEVER = StopRule(1 << 30)
FIRST_RULES = (NEVER, StopRule(1), StopRule(8), StopRule(32), StopRule(128))


def neighbours(rule: StopRule) -> list[StopRule]:
    """The rules to try next to a good one."""
    if rule == NEVER:
        return [StopRule(256)]
    return [rule._replace(batch=max(1, rule.batch // 2)), rule._replace(batch=rule.batch * 2), rule._replace(peers=8)]


class Rehearsal(Policy):
    """A policy that follows one fixed rule for one pass."""

    name = "rehearsal"

    def __init__(self, rule: StopRule) -> None:
        super().__init__()
        self.rule = rule

    def decide(self, state: PolicyState) -> Action:
        """Answer by the rule."""
        action = self.rule.action(state)
        if action is STOP:
            self.stops += 1
        else:
            self.adds += 1
        return action


def firm(returns: Mapping[StopRule, float]) -> dict[StopRule, float]:
    """What each rule counts for: no more than the best rules tried at the next smaller and the next larger batch.

    At the edge of what works a return is partly luck: one stranger that finds the batch a row short of the threshold
    stays for its whole output, and on other requests it may come just then. Never to stop stands by itself.
    """
    best: dict[int, float] = {}
    for rule, value in returns.items():
        best[rule.batch] = max(value, best.get(rule.batch, value))
    tried = sorted(best)
    around = {batch: [best[b] for b in tried[max(0, i - 1) : i + 2]] for i, batch in enumerate(tried)}
    return {rule: value if rule == NEVER else min(value, *around[rule.batch]) for rule, value in returns.items()}


def teach(learner: Learner, returns: Mapping[StopRule, float]) -> None:
    """Replace what a learner knows by what the passes so far have shown: each rule's output tokens/s."""
    learner.table.clear()
    for rule, value in firm(returns).items():
        for key, state in discretiser.corners():
            if state.tip_loss <= 0 or state.batch_size <= 0:
                continue  # additions that cost nothing are not decided
            cell = learner.table.setdefault(key, list(NEW_CELL))
            mean, count = (2, 3) if rule.action(state) is STOP else (0, 1)
            cell[mean], cell[count] = max(cell[mean], value), WEIGHT


def imitate(learner: Learner, answer: Callable[[PolicyState], Action]) -> None:
    """Replace what a learner knows by what somebody answers: in each state that action counts for twice the other."""
    learner.table.clear()
    for key, state in discretiser.corners():
        if state.tip_loss > 0 and state.batch_size > 0:
            stop = answer(state) is STOP
            learner.table[key] = [1.0 + (not stop), WEIGHT, 1.0 + stop, WEIGHT, 0.0]
