"""The reward: decode throughput, measured between admission decisions (paper 4.3.1)."""

from __future__ import annotations

from feather_sglang.scheduling.meters.moving_mean import follow

_WINDOW = 64  # steps that the mean follows


class DecodeMeter:
    """Decode tokens/s over time in which the engine only decoded.

    ``step`` is called once per executed step, when its result arrives. The time between two results is the duration
    of the later step, whether results are processed at once or one step late; it counts where both steps were decode
    steps, so no prefill enters.

    Attributes
    ----------
    step_seconds : of a decode step that follows another, a moving mean; None: none was timed yet.
    least_seconds : the least that this was; None: none was timed yet.
    """

    def __init__(self) -> None:
        self.step_seconds: float | None = None
        self.least_seconds: float | None = None
        self._previous: float | None = None  # when the previous result arrived, if it was a decode step's
        self._seconds = 0.0
        self._tokens = 0
        self._ignore = 0

    def step(self, now: float, decode_tokens: int, is_decode: bool) -> None:
        """Take one step's result.

        Parameters
        ----------
        now : seconds, any monotonic clock.
        decode_tokens : tokens that the step generated.
        is_decode : the step did nothing but decode.
        """
        if self._ignore:
            self._ignore -= 1
            self._previous = None
            return
        # A clock that went backwards measured nothing.
        if is_decode and self._previous is not None and now >= self._previous:
            seconds = now - self._previous
            self._seconds += seconds
            self.step_seconds = follow(self.step_seconds, seconds, _WINDOW)
            self.least_seconds = min(self.step_seconds, self.least_seconds or self.step_seconds)
            self._tokens += decode_tokens
        self._previous = now if is_decode else None

    @property
    def rate(self) -> float | None:
        """Decode tokens/s since the previous `take`; None where no decode interval was measured."""
        return self._tokens / self._seconds if self._seconds > 0 else None

    def take(self) -> float | None:
        """Return `rate`, and begin anew where it is one."""
        rate = self.rate
        if rate is not None:
            self._seconds, self._tokens = 0.0, 0
        return rate

    def restart(self, in_flight: int = 0) -> None:
        """Drop what was measured, and the results of the `in_flight` steps launched before now.

        Called when the batch has changed by a decision, so that no step of the old batch is credited to it: with
        overlapped result processing one step is in flight then. Also after a pause or an idle time.
        """
        self._previous = None
        self._seconds, self._tokens = 0.0, 0
        self._ignore = in_flight
