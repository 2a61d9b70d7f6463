"""The overtaken work of each request, in plain lists, and a witness that checks admissions against the bounds.

Shares no code and no data structure with the product.
"""

from math import inf

WINDOW, ALLOWANCE, OLDEST = 600.0, 2048.0, 16


class Place:
    """A request in the line: `took` stays when it has been admitted, as older ones were passed by that."""

    def __init__(self, name, priority, work, own):
        self.name, self.priority, self.work, self.own = name, priority, work, own
        self.waits, self.excused, self.took = True, False, 0.0


class PlainLine:
    """Every request that ever came, in order."""

    def __init__(self, share=1.0, allowance=ALLOWANCE):
        self.share, self.allowance = share, allowance
        self.places = []
        self.owns = {}  # of each class: (time, own) of all arrivals

    def waiting(self, priority=None):
        return [p for p in self.places if p.waits and priority in (None, p.priority)]

    def names(self):
        return {p.name for p in self.waiting()}

    def find(self, name):
        (found,) = (p for p in self.places if p.waits and p.name == name)
        return found

    def arrive(self, name, priority, work, pending, now):
        assert name not in self.names()
        place = Place(name, priority, work, 0.0)
        place.own = work + pending + sum(p.work for p in self.waiting() if p.priority <= priority)
        self.owns.setdefault(priority, []).append((now, place.own))
        place.grace = min(2 * work, self.longest(priority, now) / 5)
        self.places.append(place)

    def admit(self, name, work):
        place = self.find(name)
        place.waits, place.took = False, work

    def leave(self, name):
        self.find(name).waits = False

    def excuse(self, name, excused):
        if name in self.names():
            self.find(name).excused = excused

    def longest(self, priority, now):
        """Of the window, or else of the newest."""
        owns = self.owns[priority]
        return max([own for when, own in owns if when >= now - WINDOW] or [owns[-1][1]])

    def passed(self, priority):
        """Of a class, those that wait, youngest first, and the work of later ones that was admitted."""
        took = 0.0
        for place in reversed(self.places):
            if place.priority == priority:
                if place.waits:
                    yield place, took
                took += place.took

    def overtaken(self, name):
        found = self.find(name)
        return next(took for place, took in self.passed(found.priority) if place is found)

    def rooms(self, priority, now):
        """Of a class, those that wait and are not excused, youngest first, and what may still pass each."""
        longest = self.longest(priority, now)
        for place, took in self.passed(priority):
            if not place.excused:
                bound = min(self.share * place.own, longest + place.grace - place.own)
                yield place, self.allowance + bound - took

    def slack(self, name, now):
        if self.share == inf:
            return inf
        found = self.find(name)
        older = self.places[: self.places.index(found)]
        return min((room for place, room in self.rooms(found.priority, now) if place in older), default=inf)

    def most_urgent(self):
        return min((p.priority for p in self.waiting() if not p.excused), default=None)

    def too_far(self, place, now):
        """What bounds the admission of a request that waited breaks, in words."""
        older = self.places[: self.places.index(place)]
        for other, room in self.rooms(place.priority, now) if self.share < inf else ():
            if other in older and room < -1e-6 * (1 + other.own):
                yield f"{place.name} passes {other.name} by {-room} too much ({vars(other)})"

    def before_more_urgent(self, place):
        """Before whom that admission was not in order, in words."""
        for other in self.waiting():
            if other.priority < place.priority and not other.excused:
                yield f"{place.name} of class {place.priority} goes before {other.name} of class {other.priority}"


