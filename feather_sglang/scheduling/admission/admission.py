"""Admission: which waiting request joins the running batch next. The module to read first.

The engine tells each event of a request once, ``arrived, retracted, computed, aborted, finished`` (``queue.py``), and
holds one admission round after the other::

    admission.open_round(readings)
    while (request := admission.propose(batch)) is not None:
        verdict = admission.check(proposal)            # after the engine has looked it up in its cache
        admission.admitted(request)                    # where the rules let it, and the engine could
    admission.close_round()

1. **Gate** (``gate.py``): is a prefill step worth it now?
2. **Order** (``order.py``): who is overdue; who computes least; after STOP, who is inside the batch's main branch.
3. **Rules** (``rules.py``): is the proposed request admitted now? They are asked in the order of ``make_rules``.

What admission knows of requests is in ``queue.py``, what lives for one round in ``types.py``, who is deferred and until
when in ``deferrals.py``. Requests are known by id only; nobody outside looks behind this class.

Source: Feather, algorithm 7. The gate, the rules, the bounds on waiting, and the way back from a mixed batch are ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from feather_sglang.scheduling.admission.deferrals import PrefixBatching
from feather_sglang.scheduling.admission.fairness import MAX_WAIT, MAX_WAIT_ROUNDS, Fairness
from feather_sglang.scheduling.admission.forecast import KVForecast, Outlook
from feather_sglang.scheduling.admission.gate import PrefillDelay
from feather_sglang.scheduling.admission.order import Order, Stopping
from feather_sglang.scheduling.admission.overtaking import Overtaking
from feather_sglang.scheduling.admission.queue import QueueState
from feather_sglang.scheduling.admission.rules import make_rules
from feather_sglang.scheduling.admission.types import Batch, Proposal, Round, Verdict
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

    Attributes
    ----------
    waiting, running
        Ids of requests, live read-only sets.
    in_flight
        The same of running requests whose prompts are computed, and others wait for that.
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
    ) -> None:
        fairness = Fairness(max_wait, max_wait_rounds)
        self.tree = tree
        self.state = state = QueueState(
            tree, fairness, overtaking or Overtaking(), work or Work(None), prefix_batching, forecast, outlook_of
        )
        self.arrived, self.retracted, self.computed = state.arrived, state.retracted, state.computed
        self.aborted, self.finished = state.aborted, state.finished
        self.waiting, self.running, self.in_flight = tree.waiting, tree.active, state.deferrals.in_flight
        self.chunk_size, self.reseed, self.row_order = tree.chunk_size, tree.reseed, tree.row_order
        self.uncached, self.waiting_work, self.prefill_work = state.uncached, state.waiting_work, state.work.of_prompt
        self.waited, self.overtaken = fairness.waited, state.overtaking.of_oldest
        self.stopping = Stopping(policy)
        self.prefill_delay = prefill_delay
        self.order = Order(state, self.stopping)
        self.rules = make_rules(state)
        self.round = Round()
        self.deferred: Counter[Verdict] = Counter()  # proposals that a rule deferred
        self.overdue_admissions = 0
        self.delayed_rounds = 0
        self.longest_wait = 0.0

    @property
    def policy(self) -> StopPolicy | None:
        """The stop policy."""
        return self.stopping.policy

    @policy.setter
    def policy(self, policy: StopPolicy | None) -> None:
        self.stopping.policy = policy

    def consult(self, oracle: StopPolicy, group_of: Callable[[Hashable], Hashable]) -> None:
        """Let an oracle decide, which is told each request's prefix group."""
        self.policy, self.order.group_of = oracle, group_of

    @property
    def stops(self) -> int:
        """How often the policy has said STOP."""
        return self.stopping.stops

    @property
    def prefixes_deferred(self) -> int:
        """How many prefixes have been made to wait for more requests, or to go last."""
        return self.deferred[Verdict.BATCHING] + self.deferred[Verdict.EVICTS]

    # Questions ------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert between two rounds that the books agree (for tests; slow)."""
        self.tree.check_invariants()
        assert self.in_flight <= self.running, "a request is being computed that does not run"
        assert not self.tree.held, "a request is held after its round"

    # One admission round --------------------------------------------------------------------------------------

    def open_round(self, readings: Readings, *, pending_tokens: int = 0) -> bool:
        """Open an admission round; False if it is delayed.

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
        self.round = Round(pending_tokens=pending_tokens)
        state.open_round(readings, self.round)
        oldest = self.tree.oldest()
        queues = oldest is not None and state.fairness.waited(oldest) >= QUEUE_SECONDS
        self.stopping.explore(queues and not state.deferrals.memory_is_short())
        self.round.delayed = self._delays(readings.fixed_seconds)
        self.delayed_rounds += self.round.delayed
        if not self.round.delayed:
            self.stopping.reward(readings.reward)
        return not self.round.delayed

    def _delays(self, fixed_seconds: float | None) -> bool:
        """The gate: whether those who could be proposed wait for more of them."""
        state, tree = self.state, self.state.tree
        if self.prefill_delay is None or self.round.pending_tokens or state.deferrals.any_retracted:
            return False
        if state.most_overdue(tree.find_best(), self.round) is not None:
            return False
        waiting = len(tree.waiting) - tree.deferred
        return self.prefill_delay.delays(state.fairness.now, waiting, len(tree.active), fixed_seconds)

    def propose(self, batch: Batch) -> Hashable | None:
        """Return whom the engine should look up and try to admit next, or None to end the round.

        Who was proposed before, and neither deferred nor admitted, cannot be taken by the engine in this round.
        """
        opened = self.round
        if opened.open_proposal is not None:
            self.unavailable(opened.open_proposal)
        request_id = self.order.next(opened, batch)
        if request_id is None and not opened.delayed and self.state.deferrals.call_last():
            request_id = self.order.next(opened, batch)
        opened.open_proposal = request_id
        return request_id

    def check(self, proposal: Proposal) -> Verdict:
        """Ask the rules about a proposed request; but for ``ADMIT`` it is deferred, and nothing more is to be told.

        After ``KV_BUDGET`` nobody else is to be proposed in this round.
        """
        opened, request_id = self.round, proposal.request_id
        for rule in self.rules:
            if proposal.missing < rule.least_tokens:
                continue
            verdict = rule.check(proposal, opened)
            if verdict is Verdict.ADMIT:
                continue
            if rule.spares_overdue and (request_id == opened.due or self.state.fairness.is_overdue(request_id)):
                continue
            rule.defer(proposal, opened)
            self.deferred[verdict] += 1
            self._not_carried_out()
            return verdict
        return Verdict.ADMIT

    def unavailable(self, request_id: Hashable) -> None:
        """The engine cannot take a proposed request in this round: an adapter is not loaded, say."""
        self.tree.hold(request_id)
        self.state.overtaking.excuse(request_id, True)
        self.round.unavailable.add(request_id)
        self._not_carried_out()

    def admitted(self, request_id: Hashable, cached_tokens: int | None = None) -> None:
        """A proposed request is in the batch.

        Parameters
        ----------
        cached_tokens
            Of its prompt, all others are computed now. Waiting requests that share a good part of those wait until
            ``computed``: they will find them in the cache. None: nothing is left to compute.
        """
        opened, fairness = self.round, self.state.fairness
        self.state.admitted(request_id, cached_tokens, opened)
        self.stopping.carried_out()
        if self.prefill_delay is not None:
            self.prefill_delay.admitted(fairness.now)
        opened.open_proposal = None
        self.overdue_admissions += request_id == opened.exempt
        self.longest_wait = max(self.longest_wait, self.waited(request_id))

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

    def stats(self) -> dict[str, Any]:
        """Return counters for reports and metrics."""
        batching, evicts, memory = (self.deferred[v] for v in (Verdict.BATCHING, Verdict.EVICTS, Verdict.KV_BUDGET))
        return {
            "rounds": self.state.fairness.round,
            "stops": self.stops,
            "overdue_admissions": self.overdue_admissions,
            "deferrals": {verdict.name.lower(): self.deferred[verdict] for verdict in list(Verdict)[1:]},
            "delayed_rounds": self.delayed_rounds,
            "longest_wait_s": self.longest_wait,
            "waiting": len(self.waiting),
            "active": len(self.running),
            # The names of the release before.
            **{"postponements": batching, "put_last": evicts, "kept_out": memory, "held_rounds": self.delayed_rounds},
        }
