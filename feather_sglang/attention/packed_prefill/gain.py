"""Prediction whether packing a prefill step pays: times of SGLang's prefill kernel and of the packed one.

Both compute as many products for every token; what differs is rate, padding and the price of a row. FlashAttention-3
pads each request's new tokens to whole tiles, and the packed kernel those below a shared prefix together, but it pays
for every new token's private tail. Numbers of one attention layer scale with its FLOP. The packed one must also make
good for its plan (`PlanTime`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from feather_kernels.forest import Forest

Ints = npt.NDArray[np.integer]
Shape = tuple[int, int, int]  # query heads, KV heads, head_dim

MARGIN = 1.1  # by which a step must be faster packed
# Least squares over docs/measured/prefill_h200.json: nine steps of one layer, 32/8 heads of 128, on an H200.
STOCK_FLOP_PER_S = 671.8e12  # FlashAttention-3's, padding counted
STOCK_TILE_ROWS = 128  # tokens times query heads of a KV head; as in feather_sglang/replay/profiles/h200.json
STOCK_TILE_KEYS = 342.5  # more that a tile takes than its rows see: where it begins and ends
PACKED_FLOP_PER_S = 605.4e12
PACKED_S = 8.1e-6  # of a launch
PACKED_VALUE_S = 25.6e-9 / (32 * 128)  # of a value of a new token's query, for its tail and its parts
# Whole steps of docs/measured/prefill_h200.json: 0.17 ms for 16 tokens, 1.2 to 1.9 for 8,192.
PLAN_S, PLAN_TOKEN_S = 170e-6, 0.2e-6
SHARE = 0.125  # of the last plan in the mean
HICCUP = 2.0  # times the mean, and its inverse: further off no plan counts
SLOWEST = 4.0  # pace
DOUBT = 1 / 4096  # of a slow pace, for a step that was not planned: where none is, no plan tells that the host is free


class PlanTime:
    """Seconds of a plan on this host, which has a part for each shape of heads."""

    def __init__(self, shapes: int) -> None:
        self._shapes = shapes
        self.pace = 1.0  # moving mean of what plans took, to what they take on the host that was measured

    def seconds(self, tokens: int) -> float:
        """What the plan of so many new tokens should take."""
        return self.pace * self._shapes * (PLAN_S + PLAN_TOKEN_S * tokens)

    def learn(self, tokens: int, seconds: float) -> None:
        """A plan of so many new tokens took so long."""
        ratio = min(max(seconds / self.seconds(tokens), 1 / HICCUP), HICCUP)
        self.pace = min(self.pace * (1 + SHARE * (ratio - 1)), SLOWEST)

    def declined(self) -> None:
        """A step was not planned, as it would not have paid."""
        self.pace = max(min(self.pace, 1.0), self.pace * (1 - DOUBT))


class PrefillGain:
    """Predicts for a model's packed layers; ``block`` are the tokens of a prompt whose heads fill the largest tile."""

    def __init__(self, layers: Iterable[Shape], block: int) -> None:
        self._layers, self._block = Counter(layers), block
        self.plan_time = PlanTime(len(self._layers))

    def may_pay(self, committed: Ints, counts: Ints) -> bool:
        """Whether packing can pay, whatever the requests share: tokens in the cache, and new ones, of each."""
        whole, rest = np.divmod(counts.astype(np.int64), self._block)
        in_blocks = self._block * (self._block * whole * (whole - 1) // 2 + whole * rest)
        least = float((counts * committed + in_blocks).sum())  # no tile is padded
        return self._pays(committed, counts, self._packed(least, counts))

    def pays(self, forest: Forest, counts: Ints) -> bool:
        """The same where it is known what they share: ``forest`` is of what they have in the cache."""
        return self._pays(forest.seq_len, counts, self.packed_seconds(forest, counts))

    def stock_seconds(self, committed: Ints, counts: Ints) -> float:
        """What all layers take under FlashAttention-3, the fastest of SGLang's prefill backends."""
        keys, seconds = committed + (counts + 1) / 2 + STOCK_TILE_KEYS, 0.0
        for (heads, kv_heads, head_dim), layers in self._layers.items():
            tile = max(1, STOCK_TILE_ROWS * kv_heads // heads)
            pairs = float((_padded(counts, tile) * keys).sum())
            seconds += layers * 4 * heads * head_dim * pairs / STOCK_FLOP_PER_S
        return seconds

    def packed_seconds(self, forest: Forest, counts: Ints) -> float:
        """What they take packed, without the plan."""
        shared = _padded(_counts_below(forest, counts), self._block) * forest.length
        own = _padded(counts, self._block) * (
            forest.seq_len - forest.shared_length + self._block * (-(-counts // self._block) - 1) / 2
        )
        return self._packed(float(shared.sum() + own.sum()), counts)

    def _packed(self, pairs: float, counts: Ints) -> float:
        """Packed seconds of new tokens that see so many others outside their blocks."""
        return sum(
            layers * (PACKED_S + heads * head_dim * (4 * pairs / PACKED_FLOP_PER_S + PACKED_VALUE_S * counts.sum()))
            for (heads, _, head_dim), layers in self._layers.items()
        )

    def _pays(self, committed: Ints, counts: Ints, packed: float) -> bool:
        plan = self.plan_time.seconds(int(counts.sum()))
        return self.stock_seconds(committed, counts) >= MARGIN * (packed + plan)


def _padded(counts: Ints, tile: int) -> Ints:
    """To whole tiles."""
    return -(-counts.astype(np.int64) // tile) * tile


def _counts_below(forest: Forest, counts: Ints) -> Ints:
    """int64 [nodes]: new tokens of the requests below each node."""
    below = np.zeros(forest.n_nodes + 1, np.int64)
    np.add.at(below, forest.request_node, counts)  # those of no node at the end
    for node in range(forest.n_nodes - 1, -1, -1):  # children stand behind their parents
        if (parent := forest.parent[node]) >= 0:
            below[parent] += below[node]
    return below[:-1]
