"""A small random Llama whose greedy text says exactly which tokens it chose, on any batch.

Three properties make it fit to compare schedulers. It computes in float32, so that a batch's composition changes
logits by about 1e-5, far less than the gap between the best two tokens. Its attention is sharp and weighs as much as
the token itself, so that texts depend on the whole prompt, and rows that are mixed up give other texts. And only
printable ASCII bytes can win, one token each, so that a text is its token sequence.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 256, 2, 4, 2, 32
SPECIAL = ("<s>", "</s>", "<pad>", "<unk>")
PRINTABLE = string.digits + string.ascii_letters + string.punctuation


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write configuration, weights and byte-level tokenizer into ``folder``; the same seed gives the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary.update({symbol: len(vocabulary) + index for index, symbol in enumerate(SPECIAL)})
    _write_tokenizer(folder, vocabulary)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "vocab_size": len(vocabulary),
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": vocabulary["<s>"],
        "eos_token_id": vocabulary["</s>"],
        "pad_token_id": vocabulary["<pad>"],
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_weights(vocabulary, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_tokenizer(folder: Path, vocabulary: dict[str, int]) -> None:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), SPECIAL, strict=True))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _weights(vocabulary: dict[str, int], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain * columns**-0.5

    head = torch.zeros(len(vocabulary), HIDDEN)
    for symbol in PRINTABLE:
        head[vocabulary[symbol]] = matrix(1, HIDDEN, gain=4.0)[0]
    weights = {
        "model.embed_tokens.weight": torch.randn(len(vocabulary), HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        weights |= {
            f"{name}input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{name}self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, gain=2.0),
            f"{name}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, gain=2.0),
            f"{name}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, gain=2.0),
            f"{name}self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, gain=2.0),
            f"{name}mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{name}mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{name}mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    return weights
