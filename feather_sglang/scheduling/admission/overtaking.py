"""The bound on the tail: how much work may be admitted before an older request.

In order of arrival a request waits for the work (`work.py`) that is queued when it comes. Here later ones may go before
it, as long as what they take stays within two bounds, for every request that they pass:

    overtaken  <=  SHARE x own                          own = the queue that it found, and itself
    own + overtaken  <=  longest + grace                longest = the largest `own` of the last ten minutes

The first one holds for this very request: what passes it is at most twice what arrival order would have put before it.
The second one protects the tail: whoever comes at the peak of a burst is hardly passed by anybody. The *grace* is twice
the request's own work, and at most a fifth of `longest`: as long prompts are few and hold much of the work, letting
them go a little later lets all others go sooner, at a high percentile too.

The proof is in docs/design/admission.md. Ours, not the paper's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from math import inf

from feather_sglang.scheduling.admission.priorities import PrioritySums

SHARE_OF_OWN = 2.0  # where nobody says otherwise (docs/lab/tail.md)
WINDOW = 600.0  # seconds in which the longest queue is looked for
ALLOWANCE = 2048.0  # tokens that nobody needs to count: a quarter of a prefill step
_GRACE_FACTOR, _LARGEST_GRACE = 2.0, 0.2  # times the own work, and at most this share of the longest queue
_OLDEST_REQUESTS = 16  # where a bound is reached, the shortest of so many is next (32 gain nothing more)
_LEAST_PLACES = 64
IDLE_CLASSES = 64  # in which nobody waits, and whose longest queue is kept all the same


class Overtaking:
    """The waiting requests in order of arrival, each priority class by itself.

    Parameters
    ----------
    share
        Of the first bound; ``inf``: no bound at all, 0: order of arrival, but for `ALLOWANCE`.
    """

    def __init__(self, share: float = SHARE_OF_OWN) -> None:
        self.share = share
        self._lines: dict[int, _Line] = {}  # of the classes in which somebody waits
        self._idle: OrderedDict[int, _Line] = OrderedDict()  # of others, the latest last
        self._queued = PrioritySums()
        self._open = PrioritySums()  # the classes in which somebody waits whom the engine could take
        self._priority: dict[Hashable, int] = {}  # of those that wait

    def arrive(self, request_id: Hashable, priority: int, work: float, pending: float, now: float) -> None:
        """Enter a request at the end of its line.

        Parameters
        ----------
        priority
            Smaller is more urgent.
        work, pending
            Its own, and of what was admitted but is not computed yet.
        now
            Seconds.
        """
        queued = self._queued.up_to(priority)
        if (line := self._lines.get(priority)) is None:
            line = self._idle.pop(priority) if priority in self._idle else _Line(self.share)
            self._lines[priority] = line
        line.arrive(request_id, work, pending + queued, now)
        self._priority[request_id] = priority
        self._changed(priority)

    def admit(self, request_id: Hashable, work: float) -> None:
        """Note that a request was admitted and takes so much: every older one that still waits has been passed."""
        self._lines[priority := self._priority.pop(request_id)].admit(request_id, work)
        self._changed(priority)

    def leave(self, request_id: Hashable) -> None:
        """Forget a waiting request."""
        self._lines[priority := self._priority.pop(request_id)].leave(request_id)
        self._changed(priority)

    def excuse(self, request_id: Hashable, excused: bool) -> None:
        """Let all pass a request that the engine cannot take now, without a bound; or not any more."""
        if request_id in self._priority:
            self._lines[priority := self._priority[request_id]].excuse(request_id, excused)
            self._changed(priority)

    def _changed(self, priority: int) -> None:
        """Keep the sums, and of the classes in which nobody waits the latest: clients may send a new one each time."""
        line = self._lines[priority]
        self._queued.set(priority, line.queued if line.waiting else None)
        if line.open != (len(line.waiting) > line.excused):
            line.open = not line.open
            self._open.set(priority, 1 if line.open else None)
        if not line.waiting:
            self._idle[priority] = self._lines.pop(priority)
            if len(self._idle) > IDLE_CLASSES:
                self._idle.popitem(last=False)

    def slack(self, request_id: Hashable, now: float) -> float:
        """Return the most work with which a request may pass all older ones of its class; ``inf`` for the oldest."""
        return self._lines[self._priority[request_id]].slack(request_id, now)

    def overtaken(self, request_id: Hashable) -> float:
        """Return the work of later ones that were admitted before a waiting request."""
        return self._lines[self._priority[request_id]].overtaken(request_id)

    def of_oldest(self) -> tuple[float, float]:
        """Return the work that was admitted before the oldest waiting request of the most urgent class; its bound."""
        priority = self.most_urgent()
        oldest = None if priority is None else self.oldest(priority)
        if oldest is None:
            return 0.0, inf
        line = self._lines[self._priority[oldest]]
        return line.overtaken(oldest), ALLOWANCE + self.share * line.waiting[oldest].own

    def shortest(self, priority: int, work_of: Callable[[Hashable], float | None], now: float) -> Hashable | None:
        """Return the request with the least work among the oldest of a class, of those that the bounds let pass.

        Parameters
        ----------
        work_of
            Of a request now; None: it cannot be admitted.
        """
        best, least = None, inf
        if (line := self._lines.get(priority)) is None:
            return None
        for request_id in line.oldest():
            work = work_of(request_id)
            if work is not None and work < least and work <= line.slack(request_id, now):
                best, least = request_id, work
        return best

    def oldest(self, priority: int) -> Hashable | None:
        """Return the oldest of a class whom the engine could take."""
        line = self._lines.get(priority)
        if line is None:
            return None
        return next((request_id for request_id, entry in line.waiting.items() if not entry.excused), None)

    def most_urgent(self) -> int | None:
        """Return the priority of the most urgent class in which somebody waits whom the engine could take."""
        return self._open.first


class _Waiting:
    """A waiting request; `own` is the queue that it found, pending work and its own work included."""

    __slots__ = ("excused", "grace", "own", "place", "work")

    def __init__(self, place: int, work: float, own: float, grace: float) -> None:
        self.place, self.work, self.own, self.grace = place, work, own, grace
        self.excused = False


class _Line:
    """The waiting requests of one priority class.

    A request's place grows with its arrival. What an admitted request took stands at its place, so a waiting one has
    been passed by the sum of all places behind its own. Two trees over the places keep, for each inner node, that sum
    and the largest of ``value + sum behind it`` among the waiting ones below it: O(log waiting) a change or a question.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.queued = 0.0
        self.open = False  # whether somebody waits who is not excused, as `Overtaking` was told last
        self.waiting: OrderedDict[Hashable, _Waiting] = OrderedDict()
        self.excused = 0  # of those that wait
        self._longest: deque[tuple[float, float]] = deque()  # (time, own), falling: the largest of a window
        self._places = self._joined = 0  # taken by arrivals; of those, known to the nodes above
        self._found: tuple[int, float, float] | None = None  # place, time and slack, until the trees change
        self._build([], 0.0)

    def arrive(self, request_id: Hashable, work: float, before: float, now: float) -> None:
        own = before + work
        while self._longest and self._longest[-1][1] <= own:
            self._longest.pop()
        self._longest.append((now, own))
        if self._places == self._size:
            self._compact()
        grace = min(_GRACE_FACTOR * work, _LARGEST_GRACE * self.longest(now))
        entry = self.waiting[request_id] = _Waiting(self._places, work, own, grace)
        self._places += 1
        self.queued += work
        self._set_leaf(entry)

    def admit(self, request_id: Hashable, work: float) -> None:
        self._taken[self._size + self.waiting[request_id].place] += work
        self.leave(request_id)

    def leave(self, request_id: Hashable) -> None:
        entry = self.waiting.pop(request_id)
        self.queued = self.queued - entry.work if self.waiting else 0.0
        self.excused -= entry.excused
        entry.excused = True
        self._set(entry)

    def excuse(self, request_id: Hashable, excused: bool) -> None:
        entry = self.waiting[request_id]
        self.excused += excused - entry.excused
        entry.excused = excused
        self._set(entry)

    def longest(self, now: float) -> float:
        """The largest `own` of the window."""
        while len(self._longest) > 1 and self._longest[0][0] < now - WINDOW:
            self._longest.popleft()
        return self._longest[0][1] if self._longest else 0.0

    def slack(self, request_id: Hashable, now: float) -> float:
        if self.share == inf or request_id == next(iter(self.waiting)):
            return inf
        place = self.waiting[request_id].place
        if self._found is None or self._found[:2] != (place, now):  # who is proposed is asked about twice
            tail, own = self._before(place)
            self._found = place, now, ALLOWANCE + min(self.longest(now) - tail, -own)
        return self._found[2]

    def overtaken(self, request_id: Hashable) -> float:
        if self._joined < self._places:
            self._join_arrivals()
        node = self._size + self.waiting[request_id].place
        total = 0.0
        while node > 1:
            if not node & 1:
                total += self._taken[node + 1]
            node >>= 1
        return total

    def oldest(self) -> Iterator[Hashable]:
        for request_id, _ in zip(self.waiting, range(_OLDEST_REQUESTS), strict=False):
            yield request_id

    # The trees ------------------------------------------------------------------------------------------------

    def _before(self, place: int) -> tuple[float, float]:
        """Of those before a place: the largest of ``own + overtaken - grace`` and of ``overtaken - share x own``."""
        if self._joined < self._places:
            self._join_arrivals()
        taken, tails, owns = self._taken, self._tails, self._owns
        node = self._size + place
        tail = own = -inf
        while node > 1:
            if node & 1:
                behind = taken[node]
                tail, own = max(tail, tails[node - 1] + behind), max(own, owns[node - 1] + behind)
            else:
                behind = taken[node + 1]
                tail, own = tail + behind, own + behind
            node >>= 1
        return tail, own

    def _set(self, entry: _Waiting) -> None:
        self._set_leaf(entry)
        leaf = self._size + entry.place
        self._join(map(leaf.__rshift__, range(1, leaf.bit_length())))

    def _set_leaf(self, entry: _Waiting) -> None:
        leaf = self._size + entry.place
        self._tails[leaf] = -inf if entry.excused else entry.own - entry.grace
        self._owns[leaf] = -inf if entry.excused else -self.share * entry.own
        self._found = None

    def _join_arrivals(self) -> None:
        """Bring the nodes above new leaves up to date: nobody asks between the arrivals of a burst."""
        first, last = self._size + self._joined, self._size + self._places - 1
        nodes: list[int] = []
        self._joined = self._places
        while first > 1:
            first, last = first >> 1, last >> 1
            nodes.extend(range(first, last + 1))
        self._join(nodes)

    def _join(self, nodes: Iterable[int]) -> None:
        """Bring nodes up to date, each after those below it."""
        taken, tails, owns = self._taken, self._tails, self._owns
        for node in nodes:
            left, right = 2 * node, 2 * node + 1
            behind = taken[right]
            taken[node] = taken[left] + behind
            tail, own = tails[left] + behind, owns[left] + behind
            tails[node] = tail if tail >= tails[right] else tails[right]
            owns[node] = own if own >= owns[right] else owns[right]

    def _compact(self) -> None:
        """Close the gaps: what was taken between two waiting ones stands at the later one's place."""
        entries = sorted(self.waiting.values(), key=lambda entry: entry.place)
        taken, done = [], 0
        for entry in entries:
            taken.append(sum(self._taken[self._size + done : self._size + entry.place + 1]))
            done = entry.place + 1
        rest = sum(self._taken[self._size + done : self._size + self._places])
        for place, entry in enumerate(entries):
            entry.place = place
        self._places = self._joined = len(entries) + 1
        self._build(taken, rest)
        for entry in entries:
            self._set_leaf(entry)
        self._join(range(self._size - 1, 0, -1))

    def _build(self, taken: list[float], rest: float) -> None:
        size = _LEAST_PLACES
        while size < 2 * (len(taken) + 1):
            size *= 2
        self._size = size
        self._taken, self._tails, self._owns = [0.0] * (2 * size), [-inf] * (2 * size), [-inf] * (2 * size)
        self._taken[size : size + len(taken)] = taken
        self._taken[size + len(taken)] = rest
