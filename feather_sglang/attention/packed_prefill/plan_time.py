"""What it takes the host to plan a packed prefill step: in proportion to what one host took, learned from its plans."""

from __future__ import annotations

# Whole steps of docs/measured/prefill_h200.json: 0.17 ms for 16 tokens, 1.2 to 1.9 for 8,192.
PLAN_S, PLAN_TOKEN_S = 170e-6, 0.2e-6
SHARE = 0.125  # of the last plan in the mean
HICCUP = 2.0  # times the mean, and its inverse: further off no plan counts
SLOWEST = 4.0  # pace
DOUBT = 1 / 4096  # of a slow pace, for a step that was not planned: where none is, no plan tells that the host is free


class PlanTime:
    """Seconds of a plan on this host, which has a part for each shape of heads."""

    def __init__(self, shapes: int) -> None:
        self._shapes = shapes
        self.pace = 1.0  # moving mean of what plans took, to what they take on the host that was measured

    def seconds(self, tokens: int) -> float:
        """What the plan of so many new tokens should take."""
        return self.pace * self._shapes * (PLAN_S + PLAN_TOKEN_S * tokens)

    def learn(self, tokens: int, seconds: float) -> None:
        """A plan of so many new tokens took so long."""
        ratio = min(max(seconds / self.seconds(tokens), 1 / HICCUP), HICCUP)
        self.pace = min(self.pace * (1 + SHARE * (ratio - 1)), SLOWEST)

    def declined(self) -> None:
        """A step was not planned, as it would not have paid."""
        self.pace = max(min(self.pace, 1.0), self.pace * (1 - DOUBT))
