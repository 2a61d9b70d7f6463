"""Which waiting requests are passed over: until their prefix is computed, more share it, or all others were proposed.

Ours, not the paper's: it admits whoever shares most, whatever becomes of the cache. The tree leaves out whom this
module defers or holds; ``BatchBuilder`` asks it about every request that it has proposed.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, KeysView

from feather_sglang.scheduling.admission.fairness import Fairness
from feather_sglang.scheduling.admission.gathering import LEAST_TOKENS, Gathering
from feather_sglang.scheduling.tree.cht import Candidate, ChunkedHashTree

# Waiting for a prefix that is being computed pays from here on, for one request. More than a page and a chunk, which
# two equal prompts always compute anew.
_WORTH_WAITING = 256
# One more prefill step pays once it saves all who would wait for it so many tokens together; then it serves them all.
_WORTH_A_STEP = 512
_MOST_ASKED = 8  # prefixes made to wait or to go last in one round: SGLang looks each up in its cache first
_MOST_POSTPONED = 16  # prefixes that wait at a time: each is weighed again in every round, and nobody behind them


class PassingOver:
    """Who is passed over in an admission round.

    Parameters
    ----------
    gathering
        Tells whether memory is short and a prefix had better wait. ``None``: nobody waits but for a prefix that another
        request computes.

    Attributes
    ----------
    postponements, put_last
        Prefixes made to wait for more requests, and to go last.
    staying
        Waiting requests of such prefixes that nobody computes.
    """

    def __init__(self, cht: ChunkedHashTree, fairness: Fairness, gathering: Gathering | None) -> None:
        self.cht = cht
        self.fairness = fairness
        self.gathering = gathering
        self.postponements = 0
        self.put_last = 0
        self.staying = 0
        # Each with the depth in chunks from which sharing its prompt is worth a wait.
        self._computing: dict[Hashable, int] = {}
        self._postponed: dict[Hashable, tuple[int, int]] = {}  # and its tokens to be computed
        self._last: dict[Hashable, int] = {}
        self._retracted: set[Hashable] = set()  # waiting again
        self._last_call = False  # in this round, those who go last are proposed now
        self._saved = 0  # tokens of this round that others need not compute again if they wait for the next one
        self._asked = 0  # prefixes passed over in this round for the first time

    # Who ---------------------------------------------------------------------------------------------------------

    @property
    def postponed(self) -> KeysView[Hashable]:
        """Waiting requests for whose prefix it is too early, one for each."""
        return self._postponed.keys()

    @property
    def last(self) -> Collection[Hashable]:
        """Waiting requests that go last, one for each prefix; none any more once they are proposed."""
        return () if self._last_call else self._last.keys()

    @property
    def computing(self) -> KeysView[Hashable]:
        """Admitted requests whose prompts others wait for."""
        return self._computing.keys()

    @property
    def retracted(self) -> Collection[Hashable]:
        """Waiting requests that have run before."""
        return self._retracted

    def memory_is_short(self) -> bool:
        """Whether prefixes compete for memory."""
        return self.gathering is not None and self.gathering.short(self.demand(), len(self.cht.active))

    def demand(self) -> int:
        """Distinct prompt tokens of all waiting and running requests."""
        return self.cht.distinct_chunks * self.cht.chunk_size

    # Life cycle --------------------------------------------------------------------------------------------------

    def requeued(self, request_id: Hashable) -> None:
        """A request was retracted."""
        self._computing.pop(request_id, None)
        self._retracted.add(request_id)

    def left(self, request_id: Hashable) -> None:
        """A request has left queue or batch."""
        self._retracted.discard(request_id)
        for requests in (self._computing, self._postponed, self._last):
            requests.pop(request_id, None)

    def admitted(self, request_id: Hashable, cached_tokens: int | None) -> None:
        """A request computes all of its prompt but so many tokens; those that share a good part of that wait for it."""
        self._retracted.discard(request_id)
        if cached_tokens is None:
            return
        depth = self._depth_worth_waiting(cached_tokens)
        partings = {
            parting: tokens * sharers
            for parting, sharers in self.cht.sharers(request_id)
            if (tokens := parting * self.cht.chunk_size - cached_tokens) > 0
        }
        self._saved += max(partings.values(), default=0)
        if self._saved >= _WORTH_A_STEP:
            depth = min(depth, *partings) if partings else depth
        if 0 < depth <= self.cht.depth(request_id):
            self._computing[request_id] = depth
            self.cht.defer(request_id, depth)

    def computed(self, request_id: Hashable) -> None:
        """The prompt of an admitted request is in the prefix cache."""
        del self._computing[request_id]

    # One admission round -----------------------------------------------------------------------------------------

    def open_round(self) -> None:
        """Pass over all for whom the reason still holds."""
        self._last_call, self._asked, self._saved = False, 0, 0
        for request_id, (depth, missing) in list(self._postponed.items()):
            if not self._still_waits(request_id, depth, missing):
                del self._postponed[request_id]
        for request_id, depth in list(self._last.items()):
            if not self._may_wait(request_id, depth):
                del self._last[request_id]
        self._pass_over()

    def call_last(self) -> bool:
        """Let those be proposed who go last; False if there are none, or it has been done in this round."""
        if self._last_call or not self._last:
            return False
        self._last_call = True
        self.cht.resume()
        for request_id in self._last.keys() & self.cht.held:
            self.cht.requeue(request_id)
        self._pass_over()
        return True

    def _pass_over(self) -> None:
        self.staying = 0
        for request_id, depth in self._computing.items():
            self.cht.defer(request_id, depth)
        passed_over = [(r, depth) for r, (depth, _) in self._postponed.items()]
        if not self._last_call:
            passed_over += self._last.items()
        for request_id, depth in passed_over:
            if request_id in self.cht.waiting:  # else it is held, or has been admitted
                self._stay(request_id, depth)

    def awaits_prefix(self, request_id: Hashable) -> bool:
        """Whether an admitted request computes what a waiting one would compute again beside it."""
        tree = self.cht
        return any(tree.common_depth(request_id, other) >= depth for other, depth in self._computing.items())

    def release(self, request_id: Hashable) -> None:
        """Let a request be admitted now, whatever it was to wait for."""
        self._postponed.pop(request_id, None)
        self._last.pop(request_id, None)
        if request_id in self.cht.held:
            self.cht.requeue(request_id)

    def is_one_too_many(self, best: Candidate) -> bool:
        """Whether it might have to wait where enough do: then nobody behind it is admitted either."""
        full = self._asked >= _MOST_ASKED or len(self._postponed) >= _MOST_POSTPONED
        return full and best.missing_chunks * self.cht.chunk_size >= LEAST_TOKENS

    def passes_over(self, request_id: Hashable, cached_tokens: int, missing_tokens: int, free_tokens: int) -> bool:
        """Whether a proposed request, and all that share what it would compute, are to wait.

        Either that prefix had better be computed later (``Gathering``): they are passed over in this round, and in the
        next ones for as long as that holds. Or something must be evicted for it: then they go last, as those whose
        prefix is still cached may need what would be evicted, and cost next to nothing.

        Parameters
        ----------
        cached_tokens, missing_tokens
            Of its prompt: found in the prefix cache, and to be computed.
        free_tokens
            Of the pool, without evicting anything, beyond what this round has taken.
        """
        depth = self._depth_worth_waiting(cached_tokens)
        if self._still_waits(request_id, depth, missing_tokens):
            self._postponed[request_id] = depth, missing_tokens
            self._last.pop(request_id, None)
            self.postponements += 1
        elif self._goes_last(request_id, depth, missing_tokens, free_tokens):
            self._last[request_id] = depth
            self.put_last += 1
        else:
            return False
        self._stay(request_id, depth)
        self._asked += 1
        return True

    def _goes_last(self, request_id: Hashable, depth: int, missing_tokens: int, free_tokens: int) -> bool:
        if self._last_call or missing_tokens < LEAST_TOKENS or missing_tokens <= free_tokens:
            return False
        return self._may_wait(request_id, depth)

    def _still_waits(self, request_id: Hashable, depth: int, missing_tokens: int) -> bool:
        if not self._may_wait(request_id, depth):
            return False
        tree = self.cht
        if any(tree.common_depth(request_id, other) >= depth for other in self._retracted):
            return False  # what those have generated is lost to their users while they wait
        assert self.gathering is not None
        return self.gathering.waits(
            missing_tokens,
            tree.sharing(request_id, depth),
            self.fairness.waited(request_id),
            len(tree.active),
        )

    def _may_wait(self, request_id: Hashable, depth: int) -> bool:
        """Whether memory is short, and nobody computes the first `depth` chunks of this request, nor is it late."""
        tree = self.cht
        if not self.memory_is_short() or request_id not in tree.waiting or depth > tree.depth(request_id):
            return False
        # Nobody less urgent is to be admitted while it waits.
        if self.fairness.is_late(request_id) or self.fairness.is_urgent(request_id):
            return False
        return tree.depth(request_id) - tree.missing_count(request_id) < depth

    def _stay(self, request_id: Hashable, depth: int) -> None:
        if self.cht.sharing(request_id, depth) == 1:
            self.cht.hold(request_id)
            return
        before = self.cht.deferred
        self.cht.defer(request_id, depth)
        self.staying += self.cht.deferred - before

    def _depth_worth_waiting(self, cached_tokens: int) -> int:
        return -(-(cached_tokens + _WORTH_WAITING) // self.cht.chunk_size)
