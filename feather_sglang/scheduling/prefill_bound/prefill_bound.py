"""The limit on what the next prefill step computes while requests decode.

Between two decode steps there are prefill steps, mostly one, and between two tokens of a request then

    gap  =  own + price x work

seconds. ``own`` is what the decode step takes, and a prefill step however little it computes; ``work`` is what it
computes. Prefill computes as much as the bound allows, or as much as it must so that all that waits is computed within
the operator's patience, whichever is more:

    work  =  max((bound - own) / price,  waiting x gap / patience)

So a bound that the load does not allow gives way, as far as it must, and no queue grows because of it. Where requests
wait for memory the server is overloaded: then, too, the gap is at most ``LONGEST`` times its own part, so that what
prefill is interrupted for takes a twentieth of the time. However tight the bound, a gap is twice its own part: shorter
steps would cost more than they compute.

A step that computes less than half of its gap's work, as no more was there or a chunk was full, is followed by another
one, which computes the rest; of each of these ``own`` has only what a prefill step takes however little it computes.

Ours. Sarathi-Serve (Agrawal et al., 2024) has a fixed token budget of mixed steps, profiled ahead, for the same end.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from feather_sglang.scheduling.meters.moving_mean import follow
from feather_sglang.scheduling.meters.prefill import Gap
from feather_sglang.scheduling.meters.readings import Readings
from feather_sglang.scheduling.prefill_bound.promise import Promise

LONGEST = 20  # times its own part, a gap where the bound has given way
FIRST_TOKENS = 1024  # of a step before any was timed
UNKNOWN_OWN = 0.25  # of the bound, before a gap was timed
TOLD_EVERY = 10.0  # seconds between two lines of the log, at the least
_LEFT = 0.5  # of a gap's work, at the least, for another prefill step in it: each costs time of its own
_WINDOW = 8  # gaps that the mean follows: a batch grows by an admission, not slowly


class OwnTime:
    """The own part of a gap: the time between two decode steps that does not depend on the prefill in it.

    Attributes
    ----------
    seconds : a moving mean; None: no gap was timed yet.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None

    def note(self, gap: Gap, bare_seconds: float | None, pair_seconds: float, fixed_seconds: float) -> None:
        """A gap was timed; the prices are those of ``PrefillMeter``."""
        if bare_seconds is not None:
            own = gap.seconds - bare_seconds * gap.tokens - pair_seconds * gap.pairs - (gap.steps - 1) * fixed_seconds
            self.seconds = follow(self.seconds, max(0.0, own), _WINDOW)


class PrefillBound:
    """The bound on prefill of one server.

    Parameters
    ----------
    tell
        Hears a line when the bound gives way, and when it holds again.

    Attributes
    ----------
    asked : seconds between two tokens that are aimed at; None: not known yet.
    in_force : the same, or the longest gap that was launched of late if that is longer; None: nothing is asked yet.
    steps : prefill steps of the present gap that were launched.
    """

    def __init__(self, promise: Promise, tell: Callable[[str], None] = lambda line: None) -> None:
        self.promise = promise
        self.tell = tell
        self.asked: float | None = None
        self.in_force: float | None = None
        self.steps = 0
        self._work = 0.0  # of these steps
        self._own = self._fixed = 0.0  # seconds of a gap beyond its work, and of each prefill step after the first
        self._price: float | None = None  # seconds of a token of work
        self._holds = True
        self._longest = 0.0  # gap since the log was told, seconds
        self._told: float | None = None  # when it was

    def look(self, readings: Readings) -> bool:
        """Take in what was measured; whether there is a bound by now."""
        self.asked = self.promise.between_tokens(readings.least_decode_seconds)
        if self.asked is None:
            return False
        own, fixed = readings.own_seconds, readings.fixed_seconds
        self._own = UNKNOWN_OWN * self.asked if own is None else own
        self._fixed = self._own if fixed is None else min(fixed, self._own)
        self._price = readings.bare_seconds
        return True

    def work(self, waiting: float, requests: int) -> float:
        """Work of the next prefill step, in tokens without context before them; 0: a decode step is due.

        Parameters
        ----------
        waiting : work of all that waits; infinite where it does not fit into memory.
        requests : that wait.
        """
        assert self.asked is not None
        if self._price is None:
            return 0 if self.steps else FIRST_TOKENS
        idle = self._own + self._price * waiting / requests if requests else None
        work = plan(self.asked, waiting, self.promise.patience(idle), self._own, self._price)
        left = work - self._work - self.steps * self._fixed / self._price
        return left if left >= _LEFT * work else 0.0

    def launched(self, work: float) -> None:
        """A prefill step of so much work was launched while requests decode."""
        self._work += work
        gap = self._own + self.steps * self._fixed + (self._price or 0.0) * self._work
        self.steps += 1
        self._longest = max(self._longest, gap)

    def begin_gap(self) -> None:
        """Nothing of the next gap is launched: a decode step was, or none can be."""
        self.steps, self._work = 0, 0.0

    def tell_in_force(self, now: float) -> None:
        """Tell when the bound has given way, and when it holds again: of a period, as gaps change from step to step."""
        if self.asked is None:
            return
        if self._told is None:
            self._told = now
        self.in_force = max(self.asked, self._longest, self.in_force or 0.0)
        if 0 <= now - self._told < TOLD_EVERY:
            return
        self.in_force, holds = max(self.asked, self._longest), self._longest <= 1.01 * self.asked
        if holds != self._holds:
            asked, found = f"{1e3 * self.asked:.0f} ms", f"{1e3 * self.in_force:.0f} ms"
            self.tell(
                f"the bound of {asked} between tokens holds again"
                if holds
                else f"the load does not allow the bound of {asked} between tokens: it was {found} of late"
            )
        self._holds, self._longest, self._told = holds, 0.0, now


def plan(bound: float, waiting: float, patience: float, own: float, price: float) -> float:
    """Work of a gap, in tokens without context before them.

    Parameters
    ----------
    bound, patience : seconds, of ``Promise``.
    waiting : work of all that waits, in tokens without context before them; infinite: more than fits into memory.
    own, price : seconds of a gap beyond its work, and of a token of work.
    """
    longest = (LONGEST - 1) * own / price
    allowed = max(bound - own, own) / price
    spare = patience - waiting * price  # seconds that are left for the gaps' own parts
    needed = waiting * own / spare if spare > 0 else math.inf
    return max(allowed, min(needed, longest))


def tokens_for(work: float, context: int, pair_tokens: float) -> float:
    """Tokens of a prompt, after ``context`` earlier ones, that are so much work; inverts ``Work.of_prompt``.

    Parameters
    ----------
    pair_tokens : work of attention from one token to one before it.
    """
    first = 1 + pair_tokens * context
    return 2 * work / (first + math.sqrt(first * first + 2 * pair_tokens * work))
