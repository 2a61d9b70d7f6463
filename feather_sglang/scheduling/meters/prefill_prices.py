"""What a prefill step takes by what it computes, fitted to the steps so far.

    seconds = fixed + token x new tokens + pair x (a new token and one before it) + prefix x tokens found in the cache

once for the GPU and once for the host, which launches a step while the GPU computes the one before: a step takes as
long as the slower of the two. What the engine waits for results tells them apart. All but the waiting was the host's;
and where it hardly waited the GPU could have computed more in the same time, and that was no more than what it took.
Where nobody knows how long the engine waited, all counts as the GPU's. Whatever the fit says, a step takes no less than
its tokens at the pace of the fastest long steps: where a launch takes longer than the tokens of short steps, these seem
to cost nothing.

Errors count relative to a step's length, so that short steps, of which a bounded engine has most, are fitted as well as
long ones, and one that an engine saw too late not better than all others; old steps fade.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
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
_WAITS = 0.1  # of a step's time, that the engine waits for results where the GPU is the slower
_BUSY = 0.05  # of a step's time, that the host needs at least
_FIXED, _TOKEN, _PAIR, _PREFIX = range(4)


def _sets(first: int) -> tuple[tuple[int, ...], ...]:
    """Sets of terms, small ones first, and ``first`` alone before any other."""
    return ((first,), *(terms for size in range(1, 5) for terms in combinations(range(4), size) if terms != (first,)))


class Load(NamedTuple):
    """What a prefill step computes.

    Attributes
    ----------
    tokens : new ones.
    pairs : of a new token and one before it in its prompt.
    cached : tokens that its prompts had in the cache.
    """

    tokens: float = 0
    pairs: float = 0
    cached: float = 0

    def plus(self, tokens: float, context: float) -> Load:
        """And so many tokens of one more prompt, after ``context`` that it has in the cache."""
        pairs = self.pairs + tokens * (context + tokens / 2)
        return Load(self.tokens + tokens, pairs, self.cached + context)


_NOTHING = Load()


class Prices(NamedTuple):
    """What prefill takes of the GPU or of the host, seconds.

    Attributes
    ----------
    fixed : of a step, however few its tokens.
    token : of a token without context.
    pair : of attention from one token to one before it.
    prefix : of a token that a prompt has in the cache.
    """

    fixed: float = 0.0
    token: float = 0.0
    pair: float = 0.0
    prefix: float = 0.0

    def step(self, load: Load) -> float:
        """Of a whole step."""
        return self.fixed + self.token * load.tokens + self.pair * load.pairs + self.prefix * load.cached

    def tokens(self, seconds: float, context: float, load: Load) -> int:
        """The most tokens, after ``context`` earlier ones, with which a step of ``load`` takes no more than that."""
        seconds -= self.step(load) + self.prefix * context
        first = self.token + self.pair * context
        if not first + self.pair and seconds >= 0:
            return _UNBOUNDED
        if seconds <= 0:
            return 0
        return math.floor(2 * seconds / (first + math.sqrt(first * first + 2 * self.pair * seconds)))


class PrefillPrices(NamedTuple):
    """What prefill takes.

    Attributes
    ----------
    gpu, host : nearly all steps stay within them; the host's are 0 where it is not known what it does meanwhile.
    launch : seconds of the host for a step, however few its tokens, in the mean; 0 where that is not known.
    trusted : the most new tokens of a step for which this holds.
    pace : of the fastest long steps, seconds for each of their tokens; 0 where none is known.
    """

    gpu: Prices
    host: Prices = Prices()
    launch: float = 0.0
    trusted: float = math.inf
    pace: float = 0.0

    @classmethod
    def of(cls, numbers: Sequence[float | None]) -> PrefillPrices | None:
        """From their ``numbers``; None where these are not known."""
        if numbers[-1] is None:
            return None
        known = [number or 0.0 for number in numbers]
        return cls(Prices(*known[:4]), Prices(*known[4:8]), *known[8:])

    @property
    def numbers(self) -> tuple[float, ...]:
        """All of them, one after the other."""
        return (*self.gpu, *self.host, *self[2:])

    def step(self, load: Load) -> float:
        """Seconds of a step."""
        return max(self.gpu.step(load), self.host.step(load), self.pace * load.tokens)

    def tokens(self, seconds: float, context: float, load: Load = _NOTHING) -> int:
        """The most tokens of one prompt that a step of ``load`` may have, too, so that it takes no more than that.

        Parameters
        ----------
        seconds : of the whole step.
        context : tokens before them.
        """
        most = min(prices.tokens(seconds, context, load) for prices in (self.gpu, self.host))
        return max(0, min(most, self._paced(seconds) - math.ceil(load.tokens)))

    def beside(self, seconds: float, context: float) -> int:
        """The most tokens of one prompt that take so long, beyond what any step takes."""
        most = min(prices._replace(fixed=0.0).tokens(seconds, context, _NOTHING) for prices in (self.gpu, self.host))
        return min(most, self._paced(seconds))

    def _paced(self, seconds: float) -> int:
        """Tokens that a step of so many seconds was seen to have, at the most."""
        return math.floor(min(max(0.0, seconds) / self.pace, _UNBOUNDED)) if self.pace else _UNBOUNDED


class _Line:
    """Least squares over steps, no price below 0.

    Of sets of terms that explain the steps about equally well the smallest counts, and of single ones the ``first``.
    What steps take of late beyond these prices, and how much that varies, adds to the fixed part: bounds are on the
    slowest of a hundred steps.
    """

    def __init__(self, first: int) -> None:
        self._sets = _sets(first)
        self._products = np.zeros((4, 4))  # of the terms, each over the length that errors are relative to
        self._sums = np.zeros(4)  # of terms and seconds, as these
        self._weight = 0.0  # of the seconds
        self._timed = 0  # times that were taken
        self._fitted = np.zeros(4)  # the terms' prices
        self._drift = 0.0  # seconds that steps take beyond that of late, in the mean
        self._variance = 0.0  # of them

    @property
    def prices(self) -> Prices:
        """By the steps so far; all 0 before the first."""
        _, token, pair, prefix = map(float, self._fitted)
        return Prices(self.fixed + _SURE * math.sqrt(self._variance), token, pair, prefix)

    @property
    def fixed(self) -> float:
        """Seconds of a step, however few its tokens, in the mean."""
        fixed = float(self._fitted[_FIXED])
        return max(fixed / 2, fixed + float(self._drift))

    def said(self, terms: Any) -> float:
        """Seconds of steps with these sums of terms; 0 before the first was timed."""
        return float(self._fitted @ terms)

    def took(self, added: Any, seconds: float) -> None:
        """Steps with these sums of terms took so long together."""
        said, keep = self.said(added), 1 - 1 / _WINDOW
        length = max(seconds, _SHORTEST * said)
        terms, share = added / length, seconds / length
        self._products = keep * self._products + np.outer(terms, terms)
        self._sums = keep * self._sums + share * terms
        self._weight = keep * self._weight + share * share
        self._timed += 1
        if self._timed > _LATE:
            beyond = min(max(seconds - said, -said), said) / float(added[_FIXED])
            self._variance += ((beyond - self._drift) ** 2 - self._variance) / _LATE
            self._drift += (beyond - self._drift) / _LATE
        if self._timed < _SOON or not self._timed % _REFIT:
            self._fitted = self._fit()

    def _fit(self) -> Any:
        """Prices of the smallest set of terms that fits nearly as well as the best."""
        solved = [(terms, found) for terms in self._sets if (found := self._solve(terms)) is not None]
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


class PrefillFit:
    """What prefill takes of the GPU and of the host, by the steps so far.

    Of steps that are all alike a larger one is said to take the GPU as much more time as it has more tokens, which is
    the most, and the host none.
    """

    def __init__(self) -> None:
        self._gpu, self._host = _Line(_TOKEN), _Line(_FIXED)
        self._added = np.zeros(4)  # terms of the steps whose time is not known yet
        self._waited: float | None = 0.0  # for results since the last time was taken; None: nobody knows
        self._timed = 0  # times that were taken
        self._longest = 0.0  # tokens, fading
        self._paces: dict[int, deque[float]] = {}  # by size of long steps: seconds for a token
        self._pace = 0.0  # of the fastest

    @property
    def prices(self) -> PrefillPrices | None:
        """By the steps so far; None before the first."""
        if not self._timed:
            return None
        trusted = _TRUSTED * self._longest
        return PrefillPrices(self._gpu.prices, self._host.prices, self._host.fixed, trusted, self._pace)

    def add(self, load: Load) -> None:
        """Note a step whose time is not known yet."""
        self._added += (1, *load)
        self._longest = max((1 - 1 / _WINDOW) * self._longest, load.tokens)

    def waited(self, seconds: float | None) -> None:
        """The engine waited so long for a step's result, before it went on; None: nobody knows."""
        self._waited = None if seconds is None or self._waited is None else self._waited + seconds

    def drop(self) -> None:
        """Forget the steps whose time nobody will know."""
        self._added[:], self._waited = 0, 0.0

    def took(self, seconds: float) -> None:
        """The steps added since the last call took so long together; 0: nobody will know. Without any, nothing."""
        added, waited = self._added.copy(), self._waited
        self.drop()
        if not seconds or not added[_FIXED]:
            return
        self._timed += 1
        if waited is not None:
            self._host.took(added, max(seconds - waited, _BUSY * seconds))
        if waited is None or waited > _WAITS * seconds or self._gpu.said(added) > seconds:
            self._gpu.took(added, seconds)
        if waited is None or waited > seconds / 2:  # else the GPU may have waited for its launch, too
            self._note_pace(float(added[_TOKEN]), seconds, float(added[_FIXED]))

    def _note_pace(self, tokens: float, seconds: float, steps: float) -> None:
        if tokens < LEAST_TOKENS * steps:  # it may take what its launch takes
            return
        size = int(tokens / steps).bit_length()
        self._paces.setdefault(size, deque(maxlen=_PER_SIZE)).append(seconds / tokens)
        known = (sorted(paces)[max(1, len(paces) // _FASTEST)] for paces in self._paces.values() if len(paces) > 1)
        self._pace = min(known, default=0.0)
