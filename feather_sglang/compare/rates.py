"""One comparison at several rates: the names of its runs, and the rate that each policy sustains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from feather_sglang.replay.traces import Trace
from feather_sglang.report import plots
from feather_sglang.report.summary import RunSummary
from feather_sglang.report.tables import FIGURES, Figure, comparison, sweep, verdict
from feather_sglang.slo import SHARE, SLO, sustained

Shares = dict[str, list[tuple[float, float | None]]]
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

    def heading(self, scale: float) -> str:
        """What the table of that rate's runs is called, after what all have in common."""
        return f", {scale:g}x the rate" if self.several else ""

    def shares(self, columns: Columns) -> Shares:
        """(`point`, share of the requests within the SLO) by name."""
        shares: Shares = {}
        for (scale, name), label in self.labels.items():
            if label in columns:
                shares.setdefault(name, []).append((self.point(scale), columns[label].slo_share))
        return shares

    def point(self, scale: float) -> float:
        """What the runs at that rate are compared by: requests a second."""
        return round(self.traces[scale].rate, 4)

    def facts(self, columns: Columns) -> dict[str, Any]:
        """What a results file says of the SLO and the rates; nothing where there was neither."""
        facts: dict[str, Any] = {"slo": self.slo.text} if self.slo is not None else {}
        return {**facts, **self.findings(self.shares(columns))} if self.several else facts

    def findings(self, shares: Shares) -> dict[str, Any]:
        """What a results file says of several rates."""
        facts: dict[str, Any] = {"rates": {f"{scale:g}": self.point(scale) for scale in self.traces}}
        if self.slo is not None:
            rates = {name: sustained(pairs) for name, pairs in shares.items()}
            facts["sustained"] = {"share": SHARE, "rates": rates}
        return facts

    def conclusion(self, shares: Shares, slo: str) -> Table:
        """Which of several rates are sustained within the SLO."""
        return sweep(shares, slo)

    def show(
        self,
        console: Console,
        columns: Columns,
        title: str,
        figures: Sequence[Figure] = FIGURES,
        beside: Sequence[RunSummary] = (),
    ) -> None:
        """Print a table and a verdict for each rate, then the conclusion where there are several and an SLO."""
        for scale in self.traces:
            found = [(name, label) for (at, name), label in self.labels.items() if at == scale and label in columns]
            if found:
                of_rate = [replace(columns[label], policy=name) for name, label in found]
                console.print(comparison([*of_rate, *beside], title + self.heading(scale), figures))
                if told := verdict(of_rate):
                    console.print(f"verdict{self.heading(scale)}: {told}", markup=False, soft_wrap=True)
        if self.slo is not None and self.several:
            console.print(self.conclusion(self.shares(columns), self.slo.text))


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
