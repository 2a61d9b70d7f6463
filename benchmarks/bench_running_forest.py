"""Time to keep the forest of a running batch: joins, leaves, the forest, and a step without a change.

``python benchmarks/bench_running_forest.py [--requests 500] [--chunks 157] [--groups 5]``; microseconds at the median
(99th percentile), on one core. ``observe`` is the whole look at a decode batch that nobody has joined or left.
"""

import argparse
import time

import numpy as np
import torch

from feather_sglang.adapter.attention.rows import CHUNK, RowSharing
from feather_sglang.attention.running_forest import RunningForest


def microseconds(work):
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


def line(name, times):
    print(f"{name:28} {np.median(times):8.1f} ({np.percentile(times, 99):.1f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--chunks", type=int, default=157, help="of 32 tokens, of each request's shared prefix")
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    n, rng = options.requests, np.random.default_rng(0)
    prefixes = rng.integers(1 << 62, size=(options.groups, options.chunks))
    hashes = [np.append(prefixes[i % options.groups], rng.integers(1 << 62, size=2)) for i in range(n)]
    rows, lens = np.arange(n), np.full(n, (options.chunks + 2) * CHUNK + 7, np.int32)
    joins, leaves, forests = [], [], []
    for _ in range(options.rounds):
        trie = RunningForest(CHUNK)
        joins += [microseconds(lambda i=i, trie=trie: trie.join(i, hashes[i])) for i in range(n)]
        forests += [microseconds(lambda trie=trie: trie.forest(rows.tolist(), lens, rows)) for _ in range(20)]
        leaves += [microseconds(lambda i=i, trie=trie: trie.leave(i)) for i in rng.permutation(n).tolist()]
    print(f"{n} requests, {options.groups} groups of {options.chunks} chunks")
    line("join", joins)
    line("leave", leaves)
    line("forest", forests)

    table = torch.zeros(n, int(lens[0]) + 1000, dtype=torch.int32)
    sharing = RowSharing(table, np.zeros(n, np.int64), settled_at=1)
    rids = [f"request-{i}" for i in range(n)]
    steps = []
    for step in range(300):
        now = lens + np.int32(step)
        steps.append(microseconds(lambda now=now: sharing.observe(list(rids), rows, now)))
    line("observe, the same batch", steps[5:])
    others = []
    for step in range(300, 600):
        now = lens + np.int32(step)
        order = rng.permutation(n)
        chosen = [rids[i] for i in order]
        others.append(microseconds(lambda now=now, order=order, c=chosen: sharing.observe(c, rows[order], now)))
    line("observe, another order", others)


if __name__ == "__main__":
    main()
