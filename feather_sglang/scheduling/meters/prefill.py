"""What a token of prefill takes, and a step of it however few its tokens, measured between results."""

from __future__ import annotations

from feather_sglang.scheduling.meters.moving_mean import follow

LEAST_TOKENS = 1024  # of a step from which on its length says what a token takes; or half a chunk, where that is less
_WINDOW = 64  # steps that the means follow
_LEAST_SPREAD = 1e-3  # below, all steps look alike and do not tell what is the context's part


class PrefillMeter:
    """Moving means over prefill steps.

    The time between two results is the duration of the later step, whether results are processed at once or one step
    late, unless nothing ran in between: then `idle` is due, and `begin` when something runs again.

    Parameters
    ----------
    chunk_tokens : the most that a step may compute of prompts; None, 0 or less: no limit, as in SGLang's flag.

    Attributes
    ----------
    seconds_per_token : of the prompt, in large steps; None: none was timed yet.
    fixed_seconds : what small steps take beyond their tokens; None: none was timed since a large one.
    bare_seconds : what a token takes without any context before it; None: none was timed yet.
    pair_seconds : what attention from one token to one before it takes; 0 where steps do not tell.
    """

    def __init__(self, chunk_tokens: int | None = None) -> None:
        half = chunk_tokens // 2 if chunk_tokens and chunk_tokens > 0 else LEAST_TOKENS
        self._least_tokens = max(1, min(LEAST_TOKENS, half))
        self.seconds_per_token: float | None = None
        self.fixed_seconds: float | None = None
        self.bare_seconds: float | None = None
        self.pair_seconds = 0.0
        self._previous: float | None = None  # when the previous result arrived
        self._sums = [0.0] * 5  # of the least squares below

    def begin(self, now: float) -> None:
        """A prefill step is launched at `now`: where nothing ran before, that is when it begins."""
        if self._previous is None:
            self._previous = now

    def step(self, now: float, prompt_tokens: int, pairs: float = 0.0) -> float | None:
        """Take a step's result; return the seconds that it took, None where it computed no prompt or nobody knows.

        Parameters
        ----------
        now : seconds, any monotonic clock.
        prompt_tokens : that it computed.
        pairs : of a computed token and one before it in its prompt.
        """
        seconds = None
        if prompt_tokens > 0 and self._previous is not None and now > self._previous:
            seconds = now - self._previous
            if prompt_tokens >= self._least_tokens:
                self.seconds_per_token = follow(self.seconds_per_token, seconds / prompt_tokens, _WINDOW)
                self._fit(seconds, prompt_tokens, pairs)
            elif self.seconds_per_token is not None:
                beyond = max(0.0, seconds - prompt_tokens * self.seconds_per_token)
                self.fixed_seconds = follow(self.fixed_seconds, beyond, _WINDOW)
        self._previous = now
        return seconds

    def _fit(self, seconds: float, tokens: int, pairs: float) -> None:
        """Least squares of ``seconds = bare x tokens + pair x pairs``, old steps fading; neither below 0."""
        terms = (tokens * tokens, tokens * pairs, pairs * pairs, tokens * seconds, pairs * seconds)
        self._sums = [old * (1 - 1 / _WINDOW) + term for old, term in zip(self._sums, terms, strict=True)]
        tt, tp, pp, ts, ps = self._sums
        spread = tt * pp - tp * tp
        pair = (tt * ps - tp * ts) / spread if spread > _LEAST_SPREAD * tt * pp else 0.0
        bare = (ts - pair * tp) / tt
        if pair < 0 or bare <= 0:
            pair, bare = 0.0, ts / tt
        self.bare_seconds, self.pair_seconds = bare, pair

    def idle(self) -> None:
        """Nothing runs any more: the time until the next step says nothing."""
        self._previous = None
