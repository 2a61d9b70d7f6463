"""Tables of runs side by side, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from feather_sglang.report.summary import Figure, RunSummary, figures
from feather_sglang.slo import SHARE, sustained

FIGURES = figures(
    *("output_tok_s", "ttft_mean", "ttft_p50", "ttft_p99", "tbt_mean_ms", "tbt_p50_ms", "tbt_p99_ms"),
    *("e2e_mean", "e2e_p50", "e2e_p99", "mean_batch", "cache_hit"),
    *("scheduler_share", "gpu_busy", "max_wait", "retractions", "stops"),
)
# Shown where they were asked for; the first two are those of an SLO.
SLO_FIGURES = figures("slo_share", "goodput", "slowdown_p50", "slowdown_p99")
# A replay does not follow how full the pool is, and times all of scheduling; a server times admission apart from the
# rest of its scheduler's process.
SERVER_FIGURES = (
    *FIGURES[:12],
    *figures("admission_share", "admission_us"),
    FIGURES[12]._replace(name="scheduler process CPU"),
    *figures("max_wait", "kv_mean", "kv_peak", "gpu_busy", "dram_use", "sm_ghz", "watt", "retractions", "stops"),
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

    The shares are pairs (requests a second, share) by policy; a share is None where it was not measured.
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
