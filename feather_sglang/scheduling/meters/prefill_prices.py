"""What a prefill step takes by what it computes, fitted to the steps so far.

    seconds = fixed + token x new tokens + pair x (a new token and one before it) + prefix x tokens found in the cache

The fixed part is the launch of a step; what is found in the cache costs the host time, which looks it up and copies it.
Errors count relative to a step's length, so that short steps, of which a bounded engine has most, are fitted as well as
long ones; old steps fade.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import NamedTuple

import numpy as np

_WINDOW = 64  # steps that the fit follows
_LEAST_SPREAD = 1e-3  # of steps in a term; below, they look alike and do not tell it from the others
_TRUSTED = 2  # times the tokens of the longest of late: how time goes on beyond is not known
_FIXED, _TOKEN, _PAIR, _PREFIX = range(4)
_OTHERS = (_FIXED, _PAIR, _PREFIX)


class PrefillPrices(NamedTuple):
    """What prefill takes, seconds.

    Attributes
    ----------
    fixed : of a step, however few its tokens.
    token : of a token without context.
    pair : of attention from one token to one before it.
    prefix : of a token that a prompt has in the cache.
    trusted : the most new tokens of a step for which this holds.
    """

    fixed: float
    token: float
    pair: float
    prefix: float = 0.0
    trusted: float = math.inf

    def seconds(self, tokens: float, context: float) -> float:
        """Of so many ``tokens`` of one prompt, after ``context`` earlier ones."""
        return tokens * (self.token + self.pair * (context + tokens / 2)) + self.prefix * context

    def tokens(self, seconds: float, context: float) -> int:
        """The most tokens after ``context`` earlier ones that take no more than ``seconds``."""
        seconds -= self.prefix * context
        if seconds <= 0:
            return 0
        first = self.token + self.pair * context
        return math.floor(2 * seconds / (first + math.sqrt(first * first + 2 * self.pair * seconds)))


class PrefillFit:
    """Least squares over prefill steps, none of whose prices is below 0."""

    def __init__(self) -> None:
        self._products = np.zeros((4, 4))  # of the terms, each over the step's seconds
        self._sums = np.zeros(4)
        self._longest = 0.0  # tokens, fading
        self._prices: PrefillPrices | None = None

    @property
    def prices(self) -> PrefillPrices | None:
        """By the steps so far; None before the first."""
        return self._prices

    def step(self, seconds: float, tokens: int, pairs: float, cached: int) -> None:
        """Take a step's time.

        Parameters
        ----------
        seconds : above 0.
        tokens : new ones, at least 1.
        pairs : of a new token and one before it in its prompt.
        cached : tokens that its prompts had in the cache.
        """
        terms = np.array([1.0, tokens, pairs, cached]) / seconds
        keep = 1 - 1 / _WINDOW
        self._products = keep * self._products + np.outer(terms, terms)
        self._sums = keep * self._sums + terms
        self._longest = max(keep * self._longest, tokens)
        self._prices = self._fit()

    def _fit(self) -> PrefillPrices:
        """Of all sets of terms that the steps tell apart, and whose prices are not negative, the one that fits best."""
        best, least = np.zeros(4), math.inf
        norms = np.sqrt(np.diag(self._products))
        for others in (set_ for size in range(4) for set_ in combinations(_OTHERS, size)):
            terms = [_TOKEN, *others]
            if not norms[terms].all():
                continue
            scale = norms[terms]
            alike = self._products[np.ix_(terms, terms)] / np.outer(scale, scale)
            if np.linalg.eigvalsh(alike)[0] < _LEAST_SPREAD:
                continue
            found = np.linalg.solve(alike, self._sums[terms] / scale) / scale
            left = -float(found @ self._sums[terms])  # what the squares sum up to, but for a constant
            if found[0] > 0 and (found >= 0).all() and left < least:
                best, least = np.zeros(4), left
                best[terms] = found
        fixed, token, pair, prefix = map(float, best)
        return PrefillPrices(fixed, token, pair, prefix, _TRUSTED * self._longest)
