"""From a policy state to the row of a table (paper 4.3.1).

Batch size and peers use exponential bins: bin k > 0 holds 2**(k-1) <= x < 2**k. Tip loss uses four coarse
thresholds. `features="headroom"` adds a coarse bin of free KV memory, so that a table can tell "large batch" from
"no memory left".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import product

from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policies.protocol import PolicyState

FEATURES = ("paper", "headroom")
BATCH_BINS = 13  # 0, 1, 2-3, 4-7, ... 2048 and more
PEER_BINS = 10  # 0, 1, 2-3, ... 256 and more
LOSS_EDGES = (0, 2, 8, 32)  # chunks: none | 1-2 | 3-8 | 9-32 | more
HEADROOM_EDGES = (0.05, 0.2, 0.5)  # share of the pool: nearly none | tight | comfortable | plenty
_LOSS_BINS = len(LOSS_EDGES) + 1
_HEADROOM_BINS = len(HEADROOM_EDGES) + 1


class Discretiser:
    """Map a state to a small non-negative integer, the table key.

    Parameters
    ----------
    features : ``"paper"`` for (batch size, tip loss, peers), ``"headroom"`` for those and free KV memory.
    """

    def __init__(self, features: str = "paper") -> None:
        if features not in FEATURES:
            raise FeatherError(f"unknown policy features {features!r}: choose one of {', '.join(FEATURES)}")
        self.features = features
        headroom_bins = _HEADROOM_BINS if features == "headroom" else 1
        self.shape = (BATCH_BINS, _LOSS_BINS, PEER_BINS, headroom_bins)
        self._with_headroom = features == "headroom"

    @property
    def states(self) -> int:
        """Number of distinct keys: every key is below it."""
        batch, loss, peers, headroom = self.shape
        return batch * loss * peers * headroom

    def key(self, state: PolicyState) -> int:
        """Table key of `state`; out-of-range values fall into the outermost bin."""
        batch, loss, peers, headroom, _ = state
        batch_bin = batch.bit_length() if batch > 0 else 0
        if batch_bin >= BATCH_BINS:
            batch_bin = BATCH_BINS - 1
        peer_bin = peers.bit_length() if peers > 0 else 0
        if peer_bin >= PEER_BINS:
            peer_bin = PEER_BINS - 1
        key = (batch_bin * _LOSS_BINS + bisect_left(LOSS_EDGES, loss)) * PEER_BINS + peer_bin
        if self._with_headroom:
            return key * _HEADROOM_BINS + bisect_right(HEADROOM_EDGES, headroom)
        return key

    def corners(self) -> Iterator[tuple[int, PolicyState]]:
        """Every key, with the smallest state of its bins."""
        batches = [0, *(1 << i for i in range(BATCH_BINS - 1))]
        losses = [0, *(edge + 1 for edge in LOSS_EDGES)]
        peers = [0, *(1 << i for i in range(PEER_BINS - 1))]
        headrooms = [0.0, *HEADROOM_EDGES] if self._with_headroom else [1.0]
        for corner in product(batches, losses, peers, headrooms):
            state = PolicyState(*corner)
            yield self.key(state), state

    def name(self, key: int) -> str:
        """Name of a state in policy files: its bins (batch size, tip loss, peers, headroom), joined by dots."""
        _, loss_bins, peer_bins, headroom_bins = self.shape
        key, headroom = divmod(key, headroom_bins)
        key, peers = divmod(key, peer_bins)
        batch, loss = divmod(key, loss_bins)
        return f"{batch}.{loss}.{peers}.{headroom}"

    def key_of(self, name: str) -> int:
        """The key whose name this is; ValueError where no state is called so."""
        parts = name.split(".")
        if len(parts) == len(self.shape) and all(p.isascii() and p.isdigit() and len(p) < 4 for p in parts):
            key = 0
            for part, size in zip(parts, self.shape, strict=True):
                key = key * size + int(part)
                if int(part) >= size:
                    break
            else:
                return key
        raise ValueError(f"no state is called {name[:40]!r}")

    def describe(self) -> dict[str, object]:
        """Everything a table depends on, for the policy file: a file with other bins is refused."""
        return {
            "features": self.features,
            "batch_bins": BATCH_BINS,
            "peer_bins": PEER_BINS,
            "loss_edges": list(LOSS_EDGES),
            "headroom_edges": list(HEADROOM_EDGES) if self._with_headroom else [],
        }
