"""How long running requests stand still for others' prefill, and how much of it may run before they decode.

Between two tokens of a request lie the prefill steps of others and one decode step. An engine that prefills as long as
anybody waits sets no bound to that, and no chunk size does, as one chunk follows the other. Here

    (prefill since the last decode step) + (next prefill step) + (one decode step)  <=  bound

decides how many tokens the next prefill step may have, from measured step times; where too few are left a decode step
runs first. As a step has costs of its own the tokens are as many as fit. Where nobody decodes there is no bound.

Ours. Sarathi-Serve (Agrawal et al., 2024) sets a token budget of mixed steps by profiling ahead, for the same end.
"""

from __future__ import annotations

import math
from collections import deque

from feather_sglang.scheduling.meters.moving_mean import follow
from feather_sglang.scheduling.meters.prefill_prices import Load, PrefillPrices, Prices

FLOOR_TOKENS = 256  # of a step: below, its own costs outweigh what it computes
FIRST_TOKENS = 1024  # of a step before any was timed
SPACING = 128  # decode steps between two stops that are not bounded: one of a hundred gaps, and some
_ALONE_AGAIN = 64  # decode steps after which one is timed alone again
_ALONE = 2  # prefill steps that wait for that, so that none is launched beside it
_WINDOW = 8  # decode steps that the mean follows: a batch grows by an admission, not slowly
_MORE = 1.1  # times what a launch takes: whether the GPU computes more meanwhile is only known of what it was given
_UNKNOWN_DECODE = 0.25  # of the bound, before a decode step was timed
_NUMBERS = len(PrefillPrices(Prices()).numbers)


