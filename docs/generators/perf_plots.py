"""Plots of the performance pages and README: SVG whose bytes depend on the result files alone."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import perf_kernel
import perf_promise
import perf_replay
import perf_servers
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from perf_results import evicts

from feather_sglang.replay.workloads import WORKLOADS

STYLE = {
    "svg.hashsalt": "feather", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 9,
    "figure.facecolor": "white", "savefig.facecolor": "white", "axes.facecolor": "white", "text.color": "#1f2328",
    "axes.labelcolor": "#1f2328", "axes.edgecolor": "#8c959f", "xtick.color": "#1f2328", "ytick.color": "#1f2328",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid.axis": "x", "grid.color": "#d0d7de",
    "axes.axisbelow": True, "legend.frameon": False,
}  # fmt: skip
OURS, GREYS = "#0969da", ("#8c959f", "#bf8700", "#bc4c00", "#6639ba")
WIDTH = 5.0  # inches: read on a phone without zooming
NAMES = {"pat": "pat", "fa3-planned": "FlashAttention-3", "fa3": "FlashAttention-3", "flashinfer": "FlashInfer",
         "cascade": "FlashInfer cascade", "triton": "Triton"}  # fmt: skip


def svg(figure: Figure) -> str:
    """The figure as text."""
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    return "\n".join(line.rstrip() for line in stream.getvalue().decode().splitlines()) + "\n"


def axes(height: float, rows: int = 1, columns: int = 1, **more: Any) -> tuple[Figure, Any]:
    """A figure of the page's width."""
    return pyplot.subplots(rows, columns, figsize=(WIDTH, height), layout="constrained", **more)


def bars(
    axis: Any, labels: Sequence[str], series: Mapping[str, Sequence[float | None]], colours: Sequence[str]
) -> None:
    """Horizontal bars, a group a label, first label on top; None leaves a gap."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(labels))]
        axis.barh(places, [value or 0.0 for value in values], width, label=name, color=colours[number])
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.grid(True)
    axis.tick_params(axis="y", length=0)


def kernel(folder: Path) -> str:
    """Time over floor of every system on PAT's trees."""
    figure, axis = axes(4.4)
    for number, (name, points) in enumerate(perf_kernel.plotted(folder).items()):
        colour = OURS if name == "pat" else GREYS[number - 1]
        marker = "o" if name == "pat" else "s^v"[number - 1]
        axis.plot([x for _, x in points], [tree for tree, _ in points], marker, color=colour, label=NAMES[name], ms=5)
    axis.axvline(1, color="#1f2328", lw=1)
    axis.set_xscale("log", base=2)
    axis.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axis.set_yticks(range(1, 21))
    axis.invert_yaxis()
    axis.grid(True)
    axis.set_xlabel("time over the floor, H200, 32/8 heads (left is faster)")
    axis.set_ylabel("PAT's prefix trees, by number")
    figure.legend(loc="outside upper center", ncols=2)
    return svg(figure)


def backends(folder: Path) -> str:
    """Decode throughput of large steady batches, all backends."""
    found = perf_servers.by_backend(folder, perf_servers.DECODE)
    cases = [case for case in found if case.startswith("decode:500")]
    figure, axis = axes(5.2)
    series = {
        NAMES[name]: [found[case][name].tok_s / 1e3 if name in found[case] else None for case in cases]
        for name in perf_servers.BACKENDS
    }
    bars(axis, [perf_servers.shown(case).removeprefix("500 requests, ") for case in cases], series, (OURS, *GREYS))
    axis.set_xlabel("thousand output tokens/s, 500 requests decoding, H200")
    figure.legend(loc="outside upper center", ncols=2)
    return svg(figure)


def policies(folder: Path) -> str:
    """Throughput to fcfs of each policy, a panel a backend."""
    found = [perf_servers.policies(folder, name, perf_servers.POLICIES[name]) for name in ("pat", "fa3")]
    figure, panels = axes(6.0, rows=2)
    for axis, one in zip(panels, found, strict=True):
        labels = [case.partition(":")[0] for case in one.runs]
        series = {
            "feather" if name == one.names[-1] else name: [
                runs[name].tok_s / runs["fcfs"].tok_s if name in runs else None for runs in one.runs.values()
            ]
            for name in reversed(one.names)
            if name != "fcfs"
        }
        bars(axis, labels, series, (OURS, *GREYS))
        axis.axvline(1, color="#1f2328", lw=1)
        axis.set_xlabel(f"output tokens/s to fcfs's, {one.attention}, H200")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return svg(figure)


DRAWN = ("output_tok_s", "ttft_mean", "ttft_p99", "tbt_p99_ms")
UNITS = {"output_tok_s": "", "ttft_mean": ", s", "ttft_p99": ", s", "tbt_p99_ms": ", ms"}


def agreement(folder: Path) -> str:
    """Replay against server, a panel a figure."""
    found = perf_replay.measured(folder)
    figure, panels = axes(4.8, rows=2, columns=2)
    for axis, name in zip(panels.flat, DRAWN, strict=True):
        for attention, colour in zip(("pat", "fa3", "flashinfer"), (OURS, *GREYS), strict=False):
            points = [(one.server[name], one.replay[name]) for one in found if one.attention == attention]
            axis.plot(
                [server for server, _ in points],
                [replay for _, replay in points],
                "o",
                ms=3.5,
                color=colour,
                label=NAMES[attention],
                alpha=0.8,
            )
        values = [value for one in found for value in (one.server[name], one.replay[name])]
        ends = [min(values) / 1.3, max(values) * 1.3]
        axis.plot(ends, ends, color="#1f2328", lw=1)
        axis.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="#d0d7de", lw=0)
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_locator(LogLocator(subs=(1.0,) if ends[1] / ends[0] > 50 else (1.0, 3.0)))
            scale.set_major_formatter(lambda value, _: f"{value:,g}")
            scale.set_minor_formatter(NullFormatter())
        axis.set_title(perf_replay.NAMES[name] + UNITS[name], fontsize=9)
    figure.supxlabel("server, H200", fontsize=9)
    figure.supylabel("replay, no GPU (band: 10%)", fontsize=9)
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return svg(figure)


