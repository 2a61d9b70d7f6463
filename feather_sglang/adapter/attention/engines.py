"""The packed kernel for every shape of heads that a model's layers have: one engine and one plan a shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from feather_kernels import BuildError
from feather_kernels.forest import Forest
from feather_kernels.plan import SHARED_LEVELS, PackPlan, default_parts
from feather_sglang.adapter.attention.limits import LayerFacts
from feather_sglang.attention.new_tokens import prompt_block
from feather_sglang.errors import FeatherError


class _Served(NamedTuple):
    """A layer's engine, and how its scores differ from those of others in the same plan."""

    engine: Any
    sm_scale: float
    logit_soft_cap: float


class Engines:
    """Engines for the packed layers of a model; a step is planned once a shape and run once a layer.

    Parameters
    ----------
    layers : sequence of LayerFacts
        Those to pack, at least one.
    dtype, kv_dtype, device
        Of queries, and of caches.
    max_requests : int
        Rows of the largest batch.
    reference : bool
        The NumPy reference instead of the kernel.
    levels : int
        Shared levels of a row that there is memory for.

    Raises
    ------
    FeatherError
        The kernel cannot be built or loaded here.
    """

    def __init__(
        self, layers: Sequence[LayerFacts], dtype: Any, kv_dtype: Any, device: Any, max_requests: int, reference: bool,
        levels: int = SHARED_LEVELS,
    ) -> None:  # fmt: skip
        engines: dict[tuple[int, int, int], Any] = {}
        try:
            for layer in layers:
                if layer.shape not in engines:
                    max_parts = default_parts(max_requests, layer.q_heads, levels)
                    engines[layer.shape] = _engine(layer, dtype, kv_dtype, device, max_requests, max_parts, reference)
                # Compiled now, and not while a graph is captured.
                engines[layer.shape].load(layer.logit_soft_cap > 0, layer.sinks)
        except (BuildError, ValueError) as error:
            raise FeatherError(f"the pat backend cannot start: {error}") from None
        self._engines = list(engines.values())
        self._served = {
            layer.layer_id: _Served(engines[layer.shape], layer.sm_scale, layer.logit_soft_cap) for layer in layers
        }
        self._shapes = {layer.layer_id: layer.shape for layer in layers}
        self.plans: list[PackPlan] = []

    def __contains__(self, layer_id: int) -> bool:
        return layer_id in self._served

    def shape(self, layer_id: int) -> tuple[int, int, int]:
        """Query heads, KV heads and head_dim of a layer."""
        return self._shapes[layer_id]

    @property
    def layer_shapes(self) -> list[tuple[int, int, int]]:
        """The same of all layers."""
        return list(self._shapes.values())

    @property
    def prompt_block(self) -> int:
        """Tokens of a prompt's block, the same for every shape of heads."""
        return min(prompt_block(engine.planner.options) for engine in self._engines)

    def plan(self, forest: Forest, table: torch.Tensor, lens: torch.Tensor) -> None:
        """Plan a batch for every shape; raises ``PlanError`` where one does not fit."""
        self.plans = []
        self.plans = [engine.plan(forest, table, lens) for engine in self._engines]

    def forget(self) -> None:
        """Drop the plans."""
        self.plans = []

    def valid_for(self, lens: np.ndarray) -> bool:
        """Whether there are plans, and they hold for these lengths."""
        return bool(self.plans) and all(plan.valid_for(lens)[0] for plan in self.plans)

    def run(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, sinks: Any,
        k_scale: float = 1.0, v_scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Attend with the last plan: q and out (rows, heads, head_dim), k and v (slots, kv_heads, head_dim)."""
        engine, scale, cap = self._served[layer_id]
        if sinks is not None and sinks.dtype != q.dtype:  # SGLang has them in bfloat16 under a model in float16, too
            sinks = sinks.float()
        scores = {"sm_scale": scale, "logit_soft_cap": cap, "sinks": sinks}
        engine.run(q, k, v, out=out, **scores, k_scale=k_scale, v_scale=v_scale)


def _engine(
    layer: LayerFacts, dtype: Any, kv_dtype: Any, device: Any, max_requests: int, max_parts: int, reference: bool
) -> Any:
    if reference:
        from feather_sglang.adapter.attention.reference import ReferenceEngine

        return ReferenceEngine(*layer.shape, max_requests=max_requests, max_parts=max_parts, kv_dtype=kv_dtype)
    from feather_kernels import PackedDecodeWrapper

    return PackedDecodeWrapper(
        *layer.shape, page_size=1, dtype=dtype, kv_dtype=kv_dtype, device=device, max_requests=max_requests,
        max_parts=max_parts, logit_soft_cap=layer.logit_soft_cap, sinks=layer.sinks,
    )  # fmt: skip