class StandStill:
    """The time since running requests got their last tokens, and the rule.

    It is told of every step when it is launched, and when its result comes. A result may come after the next step was
    launched; so what was launched and has no result yet counts as long as it was said to take.

    Parameters
    ----------
    bound : seconds, between two tokens of a request.

    Attributes
    ----------
    bound : may change from round to round.
    least_decode_seconds : the least that ``decode_seconds`` was; None: no decode step was timed yet.
    """

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self.least_decode_seconds: float | None = None
        self._alone: float | None = None  # of a decode step that follows another, a moving mean
        self._timed_alone = 0  # decode steps when it last was
        self._due = 0  # decode steps from which on it is to be, again
        self._held_back = 0  # prefill steps, for that
        self._after_prefill: float | None = None  # of one that follows a prefill step, as results tell
        self._decoded: float | None = None  # when the latest decode step's result came
        self._between = False  # a prefill step's has come since
        self._beyond = 0.0  # what decode steps took beyond themselves, and no prefill step was charged with yet
        self._launches: float | None = None  # when the engine set out to launch the latest step
        self._decodes = 0  # steps so far
        self._stalls = False  # the stop that is under way is not bounded
        self._stalled: int | None = None  # decode steps before the last stop that was not bounded
        self._fresh: float | None = None  # when all who run had a new token; None: since then nothing has ended
        self._latest: float | None = None  # when the latest result came
        self._launched: deque[float | None] = deque()  # no result yet; None: after it all have a new token

    @property
    def decode_seconds(self) -> float | None:
        """Of a decode step."""
        return self._after_prefill if self._alone is None else self._alone

    @property
    def decodes(self) -> bool:
        """Whether decode steps come one after the other, so that a prefill step is time between them."""
        return self._decoded is not None

    def launch(self, seconds: float | None, now: float | None = None) -> None:
        """Note a step.

        Parameters
        ----------
        seconds : that a prefill step will take; None: a decode step, or a prefill step while nobody decodes.
        now : when the engine set out to launch it, as in ``result``; None: not known.
        """
        if seconds is None:
            self._fresh = None
        self._launched.append(seconds)
        self._launches = now

    def result(self, now: float, is_decode: bool, looked: float | None = None) -> float | None:
        """Note that a step's result came at ``now`` (seconds, any monotonic clock).

        Parameters
        ----------
        looked : when the engine began to wait for it, after it had launched the next step; None: not known.

        Returns the seconds that the prefill steps since the last decode step took, once the next has ended: what lies
        between the two beyond a decode step; 0 where that will not be known. A prefill step's own result does not tell:
        an engine that overlaps looks for the result of a step after it has launched the next one.
        """
        fresh = is_decode
        self._decodes += is_decode
        # The engine may run decode steps that nobody announced.
        if self._launched and (not is_decode or self._launched[0] is None):
            fresh |= self._launched.popleft() is None
        took = None
        if is_decode:
            took = self._time_decode(now, now if looked is None else looked)
        self._between |= not is_decode
        self._latest = now
        if fresh:
            self._fresh = now
        return took

    def _time_decode(self, now: float, looked: float) -> float | None:
        """Time a decode step, or the prefill steps before it."""
        if self._between and self._latest is not None and now > self._latest:
            self._after_prefill = follow(self._after_prefill, now - self._latest, _WINDOW)
        took = None
        if self._decoded is not None and now > self._decoded:
            gap = now - self._decoded
            under_way = any(seconds is not None for seconds in self._launched)
            if not self._between and not under_way:
                self._time_alone(gap)
                took = self._beyond = 0.0
            elif self.decode_seconds is not None:
                took = self._charge(self.decode_seconds, gap - self.decode_seconds, looked if under_way else None)
        if self.decode_seconds is not None:
            self.least_decode_seconds = min(self.decode_seconds, self.least_decode_seconds or self.decode_seconds)
        self._decoded, self._between = now, False
        return took

    def _time_alone(self, seconds: float) -> None:
        """A decode step took so long that followed another; of what is old a shorter time is believed at once."""
        old = self._decodes - self._timed_alone > _WINDOW
        if old and self._alone is not None and seconds < self._alone:
            self._alone = seconds
        else:
            self._alone = follow(self._alone, seconds, 2 if old else _WINDOW)
        self._timed_alone = self._decodes

    def _charge(self, decode: float, beyond: float, looked: float | None) -> float | None:
        """Charge what a step of ``decode`` seconds took beyond them to the prefill steps before it, less what launching
        one after it took, until the engine ``looked`` (None: none is under way).
        """
        launching = 0.0
        if looked is not None and self._launches is not None:
            launching = max(0.0, min(looked - self._launches, beyond))
        self._beyond += beyond - launching
        took = None
        if self._between and self._beyond > 0:
            took, self._beyond = self._beyond, 0.0
        elif self._beyond < -decode:  # the batch is smaller than when steps were last timed alone, which may not return
            self._alone, took, self._beyond = None, 0.0, 0.0
        self._beyond += launching
        return took

    def idle(self) -> None:
        """Nobody decodes any more: what runs until somebody does is not time between two tokens."""
        self._decoded, self._between, self._beyond = None, False, 0.0

    def forget(self, in_flight: int = 0) -> None:
        """Drop what was launched and never ran; all but the last ``in_flight`` steps have ended by now."""
        while len(self._launched) > in_flight:
            self._launched.popleft()

    def restart(self) -> None:
        """Nothing runs, or did for some time: no time until now counts."""
        self._fresh = self._latest = None
        self._launched.clear()
        self.idle()

    @property
    def seconds(self) -> float:
        """How long running requests will have stood still when all that was launched has ended."""
        seconds = 0.0
        for launched in reversed(self._launched):
            if launched is None:
                return seconds
            seconds += launched
        if self._fresh is None or self._latest is None:
            return seconds
        return seconds + max(0.0, self._latest - self._fresh)  # the clock may have been set back

    def times_alone(self, stood: float, prices: PrefillPrices | None) -> bool:
        """Whether a decode step runs next, so that now and then one is timed alone; ``stood`` as in ``may_stall``.

        Where prefill steps lie between all decode steps, and launching those may take longer than a decode step, nobody
        knows how long these take just now. All ranks say the same: what they measured themselves does not count.
        """
        if stood or prices is None or not prices.launch or self._decodes < self._due:
            return False
        self._held_back += 1
        if self._held_back > _ALONE:
            self._due, self._held_back = self._decodes + _ALONE_AGAIN, 0
            return False
        return True

    def may_stall(self, stood: float) -> bool:
        """Whether prefill may run without a bound: so few stops that 99% of a request's gaps are bounded all the same.

        Parameters
        ----------
        stood : seconds, that running requests have stood still for prefill; a stop goes on as it began.
        """
        if not stood:
            self._stalls = self._stalled is None or self._decodes - self._stalled >= SPACING
        if self._stalls:
            self._stalled = self._decodes
        return self._stalls

    def readings(self, prices: PrefillPrices | None) -> tuple[float | None, ...]:
        """The last fields of ``Readings``."""
        known = prices.numbers if prices is not None else (None,) * _NUMBERS
        return *known, self.seconds, self.decode_seconds, self.least_decode_seconds

    def room(self, stood: float, decode_seconds: float | None) -> float:
        """Seconds that prefill may still take, after it took ``stood``, so that one decode step ends in time."""
        return self.bound - stood - (_UNKNOWN_DECODE * self.bound if decode_seconds is None else decode_seconds)


def chunk_tokens(room: float, stood: float, prices: PrefillPrices | None, context: int, floor: int) -> int:
    """Tokens that the next prefill step may have; 0: a decode step runs first.

    A step that directly follows a decode step may always have ``floor`` tokens, and as many as the GPU computes while
    the host launches it: fewer would hardly be a shorter step. Where a decode step alone exceeds the bound, it may have
    as many as take the time that any step takes.

    Parameters
    ----------
    room : from ``StandStill.room``.
    stood : seconds, that running requests have stood still for prefill.
    prices : None where none were measured yet.
    context : tokens before those that are computed first.
    floor : the fewest tokens that are worth a step.
    """
    tokens = 0
    if prices is not None:
        tokens = prices.tokens(room, context)
        if not stood:
            launch = _MORE * prices.launch if prices.launch or room > 0 else prices.gpu.fixed
            tokens = max(tokens, prices.beside(launch, context))
        tokens = math.floor(min(tokens, prices.trusted))
    elif not stood:
        tokens = FIRST_TOKENS
    if tokens >= floor:
        return tokens
    return 0 if stood > 0 else floor


def with_others(room: float, load: Load, prices: PrefillPrices) -> float:
    """Seconds that a prefill step of ``load`` may take with further prompts.

    Where it exceeds the bound by itself, half of what its launch takes is for them: one for each would be longer still.
    """
    step = prices.step(load)
    return room if step <= room else step + prices.launch / 2
