"""The prefill meter: time of a token of prefill, and of a prefill step beyond its tokens."""

from __future__ import annotations

from typing import NamedTuple

from feather_sglang.scheduling.meters.moving_mean import follow

LEAST_TOKENS = 1024  # of a step from which on its length says what a token takes; or half a chunk, where that is less
_WINDOW = 64  # steps that the means follow
_LEAST_SPREAD = 1e-3  # below, all steps look alike and do not tell what is the context's part


class Gap(NamedTuple):
    """Prefill between two decode steps.

    Attributes
    ----------
    seconds : from one decode step's result to the next one's.
    steps, tokens, pairs : prefill steps between them, tokens computed, and pairs of such a token and one before it.
    """

    seconds: float
    steps: int
    tokens: int
    pairs: float


class PrefillMeter:
    """Moving means over prefill steps.

    An engine that overlaps looks for a decode step's result after it has launched the prefill step that follows, and
    that launch can take as long as the step itself. So where requests decode, prefill is timed from decode step to
    decode step, and one of these is taken off. Otherwise the time between two results is the duration of the later
    step, unless nothing ran in between: then `idle` is due, and `begin` when something runs again.

    Parameters
    ----------
    chunk_tokens : the most that a step may compute of prompts; None, 0 or less: no limit, as in SGLang's flag.

    Attributes
    ----------
    seconds_per_token : of the prompt, in large steps; None: none was timed yet.
    fixed_seconds : what small steps take beyond their tokens, if it is known what these take; None: none was timed.
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
        self._decoded: float | None = None  # when a decode step's result arrived, if the batch decodes
        self._between = Gap(0.0, 0, 0, 0.0)  # prefill since then
        self._sums = [0.0] * 5  # of the least squares below

    def begin(self, now: float) -> None:
        """A prefill step is launched at `now`: where nothing ran before, that is when it begins."""
        if self._previous is None:
            self._previous = now

    def step(
        self, now: float, prompt_tokens: int, pairs: float = 0.0, decode_seconds: float | None = None
    ) -> Gap | None:
        """Take a step's result; return what lay between two decode steps, if the step is the later of them.

        Parameters
        ----------
        now : seconds, any monotonic clock.
        prompt_tokens : that it computed; 0: a decode step.
        pairs : of a computed token and one before it in its prompt.
        decode_seconds : what a decode step takes that follows another; None: not known yet.
        """
        gap, previous = None, self._previous
        self._previous = now
        if not prompt_tokens:
            gap = self._decode(now, decode_seconds)
        elif self._decoded is not None:
            _, steps, tokens, before = self._between
            self._between = Gap(0.0, steps + 1, tokens + prompt_tokens, before + pairs)
        elif previous is not None and now > previous:
            self._took(Gap(now - previous, 1, prompt_tokens, pairs))
        return gap

    def _decode(self, now: float, decode_seconds: float | None) -> Gap | None:
        gap = None
        if self._decoded is not None and now > self._decoded and self._between.steps:
            gap = self._between._replace(seconds=now - self._decoded)
            if decode_seconds is None and gap.tokens >= self._least_tokens * gap.steps:
                decode_seconds = 0.0  # long steps outweigh it
            if decode_seconds is not None and gap.seconds > decode_seconds:
                self._took(gap._replace(seconds=gap.seconds - decode_seconds))
        self._decoded, self._between = now, Gap(0.0, 0, 0, 0.0)
        return gap

    def _took(self, prefill: Gap) -> None:
        seconds, steps, tokens, pairs = prefill
        if tokens >= self._least_tokens * steps:
            self.seconds_per_token = follow(self.seconds_per_token, seconds / tokens, _WINDOW)
            self._fit(seconds, tokens, pairs)
        else:
            beyond = max(0.0, seconds - tokens * (self.seconds_per_token or 0.0)) / steps
            self.fixed_seconds = follow(self.fixed_seconds, beyond, _WINDOW)

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
        self._previous = self._decoded = None
        self._between = Gap(0.0, 0, 0, 0.0)
