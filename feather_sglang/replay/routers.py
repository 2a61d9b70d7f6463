"""Routers: which replica gets a request, from what a router itself has seen of requests and answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from feather_sglang.replay.traces import Trace, TraceRequest

# sglang-router's --cache-threshold, --balance-abs-threshold and --balance-rel-threshold where nothing else is said.
CACHE_THRESHOLD, BALANCE_ABS, BALANCE_REL = 0.3, 64, 1.5


class Router(Protocol):
    """Chooses a replica by its number."""

    def choose(self, request: TraceRequest, loads: Sequence[int]) -> int:
        """The replica of this request; `loads` are the requests that each replica has not answered yet."""
        ...


class RoundRobin:
    """Each replica in turn."""

    def __init__(self, trace: Trace) -> None:
        self._turn = -1

    def choose(self, request: TraceRequest, loads: Sequence[int]) -> int:
        """The next one."""
        self._turn = (self._turn + 1) % len(loads)
        return self._turn


class ShortestQueue:
    """The replica with the fewest unanswered requests, the first of several."""

    def __init__(self, trace: Trace) -> None:
        pass

    def choose(self, request: TraceRequest, loads: Sequence[int]) -> int:
        """The least loaded."""
        return loads.index(min(loads))


class _Block:
    """A block of a prompt in the router's prefix tree."""

    def __init__(self, replica: int) -> None:
        self.replica = replica  # the first that was sent it
        self.tokens = 0  # of the block, of the longest prompt so far
        self.following: dict[int, _Block] = {}


class CacheAware:
    """sglang-router's ``cache_aware`` policy, over the blocks of prompts in place of their characters.

    A prompt goes to the replica that was first sent its longest prefix in the tree of all prompts routed so far, if the
    prefix is more than a share of the prompt; else, or where loads differ by more than both bounds of balance, it goes
    to the shortest queue. See sgl-model-gateway/src/policies/cache_aware.rs and tree.rs of SGLang. Nothing leaves the
    tree: the router evicts only beyond 2**26 characters a replica.
    """

    def __init__(self, trace: Trace) -> None:
        self._block_size = trace.block_size
        self._root = _Block(0)
        self._shortest = ShortestQueue(trace)

    def choose(self, request: TraceRequest, loads: Sequence[int]) -> int:
        """The replica whose cache has most of the prompt, as far as loads allow."""
        least, most = min(loads), max(loads)
        replica = self._shortest.choose(request, loads)
        if most - least <= BALANCE_ABS or most <= least * BALANCE_REL:
            matched, owner = self._match(request)
            if matched > CACHE_THRESHOLD * request.input_length:
                replica = owner
        self._insert(request, replica)
        return replica

    def _match(self, request: TraceRequest) -> tuple[int, int]:
        """Tokens of the prompt that the tree has, and the replica of the last of them."""
        matched, block = 0, self._root
        for place, name in enumerate(request.hash_ids):
            found = block.following.get(name)
            if found is None:
                break
            block = found
            tokens = self._tokens(request, place)
            matched += min(tokens, block.tokens)
            if block.tokens < tokens:
                break
        return matched, block.replica

    def _insert(self, request: TraceRequest, replica: int) -> None:
        block = self._root
        for place, name in enumerate(request.hash_ids):
            block = block.following.setdefault(name, _Block(replica))
            block.tokens = max(block.tokens, self._tokens(request, place))

    def _tokens(self, request: TraceRequest, place: int) -> int:
        return min(self._block_size, request.input_length - place * self._block_size)


ROUTERS: dict[str, Callable[[Trace], Router]] = {
    "cache-aware": CacheAware,
    "round-robin": RoundRobin,
    "shortest-queue": ShortestQueue,
}
