"""What the engine's prefix cache holds of the waiting requests' prompts.

The tree knows what running requests share, not what the cache has kept of those that have ended, the last turn of a
conversation above all. So the engine looks a prompt up once, when it arrives, and again when the request is proposed:
who has become longer, as its prefix was evicted, competes anew with what is left. What is cached later, the tree sees
while it is computed. Ours, not the paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heappop, heappush

LEAST_CACHED = 512  # cached prefixes below that change no order
_MOST_ASKED = 8  # entries looked at for one that can be proposed now


class CachedPrefixes:
    """The waiting requests that found a prefix in the cache, the one with the fewest uncached tokens first."""

    def __init__(self) -> None:
        self._cached: dict[Hashable, int] = {}
        self._line: list[tuple[int, int, int, Hashable]] = []  # priority, uncached, number, request; some are stale
        self._numbers: dict[Hashable, int] = {}  # of the entry that counts
        self._number = 0

    def note(self, request_id: Hashable, priority: int, cached_tokens: int, tokens: int) -> None:
        """Note what the cache has of a waiting request's `tokens`."""
        self.forget(request_id)
        if cached_tokens < LEAST_CACHED:
            return
        self._cached[request_id] = cached_tokens
        self._number += 1
        self._numbers[request_id] = self._number
        heappush(self._line, (priority, tokens - cached_tokens, self._number, request_id))

    def forget(self, request_id: Hashable) -> None:
        """A request does not wait any more."""
        self._cached.pop(request_id, None)
        self._numbers.pop(request_id, None)

    def tokens(self, request_id: Hashable) -> int:
        """Return what the cache had of a request when it was looked up last; 0 if that was little."""
        return self._cached.get(request_id, 0)

    def shortest(self, usable: Callable[[Hashable], bool]) -> Hashable | None:
        """Return the most urgent request with the fewest uncached tokens that is `usable`."""
        line, found = self._line, None
        others: list[tuple[int, int, int, Hashable]] = []
        while line and len(others) < _MOST_ASKED:
            entry = line[0]
            if self._numbers.get(entry[3]) != entry[2]:
                heappop(line)
            elif usable(entry[3]):
                found = entry[3]
                break
            else:
                others.append(heappop(line))
        for entry in others:
            heappush(line, entry)
        return found
