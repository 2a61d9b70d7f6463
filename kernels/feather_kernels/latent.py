"""Latent attention (MLA, absorbed) on the GPU: the same planner, queue and merge, with one tile of 64 rows.

One KV head: a slot's 576 columns are the keys, and the first 512 of them the values. To the planner a layer of more
than 64 query heads has as many KV heads as it takes tiles, all of them the same latents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from feather_kernels.build import LATENT_DIM, load_kernel
from feather_kernels.build import LATENT_VALUES as VALUE_DIM
from feather_kernels.config import KernelConfig, cuda_device
from feather_kernels.costs import UnitCosts
from feather_kernels.errors import PlanError
from feather_kernels.inputs import check_scores, check_slots
from feather_kernels.tiles import LATENT_TILES
from feather_kernels.wrapper import PackedDecodeWrapper

ROPE_DIM = LATENT_DIM - VALUE_DIM
_HALVES = 2  # of an output's row, each a row of its own to whoever merges (csrc/sm90/latent_forward.cuh)
_ROWS = LATENT_TILES[0][0]


@dataclass(frozen=True)
class LatentConfig(KernelConfig):
    """A layer of latent attention on a GPU of compute capability 9.0.

    Attributes
    ----------
    num_qo_heads : int
        Up to 64, or a number that splits evenly over as few tiles of 64 rows as hold it.
    num_kv_heads : int
        Those tiles.
    head_dim : int
        576.

    Raises
    ------
    ValueError
        A value that is not supported.
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        tiles = tiles_of(self.num_qo_heads)
        if self.dtype != torch.bfloat16 or self.kv_dtype not in (None, torch.bfloat16):
            found = self.dtype if self.dtype != torch.bfloat16 else self.kv_dtype
            raise ValueError(f"latent attention in {found}: use torch.bfloat16")
        if self.head_dim != LATENT_DIM or self.num_kv_heads not in (1, tiles):
            raise ValueError(
                f"{self.num_kv_heads} KV heads of {self.head_dim}: latent attention has one of {LATENT_DIM}"
            )
        if self.path not in ("auto", "hopper") or (self.tiles or LATENT_TILES) != LATENT_TILES:
            raise ValueError(f"path {self.path!r}, tiles {self.tiles}: latent attention has hopper and {LATENT_TILES}")
        device = cuda_device(self.device)
        if (found := torch.cuda.get_device_capability(device)) != (9, 0):
            raise ValueError(f"latent attention needs compute capability 9.0: {device} has {found[0]}.{found[1]}")
        self._settle(device=device, kv_dtype=self.dtype, path="hopper", tiles=LATENT_TILES, num_kv_heads=tiles)

    @property
    def part_rows(self) -> int:
        """Rows of a part: the halves of each query head's."""
        return _HALVES * self.num_qo_heads

    @property
    def part_dim(self) -> int:
        """Values of each of them."""
        return VALUE_DIM // _HALVES

    @property
    def may_fuse(self) -> bool:
        """Whether one launch merges a request's parts: warps behind the queue do."""
        return True

    @property
    def planner_defaults(self) -> dict[str, Any]:
        """How plans are made unless another way is named."""
        return {
            "strategy": "time", "split": "rounds", "tail_warps": 1, "costs": UnitCosts.latent(),
            "token_values": LATENT_DIM, "causal_tails": self.causal_tails,
        }  # fmt: skip

    def load(self, soft_cap: bool, sinks: bool) -> Any:
        """The kernels, compiled if need be, which takes half a minute."""
        if soft_cap or sinks:
            raise ValueError("latent attention has neither a soft cap nor attention sinks")
        return load_kernel("bfloat16", LATENT_DIM, 90)


