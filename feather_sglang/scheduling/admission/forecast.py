"""Forecast of the most KV that the running requests will need before enough of them have ended and freed theirs.

SGLang counts a share of what running requests may still generate, a share that falls while all goes well. Where it has
fallen too far, too many run at a time: the pool fills up, some are thrown out, and the prefix of those may be evicted
and computed again. Requests that were admitted together grow together, so what counts is the highest point ahead.

Source: the Past-Future scheduler (Gong et al., ASPLOS 2025, arXiv 2507.10150), which takes lengths from requests that
have finished, too, and memory as it will be whenever one ends. Lengths are means here, not samples: ranks agree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np

Parts = Sequence[tuple[Hashable, int]]  # of a prompt, the last one first: what stands for each, and its tokens
_WINDOW = 256  # finished requests that expected lengths are taken from


class Outlook(NamedTuple):
    """One request: its tokens so far, prompt and output; its output so far, and the most that it may be.

    ``fixed``: it will be as long, as nothing else ends it.
    """

    tokens: int
    generated: int
    most: int
    fixed: bool


class KVForecast:
    """One scheduler's forecast of KV memory in an admission round, from the lengths of past answers.

    Parameters
    ----------
    page_size : tokens that a request takes at a time.
    late_steps : that a request takes part in after its last token, before anybody knows that it has ended.
    """

    def __init__(self, page_size: int = 1, late_steps: int = 0) -> None:
        self._rounding = page_size - 1
        self._late_steps = late_steps
        self._finished: deque[int] = deque(maxlen=_WINDOW)
        self._lengths: list[int] = []  # of those, sorted; as of the last `open`, like all below
        self._longer: list[int] = []  # sum of each of them and all behind it
        self._ends: dict[float, list[int]] = {}  # by steps ahead: how many end there, and what they give back
        self._holders: dict[Hashable, float] = {}  # steps until the last of those that have a part ends
        self._add_up()

    def finished(self, output_tokens: int) -> None:
        """Note what a request has generated."""
        self._finished.append(output_tokens)

    def open(self, running: Iterable[tuple[Outlook, Parts]]) -> None:
        """Look ahead from the running requests.

        Parameters
        ----------
        running : each with the parts of its prompt that others may have as well. When it ends it gives back those that
            nobody has who runs longer, and all that is its own.
        """
        self._lengths = sorted(self._finished)
        self._longer = list(accumulate(reversed(self._lengths)))[::-1]
        self._ends, self._holders = {}, {}
        for outlook, parts in running:
            self._join(outlook, parts)
        self._add_up()

    def admit(self, outlook: Outlook, parts: Parts) -> None:
        """Let it join."""
        self._join(outlook, parts)
        self._add_up()

    def _join(self, outlook: Outlook, parts: Parts) -> None:
        end = self._end(outlook)
        brings, takes_over = self._split(end, outlook, parts)
        gives_back = brings - (outlook.generated > 0)  # its last token gets its place in the next step
        for until, tokens in takes_over:
            self._ends[until][1] -= tokens
            gives_back += tokens
        for part, _ in parts:
            self._holders[part] = max(end, self._holders.get(part, 0))
        if end < inf:
            count, tokens = self._ends.get(end, (0, 0))
            self._ends[end] = [count + 1, tokens + gives_back]

    def _add_up(self) -> None:
        steps = sorted(self._ends)
        counts, returned = np.array([self._ends[step] for step in steps], np.int64).reshape(-1, 2).T
        self._steps = np.array(steps, np.int64)
        self._running = np.append(counts[::-1].cumsum()[::-1], 0)  # up to each end, and behind the last
        self._gone = np.append(0, returned.cumsum())  # given back before each end, and in all
        self._used = self._running[:-1] * (self._steps + self._rounding) - self._gone[:-1]  # at each end

    def _end(self, outlook: Outlook) -> float:
        remaining = self.remaining(outlook)
        return remaining + self._late_steps if remaining else inf  # of unknown length: who knows when

    def _split(self, end: float, outlook: Outlook, parts: Parts) -> tuple[int, list[tuple[float, int]]]:
        """Tokens that nobody else has; until when others have those parts that it has for longer, and their tokens."""
        brings = max(outlook.generated, outlook.tokens - sum(tokens for _, tokens in parts))
        takes_over = []
        for part, tokens in parts:
            until = self._holders.get(part)
            if until is None:
                brings += tokens
            elif until < end:
                takes_over.append((until, tokens))
            else:
                break  # who has this part has those before it, too
        return brings, takes_over

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

    def needs(self, outlook: Outlook, parts: Parts) -> int:
        """Most tokens that will be needed beyond those held now, if one joins, its prompt included."""
        end = self._end(outlook)
        brings, takes_over = self._split(end, outlook, parts)
        behind = int(np.searchsorted(self._steps, end, "right"))
        used = self._used.copy()
        used[behind:] -= brings  # it is gone by then, with all that it took over
        if end < inf:
            used[:behind] += self._steps[:behind] + self._rounding
        for until, tokens in takes_over:
            used[np.searchsorted(self._steps, until, "right") : behind] += tokens
        most = max(0, int(used.max(initial=0)))
        if end < inf:
            place = int(np.searchsorted(self._steps, end))
            own_end = (int(self._running[place]) + 1) * (int(end) + self._rounding) - int(self._gone[place])
            most = max(most, own_end + sum(tokens for _, tokens in takes_over))
        return brings + most
