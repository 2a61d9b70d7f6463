"""What trials have shown of a mode: by what share of the requests it was ahead, and how sure that is."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

_MEMORY = 32  # trials that count
_UNKNOWN = 0.1  # what a mode is hoped for that was never tried: one that leads by more is tried again first
_CHANGED = 3.0  # standard errors from what is known, at which a trial says that traffic has changed


@dataclass
class Count:
    """Requests that were judged, and those of them within the bounds."""

    judged: int = 0
    within: int = 0

    def add(self, judged: int, within: int) -> None:
        """Count some more."""
        self.judged += judged
        self.within += within

    @property
    def share(self) -> float:
        """Of those judged, within the bounds."""
        return self.within / self.judged if self.judged else 0.0


class _Difference(NamedTuple):
    ahead: float
    variance: float  # by chance


class Evidence:
    """Of one mode, beside the usual one."""

    def __init__(self) -> None:
        self._found: deque[_Difference] = deque(maxlen=_MEMORY)

    def __len__(self) -> int:
        return len(self._found)

    def add(self, usual: Count, other: Count, bursts: float = 1.0) -> None:
        """Take in a trial; it may refute all before it.

        Parameters
        ----------
        usual, other : what was counted under either mode.
        bursts : times the variance of requests that are independent of each other.
        """
        both = (usual.within + other.within + 1) / (usual.judged + other.judged + 2)
        variance = bursts * both * (1 - both) * (1 / usual.judged + 1 / other.judged)
        ahead = other.share - usual.share
        if self._found and abs(ahead - self.ahead) > _CHANGED * math.sqrt(variance * (1 + 1 / len(self._found))):
            self._found.clear()
        self._found.append(_Difference(ahead, variance))

    @property
    def ahead(self) -> float:
        """Mean share by which the mode was ahead, below 0 if behind; of at least one trial."""
        return fmean(one.ahead for one in self._found)

    @property
    def latest(self) -> float:
        """By what share it was ahead in the last trial."""
        return self._found[-1].ahead

    @property
    def error(self) -> float:
        """Standard error of that: by the spread of the trials, or by chance alone if that is more."""
        count = len(self._found)
        if count < 2:
            return math.inf
        chance = math.sqrt(fmean(one.variance for one in self._found) / count)
        return max(chance, stdev(one.ahead for one in self._found) / math.sqrt(count))

    def hope(self, trials: int) -> float:
        """How far ahead it may be, after so many trials of any mode: the upper confidence bound of UCB1."""
        if not self._found:
            return _UNKNOWN
        variance = fmean(one.variance for one in self._found) / len(self._found)
        return self.ahead + math.sqrt(2 * math.log(trials) * variance)
