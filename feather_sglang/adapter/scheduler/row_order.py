"""Permute the rows of SGLang's running batch.

``ScheduleBatch.filter_batch`` rebuilds everything SGLang keeps per row (pool indices, lengths, sampling state,
penalties, logprob requests, grammars, multimodal inputs) from a list of indices, and a permutation is such a list.
Tokens in flight under the overlap scheduler are looked up by pool index, which moves along.
"""

from __future__ import annotations

from typing import Any


def permute_rows(batch: Any, order: list[int]) -> bool:
    """Put row ``order[i]`` at place ``i`` of ``batch`` in place.

    Returns False, with the batch untouched, for rows that cannot move (beam search keeps extra rows behind them).
    """
    if any(getattr(req, "beam_group", None) is not None for req in batch.reqs):
        return False
    # filter_batch takes a list of unchanged length for "nothing to filter": one surplus entry, which no index
    # names, makes it do its work.
    batch.reqs = [*batch.reqs, None]
    batch.filter_batch(keep_indices=order)
    return True
