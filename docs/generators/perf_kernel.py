"""The decode kernel beside its peers: the page of the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perf_results import PEERS, TreeTime, day, geometric_mean, get, load, trees
from perf_text import Page, Section, caption, command, table, term

PAT, H100, FP8 = "decode_h200.json", "decode_h100.json", "decode_h200_fp8.json"
SGLANG = "decode_h200_sglang.json"
SETS = {
    "the 20 trees of the PAT paper": PAT,
    "1 to 20 shared prompts, 32 to 500 requests": "decode_h200_serving.json",
    "1 to 64 shared prompts, 8 to 96 requests": "decode_h200_small.json",
    "long prompts beside short ones": "decode_h200_mixed.json",
    "prompts of unlike lengths": "decode_h200_unlike.json",
    "1 to 32 long requests": "decode_h200_long.json",
}
HEADS = ("32/8", "64/8", "32/32", "16/8")
BEHIND, WORST = 1.01, 6  # a row is behind from 1% on; so many are listed
SYSTEMS = {
    "fa3": "FlashAttention-3",
    "fa3-planned": "FlashAttention-3",
    "flashinfer": "FlashInfer",
    "cascade": "cascade",
}


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


def setup(folder: Path, file: str = PAT) -> str:
    """GPU, libraries and day of a kernel's file."""
    machine = get(load(folder, file), file, "machine")
    gpu, torch, sgl_kernel, flashinfer = (
        get(machine, file, key) for key in ("gpu", "torch", "sgl_kernel", "flashinfer")
    )
    return f"{gpu}, torch {torch}, sgl-kernel {sgl_kernel}, FlashInfer {flashinfer}, {day(machine, file)}"


def by_heads(folder: Path) -> list[list[str]]:
    """Geometric means over PAT's trees: to the best peer on both GPUs."""
    rows, older = trees(folder, PAT), trees(folder, H100)
    lines = []
    for heads in HEADS:
        mine, theirs = of_heads(rows, heads), of_heads(older, heads)
        if mine and theirs:
            to_best = [f"{geometric_mean(row.ratio for row in some):.2f}" for some in (mine, theirs)]
            lines.append([heads, f"**{to_best[0]}**", to_best[1]])
    return lines


def floors(folder: Path) -> list[list[str]]:
    """Geometric means over PAT's trees: this package and its peers over the floor."""
    rows = trees(folder, PAT)
    lines = []
    for heads in HEADS:
        if mine := of_heads(rows, heads):
            lines.append([heads, over_floor(mine), *(over_floor(mine, peer) for peer in ("fa3-planned", "flashinfer"))])
    return lines


def by_set(folder: Path) -> list[list[str]]:
    """Geometric mean and worst row of each set of batches."""
    lines = []
    for name, file in SETS.items():
        rows = trees(folder, file)
        parts = {name: rows}
        if file == PAT:
            parts = {name: rows, "of these, nothing shared": [row for row in rows if unshared(row)]}
        for label, some in parts.items():
            if some:
                behind = sum(row.ratio > BEHIND for row in some)
                mean, worst = geometric_mean(row.ratio for row in some), max(row.ratio for row in some)
                lines.append([label, factors(some), f"{behind} of {len(some)}", f"{mean:.2f}", f"{worst:.2f}"])
    return lines


def factors(rows: Sequence[TreeTime]) -> str:
    """What the batches of a set are: each tree with each configuration of heads, and each size of pages."""
    names, heads, pages = ({getattr(row, of) for row in rows} for of in ("name", "heads", "page_size"))
    sizes = f" \u00d7 {len(pages)} page sizes" if len(pages) > 1 else ""
    return f"{len(names)} trees \u00d7 {len(heads)} head counts{sizes}"


def with_fp8(folder: Path) -> list[list[str]]:
    """PAT's trees on an fp8 cache: beside a peer on it, this package on 16 bits, and the floor."""
    records = get(load(folder, FP8), FP8, "records")
    times = [
        {name: get(record, FP8, "systems", name, "warm_us") for name in ("feather", "feather-16bit", "triton")}
        | {"floor": get(record, FP8, "floor_us")}
        for record in records
    ]
    names = {"triton": "Triton, fp8", "feather-16bit": "`pat`, 16 bits", "floor": "the floor, fp8"}
    lines = []
    for name, shown in names.items():
        ratios = [time["feather"] / time[name] for time in times]
        lines.append([shown, f"{geometric_mean(ratios):.2f}", f"{max(ratios):.2f}", str(len(ratios))])
    return lines


def of_sglang(folder: Path) -> list[list[str]]:
    """Every decode backend of SGLang's that runs here, the nearest to the floor first."""
    records = get(load(folder, SGLANG), SGLANG, "records")
    times: dict[str, list[float]] = {}
    for record in records:
        for name, figures in get(record, SGLANG, "systems").items():
            if "warm_us" in figures:
                times.setdefault(name, []).append(figures["warm_us"] / get(record, SGLANG, "floor_us"))
    means = {name: geometric_mean(ratios) for name, ratios in times.items() if len(ratios) == len(records)}
    return [
        [f"`{'pat' if name == 'feather' else name}`", f"{means[name]:.2f}"]
        for name in sorted(means, key=means.__getitem__)
    ]


