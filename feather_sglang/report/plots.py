"""Plots of runs side by side."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feather_sglang.file_writing import replace_bytes


def new_axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    """A figure and its axes, for `save`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def save(figure: Any, path: Path) -> Path:
    """Write a finished figure whole, in the format that its name says, and close it."""
    from matplotlib import pyplot

    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:], dpi=120)
    pyplot.close(figure)
    replace_bytes(path, image.getvalue(), "plot")
    return path


def throughput(rates: Mapping[str, float], path: Path) -> Path:
    """Bars of output tokens/s by policy."""
    figure, axes = new_axes("Output throughput", "", "tokens/s")
    bars = axes.bar(list(rates), list(rates.values()), color=[f"C{i}" for i in range(len(rates))])
    axes.bar_label(bars, fmt="{:,.0f}")
    axes.set_ylim(0, 1.12 * max(rates.values(), default=1))
    return save(figure, path)


def batch_size(batches: Mapping[str, Sequence[tuple[float, int, float]]], path: Path) -> Path:
    """Rows of the decode batch over time, by policy; steps are (clock s, rows, seconds)."""
    figure, axes = new_axes("Decode batch over time", "time (s)", "rows")
    for policy, steps in batches.items():
        every = max(1, len(steps) // 2000)
        axes.plot([s[0] for s in steps[::every]], [s[1] for s in steps[::every]], label=policy, linewidth=1)
    axes.legend()
    return save(figure, path)


def latency(latencies: Mapping[str, Sequence[float]], path: Path) -> Path:
    """Distribution of the end-to-end time, by policy."""
    figure, axes = new_axes("End-to-end latency", "time (s)", "share of requests")
    for policy, values in latencies.items():
        ordered = np.sort(np.asarray(values))
        axes.plot(ordered, np.arange(1, len(ordered) + 1) / max(len(ordered), 1), label=policy)
    axes.set_ylim(0, 1)
    axes.legend()
    return save(figure, path)


def learning_curve(values: Sequence[float], baseline: float, path: Path) -> Path:
    """Output tokens/s of the policy after each training round beside never stopping."""
    figure, axes = new_axes("Training", "round", "output tokens/s")
    axes.plot(range(1, len(values) + 1), values, marker="o", label="policy")
    axes.axhline(baseline, color="C1", linestyle="--", label="never stop")
    axes.legend()
    return save(figure, path)
