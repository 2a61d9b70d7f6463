"""The FINDBEST -> policy -> ADD loop, who waits for what, the fairness bound, and the row order of the running batch.

One ``BatchBuilder`` serves one scheduler. It knows requests by id only and never touches SGLang: the adapter asks
``propose`` for the next request, tries to admit it, and reports back with ``admitted`` or ``skipped``.

Source: Feather, algorithm 7. Prefixes that wait, who goes last, the look ahead at memory, paced prefill, the fairness
bound, the row order and the way back from a mixed batch are ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from feather_sglang.scheduling.admission.cached_prefixes import CachedPrefixes
from feather_sglang.scheduling.admission.fairness import Fairness
from feather_sglang.scheduling.admission.gathering import LEAST_TOKENS, Gathering
from feather_sglang.scheduling.admission.kv_forecast import KVForecast, Outlook
from feather_sglang.scheduling.admission.overtaking import Overtaking
from feather_sglang.scheduling.admission.pacing import Pacing
from feather_sglang.scheduling.admission.passing_over import PassingOver
from feather_sglang.scheduling.admission.work import Work
from feather_sglang.scheduling.policies import Action, PolicyState, StopPolicy
from feather_sglang.scheduling.tree.cht import Candidate, ChunkedHashTree


class BatchBuilder:
    """Chooses which waiting request joins the running batch next, and when to stop.

    Parameters
    ----------
    cht
        The Chunked Hash Tree; this builder is its only writer.
    policy
        Decides ADD or STOP. ``None`` leaves admission to the caller (prefix row order alone).
    max_wait, max_wait_rounds
        Of a waiting request, in seconds and in admission rounds: from then on nobody is stopped or held, and the
        request is next once it has been overtaken (``Fairness``).
    group_of
        Gives a request's prefix group; only the oracle policy, an upper reference for evaluation, reads it.
    gathering
        Lets prefixes wait for more requests where memory is short, and those go last for whom cached ones would be
        evicted. ``None``: they never do.
    forecast
        Keeps out whom memory would not suffice for; goes with `gathering` and `outlook_of`. ``None``: it never does.
    outlook_of
        Gives a request's lengths.
    pacing
        Holds whole rounds so that more requests share a prefill step. ``None``: it never does.
    overtaking
        Bounds by how much later requests go before older ones.
    work
        Gives the size of a request.

    Attributes
    ----------
    held
        Whether nobody is proposed in this round, so that more gather.
    """

    def __init__(
        self,
        cht: ChunkedHashTree,
        policy: StopPolicy | None,
        max_wait: float = 120.0,
        max_wait_rounds: int = 20_000,
        group_of: Callable[[Hashable], Hashable] | None = None,
        gathering: Gathering | None = None,
        forecast: KVForecast | None = None,
        outlook_of: Callable[[Hashable], Outlook] | None = None,
        pacing: Pacing | None = None,
        overtaking: Overtaking | None = None,
        work: Work | None = None,
    ) -> None:
        self.cht = cht
        self.policy = policy
        self.fairness = Fairness(max_wait, max_wait_rounds)
        self.passing_over = PassingOver(cht, self.fairness, gathering)
        self.group_of = group_of
        self.gathering = gathering
        self.forecast = forecast
        self.outlook_of = outlook_of
        self.pacing = pacing
        self.overtaking = overtaking or Overtaking()
        self.work = work or Work(None)
        self.cached_prefixes = CachedPrefixes()
        self.held = False
        self.stops = 0
        self.overdue_admissions = 0
        self.kept_out = 0
        self.held_rounds = 0
        self.longest_wait = 0.0
        self._stopped = False  # in this round, for everybody outside the main branch
        self._unseen: dict[Hashable, int] = {}  # priority of those that arrived since the last round
        self._undone: Hashable | None = None  # the last ADD, until the scheduler has carried it out
        self._pending = 0  # prompt tokens of the batch still to be computed
        self._foreseen = False  # in this round, memory has been looked ahead at
        self._cached: dict[Hashable, int] = {}  # tokens that running requests found in the prefix cache
        self._frozen: tuple[StopPolicy, bool] | None = None  # who may not explore, and whether it does otherwise
        self._late: deque[Hashable] | None = None  # in this round, most urgent first; None: nobody has looked
        self._hurried: Hashable | None = None  # proposed because somebody is late, or may not be passed any more
        self._tokens: dict[Hashable, int] = {}  # lengths of prompts
        self._pending_work = 0.0  # of prompts that were admitted and are not computed yet
        self._due: Hashable | None = None  # proposed because it is its turn, whatever it was to wait for
        self._newest: Hashable | None = None  # admitted last; it may run chunk by chunk
        self._excused: list[Hashable] = []  # in this round
        self._refused: set[Hashable] = set()  # in this round, as they are longer than they looked

    def use_tree(self, cht: ChunkedHashTree) -> None:
        """Take another tree, with another seed, say, before anybody has arrived."""
        assert not self.cht
        self.cht = self.passing_over.cht = cht

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
        self.cht.insert(request_id, token_ids, extra_key, priority)
        self._unseen[request_id] = priority
        self.cached_prefixes.note(request_id, priority, cached_tokens, len(token_ids))
        self._enter_line(request_id, len(token_ids), priority)
        if self.gathering is not None:
            missing, depth = self.cht.missing_count(request_id), self.cht.depth(request_id)
            computes = missing * self.cht.chunk_size >= LEAST_TOKENS
            met = self.cht.sharing(request_id, depth - missing // 2) > 1 if computes else None
            self.gathering.arrived(most_tokens, met)

    def requeue(self, request_id: Hashable, token_ids: Any) -> None:
        """Put a retracted or preempted request back among the waiting, at its original age."""
        if request_id in self.cht.active:
            self.fairness.wait_again(request_id)
            self._cached.pop(request_id, None)
        self.cht.requeue(request_id, token_ids)
        # Like SGLang, which puts it at the end of its queue: who waits already may go before it.
        self._enter_line(request_id, len(token_ids), self.fairness.priority(request_id))
        self.passing_over.requeued(request_id)

    def _enter_line(self, request_id: Hashable, tokens: int, priority: int) -> None:
        self._tokens[request_id] = tokens
        # In order of arrival, what a request shares with those before it is cached when its turn comes; where memory
        # is short it is gone by then, but for what running ones hold.
        tree, short = self.cht, self.passing_over.memory_is_short()
        new_chunks = tree.missing_count(request_id) if short else tree.own_chunks(request_id)
        known = (tree.depth(request_id) - new_chunks) * tree.chunk_size
        work = self.work.of(max(1, tokens - max(known, self.cached_prefixes.tokens(request_id))), tokens)
        self.overtaking.arrive(request_id, priority, work, self._pending_work, self.fairness.now)

    def leave_queue(self, request_id: Hashable) -> None:
        """Forget a waiting request that was aborted or timed out."""
        self.cht.remove(request_id)
        self.passing_over.left(request_id)
        del self._tokens[request_id]
        self.overtaking.leave(request_id)
        self.cached_prefixes.forget(request_id)
        if self._unseen.pop(request_id, None) is None:
            self.fairness.forget(request_id, waiting=True)

    def leave_batch(self, request_id: Hashable, output_tokens: int = 0) -> None:
        """Forget a running request that finished or was aborted, after so many tokens."""
        for learner in (self.gathering, self.forecast):
            if learner is not None and output_tokens:
                learner.finished(output_tokens)
        self._cached.pop(request_id, None)
        if output_tokens:
            self.work.finished(self._tokens[request_id], output_tokens)
        del self._tokens[request_id]
        self.cht.finish(request_id)
        self.passing_over.left(request_id)
        self.fairness.forget(request_id, waiting=False)

    # One admission round --------------------------------------------------------------------------------------

    def begin_round(
        self,
        now: float,
        reward: float | None,
        prefill_seconds: float | None = None,
        fixed_seconds: float | None = None,
        pair_tokens: float | None = None,
        step_tokens: float | None = None,
        *,
        pending_tokens: int = 0,
    ) -> None:
        """Open an admission round.

        A held one teaches nothing: its reward belongs to the decisions before it, and is due when the next one is open.

        Parameters
        ----------
        now
            Seconds.
        reward
            Decode tokens/s since the last round that was not held, if measured.
        prefill_seconds
            What a token of prefill takes, if known.
        fixed_seconds
            What a prefill step takes however few its tokens, if known.
        pair_tokens, step_tokens
            What attention from a new token to an earlier one and what a decode step takes, in tokens of prefill.
        pending_tokens
            To be computed of a prompt that runs chunk by chunk, so that a prefill step follows in any case.
        """
        if self.gathering is not None:
            self.gathering.seconds_per_token = prefill_seconds
        self._explore(not self.passing_over.memory_is_short())
        self.fairness.open_round(now)
        self._stopped = False
        self._pending, self._foreseen = pending_tokens, False
        self._late = None
        for request_id, priority in self._unseen.items():
            self.fairness.arrive(request_id, priority)
        self._unseen.clear()
        self.work.pair_tokens, self.work.step_tokens = pair_tokens or 0.0, step_tokens or 0.0
        chunked = self._tokens.get(self._newest, pending_tokens)
        self._pending_work = self.work.of(pending_tokens, chunked) if pending_tokens else 0.0
        self.passing_over.open_round()
        self.held = not pending_tokens and self._should_gather(fixed_seconds)
        self.held_rounds += self.held
        if reward is not None and self.policy is not None and not self.held:
            self.policy.observe(reward)

    def _should_gather(self, fixed_seconds: float | None) -> bool:
        """Whether those who could be proposed wait for more of them, before a prefill step stops those who run."""
        tree = self.cht
        if self.pacing is None or self.passing_over.retracted:
            return False
        if self._most_late(tree.find_best()) is not None:
            return False
        return self.pacing.holds(self.fairness.now, len(tree.waiting) - tree.deferred, len(tree.active), fixed_seconds)

    def propose(self, batch_size: int, headroom: float, has_room: bool = True) -> Hashable | None:
        """The request to admit next, or None to stop this round.

        Parameters
        ----------
        batch_size
            Requests running or admitted so far.
        headroom
            Share of the KV pool that is free or evictable, 0..1.
        has_room
            Whether the batch has a free slot. Without one the policy is not asked: its answer could not be
            carried out, and must not be rewarded.
        """
        request_id = self._propose(batch_size, headroom, has_room)
        if request_id is None and not self.held and self.passing_over.call_last():
            request_id = self._propose(batch_size, headroom, has_room)
        return request_id

    def _propose(self, batch_size: int, headroom: float, has_room: bool) -> Hashable | None:
        assert self.policy is not None
        best = self._best()
        late = self._most_late(best)
        if late is not None and not self._is_most_urgent(late):
            late = None
        self._hurried = self._due = None
        if late is not None and (
            best is None
            or self.fairness.is_overtaken(late)
            or self.passing_over.is_one_too_many(best)
            or not self._may_pass(best.request_id)
        ):
            self._hurried = self._due = late
            return late
        if best is None or (late is None and (self.held or self.passing_over.is_one_too_many(best))):
            return None
        if not self._is_most_urgent(best.request_id):
            return None  # the more urgent ones wait for a prefix that is being computed
        if not self._may_pass(best.request_id):
            return self._in_turn()
        if late is not None:
            self._hurried = best.request_id
            return best.request_id
        if self._stopped:
            return self._inside_branch()
        if batch_size == 0 or not has_room or self.fairness.is_urgent(best.request_id):
            return best.request_id
        loss = max(self.cht.shared_tip - best.tip_after, self.cht.branch_loss(best.request_id), 0)
        # The deferred will join as soon as their prefix is computed: the batch is as good as theirs.
        state = PolicyState(
            batch_size + max(0, self.cht.deferred - self.passing_over.staying), loss, best.peers, headroom
        )
        if self.group_of is not None:
            batch_groups = frozenset(map(self.group_of, self.cht.active))
            state = state._replace(group=(self.group_of(best.request_id), batch_groups))
        if self.policy.decide(state) is Action.STOP:
            self.stops += 1
            self._stopped = True
            return self._inside_branch()
        self._undone = best.request_id
        return best.request_id

    def _inside_branch(self) -> Hashable | None:
        """After STOP a mixed batch may still grow in its main branch: that costs nothing and lets it become pure."""
        inside = self.cht.best_in_branch()
        if inside is None or self.passing_over.is_one_too_many(inside) or not self._is_most_urgent(inside.request_id):
            return None
        return inside.request_id if self._may_pass(inside.request_id) else self._in_turn()

    def _is_most_urgent(self, request_id: Hashable) -> bool:
        return self.fairness.priority(request_id) == self.overtaking.most_urgent()

    def _may_pass(self, request_id: Hashable) -> bool:
        """Whether a waiting request, as long as it looks, may go before all that came earlier."""
        return self._work_now(request_id) <= self.overtaking.slack(request_id, self.fairness.now)

    def _work_now(self, request_id: Hashable) -> float:
        return self.work.of(self._uncached(request_id), self._tokens[request_id])

    def _uncached(self, request_id: Hashable) -> int:
        tree = self.cht
        known = (tree.depth(request_id) - tree.missing_count(request_id)) * tree.chunk_size
        return max(1, self._tokens[request_id] - max(known, self.cached_prefixes.tokens(request_id)))

    def _best(self) -> Candidate | None:
        """The request with the fewest tokens to compute, beside what runs or what the cache holds.

        Not where prefixes compete for memory: there who evicts goes last already.
        """
        best = self.cht.find_best()
        if best is None or self.passing_over.memory_is_short():
            return best
        cached = self.cached_prefixes.shortest(lambda r: r not in self._refused and not self.cht.is_passed(r))
        if cached is None or self.fairness.priority(cached) != self.fairness.priority(best.request_id):
            return best
        return self.cht.candidate(cached) if self._uncached(cached) < self._uncached(best.request_id) else best

    def _in_turn(self) -> Hashable | None:
        """The shortest of the oldest, where somebody may not be passed any more.

        The oldest one may be it whatever it was to wait for, but for a prefix that is being computed.
        """
        priority = self.overtaking.most_urgent()
        assert priority is not None
        oldest = self.overtaking.oldest(priority)

        def work_of(request_id: Hashable) -> float | None:
            if request_id in self._refused or request_id in self._excused:
                return None
            waits = self.passing_over.awaits_prefix if request_id == oldest else self.cht.is_passed
            return None if waits(request_id) else self._work_now(request_id)

        request_id = self.overtaking.shortest(priority, work_of, self.fairness.now)
        if request_id is not None:
            self._hurried = request_id
            if request_id == oldest:
                self._due = request_id
                self.passing_over.release(request_id)
        return request_id

    def admitted(self, request_id: Hashable, cached_tokens: int | None = None) -> None:
        """The scheduler took the proposed request into the batch and will compute all but its cached tokens.

        Waiting requests that share a good part of what it computes stay waiting until ``computed``: they will find it
        in the prefix cache, where otherwise each of them would compute it again beside this one. None: nothing is left
        to compute.
        """
        self.cht.add_to_batch(request_id)
        self.fairness.admit(request_id)
        tokens = self._tokens[request_id]
        work = self.work.of(tokens - (tokens if cached_tokens is None else cached_tokens), tokens)
        self.overtaking.admit(request_id, work)
        self.cached_prefixes.forget(request_id)
        self._pending_work += work
        self._newest = request_id
        self.overdue_admissions += request_id == self._hurried
        self.passing_over.admitted(request_id, cached_tokens)
        if self.forecast is not None and self.outlook_of is not None:
            outlook = self.outlook_of(request_id)
            self._cached[request_id] = cached_tokens or 0
            self._pending += 0 if cached_tokens is None else max(0, outlook.tokens - cached_tokens)
            if self._foreseen:
                self.forecast.admit(outlook, self._parts(request_id))
        self._undone = None
        if self.pacing is not None:
            self.pacing.admitted(self.fairness.now)
        self.longest_wait = max(self.longest_wait, self.fairness.waited(request_id))

    def passes_over(self, request_id: Hashable, cached_tokens: int, missing_tokens: int, free_tokens: int) -> bool:
        """Whether the proposed request is to wait: it would pass others by too much, or for its prefix.

        In the latter case so do all that share what it would compute (``PassingOver``).
        """
        if request_id == self._due or self.fairness.is_late(request_id):
            return False
        tokens = self._tokens[request_id]
        # A prompt that is cached as a whole is computed from its last page on.
        evicted = cached_tokens + self.cht.chunk_size < self.cached_prefixes.tokens(request_id)
        if evicted:
            self.cached_prefixes.note(request_id, self.fairness.priority(request_id), cached_tokens, tokens)
        work = self.work.of(missing_tokens, tokens)
        if evicted or work > self.overtaking.slack(request_id, self.fairness.now):
            self._refused.add(request_id)  # something was taken for cached that is not
            self.cht.hold(request_id)
        elif not self.passing_over.passes_over(request_id, cached_tokens, missing_tokens, free_tokens):
            return False
        self._cancel_undone()
        return True

    def is_settled(self, request_id: Hashable) -> bool:
        """Whether a proposed request was admitted, or is to wait for a reason of ours."""
        passing_over = self.passing_over
        return (
            request_id in self.cht.active
            or request_id in self._refused
            or request_id in passing_over.postponed
            or request_id in passing_over.last
        )

    def fits(self, request_id: Hashable, free_tokens: int) -> bool:
        """Whether memory will suffice for the proposed request beside the running ones, as far as can be foreseen.

        Parameters
        ----------
        free_tokens
            Of the pool, with all that can be evicted.
        """
        tree = self.cht
        if self.forecast is None or self.outlook_of is None or self.gathering is None or not tree.active:
            return True
        if request_id == self._hurried or not self.gathering.tight(self.passing_over.demand(), len(tree.active)):
            return True
        if not self._foreseen:
            self.forecast.open((self.outlook_of(active), self._parts(active)) for active in tree.active)
            self._foreseen = True
        if self._pending + self.forecast.needs(self.outlook_of(request_id), self._parts(request_id)) <= free_tokens:
            return True
        self.kept_out += 1
        return False

    def _parts(self, request_id: Hashable) -> list[tuple[Hashable, int]]:
        """What a request may share with others, in tokens: the tree knows chunks, what was cached tells the rest."""
        size = self.cht.chunk_size
        parts = [(part, chunks * size) for part, chunks in self.cht.path(request_id)]
        rest = self._cached.get(request_id, 0) - sum(tokens for _, tokens in parts)
        if parts and 0 < rest < size:
            parts[0] = parts[0][0], parts[0][1] + rest
        return parts

    def _explore(self, allowed: bool) -> None:
        """No trials of STOP while memory is short: their reward would not see the prefixes that are lost by it."""
        if self._frozen is not None and (allowed or self._frozen[0] is not self.policy):
            policy, explores = self._frozen
            policy.explore, self._frozen = explores, None
        if not allowed and self._frozen is None and self.policy is not None:
            self.policy.end_episode()
            self._frozen, self.policy.explore = (self.policy, self.policy.explore), False

    def skipped(self, request_id: Hashable) -> None:
        """The scheduler passed over the proposed request (an adapter not loaded, say): not again this round."""
        self.cht.hold(request_id)
        self.overtaking.excuse(request_id, True)
        self._excused.append(request_id)
        self._cancel_undone()

    def _cancel_undone(self) -> None:
        if self._undone is not None and self.policy is not None:
            self.policy.cancel()
        self._undone = None

    def end_round(self) -> None:
        """Close the round: requests passed over compete again in the next, an ADD not carried out teaches nothing."""
        self._cancel_undone()
        for request_id in self._excused:
            self.overtaking.excuse(request_id, False)
        self._excused.clear()
        self._refused.clear()
        self.cht.resume()
        for request_id in list(self.cht.held):
            self.cht.requeue(request_id)

    def _most_late(self, best: Candidate | None) -> Hashable | None:
        """The oldest waiting request that is late, of the classes that are as urgent as the best's."""
        fairness, oldest = self.fairness, self.cht.oldest()
        if oldest is None or not fairness.is_late(oldest):
            return None
        arrivals = fairness.arrivals
        if best is None or arrivals[oldest].priority <= (urgency := arrivals[best.request_id].priority):
            return oldest
        # Where there are classes, those who have waited longest are the least urgent; others may be late as well.
        if self._late is None:
            late = filter(fairness.is_late, self.cht.waiting)
            self._late = deque(sorted(late, key=lambda r: (arrivals[r].priority, arrivals[r].round)))
        while self._late and self._late[0] not in self.cht.waiting:
            self._late.popleft()
        if self._late and arrivals[self._late[0]].priority <= urgency:
            return self._late[0]
        return None

    # Row order ------------------------------------------------------------------------------------------------

    def row_order(self, request_ids: Sequence[Hashable]) -> list[int] | None:
        """The permutation that puts rows into depth-first prefix order, or None if they are in one already."""
        return self.cht.row_order(request_ids)

    # Figures --------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters for reports and metrics."""
        return {
            "rounds": self.fairness.round,
            "stops": self.stops,
            "overdue_admissions": self.overdue_admissions,
            "postponements": self.passing_over.postponements,
            "put_last": self.passing_over.put_last,
            "kept_out": self.kept_out,
            "held_rounds": self.held_rounds,
            "longest_wait_s": self.longest_wait,
            "waiting": len(self.cht.waiting),
            "active": len(self.cht.active),
        }
