"""The state of every request for admission: each event of a request is told once and updates tree, ages and lengths.

Among them is what the engine's prefix cache holds of the waiting prompts: the tree knows what running requests share,
not what the cache has kept of those that have ended, the last turn of a conversation above all. So the engine looks a
prompt up once, when it arrives, and again when the request is proposed: who has become longer, as its prefix was
evicted, competes anew with what is left. What is cached later, the tree sees while it is computed. Ours, not the
paper's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from math import inf
from typing import Any

from feather_sglang.scheduling.admission.deferrals import Deferrals, PrefixBatching
from feather_sglang.scheduling.admission.fairness import Fairness
from feather_sglang.scheduling.admission.forecast import KVForecast, Outlook, Parts
from feather_sglang.scheduling.admission.overtaking import Overtaking
from feather_sglang.scheduling.admission.types import Round
from feather_sglang.scheduling.admission.work import Work
from feather_sglang.scheduling.meters.readings import Readings
from feather_sglang.scheduling.tree.cht import Candidate, ChunkedHashTree

LEAST_CACHED = 512  # cached prefixes below that change no order
_SEARCH_LIMIT = 8  # entries looked at for one that can be proposed now
_COUNTED_REQUESTS = 256  # waiting requests that are looked at; a queue is overload where there are more
_Cached = tuple[int, int, int, Hashable, int]  # priority, uncached tokens, number, request, cached tokens


class CachedPrefixes:
    """The waiting requests that found a prefix in the cache, the one with the fewest uncached tokens first."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Cached] = {}
        self._line: list[_Cached] = []  # a heap of those, and of some that are stale
        self._number = 0

    def note(self, request_id: Hashable, priority: int, cached_tokens: int, tokens: int) -> None:
        """Note what the cache has of a waiting request's `tokens`."""
        if cached_tokens < LEAST_CACHED:
            self.forget(request_id)
            return
        self._number += 1
        entry = self._entries[request_id] = priority, tokens - cached_tokens, self._number, request_id, cached_tokens
        heappush(self._line, entry)

    def forget(self, request_id: Hashable) -> None:
        """A request does not wait any more."""
        self._entries.pop(request_id, None)

    def tokens(self, request_id: Hashable) -> int:
        """Return what the cache had of a request when it was looked up last; 0 if that was little."""
        return self._entries[request_id][4] if request_id in self._entries else 0

    def shortest(self, usable: Callable[[Hashable], bool]) -> Hashable | None:
        """Return the most urgent request with the fewest uncached tokens that is `usable`."""
        line, found = self._line, None
        others: list[_Cached] = []
        while line and len(others) < _SEARCH_LIMIT:
            entry = line[0]
            if self._entries.get(entry[3]) is not entry:
                heappop(line)
            elif usable(entry[3]):
                found = entry[3]
                break
            else:
                others.append(heappop(line))
        for entry in others:
            heappush(line, entry)
        return found


