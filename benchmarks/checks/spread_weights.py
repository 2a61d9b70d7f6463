"""``sglang.launch_server`` whose dummy weights let a model tell prompts apart.

    python benchmarks/checks/spread_weights.py --model-path CONFIG_FOLDER --load-format dummy ...

SGLang's own dummy weights are so small that attention leaves no trace in the logits: a wrong backend would answer as a
right one. These are normal and scaled by their fan-in, from a seed of each parameter's name and of the shard of it, so
that every server of a model has the same ones. A model whose configuration has ``draft_noise`` is the same up to that
share of noise: it drafts for the other one.
"""

from __future__ import annotations

import os
import runpy
import zlib
from typing import Any

import torch
from sglang.srt.model_loader import loader

# Scores and logits that differ. Sharper scores would let rounding part two right backends after a few tokens.
GAINS = {"qkv": 1.4, "q_proj": 1.4, "k_proj": 1.4, "v_proj": 1.4, "o_proj": 2.0, "lm_head": 2.0}
ONE_MORE = ("GemmaRMSNorm", "Gemma3RMSNorm")


def spread_weights(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """Fill all parameters in place."""
    # Gemma's norms, which Qwen3-Next has too, scale by one more than their weight.
    offset = {f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ in ONE_MORE}
    noise = getattr(getattr(model, "config", None), "draft_noise", 0.0)
    for name, weights in model.state_dict().items():
        if not torch.is_floating_point(weights) or weights.dim() == 0:  # a constant, such as Gemma's of embeddings
            continue
        shard = shard_of(model.get_submodule(name.rpartition(".")[0]))
        draw = torch.Generator(weights.device).manual_seed(zlib.crc32(f"{name}{shard or ''}".encode()))
        if "norm" in name and weights.dim() == 1:
            weights.fill_(1)
            if name.endswith("model.norm.weight"):  # else a model with tied embeddings would repeat its last token
                weights.copy_(weights.new_empty(weights.shape).uniform_(-1, 1, generator=draw).sign())
            weights.sub_(float(name in offset))
        elif weights.dim() == 1:  # larger biases would drown what attention gathers
            weights.normal_(generator=draw).mul_(0.05 if name.endswith("bias") else 1.0)
        else:
            gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
            weights.normal_(generator=draw)
            if noise:
                weights.add_(torch.empty_like(weights).normal_(generator=draw), alpha=noise)
            weights.mul_(gain * weights.shape[-1] ** -0.5)


def shard_of(module: torch.nn.Module) -> int:
    """Which shard of its parameters it has under tensor parallelism, or where that begins; 0 if it has all.

    Two of the same weights would make ties of the vocabulary's halves.
    """
    if (indices := getattr(module, "shard_indices", None)) is not None:
        return int(indices.org_vocab_start_index)
    return getattr(module, "tp_rank", getattr(module, "moe_tp_rank", 0))


loader.initialize_dummy_weights = spread_weights  # in the scheduler's process too, which runs this file anew

if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    runpy.run_module("sglang.launch_server", run_name="__main__")
