"""The stop decision: a policy's state, its actions, and its interface (paper 4.3)."""

from __future__ import annotations

import os
from enum import Enum
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Action(Enum):
    """Admit the candidate, or end admission for this scheduling round."""

    ADD = 0
    STOP = 1


class PolicyState(NamedTuple):
    """One step of batch formation, as the scheduler sees it (paper 4.3.1).

    Attributes
    ----------
    batch_size : requests in the batch now.
    tip_loss : chunks of shared prefix that the whole batch would lose (``tip_before - tip_after``).
    peers : waiting requests that share the prefix down to the new tip.
    group : ``(candidate_group, batch_groups)``, read by the oracle alone.
    """

    batch_size: int
    tip_loss: int
    peers: int
    group: Any = None


@runtime_checkable
class StopPolicy(Protocol):
    """The interface of a stop policy. Order of calls: ``decide`` any number of times, ``observe``, again."""

    name: str
    explore: bool  # False: frozen, greedy decisions, nothing learnt; may be set at any time

    def decide(self, state: PolicyState) -> Action:
        """Answer ADD or STOP for the candidate described by `state`."""
        ...

    def cancel(self) -> None:
        """Take back the last decision: the scheduler could not carry it out, so nothing is learnt from it."""
        ...

    def observe(self, reward: float) -> None:
        """Credit `reward` (decode tokens/s) to every decision taken since the previous reward."""
        ...

    def end_episode(self) -> None:
        """Drop decisions still without a reward: what follows is not their consequence (idle, pause, flush)."""
        ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy file atomically: all that is needed to continue identically."""
        ...

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace this policy's content by the file's; on any fault raise FeatherError and change nothing."""
        ...

    def stats(self) -> dict[str, float]:
        """Return counters since construction (or load), for metrics and learning curves."""
        ...


ADD = Action.ADD
STOP = Action.STOP
