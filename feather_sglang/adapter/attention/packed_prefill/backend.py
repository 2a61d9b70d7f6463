"""Packed prefill (``--feather-pat-prefill``): SGLang's prefill backend computes the layers that pat does not pack.

Every new token is a query row of the packed decode kernel (`with_new_tokens`): tokens of many requests read the cached
prefix that these share once for a tile of rows. What they share is known from SGLang's radix tree (`cached_paths`).

Only plain steps are packed: prompts, chunks of prompts, and requests that decode beside them. SGLang's backend computes
the others: steps that verify or draft tokens, or have images, whose tokens may see each other; those too large for
memory, which are counted, and said once; and under ``auto`` those without a predicted gain (`PrefillGain`), counted,
too. Each rank decides for itself there, as each learns how long its plans take.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention import base_attn_backend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from feather_kernels import PlanError
from feather_kernels.forest import Forest
from feather_sglang.adapter.attention.around import AroundBackend
from feather_sglang.adapter.attention.backend import PatBackend
from feather_sglang.adapter.attention.engines import Engines
from feather_sglang.adapter.attention.packed_prefill.metrics import count
from feather_sglang.adapter.attention.packed_prefill.radix_paths import cached_paths
from feather_sglang.adapter.attention.rows import on_device
from feather_sglang.adapter.failures import refusals_end_start_up
from feather_sglang.adapter.options import FeatherOptions, packs_prefill
from feather_sglang.adapter.refusals import resolved
from feather_sglang.attention.new_tokens import PROMPT_LEVELS, prompt_block, tokens_seen, with_new_tokens
from feather_sglang.attention.packed_prefill.gain import PrefillGain
from feather_sglang.attention.packed_prefill.prefix_paths import forest_of_paths

logger = logging.getLogger(__name__)

MAX_ROWS = 16384  # new tokens of a step, at most: of a row memory has 2 * PROMPT_LEVELS * query heads * head_dim bytes
PACKED = (ForwardMode.EXTEND, ForwardMode.MIXED)


class PackedPrefill(AroundBackend):
    """SGLang's prefill backend, with the packed kernel in the layers that pat packs."""

    def __init__(self, stock: Any, pat: PatBackend, server_args: Any) -> None:
        super().__init__(stock)
        self._pat, self._planner = pat, pat.planner
        self._most = rows_of(server_args)
        self._engines = Engines(pat.packed, self._most, PROMPT_LEVELS)
        self._block = min(map(prompt_block, self._engines.planner_options))
        self._gain: PrefillGain | None = None  # packs whatever fits
        if FeatherOptions.from_environment().pat_prefill == "auto":
            self._gain = PrefillGain((layer.shape for layer in pat.packed.layers), self._block)
        count(packed=0, left=0, declined=0, attended=0, read=0)  # so that they are there from the start
        self._expected: tuple[Any, Any] | None = None
        self.packs = False  # the step
        self._packed_any = self._warned = False
        where = " that it makes faster" if self._gain else ""
        logger.info("feather: pat packs prefill, in steps of up to %d tokens%s", self._most, where)

    def expect(self, batch: Any, forward_batch: Any) -> None:
        """The host side and the device's of the batch that SGLang is about to run, whatever its mode."""
        # SGLang runs a copy of the latter, with the same list of ids, which no other batch has.
        self._expected = (batch, forward_batch.rids) if forward_batch.forward_mode in PACKED else None

    # What SGLang asks of a backend -----------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a step, for the packed layers once, and for SGLang's backend where that has layers."""
        expected, self._expected = self._expected, None
        self.packs = False
        if expected is not None and _is_plain(forward_batch):
            batch, rids = expected
            if rids is forward_batch.rids:
                self.packs = self._plan(batch, forward_batch)
            else:
                self._leave("SGLang announced another batch")
        if not self.packs or self._pat.beside is not None:
            self._stock.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """A step that a graph replays: SGLang's backend's."""
        self.packs = False
        self._stock.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """q [tokens, heads * head_dim], k and v [tokens, kv_heads, head_dim] -> [tokens, heads * head_dim]"""
        if self.packs and layer.layer_id in self._engines:
            return self._engines.attend(q, k, v, layer, forward_batch, *args, **kwargs)
        return self._stock.forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)

    def forward(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The same by SGLang's general entry."""
        forward = self.forward_extend if self.packs else self._stock.forward
        return forward(q, k, v, layer, forward_batch, *args, **kwargs)

    if hasattr(base_attn_backend, "SharedReadEnds"):

        def shared_read_ends(self, fm: Any) -> Any:
            """When SGLang may write to the table of slots: a packed step reads it until it ends."""
            if fm in PACKED:
                return base_attn_backend.SharedReadEnds.UNKNOWN
            return self._stock.shared_read_ends(fm)

        def _snapshot_prefill_shared_reads(self, forward_batch: Any, **kwargs: Any) -> Any:
            if self.packs:
                return base_attn_backend.SharedReadEnds.UNKNOWN
            return self._stock._snapshot_prefill_shared_reads(forward_batch, **kwargs)

    # Plans -----------------------------------------------------------------------------------------------------

    def _plan(self, batch: Any, forward_batch: Any) -> bool:
        """Plan a step; False where there is no memory for it, or nothing to gain."""
        counts = np.array(forward_batch.extend_seq_lens_cpu)
        tokens = int(counts.sum())
        if tokens > self._most:
            self._leave(f"{tokens} tokens, more than the {self._most} that memory suffices for")
            return False
        if forward_batch.seq_lens_cpu is None:
            raise RuntimeError("pat: SGLang gave no lengths on the host")
        start = time.perf_counter()
        shared = self._worth_packing(batch, forward_batch.seq_lens_cpu.numpy() - counts, counts)
        if shared is None:
            count(declined=1)
            return False
        seen, table = tokens_seen(shared.seq_len, counts), self._planner.table
        try:
            self._engines.plan(with_new_tokens(shared, counts, self._block), table, on_device(seen, table.device))
        except PlanError as error:
            self._leave(str(error))
            return False
        if self._gain is not None:
            self._gain.plan_time.learn(tokens, time.perf_counter() - start)
        if self._planner.debug:
            self._planner.sharing.check(shared, shared.seq_len + counts)
        attended, read = int(seen.sum()), self._engines.plans[0].tokens_read
        if not self._packed_any:
            self._packed_any = True
            logger.info(
                "feather: pat packs a first prefill: %d requests, %d new tokens; KV tokens attended: %d, read: %d",
                len(counts), tokens, attended, read,
            )  # fmt: skip
        count(packed=1, attended=attended, read=read)
        return True

    def _worth_packing(self, batch: Any, committed: np.ndarray, counts: np.ndarray) -> Forest | None:
        """The forest of what the requests have committed; None where packing gains nothing."""
        if self._gain is None:
            return self._shared(batch, committed)
        if self._gain.may_pay(committed, counts):  # before anything is looked up
            shared = self._shared(batch, committed)
            if self._gain.pays(shared, counts):
                return shared
        self._gain.plan_time.declined()
        return None

    def _shared(self, batch: Any, committed: np.ndarray) -> Forest:
        """The forest of what the requests have committed."""
        rows = batch.req_pool_indices_cpu.numpy()
        whose = batch.reqs if len(batch.reqs) == len(rows) else [None] * len(rows)  # beams have rows of their own
        return forest_of_paths(cached_paths(batch.tree_cache, whose), committed, rows * self._planner.table.stride(0))

    def _leave(self, why: str) -> None:
        count(left=1)
        if not self._warned:
            self._warned = True
            logger.warning("feather: pat leaves a prefill step to SGLang's backend, perhaps later ones, too: %s", why)


def rows_of(server_args: Any) -> int:
    """New tokens of the largest step that is packed."""
    chunk = resolved(server_args, "chunked_prefill_size") or 0
    return min(chunk if chunk > 0 else resolved(server_args, "max_prefill_tokens"), MAX_ROWS)


def _is_plain(forward_batch: Any) -> bool:
    """Whether every token of the step sees those before it, and no others."""
    return (
        forward_batch.forward_mode in PACKED
        and forward_batch.multi_item_delimiter_indices is None
        and not any(inputs is not None for inputs in forward_batch.mm_inputs or ())
    )


@functools.cache
def pack_prefill() -> None:
    """Put `PackedPrefill` around the prefill backend that SGLang pairs with a pat backend, in this process."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    construct, init_new = HybridAttnBackend.__init__, ForwardBatch.__dict__["init_new"].__func__

    @functools.wraps(construct)
    def __init__(hybrid: Any, model_runner: Any, prefill_backend: Any, decode_backend: Any) -> None:
        if packs_prefill() and isinstance(decode_backend, PatBackend):
            with refusals_end_start_up():
                prefill_backend = PackedPrefill(prefill_backend, decode_backend, model_runner.server_args)
            model_runner.feather_prefill = prefill_backend
        construct(hybrid, model_runner, prefill_backend, decode_backend)

    @functools.wraps(init_new)
    def announce(cls: Any, batch: Any, model_runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = init_new(cls, batch, model_runner, *args, **kwargs)
        if (prefill := getattr(model_runner, "feather_prefill", None)) is not None:
            prefill.expect(batch, result)
        return result

    HybridAttnBackend.__init__, ForwardBatch.init_new = __init__, classmethod(announce)
