"""The models of ``check_models.py``: real shapes with all layers, as few would leave a server bound by its host.

There are as many experts as a token goes to: which ones it goes to would follow from the last bits of random weights,
and two right backends would part.

No shape has layers whose scales or soft caps differ: SGLang makes no such model from a configuration. The check of the
kernel (``check_decode_kernel.py``) has plans that several scores share.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 8192  # of all, as logits are not what is measured
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


@dataclass(frozen=True)
class Shape:
    """A model to serve.

    Attributes
    ----------
    kind : as the support matrix calls it.
    config : of its ``config.json``.
    cut : what of the real model is left out.
    stock : backends to compare with, the first of which pat prefills with.
    spread : one more, for the spread alone: too slow to compare times with.
    requests : of the steady batches; states of linear attention take much memory, and cached prefixes hold some, too.
    decoded : tokens of each request of a steady batch: more where steps are so short that the host's pauses show.
    """

    kind: str
    config: dict[str, Any]
    cut: str = ""
    stock: tuple[str, ...] = ("fa3", "triton")
    spread: tuple[str, ...] = ()
    flags: str = ""
    requests: int = 64
    decoded: int = 192

    def write(self, folder: Path) -> Path:
        """Write the configuration into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        common = {"vocab_size": VOCABULARY, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, **SPECIAL}
        content = {**common, "max_position_embeddings": 32768, "tie_word_embeddings": False, **self.config}
        (folder / "config.json").write_text(json.dumps(content, indent=1))
        return folder


def _every(number: int, layers: int, usual: str, other: str) -> list[str]:
    """Layer types: the last of every ``number`` is another."""
    return [other if (layer + 1) % number == 0 else usual for layer in range(layers)]


def _latent(**sizes: Any) -> dict[str, Any]:
    """A model of DeepSeek's with latents of 512 values and 64 of rope, whose experts are all chosen."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu",
        "num_key_value_heads": sizes["num_attention_heads"], "moe_intermediate_size": 1408, "n_routed_experts": 6,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1,
        "topk_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0, "norm_topk_prob": False,
        "scoring_func": "softmax", "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 0.707, "mscale_all_dim": 0.707,
        },
        **sizes,
    }  # fmt: skip


_OF_61_LAYERS = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 2304, "num_hidden_layers": 8, "q_lora_rank": 1536, "num_nextn_predict_layers": 1,
}  # fmt: skip
SHAPES = {
    "llama-3.2-1b": Shape(
        "dense",
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
            "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 64, "hidden_act": "silu", "rope_theta": 500000.0,
        },
        flags="--max-total-tokens 160000",
        decoded=1200,
    ),
    "qwen2.5-7b": Shape(
        "dense",
        {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
            "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
            "hidden_act": "silu", "rope_theta": 1000000.0, "use_sliding_window": False,
        },
        stock=("fa3", "flashinfer"),
    ),
    "qwen3-8b": Shape(
        "dense",
        {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
            "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "hidden_act": "silu", "rope_theta": 1000000.0, "attention_bias": False,
        },
        stock=("fa3", "flashinfer"),
    ),
    "qwen3-30b-a3b": Shape(
        "experts",
        {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
            "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "hidden_act": "silu",
            "num_experts": 8, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "rope_theta": 1000000.0,
        },
        "8 of 128 experts",
        ("fa3", "flashinfer"),
    ),
    "gpt-oss-20b": Shape(
        "sinks",
        {
            "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
            "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "hidden_act": "silu", "sliding_window": 128,
            "layer_types": _every(2, 24, "sliding_attention", "full_attention"), "num_local_experts": 4,
            "num_experts_per_tok": 4, "swiglu_limit": 7.0, "rope_theta": 150000.0, "attention_bias": True,
            "max_position_embeddings": 131072,
        },
        "4 of 32 experts",
        flags="--moe-runner-backend triton",
    ),
    "gemma-3-4b": Shape(
        "windows",
        {
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 2560,
            "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 1024,
            "layer_types": _every(6, 34, "sliding_attention", "full_attention"), "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
            "tie_word_embeddings": True,
        },
        stock=("triton",),
    ),
    "gemma-2-2b": Shape(
        "windows",
        {
            "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 2304,
            "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 1024, "layer_types": _every(2, 26, "sliding_attention", "full_attention"),
            "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            "rope_theta": 10000.0, "tie_word_embeddings": True,
        },
        "windows of 1,024, not 4,096",
        ("triton",),
    ),
    "llama-4-scout": Shape(
        "chunks",
        {
            "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "vision_config": {},
            "text_config": {
                "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192,
                "intermediate_size_mlp": 16384, "num_hidden_layers": 24, "num_attention_heads": 40,
                "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "use_qk_norm": True,
                "attn_temperature_tuning": True, "attention_chunk_size": 1024, "interleave_moe_layer_step": 1,
                "num_local_experts": 1, "num_experts_per_tok": 1, "rope_theta": 500000.0,
                "vocab_size": VOCABULARY, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
                "torch_dtype": "bfloat16", **SPECIAL,
            },
        },
        "24 of 48 layers, 1 of 16 experts, chunks of 1,024, not 8,192",
        ("fa3",),  # the others do not cut into chunks
        flags="--swa-full-tokens-ratio 1.0",
    ),
    "deepseek-v2-lite": Shape(
        "latent",
        _latent(hidden_size=2048, intermediate_size=10944, num_hidden_layers=27, num_attention_heads=16),
        "6 of 64 experts",
        ("flashinfer", "triton"),
    ),
    "deepseek-v3": Shape(
        "latent",
        _latent(**_OF_61_LAYERS, num_attention_heads=16),
        "what a rank of 8 has: 16 of 128 heads; 8 of 61 layers, 6 of 256 experts",
        ("flashinfer", "triton"),
    ),
    "kimi-k2": Shape(
        "latent",
        _latent(**_OF_61_LAYERS, num_attention_heads=8),
        "what a rank of 8 has: 8 of 64 heads; 8 of 61 layers, 6 of 384 experts",
        ("flashinfer", "triton"),
    ),
    "qwen3-next-80b-a3b": Shape(
        "linear",
        {
            "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
            "intermediate_size": 5120, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "num_hidden_layers": 48, "full_attention_interval": 4, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25, "hidden_act": "silu",
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 8, "num_experts_per_tok": 8,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 10000000.0,
        },
        "8 of 512 experts",
        ("triton",),
        ("torch_native",),
        "--max-mamba-cache-size 176",
        requests=32,
    ),
}  # fmt: skip
