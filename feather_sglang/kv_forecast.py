"""How much KV the running requests will need at most, before enough of them have ended and given theirs back.

SGLang counts a share of what running requests may still generate, a share that falls while all goes well. Where it has
fallen too far, too many run at a time: the pool fills up, some are thrown out, and the prefix of those may be evicted
and computed again. Requests that were admitted together grow together, so what counts is the highest point ahead.

Source: the Past-Future scheduler (Gong et al., ASPLOS 2025, arXiv 2507.10150), which takes lengths from requests that
have finished, too, and memory as it will be whenever one ends. Lengths are means here, not samples: ranks agree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np

_NONE = np.zeros(0, np.int64)
_MEMORY = 256  # finished requests that expected lengths are taken from


class Outlook(NamedTuple):
    """One request: its tokens so far, prompt and output; its output so far, and the most that it may be.

    ``fixed``: it will be as long, as nothing else ends it.
    """

    tokens: int
    generated: int
    most: int
    fixed: bool


class KVForecast:
    """What one scheduler knows of lengths, and the memory that lies ahead of it in an admission round.

    Parameters
    ----------
    page_size : tokens that a request takes at a time.
    """

    def __init__(self, page_size: int = 1) -> None:
        self._rounding = page_size - 1
        self._finished: deque[int] = deque(maxlen=_MEMORY)
        self._lengths: list[int] = []  # of those, sorted; as of the last `open`, like all below
        self._longer: list[int] = []  # sum of each of them and all behind it
        self._remaining = self._returned = _NONE  # (running,): tokens that each will generate yet, and gives back then
        self._steps = self._gone = self._before = self._after = _NONE  # see _add_up

    def finished(self, output_tokens: int) -> None:
        """Note what a request has generated."""
        self._finished.append(output_tokens)

    def open(self, running: Iterable[tuple[Outlook, int]]) -> None:
        """Look ahead from the running requests.

        Parameters
        ----------
        running : each with the tokens that it gives back when it ends, as no other running one shares them.
        """
        self._lengths = sorted(self._finished)
        self._longer = list(accumulate(reversed(self._lengths)))[::-1]
        pairs = [(self.remaining(outlook), returned) for outlook, returned in running]
        self._remaining, returned = np.array(pairs, np.int64).reshape(-1, 2).T
        self._returned = np.where(self._remaining, returned, 0)  # of unknown length: who knows when
        self._add_up()

    def _add_up(self) -> None:
        order = np.argsort(self._remaining)
        self._steps = steps = self._remaining[order]
        self._gone = np.append(0, np.cumsum(self._returned[order]))  # given back before each one's end
        taken = np.arange(len(steps), 0, -1) * (steps + self._rounding) - self._gone[:-1]  # at each one's end
        self._before = np.maximum.accumulate(taken + steps + self._rounding)  # up to it, beside one that runs longer
        self._after = np.maximum.accumulate(taken[::-1])[::-1]  # from it on

    def remaining(self, outlook: Outlook) -> int:
        """Tokens that a request is expected to generate yet: the mean of those that had more, else as many again.

        0 before anybody has finished, but for a fixed length: SGLang's own estimate has to do.
        """
        left = max(1, outlook.most - outlook.generated)
        if outlook.fixed:
            return left
        if not self._lengths:
            return 0
        first = bisect_right(self._lengths, outlook.generated)
        if first == len(self._lengths):
            return max(1, min(left, outlook.generated))
        return max(1, min(left, self._longer[first] // (len(self._lengths) - first) - outlook.generated))

    def needs(self, outlook: Outlook) -> int:
        """Most tokens that will be needed beyond what is held now and all prompts take, if one joins."""
        remaining, count = self.remaining(outlook), len(self._steps)
        place = int(np.searchsorted(self._steps, remaining))
        # Up to its own end it takes a token a step, beside those that run as long or longer; behind that it is gone.
        most = (count - place + 1) * (remaining + self._rounding) - int(self._gone[place])
        if place:
            most = max(most, int(self._before[place - 1]))
        if place < count:
            most = max(most, int(self._after[place]) - (outlook.generated if remaining else 0))
        return max(0, most)

    def admit(self, outlook: Outlook) -> None:
        """Let it join.

        What it gives back of its prompt counts from the next round on, when it is known with whom it shares that.
        """
        remaining = self.remaining(outlook)
        self._remaining = np.append(self._remaining, remaining)
        self._returned = np.append(self._returned, outlook.generated if remaining else 0)
        self._add_up()
