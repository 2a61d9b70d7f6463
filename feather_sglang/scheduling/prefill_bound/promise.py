"""The promised bounds, in seconds; one that is relative to an idle server follows the measured times."""

from __future__ import annotations

from feather_sglang.errors import FeatherError
from feather_sglang.slo import SLO

SAFETY = 0.85  # of a bound on all gaps: steps are foreseen from means
PATIENCE = 2.0  # seconds within which all that waits is to be computed, whatever the bound between tokens


class Promise:
    """The bounds of one server: ``--feather-tbt``, ``--feather-slo``.

    Parameters
    ----------
    slo
        With bounds on the first token and between tokens; None: nothing is said of the first one.
    tbt
        Seconds between two tokens to aim at; None: as ``slo`` has it.
    """

    def __init__(self, slo: SLO | None = None, tbt: float | None = None) -> None:
        if slo is not None and (slo.ttft is None or slo.tbt is None):
            raise FeatherError(f"--feather-slo {slo.text}: give both bounds, ttft and tbt")
        if slo is not None and slo.tpot is not None:
            raise FeatherError(f"--feather-slo {slo.text}: a server cannot promise tpot; leave it out")
        self.slo = slo
        self.tbt = tbt

    def between_tokens(self, idle_decode_seconds: float | None) -> float | None:
        """Seconds between two tokens to aim at; None: not known yet.

        Parameters
        ----------
        idle_decode_seconds
            The shortest decode step so far; None: none was timed.
        """
        if self.tbt is not None:
            return self.tbt
        assert self.slo is not None and self.slo.tbt is not None
        most, relative = self.slo.tbt
        if not relative:
            return SAFETY * most
        return None if idle_decode_seconds is None else SAFETY * most * idle_decode_seconds

    def patience(self, idle_first_token: float | None = None) -> float:
        """Seconds within which all that waits is to be computed: half of a bound on the first token, or less.

        Parameters
        ----------
        idle_first_token
            Seconds to it of those who wait, in the mean, if they were alone; None: not known.
        """
        if self.slo is None or self.slo.ttft is None:
            return PATIENCE
        most, relative = self.slo.ttft
        if relative:
            most = 2 * PATIENCE if idle_first_token is None else most * idle_first_token
        return min(PATIENCE, most / 2)
