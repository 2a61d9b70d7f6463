"""The decode steps of a draft model through the packed kernel: ``--speculative-draft-attention-backend pat``.

Before a model verifies a chain of drafts, a draft model makes it, a token of each request at a time. SGLang has a
backend for each of these steps, in one container; here they have one plan, under which the tails grow by a token a
step. The draft model's prefill, and its pass over what was verified, stay with a backend of SGLang's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from feather_sglang.adapter.attention.backend import PatBackend
from feather_sglang.adapter.attention.beside import DRAFTS_BY_PAT
from feather_sglang.adapter.attention.limits import LayerFacts, ModelFacts
from feather_sglang.errors import FeatherError


class DraftStep(AttentionBackend):
    """One decode step of a draft model: the ``number``-th of its container's plan."""

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

    Parameters
    ----------
    runner : ModelRunner
        The draft model's.
    steps : int
        ``--speculative-num-steps``; the last one is no decode step.

    Attributes
    ----------
    attn_backends : list of DraftStep
        One a decode step.
    """

    def __init__(self, runner: Any, steps: int) -> None:
        # A step sees what is committed, the tokens of the steps before it, and its own.
        super().__init__(runner, own_tokens=1, ahead=steps - 1)
        self._metrics = self._recorder = None  # which are the model's
        self.attn_backends = [DraftStep(self, number) for number in range(steps - 1)]

    def _drafts(self, server_args: Any, facts: ModelFacts, layers: tuple[LayerFacts, ...]) -> int:
        """Tokens of a verify step: a draft model has none; raises where some of its layers cannot be packed."""
        if len(layers) < len(facts.layers):
            raise FeatherError(
                "--speculative-draft-attention-backend pat: not all layers of the draft model can be packed; drop it"
            )
        return 0

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing: every step copies its lengths itself."""

    def reach(self, number: int, layer_id: int, forward_batch: Any) -> None:
        """Let the lengths be those of a step, before its first layer."""
        if layer_id == self._first_layer:
            self._copy_lengths(forward_batch, number)


@functools.cache
def draft_by_pat() -> None:
    """Make pat's steps where SGLang makes those of a draft model, in this process, for servers that ask for it."""
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    original = DraftBackendFactory.create_decode_backend

    @functools.wraps(original)
    def create_decode_backend(factory: Any) -> Any:
        runner, steps = factory.draft_model_runner, factory.speculative_num_steps
        if steps <= 1 or not getattr(runner.server_args, DRAFTS_BY_PAT, False):
            return original(factory)
        made: Any = PatDraftSteps(runner, steps)
        for backend in (made, *made.attn_backends):
            backend.prefill_attention_backend_str = backend.decode_attention_backend_str = "pat"
        return made

    DraftBackendFactory.create_decode_backend = create_decode_backend
