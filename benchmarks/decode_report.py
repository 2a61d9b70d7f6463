"""The report of the decode benchmark: rows, geometric means over the floor, where a peer leads, the plot.

Pure functions of the JSON file, so that a report needs no GPU.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from decode_cases import grid

Record = dict[str, Any]
PEERS = ("fa3", "fa3-planned", "flashinfer", "cascade", "triton")
KINDS = ("warm", "flushed")
SHORT = {"fa3": "fa3", "fa3-planned": "fa3p", "flashinfer": "fi", "cascade": "casc", "feather": "feather"}


def short(system: str) -> str:
    """A column's head: ``feather-two-phase`` as ``two-phase``."""
    return SHORT.get(system, system.removeprefix("feather-").removeprefix("feather:"))


def time_us(record: Record, system: str, kind: str = "warm") -> float | None:
    return record["systems"].get(system, {}).get(f"{kind}_us")


def ours(records: Sequence[Record]) -> str | None:
    """The system that is compared with the peers: the default one, else the first of this package."""
    names = [name for record in records[:1] for name in record["systems"] if name.startswith("feather")]
    return "feather" if "feather" in names else next(iter(names), None)


def best_peer(record: Record, kind: str = "warm") -> tuple[str, float] | None:
    times = [(name, time_us(record, name, kind)) for name in PEERS]
    measured = [(name, value) for name, value in times if value is not None]
    return min(measured, key=lambda pair: pair[1]) if measured else None


def where(record: Record) -> str:
    return f"{record['tree']:>2} {record['heads']:>5} p{record['page_size']}"


def row_header(systems: Sequence[str]) -> str:
    """The line above the rows; ``x`` columns are times over the floor."""
    columns = [f"{short(name)[:9]:>9} {'x':>5}" for name in systems]
    return f"{'tree heads page':15} {'floor':>6} " + " ".join(columns) + f" {'MB':>6} {'best peer':>9} {'ours/it':>7}"


def row_line(record: Record, systems: Sequence[str], kind: str = "warm") -> str:
    """One case: floor, each system's us and ratio to it, MB by the plan's model, the best peer, ours over it."""
    floor = record["floor_us"]
    cells = []
    for name in systems:
        value = time_us(record, name, kind)
        cells.append(f"{'-':>9} {'':>5}" if value is None else f"{value:9.1f} {value / floor:5.2f}")
    own = ours([record])
    moved = record["systems"].get(own, {}).get("bytes_moved") if own else None
    peer, mine = best_peer(record, kind), time_us(record, own, kind) if own else None
    tail = f"{moved / 1e6:6.1f}" if moved else f"{'-':>6}"
    tail += f" {short(peer[0]) if peer else '-':>9}"
    tail += f" {mine / peer[1]:7.2f}" if peer and mine else f" {'-':>7}"
    return f"{where(record):15} {floor:6.1f} " + " ".join(cells) + " " + tail


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def groups(records: Sequence[Record]) -> dict[tuple[int, str], list[Record]]:
    """Records by page size and heads, in the order of the run."""
    found: dict[tuple[int, str], list[Record]] = defaultdict(list)
    for record in records:
        found[record["page_size"], record["heads"]].append(record)
    return found


def means(records: Sequence[Record], kind: str = "warm") -> str:
    """Geometric means of time over floor: a line a system, a column for page size and heads; (n) of fewer trees."""
    by_group = groups(records)
    systems = list(dict.fromkeys(name for record in records for name in record["systems"]))
    rows = [[f"{kind}: time / floor", *(f"p{page} {heads}" for page, heads in by_group)]]
    for name in systems:
        row = [name]
        for group in by_group.values():
            ratios = [value / record["floor_us"] for record in group if (value := time_us(record, name, kind))]
            mean = geometric_mean(ratios)
            partial = f" ({len(ratios)})" if len(ratios) < len(group) else ""
            row.append("-" if mean is None else f"{mean:.2f}{partial}")
        if any(cell != "-" for cell in row[1:]):
            rows.append(row)
    return grid(rows)


