"""What a prefill step takes by what it computes, fitted to the steps so far.

    seconds = fixed + token x new tokens + pair x (a new token and one before it) + prefix x tokens found in the cache

The fixed part is the launch of a step; what is found in the cache costs the host time, which looks it up and copies it.
Whatever the fit says, a step takes no less than its tokens at the pace of the fastest long steps: where a launch takes
longer than the tokens of short steps, these seem to cost nothing.

Errors count relative to a step's length, so that short steps, of which a bounded engine has most, are fitted as well as
long ones, and one that an engine saw too late not better than all others; old steps fade.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from feather_sglang.scheduling.meters.prefill import LEAST_TOKENS

_WINDOW = 256  # steps that the fit follows
_SOON, _REFIT = 32, 4  # so many times in, every fourth refits: 0.4 ms each
_LATE = 8  # steps that the fixed part follows beyond the fit: what runs beside a step changes faster than its prices
_SURE = 2  # standard deviations, within which all but a few steps are
_LEAST_SPREAD = 1e-3  # of steps in a term; below, they look alike and do not tell it from the others
_TRUSTED = 2  # times the tokens of the longest of late: how time goes on beyond is not known
_UNBOUNDED = 2**31  # tokens, where none is known to take time
_AS_GOOD = 1.1  # times the squares that the best fit leaves
_SHORTEST = 0.5  # of what a step is said to take: its error counts relative to no less
_ROUNDING = 1e-4  # of a square: steps are timed to 1%
_PER_SIZE = 16  # long steps of each size, in powers of two, whose pace is remembered
_FASTEST = 4  # of how many one is faster than what counts, and one at the least: it may be mistimed
_FIXED, _TOKEN, _PAIR, _PREFIX = range(4)
_SETS = ((_TOKEN,), *(terms for size in range(1, 5) for terms in combinations(range(4), size) if terms != (_TOKEN,)))


class PrefillPrices(NamedTuple):
    """What prefill takes, seconds.

    Attributes
    ----------
    fixed : of a step, however few its tokens.
    token : of a token without context.
    pair : of attention from one token to one before it.
    prefix : of a token that a prompt has in the cache.
    trusted : the most new tokens of a step for which this holds.
    pace : of the fastest long steps, for each of their tokens; 0 where none is known.
    """

    fixed: float
    token: float
    pair: float
    prefix: float = 0.0
    trusted: float = math.inf
    pace: float = 0.0

    def seconds(self, tokens: float, context: float) -> float:
        """Of so many ``tokens`` of one prompt, after ``context`` earlier ones."""
        return tokens * (self.token + self.pair * (context + tokens / 2)) + self.prefix * context

    def tokens(self, seconds: float, context: float) -> int:
        """The most tokens after ``context`` earlier ones that take no more than ``seconds``."""
        seconds -= self.prefix * context
        first = self.token + self.pair * context
        if not first + self.pair and seconds >= 0:
            return _UNBOUNDED
        if seconds <= 0:
            return 0
        return math.floor(2 * seconds / (first + math.sqrt(first * first + 2 * self.pair * seconds)))

    def step(self, seconds: float, tokens: float) -> float:
        """Of a step whose prompts take ``seconds``, and have so many tokens."""
        return max(self.fixed + seconds, self.pace * tokens)

    def most(self, seconds: float) -> float:
        """Tokens of a whole step of so many seconds, however cheap a token seems."""
        most = max(0.0, seconds) / self.pace if self.pace else math.inf
        return min(most, self.trusted)


class PrefillFit:
    """Least squares over prefill steps, none of whose prices is below 0.

    Of sets of terms that explain the steps about equally well the smallest counts, and of single ones the new tokens:
    of steps that are all alike a larger one is said to take as much more time as it has more tokens, which is the most.
    What steps take of late beyond these prices, and how much that varies, adds to the fixed part: bounds are on the
    slowest of a hundred steps.
    """

    def __init__(self) -> None:
        self._added = np.zeros(4)  # terms of the steps whose time is not known yet
        self._products = np.zeros((4, 4))  # of the terms, each over the length that errors are relative to
        self._sums = np.zeros(4)  # of terms and seconds, as these
        self._weight = 0.0  # of the seconds
        self._timed = 0  # times that were taken
        self._longest = 0.0  # tokens, fading
        self._paces: dict[int, deque[float]] = {}  # by size of long steps: seconds for a token
        self._pace = 0.0  # of the fastest
        self._fitted = np.zeros(4)  # the terms' prices
        self._drift = 0.0  # seconds that steps take beyond that of late, in the mean
        self._variance = 0.0  # of them

    @property
    def prices(self) -> PrefillPrices | None:
        """By the steps so far; None before the first."""
        if not self._timed:
            return None
        fixed, token, pair, prefix = map(float, self._fitted)
        fixed = max(fixed / 2, fixed + self._drift) + _SURE * math.sqrt(self._variance)
        return PrefillPrices(fixed, token, pair, prefix, _TRUSTED * self._longest, self._pace)

    def add(self, tokens: int, pairs: float, cached: int) -> None:
        """Note a step whose time is not known yet.

        Parameters
        ----------
        tokens : new ones, at least 1.
        pairs : of a new token and one before it in its prompt.
        cached : tokens that its prompts had in the cache.
        """
        self._added += (1, tokens, pairs, cached)
        self._longest = max((1 - 1 / _WINDOW) * self._longest, tokens)

    def drop(self) -> None:
        """Forget the steps whose time nobody will know."""
        self._added[:] = 0

    def took(self, seconds: float) -> None:
        """The steps added since the last call took so long together; 0: nobody will know. Without any, nothing."""
        if not seconds:
            self.drop()
        if not self._added[_FIXED]:
            return
        said, keep = float(self._fitted @ self._added), 1 - 1 / _WINDOW
        length = max(seconds, _SHORTEST * said)
        terms, share = self._added / length, seconds / length
        self._products = keep * self._products + np.outer(terms, terms)
        self._sums = keep * self._sums + share * terms
        self._weight = keep * self._weight + share * share
        self._timed += 1
        self._note_pace(float(self._added[_TOKEN]), seconds, float(self._added[_FIXED]))
        if self._timed > _LATE:
            beyond = min(max(seconds - said, -said), said) / self._added[_FIXED]
            self._variance += ((beyond - self._drift) ** 2 - self._variance) / _LATE
            self._drift += (beyond - self._drift) / _LATE
        if self._timed < _SOON or not self._timed % _REFIT:
            self._fitted = self._fit()
        self.drop()

    def _note_pace(self, tokens: float, seconds: float, steps: float) -> None:
        if tokens < LEAST_TOKENS * steps:  # it may take what its launch takes
            return
        size = int(tokens / steps).bit_length()
        self._paces.setdefault(size, deque(maxlen=_PER_SIZE)).append(seconds / tokens)
        known = (sorted(paces)[max(1, len(paces) // _FASTEST)] for paces in self._paces.values() if len(paces) > 1)
        self._pace = min(known, default=0.0)

    def _fit(self) -> Any:
        """Prices of the smallest set of terms that fits nearly as well as the best."""
        solved = [(terms, found) for terms in _SETS if (found := self._solve(terms)) is not None]
        fits = [(self._left(terms, found), terms, found) for terms, found in solved]
        least = min(left for left, _, _ in fits)
        enough = _AS_GOOD * least + _ROUNDING * self._weight
        _, terms, found = next(fit for fit in fits if fit[0] <= enough)
        prices = np.zeros(4)
        prices[list(terms)] = found
        return prices

    def _solve(self, terms: tuple[int, ...]) -> Any:
        """The prices of these terms; None where the steps do not tell, or one would be negative."""
        chosen = list(terms)
        scale = np.sqrt(np.diag(self._products)[chosen])
        if not scale.all():
            return None
        alike = self._products[np.ix_(chosen, chosen)] / np.outer(scale, scale)
        if len(chosen) > 1 and np.linalg.eigvalsh(alike)[0] < _LEAST_SPREAD:
            return None
        found = np.linalg.solve(alike, self._sums[chosen] / scale) / scale
        return found if (found >= 0).all() else None

    def _left(self, terms: tuple[int, ...], found: Any) -> float:
        """Squares that these prices leave."""
        return max(0.0, self._weight - float(found @ self._sums[list(terms)]))
