"""One comparison at several rates: the names of its runs, and the rate that each policy sustains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from feather_sglang.replay.traces import Trace
from feather_sglang.report import plots
from feather_sglang.report.summary import RunSummary
from feather_sglang.report.tables import FIGURES, Figure, comparison, sweep, verdict
from feather_sglang.slo import SHARE, SLO, sustained

Columns = Mapping[str, RunSummary]  # of the runs with figures, by label


class Rates:
    """The runs of a comparison: each of these names at each of the rates.

    Attributes
    ----------
    trace : at the first of the rates.
    labels : of each run, by rate scale and name: the name itself where there is one rate.
    """

    def __init__(self, names: Sequence[str], traces: Mapping[float, Trace], slo: SLO | None) -> None:
        self.traces, self.slo, self.several = traces, slo, len(traces) > 1
        self.trace = next(iter(traces.values()))
        self.labels = {(scale, name): self.label(scale, name) for scale in traces for name in names}

    def label(self, scale: float, name: str) -> str:
        """What a run under that name is called."""
        return f"{name} @{scale:g}x" if self.several else name

    def shares(self, columns: Columns) -> dict[str, list[tuple[float, float | None]]]:
        """(requests a second, share of them within the SLO) by name."""
        shares: dict[str, list[tuple[float, float | None]]] = {}
        for (scale, name), label in self.labels.items():
            if label in columns:
                shares.setdefault(name, []).append((round(self.traces[scale].rate, 4), columns[label].slo_share))
        return shares

    def facts(self, columns: Columns) -> dict[str, Any]:
        """What a results file says of the SLO and the rates; nothing where there was neither."""
        facts: dict[str, Any] = {"slo": self.slo.text} if self.slo is not None else {}
        if self.several:
            facts["rates"] = {f"{scale:g}": round(trace.rate, 4) for scale, trace in self.traces.items()}
        if self.slo is not None and self.several:
            rates = {name: sustained(pairs) for name, pairs in self.shares(columns).items()}
            facts["sustained"] = {"share": SHARE, "rates": rates}
        return facts

    def show(
        self,
        console: Console,
        columns: Columns,
        title: str,
        figures: Sequence[Figure] = FIGURES,
        beside: Sequence[RunSummary] = (),
    ) -> None:
        """Print a table and a verdict for each rate, then which rates are sustained within the SLO."""
        for scale in self.traces:
            found = [(name, label) for (at, name), label in self.labels.items() if at == scale and label in columns]
            at_rate = f", {scale:g}x the rate" if self.several else ""
            if found:
                of_rate = [replace(columns[label], policy=name) for name, label in found]
                console.print(comparison([*of_rate, *beside], title + at_rate, figures))
                if told := verdict(of_rate):
                    console.print(f"verdict{at_rate}: {told}", markup=False, soft_wrap=True)
        if self.slo is not None and self.several:
            console.print(sweep(self.shares(columns), self.slo.text))


def draw(
    out: Path,
    columns: Columns,
    batches: Mapping[str, Sequence[tuple[float, int, float]]],
    latencies: Mapping[str, Sequence[float]],
) -> None:
    """Write the plots of a comparison, by label."""
    plots.throughput({label: one.output_tok_s for label, one in columns.items()}, out / "throughput.png")
    plots.batch_size(batches, out / "batch_size.png")
    plots.latency(latencies, out / "latency.png")
