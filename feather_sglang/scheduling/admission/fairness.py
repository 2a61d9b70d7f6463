"""The ceiling on waits: when a request is overdue, and when it is next although others suit the batch better.

A request is *overdue* after so many seconds, or so many admission rounds. If the oldest overdue one were always next,
an overloaded server, on which every request waits for longer than that, would serve in the order of arrival. So it is
next once it has been *overtaken*, that is, once as many requests have been admitted before it beyond its turn as were
ahead of it when it came. Counted in admissions, the oldest request thus waits at most twice as long as under first
come, first served.

Ours, not the paper's.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from feather_sglang.scheduling.admission.priorities import PrioritySums

MAX_WAIT = 120.0  # seconds, where nobody says otherwise
MAX_WAIT_ROUNDS = 20_000


class Arrival(NamedTuple):
    """The first admission round that saw a request; ranks agree on it."""

    time: float  # the round's clock, seconds
    round: int
    priority: int
    admissions: int  # of all requests, before it
    ahead: int  # requests that waited already, as urgent as it or more


class Fairness:
    """Arrivals of the waiting requests, and the ceiling on their waits.

    Parameters
    ----------
    max_wait
        Seconds after which a request is overdue. They count from the first admission round that saw it: until then the
        batch was full for everybody.
    max_wait_rounds
        The same in admission rounds.

    Attributes
    ----------
    arrivals
        Of all requests that a round has seen and that have not left, waiting or running.
    round
        Admission rounds so far.
    now
        When the last one was opened, seconds.
    """

    def __init__(self, max_wait: float, max_wait_rounds: int) -> None:
        self.max_wait = max_wait
        self.max_wait_rounds = max_wait_rounds
        self.arrivals: dict[Hashable, Arrival] = {}
        self.round = 0
        self.now = 0.0
        self._admissions = 0
        self._waiting, self._present = PrioritySums(), PrioritySums()  # requests in ``arrivals``: some, all

    def open_round(self, now: float) -> None:
        """Go on to the next admission round, at so many seconds."""
        self.round += 1
        self.now = now

    def arrive(self, request_id: Hashable, priority: int) -> None:
        """Note a waiting request that this round is the first to see; a smaller priority is more urgent."""
        ahead = int(self._waiting.up_to(priority))
        self.arrivals[request_id] = Arrival(self.now, self.round, priority, self._admissions, ahead)
        self._waiting.add(priority, 1)
        self._present.add(priority, 1)

    def admit(self, request_id: Hashable) -> None:
        """Note that a waiting request joined the batch."""
        self._admissions += 1
        self._waiting.add(self.arrivals[request_id].priority, -1)

    def wait_again(self, request_id: Hashable) -> None:
        """Note that an admitted request is back among the waiting, at its original age."""
        self._waiting.add(self.arrivals[request_id].priority, 1)

    def forget(self, request_id: Hashable, *, waiting: bool) -> None:
        """Drop a request that left while it was waiting, or running."""
        priority = self.arrivals.pop(request_id).priority
        self._present.add(priority, -1)
        if waiting:
            self._waiting.add(priority, -1)

    def priority(self, request_id: Hashable) -> int:
        """Return a request's class; a smaller one is more urgent."""
        return self.arrivals[request_id].priority

    def is_urgent(self, request_id: Hashable) -> bool:
        """Whether anybody waits or runs who is less urgent."""
        last = self._present.last
        return last is not None and last > self.arrivals[request_id].priority

    def waited(self, request_id: Hashable) -> float:
        """Return the seconds since a request came."""
        return self.now - self.arrivals[request_id].time

    def is_overdue(self, request_id: Hashable) -> bool:
        """Whether a request came as long ago as the bound."""
        arrival = self.arrivals[request_id]
        return self.now - arrival.time >= self.max_wait or self.round - arrival.round >= self.max_wait_rounds

    def is_overtaken(self, request_id: Hashable) -> bool:
        """Whether twice as many have been admitted since a request came as waited then."""
        arrival = self.arrivals[request_id]
        return self._admissions - arrival.admissions >= 2 * arrival.ahead
