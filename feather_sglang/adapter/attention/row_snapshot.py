"""The table of slots as a captured graph reads it: a copy of the batch's rows, made before the graph is replayed.

SGLang writes to its own table for the next step while a replay runs, unless it is told to wait for all of it; and a row
that it gives to a new request may be one through which the step still reads what several requests share.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_BLOCK = 1024  # slots that a program copies


class RowSnapshot:
    """Rows of the batch, at addresses that stay.

    ``table`` is ``req_to_token``, int32 [rows, tokens]; ``slots``, int32 [max_requests, tokens], has in row i the
    batch's i-th, as far as it was copied.
    """

    def __init__(self, table: torch.Tensor, max_requests: int) -> None:
        self._table = table
        self.slots = torch.zeros((max_requests, table.shape[1]), dtype=table.dtype, device=table.device)

    def take(self, rows: torch.Tensor, lens: torch.Tensor, longest: int) -> None:
        """Copy the first ``lens`` slots of ``rows`` (both [requests], on the device) in the current stream."""
        if self._table.is_cuda:
            grid = len(rows), -(-longest // _BLOCK)
            strides = self._table.stride(0), self.slots.stride(0)
            _kernel()[grid](self._table, rows, lens, self.slots, *strides, block=_BLOCK)
        else:
            self.slots[: len(rows), :longest] = self._table[rows, :longest]


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def copy_rows(table, rows, lens, slots, table_stride, slots_stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
        request = tl.program_id(0)
        column = tl.program_id(1) * block + tl.arange(0, block)
        within = column < tl.load(lens + request)
        row = tl.load(rows + request).to(tl.int64)
        values = tl.load(table + row * table_stride + column, mask=within)
        tl.store(slots + request.to(tl.int64) * slots_stride + column, values, mask=within)

    return copy_rows
