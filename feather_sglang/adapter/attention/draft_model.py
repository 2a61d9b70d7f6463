"""A draft model through the packed kernel: ``--speculative-draft-attention-backend pat``.

Before a model verifies a chain of drafts, a draft model makes it, a token of each request at a time; afterwards it
computes the KV of what was verified. SGLang has a backend for each of the steps, in one container; here they have one
plan, under which the tails grow by a token a step (`PatDraftSteps`). The pass over what was verified is packed as a
verify step is (`PatDraftExtension`), in a CUDA graph where SGLang would capture its own backend's. The draft model's
prefill stays with a backend of SGLang's.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention import base_attn_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from feather_sglang.adapter.attention.around import AroundBackend
from feather_sglang.adapter.attention.backend import PatBackend
from feather_sglang.adapter.attention.beside import DRAFTS_BY_PAT
from feather_sglang.adapter.attention.engines import PackedLayers
from feather_sglang.adapter.attention.facts import packed_of
from feather_sglang.adapter.attention.lengths import Lengths
from feather_sglang.adapter.failures import refusals_end_start_up
from feather_sglang.errors import FeatherError


class DraftStep(AttentionBackend):
    """Decode step ``number`` of a draft model, which runs that part of its container's plan."""

    def __init__(self, steps: PatDraftSteps, number: int) -> None:
        super().__init__()
        self._steps, self._number = steps, number

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing: the container has planned for all steps."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """As the container's."""
        return self._steps.get_cuda_graph_seq_len_fill_value()

    def forward_decode(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *a: Any, **kw: Any
    ) -> Any:
        """Arguments and result of `PatBackend.forward_decode`."""
        self._steps.reach(self._number, layer.layer_id, forward_batch)
        return self._steps.forward_decode(q, k, v, layer, forward_batch, *a, **kw)


class PatDraftSteps(PatBackend):
    """The container of a draft model's decode steps, as SGLang's draft workers call it.

    ``steps`` is ``--speculative-num-steps``; the last one is no decode step.
    """

    def __init__(self, runner: Any, steps: int) -> None:
        # A step sees what is committed, the tokens of the steps before it, and its own.
        packed = _whole_model(runner)
        super().__init__(runner, packed, decode=Lengths(own=1, ahead=steps - 1), observed=False)
        self._first_layer = min(layer.layer_id for layer in packed.layers)
        self.attn_backends = [DraftStep(self, number) for number in range(steps - 1)]

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing: every step copies its lengths itself."""

    def reach(self, number: int, layer_id: int, forward_batch: Any) -> None:
        """Let the lengths be those of a step, before its first layer."""
        if layer_id == self._first_layer:
            self._set_lens(forward_batch, number)


class PatDraftExtension(AroundBackend):
    """The draft model's backend for its pass over verified tokens; SGLang's own does the rest.

    That has ``tokens`` of each request: ``--speculative-num-draft-tokens``.
    """

    def __init__(self, stock: Any, runner: Any, tokens: int) -> None:
        super().__init__(stock)
        self._tokens = tokens
        self.pat = PatBackend(runner, _whole_model(runner), verify=Lengths(drafts=tokens), observed=False)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make room for the largest captured batch."""
        self._stock.init_cuda_graph_state(max_bs, max_num_tokens)
        self.pat.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a step that no graph replays."""
        backend, step = self._whose(forward_batch)
        backend.init_forward_metadata(step)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a step before its graph is replayed."""
        backend, step = self._whose(forward_batch)
        backend.init_forward_metadata_out_graph(step, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Prepare a step, as part of its graph."""
        backend, step = self._whose(forward_batch)
        backend.init_forward_metadata_in_graph(step)

    def forward(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """q [tokens, heads * head_dim], k and v [tokens, kv_heads, head_dim] -> [tokens, heads * head_dim]"""
        run = self.pat.forward_decode if _extends_drafts(forward_batch) else self._stock.forward
        return run(q, k, v, layer, forward_batch, *args, **kwargs)

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The same of steps that extend sequences."""
        run = self.pat.forward_decode if _extends_drafts(forward_batch) else self._stock.forward_extend
        return run(q, k, v, layer, forward_batch, *args, **kwargs)

    if hasattr(base_attn_backend, "SharedReadEnds"):

        def shared_read_ends(self, fm: Any) -> Any:
            """When SGLang may write to the table of slots."""
            if fm == ForwardMode.DRAFT_EXTEND_V2:
                return self.pat.shared_read_ends(ForwardMode.TARGET_VERIFY)
            return self._stock.shared_read_ends(fm)

    def _whose(self, forward_batch: Any) -> tuple[Any, Any]:
        """The backend of a step, and the step as that one takes it."""
        if not _extends_drafts(forward_batch):
            return self._stock, forward_batch
        # As one that verifies: its lengths count the tokens of the step, and rows may be padded by one.
        requests, tokens = forward_batch.batch_size, self._tokens
        lens, on_host = forward_batch.seq_lens, forward_batch.seq_lens_cpu
        return self.pat, SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            seq_lens=(lens[:requests] - tokens).clamp_(min=0),
            seq_lens_cpu=None if on_host is None else (on_host[:requests] - tokens).clamp_(min=0),
            req_pool_indices=forward_batch.req_pool_indices[:requests],
            input_ids=SimpleNamespace(shape=(requests * tokens,)),
        )


