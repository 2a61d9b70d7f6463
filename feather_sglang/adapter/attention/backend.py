"""SGLang's decode attention through `feather_kernels.PackedDecodeWrapper`: the backend ``pat``.

It packs the layers that see the whole sequence. Others, with a window or in chunks, run on the backend that SGLang
would have chosen without pat (`beside`), which is told of every step as if it were alone.

A decode step walks through: `watch_batches` hands the batch's host side to the backend (``expect``); ``_out_graph``
has it planned, unless the last plan still holds (`StepPlanner`); ``_in_graph``, which a CUDA graph records, copies the
lengths to where the kernel reads them; ``forward_decode`` runs once a layer (`Engines`). Under speculative decoding the
step that verifies drafts goes the same way, with a query row a draft, and ends in ``forward_extend``. Prefill is
another backend's, through SGLang's ``HybridAttnBackend``.

A failure here ends the request's server as any other backend's does; it never falls back to another kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention import base_attn_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_parallel

from feather_sglang.adapter.attention.beside import PAT, create_beside
from feather_sglang.adapter.attention.engines import PackedLayers
from feather_sglang.adapter.attention.facts import packed_of
from feather_sglang.adapter.attention.lengths import FILL, PLAIN, Lengths
from feather_sglang.adapter.attention.metrics import pat_metrics
from feather_sglang.adapter.attention.record import plan_recorder
from feather_sglang.adapter.attention.rows import RowSharing
from feather_sglang.adapter.attention.speculation import verified_drafts
from feather_sglang.adapter.attention.step_planner import Step, StepPlanner


class PatBackend(AttentionBackend):
    """Decode attention that reads each shared KV token once for a tile of the query rows that share it.

    Parameters
    ----------
    model_runner : its model and its memory pools exist already.
    decode, verify : of a decode step, and of a step of drafts, which has none where pat sees no such step.
    beside : SGLang's own backend, where layers are left to it.
    observed : whether its steps are counted and recorded.
    """

    def __init__(
        self, model_runner: Any, packed: PackedLayers, decode: Lengths = PLAIN, verify: Lengths = PLAIN,
        beside: Any = None, observed: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        args, rows = model_runner.server_args, model_runner.req_to_token_pool
        self.packed, self.beside = packed, beside
        self._decode, self._verify = decode, verify
        self.token_to_kv_pool, self.req_to_token_pool = packed.pool, rows
        self._page = args.page_size or 1
        self._expected: tuple[list[Any], np.ndarray] | None = None
        settled_at = 1 if args.disable_overlap_schedule else 2
        sharing = RowSharing(rows.req_to_token, rows.req_generation.numpy(), settled_at)
        width = get_parallel().attn_tp_size  # under data-parallel attention batches are padded to its multiple
        self.planner = StepPlanner(
            packed, rows.req_to_token, sharing, -(-rows.size // width) * width, verify.rows,
            *((pat_metrics(), plan_recorder()) if observed else ()),
        )  # fmt: skip
        watch_batches()

    @property
    def drafts(self) -> int:
        """Tokens of each request in a verify step; 0 where pat sees none."""
        return self._verify.drafts

    # What SGLang asks of a backend -----------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make room for the largest captured batch (SGLang calls it once, before it captures)."""
        self.planner.make_room(max_bs)
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
        self._plan(forward_batch)
        self._set_lens(forward_batch)
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
        self._plan(forward_batch, in_capture, for_graph=True)
        if self.beside is not None:
            self.beside.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Copy the lengths of a step, as part of the graph."""
        self._set_lens(forward_batch)
        if self.beside is not None:
            self.beside.init_forward_metadata_in_graph(forward_batch)

    def forward_decode(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """q [rows, heads * head_dim], k and v [rows, kv_heads, head_dim] -> [rows, heads * head_dim]"""
        packed = layer.layer_id in self.planner.engines
        run = self.planner.engines.attend if packed else self.beside.forward_decode
        return run(q, k, v, layer, forward_batch, *args, **kwargs)

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The same for a verify step, whose rows are drafts; raises for prefill, which belongs to another backend."""
        if not forward_batch.forward_mode.is_target_verify():
            raise RuntimeError("pat decodes only: prefill belongs to another backend")
        packed = layer.layer_id in self.planner.engines
        run = self.planner.engines.attend if packed else self.beside.forward_extend
        return run(q, k, v, layer, forward_batch, *args, **kwargs)

    @property
    def verify_mask(self) -> Any:
        """A mask of drafts is for the backend beside pat, if anyone."""
        return None if self.beside is None else self.beside.verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing of pat's own depends on which tokens were drafted."""
        if self.beside is not None:
            self.beside.update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)

    # What is planned -------------------------------------------------------------------------------------------

    def notice(self, batch: Any) -> None:
        """The host side of the batch that SGLang is about to run."""
        mode = batch.forward_mode
        if mode.is_idle():  # a decode step before may have turned into a prefill, as other ranks' did, without a plan
            self._expected = None
        elif mode.is_decode() or (mode.is_target_verify() and self.drafts):
            self.expect(batch)
        elif mode.is_extend() and not mode.is_target_verify():
            self._prefill(batch)

    def expect(self, batch: Any) -> None:
        """The host side of the decode batch that SGLang is about to run."""
        self._expected = list(batch.reqs), batch.req_pool_indices_cpu.numpy()

    def _prefill(self, batch: Any) -> None:
        rows = batch.req_pool_indices_cpu.numpy()
        if batch.decoding_reqs is batch.reqs:  # a decode step in prefill's form, as another rank prefills
            return
        cached = np.zeros(len(rows), np.int64)
        # Rows that decode in the same batch are not final, and a page of which the cache has a part is not yet its own.
        if not batch.forward_mode.is_mixed() and len(batch.prefix_lens) == len(rows):
            cached[:] = np.array(batch.prefix_lens) // self._page * self._page
        self.planner.sharing.prefill(rows, cached)

    def _plan(self, forward_batch: Any, in_capture: bool = False, for_graph: bool = False) -> None:
        if forward_batch.forward_mode.is_idle():
            return
        expected, self._expected = self._expected, None
        lengths = self._lengths(forward_batch)
        if in_capture or expected is None:
            requests, (rows, lens) = None, _dummy(forward_batch)
        else:
            requests, rows = expected
            lens = _on_host(forward_batch, len(rows))
        graph = (forward_batch.req_pool_indices[: len(lens)], forward_batch.seq_lens) if for_graph else None
        self.planner.plan(Step(requests, rows, lens, graph), lengths)

    def _set_lens(self, forward_batch: Any, more: int = 0) -> None:
        """What each row sees, and so many tokens more."""
        mode = forward_batch.forward_mode
        if not mode.is_idle():
            lengths = self._verify if mode.is_target_verify() else self._decode
            self.planner.set_lens(forward_batch.seq_lens, lengths, more)

    def _lengths(self, forward_batch: Any) -> Lengths:
        """Those of the step, whose rows have to be as many."""
        if not forward_batch.forward_mode.is_target_verify():
            return self._decode
        rows, requests = forward_batch.input_ids.shape[0], forward_batch.seq_lens.shape[0]
        if rows != requests * self.drafts:
            raise RuntimeError(f"pat: {rows} drafts of {requests} requests, {self.drafts} of each are expected")
        return self._verify


