"""Which requests were within the operator's bounds, counted while serving: a few steps a request, one a decode step.

All who run get a token from each decode step, so the gaps that were too long are counted once for all of them, and a
request asks how many there were in its time.
"""

from __future__ import annotations

from collections.abc import Hashable

from feather_sglang.scheduling.modes.promise import Promise


class Outcomes:
    """The requests of one scheduler; its clock counts seconds.

    Attributes
    ----------
    judged, within
        Requests of which it is known whether they were within the bounds, and those that were. Who was aborted is none.
    """

    def __init__(self, promise: Promise) -> None:
        self.promise = promise
        self.judged = self.within = 0
        self._came: dict[Hashable, float] = {}  # of requests that wait
        self._due: dict[Hashable, float] = {}  # when the first token is to be there, of admitted requests without one
        self._before: dict[Hashable, int] = {}  # gaps too long before a request had its first token
        self._joined: dict[Hashable, float] = {}  # of those, since the last decode step: when
        self._gaps = 0  # too long so far
        self._decoded: float | None = None  # when the last decode step ended

    def arrived(self, request_id: Hashable, now: float) -> None:
        """Note a new request."""
        self._came[request_id] = now

    def admitted(self, request_id: Hashable, work: float) -> None:
        """Note that a request of so much work joins the batch, or joins it again."""
        if request_id in self._before:
            self._before[request_id] -= 1  # it stood still since it was thrown out
        elif (came := self._came.pop(request_id, None)) is not None:
            self._due[request_id] = came + self.promise.first_token(work)

    def computed(self, request_id: Hashable, now: float) -> None:
        """A prefill step has given a request a token: its first one, unless it was thrown out in between."""
        due = self._due.pop(request_id, None)
        if due is None:
            return
        if now > due:
            self.judged += 1
        else:
            self._before[request_id] = self._gaps
            self._joined[request_id] = now

    def decoded(self, now: float) -> None:
        """A decode step has given all who run a token."""
        bound = self.promise.gap()
        if bound is not None and (self._decoded is None or now - self._decoded > bound):
            self._gaps += 1
            for request_id, since in self._joined.items():
                if now - since <= bound:
                    self._before[request_id] += 1
        self._joined.clear()
        self._decoded = now

    def ended(self, request_id: Hashable, tokens: int) -> None:
        """A request has all its tokens."""
        self._joined.pop(request_id, None)
        before = self._before.pop(request_id, None)
        if before is not None:
            self.judged += 1
            self.within += self._gaps - before <= (tokens - 1) // 100  # of a hundred gaps one may be longer

    def forget(self, request_id: Hashable) -> None:
        """A request has left; if it is not judged by now it will not be."""
        self._came.pop(request_id, None)
        self._due.pop(request_id, None)
        self._joined.pop(request_id, None)
        self._before.pop(request_id, None)
