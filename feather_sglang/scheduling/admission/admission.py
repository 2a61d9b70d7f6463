"""Admission: which waiting request joins the running batch next. The page to read first.

An engine holds one admission round after the other::

    admission.open_round(readings)
    while (request := admission.propose(batch)) is not None:
        verdict = admission.check(proposal)            # after the engine has looked it up in its cache
        admission.settle(request, ADMIT or ENGINE)     # what the engine did with it, where the rules let it
    admission.close_round()

1. **Gate** (``gate.py``): is a prefill step worth it now?
2. **Order** (``order.py``): who is overdue; who computes least; after STOP, who is inside the batch's main branch.
3. **Rules** (``rules.py``): is the proposed request admitted now? They are asked in the order of ``make_rules``.

What admission knows of requests is in ``queue_state.py``, what lives for one round in ``round.py``, who is deferred
and until when in ``deferrals.py``. Requests are known by id only.

Source: Feather, algorithm 7. The gate, the rules, the bounds on waiting, and the way back from a mixed batch are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from feather_sglang.scheduling.admission.fairness import MAX_WAIT, MAX_WAIT_ROUNDS, Fairness
from feather_sglang.scheduling.admission.gate import PrefillDelay
from feather_sglang.scheduling.admission.kv_forecast import KVForecast, Outlook
from feather_sglang.scheduling.admission.order import Order
from feather_sglang.scheduling.admission.overtaking import Overtaking
from feather_sglang.scheduling.admission.prefix_batching import PrefixBatching
from feather_sglang.scheduling.admission.queue_state import QueueState
from feather_sglang.scheduling.admission.round import Round
from feather_sglang.scheduling.admission.rules import KVBudget, make_rules
from feather_sglang.scheduling.admission.stopping import Stopping
from feather_sglang.scheduling.admission.verdict import Batch, Proposal, Verdict
from feather_sglang.scheduling.admission.work import Work
from feather_sglang.scheduling.meters.readings import Readings
from feather_sglang.scheduling.policies import StopPolicy
from feather_sglang.scheduling.tree.cht import ChunkedHashTree

# A trial of STOP makes requests wait: it is for a queue in which the oldest has waited for so many seconds anyway.
QUEUE_SECONDS = 1.0


class Admission:
    """Admission of one scheduler.

    Parameters
    ----------
    tree
        The Chunked Hash Tree; nobody else writes to it.
    policy
        Decides ADD or STOP. ``None`` leaves admission to the engine (prefix row order alone).
    max_wait, max_wait_rounds
        Of a waiting request, in seconds and in rounds: from then on it is overdue (``Fairness``).
    prefix_batching
        Lets prefixes wait for more requests where memory is short, and those go last for whom cached ones would be
        evicted. ``None``: they never do.
    forecast, outlook_of
        Keep out whom memory would not suffice for. ``None``: they never do.
    prefill_delay
        Delays whole rounds so that more requests share a prefill step. ``None``: it never does.
    overtaking
        Bounds by how much later requests go before older ones.
    work
        Gives the size of a request.
    group_of
        Gives a request's prefix group, for the oracle policy alone.
    """

    def __init__(
        self,
        tree: ChunkedHashTree,
        policy: StopPolicy | None,
        *,
        max_wait: float = MAX_WAIT,
        max_wait_rounds: int = MAX_WAIT_ROUNDS,
        prefix_batching: PrefixBatching | None = None,
        forecast: KVForecast | None = None,
        outlook_of: Callable[[Hashable], Outlook] | None = None,
        prefill_delay: PrefillDelay | None = None,
        overtaking: Overtaking | None = None,
        work: Work | None = None,
        group_of: Callable[[Hashable], Hashable] | None = None,
    ) -> None:
        fairness = Fairness(max_wait, max_wait_rounds)
        self.state = QueueState(tree, fairness, overtaking or Overtaking(), work or Work(None), prefix_batching)
        self.stopping = Stopping(policy)
        self.prefill_delay = prefill_delay
        self.order = Order(self.state, self.stopping, group_of)
        self.kv_budget = KVBudget(self.state, forecast, outlook_of)
        self.rules = make_rules(self.state, self.kv_budget)
        self.round = Round()
        self.hurried_admissions = 0
        self.delayed_rounds = 0
        self.longest_wait = 0.0

    @property
    def tree(self) -> ChunkedHashTree:
        """The Chunked Hash Tree."""
        return self.state.tree

    @property
    def policy(self) -> StopPolicy | None:
        """The stop policy."""
        return self.stopping.policy

    @policy.setter
    def policy(self, policy: StopPolicy | None) -> None:
        self.stopping.policy = policy

    @property
    def work(self) -> Work:
        """The sizes of requests."""
        return self.state.work

    # Life cycle -----------------------------------------------------------------------------------------------

    def arrive(
        self,
        request_id: Hashable,
        token_ids: Any,
        *,
        extra_key: Any = None,
        priority: int = 0,
        most_tokens: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        """Enter a new waiting request.

        Parameters
        ----------
        token_ids
            Prompt, any int buffer.
        extra_key
            Requests of different keys share nothing.
        priority
            Smaller goes first.
        most_tokens
            That it may generate.
        cached_tokens
            Of its prompt, as far as the engine has looked.
        """
        self.state.arrive(request_id, token_ids, extra_key, priority, most_tokens, cached_tokens)

    def requeue(self, request_id: Hashable, token_ids: Any) -> None:
        """Put a retracted or preempted request back among the waiting, at its original age."""
        self.kv_budget.left(request_id)
        self.state.requeue(request_id, token_ids)

    def computed(self, request_id: Hashable) -> None:
        """The prompt of an admitted request is in the prefix cache: who waited for it may be proposed."""
        self.state.deferrals.computed(request_id)

    def leave_queue(self, request_id: Hashable) -> None:
        """Forget a waiting request that was aborted or timed out."""
        self.state.leave_queue(request_id)

    def leave_batch(self, request_id: Hashable, output_tokens: int = 0) -> None:
        """Forget a running request that finished or was aborted, after so many tokens."""
        self.kv_budget.left(request_id, output_tokens)
        self.state.leave_batch(request_id, output_tokens)

    # One admission round --------------------------------------------------------------------------------------

    def open_round(self, readings: Readings, *, pending_tokens: int = 0) -> None:
        """Open an admission round.

        A delayed one teaches nothing: its reward belongs to the decisions before it, and is due when the next one
        is open.

        Parameters
        ----------
        readings
            The engine's clock, and what it has measured.
        pending_tokens
            To be computed of a prompt that runs chunk by chunk, so that a prefill step follows in any case.
        """
        state = self.state
        if state.prefix_batching is not None:
            state.prefix_batching.seconds_per_token = readings.prefill_seconds
        state.work.pair_tokens, state.work.step_tokens = readings.pair_tokens or 0.0, readings.step_tokens or 0.0
        oldest = self.tree.oldest()
        queues = oldest is not None and state.waited(oldest, readings.now) >= QUEUE_SECONDS
        self.stopping.explore(queues and not state.deferrals.memory_is_short())
        self.round = Round(pending_tokens=pending_tokens)
        state.open_round(readings.now, self.round)
        self.round.delayed = self._delays(readings.fixed_seconds)
        self.delayed_rounds += self.round.delayed
        if not self.round.delayed:
            self.stopping.reward(readings.reward)

    def _delays(self, fixed_seconds: float | None) -> bool:
        """The gate: whether those who could be proposed wait for more of them."""
        state, tree = self.state, self.state.tree
        if self.prefill_delay is None or self.round.pending_tokens or state.deferrals.retracted:
            return False
        if state.most_overdue(tree.find_best(), self.round) is not None:
            return False
        waiting = len(tree.waiting) - tree.deferred
        return self.prefill_delay.delays(state.fairness.now, waiting, len(tree.active), fixed_seconds)

    def propose(self, batch: Batch) -> Hashable | None:
        """Return whom the engine should look up and try to admit next, or None to end the round."""
        assert self.policy is not None
        opened = self.round
        request_id = self.order.next(opened, batch)
        if request_id is None and not opened.delayed and self.state.deferrals.call_last():
            request_id = self.order.next(opened, batch)
        opened.open_proposal = request_id
        return request_id

    def check(self, proposal: Proposal) -> Verdict:
        """Ask the rules about a proposed request; but for ``ADMIT`` the verdict is noted and nothing is to be settled.

        After ``KV_BUDGET`` nobody else is to be proposed in this round.
        """
        opened, request_id = self.round, proposal.request_id
        spared = request_id == opened.due or self.state.fairness.is_overdue(request_id)
        for rule in self.rules:
            if spared and rule.spares_overdue:
                continue
            verdict = rule.check(proposal, opened)
            if verdict is not Verdict.ADMIT:
                rule.defer(proposal, opened)
                self._not_carried_out()
                return verdict
        return Verdict.ADMIT

    def settle(self, request_id: Hashable, verdict: Verdict, cached_tokens: int | None = None) -> None:
        """Note what the engine did with a proposed request.

        Parameters
        ----------
        verdict
            ``ADMIT``: it is in the batch. ``ENGINE``: the engine could not take it; not again in this round.
        cached_tokens
            Of an admitted prompt, all others are computed now. Waiting requests that share a good part of those wait
            until ``computed``: they will find them in the cache. None: nothing is left to compute.
        """
        if verdict is Verdict.ENGINE:
            self.tree.hold(request_id)
            self.state.overtaking.excuse(request_id, True)
            self.round.unavailable.add(request_id)
            self._not_carried_out()
            return
        fairness = self.state.fairness
        self.state.admit(request_id, cached_tokens)
        self.kv_budget.admitted(request_id, cached_tokens, self.round)
        self.stopping.carried_out()
        if self.prefill_delay is not None:
            self.prefill_delay.admitted(fairness.now)
        self.round.open_proposal = None
        self.hurried_admissions += request_id == self.round.hurried
        self.longest_wait = max(self.longest_wait, fairness.waited(request_id))

    def _not_carried_out(self) -> None:
        self.round.open_proposal = None
        self.stopping.cancel()

    def close_round(self) -> None:
        """Close the round: all compete again in the next one."""
        self.stopping.cancel()
        for request_id in self.round.unavailable:
            self.state.overtaking.excuse(request_id, False)
        self.tree.resume()
        for request_id in list(self.tree.held):
            self.tree.requeue(request_id)

    def waiting_work(self, free_tokens: int) -> float:
        """Prefill of all that wait, in tokens without context; infinite where they do not fit into so much memory."""
        return self.state.waiting_work(free_tokens)

    # Rows, figures --------------------------------------------------------------------------------------------

    def row_order(self, request_ids: Sequence[Hashable]) -> list[int] | None:
        """Return the permutation that puts rows into depth-first prefix order, or None if they are in one already."""
        return self.tree.row_order(request_ids)

    def stats(self) -> dict[str, Any]:
        """Return counters for reports and metrics."""
        deferrals = self.state.deferrals
        return {
            "rounds": self.state.fairness.round,
            "stops": self.stopping.stops,
            "overdue_admissions": self.hurried_admissions,
            "postponements": deferrals.postponements,
            "put_last": deferrals.put_last,
            "kept_out": self.kv_budget.kept_out,
            "held_rounds": self.delayed_rounds,
            "longest_wait_s": self.longest_wait,
            "waiting": len(self.tree.waiting),
            "active": len(self.tree.active),
        }
