"""Random batches of latent attention: their tensors, the reference, and whether a result is right.

As `check_decode_kernel` has them for K and V: unused latents and whatever is to be written are NaN before a run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import random_batches
import torch
from check_decode_kernel import (
    GUARD,
    Guarded,
    Outcome,
    Wrong,
    check_scratch,
    chunks,
    compare,
    noted,
    poison_scratch,
    pytorch_attention,
    same_bits,
)
from decode_cases import Heads, attend, padded_slots
from random_batches import Batch, Choice

from feather_kernels.build import LATENT_DIM
from feather_kernels.latent import VALUE_DIM, LatentDecodeWrapper
from feather_kernels.pack import MERGES, SPLITS, STRATEGIES

HEADS = (1, 2, 4, 5, 8, 12, 16, 16, 20, 24, 32, 48, 64, 66, 96, 128)
SCALE = 192**-0.5  # DeepSeek V3's, but for its YaRN factor
DEFAULT_SHARE = 0.5  # of cases whose plans are made as by default


def draw(seed: int) -> Choice:
    """The case of a seed: the batch of `random_batches`, for latents."""
    rng = np.random.default_rng([seed, 4])
    choice = random_batches.draw(seed)
    wrapper: dict[str, Any] = {"grow": bool(choice.growth or rng.random() < 0.5), "debug": bool(rng.random() < 0.05)}
    if rng.random() > DEFAULT_SHARE:
        wrapper |= {"strategy": str(rng.choice(list(STRATEGIES))), "split": str(rng.choice(list(SPLITS)))}
    wrapper["merge"] = str(rng.choice(list(MERGES)))
    return replace(
        choice, heads=Heads(int(rng.choice(HEADS)), 1), head_dim=LATENT_DIM, dtype="bfloat16", soft_cap=0.0,
        interleaved=False, sm_scale=SCALE, wrapper=tuple(wrapper.items()),
    )  # fmt: skip


class Device:
    """A batch on the device; latents that no request reads are NaN."""

    def __init__(self, batch: Batch, device: torch.device | str = "cuda") -> None:
        choice, requests = batch.choice, batch.forest.n_requests
        draw = torch.Generator(device).manual_seed(choice.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=draw)

        self.latents = normal(batch.n_slots, 1, LATENT_DIM)
        if choice.spiky:
            self.latents[torch.rand(batch.n_slots, device=device, generator=draw) < 0.01] *= 10
        tokens = torch.arange(choice.page_size, device=device) < torch.from_numpy(batch.valid).to(device)[:, None]
        self.latents.masked_fill_(~tokens.view(-1, 1, 1), float("nan"))
        guarded = torch.full((requests + 2 * GUARD, choice.heads.query, LATENT_DIM), float("nan"), dtype=torch.bfloat16)
        self._q = guarded.to(device)
        self.q = self._q[GUARD:-GUARD]
        self.q.normal_(generator=draw).mul_(choice.q_scale)
        self.table = torch.from_numpy(batch.table).to(device, getattr(torch, choice.table_dtype))
        self.planned_lens = torch.from_numpy(batch.forest.seq_len).to(device, torch.int32)
        self.lens = torch.from_numpy(batch.seq_len).to(device)
        self.rows = torch.from_numpy(batch.forest.row_offset).to(device)
        self.batch = batch

    @property
    def queries(self) -> dict[str, torch.Tensor]:
        """As `run` takes them: in one tensor, or in two, of which one has the heads outermost in memory."""
        if self.batch.choice.seed % 2:
            return {"q": self.q}
        values = self.q[..., :VALUE_DIM].transpose(0, 1).contiguous().transpose(0, 1)
        return {"q": values, "q_rope": self.q[..., VALUE_DIM:].contiguous()}


def references(data: Device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The float32 output and log-sum-exp, and PyTorch's own output in bfloat16."""
    choice, batch = data.batch.choice, data.batch
    shape = *data.q.shape[:2], VALUE_DIM
    out = torch.empty(shape, dtype=torch.float32, device=data.q.device)
    lse = torch.empty(shape[:2], dtype=torch.float32, device=data.q.device)
    own = torch.empty(shape, dtype=data.q.dtype, device=data.q.device)
    for requests in chunks(batch.seq_len, LATENT_DIM):
        chosen = torch.from_numpy(requests).to(data.q.device)
        lens = data.lens[chosen].long()
        width = -(-max(int(batch.seq_len[requests].max()), 1) // 16) * 16
        slots = padded_slots(data.table, data.rows[chosen], lens, choice.page_size, width)
        q, values = data.q[chosen], data.latents[..., :VALUE_DIM]
        out[chosen], lse[chosen] = attend(q, data.latents, values, slots, lens, SCALE)
        keys = data.latents[slots]
        own[chosen] = pytorch_attention(q, keys, keys[..., :VALUE_DIM], lens, SCALE, 0.0)
    return out, lse, own


def attend_once(wrapper: Any, data: Device) -> tuple[torch.Tensor, torch.Tensor]:
    """One run into poisoned memory."""
    poison_scratch(wrapper)
    guarded = Guarded(data.q[..., :VALUE_DIM])
    out, lse = wrapper.run(latents=data.latents, out=guarded.out, return_lse=True, **data.queries)
    check_scratch(wrapper)
    guarded.check()
    return out, lse


def check_forest(choice: Choice) -> Outcome:
    """One random forest: plan, perhaps grow, run twice, compare."""
    outcome = Outcome(choice)
    with noted(outcome):
        batch = random_batches.make(choice)
        data = Device(batch)
        wrapper = LatentDecodeWrapper(
            choice.heads.query, sm_scale=SCALE, page_size=choice.page_size, max_requests=batch.forest.n_requests,
            **dict(choice.wrapper),
        )  # fmt: skip
        lens = data.planned_lens.clone() if choice.growth or choice.give_lens else None
        wrapper.plan(batch.forest, data.table, lens)
        if lens is not None:
            lens.copy_(data.lens)
        first, expected = attend_once(wrapper, data), references(data)
        compare(*first, expected, outcome)
        if not all(map(same_bits, first, attend_once(wrapper, data))):
            raise Wrong("a second run of the same plan gives other bits")
    return outcome
