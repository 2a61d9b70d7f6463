"""The tile selector's rule for n (PAT 5.2, "Deriving KV tile n"). Its rule for m, rounding up, is in ``csrc/planner``.

A library has one n for each m, as all its shapes are one kernel: that which the GPU's rule has for long KV
(`tiles.chosen_tiles`). So nothing is looked up when a batch is planned; the rule says what else would be as good, by
length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from feather_kernels.device import Piece

EQUIVALENT = 1.02  # of the best time: PAT finds feasible tiles within 2% of each other
STABLE = 3  # KV lengths in a row that choose the same n


def derive_pieces(
    choices: Sequence[int], time_of: Callable[[int, int], float], kv_lens: Sequence[int]
) -> tuple[Piece, ...]:
    """The largest n within 2% of the best, by KV length, until `STABLE` lengths in a row agree (PAT 5.2).

    Parameters
    ----------
    choices : sequence of int
        The n that are built for one m. Where there is one only, nothing is timed.
    time_of : callable
        (n, KV length) -> time of a run.
    kv_lens : sequence of int
        The sweep, ascending.
    """
    if len(choices) == 1:
        return ((None, choices[0]),)
    chosen: list[tuple[int, int]] = []
    for kv_len in kv_lens:
        times = {n: time_of(n, kv_len) for n in choices}
        best = min(times.values())
        chosen.append((kv_len, max(n for n, time in times.items() if time <= EQUIVALENT * best)))
        if len(chosen) >= STABLE and len({n for _, n in chosen[-STABLE:]}) == 1 and chosen[-1][1] == max(choices):
            break
    pieces: list[Piece] = []
    for (kv_len, n), (_, following) in pairwise(chosen):
        if n != following:
            pieces.append((kv_len, n))
    return (*pieces, (None, chosen[-1][1]))
