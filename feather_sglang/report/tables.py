"""Runs side by side, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from feather_sglang.report.summary import RunSummary
from feather_sglang.slo import SHARE, sustained


class Figure(NamedTuple):
    """A row of the table: its field, name, format, and whether more is better (None: neither)."""

    field: str
    name: str
    form: str
    more_is_better: bool | None = None


FIGURES = (
    Figure("output_tok_s", "output tok/s", "{:,.0f}", True),
    Figure("ttft_mean", "TTFT mean s", "{:.2f}", False),
    Figure("ttft_p50", "TTFT p50 s", "{:.2f}", False),
    Figure("ttft_p99", "TTFT p99 s", "{:.2f}", False),
    Figure("tbt_mean_ms", "TBT mean ms", "{:.1f}", False),
    Figure("tbt_p50_ms", "TBT p50 ms", "{:.1f}", False),
    Figure("tbt_p99_ms", "TBT p99 ms", "{:.1f}", False),
    Figure("e2e_mean", "E2E mean s", "{:.2f}", False),
    Figure("e2e_p50", "E2E p50 s", "{:.2f}", False),
    Figure("e2e_p99", "E2E p99 s", "{:.2f}", False),
    Figure("mean_batch", "mean batch", "{:.0f}", None),
    Figure("cache_hit", "cache hit", "{:.1%}", True),
    Figure("scheduler_share", "scheduler CPU", "{:.1%}", False),
    Figure("gpu_busy", "GPU busy", "{:.1%}", None),
    Figure("max_wait", "max wait s", "{:.1f}", False),
    Figure("retractions", "retractions", "{:,.0f}", False),
    Figure("stops", "stops", "{:,.0f}", None),
)
# Shown where they were asked for; the first two are those of an SLO.
SLO_FIGURES = (
    Figure("slo_share", "within the SLO", "{:.1%}", True),
    Figure("goodput", "goodput requests/s", "{:.2f}", True),
    Figure("slowdown_p50", "TTFT slowdown p50", "{:.1f}x", False),
    Figure("slowdown_p99", "TTFT slowdown p99", "{:.1f}x", False),
)
# A replay does not follow how full the pool is, and times all of scheduling; a server times admission apart from the
# rest of its scheduler's process.
SERVER_FIGURES = (
    *FIGURES[:12],
    Figure("admission_share", "admission CPU", "{:.1%}", False),
    Figure("admission_us", "admission us/round", "{:,.0f}", False),
    Figure("scheduler_share", "scheduler process CPU", "{:.1%}", False),
    *FIGURES[14:-2],
    Figure("kv_mean", "KV use mean", "{:.0%}", None),
    Figure("kv_peak", "KV use peak", "{:.0%}", None),
    FIGURES[13],
    Figure("dram_use", "DRAM bandwidth used", "{:.0%}", None),
    Figure("sm_ghz", "GPU clock GHz", "{:.2f}", None),
    Figure("watt", "GPU power W", "{:.0f}", None),
    *FIGURES[-2:],
)


def comparison(summaries: Sequence[RunSummary], title: str = "", figures: Sequence[Figure] = FIGURES) -> Table:
    """A column per run; the best of each figure is bold, throughput also stands as a ratio to the first run.

    What a run could not tell is a dash; the figures of an SLO follow where one was given.
    """
    if any(summary.slo_share is not None for summary in summaries):
        figures = (*figures, *SLO_FIGURES)
    table = Table(title=escape(title), title_justify="left")
    table.add_column("", no_wrap=True)
    for summary in summaries:
        table.add_column(escape(summary.policy), justify="right", overflow="fold")
    base = summaries[0].output_tok_s if summaries else 0.0
    for figure in figures:
        values = [getattr(summary, figure.field) for summary in summaries]
        known = [value for value in values if value is not None]
        best = None if figure.more_is_better is None else (max if figure.more_is_better else min)(known, default=None)
        cells = ["-" if value is None else figure.form.format(value) for value in values]
        if best is not None and len(set(known)) > 1:
            cells = [f"[bold]{c}[/bold]" if v == best else c for c, v in zip(cells, values, strict=True)]
        table.add_row(figure.name, *cells)
        if figure.field == "output_tok_s":
            table.add_row(f"  to {escape(summaries[0].policy)}", *[f"{v / base:.2f}x" if base else "" for v in values])
    return table


def sweep(shares: Mapping[str, Sequence[tuple[float, float | None]]], slo: str) -> Table:
    """A row per policy: the share of requests within the SLO at each rate, and the largest rate that is sustained.

    Parameters
    ----------
    shares : (requests a second, share) by policy; None: not measured.
    """
    table = Table(title=escape(f"requests within the SLO {slo}, by requests a second"), title_justify="left")
    table.add_column("", no_wrap=True)
    rates = sorted({rate for pairs in shares.values() for rate, _ in pairs})
    for rate in rates:
        table.add_column(f"{rate:.3g}/s", justify="right")
    table.add_column(f"{SHARE:.0%} up to", justify="right")
    for policy, pairs in shares.items():
        known = dict(pairs)
        cells = ["-" if known.get(rate) is None else f"{known[rate]:.1%}" for rate in rates]
        most = sustained(pairs)
        table.add_row(escape(policy), *cells, "none of them" if most is None else f"{most:.3g}/s")
    return table


def grid(rows: Sequence[Sequence[str]], gap: str = "  ") -> str:
    """A table of fixed-width columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        cells = [cell.rjust(widths[i]) if i else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        lines.append(gap.join(cells).rstrip())
    return "\n".join(lines)
