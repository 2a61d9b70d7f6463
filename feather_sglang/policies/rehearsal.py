"""Teach a learner from whole passes: each under one fixed stopping rule, credited with the pass's throughput.

What STOP is worth shows only over the life of many requests: the running batch has to become homogeneous first, and
while a loaded server's batch is full there are hardly any decisions, and so hardly any rewards. A replay can do what
a server must not: serve the same requests again under another rule. Each state learns what the rule does in it with the
return of the whole pass, and keeps the best return of each action (Monte Carlo search over policies: one pass's return
has next to no noise, so the best is no lucky draw). The table that comes out behaves like the best rule.
"""

from __future__ import annotations

from typing import NamedTuple

from feather_sglang.policies.base import Policy
from feather_sglang.policies.estimates import NEW_CELL
from feather_sglang.policies.learner import Learner
from feather_sglang.policies.protocol import ADD, STOP, Action, PolicyState

# Rewards that a pass counts for: a pass is thousands of steps.
WEIGHT = 50.0


class Rule(NamedTuple):
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


NEVER = Rule(1 << 30)
FIRST_RULES = (NEVER, Rule(1), Rule(8), Rule(32), Rule(128))


def neighbours(rule: Rule) -> list[Rule]:
    """The rules to try next to a good one."""
    if rule == NEVER:
        return [Rule(256)]
    return [Rule(max(1, rule.batch // 2), rule.peers), Rule(rule.batch * 2, rule.peers), Rule(rule.batch, 8)]


class Rehearsal(Policy):
    """Behave by one rule for one pass."""

    name = "rehearsal"

    def __init__(self, rule: Rule) -> None:
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


def teach(learner: Learner, rule: Rule, throughput: float) -> None:
    """Credit a pass's output tokens/s to what its rule does in every state."""
    for key, state in learner.discretiser.corners():
        if state.tip_loss <= 0 or state.batch_size <= 0:
            continue  # additions that cost nothing are not decided
        cell = learner.table.setdefault(key, list(NEW_CELL))
        mean, count = (2, 3) if rule.action(state) is STOP else (0, 1)
        cell[mean], cell[count] = max(cell[mean], throughput), WEIGHT
