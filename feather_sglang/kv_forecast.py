"""How much KV the running requests will need at most, before enough of them have ended and given theirs back.

SGLang counts a share of what running requests may still generate, a share that falls while all goes well. Where it has
fallen too far, too many run at a time: the pool fills up, some are thrown out, and the prefix of those may be evicted
and computed again. Requests that were admitted together grow together, so what counts is the highest point ahead.

Source: the Past-Future scheduler (Gong et al., ASPLOS 2025, arXiv 2507.10150), which takes lengths from requests that
have finished, too, and memory as it will be whenever one ends. Lengths are means here, not samples: ranks agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

_MEMORY = 256  # finished requests that expected lengths are taken from


class Outlook(NamedTuple):
    """One request, in tokens: its prompt, its output so far, and the most it may have.

    ``fixed``: it will have as many, as nothing else ends it.
    """

    prompt: int
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
        self._page = page_size
        self._lengths: deque[int] = deque(maxlen=_MEMORY)
        self._remaining = self._returned = np.zeros(0, np.int64)
        self._pending = 0

    def finished(self, output_tokens: int) -> None:
        """Note what a request has generated."""
        self._lengths.append(output_tokens)

    def open(self, running: Iterable[tuple[Outlook, int]], pending: int) -> None:
        """Look ahead from the running requests.

        Parameters
        ----------
        running : each with the tokens of its prompt that leave with it, as no other running one shares them.
        pending : tokens of running requests' prompts that are still to be computed.
        """
        pairs = list(running)
        outlooks = [outlook for outlook, _ in pairs]
        self._remaining = self._expect(outlooks)
        returned = np.array([alone + outlook.generated for outlook, alone in pairs], np.int64)
        self._returned = np.where(self._remaining, returned, 0)  # who may stay for ever gives nothing back
        self._pending = pending

    def needs(self, outlook: Outlook, prompt_tokens: int) -> int:
        """Most tokens that will be needed beyond those held now, if one joins that takes so many for its prompt."""
        remaining = np.append(self._remaining, self._expect([outlook]))
        returned = np.append(self._returned, outlook.generated)
        return self._pending + prompt_tokens + peak(remaining, returned, self._page)

    def admit(self, outlook: Outlook, computed_tokens: int) -> None:
        """Let it join; so many tokens of its prompt are to be computed. What it may give back counts from the next
        round on, when it is known with whom it shares its prompt.
        """
        self._remaining = np.append(self._remaining, self._expect([outlook]))
        self._returned = np.append(self._returned, outlook.generated)
        self._pending += computed_tokens

    def _expect(self, outlooks: list[Outlook]) -> np.ndarray:
        """Tokens that each will still generate: the mean of what those had that had more, else as many again.

        Before anybody has finished, 0, but for fixed lengths: nothing is known, and SGLang's own estimate has to do.
        """
        if not outlooks:
            return np.zeros(0, np.int64)
        _, generated, most, fixed = (np.array(column, np.int64) for column in zip(*outlooks, strict=True))
        left = np.maximum(most - generated, 1)
        if not self._lengths:
            return np.where(fixed, left, 0)
        lengths = np.sort(np.array(self._lengths, np.int64))
        sums = np.append(np.cumsum(lengths[::-1])[::-1], 0)  # of a length and all longer ones
        first = np.searchsorted(lengths, generated, side="right")  # the first that had more
        longer = len(lengths) - first
        expected = np.where(longer, sums[first] // np.maximum(longer, 1), 2 * generated)
        return np.where(fixed, left, np.clip(expected - generated, 1, left))


def peak(remaining: np.ndarray, returned: np.ndarray, page_size: int = 1) -> int:
    """Most tokens that requests will take beyond those they hold, at any step ahead.

    Parameters
    ----------
    remaining : (n,) int64, tokens that each will still generate, one a step.
    returned : (n,) int64, tokens that each holds alone now, and gives back behind its last step.
    """
    order = np.argsort(remaining, kind="stable")
    steps = remaining[order]
    running = np.arange(len(steps), 0, -1)  # up to each of these steps
    gone = np.cumsum(returned[order]) - returned[order]
    taken = running * (steps + page_size - 1) - gone
    return max(0, int(taken.max(initial=0)))
