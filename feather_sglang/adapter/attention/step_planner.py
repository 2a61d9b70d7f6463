"""From the rows, lengths and drafts of a step to the plan that the kernel reads, all in memory that keeps its place.

A plan is kept from step to step while the same requests only grow. There is no switch for batches that share nothing:
on the Hopper path the planner's strategy, ``time``, packs only where that takes less of the processors' modelled time,
and a batch without sharing is then planned as ``query`` would plan it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from feather_kernels import PlanError
from feather_kernels.forest import Forest, IntArray
from feather_kernels.plan import PackPlan
from feather_sglang.adapter.attention.engines import Engines, PackedLayers
from feather_sglang.adapter.attention.lengths import FILL, Lengths, Lens
from feather_sglang.adapter.attention.metrics import PatMetrics
from feather_sglang.adapter.attention.record import PlanRecorder
from feather_sglang.adapter.attention.row_snapshot import RowSnapshot
from feather_sglang.adapter.attention.rows import Rows, RowSharing
from feather_sglang.adapter.failures import end_server

logger = logging.getLogger(__name__)

DEBUG_CHECK = "FEATHER_DEBUG_CHECK"


class Step(NamedTuple):
    """The step to plan: its rows, lengths and drafts."""

    requests: list[Hashable] | None  # SGLang's; None in a dummy batch, whose rows share nothing
    rows: Rows  # [requests], in the table of slots
    lens: Lens  # [requests and padding], KV tokens by SGLang's count
    graph: tuple[torch.Tensor, torch.Tensor] | None  # rows and lens on the device, of a step that a graph replays


class StepPlanner:
    """Plans steps for the packed layers of a model.

    Parameters
    ----------
    table : SGLang's ``req_to_token``, int32 [rows, tokens].
    max_requests : of the largest batch.
    query_rows : the most of a request.
    """

    def __init__(
        self, packed: PackedLayers, table: torch.Tensor, sharing: RowSharing, max_requests: int, query_rows: int,
        metrics: PatMetrics | None = None, recorder: PlanRecorder | None = None,
    ) -> None:  # fmt: skip
        self._packed, self.table, self.sharing = packed, table, sharing
        self._query_rows, self._metrics, self._recorder = query_rows, metrics, recorder
        if metrics is not None:
            metrics.token_bytes = packed.token_bytes
        self.debug = os.environ.get(DEBUG_CHECK) == "1"  # looks at slots after every plan
        self._snapshot: RowSnapshot | None = None  # what graphs read
        self._for_graph = False  # the plan in force
        self._planned = self._read = 0  # KV tokens of the plan in force, and how many it reads
        self._warned = False  # of a plan that does not fit
        self._places = torch.arange(1, query_rows + 1, dtype=torch.int32, device=packed.device)
        self._allocate(max_requests)

    def _allocate(self, max_requests: int) -> None:
        self._max_requests, rows = max_requests, max_requests * self._query_rows
        self.engines = Engines(self._packed, rows)
        # int32 [query rows], what each of them sees; it keeps its address, as graphs read it.
        self.lens = torch.full((rows,), FILL, dtype=torch.int32, device=self._packed.device)

    def make_room(self, max_requests: int) -> None:
        """Allocate what CUDA graphs of up to so many requests read."""
        if max_requests > self._max_requests:
            self._allocate(max_requests)
        self._snapshot = RowSnapshot(self.table, max_requests)

    @property
    def in_force(self) -> PackPlan | None:
        """The plan in force, of the first shape of heads."""
        return self.engines.plans[0] if self.engines.plans else None

    def set_lens(self, counted: torch.Tensor, lengths: Lengths, more: int = 0) -> None:
        """Let each row see what SGLang counts (int [requests], on the device), and so many tokens more."""
        if lengths.drafts:
            counted = (counted[:, None] + self._places).flatten()
        if more := more + lengths.own:
            torch.add(counted, more, out=self.lens[: counted.shape[0]])
        else:
            self.lens[: counted.shape[0]].copy_(counted)

    def plan(self, step: Step, lengths: Lengths) -> None:
        """Plan a step, unless the plan in force still holds."""
        if len(step.lens) > self._max_requests:
            raise RuntimeError(f"pat: a batch of {len(step.lens)} rows, the backend was built for {self._max_requests}")
        lens = step.lens + lengths.own
        slots = self._slots_of(step, lens, lengths)
        if step.requests is None:
            self.sharing.forget()
            self._use(_unshared(lens, step.rows * self.table.stride(0)), slots, lengths)
            return
        seen = lengths.seen(lens)
        # Without drafts the length counts the token of this step.
        changed = self.sharing.observe(step.requests, step.rows, lens[: len(step.rows)] + (lengths.drafts > 0))
        seconds = None
        if changed or not self._holds(seen, lengths):
            start = time.perf_counter()
            self._use(self.sharing.forest(step.rows, lens), slots, lengths)
            seconds = time.perf_counter() - start
        plan = self.engines.plans[0]
        if self.debug:
            self.sharing.check(plan.forest, seen, slots)
        if self._recorder is not None:
            self._recorder.offer(plan, len(step.rows) * lengths.rows)
        if self._metrics is not None:
            total = int(seen.sum())
            self._metrics.step(seconds, total, self._read + total - self._planned)  # private tails have grown since

    def _slots_of(self, step: Step, lens: Lens, lengths: Lengths) -> torch.Tensor:
        """The table that the step reads: for a graph, a copy of its rows."""
        if (step.graph is not None) != self._for_graph:
            self._for_graph = step.graph is not None
            self.engines.forget()
        if step.graph is None or self._snapshot is None:
            return self.table
        rows, counted = step.graph
        more = lengths.beyond
        self._snapshot.take(rows, counted + more if more else counted, int(lens.max()) + more)
        return self._snapshot.slots

    def _holds(self, seen: Lens, lengths: Lengths) -> bool:
        """Whether the plan in force does for rows that see so many tokens."""
        return self.engines.valid_for(seen) and lengths.within_tail(seen, self.engines.plans[0].forest.seq_len)

    def _use(self, forest: Forest, slots: torch.Tensor, lengths: Lengths) -> None:
        if slots is not self.table:
            forest = replace(forest, row_offset=np.arange(forest.n_requests) * slots.stride(0))
        forest = lengths.with_drafts(forest)
        lens = self.lens[: forest.n_requests]
        try:
            self.engines.plan(forest, slots, lens)
        except (PlanError, MemoryError) as error:  # more levels than there is memory for parts, or none at all
            if self._metrics is not None:
                self._metrics.unshared.inc()
            if not self._warned:
                self._warned = True
                logger.warning("feather: pat decodes a batch without sharing, as its plan does not fit: %r", error)
            try:
                self.engines.plan(_unshared(forest.seq_len, forest.row_offset), slots, lens)
            except (PlanError, MemoryError) as again:
                end_server(f"the pat backend cannot plan {forest.n_requests} rows without sharing either", again)
        self._planned, self._read = int(forest.seq_len.sum()), self.engines.plans[0].tokens_read


def _unshared(lens: IntArray, row_offset: IntArray) -> Forest:
    """The forest of requests that share nothing."""
    nothing = np.empty(0, np.int32)
    return Forest(nothing, nothing, np.full(len(lens), -1, np.int32), lens, row_offset)
