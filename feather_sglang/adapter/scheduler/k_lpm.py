"""k-LPM, a baseline of the replay: SGLang's longest prefix match, but that every k-th request is the oldest.

As in "LLM Query Scheduling with Prefix Reuse and Latency Constraints"; SGLang itself does not have it. Whose turn it is
goes on from one ordering of the queue to the next: else rounds that admit one request each would be fcfs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.schedule_policy import CacheAwarePolicy, SchedulePolicy


class KLpm:
    """Replaces ``calc_priority`` of one ``SchedulePolicy`` of SGLang's, however long the queue is.

    Parameters
    ----------
    policy : SGLang's, for its prefix matching.
    k : 1 is fcfs; ``math.inf`` is lpm behind the oldest request.
    """

    def __init__(self, policy: SchedulePolicy, k: float = 4) -> None:
        self._policy = policy
        self._k = k
        self._waiting: set[str] = set()
        self._served = 0

    def __call__(self, waiting_queue: list[Any], *args: Any, **kwargs: Any) -> None:
        """Sort the queue in place, as ``SchedulePolicy.calc_priority`` does."""
        waiting = {req.rid for req in waiting_queue}
        self._served += len(self._waiting - waiting)
        self._waiting = waiting
        waiting_queue.sort(key=lambda req: req.time_stats.wait_queue_entry_time)
        last = self._policy._compute_prefix_matches(waiting_queue, CacheAwarePolicy.LPM)

        def rank(place: int) -> tuple[bool, int]:
            req = waiting_queue[place]
            # Whose prefix another one in the queue is about to compute comes after all others, as under lpm.
            return req.rid in last, -req.num_matched_prefix_tokens

        longest = sorted(range(len(waiting_queue)), key=rank)
        waiting_queue[:] = [waiting_queue[place] for place in interleaved(longest, self._k, self._served)]


def interleaved(longest: Sequence[int], k: float, served: int = 0) -> list[int]:
    """Order places in a queue: the oldest, the ``k - 1`` with the longest match, the oldest of the rest, and so on.

    Parameters
    ----------
    longest : places in order of arrival, the longest match first.
    served : how many have had their turn before.
    """
    by_age, by_match = iter(range(len(longest))), iter(longest)
    order: dict[int, None] = {}
    for turn in range(served, served + len(longest)):
        source = by_match if turn % k else by_age
        order[next(place for place in source if place not in order)] = None
    return list(order)
