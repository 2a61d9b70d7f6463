"""Row order: the rows of the running batch stand in prefix order before each decode step.

``ScheduleBatch.filter_batch`` rebuilds everything SGLang keeps per row (pool indices, lengths, sampling state,
penalties, logprob requests, grammars, multimodal inputs) from a list of indices, and a permutation is such a list.
Tokens in flight under the overlap scheduler are looked up by pool index, which moves along.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from feather_sglang.adapter.scheduler.guard import Guard
from feather_sglang.adapter.wrapping import Wrappings
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

    def update_running_batch(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Order rows within SGLang's ``update_running_batch``.

        That is after it has dropped what finished and retracted (which sorts the rest by length), and before it
        allocates the step's tokens row by row: so the batch's own method is wrapped for the call.
        """
        wrappings = Wrappings()
        wrappings.wrap(batch, "prepare_for_decode", functools.partial(self._order_and_prepare, batch))
        try:
            return original(batch, *args, **kwargs)
        finally:
            wrappings.undo()

    def _order_and_prepare(self, batch: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._order(batch)
        return original(*args, **kwargs)

    def _order(self, batch: Any) -> None:
        # SGLang makes a new row list whenever the composition changes, so the same list is in order already.
        if not self.enabled or self.guard.failed or batch.reqs is self._ordered:
            return
        with self.guard("rows could not be ordered"):
            start = time.perf_counter()
            order = self.admission.row_order([req.rid for req in batch.reqs])
            if order is not None and permute_rows(batch, order):
                self.permutations += 1
            self._ordered = batch.reqs
            self.seconds += time.perf_counter() - start


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
