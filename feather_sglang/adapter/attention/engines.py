"""The packed kernel for every shape of heads that a model's layers have: one engine and one plan a shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from feather_kernels import BuildError
from feather_kernels.forest import Forest
from feather_kernels.options import PlannerOptions
from feather_kernels.plan import SHARED_LEVELS, PackPlan, default_parts
from feather_sglang.adapter.attention.limits import LayerFacts
from feather_sglang.adapter.failures import end_server
from feather_sglang.errors import FeatherError


@dataclass(frozen=True)
class PackedLayers:
    """The packed layers of a model, and the dtype and layout of their KV."""

    layers: tuple[LayerFacts, ...]  # at least one
    dtype: torch.dtype  # of queries
    kv_dtype: torch.dtype
    device: Any
    pool: Any = None  # SGLang's, with the KV of all layers
    others: int = 0  # layers of the model that are left to another backend
    reference: bool = False  # the NumPy reference instead of the kernel
    verdict: str = ""  # which layers are packed, in words

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's KV in all of them."""
        values = [layer.kv_heads * (layer.head_dim + layer.v_head_dim * (not layer.latent)) for layer in self.layers]
        return int(sum(values) * self.kv_dtype.itemsize)


class Engines:
    """Engines for the packed layers of a model; a step is planned once a shape and run once a layer.

    There is memory for ``max_rows`` query rows with ``levels`` shared levels each. Raises ``FeatherError`` where the
    kernel cannot be built or loaded.
    """

    def __init__(self, packed: PackedLayers, max_rows: int, levels: int = SHARED_LEVELS) -> None:
        self._packed = packed
        engines: dict[tuple[int, int, int], Any] = {}
        try:
            for layer in packed.layers:
                if layer.shape not in engines:
                    engines[layer.shape] = _engine(packed, layer, max_rows, levels)
                # Compiled now, and not while a graph is captured.
                engines[layer.shape].load(layer.logit_soft_cap > 0, layer.sinks)
        except (BuildError, ValueError) as error:
            raise FeatherError(f"the pat backend cannot start: {error}") from None
        self._engines = list(engines.values())
        self._served = {layer.layer_id: (engines[layer.shape], layer) for layer in packed.layers}
        self.plans: list[PackPlan] = []  # those in force, one a shape, or none

    def __contains__(self, layer_id: int) -> bool:
        return layer_id in self._served

    def shape(self, layer_id: int) -> tuple[int, int, int]:
        """Query heads, KV heads and head_dim of a layer."""
        return self._served[layer_id][1].shape

    @property
    def planner_options(self) -> list[PlannerOptions]:
        """One a shape."""
        return [engine.planner.options for engine in self._engines]

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

    def attend(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, sinks: torch.Tensor | None = None, **extras: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Write a step's KV into the pool, and attend with the last plan.

        q [rows, heads * head_dim], k and v [rows, kv_heads, head_dim] -> [rows, heads * head_dim]
        """
        facts = self._served[layer.layer_id][1]
        rope: tuple[Any, ...] = ()
        if facts.latent:
            rope, extras["sinks"] = (extras.pop("q_rope", None), extras.pop("k_rope", None)), sinks
        if given := [name for name, value in extras.items() if value is not None and value is not False]:
            raise FeatherError(
                f"the pat backend does not support {', '.join(given)} in attention, which this model uses: choose "
                "another --decode-attention-backend"
            )
        if facts.latent:
            return self._attend_to_latents(q, k if save_kv_cache else None, layer, forward_batch, *rope)
        pool, (heads, _, dim) = self._packed.pool, facts.shape
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, layer.k_scale, layer.v_scale)
        q = q.reshape(-1, heads * dim)
        out = q.new_empty(q.shape)
        caches = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        self.run(layer.layer_id, q.view(-1, heads, dim), *caches, out.view(-1, heads, dim), sinks, self._scales(layer))
        return out

    def _attend_to_latents(
        self, q: torch.Tensor, k: torch.Tensor | None, layer: Any, forward_batch: Any,
        q_rope: torch.Tensor | None, k_rope: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """The same of latent attention, whose values are the first part of keys: k [rows, 1, v_head_dim].

        q [rows, heads, v_head_dim] -> [rows, heads * v_head_dim]; what has positions comes apart, or behind the rest.
        """
        pool, (engine, facts) = self._packed.pool, self._served[layer.layer_id]
        if k is not None:
            if k_rope is None:
                k, k_rope = k[..., : facts.v_head_dim], k[..., facts.v_head_dim :]
            pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
        q = q.view(-1, facts.q_heads, facts.head_dim if q_rope is None else facts.v_head_dim)
        if q_rope is not None:
            q_rope = q_rope.view(-1, facts.q_heads, facts.head_dim - facts.v_head_dim)
        out = q.new_empty(len(q), facts.q_heads, facts.v_head_dim)
        latents = pool.get_key_buffer(layer.layer_id)
        _launch(engine, layer.layer_id, q, latents, out, q_rope=q_rope, sm_scale=facts.sm_scale)
        return out.flatten(1)

    def _scales(self, layer: Any) -> tuple[float, float]:
        """What a layer's keys and values in the pool stand for times, as SGLang divides them when it writes them."""
        if self._packed.kv_dtype == self._packed.dtype:
            return 1.0, 1.0
        scales = ((layer.k_scale, layer.k_scale_float), (layer.v_scale, layer.v_scale_float))
        k_scale, v_scale = (1.0 if scale is None else number for scale, number in scales)
        return k_scale, v_scale

    def run(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        sinks: torch.Tensor | None, kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:  # fmt: skip
        """Attend with the last plan: q and out (rows, heads, head_dim), k and v (slots, kv_heads, head_dim)."""
        engine, layer = self._served[layer_id]
        if sinks is not None and sinks.dtype != q.dtype:  # SGLang has them in bfloat16 under a model in float16, too
            sinks = sinks.float()
        scores = {"sm_scale": layer.sm_scale, "logit_soft_cap": layer.logit_soft_cap, "sinks": sinks}
        _launch(engine, layer_id, q, k, v, out=out, **scores, k_scale=kv_scales[0], v_scale=kv_scales[1])


def _launch(engine: Any, layer_id: int, *tensors: torch.Tensor, **scores: Any) -> None:
    """Run the kernel for a layer; where it fails the server ends, as another kernel may find memory damaged."""
    try:
        engine.run(*tensors, **scores)
    except (RuntimeError, ValueError) as error:
        end_server(f"the pat backend's kernel failed in layer {layer_id}", error)


def _engine(packed: PackedLayers, layer: LayerFacts, max_rows: int, levels: int) -> Any:
    room: dict[str, Any] = {"max_requests": max_rows, "max_parts": default_parts(max_rows, layer.q_heads, levels)}
    if packed.reference:
        from feather_kernels.reference_engine import ReferenceEngine, ReferenceLatentEngine

        if layer.latent:
            return ReferenceLatentEngine(*layer.shape, **room, kv_dtype=packed.kv_dtype, value_dim=layer.v_head_dim)
        return ReferenceEngine(*layer.shape, **room, kv_dtype=packed.kv_dtype)
    if layer.latent:
        from feather_kernels.latent import LatentDecodeWrapper

        return LatentDecodeWrapper(layer.q_heads, sm_scale=layer.sm_scale, **room, device=packed.device)
    from feather_kernels import PackedDecodeWrapper

    return PackedDecodeWrapper(
        *layer.shape, **room, dtype=packed.dtype, kv_dtype=packed.kv_dtype, device=packed.device,
        logit_soft_cap=layer.logit_soft_cap, sinks=layer.sinks,
    )  # fmt: skip
