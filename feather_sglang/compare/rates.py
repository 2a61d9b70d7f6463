"""One comparison at several rates: what its runs are called, and what they say of an SLO together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from feather_sglang.replay.traces import Trace
from feather_sglang.report.summary import RunSummary
from feather_sglang.slo import SHARE, SLO, sustained

Shares = dict[str, list[tuple[float, float | None]]]  # policy -> (requests a second, share within the SLO)


def labels_of(names: Sequence[str], scales: Sequence[float]) -> dict[tuple[float, str], str]:
    """The label of each run, by rate scale and policy: the policy itself where there is one rate."""
    return {(scale, name): f"{name} @{scale:g}x" if len(scales) > 1 else name for scale in scales for name in names}


def shares_of(summaries: Mapping[tuple[float, str], RunSummary], traces: Mapping[float, Trace]) -> Shares:
    """What share of its requests each policy served within the SLO, by rate."""
    shares: Shares = {}
    for (scale, name), summary in summaries.items():
        shares.setdefault(name, []).append((round(traces[scale].rate, 4), summary.slo_share))
    return shares


def goodput_facts(slo: SLO | None, traces: Mapping[float, Trace], shares: Shares) -> dict[str, Any]:
    """What a results file says of the SLO and the rates; nothing where there was neither."""
    facts: dict[str, Any] = {"slo": slo.text} if slo is not None else {}
    if len(traces) > 1:
        facts["rates"] = {f"{scale:g}": round(trace.rate, 4) for scale, trace in traces.items()}
    if slo is not None and len(traces) > 1:
        facts["sustained"] = {"share": SHARE, "rates": {name: sustained(pairs) for name, pairs in shares.items()}}
    return facts
