"""Make the performance pages, their plots, README's chart and README's numbers from docs/measured.

    python docs/generators/performance.py            # write them
    python docs/generators/performance.py --check    # exit 1 and name what differs from what would be written

Nothing is measured here, and nothing but the result files decides what is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import model_names
import perf_front
import perf_kernel
import perf_models
import perf_plots
import perf_prefill
import perf_promise
import perf_replay
import perf_servers
import perf_speculation
from perf_results import ResultError, evicts, geometric_mean

ROOT = Path(__file__).parents[2]
START, END = "<!-- performance -->", "<!-- end -->"
PAGES = {  # under docs/performance, with the question that each answers
    "kernel": perf_kernel.page,
    "servers": perf_servers.page,
    "real_traffic": perf_replay.tail,
    "between_tokens": perf_promise.page,
    "models": perf_models.page,
    "speculation": perf_speculation.page,
    "prefill": perf_prefill.page,
    "agreement": perf_replay.agreement,
}


def pages(folder: Path) -> dict[Path, str]:
    """The Markdown of the front page and of those below it, by their paths in the repository."""
    below = {name: make(folder) for name, make in PAGES.items()}
    made = {Path(f"docs/performance/{name}.md"): page.markdown() for name, page in below.items()}
    titles = {name: page.title for name, page in below.items()}
    return {Path("docs/performance.md"): perf_front.page(folder, titles), **made}


def span(values: Iterable[float], digits: int = 1) -> str:
    """The least and the most of some ratios."""
    known = sorted(values)
    return f"**{known[0]:.{digits}f}x to {known[-1]:.{digits}f}x**" if known else "-"


def readme_block(folder: Path) -> str:
    """README's chart and numbers, each with its hardware."""
    main = [(one, case) for one in perf_servers.headline_policies(folder) for case, runs in one.runs.items()
            if evicts(case, runs["fcfs"].kv_tokens)]  # fmt: skip
    tight = [perf_servers.to_stock(one, case) for one, case in main]
    loaded = perf_servers.by_backend(folder, list(perf_servers.SERVERS.values()))
    others = [perf_servers.by_backend(folder, files) for files in (perf_servers.DECODE, [perf_servers.LONG])]
    shared = [perf_servers.to_best(runs)[0] for case, runs in loaded.items() if not perf_servers.unshared(case)]
    alone = [perf_servers.to_best(runs)[0] for found in (loaded, *others) for case, runs in found.items()
             if perf_servers.unshared(case)]  # fmt: skip
    ratios = perf_replay.tail_ratios(folder)["feather"]
    mean, late, longest = (
        geometric_mean(one[f"{name} to fcfs's"] for one in ratios) for name in ("TTFT mean", "TTFT p99", "longest wait")
    )
    seen_mean, seen_late = perf_replay.on_server(folder, "ttft_mean"), perf_replay.on_server(folder, "ttft_p99")
    lines = [
        "![Output tokens a second: SGLang's fastest backend and policy, pat, pat and feather](docs/readme_chart.svg)\n",
        f"- Under load from requests that share prefixes, `pat` has {span(shared)} the throughput of the fastest other "
        "backend, both under `fcfs` (H200 server).",
        f"- Where the prefixes fill the KV pool or exceed it, `feather` has {span(best for _, best, _ in tight)} the "
        f"throughput of SGLang's fastest policy and {span(fcfs for fcfs, *_ in tight)} that of `fcfs`, on the same "
        "backend (H200 server).",
        f"- Where nothing is shared, `pat` has {span(alone, 2)} the throughput of the fastest other backend, both "
        "under `fcfs` (H200 server).",
        f"- On real traffic ({perf_replay.slice_on_server(folder)}), the mean time to the first token under `feather` "
        f"is **{seen_mean:.2f}x** that of `fcfs` and its p99 **{seen_late:.2f}x** (H200 server). Over "
        f"{perf_replay.kinds_of_slices(folder)}, replayed without a GPU, the mean is {mean:.2f}x, the p99 {late:.2f}x "
        f"and the longest wait {longest:.2f}x.",
        perf_promise.readme_line(folder),
    ]
    return "\n".join(lines)


BLOCKS = {  # pages that are written by hand, but for the figures between the markers
    "README.md": readme_block,
    "docs/guide/goodput.md": perf_promise.guide_rows,
    "docs/guide/ab_replay.md": perf_replay.guide_sentence,
    "docs/design/papers.md": perf_front.papers_rows,
}


def with_block(readme: str, block: str) -> str:
    """A page with the block between its markers, or as it is where it has none."""
    before, start, rest = readme.partition(START)
    _, end, after = rest.partition(END)
    return f"{before}{start}\n{block}\n{end}{after}" if start and end else readme


def everything(root: Path) -> dict[Path, str]:
    """What is written, by path under the root of the repository."""
    folder = root / "docs" / "measured"
    made = {Path("docs") / name: text for name, text in perf_plots.all_plots(folder).items()}
    made |= pages(folder)
    made[Path("docs/start/models.md")] = model_names.page(folder)
    for name, block in BLOCKS.items():
        if (root / name).exists():
            made[Path(name)] = with_block((root / name).read_text(), block(folder))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description="The performance pages and README's numbers, from docs/measured.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 and name what differs")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the repository (this one)")
    args = parser.parse_args(argv)
    try:
        made = everything(args.root)
    except ResultError as error:
        print(f"performance: {error}", file=sys.stderr)
        return 1
    differs = []
    for path, text in made.items():
        target = args.root / path
        if not target.exists() or target.read_text() != text:
            differs.append(path)
            if not args.check:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text)
    for path in differs:
        print(f"{path}: {'differs from docs/measured' if args.check else 'written'}")
    if args.check and differs:
        print("run python docs/generators/performance.py", file=sys.stderr)
    return int(args.check and bool(differs))


if __name__ == "__main__":
    sys.exit(main())
