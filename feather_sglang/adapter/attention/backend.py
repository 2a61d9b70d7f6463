"""SGLang's decode attention through `feather_kernels.PackedDecodeWrapper`: the backend ``pat``.

It packs the layers that see the whole sequence. Others, with a window or in chunks, run on the backend that SGLang
would have chosen without pat (`beside`), which is told of every step as if it were alone.

A decode step walks through: `watch_batches` hands the batch's host side to the backend (``expect``); ``_out_graph``
copies the batch's rows of slots, finds out whether the last plan still holds and plans if not; ``_in_graph``, which a
CUDA graph records, copies the lengths to where the kernel reads them; ``forward_decode`` runs once a layer. Under
speculative decoding the step that verifies drafts goes the same way, with a query row a draft, and ends in
``forward_extend``. Prefill is another backend's, through SGLang's ``HybridAttnBackend``, or is packed, too (`prefill`).

There is no switch for batches that share nothing: on the Hopper path the planner's strategy, ``time``, packs only
where that takes less of the processors' modelled time, and a batch without sharing is then planned as ``query`` would
plan it. A failure here ends the request's server as any other backend's does; it never falls back to another kernel.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention import base_attn_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_parallel

from feather_kernels import PlanError
from feather_kernels.forest import Forest
from feather_kernels.plan import SHARED_LEVELS, PackPlan
from feather_sglang.adapter.attention.beside import create_beside
from feather_sglang.adapter.attention.engines import Engines
from feather_sglang.adapter.attention.facts import facts_of, uses_reference
from feather_sglang.adapter.attention.limits import LayerFacts, ModelFacts, packed_layers
from feather_sglang.adapter.attention.metrics import pat_metrics
from feather_sglang.adapter.attention.prefill import PackedPrefill, pack_prefill
from feather_sglang.adapter.attention.record import plan_recorder
from feather_sglang.adapter.attention.row_snapshot import RowSnapshot
from feather_sglang.adapter.attention.rows import RowSharing
from feather_sglang.adapter.attention.speculation import verified_drafts
from feather_sglang.adapter.options import packs_prefill
from feather_sglang.adapter.refusals import refuse_pat_flags
from feather_sglang.attention.new_tokens import tokens_seen, with_new_tokens
from feather_sglang.errors import FeatherError

logger = logging.getLogger(__name__)

FILL = 1  # KV tokens of the rows that pad a batch to the size of a CUDA graph
DRAFT_TAIL = 8  # tokens that may be committed under a plan: every draft of their request reads them again
DEBUG_CHECK = "FEATHER_DEBUG_CHECK"


class PatBackend(AttentionBackend):
    """Decode attention that reads each shared KV token once for a tile of the query rows that share it.

    Parameters
    ----------
    model_runner : ModelRunner
        Its model and its memory pools exist already.
    own_tokens : int
        Tokens of a decode step itself that SGLang's lengths do not count.
    ahead : int
        Tokens beyond SGLang's lengths that are decoded under one plan, these included.

    Attributes
    ----------
    sharing : RowSharing
        Which rows of the batch share what.
    beside : AttentionBackend or None
        SGLang's own, where layers are left to it.
    drafts : int
        Tokens of each request in a verify step; 0 where pat sees none.
    table : torch.Tensor
        int32 [rows, tokens], ``req_to_token``.
    debug : bool
        Whether slots are looked at after every plan.
    packed_prefill : PackedPrefill or None
        What prefills, where that is packed.
    """

    def __init__(self, model_runner: Any, own_tokens: int = 0, ahead: int = 0) -> None:
        super().__init__()
        self._own_tokens, self._ahead = own_tokens, ahead
        self._reference = uses_reference(model_runner)
        refuse_pat_flags(model_runner.server_args)
        facts = facts_of(model_runner, self._reference)
        self._layers = packed_layers(facts)
        self._first_layer = min(layer.layer_id for layer in self._layers)
        self._dtype, self._kv_dtype = model_runner.dtype, model_runner.kv_cache_dtype
        self._device = model_runner.device
        self._pool = self.token_to_kv_pool = model_runner.token_to_kv_pool
        rows = self.req_to_token_pool = model_runner.req_to_token_pool
        self.table = rows.req_to_token
        self._page = model_runner.server_args.page_size or 1
        overlap = not model_runner.server_args.disable_overlap_schedule
        self.sharing = RowSharing(self.table, rows.req_generation.numpy(), settled_at=2 if overlap else 1)
        self._expected: tuple[list[Any], np.ndarray] | None = None
        self._metrics = pat_metrics()
        self._recorder = plan_recorder()
        self.debug = os.environ.get(DEBUG_CHECK) == "1"
        self._snapshot: RowSnapshot | None = None  # what graphs read
        self._for_graph = False  # the plan in force
        self.drafts = self._drafts(model_runner.server_args, facts, self._layers)
        self._own = torch.arange(1, self.drafts + 1, dtype=torch.int32, device=self._device)
        self._planned = self._read = 0  # KV tokens of the plan in force, and how many it reads
        self._warned = False  # of a plan that does not fit
        width = get_parallel().attn_tp_size  # under data-parallel attention batches are padded to its multiple
        self._allocate(-(-rows.size // width) * width)
        self.beside: Any = create_beside(model_runner, len(facts.layers) - len(self._layers))
        self.packed_prefill: PackedPrefill | None = None
        self._server_args = model_runner.server_args
        if packs_prefill():
            pack_prefill()
        watch_batches()

    def _drafts(self, server_args: Any, facts: ModelFacts, layers: tuple[LayerFacts, ...]) -> int:
        """Tokens of each request in a verify step."""
        return verified_drafts(server_args, masks=len(layers) < len(facts.layers))

    def _allocate(self, max_requests: int) -> None:
        """Build the engines and the lengths that they read; both keep their addresses from here on."""
        self._max_requests, rows = max_requests, max_requests * max(1, self.drafts)
        self._engines = self.make_engines(rows, SHARED_LEVELS)
        self._lens = torch.full((rows,), FILL, dtype=torch.int32, device=self._device)

    def make_engines(self, rows: int, levels: int) -> Engines:
        """Engines of the packed layers for so many query rows and shared levels."""
        return Engines(self._layers, self._dtype, self._kv_dtype, self._device, rows, self._reference, levels)

    def around_prefill(self, stock: Any) -> Any:
        """SGLang's prefill backend, with the packed layers packed if that was asked for."""
        if packs_prefill():
            self.packed_prefill = PackedPrefill(stock, self, self._server_args)
        return self.packed_prefill or stock

    @property
    def plan(self) -> PackPlan | None:
        """The plan in force, of the first shape of heads."""
        return self._engines.plans[0] if self._engines.plans else None

    # What SGLang asks of a backend -----------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make room for the largest captured batch (SGLang calls it once, before it captures)."""
        if max_bs > self._max_requests:
            self._allocate(max_bs)
        self._snapshot = RowSnapshot(self.table, max_bs)
        if self.beside is not None:
            self.beside.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of the rows that pad a captured batch, the same for all of SGLang's own backends."""
        return FILL

    def on_after_cuda_graph_warmup(self) -> None:
        """Nothing of pat's own has to be undone."""
        if self.beside is not None:
            self.beside.on_after_cuda_graph_warmup()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a step that no graph replays."""
        self._plan_step(forward_batch)
        self._copy_lengths(forward_batch)
        if self.beside is not None:
            self.beside.init_forward_metadata(forward_batch)

    if hasattr(base_attn_backend, "SharedReadEnds"):

        def shared_read_ends(self, fm: Any) -> Any:
            """When SGLang may write to the table of slots: graphs read a copy of it, made before they are replayed."""
            ends = base_attn_backend.SharedReadEnds
            own = ends.PRE_REPLAY if fm.is_decode() or fm.is_target_verify() else ends.UNKNOWN
            return own if self.beside is None else ends.max_of((own, self.beside.shared_read_ends(fm)))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan a step: once for all layers, on the host, before the graph is replayed."""
        self._plan_step(forward_batch, in_capture, for_graph=True)
        if self.beside is not None:
            self.beside.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Copy the lengths of a step, as part of the graph."""
        self._copy_lengths(forward_batch)
        if self.beside is not None:
            self.beside.init_forward_metadata_in_graph(forward_batch)

    def _copy_lengths(self, forward_batch: Any, more: int = 0) -> None:
        """What each row sees, and so many tokens more."""
        if forward_batch.forward_mode.is_idle():
            return
        lens = forward_batch.seq_lens
        if forward_batch.forward_mode.is_target_verify():
            lens = (lens[:, None] + self._own).flatten()
        if more := more + self._own_tokens:
            torch.add(lens, more, out=self._lens[: lens.shape[0]])
        else:
            self._lens[: lens.shape[0]].copy_(lens)

    def _plan_step(self, forward_batch: Any, in_capture: bool = False, for_graph: bool = False) -> None:
        if forward_batch.forward_mode.is_idle():
            return
        requests = forward_batch.seq_lens.shape[0]
        if requests > self._max_requests:
            raise RuntimeError(f"pat: a batch of {requests} rows, the backend was built for {self._max_requests}")
        expected, self._expected = self._expected, None
        if for_graph != self._for_graph:
            self._for_graph = for_graph
            self._engines.forget()
        if in_capture or expected is None:  # a dummy batch: nobody's requests
            self._plan_apart(forward_batch)
            return
        requests_now, rows = expected
        if forward_batch.seq_lens_cpu is None:
            raise RuntimeError("pat: SGLang gave no lengths on the host")
        if len(rows) > requests:
            raise RuntimeError(f"pat: SGLang announced {len(rows)} rows and runs {requests}")
        lens = np.full(requests, FILL, np.int32)
        lens[: len(rows)] = forward_batch.seq_lens_cpu.numpy()[: len(rows)]
        lens += self._own_tokens
        drafts = self._drafts_of(forward_batch)
        self._copy_rows(forward_batch, lens, drafts)
        seen = tokens_seen(lens, drafts) if drafts else lens
        # Without drafts the length counts the token of this step.
        changed = self.sharing.observe(requests_now, rows, lens[: len(rows)] + (drafts > 0))
        total = int(seen.sum())
        seconds = None
        if changed or not self._holds(seen, drafts):
            start = time.perf_counter()
            self._use(self.sharing.forest(rows, lens), drafts)
            seconds = time.perf_counter() - start
        plan = self._engines.plans[0]
        if self.debug:
            self.sharing.check(plan.forest, seen, self._slots)
        if self._recorder is not None:
            self._recorder.offer(plan, len(rows) * max(1, drafts))
        if self._metrics is not None:
            self._metrics.step(seconds, total, self._read + total - self._planned)  # private tails have grown since

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extras: Any,
    ) -> torch.Tensor:
        """q [rows, heads * head_dim], k and v [rows, kv_heads, head_dim] -> [rows, heads * head_dim]"""
        if layer.layer_id not in self._engines:
            return self.beside.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **extras)
        return self.attend(self._engines, q, k, v, layer, forward_batch, save_kv_cache, **extras)

    def attend(
        self,
        engines: Engines,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extras: Any,
    ) -> torch.Tensor:
        """Write a step's KV, and attend with the last plan of these engines; tensors as for `forward_decode`."""
        sinks = extras.pop("sinks", None)
        if given := [name for name, value in extras.items() if value is not None and value is not False]:
            raise FeatherError(
                f"the pat backend does not support {', '.join(given)} in attention, which this model uses: choose "
                "another --decode-attention-backend"
            )
        if save_kv_cache and k is not None:
            self._pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, layer.k_scale, layer.v_scale)
        heads, _, dim = engines.shape(layer.layer_id)
        q = q.reshape(-1, heads * dim)
        out = q.new_empty(q.shape)
        engines.run(
            layer.layer_id,
            q.view(-1, heads, dim),
            self._pool.get_key_buffer(layer.layer_id),
            self._pool.get_value_buffer(layer.layer_id),
            out.view(-1, heads, dim),
            sinks,
            *self._kv_scales(layer),
        )
        return out

    def _kv_scales(self, layer: Any) -> tuple[float, float]:
        """What a layer's keys and values in the pool stand for times, as SGLang divides them when it writes them."""
        if self._kv_dtype == self._dtype:
            return 1.0, 1.0
        scales = ((layer.k_scale, layer.k_scale_float), (layer.v_scale, layer.v_scale_float))
        k_scale, v_scale = (1.0 if scale is None else number for scale, number in scales)
        return k_scale, v_scale

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The same for a verify step, whose rows are drafts; raises for prefill, which belongs to another backend."""
        if not forward_batch.forward_mode.is_target_verify():
            raise RuntimeError("pat decodes only: prefill belongs to another backend")
        if layer.layer_id not in self._engines:
            return self.beside.forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)
        return self.forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)

    @property
    def verify_mask(self) -> Any:
        """A mask of drafts is for the backend beside pat, if anyone."""
        return None if self.beside is None else self.beside.verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing of pat's own depends on which tokens were drafted."""
        if self.beside is not None:
            self.beside.update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)

    # Plans -----------------------------------------------------------------------------------------------------

    def notice(self, batch: Any) -> None:
        """The host side of the batch that SGLang is about to run."""
        mode = batch.forward_mode
        if mode.is_idle():  # a decode step before may have turned into a prefill, as other ranks' did, without a plan
            self._expected = None
        elif mode.is_decode() or (mode.is_target_verify() and self.drafts):
            self.expect(batch)
        elif mode.is_extend() and not mode.is_target_verify():
            self.prefill(batch)

    def expect(self, batch: Any) -> None:
        """The host side of the decode batch that SGLang is about to run."""
        self._expected = list(batch.reqs), batch.req_pool_indices_cpu.numpy()

    def prefill(self, batch: Any) -> None:
        """The host side of the prefill batch that SGLang is about to run."""
        rows = batch.req_pool_indices_cpu.numpy()
        if batch.decoding_reqs is batch.reqs:  # a decode step in prefill's form, as another rank prefills
            return
        cached = np.zeros(len(rows), np.int64)
        # Rows that decode in the same batch are not final, and a page of which the cache has a part is not yet its own.
        if not batch.forward_mode.is_mixed() and len(batch.prefix_lens) == len(rows):
            cached[:] = np.array(batch.prefix_lens) // self._page * self._page
        self.sharing.prefill(rows, cached)

    @property
    def _slots(self) -> torch.Tensor:
        """The table that the plan in force reads."""
        return self._snapshot.slots if self._for_graph and self._snapshot is not None else self.table

    def _copy_rows(self, forward_batch: Any, lens: np.ndarray, drafts: int) -> None:
        if self._for_graph and self._snapshot is not None:
            rows = forward_batch.req_pool_indices[: len(lens)]
            more = drafts or self._ahead
            seen = forward_batch.seq_lens + more if more else forward_batch.seq_lens
            self._snapshot.take(rows, seen, int(lens.max()) + more)

    def _drafts_of(self, forward_batch: Any) -> int:
        """Tokens of each request in a verify step; 0 for a decode step."""
        if not forward_batch.forward_mode.is_target_verify():
            return 0
        rows = forward_batch.input_ids.shape[0]
        if rows != forward_batch.seq_lens.shape[0] * self.drafts:
            raise RuntimeError(
                f"pat: {rows} drafts of {forward_batch.seq_lens.shape[0]} requests, {self.drafts} of each are expected"
            )
        return self.drafts

    def _holds(self, seen: np.ndarray, drafts: int) -> bool:
        """Whether the plan in force does for rows that see so many tokens."""
        if not self._engines.valid_for(seen):
            return False
        return not drafts or int((seen - self._engines.plans[0].forest.seq_len).max()) <= DRAFT_TAIL

    def _use(self, forest: Forest, drafts: int) -> None:
        slots = self._slots
        if slots is not self.table:
            forest = replace(forest, row_offset=np.arange(forest.n_requests) * slots.stride(0))
        if drafts:
            forest = with_new_tokens(forest, drafts)
        lens = self._lens[: forest.n_requests]
        try:
            self._engines.plan(forest, slots, lens)
        except PlanError as error:  # more levels than there is memory for parts
            if self._metrics is not None:
                self._metrics.unshared.inc()
            if not self._warned:
                self._warned = True
                logger.warning("feather: pat decodes a batch without sharing, as its plan does not fit: %s", error)
            self._engines.plan(_alone(forest.seq_len, forest.row_offset), slots, lens)
        self._planned, self._read = int(forest.seq_len.sum()), self._engines.plans[0].tokens_read

    def _plan_apart(self, forward_batch: Any) -> None:
        """Plan a dummy batch, whose rows share nothing."""
        if getattr(forward_batch, "actual_forward_mode", forward_batch.forward_mode).is_idle():
            # A graph that other ranks replay with requests, and this one with padding alone: nothing to wait for.
            rows = np.zeros(forward_batch.seq_lens.shape[0], np.int64)
            lens = np.full(len(rows), FILL, np.int32)
        else:
            rows = forward_batch.req_pool_indices.cpu().numpy().astype(np.int64)
            lens = forward_batch.seq_lens.cpu().numpy().astype(np.int32) + self._own_tokens
        self.sharing.forget()
        drafts = self._drafts_of(forward_batch)
        self._copy_rows(forward_batch, lens, drafts)
        self._use(_alone(lens, rows * self.table.stride(0)), drafts)


def _alone(lens: np.ndarray, row_offset: np.ndarray) -> Forest:
    """The forest of requests that share nothing."""
    nothing = np.empty(0, np.int32)
    return Forest(nothing, nothing, np.full(len(lens), -1, np.int32), lens, row_offset)


@functools.cache
def watch_batches() -> None:
    """Tell each pat backend which requests its next batch has: SGLang passes on their rows on the device only."""
    original = ForwardBatch.__dict__["init_new"].__func__

    @functools.wraps(original)
    def init_new(cls: Any, batch: Any, model_runner: Any, *args: Any, **kwargs: Any) -> Any:
        backend = getattr(model_runner, "feather_pat", None)
        if backend is not None:
            backend.notice(batch)
        result = original(cls, batch, model_runner, *args, **kwargs)
        if (prefill := getattr(backend, "packed_prefill", None)) is not None:  # none where a draft model is pat's
            prefill.expect(batch, result)
        return result

    ForwardBatch.init_new = classmethod(init_new)