def measured(folder: Path) -> list[TreeTime]:
    """All rows of all sets on the H200."""
    return [row for file in SETS.values() for row in trees(folder, file)]


def losses(folder: Path) -> list[TreeTime]:
    """The rows of both GPUs in which a peer is faster, the worst first."""
    rows = [*measured(folder), *trees(folder, H100)]
    return sorted((row for row in rows if row.ratio > BEHIND), key=lambda row: -row.ratio)


def count_losses(folder: Path) -> str:
    """How many rows those are, by GPU."""
    sets = {"the H200": measured(folder), "the H100": trees(folder, H100)}
    return " and in ".join(
        f"{sum(row.ratio > BEHIND for row in rows)} of {len(rows)} batches on {gpu}" for gpu, rows in sets.items()
    )


def headline(folder: Path) -> float:
    """To the best peer on PAT's trees at 32/8 heads and pages of one token."""
    return geometric_mean(row.ratio for row in of_heads(trees(folder, PAT), "32/8"))


def page(folder: Path) -> Page:
    """Everything about the decode kernel."""
    here, older = setup(folder), setup(folder, H100)
    lost = losses(folder)
    beside = Section(
        "On the prefix trees of the PAT paper",
        [
            "The time of `pat`'s kernel over the time of its best peer, the geometric mean of 20 trees; below 1, `pat` "
            "is faster. The H100 was measured with an older build of the kernel.",
            table(["query heads / KV heads", "H200", "H100"], by_heads(folder)),
            caption(f"{here}; {older}", "tree-notation"),
            f"The times over the {term('floor')}, the time that the GPU needs at least to read the KV and to multiply "
            "it. It is computed with the bandwidth of a copy, so what only reads can come out slightly below 1.",
            table(["query heads / KV heads", "`pat`", "FlashAttention-3", "FlashInfer"], floors(folder)),
            caption(here, "floor"),
            "![Time over the floor by tree](kernel.svg)",
            caption(f"{here}, 32 query heads and 8 KV heads", "floor", "tree-notation"),
            "The numbers in the figure stand for these trees:",
            table(
                ["number", "tree"], [[str(row.tree), f"`{row.name}`"] for row in of_heads(trees(folder, PAT), "32/8")]
            ),
        ],
        [PAT, H100],
        [command(get(load(folder, PAT), PAT, "machine", "command"))],
    )
    sets = Section(
        "On other batches",
        [
            "Each row is a set of batches: in how many of them a peer is faster by more than 1%, the geometric mean of "
            "the time over the best peer's, and the worst of these ratios. A batch is a tree with one configuration of "
            "query and KV heads; PAT's trees were measured with pages of 1 and of 32 tokens.",
            table(
                ["set", "batches", "slower than the best peer", "time over the best peer's", "worst ratio"],
                by_set(folder),
            ),
            caption(here),
        ],
        list(SETS.values()),
    )
    losing = Section(
        "Where a peer is faster",
        [
            f"A peer is faster by more than 1% in {count_losses(folder)}; these are the worst. A tree may stand here "
            "with several configurations of heads.",
            table(
                ["tree", "query heads / KV heads", "`pat`, µs", "best peer, µs", "best peer", "`pat` over it"],
                [
                    [f"`{row.name}`", row.heads, f"{row.ours:.1f}", f"{row.best:.1f}", SYSTEMS[row.peer],
                     f"{row.ratio:.2f}"]
                    for row in lost[:WORST]
                ],
            ),
            caption(here, "tree-notation"),
        ],
    )  # fmt: skip
    fp8 = Section(
        "With a KV cache in fp8",
        [
            "The time of `pat` on an fp8 cache (`--kv-cache-dtype fp8_e4m3`) over each of these, 32 query heads and 8 "
            "KV heads; below 1, `pat` on fp8 is faster.",
            table(["time of `pat` on fp8 over that of", "geometric mean", "worst ratio", "trees"], with_fp8(folder)),
            caption(setup(folder, FP8), "floor"),
        ],
        [FP8],
    )
    backends = Section(
        "Beside every decode backend of SGLang",
        [
            "The kernels that SGLang's backends call, on the same 20 trees with 32 query heads, 8 KV heads and pages "
            "of 32 tokens: geometric mean of the time over the floor.",
            table(["backend", "time over the floor"], of_sglang(folder)),
            caption(setup(folder, SGLANG), "floor"),
        ],
        [SGLANG],
    )
    return Page(
        "How fast is the decode kernel?",
        "The attention of one layer in a decode step, with the KV in the L2 cache where it fits, beside "
        "FlashAttention-3, FlashInfer and FlashInfer's cascade. Pages are of one token unless a table says otherwise.",
        [beside, sets, *([losing] if lost else []), fp8, backends],
    )


def plotted(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Time over floor of each system at 32/8 heads, by number of the tree."""
    rows = of_heads(trees(folder, PAT), "32/8")
    systems = {"pat": [(row.tree, row.ours / row.floor) for row in rows]}
    for peer in PEERS:
        if peer != "fa3":
            systems[peer] = [(row.tree, row.peers[peer] / row.floor) for row in rows if peer in row.peers]
    return {name: points for name, points in systems.items() if points}
