"""The order: who is proposed next.

1. Who is overdue, once overtaken by as many as were ahead of it, or where nobody else may go before it.
2. The best: of the most urgent class the one with the fewest tokens to compute, unless it would pass an older request
   by more than the bound; then the shortest of the oldest.
3. After STOP, only who is inside the batch's main branch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from feather_sglang.scheduling.admission.queue_state import QueueState
from feather_sglang.scheduling.admission.round import Round
from feather_sglang.scheduling.admission.stopping import Stopping
from feather_sglang.scheduling.admission.verdict import Batch
from feather_sglang.scheduling.policies import PolicyState
from feather_sglang.scheduling.tree.cht import Candidate


class Order:
    """Chooses among the waiting requests; asks the stop policy, and releases a deferral where a turn has come.

    Parameters
    ----------
    group_of
        Gives a request's prefix group; only the oracle policy, an upper reference for evaluation, reads it.
    """

    def __init__(
        self, state: QueueState, stopping: Stopping, group_of: Callable[[Hashable], Hashable] | None = None
    ) -> None:
        self.state = state
        self.stopping = stopping
        self.group_of = group_of

    def next(self, opened: Round, batch: Batch) -> Hashable | None:
        """Return whom to propose, or None if nobody is to be admitted any more."""
        state = self.state
        best = self._best(opened)
        overdue = state.most_overdue(best, opened)
        if overdue is not None and not self._is_most_urgent(overdue):
            overdue = None
        opened.hurried = opened.due = None
        limit_reached = best is None or state.deferrals.limit_reached(best)
        if overdue is not None and (
            best is None or limit_reached or state.fairness.is_overtaken(overdue) or not state.may_pass(best.request_id)
        ):
            opened.hurried = opened.due = overdue
            return overdue
        if best is None or (overdue is None and (opened.delayed or limit_reached)):
            return None
        if not self._is_most_urgent(best.request_id):
            return None  # the more urgent ones wait for a prefix that is being computed
        if not state.may_pass(best.request_id):
            return self._in_turn(opened)
        if overdue is not None:
            opened.hurried = best.request_id
            return best.request_id
        opened.stopped = opened.stopped or self._stops_at(best, batch)
        return self._inside_branch(opened) if opened.stopped else best.request_id

    def _best(self, opened: Round) -> Candidate | None:
        """The request with the fewest tokens to compute, beside what runs or what the cache holds.

        Not where prefixes compete for memory: there who evicts goes last already.
        """
        state, tree = self.state, self.state.tree
        best = tree.find_best()
        if best is None or state.deferrals.memory_is_short():
            return best
        cached = state.cached_prefixes.shortest(lambda r: r not in opened.overtakers and not tree.is_deferred(r))
        if cached is None or state.fairness.priority(cached) != state.fairness.priority(best.request_id):
            return best
        return tree.candidate(cached) if state.uncached(cached) < state.uncached(best.request_id) else best

    def _is_most_urgent(self, request_id: Hashable) -> bool:
        return self.state.fairness.priority(request_id) == self.state.overtaking.most_urgent()

    def _in_turn(self, opened: Round) -> Hashable | None:
        """The shortest of the oldest, where somebody may not be passed any more.

        The oldest one may be it whatever it was to wait for, but for a prefix that is being computed.
        """
        state, overtaking = self.state, self.state.overtaking
        priority = overtaking.most_urgent()
        assert priority is not None
        oldest = overtaking.oldest(priority)

        def work_of(request_id: Hashable) -> float | None:
            if request_id in opened.overtakers or request_id in opened.unavailable:
                return None
            waits = state.deferrals.awaits_prefix if request_id == oldest else state.tree.is_deferred
            return None if waits(request_id) else state.work_now(request_id)

        request_id = overtaking.shortest(priority, work_of, state.fairness.now)
        if request_id is not None:
            opened.hurried = request_id
            if request_id == oldest:
                opened.due = request_id
                state.deferrals.release(request_id)
        return request_id

    def _stops_at(self, best: Candidate, batch: Batch) -> bool:
        state, tree = self.state, self.state.tree
        if batch.size == 0 or not batch.has_room or state.fairness.is_urgent(best.request_id):
            return False
        loss = max(tree.shared_tip - best.tip_after, tree.branch_loss(best.request_id), 0)
        # The deferred will join as soon as their prefix is computed: the batch is as good as theirs.
        joining = max(0, tree.deferred - state.deferrals.waiting_behind)
        question = PolicyState(batch.size + joining, loss, best.peers)
        if self.group_of is not None:
            batch_groups = frozenset(map(self.group_of, tree.active))
            question = question._replace(group=(self.group_of(best.request_id), batch_groups))
        return self.stopping.stops_at(question)

    def _inside_branch(self, opened: Round) -> Hashable | None:
        """After STOP a mixed batch may still grow in its main branch: that costs nothing and lets it become pure."""
        state = self.state
        inside = state.tree.best_in_branch()
        if inside is None or state.deferrals.limit_reached(inside) or not self._is_most_urgent(inside.request_id):
            return None
        return inside.request_id if state.may_pass(inside.request_id) else self._in_turn(opened)
