"""A slow stand-in for the packed kernel on a CPU, for tests: it runs the very plan that the kernel would read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from feather_kernels.errors import PlanError
from feather_kernels.forest import Forest
from feather_kernels.plan import PackPlan, Planner
from feather_kernels.reference import reference_decode


class ReferenceEngine:
    """`PackedDecodeWrapper` without a GPU: the same plan and run, in NumPy and float64."""

    def __init__(
        self, num_qo_heads: int, num_kv_heads: int, head_dim: int, *, max_requests: int, max_parts: int,
        kv_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.planner = Planner(
            num_qo_heads, num_kv_heads, head_dim, max_requests=max_requests, max_parts=max_parts, n_sm=4,
            kv_value_bytes=min(2, kv_dtype.itemsize),
        )  # fmt: skip
        self._loaded: set[tuple[bool, bool]] = set()

    def load(self, soft_cap: bool, sinks: bool) -> None:
        """Note that `run` will have such scores, as the wrapper would load its kernels."""
        self._loaded.add((soft_cap, sinks))

    def plan(self, forest: Forest, table: torch.Tensor, seq_lens: torch.Tensor) -> PackPlan:
        """Pack a batch; ``table`` and ``seq_lens`` are read by every `run`."""
        self._plan, self._table, self._lens = self.planner.plan(forest), table, seq_lens
        return self._plan

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        *,
        sm_scale: float,
        logit_soft_cap: float,
        sinks: torch.Tensor | None,
        k_scale: float,
        v_scale: float,
    ) -> torch.Tensor:
        """Attend with the last plan; raises ``PlanError`` for scores that were not loaded, as a capture would."""
        if (logit_soft_cap > 0, sinks is not None) not in self._loaded:
            raise PlanError(f"no kernels are loaded for soft cap {logit_soft_cap}, sinks {sinks is not None}")
        values, _ = reference_decode(
            self._plan, to_numpy(q), to_numpy(k_cache), to_numpy(v_cache), self._table.view(-1).numpy(), 1, sm_scale,
            logit_soft_cap, self._lens.numpy(), None if sinks is None else to_numpy(sinks.detach()),
            k_scale, v_scale,
        )  # fmt: skip
        return out.copy_(torch.from_numpy(values))


class ReferenceLatentEngine(ReferenceEngine):
    """`feather_kernels.latent.LatentDecodeWrapper` without a GPU, for latents of any size."""

    def __init__(self, *shape: int, value_dim: int, **options: Any) -> None:
        super().__init__(*shape, **options)
        self._value_dim = value_dim

    def run(  # type: ignore[override]
        self, q: torch.Tensor, latents: torch.Tensor, out: torch.Tensor, *, q_rope: torch.Tensor | None,
        sm_scale: float,
    ) -> torch.Tensor:  # fmt: skip
        """Attend with the last plan."""
        q = q if q_rope is None else torch.cat([q, q_rope], -1)
        scores: dict[str, Any] = {"logit_soft_cap": 0.0, "sinks": None, "k_scale": 1.0, "v_scale": 1.0}
        return super().run(q, latents, latents[..., : self._value_dim], out, sm_scale=sm_scale, **scores)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy on the host; NumPy has neither bfloat16 nor float8."""
    unknown = tensor.dtype == torch.bfloat16 or (tensor.is_floating_point() and tensor.element_size() == 1)
    return (tensor.float() if unknown else tensor).cpu().numpy()
