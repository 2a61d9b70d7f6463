"""Attention from its definition as a backend of SGLang's: windows, chunks, soft caps and sinks, on a CPU.

SGLang's own backend for CPUs knows of windows only, and reads those of a pool of their own in the wrong places. This
one stands in for the GPU backends that serve such models, under one of their names.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang.srt.model_executor import forward_batch_info

STAND_IN = "triton"  # the name of `PlainAttention`: SGLang accepts it for every kind of model


def install(patch: Any) -> None:
    """Put it in place of a backend for GPUs, under its name (``patch``: a ``MonkeyPatch``)."""
    patch.setitem(ATTENTION_BACKENDS, STAND_IN, PlainAttention)
    for module in (allocation, forward_batch_info):  # which think that its kernels can run, by its name
        patch.setattr(module, "support_triton", lambda name: False)
    patch.setattr(MLATokenToKVPool, "set_mla_kv_buffer", write_latents)


def write_latents(pool: Any, layer: Any, location: Any, latent: torch.Tensor, rope: torch.Tensor) -> None:
    pool.set_kv_buffer(layer, location, torch.cat([latent, rope], -1), latent)


class PlainAttention(TorchNativeAttnBackend):
    """``calls`` counts the layers that were decoded, by id."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.chunk = runner.model_config.attention_chunk_size
        self.calls: dict[int, int] = {}

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        drafts = forward_batch.spec_info.draft_token_num if forward_batch.forward_mode.is_target_verify() else 0
        counts = [drafts] * len(forward_batch.seq_lens) if drafts else forward_batch.extend_seq_lens.tolist()
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, counts, drafts)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        self.calls[layer.layer_id] = self.calls.get(layer.layer_id, 0) + 1
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, [1] * len(forward_batch.seq_lens))

    def _attend(self, q, k, v, layer, forward_batch, save_kv_cache, sinks, counts, beyond=0):
        """Attention of the last ``counts`` tokens of each request, which end so many ``beyond`` its length."""
        if save_kv_cache and k is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            scales = () if hasattr(self.token_to_kv_pool, "kv_lora_rank") else (layer.k_scale, layer.v_scale)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v, *scales)
        if k is not None and k.shape[1] != self.token_to_kv_pool.get_key_buffer(layer.layer_id).shape[1]:
            return self._attend_to_given(q, k, v, layer, counts)
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out, begin = [], 0
        rows = zip(
            forward_batch.req_pool_indices.tolist(), (forward_batch.seq_lens + beyond).tolist(), counts, strict=True
        )
        for row, length, count in rows:
            slots = self._slots(layer, self.req_to_token_pool.req_to_token[row, :length].long())
            mine = keys[slots].double(), values[slots].double()
            if layer.k_scale is not None:
                mine = mine[0] * layer.k_scale, mine[1] * layer.v_scale
            out.append(self._one(q[begin : begin + count], *mine, layer, sinks))
            begin += count
        return torch.cat(out).to(q.dtype).flatten(1)

    def _attend_to_given(self, q, k, v, layer, counts):
        """Prefill of whole prompts by latent attention, with keys and values of each head, which no pool holds."""
        q, k, v = (
            x.view(len(x), -1, dim)
            for x, dim in ((q, layer.qk_head_dim), (k, layer.qk_head_dim), (v, layer.v_head_dim))
        )
        parts = zip(*(x.split(counts) for x in (q, k.double(), v.double())), strict=True)
        return torch.cat([self._one(*part, layer, None) for part in parts]).to(q.dtype).flatten(1)

    def _slots(self, layer, slots):
        in_window = getattr(self.token_to_kv_pool, "layers_mapping", {}).get(layer.layer_id, (0, False))[1]
        return self.token_to_kv_pool.full_to_swa_index_mapping[slots] if in_window else slots

    def _one(self, q, keys, values, layer, sinks):
        """The last ``len(q)`` tokens of a request, float64 [tokens, heads, dim]."""
        group = q.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * layer.scaling
        if layer.logit_cap:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        at = torch.arange(len(keys))
        own = at[len(keys) - len(q) :, None]
        seen = at <= own
        if layer.sliding_window_size > -1:
            seen &= at >= own - layer.sliding_window_size
        if self.chunk and layer.use_irope:
            seen &= at // self.chunk == own // self.chunk
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(keys)], values)
