"""The rules: whether a proposed request is admitted now.

A rule is a class with ``check(proposal, round) -> Verdict`` and ``defer(proposal, round)``, which takes whom it does
not admit out of the tree's search. To add one, write it here, give it a ``Verdict``, and name it in ``make_rules``, in
the order in which they are asked.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

from feather_sglang.scheduling.admission.deferrals import LEAST_TOKENS
from feather_sglang.scheduling.admission.queue import QueueState
from feather_sglang.scheduling.admission.types import Proposal, Round, Verdict


class Rule(Protocol):
    """One reason not to admit a proposed request.

    Attributes
    ----------
    spares_overdue
        Whether who is overdue, or whose turn it is, is not asked about.
    least_tokens
        Nor who computes fewer.
    """

    spares_overdue: bool
    least_tokens: int

    def check(self, proposal: Proposal, opened: Round) -> Verdict:
        """Return ``ADMIT``, or the rule's own verdict; changes nothing that another rule reads."""
        ...

    def defer(self, proposal: Proposal, opened: Round) -> None:
        """Take the request out of the search (``hold`` or ``defer`` of the tree), or it is proposed again at once.

        Not where the adapter ends the round on the rule's verdict, as it does on ``KV_BUDGET``.
        """
        ...


def make_rules(state: QueueState) -> tuple[Rule, ...]:
    """Return the rules of one scheduler, in the order in which they are asked."""
    return (OvertakingBound(state), Batching(state), EvictsLast(state), KVBudget(state))


class OvertakingBound:
    """No request passes an older one by too much, or goes early for a cached prefix that is gone (``overtaking``)."""

    spares_overdue = True
    least_tokens = 0

    def __init__(self, state: QueueState) -> None:
        self.state = state

    def check(self, proposal: Proposal, opened: Round) -> Verdict:
        """``OVERTAKES`` for who was taken for shorter than it is."""
        state, request_id = self.state, proposal.request_id
        slack = state.overtaking.slack(request_id, state.fairness.now)
        passes = slack == inf or state.work.of(proposal.missing, state.tokens[request_id]) <= slack
        return Verdict.ADMIT if passes and not self._evicted(proposal) else Verdict.OVERTAKES

    def defer(self, proposal: Proposal, opened: Round) -> None:
        """Out for this round: it competes anew in the next one, as long as it is."""
        state, request_id = self.state, proposal.request_id
        if self._evicted(proposal):
            priority = state.fairness.priority(request_id)
            state.cached_prefixes.note(request_id, priority, proposal.cached, state.tokens[request_id])
        opened.overtakers.add(request_id)
        state.tree.hold(request_id)

    def _evicted(self, proposal: Proposal) -> bool:
        # A prompt that is cached as a whole is computed from its last page on.
        before = self.state.cached_prefixes.tokens(proposal.request_id)
        return proposal.cached + self.state.tree.chunk_size < before


class Batching:
    """A prefix is computed once enough requests share it (``prefix_batching``)."""

    spares_overdue = True
    least_tokens = LEAST_TOKENS

    def __init__(self, state: QueueState) -> None:
        self.state = state

    def check(self, proposal: Proposal, opened: Round) -> Verdict:
        """``BATCHING`` where waiting costs less than computing the prefix again."""
        waits = self.state.deferrals.should_batch(proposal.request_id, proposal.cached, proposal.missing)
        return Verdict.BATCHING if waits else Verdict.ADMIT

    def defer(self, proposal: Proposal, opened: Round) -> None:
        """With all that share what it would compute, for as long as that holds."""
        self.state.deferrals.batch(proposal.request_id, proposal.cached, proposal.missing)


class EvictsLast:
    """A request that would evict others goes last, where prefixes compete for memory."""

    spares_overdue = True
    least_tokens = LEAST_TOKENS

    def __init__(self, state: QueueState) -> None:
        self.state = state

    def check(self, proposal: Proposal, opened: Round) -> Verdict:
        """``EVICTS`` where more is to be computed than is free."""
        request_id, cached, missing, free, _ = proposal
        last = self.state.deferrals.should_go_last(request_id, cached, missing, free)
        return Verdict.EVICTS if last else Verdict.ADMIT

    def defer(self, proposal: Proposal, opened: Round) -> None:
        """With all that share what it would compute, until all others have been proposed."""
        self.state.deferrals.go_last(proposal.request_id, proposal.cached)


class KVBudget:
    """A request is admitted only if memory suffices for all running requests at every step ahead (``forecast``)."""

    spares_overdue = False
    least_tokens = 0

    def __init__(self, state: QueueState) -> None:
        self.state = state

    def check(self, proposal: Proposal, opened: Round) -> Verdict:
        """``KV_BUDGET`` where memory would not suffice, as far as can be foreseen."""
        state, forecast, request_id = self.state, self.state.forecast, proposal.request_id
        running = state.tree.active
        if forecast is None or not running:
            return Verdict.ADMIT  # beside nobody: the engine decides
        if request_id == opened.exempt or not state.deferrals.memory_is_tight():
            return Verdict.ADMIT
        if not opened.foreseen:
            forecast.open(map(state.foreseeable, running))
            opened.foreseen = True
        needs = forecast.needs(*state.foreseeable(request_id))
        return Verdict.ADMIT if opened.pending_tokens + needs <= proposal.available else Verdict.KV_BUDGET

    def defer(self, proposal: Proposal, opened: Round) -> None:
        """Nothing: the engine ends the round."""
