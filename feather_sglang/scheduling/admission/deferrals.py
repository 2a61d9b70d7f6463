"""Who is deferred, and until when: a prefix is being computed, more should share it, or all others go first.

One waiting request stands for all that share the prefix in question; the tree leaves them all out of its search. Ours,
not the paper's: it admits whoever shares most, whatever becomes of the cache.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, KeysView

from feather_sglang.scheduling.admission.fairness import Fairness
from feather_sglang.scheduling.admission.prefix_batching import LEAST_TOKENS, PrefixBatching
from feather_sglang.scheduling.admission.round import Round
from feather_sglang.scheduling.tree.cht import Candidate, ChunkedHashTree

# Waiting for a prefix that is being computed pays from here on, for one request. More than a page and a chunk, which
# two equal prompts always compute anew.
_WORTH_WAITING = 256
# One more prefill step pays once it saves all who would wait for it so many tokens together; then it serves them all.
_WORTH_A_STEP = 512
_MOST_A_ROUND = 8  # prefixes deferred in one round: SGLang looks each up in its cache first
_MOST_BATCHING = 16  # prefixes that wait for more requests: each is weighed again in every round


class Deferrals:
    """The deferred prefixes of one scheduler, each by one request.

    Parameters
    ----------
    batching
        Tells whether memory is short and a prefix had better wait. ``None``: nobody is deferred but for a prefix that
        another request computes.

    Attributes
    ----------
    postponements, put_last
        Prefixes made to wait for more requests, and to go last, so far.
    waiting_behind
        Waiting requests of such prefixes, which nobody computes.
    """

    def __init__(self, tree: ChunkedHashTree, fairness: Fairness, batching: PrefixBatching | None) -> None:
        self.tree = tree
        self.fairness = fairness
        self.prefix_batching = batching
        self.round = Round()
        self.postponements = 0
        self.put_last = 0
        self.waiting_behind = 0
        # Each with the depth in chunks from which sharing its prompt is worth a wait.
        self._in_flight: dict[Hashable, int] = {}
        self._batching: dict[Hashable, tuple[int, int]] = {}  # and its tokens to be computed
        self._last: dict[Hashable, int] = {}
        self._retracted: set[Hashable] = set()  # waiting again

    # Who ---------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> KeysView[Hashable]:
        """Admitted requests whose prompts others wait for."""
        return self._in_flight.keys()

    @property
    def batching(self) -> KeysView[Hashable]:
        """Waiting requests for whose prefix it is too early, one for each."""
        return self._batching.keys()

    @property
    def last(self) -> Collection[Hashable]:
        """Waiting requests that go last, one for each prefix; none any more once they are proposed."""
        return () if self.round.last_call else self._last.keys()

    @property
    def retracted(self) -> Collection[Hashable]:
        """Waiting requests that have run before."""
        return self._retracted

    def memory_is_short(self) -> bool:
        """Whether prefixes compete for memory."""
        batching = self.prefix_batching
        return batching is not None and batching.short(self.demand(), len(self.tree.active))

    def memory_is_tight(self) -> bool:
        """Whether all that is asked for exceeds the pool, whether or not requests share."""
        batching = self.prefix_batching
        return batching is not None and batching.tight(self.demand(), len(self.tree.active))

    def demand(self) -> int:
        """Distinct prompt tokens of all waiting and running requests."""
        return self.tree.distinct_chunks * self.tree.chunk_size

    def limit_reached(self, best: Candidate) -> bool:
        """Whether `best` might have to be deferred where enough are: then nobody behind it is admitted either."""
        full = self.round.deferrals >= _MOST_A_ROUND or len(self._batching) >= _MOST_BATCHING
        return full and best.missing_chunks * self.tree.chunk_size >= LEAST_TOKENS

    def awaits_prefix(self, request_id: Hashable) -> bool:
        """Whether an admitted request computes what a waiting one would compute again beside it."""
        tree = self.tree
        return any(tree.common_depth(request_id, other) >= depth for other, depth in self._in_flight.items())

    # Life cycle --------------------------------------------------------------------------------------------------

    def requeued(self, request_id: Hashable) -> None:
        """A request was retracted."""
        self._in_flight.pop(request_id, None)
        self._retracted.add(request_id)

    def left(self, request_id: Hashable) -> None:
        """A request has left queue or batch."""
        self._retracted.discard(request_id)
        for requests in (self._in_flight, self._batching, self._last):
            requests.pop(request_id, None)

    def admitted(self, request_id: Hashable, cached_tokens: int | None) -> None:
        """A request computes all of its prompt but so many tokens; those that share a good part of that wait for it."""
        self._retracted.discard(request_id)
        if cached_tokens is None:
            return
        depth = self._depth_worth_waiting(cached_tokens)
        partings = {
            parting: tokens * sharers
            for parting, sharers in self.tree.sharers(request_id)
            if (tokens := parting * self.tree.chunk_size - cached_tokens) > 0
        }
        self.round.saved_tokens += max(partings.values(), default=0)
        if self.round.saved_tokens >= _WORTH_A_STEP:
            depth = min(depth, *partings) if partings else depth
        if 0 < depth <= self.tree.depth(request_id):
            self._in_flight[request_id] = depth
            self.tree.defer(request_id, depth)

    def computed(self, request_id: Hashable) -> None:
        """The prompt of an admitted request is in the prefix cache."""
        del self._in_flight[request_id]

    # One admission round -----------------------------------------------------------------------------------------

    def open_round(self, opened: Round) -> None:
        """Defer all for whom the reason still holds."""
        self.round = opened
        for request_id, (depth, missing) in list(self._batching.items()):
            if not self._still_batches(request_id, depth, missing):
                del self._batching[request_id]
        for request_id, depth in list(self._last.items()):
            if not self._may_wait(request_id, depth):
                del self._last[request_id]
        self._defer_all()

    def call_last(self) -> bool:
        """Let those be proposed who go last; False if there are none, or it has been done in this round."""
        if self.round.last_call or not self._last:
            return False
        self.round.last_call = True
        self.tree.resume()
        for request_id in self._last.keys() & self.tree.held:
            self.tree.requeue(request_id)
        self._defer_all()
        return True

    def release(self, request_id: Hashable) -> None:
        """Let a request be admitted now, whatever it was to wait for."""
        self._batching.pop(request_id, None)
        self._last.pop(request_id, None)
        if request_id in self.tree.held:
            self.tree.requeue(request_id)

    def _defer_all(self) -> None:
        self.waiting_behind = 0
        for request_id, depth in self._in_flight.items():
            self.tree.defer(request_id, depth)
        deferred = [(r, depth) for r, (depth, _) in self._batching.items()]
        if not self.round.last_call:
            deferred += self._last.items()
        for request_id, depth in deferred:
            if request_id in self.tree.waiting:  # else it is held, or has been admitted
                self._defer(request_id, depth)

    def _defer(self, request_id: Hashable, depth: int) -> None:
        if self.tree.sharing(request_id, depth) == 1:
            self.tree.hold(request_id)
            return
        before = self.tree.deferred
        self.tree.defer(request_id, depth)
        self.waiting_behind += self.tree.deferred - before

    # A proposed request ------------------------------------------------------------------------------------------

    def should_batch(self, request_id: Hashable, cached_tokens: int, missing_tokens: int) -> bool:
        """Whether its prefix had better be computed later, once more requests share it."""
        return self._still_batches(request_id, self._depth_worth_waiting(cached_tokens), missing_tokens)

    def batch(self, request_id: Hashable, cached_tokens: int, missing_tokens: int) -> None:
        """Defer a request, and all that share what it would compute, for as long as ``should_batch`` holds."""
        depth = self._depth_worth_waiting(cached_tokens)
        self._batching[request_id] = depth, missing_tokens
        self._last.pop(request_id, None)
        self.postponements += 1
        self._defer_now(request_id, depth)

    def should_go_last(self, request_id: Hashable, cached_tokens: int, missing_tokens: int, free_tokens: int) -> bool:
        """Whether something must be evicted for a request.

        Those whose prefix is still cached may need what would be evicted, and cost next to nothing.
        """
        if self.round.last_call or missing_tokens < LEAST_TOKENS or missing_tokens <= free_tokens:
            return False
        return self._may_wait(request_id, self._depth_worth_waiting(cached_tokens))

    def go_last(self, request_id: Hashable, cached_tokens: int) -> None:
        """Defer a request, and all that share what it would compute, until ``call_last``."""
        depth = self._depth_worth_waiting(cached_tokens)
        self._last[request_id] = depth
        self.put_last += 1
        self._defer_now(request_id, depth)

    def _defer_now(self, request_id: Hashable, depth: int) -> None:
        self._defer(request_id, depth)
        self.round.deferrals += 1

    def _still_batches(self, request_id: Hashable, depth: int, missing_tokens: int) -> bool:
        if not self._may_wait(request_id, depth):
            return False
        tree = self.tree
        if any(tree.common_depth(request_id, other) >= depth for other in self._retracted):
            return False  # what those have generated is lost to their users while they wait
        assert self.prefix_batching is not None
        return self.prefix_batching.waits(
            missing_tokens,
            tree.sharing(request_id, depth),
            self.fairness.waited(request_id),
            len(tree.active),
        )

    def _may_wait(self, request_id: Hashable, depth: int) -> bool:
        """Whether memory is short, and nobody computes the first `depth` chunks of this request, nor is it overdue."""
        tree = self.tree
        if not self.memory_is_short() or request_id not in tree.waiting or depth > tree.depth(request_id):
            return False
        # Nobody less urgent is to be admitted while it waits.
        if self.fairness.is_overdue(request_id) or self.fairness.is_urgent(request_id):
            return False
        return tree.depth(request_id) - tree.missing_count(request_id) < depth

    def _depth_worth_waiting(self, cached_tokens: int) -> int:
        return -(-(cached_tokens + _WORTH_WAITING) // self.tree.chunk_size)
