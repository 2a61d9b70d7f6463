"""The order: which request is proposed next, and whether the stop policy ends the round.

1. Who is overdue, once overtaken by as many as were ahead of it, or where nobody else may go before it.
2. The best: of the most urgent class the one with the fewest tokens to compute, unless it would pass an older request
   by more than the bound; then the shortest of the oldest.
3. After STOP, only who is inside the batch's main branch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from feather_sglang.scheduling.admission.queue import QueueState
from feather_sglang.scheduling.admission.types import Batch, Round
from feather_sglang.scheduling.policies import Action, PolicyState, StopPolicy
from feather_sglang.scheduling.tree.cht import Candidate


class Stopping:
    """Records a stop policy's decisions, so that only those that were carried out are rewarded.

    Parameters
    ----------
    policy
        ``None`` where admission is left to the engine.

    Attributes
    ----------
    stops
        How often it said STOP.
    """

    def __init__(self, policy: StopPolicy | None) -> None:
        self.policy = policy
        self.stops = 0
        self._unsettled = False  # whether the last ADD has not been carried out yet
        self._frozen: tuple[StopPolicy, bool] | None = None  # who may not explore, and whether it does otherwise

    def stops_at(self, state: PolicyState) -> bool:
        """Ask the policy; an ADD is unsettled until ``carried_out`` or ``cancel``."""
        assert self.policy is not None
        if self.policy.decide(state) is Action.STOP:
            self.stops += 1
            return True
        self._unsettled = True
        return False

    def carried_out(self) -> None:
        """The engine admitted whom the policy had added."""
        self._unsettled = False

    def cancel(self) -> None:
        """The engine did not: an ADD that was not carried out teaches nothing."""
        if self._unsettled and self.policy is not None:
            self.policy.cancel()
        self._unsettled = False

    def reward(self, reward: float | None) -> None:
        """Credit decode tokens/s to the decisions since the last reward."""
        if reward is not None and self.policy is not None:
            self.policy.observe(reward)

    def explore(self, allowed: bool) -> None:
        """Whether STOP may be tried now.

        Not while memory is short: its reward would not see the prefixes that are lost by it. Nor where nobody has
        waited long: the reward would not see that a trial makes requests wait.
        """
        if self._frozen is not None and (allowed or self._frozen[0] is not self.policy):
            policy, explores = self._frozen
            policy.explore, self._frozen = explores, None
        if not allowed and self._frozen is None and self.policy is not None:
            self.policy.end_episode()
            self._frozen, self.policy.explore = (self.policy, self.policy.explore), False


class Order:
    """Chooses among the waiting requests; asks the stop policy, and releases a deferral where a turn has come.

    Attributes
    ----------
    group_of
        Gives a request's prefix group; only the oracle policy, an upper reference for evaluation, reads it.
    """

    def __init__(self, state: QueueState, stopping: Stopping) -> None:
        self.state = state
        self.stopping = stopping
        self.group_of: Callable[[Hashable], Hashable] | None = None

    def next(self, opened: Round, batch: Batch) -> Hashable | None:
        """Return whom to propose, or None if nobody is to be admitted any more."""
        state = self.state
        best = self._best(opened)
        overdue = state.most_overdue(best, opened)
        if overdue is not None and not self._is_most_urgent(overdue):
            overdue = None
        opened.exempt = opened.due = None
        limit_reached = best is None or state.deferrals.limit_reached(best)
        if overdue is not None and (
            best is None or limit_reached or state.fairness.is_overtaken(overdue) or not state.may_pass(best.request_id)
        ):
            opened.exempt = opened.due = overdue
            return overdue
        if best is None or (overdue is None and (opened.delayed or limit_reached)):
            return None
        if not self._is_most_urgent(best.request_id):
            return None  # the more urgent ones wait for a prefix that is being computed
        if not state.may_pass(best.request_id):
            return self._in_turn(opened)
        if overdue is not None:
            opened.exempt = best.request_id
            return best.request_id
        opened.stopped = opened.stopped or self._stops_at(best, batch)
        return self._inside_branch(opened) if opened.stopped else best.request_id

    def _best(self, opened: Round) -> Candidate | None:
        """The request with the fewest tokens to compute, beside what runs or what the cache holds.

        Not where prefixes compete for memory: there who evicts goes last already.
        """
        state, tree = self.state, self.state.tree
        best = tree.find_best()
        cached = state.cached_prefixes.shortest(lambda r: r not in opened.overtakers and not tree.is_deferred(r))
        if best is None or cached is None or state.deferrals.memory_is_short():
            return best
        if state.fairness.priority(cached) != state.fairness.priority(best.request_id):
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
            opened.exempt = request_id
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
