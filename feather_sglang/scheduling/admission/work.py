"""The work of a request: the size in which queues and bounds are counted.

Two resources are short, and a server spends its time on one after the other: it prefills as long as somebody waits and
fits, then decodes until memory is free again. So a request's prefill and its share of the memory, over the steps that
it holds it, add up. The unit is a token of prefill without context before it; seconds cancel out.

Ours, not the paper's.
"""

from __future__ import annotations

_WINDOW = 256  # finished requests that the mean output follows


class Work:
    """The sizes of requests on one server.

    Parameters
    ----------
    pool_tokens
        Tokens that the KV pool holds; None: memory does not count.

    Attributes
    ----------
    pair_tokens
        What attention from one new token to one earlier token takes; 0 until it is measured.
    step_tokens
        What a decode step takes; 0 until it is measured.
    """

    def __init__(self, pool_tokens: int | None) -> None:
        self.pool_tokens = pool_tokens
        self.pair_tokens = 0.0
        self.step_tokens = 0.0
        self._held = 0.0  # moving means over finished requests: tokens, and tokens times output
        self._held_steps = 0.0

    def measured(self, pair_tokens: float | None, step_tokens: float | None) -> None:
        """Take in what was measured; None: nothing yet."""
        self.pair_tokens, self.step_tokens = pair_tokens or 0.0, step_tokens or 0.0

    def finished(self, prompt_tokens: int, output_tokens: int) -> None:
        """Note a request that has ended; what held more memory counts more, as long prompts may have short outputs."""
        held = prompt_tokens + output_tokens / 2
        self._held += (held - self._held) / _WINDOW
        self._held_steps += (held * output_tokens - self._held_steps) / _WINDOW

    def of_prompt(self, new_tokens: int, length: int) -> float:
        """Of that the prefill: the last `new_tokens` of a prompt of `length` tokens."""
        return new_tokens + self.pair_tokens * new_tokens * (length - new_tokens / 2)

    def of(self, new_tokens: int, length: int) -> float:
        """Work of a prompt of `length` tokens whose last `new_tokens` are to be computed."""
        prefill = self.of_prompt(new_tokens, length)
        if not self.pool_tokens or not self._held:
            return prefill
        output = self._held_steps / self._held
        return prefill + (new_tokens + output / 2) * output * self.step_tokens / self.pool_tokens