def _whole_model(runner: Any) -> PackedLayers:
    """The layers of a draft model, all of which are packed."""
    packed = packed_of(runner)
    if packed.others:
        raise FeatherError(
            "--speculative-draft-attention-backend pat: not all layers of the draft model can be packed; drop it"
        )
    return packed


def _extends_drafts(forward_batch: Any) -> bool:
    return bool(forward_batch.forward_mode == ForwardMode.DRAFT_EXTEND_V2)


class PatDrafts:
    """The listener for a draft model's batches, which `watch_batches` calls."""

    def __init__(self) -> None:
        self.steps: PatDraftSteps | None = None
        self.extension: PatDraftExtension | None = None

    def notice(self, batch: Any) -> None:
        """The host side of the batch that SGLang is about to run."""
        mode = batch.forward_mode
        if mode == ForwardMode.DRAFT_EXTEND_V2 and self.extension is not None:
            self.extension.pat.expect(batch)
        for backend in (self.steps, self.extension and self.extension.pat):
            if backend is not None and not (mode.is_decode() and backend.drafts):
                backend.notice(batch)


@functools.cache
def draft_by_pat() -> None:
    """Make pat's backends where SGLang makes those of a draft model, in this process, for servers that ask for it."""
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    originals = DraftBackendFactory.create_decode_backend, DraftBackendFactory.create_draft_extend_backend

    @functools.wraps(originals[0])
    def create_decode_backend(factory: Any) -> Any:
        runner, steps = factory.draft_model_runner, factory.speculative_num_steps
        if steps <= 1 or not _asked(runner):
            return originals[0](factory)
        with refusals_end_start_up():
            made: Any = PatDraftSteps(runner, steps)
        for backend in (made, *made.attn_backends):
            backend.prefill_attention_backend_str = backend.decode_attention_backend_str = "pat"
        _drafts_of(runner).steps = made
        return made

    @functools.wraps(originals[1])
    def create_draft_extend_backend(factory: Any) -> Any:
        runner, stock = factory.draft_model_runner, originals[1](factory)
        if stock is None or not _asked(runner):
            return stock
        from sglang.srt.runtime_context import get_spec

        with refusals_end_start_up():
            made = PatDraftExtension(stock, runner, int(get_spec().speculative_num_draft_tokens))
        _drafts_of(runner).extension = made
        return made

    DraftBackendFactory.create_decode_backend = create_decode_backend
    DraftBackendFactory.create_draft_extend_backend = create_draft_extend_backend


def _asked(runner: Any) -> bool:
    return bool(getattr(runner.server_args, DRAFTS_BY_PAT, False))


def _drafts_of(runner: Any) -> PatDrafts:
    """What is told of the batches of a draft model, in place of either backend alone."""
    if not isinstance(getattr(runner, "feather_pat", None), PatDrafts):
        runner.feather_pat = PatDrafts()
    drafts: PatDrafts = runner.feather_pat
    return drafts
