"""From a policy state to the row of a table (paper 4.3.1).

Batch size and peers use exponential bins: bin k > 0 holds 2**(k-1) <= x < 2**k. Tip loss uses four coarse thresholds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import product

from feather_sglang.scheduling.policies.protocol import PolicyState

BATCH_BINS = 13  # 0, 1, 2-3, 4-7, ... 2048 and more
PEER_BINS = 10  # 0, 1, 2-3, ... 256 and more
LOSS_EDGES = (0, 2, 8, 32)  # chunks: none | 1-2 | 3-8 | 9-32 | more
_LOSS_BINS = len(LOSS_EDGES) + 1
SHAPE = (BATCH_BINS, _LOSS_BINS, PEER_BINS)  # every key is below their product

# Everything a table depends on, for the policy file: a file with other bins is refused. The first and the last are
# from when free KV memory could be a fourth feature; a state's name still ends in its bin, 0.
DESCRIPTION = {
    "features": "paper",
    "batch_bins": BATCH_BINS,
    "peer_bins": PEER_BINS,
    "loss_edges": list(LOSS_EDGES),
    "headroom_edges": [],
}


def key_of(state: PolicyState) -> int:
    """Key of the state in a table; out-of-range values fall into the outermost bin."""
    batch, loss, peers, _ = state
    batch_bin = batch.bit_length() if batch > 0 else 0
    if batch_bin >= BATCH_BINS:
        batch_bin = BATCH_BINS - 1
    peer_bin = peers.bit_length() if peers > 0 else 0
    if peer_bin >= PEER_BINS:
        peer_bin = PEER_BINS - 1
    return (batch_bin * _LOSS_BINS + bisect_left(LOSS_EDGES, loss)) * PEER_BINS + peer_bin


def corners() -> Iterator[tuple[int, PolicyState]]:
    """Every key, with the smallest state of its bins."""
    batches = [0, *(1 << i for i in range(BATCH_BINS - 1))]
    losses = [0, *(edge + 1 for edge in LOSS_EDGES)]
    peers = [0, *(1 << i for i in range(PEER_BINS - 1))]
    for corner in product(batches, losses, peers):
        state = PolicyState(*corner)
        yield key_of(state), state


def name_of(key: int) -> str:
    """Name of a state in policy files: its bins (batch size, tip loss, peers) and a 0, joined by dots."""
    key, peers = divmod(key, PEER_BINS)
    batch, loss = divmod(key, _LOSS_BINS)
    return f"{batch}.{loss}.{peers}.0"


def key_named(name: str) -> int:
    """The key whose name this is; ValueError where no state is called so."""
    *parts, last = name.split(".")
    if last == "0" and len(parts) == len(SHAPE) and all(p.isascii() and p.isdigit() and len(p) < 4 for p in parts):
        batch, loss, peers = map(int, parts)
        if batch < BATCH_BINS and loss < _LOSS_BINS and peers < PEER_BINS:
            return (batch * _LOSS_BINS + loss) * PEER_BINS + peers
    raise ValueError(f"no state is called {name[:40]!r}")