def _on_host(forward_batch: Any, requests: int) -> np.ndarray:
    """int32 [requests and padding]: what SGLang counts of the first, which were announced."""
    if forward_batch.seq_lens_cpu is None:
        raise RuntimeError("pat: SGLang gave no lengths on the host")
    lens = np.full(forward_batch.seq_lens.shape[0], FILL, np.int32)
    if requests > len(lens):
        raise RuntimeError(f"pat: SGLang announced {requests} rows and runs {len(lens)}")
    lens[:requests] = forward_batch.seq_lens_cpu.numpy()[:requests]
    return lens


def _dummy(forward_batch: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rows and lengths of a batch that nobody announced."""
    if getattr(forward_batch, "actual_forward_mode", forward_batch.forward_mode).is_idle():
        # A graph that other ranks replay with requests, and this one with padding alone: nothing to wait for.
        padding = forward_batch.seq_lens.shape[0]
        return np.zeros(padding, np.int64), np.full(padding, FILL, np.int32)
    on_device = forward_batch.req_pool_indices, forward_batch.seq_lens
    rows, lens = (values.cpu().numpy() for values in on_device)
    return rows.astype(np.int64), lens.astype(np.int32)


def backend_of(model_runner: Any) -> PatBackend:
    """pat for a model that decodes, as its server's flags say."""
    packed = packed_of(model_runner)
    if any(layer.latent for layer in packed.layers):
        take_rope_apart()
    verify = Lengths(drafts=verified_drafts(model_runner.server_args, masks=packed.others > 0))
    return PatBackend(model_runner, packed, verify=verify, beside=create_beside(model_runner, packed.others))


def take_rope_apart() -> None:
    """Let DeepSeek's models hand on what has positions beside the rest, instead of copying both into one tensor."""
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS as APART

    if PAT not in APART:
        APART.append(PAT)


@functools.cache
def watch_batches() -> None:
    """Tell each pat backend which requests its next batch has: SGLang passes on their rows on the device only."""
    original = ForwardBatch.__dict__["init_new"].__func__

    @functools.wraps(original)
    def init_new(cls: Any, batch: Any, model_runner: Any, *args: Any, **kwargs: Any) -> Any:
        backend = getattr(model_runner, "feather_pat", None)
        if backend is not None:
            backend.notice(batch)
        return original(cls, batch, model_runner, *args, **kwargs)

    ForwardBatch.init_new = classmethod(init_new)
