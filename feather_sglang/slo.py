"""Service level objectives: bounds on the first token and on gaps between tokens, and how a run is judged.

A request's TBT is the gap that all but one in a hundred of its gaps stay within: users see stalls, which a mean (the
TPOT of DistServe and of vLLM's ``--goodput``) hides among a few hundred tokens. ``tpot`` bounds that mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from feather_sglang.errors import FeatherError, quoted

# Mooncake (arXiv 2407.00079, section 2): times what a lone request takes.
NAMED = {"mooncake": "ttft=10x,tbt=5x"}
SHARE = 0.95  # of the requests that must meet it at a rate that is sustained


class Timing(NamedTuple):
    """Seconds to the first token, within which 99% of the further gaps lie, and a further token on average."""

    ttft: float
    tbt: float = 0.0
    tpot: float = 0.0

    @classmethod
    def of(cls, ttft: float, gaps: Sequence[float] | np.ndarray) -> Timing:
        """From the gaps of a request, in seconds; one with a single token has none."""
        values = np.asarray(gaps, dtype=float)
        if not len(values):
            return cls(ttft)
        place = len(values) - 1 - len(values) // 100
        return cls(ttft, float(np.partition(values, place)[place]), float(values.mean()))


class Bound(NamedTuple):
    """The upper limit of a time: seconds, or a multiple of the request's time alone on an idle server."""

    most: float
    relative: bool = False

    def holds(self, seconds: float, idle: float | None) -> bool:
        """Whether a time is within it."""
        if not self.relative:
            return seconds <= self.most
        return idle is not None and seconds <= self.most * idle


@dataclass(frozen=True)
class SLO:
    """Bounds that a request meets all together; None: not bounded. `text` is how the user wrote it."""

    text: str
    ttft: Bound | None = None
    tbt: Bound | None = None
    tpot: Bound | None = None

    def met(self, timing: Timing, idle: Timing | None = None) -> bool:
        """Whether a request with this timing meets it; `idle` is what the request takes alone."""
        return not any(self.missed(timing, idle))

    def missed(self, timing: Timing, idle: Timing | None = None) -> tuple[bool, ...]:
        """Whether each bound, in the order of a timing, is missed; one that is not there is not."""
        pairs = zip((self.ttft, self.tbt, self.tpot), timing, idle or (None,) * 3, strict=True)
        return tuple(bound is not None and not bound.holds(seconds, alone) for bound, seconds, alone in pairs)


def parse(text: str) -> SLO:
    """Read ``ttft=SECONDS,tbt=MS,tpot=MS`` (any of them; ``10x``: times an idle server's) or a name of `NAMED`."""
    bounds: dict[str, Bound] = {}
    for pair in NAMED.get(text, text).split(","):
        key, _, value = (part.strip() for part in pair.partition("="))
        relative = value.endswith("x")
        try:
            most = float(value.removesuffix("x"))
        except ValueError:
            most = math.nan
        if key not in ("ttft", "tbt", "tpot") or key in bounds or not 0 < most < math.inf:
            raise FeatherError(
                f"--slo {quoted(text, 100)}: expected ttft=SECONDS, tbt=MS and tpot=MS, each once and more than 0 "
                f"(10x: times an idle server's), or {', '.join(NAMED)}"
            )
        bounds[key] = Bound(most if relative or key == "ttft" else most / 1e3, relative)
    return SLO(text, **bounds)


def judge(
    slo: SLO | None, timings: Sequence[Timing], idle: Sequence[Timing] | None, requests: int, seconds: float
) -> dict[str, Any]:
    """Judge a run: fields of ``RunSummary``; None is what nobody asked for, or what was not known.

    Parameters
    ----------
    timings : of the requests that came to their end.
    idle : what each of them takes alone, in the same order; None: not known.
    requests : all that were sent; who did not come to an end has not met the SLO.
    seconds : of the whole run.
    """
    share = goodput = p50 = p99 = None
    missed: dict[str, float | None] = dict.fromkeys(Timing._fields)
    if slo is not None:
        misses = [slo.missed(*pair) for pair in zip(timings, idle or (None,) * len(timings), strict=True)]
        met = sum(not any(one) for one in misses)
        for place, name in enumerate(Timing._fields):
            if getattr(slo, name) is not None:
                missed[name] = sum(one[place] for one in misses) / requests if requests else 0.0
        share, goodput = met / requests if requests else 0.0, met / seconds if seconds else 0.0
    if idle and all(alone.ttft > 0 for alone in idle):
        slowdowns = [timing.ttft / alone.ttft for timing, alone in zip(timings, idle, strict=True)]
        p50, p99 = (float(value) for value in np.percentile(slowdowns, [50, 99]))
    return {
        "slo_share": share,
        **{f"slo_missed_{name}": value for name, value in missed.items()},
        "goodput": goodput,
        "slowdown_p50": p50,
        "slowdown_p99": p99,
    }


def sustained(shares: Iterable[tuple[float, float | None]]) -> float | None:
    """The largest rate at which, and below which wherever it was tried, enough requests meet the SLO.

    The shares are pairs (rate, share of requests that met it). None where already the lowest rate is too much.
    """
    best = None
    for rate, share in sorted(shares, key=lambda pair: pair[0]):
        if share is None or share < SHARE:
            break
        best = rate
    return best


def enough(shares: Iterable[tuple[float, float | None]]) -> int | None:
    """The smallest number of servers with which, and with more wherever it was tried, enough requests meet the SLO.

    The shares are pairs (servers, share of requests that met it). None where already the largest is too few.
    """
    best = sustained((-count, share) for count, share in shares)
    return None if best is None else -int(best)
