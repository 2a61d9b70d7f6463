"""The rules by which those who wait are ranked, other than by what they share; each is one line of ``_KEYS``."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from feather_sglang.scheduling.admission.queue_state import QueueState
from feather_sglang.scheduling.admission.round import Round
from feather_sglang.scheduling.modes.mode import Ranking
from feather_sglang.scheduling.tree.cht import Candidate

_ASKED = 512  # of the oldest waiting are ranked


class _Standing(NamedTuple):
    """A waiting request: its place in order of arrival, seconds waited, work left, whether it can come in time."""

    place: int
    waited: float
    work: float
    in_time: bool


# The smallest goes first.
_KEYS: dict[Ranking, Callable[[_Standing], Any]] = {
    Ranking.IN_TIME: lambda one: (not one.in_time, one.work, one.place),
    Ranking.RATIO: lambda one: (-one.waited / one.work, one.place),
    Ranking.SHORTEST: lambda one: (one.work, one.place),
    Ranking.OLDEST: lambda one: one.place,
}


class Ranks:
    """Ranks the waiting requests once a round.

    Attributes
    ----------
    in_time
        Whether a request with so much prefill left can have its first token in time at a time (seconds).
    """

    def __init__(self, state: QueueState) -> None:
        self.state = state
        self.in_time: Callable[[Hashable, float, float], bool] = lambda request_id, now, work: True

    def best(self, opened: Round, shared: Candidate) -> Candidate:
        """Return the first by the round's rule who may be proposed; ``shared``, the tree's best, if nobody else."""
        state, tree = self.state, self.state.tree
        if opened.ranked is None:
            opened.ranked = self._rank(opened.mode.ranking)
        while opened.ranked:
            request_id = opened.ranked[-1]
            out = request_id in opened.overtakers or request_id in opened.unavailable
            if request_id in tree.waiting and not out and not tree.is_deferred(request_id):
                same = state.fairness.priority(request_id) == state.fairness.priority(shared.request_id)
                return tree.candidate(request_id) if same else shared
            opened.ranked.pop()
        return shared

    def _rank(self, ranking: Ranking) -> list[Hashable]:
        state, key = self.state, _KEYS[ranking]
        now, found = state.fairness.now, {}
        for place, request_id in enumerate(state.overtaking.first(_ASKED)):
            prefill = state.prefill_now(request_id)
            in_time = self.in_time(request_id, now, prefill)
            found[request_id] = key(_Standing(place, state.waited(request_id, now), prefill, in_time))
        return sorted(found, key=found.__getitem__, reverse=True)