def points(
    labels: Sequence[str], series: Mapping[str, Sequence[float | None]], colours: Sequence[str], label: str
) -> tuple[Figure, Any]:
    """A row a label, a mark a series, on a logarithmic axis; None leaves a mark out."""
    figure, axis = axes(1.3 + 0.26 * len(labels))
    for number, (name, values) in enumerate(series.items()):
        marks = [(value, place) for place, value in enumerate(values) if value is not None]
        axis.plot([x for x, _ in marks], [y for _, y in marks], "os^v"[number], color=colours[number], label=name, ms=5)
    axis.set_xscale("log")
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.grid(True)
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel(label)
    axis.xaxis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside upper center", ncols=min(3, len(series)))
    return figure, axis


def real_traffic(folder: Path) -> str:
    """feather's times to fcfs's on each slice of a real trace."""
    rows, found = list(perf_replay.load(folder, perf_replay.TAIL)), perf_replay.tail_ratios(folder)["feather"]
    names = {
        "TTFT mean to fcfs's": "mean TTFT",
        "TTFT p99 to fcfs's": "p99 TTFT",
        "longest wait to fcfs's": "longest wait",
    }
    series = {text: [one[key] for one in found] for key, text in names.items()}
    figure, axis = points(rows, series, (OURS, GREYS[0], GREYS[2]), "feather to fcfs (left is better)")
    axis.axvline(1, color="#1f2328", lw=1)
    ticks = [0.4, 0.6, 0.8, 1.0, 1.4]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    return svg(figure)


def between_tokens(folder: Path) -> str:
    """The longest gap of a request by load: without a bound, with one, and with SGLang's best setting."""
    flag = "feather, tbt 250"
    found = {name: runs for name, runs in perf_promise.all_runs(folder).items() if flag in runs}
    static = [perf_promise.best_static(runs) for runs in found.values()]
    series = {
        "--feather-tbt 250": [runs[flag].longest_ms / 1e3 for runs in found.values()],
        "no bound": [runs[perf_promise.PLAIN].longest_ms / 1e3 for runs in found.values()],
        "SGLang's best": [one.longest_ms / 1e3 if one else None for one in static],
    }  # fmt: skip
    labels = []
    for name in found:
        graphs = ", graphs" if "CUDA graphs" in name else ""
        pool = ", 500K" if graphs and "500,000" in name and name.startswith("W") else ""
        labels.append(name.partition(", ")[0].removeprefix("Mooncake's ") + graphs + pool)
    figure, axis = points(labels, series, (OURS, GREYS[2], GREYS[0]), "longest gap, seconds (left is better)")
    ticks = [0.2, 0.5, 1, 2, 5, 10, 20]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xlim(0.15, 25)
    return svg(figure)


def readable(case: str) -> str:
    """A workload in words."""
    keywords = WORKLOADS[case.partition(":")[0]].keywords
    if "groups" not in keywords:
        return "nothing shared"
    prefixes = f"{keywords['groups']} prefixes" if keywords["groups"] > 1 else "1 prefix"
    return f"{prefixes} of {keywords['prefix_tokens'] // 1000}K tokens"


def readme(folder: Path) -> str:
    """Stock SGLang with its best backend and policy, with pat, and with both parts of this project."""
    ours = perf_servers.policies(folder, "pat", perf_servers.POLICIES["pat"])
    others = [
        perf_servers.policies(folder, name, files) for name, files in perf_servers.POLICIES.items() if name != "pat"
    ]
    stock = {
        case: [
            (one.runs[case][name].tok_s, f"{one.attention}, {name}")
            for one in others
            for name in one.names[:-1]
            if name in one.runs[case]
        ]
        for case in ours.runs
        if all(case in one.runs for one in others)
    }
    cases = list(stock)
    figure, axis = axes(3.9)
    series = {
        "pat + feather": [ours.runs[case][ours.names[-1]].tok_s / 1e3 for case in cases],
        "pat, fcfs": [ours.runs[case]["fcfs"].tok_s / 1e3 for case in cases],
        "SGLang's fastest": [max(stock[case])[0] / 1e3 for case in cases],
    }
    labels = []
    for case in cases:
        evicting = "\nthat fill the KV pool" if evicts(case, ours.runs[case]["fcfs"].kv_tokens) else ""
        labels.append(f"{readable(case)}{evicting}\nSGLang: {max(stock[case])[1]}")
    bars(axis, labels, series, (OURS, "#80ccff", GREYS[0]))
    for patches in axis.containers:
        axis.bar_label(patches, fmt="%.1f", padding=2, fontsize=8)
    axis.margins(x=0.1)
    axis.set_xlabel("thousand output tokens/s, one H200")
    figure.legend(loc="outside upper center", ncols=3)
    return svg(figure)


PLOTS = {
    "performance/kernel.svg": kernel,
    "performance/backends.svg": backends,
    "performance/policies.svg": policies,
    "performance/agreement.svg": agreement,
    "performance/real_traffic.svg": real_traffic,
    "performance/between_tokens.svg": between_tokens,
    "readme_chart.svg": readme,
}


def all_plots(folder: Path) -> dict[str, str]:
    """Every plot by its path under docs/."""
    with pyplot.rc_context(STYLE):
        return {name: draw(folder) for name, draw in PLOTS.items()}
