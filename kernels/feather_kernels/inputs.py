"""Checks that tensors and numbers fit the kernels and their plan; each raises ``PlanError``."""

from __future__ import annotations

import math

import numpy as np
import torch

from feather_kernels.config import FP8, KernelConfig
from feather_kernels.errors import PlanError, is_number
from feather_kernels.forest import Forest, check_forest
from feather_kernels.plan import PackPlan

_MOST_BYTES, _MOST_SLOTS = 2**31 - 1, 2**31  # of a slot, and in a cache: the kernels multiply numbers of 32 bits


def check_batch(
    forest: Forest, table: torch.Tensor, seq_lens: torch.Tensor | None, device: torch.device, page_size: int
) -> None:
    """The table of slots or pages and the lengths of a batch that is to be planned."""
    check_forest(forest)
    _check_tensors(table=table, seq_lens=seq_lens)
    if table.dtype not in (torch.int32, torch.int64) or table.device != device or not table.is_contiguous():
        raise PlanError(
            f"table is {table.dtype} on {table.device}: give a contiguous int32 or int64 tensor on {device}"
        )
    pages = -(-forest.seq_len.astype(np.int64) // page_size)
    # Nothing is read of rows without tokens: they may begin at the end. A sum of what is not negative would wrap.
    outside = (pages > 0) & (forest.row_offset > table.numel() - pages)
    if outside.any():
        request = int(outside.argmax())
        start, entries = int(forest.row_offset[request]), int(pages[request])
        raise PlanError(
            f"request {request} has a row of {entries} entries from entry {start} on, in a table of {table.numel()}"
        )
    if seq_lens is not None and (
        seq_lens.dtype != torch.int32 or seq_lens.device != device or seq_lens.shape != (forest.n_requests,)
        or not seq_lens.is_contiguous()
    ):  # fmt: skip
        raise PlanError(
            f"seq_lens is {seq_lens.dtype} {list(seq_lens.shape)} on {seq_lens.device}: give int32 "
            f"[{forest.n_requests}] on {device}"
        )


def check_scores(scale: float, cap: float) -> None:
    """Scale and soft cap of a layer's scores."""
    if not _is_finite(scale) or scale <= 0 or not _is_finite(cap) or cap < 0:
        raise PlanError(f"sm_scale is {scale} and logit_soft_cap {cap}: give a positive scale and no negative cap")


def check_sinks(config: KernelConfig, sinks: torch.Tensor) -> None:
    """Attention sinks of a layer."""
    _check_tensors(sinks=sinks)
    if (
        sinks.shape != (config.num_qo_heads,) or sinks.dtype not in (torch.float32, config.dtype)
        or sinks.device != config.device or not sinks.is_contiguous()
    ):  # fmt: skip
        raise PlanError(
            f"sinks is {sinks.dtype} {list(sinks.shape)} on {sinks.device}: give {config.dtype} or float32 "
            f"[{config.num_qo_heads}] on {config.device}"
        )


def check_kv_scales(kv_dtype: torch.dtype, k_scale: float, v_scale: float) -> None:
    """What a layer's keys and values stand for times."""
    if kv_dtype != FP8 and (k_scale, v_scale) != (1.0, 1.0):
        raise PlanError(f"k_scale is {k_scale} and v_scale {v_scale}: caches in {kv_dtype} have none")
    if not all(_is_finite(scale) and scale > 0 for scale in (k_scale, v_scale)):
        raise PlanError(f"k_scale is {k_scale} and v_scale {v_scale}: give finite scales above 0")


def checked_tensors(
    config: KernelConfig, page_size: int, requests: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The caches by slots, (slots, kv_heads, head_dim), if all tensors fit a plan of so many requests."""
    _check_tensors(q=q, k_cache=k, v_cache=v, out=out)
    heads, kv_heads, dim = config.num_qo_heads, config.num_kv_heads, config.head_dim
    k, v = _by_slots(k, page_size), _by_slots(v, page_size)
    shape = (requests, heads, dim)
    for name, tensor in (("q", q), ("out", out)):
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise PlanError(f"{name} is {list(tensor.shape)}, the plan is for {list(shape)}: plan this batch first")
        if tensor.stride(2) != 1 or tensor.stride(1) != dim or tensor.stride(0) % 8 or tensor.data_ptr() % 16:
            raise PlanError(
                f"{name} has strides {tensor.stride()}: its heads must lie side by side, rows 16-byte aligned"
            )
    for name, tensor in (("k_cache", k), ("v_cache", v)):
        if tensor.dim() != 3 or tuple(tensor.shape[1:]) != (kv_heads, dim):
            raise PlanError(
                f"{name} is {list(tensor.shape)}: give (slots, {kv_heads}, {dim}) or (pages, {page_size}, {kv_heads}, "
                f"{dim})"
            )
        aligned = tensor.stride(0) * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0
        if not aligned or tensor.stride(2) != 1 or (kv_heads > 1 and tensor.stride(1) != dim):
            raise PlanError(
                f"{name} has strides {tensor.stride()}: a slot's heads must lie side by side, 16-byte aligned"
            )
        if tensor.stride(0) * tensor.element_size() > _MOST_BYTES or len(tensor) > _MOST_SLOTS:
            raise PlanError(
                f"{name} has {len(tensor)} slots, {tensor.stride(0) * tensor.element_size()} bytes from one to the "
                f"next: give up to {_MOST_SLOTS} slots and {_MOST_BYTES} bytes"
            )
    dtypes = (("q", q, config.dtype), ("k_cache", k, config.kv_dtype), ("v_cache", v, config.kv_dtype))
    for name, tensor, dtype in (*dtypes, ("out", out, config.dtype)):
        if tensor is not None and (tensor.dtype != dtype or tensor.device != config.device):
            raise PlanError(
                f"{name} is {tensor.dtype} on {tensor.device}: the wrapper is for {dtype} on {config.device}"
            )
    return k, v


_MAY_LACK = ("seq_lens", "out")


def _check_tensors(**tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) and not (tensor is None and name in _MAY_LACK):
            raise PlanError(f"{name} is {type(tensor).__name__}: give a tensor")


def _is_finite(value: object) -> bool:
    return is_number(value) and abs(value) < math.inf  # type: ignore[arg-type]


def _by_slots(cache: torch.Tensor, page_size: int) -> torch.Tensor:
    """(pages, page_size, heads, head_dim) as (slots, heads, head_dim)."""
    paged = cache.dim() == 4 and cache.shape[1] == page_size and cache.stride(0) == page_size * cache.stride(1)
    return cache.flatten(0, 1) if paged else cache


def check_slots(plan: PackPlan, table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, slots: int) -> None:
    """Every table entry that the requests reach must lie inside caches of so many slots; waits for the device."""
    flat = table.flatten()
    lens = seq_lens[: plan.n_requests].cpu().tolist()
    for request, (offset, tokens) in enumerate(zip(plan.row_offset.tolist(), lens, strict=True)):
        pages = -(-tokens // page_size)
        row = flat[offset : offset + pages]
        if len(row) < pages:
            raise PlanError(f"request {request} has {tokens} tokens, its table row ends after {len(row)} entries")
        if pages and (int(row.min()) < 0 or (int(row.max()) + 1) * page_size > slots):
            bad = int(row.min()) if int(row.min()) < 0 else int(row.max())
            raise PlanError(f"request {request} reads page {bad}, outside a cache of {slots} slots")
