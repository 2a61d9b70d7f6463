"""The decode kernel beside its peers: tables of the performance page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perf_results import PEERS, TreeTime, day, geometric_mean, get, load, trees
from perf_text import Section, command, table

PAT, H100, FP8 = "decode_h200.json", "decode_h100.json", "decode_h200_fp8.json"
SGLANG = "decode_h200_sglang.json"
SETS = {
    "PAT's 20 trees": PAT,
    "1-20 prompts,32-500 requests": "decode_h200_serving.json",
    "1-64 prompts,8-96 requests": "decode_h200_small.json",
    "long beside short": "decode_h200_mixed.json",
    "unlike lengths": "decode_h200_unlike.json",
    "1-32 long requests": "decode_h200_long.json",
}
HEADS = ("32/8", "64/8", "32/32", "16/8")
BEHIND, WORST = 1.01, 6  # a row is behind from 1% on; so many are listed
SYSTEMS = {"fa3": "FA3", "fa3-planned": "FA3", "flashinfer": "FlashInfer", "cascade": "cascade"}


def unshared(row: TreeTime) -> bool:
    """Requests with nothing in common: a tree of one level."""
    return "," not in row.name and "+" not in row.name and "~" not in row.name


def of_heads(rows: Sequence[TreeTime], heads: str) -> list[TreeTime]:
    """Those with pages of one token."""
    return [row for row in rows if row.heads == heads and row.page_size == 1]


def over_floor(rows: Sequence[TreeTime], system: str | None = None) -> str:
    """Geometric mean of time over floor, of this package or of a peer where every row has it."""
    times = [row.ours if system is None else row.peers.get(system) for row in rows]
    if any(time is None for time in times):
        return "-"
    return f"{geometric_mean(time / row.floor for time, row in zip(times, rows, strict=True) if time):.2f}"


def by_heads(folder: Path) -> str:
    """Geometric means over PAT's trees."""
    rows, older = trees(folder, PAT), trees(folder, H100)
    lines = []
    for heads in HEADS:
        mine, theirs = of_heads(rows, heads), of_heads(older, heads)
        if mine and theirs:
            lines.append([
                heads,
                f"**{geometric_mean(row.ratio for row in mine):.2f}**",
                over_floor(mine),
                *(over_floor(mine, peer) for peer in ("fa3-planned", "flashinfer")),
                f"{geometric_mean(row.ratio for row in theirs):.2f}",
            ])  # fmt: skip
    return table(["heads", "to best peer", "`pat`<br>/floor", "FA3", "FlashInfer", "H100: to best peer"], lines)


def by_set(folder: Path) -> str:
    """Geometric mean and worst row of each set of batches."""
    lines = []
    for name, file in SETS.items():
        rows = trees(folder, file)
        parts = {name: rows}
        if file == PAT:
            parts = {name: rows, "unshared": [row for row in rows if unshared(row)]}
        for label, some in parts.items():
            if some:
                behind = sum(row.ratio > BEHIND for row in some)
                mean, worst = geometric_mean(row.ratio for row in some), max(row.ratio for row in some)
                lines.append([label, str(len(some)), f"{mean:.2f}", f"{worst:.2f}", str(behind)])
    return table(["batches", "rows", "to best peer", "worst", "behind by >1%"], lines)


def with_fp8(folder: Path) -> str:
    """PAT's trees on an fp8 cache, beside a peer on it and this package on 16 bits."""
    records = get(load(folder, FP8), FP8, "records")
    times = [
        {name: get(record, FP8, "systems", name, "warm_us") for name in ("feather", "feather-16bit", "triton")}
        | {"floor": get(record, FP8, "floor_us")}
        for record in records
    ]

    def against(name: str) -> list[float]:
        return [time["feather"] / time[name] for time in times]

    cells = [f"{geometric_mean(against(name)):.2f} ({max(against(name)):.2f})" for name in ("triton", "feather-16bit")]
    row = [*cells, f"{geometric_mean(against('floor')):.2f}", str(len(times))]
    return table(["/Triton (worst)", "/16-bit `pat`", "/floor", "rows"], [row])


def of_sglang(folder: Path) -> str:
    """Every decode backend of SGLang's that runs here, to the floor."""
    records = get(load(folder, SGLANG), SGLANG, "records")
    times: dict[str, list[float]] = {}
    for record in records:
        for name, figures in get(record, SGLANG, "systems").items():
            if "warm_us" in figures:
                times.setdefault(name, []).append(figures["warm_us"] / get(record, SGLANG, "floor_us"))
    means = {name: geometric_mean(ratios) for name, ratios in times.items() if len(ratios) == len(records)}
    cells = (
        f"{'pat' if name == 'feather' else name} {means[name]:.2f}" for name in sorted(means, key=means.__getitem__)
    )
    return f"SGLang's backends /floor, pages of 32: {', '.join(cells)}."


def losses(folder: Path) -> tuple[str, int]:
    """The worst rows of all sets, and how many are behind."""
    behind = sorted(
        (row for file in (*SETS.values(), H100) for row in trees(folder, file) if row.ratio > BEHIND),
        key=lambda row: -row.ratio,
    )
    lines = [
        [f"`{row.name}`", row.heads, f"{row.ours:.1f}", f"{row.best:.1f}", SYSTEMS[row.peer], f"{row.ratio:.2f}"]
        for row in behind[:WORST]
    ]
    return table(["tree", "heads", "`pat`, us", "peer, us", "peer", "ratio"], lines) if lines else "", len(behind)


def section(folder: Path) -> Section:
    """Everything about the kernel."""
    machine, older = (get(load(folder, file), file, "machine") for file in (PAT, H100))
    gpu, torch, sgl_kernel, flashinfer, typed = (
        get(machine, PAT, key) for key in ("gpu", "torch", "sgl_kernel", "flashinfer", "command")
    )
    setup = (
        f"{gpu}, torch {torch}, sgl-kernel {sgl_kernel}, FlashInfer {flashinfer}, {day(machine, PAT)}; "
        f"{get(older, H100, 'gpu')}, an older build, {day(older, H100)}."
    )
    lost, count = losses(folder)
    body = [
        "One layer, L2 warm: time to the best of FlashAttention-3 (FA3), FlashInfer, its cascade, and to the floor "
        "(bytes/copy bandwidth, FLOP/matrix rate). Geometric means, PAT's trees:",
        by_heads(folder),
        "![Time over the floor by tree](performance/kernel.svg)",
        by_set(folder),
        "fp8 KV, 32/8:",
        with_fp8(folder),
        of_sglang(folder),
    ]
    if lost:
        body += [f"Behind by >1% in {count} rows, the worst:", lost]
    return Section("The kernel beside its peers", body, setup, [command(typed)], [*SETS.values(), H100, FP8, SGLANG])


def plotted(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Time over floor of each system at 32/8 heads, by number of the tree."""
    rows = of_heads(trees(folder, PAT), "32/8")
    systems = {"pat": [(row.tree, row.ours / row.floor) for row in rows]}
    for peer in PEERS:
        if peer != "fa3":
            systems[peer] = [(row.tree, row.peers[peer] / row.floor) for row in rows if peer in row.peers]
    return {name: points for name, points in systems.items() if points}
