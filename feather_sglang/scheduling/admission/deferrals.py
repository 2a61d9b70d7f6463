"""Deferred requests, until a prefix is computed, more requests share it, or all others were proposed.

One waiting request stands for all that share the prefix in question; the tree leaves them all out of its search. Ours,
not the paper's, which admits the request that shares most, whatever becomes of the cache.

Where prompts exceed the KV pool, a prefix that is computed for one request may be evicted before the next one of its
group arrives, and is computed again. The stop policy cannot see that: its reward is decode throughput, in which
prefill does not appear. So ``PrefixBatching`` weighs it with a model of costs instead.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, KeysView

from feather_sglang.scheduling.admission.fairness import Fairness
from feather_sglang.scheduling.admission.types import Round
from feather_sglang.scheduling.tree.cht import Candidate, ChunkedHashTree

# Waiting for a prefix that is being computed pays from here on, for one request. More than a page and a chunk, which
# two equal prompts always compute anew.
_LEAST_SHARED_TOKENS = 256
# One more prefill step pays once it saves all who would wait for it so many tokens together; then it serves them all.
_LEAST_SAVED_TOKENS = 512
_DEFERRALS_PER_ROUND = 8  # prefixes deferred in one round: SGLang looks each up in its cache first
_BATCHING_PREFIXES = 16  # prefixes that wait for more requests: each is weighed again in every round
# A decode step's fixed cost, in tokens of prefill: a step reads every weight once, a token multiplies with every weight
# once, so it is the chip's FLOP per byte (184 on an H200, 187 on an RTX 6000 Ada).
STEP_TOKENS = 184
# The chance that a prefix computed early must be computed again (0.35 to one: docs/lab/learning.md).
RECOMPUTE_PROBABILITY = 0.5
# Of the arrivals that would have a prefix computed, so many must meet another that waits for it, or nothing is batched.
MIN_SHARE_RATE = 0.2
LEAST_TOKENS = 512  # a prefix below that is not worth a wait
_WINDOW = 64  # observations that a moving mean follows


class PrefixBatching:
    """The rule for letting a prefix wait for more requests, and the facts about the load that it uses.

    Parameters
    ----------
    pool_tokens
        Tokens that the KV pool holds.

    Attributes
    ----------
    share_rate : share of the arrivals that would have a prefix computed and met another one waiting for it.
    output_tokens : mean of the finished requests; before the first, of what those that arrived may generate.
    seconds_per_token : of prefill; None: not measured yet.
    """

    def __init__(self, pool_tokens: int) -> None:
        self.pool_tokens = pool_tokens
        self.share_rate = 0.0
        self.output_tokens = 0.0
        self._any_finished = False
        self.seconds_per_token: float | None = None

    def arrived(self, most_tokens: int, met: bool | None) -> None:
        """Note a request that may generate so many tokens.

        `met` : whether one that waits already shares half of the prefix that it would have computed; None: it would
        have none computed.
        """
        if not self._any_finished:
            self._note_output(most_tokens)
        if met is not None:
            self.share_rate += (met - self.share_rate) / _WINDOW

    def finished(self, output_tokens: int) -> None:
        """Note what a request has generated."""
        if not self._any_finished:
            self._any_finished, self.output_tokens = True, 0.0
        self._note_output(output_tokens)

    def _note_output(self, tokens: int) -> None:
        mean = self.output_tokens
        self.output_tokens = mean + (tokens - mean) / _WINDOW if mean else float(tokens)

    def tight(self, demand_tokens: int, running: int) -> bool:
        """Whether all that is asked for exceeds the pool.

        Parameters
        ----------
        demand_tokens : distinct prompt tokens of all waiting and running requests.
        running : requests in the batch.
        """
        return demand_tokens + running * self.output_tokens / 2 > self.pool_tokens

    def short(self, demand_tokens: int, running: int) -> bool:
        """Whether prefixes compete for memory: it is ``tight``, and arrivals meet others of their prefix."""
        return self.share_rate >= MIN_SHARE_RATE and self.tight(demand_tokens, running)

    def waits(self, missing_tokens: int, together: int, waited: float, running: int) -> bool:
        """Whether a prefix had better not be computed yet, where memory is short.

        A request more beside B running ones saves 1/B of a decode step's fixed cost, for as many steps as it has
        tokens. Computing the prefix now instead of later brings that for each request that waits for it, and costs
        computing it again if it does not survive until the next ones come. It waits for so long only as that costs
        those who wait less time than the prefill would cost those who run.

        Parameters
        ----------
        missing_tokens : to be computed.
        together : requests that wait for this prefix.
        waited : seconds that the first of them to be proposed has waited.
        running : requests in the batch.
        """
        if missing_tokens < LEAST_TOKENS or not self.seconds_per_token:
            return False
        if together * waited >= running * missing_tokens * self.seconds_per_token:
            return False
        return together * self.output_tokens * STEP_TOKENS < RECOMPUTE_PROBABILITY * running * missing_tokens


class Deferrals:
    """The deferred prefixes of one scheduler, each by one request.

    Parameters
    ----------
    batching
        Tells whether memory is short and a prefix had better wait. ``None``: nobody is deferred but for a prefix that
        another request computes.

    Attributes
    ----------
    waiting_behind
        Waiting requests of such prefixes, which nobody computes.
    """

    def __init__(self, tree: ChunkedHashTree, fairness: Fairness, batching: PrefixBatching | None) -> None:
        self.tree = tree
        self.fairness = fairness
        self.prefix_batching = batching
        self.round = Round()
        self.waiting_behind = 0
        # Each with the depth in chunks from which sharing its prompt is worth a wait: together, and for one alone.
        self._in_flight: dict[Hashable, tuple[int, int]] = {}
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
    def any_retracted(self) -> bool:
        """Whether somebody waits who has run before."""
        return bool(self._retracted)

    def memory_is_short(self) -> bool:
        """Whether prefixes compete for memory."""
        batching, tree = self.prefix_batching, self.tree
        return batching is not None and batching.short(tree.distinct_chunks * tree.chunk_size, len(tree.active))

    def memory_is_tight(self) -> bool:
        """Whether all that is asked for exceeds the pool, whether or not requests share."""
        batching, tree = self.prefix_batching, self.tree
        return batching is not None and batching.tight(tree.distinct_chunks * tree.chunk_size, len(tree.active))

    def limit_reached(self, best: Candidate) -> bool:
        """Whether `best` might have to be deferred where enough are: then nobody behind it is admitted either."""
        full = self.round.deferrals >= _DEFERRALS_PER_ROUND or len(self._batching) >= _BATCHING_PREFIXES
        return full and best.missing_chunks * self.tree.chunk_size >= LEAST_TOKENS

    def awaits_prefix(self, request_id: Hashable) -> bool:
        """Whether an admitted request computes what is worth a wait for this one alone."""
        tree = self.tree
        return any(tree.common_depth(request_id, other) >= alone for other, (_, alone) in self._in_flight.items())

    # Events ------------------------------------------------------------------------------------------------------

    def arrived(self, request_id: Hashable, most_tokens: int) -> None:
        """A request is in the tree, and may generate so many tokens."""
        if self.prefix_batching is not None:
            tree = self.tree
            missing, met = tree.missing_count(request_id), None
            if missing * tree.chunk_size >= LEAST_TOKENS:
                met = tree.sharing(request_id, tree.depth(request_id) - missing // 2) > 1
            self.prefix_batching.arrived(most_tokens, met)

    def retracted(self, request_id: Hashable) -> None:
        """A request is back among the waiting."""
        self._in_flight.pop(request_id, None)
        self._retracted.add(request_id)

    def left(self, request_id: Hashable, output_tokens: int = 0) -> None:
        """A request has left queue or batch, and has generated so many tokens if it finished."""
        if self.prefix_batching is not None and output_tokens:
            self.prefix_batching.finished(output_tokens)
        self._retracted.discard(request_id)
        for requests in (self._in_flight, self._batching, self._last):
            requests.pop(request_id, None)

    def admitted(self, request_id: Hashable, cached_tokens: int | None) -> None:
        """A request computes all of its prompt but so many tokens; those that share a good part of that wait for it."""
        self._retracted.discard(request_id)
        if cached_tokens is None:
            return
        depth = least = alone = self._depth_worth_waiting(cached_tokens)
        saved = 0
        for parting, sharers in self.tree.sharers(request_id):
            tokens = parting * self.tree.chunk_size - cached_tokens
            if tokens > 0:
                least, saved = min(least, parting), max(saved, tokens * sharers)
        self.round.saved_tokens += saved
        if self.round.saved_tokens >= _LEAST_SAVED_TOKENS:
            depth = least
        if 0 < depth <= self.tree.depth(request_id):
            self._in_flight[request_id] = depth, alone
            self.tree.defer(request_id, depth)

    def computed(self, request_id: Hashable) -> None:
        """The prompt of an admitted request is in the prefix cache."""
        del self._in_flight[request_id]

    # One admission round -----------------------------------------------------------------------------------------

    def open_round(self, opened: Round, seconds_per_token: float | None) -> None:
        """Defer all for whom the reason still holds; prefill takes so many seconds a token."""
        self.round = opened
        if self.prefix_batching is not None:
            self.prefix_batching.seconds_per_token = seconds_per_token
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
        for request_id, (depth, _) in self._in_flight.items():
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
        self._defer_now(request_id, depth)

    def should_go_last(self, request_id: Hashable, cached_tokens: int, missing_tokens: int, free_tokens: int) -> bool:
        """Whether something must be evicted for a request.

        Those whose prefix is still cached may need what would be evicted, and cost next to nothing.
        """
        if self.round.last_call or missing_tokens <= free_tokens:
            return False
        return self._may_wait(request_id, self._depth_worth_waiting(cached_tokens))

    def go_last(self, request_id: Hashable, cached_tokens: int) -> None:
        """Defer a request, and all that share what it would compute, until ``call_last``."""
        depth = self._depth_worth_waiting(cached_tokens)
        self._last[request_id] = depth
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
        return tree.covered(request_id) < depth

    def _depth_worth_waiting(self, cached_tokens: int) -> int:
        return -(-(cached_tokens + _LEAST_SHARED_TOKENS) // self.tree.chunk_size)