class Witness:
    """Keeps a line of its own beside a builder, from what the builder is told, and notes what breaks the bounds.

    Attributes
    ----------
    broken, disorder : list of str
        Bounds, and what else should not be; admissions before somebody more urgent. Late requests may do both.
    passed : int
        Admissions before an older request that waited on.
    bounded : int
        How often somebody waited who might not go before all older ones.
    retracted : int
    """

    def __init__(self, builder, allowance=ALLOWANCE):
        self.builder = builder
        self.line = PlainLine(builder.state.overtaking.share, allowance)
        self.broken, self.disorder, self.passed, self.bounded = [], [], 0, 0
        self.now, self.pending, self.tokens, self.classes = 0.0, 0.0, {}, {}
        self.coming, self.skipped_now, self.newest = [], [], None
        self.round, self.first = 0, {}  # rounds, and the first that saw a request, with its time
        self.retracted = 0
        for name in "arrived retracted aborted finished open_round admitted unavailable close_round".split():
            setattr(builder, name, getattr(self, "_" + name)(getattr(builder, name)))
        self._enter, builder.state.overtaking.arrive = builder.state.overtaking.arrive, self._entered

    def _note(self, holds, what):
        if not holds:
            self.broken.append(what)

    def _arrived(self, original):
        def arrived(name, tokens, *, priority=0, **others):
            self.tokens[name], self.classes[name] = len(tokens), priority
            self.coming.append(name)
            original(name, tokens, priority=priority, **others)

        return arrived

    def _retracted(self, original):
        def retracted(name, tokens):
            self.tokens[name] = len(tokens)
            self.coming.append(name)
            self.retracted += 1
            original(name, tokens)

        return retracted

    def _aborted(self, original):
        def aborted(name):
            original(name)
            self.line.leave(name)
            self._forget(name)

        return aborted

    def _finished(self, original):
        def finished(name, *output):
            original(name, *output)
            self._forget(name)

        return finished

    def _forget(self, name):
        del self.tokens[name]
        self.first.pop(name, None)

    def _open_round(self, original):
        def open_round(readings, *, pending_tokens=0):
            now = readings.now
            self._note(not self.coming, f"{self.coming} have not entered the line")
            self.now, self.round = now, self.round + 1
            for name in self.tokens:
                self.first.setdefault(name, (self.round, now))
            opened = original(readings, pending_tokens=pending_tokens)
            length = self.tokens.get(self.newest, pending_tokens)
            self.pending = self.builder.state.work.of(pending_tokens, length) if pending_tokens else 0.0
            return opened

        return open_round

    def _entered(self, name, priority, work, pending, now):
        """The line is entered in the order of arrival, with no more than the whole prompt.

        Of what was admitted, the last round's is not computed yet.
        """
        size = self.builder.state.work.of
        self._note(self.coming and self.coming.pop(0) == name, f"{name} enters out of turn")
        self._note(priority == self.classes[name], f"{name} enters class {priority}")
        self._note(0 < work <= size(self.tokens[name], self.tokens[name]), f"{name} enters with {work}")
        self._note(abs(pending - self.pending) <= 1e-9 * (1 + pending), f"{pending} pending, not {self.pending}")
        self.line.arrive(name, priority, work, pending, now)
        self._enter(name, priority, work, pending, now)

    def _is_overdue(self, name):
        fairness = self.builder.state.fairness
        seen, time = self.first[name]
        return self.now - time >= fairness.max_wait or self.round - seen >= fairness.max_wait_rounds

    def _unavailable(self, original):
        def unavailable(name):
            self.line.excuse(name, True)
            self.skipped_now.append(name)
            original(name)

        return unavailable

    def _admitted(self, original):
        def admitted(name, cached=None):
            tokens = self.tokens[name]
            work = self.builder.state.work.of(0 if cached is None else tokens - cached, tokens)
            self._note(work >= 0, f"{name} takes {work}")
            original(name, cached)
            place = self.line.find(name)
            self.passed += place is not self.line.waiting(place.priority)[0]
            self.line.admit(name, work)
            self.pending += work
            if not self._is_overdue(name):
                self.broken += self.line.too_far(place, self.now)
                self.disorder += self.line.before_more_urgent(place)
            self.newest = name

        return admitted

    def _close_round(self, original):
        def close_round():
            original()
            for name in self.skipped_now:
                self.line.excuse(name, False)
            self.skipped_now.clear()

        return close_round

    def check(self):
        """Nothing was broken, and the builder's line is ours."""
        assert not self.broken, self.broken[:3]
        overtaking, now = self.builder.state.overtaking, self.now
        assert overtaking.most_urgent() == self.line.most_urgent()
        waiting = self.line.waiting()
        for name, work in [(place.name, place.work) for place in waiting[:3] + waiting[-3:]]:
            ours, theirs = self.line.overtaken(name), overtaking.overtaken(name)
            assert abs(ours - theirs) <= 1e-6 * (1 + ours), name
            ours, theirs = self.line.slack(name, now), overtaking.slack(name, now)
            assert ours == theirs or abs(ours - theirs) <= 1e-6 * (1 + abs(ours)), name
            self.bounded += ours < work
