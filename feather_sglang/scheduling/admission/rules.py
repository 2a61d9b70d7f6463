"""The rules: whether a proposed request is admitted now.

A rule is a class with ``check(proposal, round) -> Verdict`` and ``defer(proposal, round)``, which takes whom it does
not admit out of the tree's search. To add one, write it here, give it a ``Verdict``, and name it in ``make_rules``, in
the order in which they are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from feather_sglang.scheduling.admission.forecast import Outlook
from feather_sglang.scheduling.admission.queue import QueueState
from feather_sglang.scheduling.admission.types import Proposal, Round, Verdict


class Rule(Protocol):
    """One reason not to admit a proposed request.

    Attributes
    ----------
    spares_overdue
        Whether who is overdue, or whose turn it is, is not asked about.
    """

    spares_overdue: bool

    def check(self, proposal: Proposal, opened: Round) -> Verdict:
        """Return ``ADMIT``, or the rule's own verdict; changes nothing that another rule reads."""
        ...

    def defer(self, proposal: Proposal, opened: Round) -> None:
        """Take the request out of the search (``hold`` or ``defer`` of the tree), or it is proposed again at once.

        Not where the adapter ends the round on the rule's verdict, as it does on ``KV_BUDGET``.
        """
        ...


def make_rules(state: QueueState, kv_budget: KVBudget) -> tuple[Rule, ...]:
    """Return the rules of one scheduler, in the order in which they are asked."""
    return (OvertakingBound(state), Batching(state), EvictsLast(state), kv_budget)


class OvertakingBound:
    """Nobody passes an older request by too much, nor goes early for a cached prefix that is gone (``overtaking``)."""

    spares_overdue = True

    def __init__(self, state: QueueState) -> None:
        self.state = state

    def check(self, proposal: Proposal, opened: Round) -> Verdict:
        """``OVERTAKES`` for who was taken for shorter than it is."""
        state, request_id = self.state, proposal.request_id
        work = state.work.of(proposal.missing, state.tokens(request_id))
        passes = work <= state.overtaking.slack(request_id, state.fairness.now)
        return Verdict.ADMIT if passes and not self._evicted(proposal) else Verdict.OVERTAKES

    def defer(self, proposal: Proposal, opened: Round) -> None:
        """Out for this round: it competes anew in the next one, as long as it is."""
        state, request_id = self.state, proposal.request_id
        if self._evicted(proposal):
            priority = state.fairness.priority(request_id)
            state.cached_prefixes.note(request_id, priority, proposal.cached, state.tokens(request_id))
        opened.overtakers.add(request_id)
        state.tree.hold(request_id)

    def _evicted(self, proposal: Proposal) -> bool:
        # A prompt that is cached as a whole is computed from its last page on.
        before = self.state.cached_prefixes.tokens(proposal.request_id)
        return proposal.cached + self.state.tree.chunk_size < before


class Batching:
    """A prefix is computed once enough requests share it (``prefix_batching``)."""

    spares_overdue = True

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
    """Who evicts goes last, where prefixes compete for memory."""

    spares_overdue = True

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
    """Memory suffices for all that run, at every step ahead (``forecast``).

    Parameters
    ----------
    outlook_of
        Gives a request's lengths. ``None``: everybody is admitted, as without a forecast.
    """

    spares_overdue = False

    def __init__(self, state: QueueState, outlook_of: Callable[[Hashable], Outlook] | None) -> None:
        self.state = state
        self.outlook_of = outlook_of

    def check(self, proposal: Proposal, opened: Round) -> Verdict:
        """``KV_BUDGET`` where memory would not suffice, as far as can be foreseen."""
        state, forecast, request_id = self.state, self.state.forecast, proposal.request_id
        active = state.tree.active
        if forecast is None or self.outlook_of is None or not active:
            return Verdict.ADMIT  # beside nobody: the engine decides
        if request_id == opened.exempt or not state.deferrals.memory_is_tight():
            return Verdict.ADMIT
        if not opened.foreseen:
            forecast.open((self.outlook_of(running), state.shared_parts(running)) for running in active)
            opened.foreseen = True
        needs = forecast.needs(self.outlook_of(request_id), state.shared_parts(request_id))
        return Verdict.ADMIT if opened.pending_tokens + needs <= proposal.available else Verdict.KV_BUDGET

    def defer(self, proposal: Proposal, opened: Round) -> None:
        """Nothing: the engine ends the round."""

    def admitted(self, request_id: Hashable, cached_tokens: int | None, opened: Round) -> None:
        """Foresee with a request that joined; None: its prompt need not be computed."""
        if self.state.forecast is None or self.outlook_of is None:
            return
        outlook = self.outlook_of(request_id)
        opened.pending_tokens += 0 if cached_tokens is None else max(0, outlook.tokens - cached_tokens)
        if opened.foreseen:
            self.state.forecast.admit(outlook, self.state.shared_parts(request_id))
