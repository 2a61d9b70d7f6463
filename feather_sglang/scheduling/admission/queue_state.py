"""What admission knows of every request: its place in the tree, its arrival, its size, what the cache holds of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from math import inf
from typing import Any

from feather_sglang.scheduling.admission.cached_prefixes import CachedPrefixes
from feather_sglang.scheduling.admission.deferrals import Deferrals
from feather_sglang.scheduling.admission.fairness import Fairness
from feather_sglang.scheduling.admission.overtaking import Overtaking
from feather_sglang.scheduling.admission.prefix_batching import LEAST_TOKENS, PrefixBatching
from feather_sglang.scheduling.admission.round import Round
from feather_sglang.scheduling.admission.work import Work
from feather_sglang.scheduling.tree.cht import Candidate, ChunkedHashTree

_COUNTED = 256  # waiting requests that are looked at; a queue is overload where there are more


class QueueState:
    """Waiting and running requests; each event of a request enters all books here.

    Attributes
    ----------
    tree, fairness, overtaking, work, prefix_batching, deferrals, cached_prefixes
        One for each question; ``prefix_batching`` is None where no prefix ever waits for more requests.
    """

    def __init__(
        self,
        tree: ChunkedHashTree,
        fairness: Fairness,
        overtaking: Overtaking,
        work: Work,
        prefix_batching: PrefixBatching | None,
    ) -> None:
        self.tree = tree
        self.fairness = fairness
        self.overtaking = overtaking
        self.work = work
        self.prefix_batching = prefix_batching
        self.deferrals = Deferrals(tree, fairness, prefix_batching)
        self.cached_prefixes = CachedPrefixes()
        self._unseen: dict[Hashable, int] = {}  # priority of those that arrived since the last round
        self._tokens: dict[Hashable, int] = {}  # lengths of prompts
        self._pending_work = 0.0  # of prompts that were admitted and are not computed yet
        self._newest: Hashable | None = None  # admitted last; it may run chunk by chunk

    # Life cycle -----------------------------------------------------------------------------------------------

    def arrive(
        self,
        request_id: Hashable,
        token_ids: Any,
        extra_key: Any,
        priority: int,
        most_tokens: int,
        cached_tokens: int,
    ) -> None:
        """Enter a new waiting request; see ``Admission.arrive``."""
        tree = self.tree
        tree.insert(request_id, token_ids, extra_key, priority)
        self._unseen[request_id] = priority
        self.cached_prefixes.note(request_id, priority, cached_tokens, len(token_ids))
        self._enter_line(request_id, len(token_ids), priority)
        if self.prefix_batching is not None:
            missing, depth = tree.missing_count(request_id), tree.depth(request_id)
            computes = missing * tree.chunk_size >= LEAST_TOKENS
            met = tree.sharing(request_id, depth - missing // 2) > 1 if computes else None
            self.prefix_batching.arrived(most_tokens, met)

    def requeue(self, request_id: Hashable, token_ids: Any) -> None:
        """Put a retracted or preempted request back among the waiting, at its original age."""
        if request_id in self.tree.active:
            self.fairness.wait_again(request_id)
        self.tree.requeue(request_id, token_ids)
        # Like SGLang, which puts it at the end of its queue: who waits already may go before it.
        self._enter_line(request_id, len(token_ids), self.fairness.priority(request_id))
        self.deferrals.requeued(request_id)

    def _enter_line(self, request_id: Hashable, tokens: int, priority: int) -> None:
        self._tokens[request_id] = tokens
        # In order of arrival, what a request shares with those before it is cached when its turn comes; where memory
        # is short it is gone by then, but for what running ones hold.
        tree, short = self.tree, self.deferrals.memory_is_short()
        new_chunks = tree.missing_count(request_id) if short else tree.own_chunks(request_id)
        known = (tree.depth(request_id) - new_chunks) * tree.chunk_size
        work = self.work.of(max(1, tokens - max(known, self.cached_prefixes.tokens(request_id))), tokens)
        self.overtaking.arrive(request_id, priority, work, self._pending_work, self.fairness.now)

    def leave_queue(self, request_id: Hashable) -> None:
        """Forget a waiting request that was aborted or timed out."""
        self.tree.remove(request_id)
        self.deferrals.left(request_id)
        del self._tokens[request_id]
        self.overtaking.leave(request_id)
        self.cached_prefixes.forget(request_id)
        if self._unseen.pop(request_id, None) is None:
            self.fairness.forget(request_id, waiting=True)

    def leave_batch(self, request_id: Hashable, output_tokens: int) -> None:
        """Forget a running request that finished or was aborted, after so many tokens."""
        if output_tokens:
            if self.prefix_batching is not None:
                self.prefix_batching.finished(output_tokens)
            self.work.finished(self._tokens[request_id], output_tokens)
        del self._tokens[request_id]
        self.tree.finish(request_id)
        self.deferrals.left(request_id)
        self.fairness.forget(request_id, waiting=False)

    def admit(self, request_id: Hashable, cached_tokens: int | None) -> None:
        """Move a waiting request to the running ones; see ``Admission.settle``."""
        self.tree.add_to_batch(request_id)
        self.fairness.admit(request_id)
        tokens = self._tokens[request_id]
        work = self.work.of(tokens - (tokens if cached_tokens is None else cached_tokens), tokens)
        self.overtaking.admit(request_id, work)
        self.cached_prefixes.forget(request_id)
        self._pending_work += work
        self._newest = request_id
        self.deferrals.admitted(request_id, cached_tokens)

    def open_round(self, now: float, opened: Round) -> None:
        """Take in who arrived since the last round, and say again who is deferred."""
        self.fairness.open_round(now)
        for request_id, priority in self._unseen.items():
            self.fairness.arrive(request_id, priority)
        self._unseen.clear()
        pending = opened.pending_tokens
        chunked = self._tokens.get(self._newest, pending)
        self._pending_work = self.work.of(pending, chunked) if pending else 0.0
        self.deferrals.open_round(opened)

    # Questions ------------------------------------------------------------------------------------------------

    def tokens(self, request_id: Hashable) -> int:
        """Length of a prompt."""
        return self._tokens[request_id]

    def uncached(self, request_id: Hashable) -> int:
        """Tokens to be computed of a waiting request, as it looks now: at least one."""
        tree = self.tree
        known = (tree.depth(request_id) - tree.missing_count(request_id)) * tree.chunk_size
        return max(1, self._tokens[request_id] - max(known, self.cached_prefixes.tokens(request_id)))

    def prefill_now(self, request_id: Hashable) -> float:
        """Prefill of a waiting request, as it looks now: a part of its work."""
        return self.work.of_prompt(self.uncached(request_id), self._tokens[request_id])

    def waiting_work(self, free_tokens: int) -> float:
        """Prefill of all that wait; infinite where they do not fit into so many tokens of memory."""
        waiting, work = self.tree.waiting, 0.0
        if len(waiting) > _COUNTED:
            return inf
        for request_id in waiting:
            free_tokens -= self.uncached(request_id)
            if free_tokens < 0:
                return inf
            work += self.prefill_now(request_id)
        return work

    def waited(self, request_id: Hashable, now: float) -> float:
        """Seconds since a round first saw a request; 0 before."""
        arrival = self.fairness.arrivals.get(request_id)
        return max(0.0, now - arrival.time) if arrival is not None else 0.0

    def work_now(self, request_id: Hashable) -> float:
        """Work of a waiting request, as it looks now."""
        return self.work.of(self.uncached(request_id), self._tokens[request_id])

    def may_pass(self, request_id: Hashable) -> bool:
        """Whether a waiting request, as long as it looks, may go before all that came earlier."""
        return self.work_now(request_id) <= self.overtaking.slack(request_id, self.fairness.now)

    def most_overdue(self, best: Candidate | None, opened: Round) -> Hashable | None:
        """Return the oldest overdue request of the classes that are as urgent as the best's; None without one."""
        fairness, oldest = self.fairness, self.tree.oldest()
        if oldest is None or not fairness.is_overdue(oldest):
            return None
        arrivals = fairness.arrivals
        if best is None or arrivals[oldest].priority <= (urgency := arrivals[best.request_id].priority):
            return oldest
        # Where there are classes, those who have waited longest are the least urgent; others may be overdue as well.
        if opened.overdue is None:
            overdue = filter(fairness.is_overdue, self.tree.waiting)
            opened.overdue = deque(sorted(overdue, key=lambda r: (arrivals[r].priority, arrivals[r].round)))
        while opened.overdue and opened.overdue[0] not in self.tree.waiting:
            opened.overdue.popleft()
        if opened.overdue and arrivals[opened.overdue[0]].priority <= urgency:
            return opened.overdue[0]
        return None