def tiles_of(heads: int) -> int:
    """Tiles of 64 rows that a request's query heads take, evenly."""
    tiles = -(-heads // _ROWS)
    if heads < 1 or heads % tiles:
        raise ValueError(f"{heads} query heads of latent attention: give up to {_ROWS}, or a multiple of {tiles or 1}")
    return tiles


class LatentDecodeWrapper(PackedDecodeWrapper):
    """Decode of latent attention that reads each shared latent once for a tile of query rows.

    Parameters
    ----------
    num_heads : int
        Query heads of this rank.
    sm_scale : float
        Scale of the scores; that of the model, which no shape here tells.
    **options
        As for `PackedDecodeWrapper`: ``page_size``, ``max_requests``, ``max_parts``, ``launch``, ``debug``, ``device``,
        ``causal_tails``, and the fields of `feather_kernels.options.PlannerOptions`.

    Raises
    ------
    ValueError
        An argument that is not supported.
    BuildError
        No kernel for this GPU, or nothing to build it with.
    """

    def __init__(self, num_heads: int, *, sm_scale: float, **options: Any) -> None:
        if not options.setdefault("fold_tails", True):
            raise ValueError("fold_tails is False: latent attention's units read tails, and none of them merges")
        super().__init__(num_heads, tiles_of(num_heads), VALUE_DIM, sm_scale=sm_scale, **options)

    def _configured(self, num_qo_heads: int, num_kv_heads: int, head_dim: int, **kernels: Any) -> KernelConfig:
        return LatentConfig(num_qo_heads, num_kv_heads, LATENT_DIM, **kernels)

    def run(  # type: ignore[override]
        self, q: torch.Tensor, latents: torch.Tensor, out: torch.Tensor | None = None, return_lse: bool = False, *,
        q_rope: torch.Tensor | None = None, sm_scale: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Attend with the last plan.

        Parameters
        ----------
        q : torch.Tensor
            (requests, heads, 576), or without its last 64 columns if `q_rope` has them.
        latents : torch.Tensor
            (slots, 1, 576), or (pages, page_size, 1, 576).
        out : torch.Tensor, optional
            (requests, heads, 512).
        return_lse : bool
            Also return the log-sum-exp of the scores (natural logarithm).
        q_rope : torch.Tensor, optional
            (requests, heads, 64).
        sm_scale : float, optional
            Another one than the wrapper's.

        Returns
        -------
        out : torch.Tensor
            Rows of requests without tokens are 0.
        lse : torch.Tensor
            float32 (requests, heads), if asked for.

        Raises
        ------
        ValueError
            No plan, or tensors that do not fit it; nothing is written then.
        """
        if self.pack_plan is None or self._table is None:
            raise PlanError("run() before plan(): plan the batch first")
        if q_rope is None and q.dim() == 3 and q.shape[2] == LATENT_DIM:
            q, q_rope = q[:, :, :VALUE_DIM], q[:, :, VALUE_DIM:]
        latents = self._checked_latents(q, q_rope, latents, out)
        requests, heads = q.shape[:2]
        if out is None:
            out = torch.empty(requests, heads, VALUE_DIM, dtype=q.dtype, device=q.device)
        lse = None
        if return_lse:
            lse = torch.empty(requests, heads, _HALVES, dtype=torch.float32, device=q.device)
        scale = self.sm_scale if sm_scale is None else sm_scale
        check_scores(scale, 0.0)
        tables = self._lens, self._table, self.page_size.bit_length() - 1
        keys = latents.expand(-1, self.config.num_kv_heads, -1)
        scratch = self.scratch.tensors
        self._launch_all(
            self._module_for(scale, 0.0, None),
            (q, keys, keys, out, lse, *scratch, *tables, scale, 0.0, None, 1.0, q_rope, self._flags),
        )
        return (out, lse[:, :, 0]) if lse is not None else out

    def _checked_latents(
        self, q: torch.Tensor, q_rope: torch.Tensor | None, latents: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """The latents by slots, if all tensors fit the plan."""
        assert self.pack_plan is not None and self._table is not None
        config, requests = self.config, self.pack_plan.n_requests
        if q_rope is None:
            raise PlanError(f"q is {list(q.shape)} without q_rope: give {LATENT_DIM} columns, or both")
        columns = {"q": VALUE_DIM, "q_rope": ROPE_DIM, "out": VALUE_DIM}
        for name, tensor in (("q", q), ("q_rope", q_rope), ("out", out)):
            if tensor is None:
                continue
            shape = [requests, config.num_qo_heads, columns[name]]
            if list(tensor.shape) != shape:
                raise PlanError(f"{name} is {list(tensor.shape)}, the plan is for {shape}: plan this batch first")
            aligned = not any(stride % 8 for stride in tensor.stride()[:2]) and tensor.data_ptr() % 16 == 0
            if tensor.stride(2) != 1 or not aligned:
                raise PlanError(f"{name} has strides {tensor.stride()}: rows must be contiguous and 16-byte aligned")
        if out is not None and out.stride(1) != VALUE_DIM:
            raise PlanError(f"out has strides {out.stride()}: its heads must lie side by side")
        if latents.dim() == 4 and latents.shape[1] == self.page_size and latents.is_contiguous():
            latents = latents.flatten(0, 1)
        if latents.dim() != 3 or tuple(latents.shape[1:]) != (1, LATENT_DIM):
            raise PlanError(
                f"latents is {list(latents.shape)}: give (slots, 1, {LATENT_DIM}) or (pages, {self.page_size}, 1, "
                f"{LATENT_DIM})"
            )
        if latents.stride(2) != 1 or latents.stride(0) % 8 or latents.data_ptr() % 16:
            raise PlanError(f"latents has strides {latents.stride()}: its slots must be contiguous and 16-byte aligned")
        for name, tensor in (("q", q), ("q_rope", q_rope), ("latents", latents), ("out", out)):
            if tensor is not None and (tensor.dtype != config.dtype or tensor.device != config.device):
                raise PlanError(
                    f"{name} is {tensor.dtype} on {tensor.device}: the wrapper is for {config.dtype} on {config.device}"
                )
        if self.debug:
            check_slots(self.pack_plan, self._table, self._lens, self.page_size, len(latents))
        return latents
