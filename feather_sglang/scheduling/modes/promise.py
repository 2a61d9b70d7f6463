"""What the operator promises, in seconds: bounds that are relative to an idle server follow what was measured."""

from __future__ import annotations

from math import inf

from feather_sglang.errors import FeatherError
from feather_sglang.slo import SLO

# Decode steps are foreseen from means, and a bound that is only just met is missed by the next longer one.
SAFETY = 0.85
# The shortest decode step is that of a short context: a lone request of common length takes so much longer.
CONTEXT = 1.05


class Promise:
    """The bounds of one server.

    Parameters
    ----------
    slo
        With bounds on the first token and between tokens. A lone request's times are what the server's prefill costs
        say of its prompt, and the shortest decode step so far.
    aim
        Seconds between two tokens to aim at, where somebody named them; None: as the bound has it.

    Attributes
    ----------
    token_seconds, fixed_seconds
        What a token of prefill and a step of it take; 0 until they are measured.
    idle_decode_seconds
        The shortest decode step so far; None: none was timed.
    """

    def __init__(self, slo: SLO, aim: float | None = None) -> None:
        if slo.ttft is None or slo.tbt is None:
            raise FeatherError(f"--feather-slo {slo.text}: give both bounds, ttft and tbt")
        self.slo = slo
        self._ttft, self._tbt, self._aim = slo.ttft, slo.tbt, aim
        self.token_seconds = self.fixed_seconds = 0.0
        self.idle_decode_seconds: float | None = None

    def first_token(self, work: float) -> float:
        """Seconds in which a request of so much work (tokens of prefill) is to have its first token; inf: not known."""
        if not self._ttft.relative:
            return self._ttft.most
        if not self.token_seconds:
            return inf
        return self._ttft.most * (work * self.token_seconds + self.fixed_seconds)

    def can_come_in_time(self, waited: float, work: float, whole_work: float) -> bool:
        """Whether a request that has waited so many seconds may still have its first token in time.

        Parameters
        ----------
        work, whole_work
            Of what is to be computed of it now, and of its whole prompt, tokens of prefill.
        """
        if not self.token_seconds:
            return True
        seconds = waited + work * self.token_seconds + self.fixed_seconds
        return seconds <= SAFETY * self.first_token(whole_work)

    def between_tokens(self) -> float | None:
        """Seconds between two tokens to aim at; None: not known yet."""
        if self._aim is not None:
            return self._aim
        return self._seconds(SAFETY * self._tbt.most)

    def gap(self) -> float | None:
        """Seconds between two tokens that are promised; None: not known yet."""
        return self._seconds((CONTEXT if self._tbt.relative else 1.0) * self._tbt.most)

    def _seconds(self, most: float) -> float | None:
        if not self._tbt.relative:
            return most
        return None if self.idle_decode_seconds is None else most * self.idle_decode_seconds
