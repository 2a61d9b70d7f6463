"""Whether a prefix is computed now, or waits for more of the requests that share it.

Where prompts exceed the KV pool, a prefix that is computed for one request may be evicted before the next one of its
group arrives, and is computed again. The stop policy cannot see that: its reward is decode throughput, in which
prefill does not appear. So this is weighed with a model of costs instead; ours, not the paper's.
"""

from __future__ import annotations

# A decode step's fixed cost, in tokens of prefill: a step reads every weight once, a token multiplies with every weight
# once, so it is the chip's FLOP per byte (184 on an H200, 187 on an RTX 6000 Ada).
STEP_TOKENS = 184
# The chance that a prefix computed early must be computed again (0.35 to one: docs/lab/learning.md).
RECOMPUTE_PROBABILITY = 0.5
# Of the arrivals that would have a prefix computed, so many must meet another that waits for it, or nothing is batched.
MIN_SHARE_RATE = 0.2
LEAST_TOKENS = 512  # a prefix below that is not worth a wait
_WINDOW = 64  # observations that a moving mean follows


class PrefixBatching:
    """What one scheduler has learnt of its load, and the rule.

    Parameters
    ----------
    pool_tokens
        Tokens that the KV pool holds.

    Attributes
    ----------
    share_rate : share of the arrivals that would have a prefix computed and met another one waiting for it.
    output_tokens : mean of the finished requests; before the first, of what those that arrived may generate.
    seconds_per_token : of prefill; None: not measured yet.
    """

    def __init__(self, pool_tokens: int) -> None:
        self.pool_tokens = pool_tokens
        self.share_rate = 0.0
        self.output_tokens = 0.0
        self._any_finished = False
        self.seconds_per_token: float | None = None

    def arrived(self, most_tokens: int, met: bool | None) -> None:
        """Note a request that may generate so many tokens.

        `met` : whether one that waits already shares half of the prefix that it would have computed; None: it would
        have none computed.
        """
        if not self._any_finished:
            self._note_output(most_tokens)
        if met is not None:
            self.share_rate += (met - self.share_rate) / _WINDOW

    def finished(self, output_tokens: int) -> None:
        """Note what a request has generated."""
        if not self._any_finished:
            self._any_finished, self.output_tokens = True, 0.0
        self._note_output(output_tokens)

    def _note_output(self, tokens: int) -> None:
        mean = self.output_tokens
        self.output_tokens = mean + (tokens - mean) / _WINDOW if mean else float(tokens)

    def tight(self, demand_tokens: int, running: int) -> bool:
        """Whether all that is asked for exceeds the pool.

        Parameters
        ----------
        demand_tokens : distinct prompt tokens of all waiting and running requests.
        running : requests in the batch.
        """
        return demand_tokens + running * self.output_tokens / 2 > self.pool_tokens

    def short(self, demand_tokens: int, running: int) -> bool:
        """Whether prefixes compete for memory: it is ``tight``, and arrivals meet others of their prefix."""
        return self.share_rate >= MIN_SHARE_RATE and self.tight(demand_tokens, running)

    def waits(self, missing_tokens: int, together: int, waited: float, running: int) -> bool:
        """Whether a prefix had better not be computed yet, where memory is short.

        A request more beside B running ones saves 1/B of a decode step's fixed cost, for as many steps as it has
        tokens. Computing the prefix now instead of later brings that for each request that waits for it, and costs
        computing it again if it does not survive until the next ones come. It waits for so long only as that costs
        those who wait less time than the prefill would cost those who run.

        Parameters
        ----------
        missing_tokens : to be computed.
        together : requests that wait for this prefix.
        waited : seconds that the first of them to be proposed has waited.
        running : requests in the batch.
        """
        if missing_tokens < LEAST_TOKENS or not self.seconds_per_token:
            return False
        if together * waited >= running * missing_tokens * self.seconds_per_token:
            return False
        return together * self.output_tokens * STEP_TOKENS < RECOMPUTE_PROBABILITY * running * missing_tokens
