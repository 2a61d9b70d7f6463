"""What a policy chooses for an admission round."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Ranking(Enum):
    """Which waiting request goes next, within the bounds on overtaking."""

    SHARED = "shared"  # fewest tokens to compute beside what runs or what the cache holds
    IN_TIME = "in-time"  # who can still have its first token in time before all others, the least work first
    RATIO = "ratio"  # highest response ratio: time waited over work
    SHORTEST = "shortest"  # least work
    OLDEST = "oldest"  # order of arrival


class Prefill(Enum):
    """When prefill may hold up the requests that decode."""

    AT_ONCE = "at-once"  # as long as anybody waits and fits, as SGLang does
    SPACED = "spaced"  # so too, but no more often than once in so many tokens; else bounded
    BOUNDED = "bounded"  # never for longer than the bound between two tokens


class Mode(NamedTuple):
    """The choices for a round.

    Attributes
    ----------
    stop_from
        Requests in the batch from which on nobody joins who would cost it shared prefix; 0: the stop policy decides.
    """

    ranking: Ranking = Ranking.SHARED
    prefill: Prefill = Prefill.AT_ONCE
    stop_from: int = 0

    def __str__(self) -> str:
        stop = f", stop from {self.stop_from}" if self.stop_from else ""
        return f"{self.ranking.value}, {self.prefill.value}{stop}"

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Read what ``str`` writes; ValueError names what is wrong."""
        ranking, _, rest = text.partition(", ")
        prefill, _, stop = rest.partition(", ")
        number = stop.removeprefix("stop from ") if stop else "0"
        try:
            mode = cls(Ranking(ranking), Prefill(prefill), int(number))
        except ValueError:
            mode = None
        if mode is None or str(mode) != text:
            raise ValueError(f"{text[:60]!r} is no mode")
        return mode


DEFAULT = Mode()