def markdown(records: Sequence[Record], page_size: int = 1, kind: str = "warm") -> str:
    """A table for the docs, of one page size: a line a tree, for each heads ours in us (x floor) and the best peer."""
    chosen = [record for record in records if record["page_size"] == page_size]
    heads = list(dict.fromkeys(record["heads"] for record in chosen))
    lines = [f"| tree | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    trees: dict[int, dict[str, Record]] = defaultdict(dict)
    for record in chosen:
        trees[record["tree"]][record["heads"]] = record
    for group in trees.values():
        cells = [_cell(group[name], kind) if name in group else "" for name in heads]
        lines.append(f"| `{next(iter(group.values()))['name']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(record: Record, kind: str) -> str:
    """``28 (3.5x) / 66 fi``; without a measurement, a dash."""
    own = ours([record])
    mine, peer = time_us(record, own, kind) if own else None, best_peer(record, kind)
    text = f"{mine:.0f} ({mine / record['floor_us']:.2f}x)" if mine else "-"
    return f"{text} / {peer[1]:.0f} {short(peer[0])}" if peer else text


def worst(records: Sequence[Record], kind: str = "warm") -> str:
    """The largest ratio of ours to each peer over all rows, and where it is."""
    own = ours(records)
    lines = []
    for peer in PEERS:
        ratios = [
            (mine / theirs, record)
            for record in records
            if own and (mine := time_us(record, own, kind)) and (theirs := time_us(record, peer, kind))
        ]
        if ratios:
            ratio, record = max(ratios, key=lambda pair: pair[0])
            mean = geometric_mean(ratio for ratio, _ in ratios)
            lines.append(f"{kind}: {own} / {peer}: worst {ratio:.2f} at {where(record)}; geometric mean {mean:.3f}")
    return "\n".join(lines)


def behind(records: Sequence[Record], kind: str = "warm", most: int = 30) -> str:
    """Every row in which a peer is ahead."""
    own = ours(records)
    rows = []
    for record in records:
        peer, mine = best_peer(record, kind), time_us(record, own, kind) if own else None
        if peer and mine and mine > peer[1]:
            ratio = mine / peer[1]
            rows.append((ratio, f"  {where(record)}: {mine:.1f} us, {peer[0]} {peer[1]:.1f} ({ratio:.2f})"))
    rows.sort(reverse=True)
    if not any(best_peer(record, kind) for record in records):
        return f"{kind}: no peer was measured"
    lines = [f"{kind}: a peer is ahead in {len(rows)} of {len(records)} rows", *(line for _, line in rows[:most])]
    if len(rows) > most:
        lines.append(f"  and {len(rows) - most} more, in the JSON file")
    return "\n".join(lines)


def accuracy(records: Sequence[Record]) -> str:
    """The largest relative error of each system's output."""
    largest: dict[str, float] = {}
    for record in records:
        for name, result in record["systems"].items():
            if "relative_error" in result:
                largest[name] = max(largest.get(name, 0.0), result["relative_error"])
    return "largest relative error: " + ", ".join(f"{short(name)} {error:.1e}" for name, error in largest.items())


def errors(records: Sequence[Record]) -> str:
    """What was not measured, by system and reason, and how often."""
    found: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        for name, result in record["systems"].items():
            if "error" in result:
                found[name, result["error"]].append(record)
    if not found:
        return "every system was measured in every case"
    return "not measured:\n" + "\n".join(
        f"  {name}: {error} ({len(cases)} cases, first {where(cases[0])})" for (name, error), cases in found.items()
    )


def summary(records: Sequence[Record]) -> str:
    """All of the above but the rows."""
    kinds = [kind for kind in KINDS if any(f"{kind}_us" in s for r in records for s in r["systems"].values())]
    parts: list[Callable[[Sequence[Record], str], str]] = [means, worst, behind]
    texts = [*(part(records, kind) for part in parts for kind in kinds), accuracy(records), errors(records)]
    return "\n\n".join(text for text in texts if text)


def plot(records: Sequence[Record], path: Path, kind: str = "warm", systems: Sequence[str] | None = None) -> None:
    """Bars of time over floor: a panel for heads and page size, a group of bars a tree."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_group = groups(records)
    present = list(dict.fromkeys(name for record in records for name in record["systems"]))
    names = list(systems) if systems else [name for name in present if name in PEERS or name == ours(records)]
    figure, axes = pyplot.subplots(
        len(by_group), 1, figsize=(12, 2.6 * len(by_group)), squeeze=False, sharex=True, layout="constrained"
    )
    for axis, ((page, heads), group) in zip(axes[:, 0], by_group.items(), strict=True):
        width = 0.8 / max(len(names), 1)
        for number, name in enumerate(names):
            bars = [
                (record["tree"] + (number - (len(names) - 1) / 2) * width, value / record["floor_us"])
                for record in group
                if (value := time_us(record, name, kind))
            ]
            if bars:
                axis.bar(*zip(*bars, strict=True), width, label=name)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_yscale("log", base=2)
        axis.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        axis.set_ylabel("time / floor")
        axis.set_title(f"{heads} heads, page size {page}, L2 {kind}", fontsize=10)
    axes[0, 0].legend(ncols=max(len(names), 1), fontsize=8, frameon=False)
    axes[-1, 0].set_xticks(sorted({record["tree"] for record in records}))
    axes[-1, 0].set_xlabel("tree")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