class QueueState:
    """Waiting and running requests.

    Attributes
    ----------
    tree, fairness, overtaking, work, deferrals, cached_prefixes
        One for each question.
    tokens
        Lengths of prompts.
    forecast, outlook_of
        What looks ahead at memory, and gives a request's lengths; None where nobody does.
    """

    def __init__(
        self,
        tree: ChunkedHashTree,
        fairness: Fairness,
        overtaking: Overtaking,
        work: Work,
        prefix_batching: PrefixBatching | None,
        forecast: KVForecast | None,
        outlook_of: Callable[[Hashable], Outlook] | None,
    ) -> None:
        self.tree = tree
        self.fairness = fairness
        self.overtaking = overtaking
        self.work = work
        self.deferrals = Deferrals(tree, fairness, prefix_batching)
        self.cached_prefixes = CachedPrefixes()
        self.forecast = forecast
        self.outlook_of = outlook_of
        self._unseen: dict[Hashable, int] = {}  # priority of those that arrived since the last round
        self.tokens: dict[Hashable, int] = {}
        self._found: dict[Hashable, int] = {}  # tokens that running requests found in the prefix cache
        self._pending_work = 0.0  # of prompts that were admitted and are not computed yet
        self._newest: Hashable | None = None  # admitted last; it may run chunk by chunk

    # Events -----------------------------------------------------------------------------------------------------

    def arrived(
        self,
        request_id: Hashable,
        token_ids: Any,
        *,
        extra_key: Any = None,
        priority: int = 0,
        most_tokens: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        """A new request waits.

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
        self.tree.insert(request_id, token_ids, extra_key, priority)
        self._unseen[request_id] = priority
        self.cached_prefixes.note(request_id, priority, cached_tokens, len(token_ids))
        self._enter_line(request_id, len(token_ids), priority)
        self.deferrals.arrived(request_id, most_tokens)

    def retracted(self, request_id: Hashable, token_ids: Any) -> None:
        """A running request was retracted or preempted, and waits again at its original age."""
        if request_id in self.tree.active:
            self.fairness.wait_again(request_id)
        self._found.pop(request_id, None)
        self.tree.requeue(request_id, token_ids)
        # Like SGLang, which puts it at the end of its queue: who waits already may go before it.
        self._enter_line(request_id, len(token_ids), self.fairness.priority(request_id))
        self.deferrals.retracted(request_id)

    def _enter_line(self, request_id: Hashable, tokens: int, priority: int) -> None:
        self.tokens[request_id] = tokens
        # In order of arrival, what a request shares with those before it is cached when its turn comes; where memory
        # is short it is gone by then, but for what running ones hold.
        tree, short = self.tree, self.deferrals.memory_is_short()
        known = (tree.covered(request_id) if short else tree.common(request_id)) * tree.chunk_size
        work = self.work.of(max(1, tokens - max(known, self.cached_prefixes.tokens(request_id))), tokens)
        self.overtaking.arrive(request_id, priority, work, self._pending_work, self.fairness.now)

    def admitted(self, request_id: Hashable, cached_tokens: int | None, opened: Round) -> None:
        """A waiting request runs; see ``Admission.admitted``."""
        self.tree.add_to_batch(request_id)
        self.fairness.admit(request_id)
        tokens = self.tokens[request_id]
        work = self.work.of(tokens - (tokens if cached_tokens is None else cached_tokens), tokens)
        self.overtaking.admit(request_id, work)
        self.cached_prefixes.forget(request_id)
        self._found[request_id] = cached_tokens or 0
        self._pending_work += work
        self._newest = request_id
        self.deferrals.admitted(request_id, cached_tokens)
        if self.forecast is not None and self.outlook_of is not None:
            if cached_tokens is not None:
                opened.pending_tokens += max(0, tokens - cached_tokens)
            if opened.foreseen:
                self.forecast.admit(*self.foreseeable(request_id))

    def computed(self, request_id: Hashable) -> None:
        """The prompt of an admitted request is in the prefix cache: who waited for it may be proposed."""
        self.deferrals.computed(request_id)

    def aborted(self, request_id: Hashable) -> None:
        """A waiting request was aborted or timed out."""
        self.tree.remove(request_id)
        self.deferrals.left(request_id)
        del self.tokens[request_id]
        self.overtaking.leave(request_id)
        self.cached_prefixes.forget(request_id)
        if self._unseen.pop(request_id, None) is None:
            self.fairness.forget(request_id, waiting=True)

    def finished(self, request_id: Hashable, output_tokens: int = 0) -> None:
        """A running request finished or was aborted, after so many tokens."""
        tokens = self.tokens.pop(request_id)
        del self._found[request_id]
        if output_tokens:
            self.work.finished(tokens, output_tokens)
            if self.forecast is not None:
                self.forecast.finished(output_tokens)
        self.tree.finish(request_id)
        self.deferrals.left(request_id, output_tokens)
        self.fairness.forget(request_id, waiting=False)

    def open_round(self, readings: Readings, opened: Round) -> None:
        """Take in what was measured and who arrived since the last round, and say again who is deferred."""
        self.fairness.open_round(readings.now)
        self.work.measured(readings.pair_tokens, readings.step_tokens)
        for request_id, priority in self._unseen.items():
            self.fairness.arrive(request_id, priority)
        self._unseen.clear()
        pending = opened.pending_tokens
        chunked = self.tokens.get(self._newest, pending)
        self._pending_work = self.work.of(pending, chunked) if pending else 0.0
        self.deferrals.open_round(opened, readings.prefill_seconds)

    # Questions ------------------------------------------------------------------------------------------------

    def foreseeable(self, request_id: Hashable) -> tuple[Outlook, Parts]:
        """Lengths of a request, and what it may share with others: the tree knows chunks, the cache told the rest."""
        assert self.outlook_of is not None
        size = self.tree.chunk_size
        parts = [(part, chunks * size) for part, chunks in self.tree.path(request_id)]
        rest = self._found.get(request_id, 0) - sum(tokens for _, tokens in parts)
        if parts and 0 < rest < size:
            parts[0] = parts[0][0], parts[0][1] + rest
        return self.outlook_of(request_id), parts

    def uncached(self, request_id: Hashable) -> int:
        """Tokens to be computed of a waiting request, as it looks now: at least one."""
        known = self.tree.covered(request_id) * self.tree.chunk_size
        return max(1, self.tokens[request_id] - max(known, self.cached_prefixes.tokens(request_id)))

    def waiting_work(self, free_tokens: int) -> float:
        """Prefill of all that wait; infinite where they do not fit into so many tokens of memory."""
        waiting, work = self.tree.waiting, 0.0
        if len(waiting) > _COUNTED_REQUESTS:
            return inf
        for request_id in waiting:
            uncached = self.uncached(request_id)
            free_tokens -= uncached
            if free_tokens < 0:
                return inf
            work += self.work.of_prompt(uncached, self.tokens[request_id])
        return work

    def work_now(self, request_id: Hashable) -> float:
        """Work of a waiting request, as it looks now."""
        return self.work.of(self.uncached(request_id), self.tokens[request_id])

    def may_pass(self, request_id: Hashable) -> bool:
        """Whether a waiting request, as long as it looks, may go before all that came earlier."""
        slack = self.overtaking.slack(request_id, self.fairness.now)
        return slack == inf or self.work_now(request_id) <= slack

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
