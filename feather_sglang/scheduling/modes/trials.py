"""Trials of other modes on a running server: which one keeps the promise best on the traffic that it has.

A trial is a switchback: the usual mode, another one twice as long, the usual one (ABBA), so that a load that changes
evenly counts for neither. What ends while requests of the mode before are under way is not compared. A mode that leads
by a margin and by several standard errors becomes the usual one. That of the policy file, which nothing is lost to, is
then tried again and again, and comes back once it leads by fewer.

Trials may cost a share of the requests within the bounds. One begins when some of that is saved up; it ends at once
when it has lost what there is, or is clearly behind. Nothing is drawn at random: ranks that are told the same do the
same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from feather_sglang.scheduling.modes.evidence import Count, Evidence
from feather_sglang.scheduling.modes.mode import Mode

# Of the usual mode before a trial and after it, at least; twice as much in between. Requests that run together are late
# together, in a step or a queue of seconds, so that of many in a short time few say something of their own.
WINDOW, SECONDS = 32, 20.0
STAKE = 8.0  # requests saved up, at least, when a trial begins: a hopeless one has lost about so many when it is over
STAKED = 0.125  # of a window, at least
MARGIN = 0.02  # of all requests, by which a mode must lead
AHEAD, BACK, BEHIND = 3.0, 2.0, 3.0  # standard errors: to be taken, to be given up, to end a trial at once
TAKEN_AFTER, BACK_AFTER = 3, 2  # trials, at least
_LEVEL, _BURSTS = 4, 8  # windows that the usual share follows, and its variance
_LEAST = 8  # requests of which a share says anything
_PATIENCE = 4.0  # times the time that a trial should take, after which it is over
_OLDEST = 4  # trials, one of which is of the mode that was tried longest ago
_REST, _LONGEST_REST = 2, 32  # windows between trials of the file's mode: doubled as long as it is behind


@dataclass
class _Trial:
    """A trial under way.

    Attributes
    ----------
    mode : that is tried; None: as the policy file has it.
    begun, until : seconds, on the clock of ``choose``: those compared count from then on; it is over in any case.
    over : the usual mode is back.
    touched : requests that ended from its beginning on, until all had ended that were there when it was over.
    other, after : those compared, under the mode and after it.
    """

    mode: Mode | None
    begun: float
    until: float
    over: bool = False
    touched: Count = field(default_factory=Count)
    other: Count = field(default_factory=Count)
    after: Count = field(default_factory=Count)


class Trials:
    """The trials of one scheduler.

    Parameters
    ----------
    rivals
        Modes to try.
    budget
        Share of the requests within the bounds that may be lost.
    tell
        Hears a line whenever another mode becomes the usual one.

    Attributes
    ----------
    usual
        The mode that is best as far as is known; None: as the policy file has it.
    count
        Trials so far.
    lost
        Requests that they have cost, as far as can be told; below 0 it does not go.
    """

    def __init__(self, rivals: Sequence[Mode], budget: float, tell: Callable[[str], None] = lambda line: None) -> None:
        self.rivals, self.budget, self.tell = tuple(rivals), budget, tell
        self.count = 0
        self.lost = 0.0
        self._seen = Count()
        self._tried: dict[Mode | None, int] = dict.fromkeys((None, *rivals), 0)  # the number of its last trial
        self._trial: _Trial | None = None
        self._skip = 0  # requests to come that met another mode before
        self._level: float | None = None  # share within the bounds under the usual mode; None: not known yet
        self._bursts = 1.0  # variance of that from window to window, over that of independent requests
        self._rest = self._patience = _REST  # windows until the next trial of the file's mode, and between two
        self._use(None)
        self._open_window(0, 0.0)

    def stats(self) -> dict[str, object]:
        """Counters for reports."""
        usual = "as in the policy file" if self.usual is None else str(self.usual)
        return {"usual": usual, "count": self.count, "lost": round(self.lost, 1), **vars(self._seen)}

    def choose(self, judged: int, within: int, alive: int, now: float) -> Mode | None:
        """Return the mode of a round; None: as the policy file has it.

        Parameters
        ----------
        judged, within
            Requests so far of which it is known whether they were within the bounds, and those that were.
        alive
            Requests that wait or run.
        now
            Seconds.
        """
        new = Count(judged - self._seen.judged, within - self._seen.within)
        self._seen = Count(judged, within)
        skipped, self._skip = self._skip > 0, max(0, self._skip - new.judged)
        if self._trial is None:
            self._watch(new, skipped, alive, now)
        elif self._trial.over:
            self._compare(self._trial, new, skipped, alive, now)
        else:
            self._try(self._trial, new, skipped, alive, now)
        return self.usual if self._trial is None or self._trial.over else self._trial.mode

    # The parts of a trial -----------------------------------------------------------------------------------------

    def _open_window(self, alive: int, now: float) -> None:
        self._trial, self._before, self._opened = None, Count(), now
        # No shorter than half of what is under way: else most that ends in a trial would have met its beginning.
        self._size = max(WINDOW, alive // 2)

    def _watch(self, new: Count, skipped: bool, alive: int, now: float) -> None:
        """The usual mode, until its window is full: then a trial, or another window."""
        if not skipped:
            self._before.add(new.judged, new.within)
        if self._before.judged < self._size or now - self._opened < SECONDS:
            return
        level = self._follow(self._before)
        self._rest -= 1
        modes = self._next() if level <= 1 - MARGIN else []
        if not modes:
            self._open_window(alive, now)
            return
        self.count += 1
        self._tried[modes[0]] = self.count
        pace = (now - self._opened) / self._before.judged
        self._trial = _Trial(modes[0], now, now + _PATIENCE * (2 * SECONDS + pace * (alive + 2 * self._size)))
        self._skip = alive

    def _follow(self, window: Count) -> float:
        """Take in a window of the usual mode; its share of late."""
        share, expected = window.share, self._level
        if expected is None:
            self._level = share
        else:
            self._level = expected + (share - expected) / _LEVEL
            chance = expected * (1 - expected) / window.judged + 1 / window.judged**2
            self._bursts += ((share - expected) ** 2 / chance - self._bursts) / _BURSTS
        return self._level

    def _try(self, trial: _Trial, new: Count, skipped: bool, alive: int, now: float) -> None:
        """The other mode."""
        trial.touched.add(new.judged, new.within)
        if skipped:
            trial.begun = now
        else:
            trial.other.add(new.judged, new.within)
        full = trial.other.judged >= 2 * self._size and now - trial.begun >= 2 * SECONDS
        if full or now > trial.until or self._is_behind(trial):
            if trial.other.judged < _LEAST:
                trial.other = Count(trial.touched.judged, trial.touched.within)
            trial.over, trial.begun, self._skip = True, now, alive

    def _compare(self, trial: _Trial, new: Count, skipped: bool, alive: int, now: float) -> None:
        """The usual mode again, until its window is full."""
        (trial.touched if skipped else trial.after).add(new.judged, new.within)
        if skipped:
            trial.begun = now
        if trial.after.judged < self._size or now - trial.begun < SECONDS:
            return
        usual = Count(self._before.judged + trial.after.judged, self._before.within + trial.after.within)
        if trial.mode is not None:
            self.lost = max(0.0, self.lost + usual.share * trial.touched.judged - trial.touched.within)
        self._open_window(alive, now)
        if trial.other.judged < _LEAST:
            return
        evidence = self._evidence[trial.mode]
        evidence.add(usual, trial.other, max(1.0, self._bursts))
        if self._is_better(trial.mode, evidence):
            name = "the mode of the policy file" if trial.mode is None else str(trial.mode)
            self.tell(f"{name} from now on: {evidence.ahead:+.1%} of the requests in {len(evidence)} trials")
            self._use(trial.mode)
            self._skip = alive

    # Decisions ----------------------------------------------------------------------------------------------------

    def _allowance(self) -> float:
        """Requests that trials may lose now."""
        return self.budget * self._seen.within - self.lost

    def _next(self) -> list[Mode | None]:
        """The mode to try, or none."""
        if self.usual is not None and self._rest <= 0:
            self._rest = self._patience
            return [None]
        rivals = [mode for mode in self.rivals if mode != self.usual]
        if not rivals or self._allowance() < max(STAKE, STAKED * self._before.judged):
            return []
        if self.count % _OLDEST == 0:  # chance, or other traffic, may have told against it
            return [min(rivals, key=self._tried.__getitem__)]
        return [max(rivals, key=lambda mode: self._evidence[mode].hope(self.count))]

    def _is_behind(self, trial: _Trial) -> bool:
        """Whether a trial has lost what it may, or more than chance explains."""
        judged, level = trial.touched.judged, self._level or 0.0
        most = BEHIND * math.sqrt(max(1.0, self._bursts) * judged * level * (1 - level) + 1)
        if trial.mode is not None:
            most = min(most, self._allowance())
        return level * judged - trial.touched.within > most

    def _is_better(self, mode: Mode | None, evidence: Evidence) -> bool:
        """Whether a mode is to be the usual one, after a trial of it."""
        ahead, error = evidence.ahead, evidence.error
        if mode is not None:
            return len(evidence) >= TAKEN_AFTER and ahead >= max(MARGIN, AHEAD * error)
        self._patience = _REST if evidence.latest > 0 else min(2 * self._patience, _LONGEST_REST)
        return len(evidence) >= BACK_AFTER and ahead >= BACK * error

    def _use(self, mode: Mode | None) -> None:
        """Make a mode the usual one, and forget what was found beside another."""
        self.usual, self._level = mode, None
        self._rest = self._patience = _REST
        self._evidence = {other: Evidence() for other in (None, *self.rivals)}
