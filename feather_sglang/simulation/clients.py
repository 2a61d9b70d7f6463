"""The clients of a replayed server: their requests, and the answers as they see them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from feather_sglang.simulation.inputs import Request, Workload
from feather_sglang.simulation.timeline import Timeline

STREAM_INTERVAL = 16  # tokens in a piece of an answer, where nothing else is said


@dataclass
class Served:
    """One finished request; times in virtual seconds since the trace began, `gaps` between its tokens."""

    request: Request
    due: float
    first_token: float
    finish: float
    cached_tokens: int
    gaps: array[float]


class _Open:
    """A request that was sent and whose answer has not ended."""

    def __init__(self, request: Request, due: float) -> None:
        self.request, self.due = request, due
        self.made = 0  # tokens that the server has made
        self.seen = 0  # those that its client has
        self.first = self.last = 0.0  # when it got the first piece, and the last so far
        self.gaps = array("d")


class Clients:
    """Requests on their way to the scheduler, and answers on their way back.

    Parameters
    ----------
    interval : tokens in a piece of an answer, after the first token.

    Attributes
    ----------
    served : in the order of their ends.
    """

    def __init__(self, trace: Workload, timeline: Timeline, interval: int) -> None:
        self.trace, self.served = trace, list[Served]()
        self._time, self._interval = timeline, interval
        self._arrivals = trace.arrivals()
        self._door: deque[tuple[float, Request]] = deque()  # at the scheduler's door, and since when
        self._open: dict[str, _Open] = {}

    @property
    def next(self) -> float | None:
        """When the next request is sent, or at the scheduler's door; None while all wait for answers."""
        moments = [self._door[0][0]] if self._door else []
        coming = self._arrivals.before(min(moments, default=inf))
        return min(moments if coming is None else [*moments, coming], default=None)

    @property
    def done(self) -> bool:
        """Whether all requests have come and been answered."""
        return not self._open and self._arrivals.over

    def take(self, full: Callable[[int], bool]) -> list[Request]:
        """Requests that are at the scheduler's door by now, until so many are enough for one turn."""
        for due, request in self._arrivals.until(self._time.now):
            self._open[str(request.request_id)] = _Open(request, due)
            self._door.append((self._time.arrive(due, request.input_length), request))
        taken: list[Request] = []
        while self._door and self._door[0][0] <= self._time.now and not full(len(taken)):
            taken.append(self._door.popleft()[1])
        return taken

    def quotes(self, request: Request) -> list[tuple[int, int]]:
        """Where a prompt quotes answers."""
        return [(begin, end) for _, begin, end in self._arrivals.answers_in(request)]

    def made(self, rid: str, tokens: int, ended: bool) -> bool:
        """The server has made so many tokens of an answer; returns whether its client is sent a piece.

        Under overlap a request that has ended is in one more step, which brings it nothing.
        """
        one = self._open.get(rid)
        if one is None or tokens <= one.made:
            return False
        one.made = tokens
        return ended or (tokens - 1) % self._interval == 0

    def sent(self, rid: str) -> None:
        """A piece is sent; its tokens share the time since the piece before."""
        one, now = self._open[rid], self._time.answer()
        new = one.made - one.seen
        if one.seen:
            one.gaps.extend([(now - one.last) / new] * new)
        else:
            one.first = now
        one.last, one.seen = now, one.made

    def end(self, rid: str, cached_tokens: int) -> None:
        """The last piece was sent."""
        one = self._open.pop(rid)
        self.served.append(Served(one.request, one.due, one.first, one.last, cached_tokens, one.gaps))
        self._arrivals.ended(one.request.request_id, one.last)
