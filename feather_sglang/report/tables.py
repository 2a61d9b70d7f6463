"""Tables of runs side by side, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from feather_sglang.report.summary import Figure, RunSummary, figures
from feather_sglang.slo import SHARE, enough, sustained

FIGURES = figures(
    *("output_tok_s", "ttft_mean", "ttft_p50", "ttft_p99", "tbt_mean_ms", "tbt_p50_ms", "tbt_p99_ms"),
    *("e2e_mean", "e2e_p50", "e2e_p99", "mean_batch", "cache_hit"),
    *("scheduler_share", "gpu_busy", "max_wait", "retractions", "stops"),
)
# Shown where they were asked for; the first two are those of an SLO.
MISSED = figures("slo_missed_ttft", "slo_missed_tbt", "slo_missed_tpot")
SLO_FIGURES = (*figures("slo_share"), *MISSED, *figures("goodput", "slowdown_p50", "slowdown_p99"))
BEST = "*"  # stands before the best of a row: a pipe shows nothing bold
FLEET_FIGURES = figures("imbalance")  # shown where there are several servers
# A replay does not follow how full the pool is, and times all of scheduling; a server times admission apart from the
# rest of its scheduler's process.
SERVER_FIGURES = (
    *FIGURES[:12],
    *figures("admission_share", "admission_us"),
    FIGURES[12]._replace(name="scheduler process CPU"),
    *figures("max_wait", "kv_mean", "kv_peak", "gpu_busy", "dram_use", "sm_ghz", "watt", "retractions", "stops"),
)


def comparison(summaries: Sequence[RunSummary], title: str = "", figures: Sequence[Figure] = FIGURES) -> Table:
    """A column per run; the best of each figure is bold and marked, throughput also stands as a ratio to the first run.

    What a run could not tell is a dash; the figures of an SLO follow where one was given.
    """
    if any(summary.slo_share is not None for summary in summaries):
        figures = (*figures, *SLO_FIGURES)
    if any(summary.imbalance is not None for summary in summaries):
        figures = (*figures, *FLEET_FIGURES)
    table = Table(title=escape(title), title_justify="left")
    table.add_column("", no_wrap=True)
    for summary in summaries:
        table.add_column(escape(summary.policy), justify="right", overflow="fold")
    base = summaries[0].output_tok_s if summaries else 0.0
    for figure in figures:
        values = [getattr(summary, figure.field) for summary in summaries]
        known = [value for value in values if value is not None]
        if not known and figure in MISSED:  # a bound that nobody gave
            continue
        best = None if figure.more_is_better is None else (max if figure.more_is_better else min)(known, default=None)
        cells = ["-" if value is None else figure.form.format(value) for value in values]
        if best is not None and len({figure.form.format(value) for value in known}) > 1:
            cells = [f"[bold]{BEST}{cell}[/bold]" if cell == figure.form.format(best) else cell for cell in cells]
        table.add_row(figure.name, *cells)
        if figure.field == "output_tok_s":
            table.add_row(f"  to {escape(summaries[0].policy)}", *[f"{v / base:.2f}x" if base else "" for v in values])
    return table


def verdict(summaries: Sequence[RunSummary]) -> str | None:
    """Which run is better than the first, in a sentence; None where there is nothing to compare.

    With an SLO, the one that serves most within it; else, of those that lose no more than 1% of throughput and 10% of
    the p99 of TTFT, the one with the lowest mean.
    """
    if len(summaries) < 2:
        return None
    base, *others = summaries
    if base.slo_share is not None:
        best = max(others, key=lambda one: (one.slo_share or 0.0, one.output_tok_s))
        if (share := best.slo_share or 0.0) <= base.slo_share:
            return f"no policy serves more within the SLO than {base.policy} ({base.slo_share:.1%})"
        told = f"{best.policy} serves most within the SLO: {share:.1%}, {base.policy} {base.slo_share:.1%}"
        return (
            f"{told}; at {best.output_tok_s / base.output_tok_s:.2f}x its output tok/s" if base.output_tok_s else told
        )
    if not base.ttft_mean or not base.ttft_p99:
        return None
    kept = [
        (one.ttft_mean / base.ttft_mean, one.policy)
        for one in others
        if one.ttft_mean is not None and one.ttft_p99 is not None and one.ttft_p99 <= 1.1 * base.ttft_p99
        if one.output_tok_s >= 0.99 * base.output_tok_s
    ]
    ratio, name = min(kept, default=(1.0, ""))
    within = "with 0.99x of its output tok/s or more and 1.1x of its TTFT p99 or less"
    if ratio >= 1:
        return f"no policy has a lower mean TTFT than {base.policy} {within}"
    return f"{name} has the lowest mean TTFT, {ratio:.2f}x that of {base.policy}, {within}"


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


def sizes(shares: Mapping[str, Sequence[tuple[float, float | None]]], slo: str) -> Table:
    """A row per name: the share of requests within the SLO by number of replicas, and the smallest that is enough."""
    table = Table(title=escape(f"requests within the SLO {slo}, by replicas"), title_justify="left")
    table.add_column("", no_wrap=True)
    counts = sorted({count for pairs in shares.values() for count, _ in pairs})
    for count in counts:
        table.add_column(str(count), justify="right")
    table.add_column(f"{SHARE:.0%} from", justify="right")
    for name, pairs in shares.items():
        known = dict(pairs)
        cells = ["-" if known.get(count) is None else f"{known[count]:.1%}" for count in counts]
        least = enough(pairs)
        table.add_row(escape(name), *cells, "none of them" if least is None else str(least))
    return table


def grid(rows: Sequence[Sequence[str]], gap: str = "  ") -> str:
    """A table of fixed-width columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        cells = [cell.rjust(widths[i]) if i else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        lines.append(gap.join(cells).rstrip())
    return "\n".join(lines)
