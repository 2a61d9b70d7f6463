"""Row order: the rows of the running batch stand in prefix order before each decode step.

``ScheduleBatch.filter_batch`` rebuilds everything SGLang keeps per row (pool indices, lengths, sampling state,
penalties, logprob requests, grammars, multimodal inputs) from a list of indices, and a permutation is such a list.
Tokens in flight under the overlap scheduler are looked up by pool index, which moves along.
"""

from __future__ import annotations

import time
from typing import Any

from feather_sglang.adapter.scheduler.guard import Guard, guarded
from feather_sglang.scheduling.admission.admission import Admission


class RowOrder:
    """Orders the rows of one scheduler's batches.

    Attributes
    ----------
    permutations : int
    seconds : float
        That they took.
    """

    def __init__(self, admission: Admission, guard: Guard, enabled: bool) -> None:
        self.admission = admission
        self.guard = guard
        self.enabled = enabled
        self.permutations = 0
        self.seconds = 0.0
        self._ordered: list[Any] | None = None  # the row list last seen in order

    @guarded("rows could not be ordered")
    def order(self, batch: Any) -> None:
        """Put the rows of a batch that decodes next in prefix order.

        SGLang has dropped what finished and retracted by then, and allocates the step's tokens row by row afterwards.
        """
        # SGLang makes a new row list whenever the composition changes, so the same list is in order already.
        if not self.enabled or batch.reqs is self._ordered:
            return
        start = time.perf_counter()
        order = self.admission.row_order([req.rid for req in batch.reqs])
        if order is not None and permute_rows(batch, order):
            self.permutations += 1
        self._ordered = batch.reqs
        self.seconds += time.perf_counter() - start


def rows_can_move(batch: Any) -> bool:
    """Whether the rows of a batch are those of its requests: beam search keeps extra rows behind them."""
    return all(getattr(req, "beam_group", None) is None for req in batch.reqs)


def permute_rows(batch: Any, order: list[int]) -> bool:
    """Put row ``order[i]`` at place ``i`` of ``batch`` in place.

    Returns False, with the batch untouched, for rows that cannot move.
    """
    if not rows_can_move(batch):
        return False
    if hasattr(batch, "take_rows"):  # SGLang's extension points
        batch.take_rows(order)
        return True
    # filter_batch takes a list of unchanged length for "nothing to filter": one surplus entry, which no index
    # names, makes it do its work.
    batch.reqs = [*batch.reqs, None]
    batch.filter_batch(keep_indices=order)
    return True
