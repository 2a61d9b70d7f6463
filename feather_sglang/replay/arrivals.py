"""Arrival times of a trace's requests: their own, or a while after the answer that they follow."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a trace makes these of itself
    from feather_sglang.replay.traces import TraceRequest


class Arrivals:
    """The requests that have not arrived yet, on the server's clock."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self._by_id = {request.request_id: request for request in requests}
        self._place = {request.request_id: place for place, request in enumerate(requests)}
        self._followers: dict[int, list[TraceRequest]] = {}
        self._due: list[tuple[float, int, TraceRequest]] = []
        for place, request in enumerate(requests):
            if request.after is None:
                self._due.append((request.arrival_s, place, request))
            else:
                self._followers.setdefault(request.after, []).append(request)
        heapq.heapify(self._due)

    @property
    def next(self) -> float | None:
        """When the next one comes; None while all that are left wait for answers."""
        return self._due[0][0] if self._due else None

    @property
    def over(self) -> bool:
        """Whether all have come."""
        return not self._due and not self._followers

    def before(self, moment: float) -> float | None:
        """`next`, for a server that does nothing before that moment unless a request comes."""
        return self.next

    def until(self, now: float) -> Iterator[tuple[float, TraceRequest]]:
        """Take those that have come by now: when each was due, and the request; in order."""
        while self._due and self._due[0][0] <= now:
            due, _, request = heapq.heappop(self._due)
            yield due, request

    def ended(self, request_id: int, at: float) -> None:
        """Whoever comes after that request comes once its user has thought."""
        for request in self._followers.pop(request_id, ()):
            heapq.heappush(self._due, (at + request.think_s, self._place[request.request_id], request))

    def answers_in(self, request: TraceRequest) -> Iterator[tuple[int, int, int]]:
        """(request, begin, end) of each answer that a prompt quotes at [begin, end), the latest first."""
        while request.after is not None:
            request = self._by_id[request.after]
            yield request.request_id, request.input_length, request.input_length + request.output_length
