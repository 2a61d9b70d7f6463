"""The page of models by name: how `pat` serves each by its own checks, what was run, and what it gained.

The shapes are those of the models' published configurations; the checks of the backend say what becomes of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import perf_models
import perf_servers
from perf_text import caption, table

from feather_kernels.build import ARCHITECTURES, LATENT_VALUES, PROVEN
from feather_sglang.adapter.attention.limits import POOLS as FULL_POOLS
from feather_sglang.adapter.attention.limits import LayerFacts, ModelFacts, left_to_another, packed_layers
from feather_sglang.adapter.attention.matrix import GPU_TESTS, GPUS
from feather_sglang.adapter.hooks import SUPPORTED
from feather_sglang.errors import FeatherError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "checks"))

from model_shapes import SHAPES, Shape  # noqa: E402

MADE = "<!-- Made by docs/generators/performance.py from the checks of pat and docs/measured; edit those. -->"
REFUSED = "refused at start-up"
POOLS = {
    "windows": "SWAKVPool", "sinks": "SWAKVPool", "chunks": "SWAKVPool", "linear": "HybridLinearKVPool",
    "latent": "MLATokenToKVPool",
}  # fmt: skip


@dataclass(frozen=True)
class Named:
    """A model by the name that users type.

    Attributes
    ----------
    kind : as the support matrix calls it; the KV of ``latent`` is one head of 576 columns.
    full, other : layers with full attention, and with windows or chunks; linear layers have no KV and count in neither.
    run : the shape of ``check_models.py`` that is this very model.
    part : what of this model was run, if not the whole.
    """

    name: str
    kind: str
    q_heads: int
    kv_heads: int
    head_dim: int
    full: int
    other: int = 0
    run: str = ""
    part: str = ""

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        return self.q_heads // self.kv_heads

    def facts(self) -> ModelFacts:
        """What the checks judge."""
        latent = self.kind == "latent"
        value_dim = LATENT_VALUES if latent else self.head_dim
        scale = self.head_dim**-0.5
        layer = LayerFacts(0, self.q_heads, self.kv_heads, self.head_dim, value_dim, scale, latent=latent)
        usual = {"window": 127} if self.kind != "chunks" else {"chunked": True}
        layers = [layer] * self.full + [LayerFacts(**{**vars(layer), **usual})] * self.other
        numbered = tuple(LayerFacts(**{**vars(one), "layer_id": number}) for number, one in enumerate(layers))
        pool = POOLS.get(self.kind, "MHATokenToKVPool")
        return ModelFacts(numbered, pool=pool, full_pool=FULL_POOLS[pool])


EIGHTH = "one GPU's part of 8, with 8 of 61 layers and 6 experts"
FAMILIES = {
    "Llama": (
        Named("Llama 3.1 8B, Llama 3 8B", "dense", 32, 8, 128, 32),
        Named("Llama 3.1 70B, 3.3 70B", "dense", 64, 8, 128, 80),
        Named("Llama 3.1 405B", "dense", 128, 8, 128, 126),
        Named("Llama 3.2 1B", "dense", 32, 8, 64, 16, run="llama-3.2-1b"),
        Named("Llama 3.2 3B", "dense", 24, 8, 128, 28),
        Named("Llama 4 Scout", "chunks", 40, 8, 128, 12, 36, run="llama-4-scout"),
        Named("Llama 4 Maverick", "chunks", 40, 8, 128, 12, 36),
    ),
    "Qwen": (
        Named("Qwen2.5 0.5B", "dense", 14, 2, 64, 24),
        Named("Qwen2.5 7B", "dense", 28, 4, 128, 28, run="qwen2.5-7b"),
        Named("Qwen2.5 14B, 32B", "dense", 40, 8, 128, 48),
        Named("Qwen2.5 72B", "dense", 64, 8, 128, 80),
        Named("Qwen3 0.6B, 1.7B", "dense", 16, 8, 128, 28),
        Named("Qwen3 4B", "dense", 32, 8, 128, 36),
        Named("Qwen3 8B", "dense", 32, 8, 128, 36, run="qwen3-8b"),
        Named("Qwen3 14B", "dense", 40, 8, 128, 40),
        Named("Qwen3 32B", "dense", 64, 8, 128, 64),
        Named("Qwen3 30B-A3B, Qwen3-Coder 30B-A3B", "experts", 32, 4, 128, 48, run="qwen3-30b-a3b"),
        Named("Qwen3 235B-A22B", "experts", 64, 4, 128, 94),
        Named("Qwen3-Coder 480B-A35B", "experts", 96, 8, 128, 62),
        Named("Qwen3-Next 80B-A3B", "linear", 16, 2, 256, 12, run="qwen3-next-80b-a3b"),
        Named("Qwen3.5 27B", "linear", 24, 4, 256, 16),
        Named("Qwen3.5 35B-A3B", "linear", 16, 2, 256, 10),
        Named("Qwen3.5 397B-A17B", "linear", 32, 2, 256, 15),
    ),
    "gpt-oss": (
        Named("gpt-oss-20b", "sinks", 64, 8, 64, 12, 12, run="gpt-oss-20b"),
        Named("gpt-oss-120b", "sinks", 64, 8, 64, 18, 18),
    ),
    "Gemma": (
        Named("Gemma 2 2B", "windows", 8, 4, 256, 13, 13, run="gemma-2-2b"),
        Named("Gemma 2 9B", "windows", 16, 8, 256, 21, 21),
        Named("Gemma 2 27B", "windows", 32, 16, 128, 23, 23),
        Named("Gemma 3 1B", "windows", 4, 1, 256, 4, 22),
        Named("Gemma 3 4B", "windows", 8, 4, 256, 5, 29, run="gemma-3-4b"),
        Named("Gemma 3 12B", "windows", 16, 8, 256, 8, 40),
        Named("Gemma 3 27B", "windows", 32, 16, 128, 10, 52),
    ),
    "Mistral": (
        Named("Mistral 7B, also v0.1 with windows", "dense", 32, 8, 128, 32),
        Named("Mistral Nemo 12B, Mistral Small 24B", "dense", 32, 8, 128, 40),
        Named("Mistral Large 123B (2407, 2411)", "dense", 96, 8, 128, 88),
        Named("Mixtral 8x7B", "experts", 32, 8, 128, 32),
        Named("Mixtral 8x22B", "experts", 48, 8, 128, 56),
    ),
    "GLM": (
        Named("GLM-4 9B", "dense", 32, 2, 128, 40),
        Named("GLM-4.5-Air", "experts", 96, 8, 128, 46),
        Named("GLM-4.5, GLM-4.6", "experts", 96, 8, 128, 92),
    ),
    "DeepSeek and Kimi": (
        Named("DeepSeek V2-Lite", "latent", 16, 1, 576, 27, run="deepseek-v2-lite"),
        Named("DeepSeek V2", "latent", 128, 1, 576, 60),
        Named("DeepSeek V3, V3.1, R1", "latent", 128, 1, 576, 61, part=EIGHTH),
        Named("Kimi K2", "latent", 64, 1, 576, 61, part=EIGHTH),
    ),
}
NOTES = {
    "Mistral": "SGLang gives every layer of Mistral full attention, also where the configuration names a window.",
    "Qwen": "The linear layers of Qwen3-Next and Qwen3.5 have no KV and stay with SGLang. For these two, `pat` refuses "
    "speculative decoding, and under `feather` no prefix waits for more requests that share it.",
    "DeepSeek and Kimi": "These models have latent attention (MLA), which `pat` packs on an H100 or H200 with KV in "
    "bfloat16. With tensor parallelism each GPU has a part of the heads, and packing gains more with fewer heads. "
    "Models with sparse attention (DeepSeek V3.2, GLM-5) are refused; `--schedule-policy feather` works with them. "
    "Servers were compared with FlashInfer and Triton; the kernel is compared with FlashAttention-3 and FlashMLA in "
    "[the lab](../lab/kernel.md#latent-attention).",
}
REST = {"windows": "windows", "sinks": "windows", "chunks": "chunks"}


def served(model: Named) -> str:
    """What the checks of pat do with the model: which layers it packs."""
    facts = model.facts()
    try:
        packed = packed_layers(facts)
    except FeatherError:
        return REFUSED
    if len(packed) == len(facts.layers):
        return "all attention layers" if model.kind == "linear" else "all layers"
    left = next(limit for layer in facts.layers if (limit := left_to_another(layer)))
    return f"{len(packed)} of {len(facts.layers)} layers; SGLang's backend computes those with {left}"


def heads(shape: Shape) -> tuple[int, int]:
    """Query heads to a KV head, and head_dim, of a shape that was run."""
    config = shape.config.get("text_config", shape.config)
    q_heads, size = config["num_attention_heads"], config["hidden_size"]
    if shape.kind == "latent":
        return q_heads, config["kv_lora_rank"] + config["qk_rope_head_dim"]
    return q_heads // config["num_key_value_heads"], config.get("head_dim", size // q_heads)


def nearest(model: Named) -> str:
    """The shape that was run and is most like the model: of its kind, then of its head_dim, then of its group."""
    alike = {"experts": ("experts", "dense")}.get(model.kind, (model.kind,))
    near = [name for name, shape in SHAPES.items() if shape.kind in alike]

    spelt = model.name.lower().replace(" ", "-")[:7]

    def distance(name: str) -> tuple[bool, bool, int, bool]:
        group, head_dim = heads(SHAPES[name])
        kind = SHAPES[name].kind != model.kind
        return kind, head_dim != model.head_dim, abs(group - model.group), name[:7] != spelt

    return min(near, key=distance, default="")


def tested(model: Named, runs_on: dict[str, str]) -> str:
    """Where it was run, or what it is like."""
    if served(model) == REFUSED:
        return "-"
    if model.run in runs_on:
        return f"run {runs_on[model.run]}"
    if model.part:
        return f"run as {model.part}; never whole"
    name = nearest(model)
    group, head_dim = heads(SHAPES[name])
    unlike = []
    if head_dim != model.head_dim:
        unlike.append(f"head_dim {model.head_dim}, not {head_dim}")
    if group != model.group:
        unlike.append(f"{model.group} query heads to a KV head, not {group}")
    but = f" ({' and '.join(unlike)})" if unlike else ""
    return f"same kind as {name}{but}; not run itself"


def gain(model: Named, measured: dict[str, tuple[str, str]]) -> tuple[str, str]:
    """Throughput to the fastest of SGLang's backends, with a shared prefix and with nothing shared."""
    return measured.get(model.run, ("-", "-"))


def results(folder: Path) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """What each shape was run on, and what it gained, by the name of the shape."""
    runs_on: dict[str, str] = {}
    gains: dict[str, tuple[str, str]] = {}
    for one in perf_models.models(folder):
        if not one.flags:
            cut = f", reduced to {one.cut}" if one.cut else ""
            runs_on.setdefault(one.name, f"on SGLang {one.release}{cut}")
            gains.setdefault(one.name, (f"{one.shared.ratio:.2f}x", f"{one.private.ratio:.2f}x"))
    runs = perf_servers.by_backend(folder, list(perf_servers.SERVERS.values()))
    shared = [perf_servers.to_best(found)[0] for case, found in runs.items() if not perf_servers.unshared(case)]
    alone = [perf_servers.to_best(found)[0] for case, found in runs.items() if perf_servers.unshared(case)]
    if shared and alone:
        file = perf_servers.SERVERS["pat"]
        release = json.loads((folder / file).read_text())["machine"]["versions"]["sglang"]
        runs_on[perf_servers.MODEL] = f"on SGLang {release}"
        spans = (f"{min(some):.2f}x to {max(some):.2f}x" if len(some) > 1 else f"{some[0]:.2f}x"
                 for some in (shared, alone))  # fmt: skip
        gains[perf_servers.MODEL] = tuple(spans)  # type: ignore[assignment]
    return runs_on, gains


def gpu_runs(folder: Path) -> dict[str, list[str]]:
    """By GPU, the releases of SGLang that result files of its servers are of; the empty name stands for kernels."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        machine = content.get("machine", content) if isinstance(content, dict) else {}
        if isinstance(machine, dict) and "gpu" in machine:
            found.setdefault(machine["gpu"], set()).add(machine.get("versions", {}).get("sglang", ""))
    return {gpu: sorted(releases) for gpu, releases in found.items()}


def gpu_rows(folder: Path) -> list[list[str]]:
    """Each GPU: whether pat is compiled for it, and what was run on it."""
    runs = gpu_runs(folder)
    rows = []
    for capability, names in GPUS.items():
        compiled = capability in ARCHITECTURES
        for name in names.split(", ") if capability in GPU_TESTS else [names]:
            what = next((runs[gpu] for gpu in runs if name in gpu.split()), [])
            servers = " and ".join(filter(None, what))
            ran = "nothing yet" if compiled else "-"
            if compiled and capability not in PROVEN:
                ran += "; the kernels that it gets ran on an H200, limited to the shared memory of this GPU"
            if what:
                ran = (
                    f"the kernel; servers with SGLang {servers}"
                    if servers
                    else "the kernel; it was not run in a server"
                )
            unrun = "compiled, not run" if capability in PROVEN else "starts with `--feather-unproven-gpu on`"
            verdict = ("served" if what else unrun) if compiled else REFUSED
            rows.append([name, f"{capability / 10:.1f}", verdict, ran])
    return rows


def family(name: str, models: Sequence[Named], folder: Path) -> str:
    """A family's tables: how it is served, and what was run and gained."""
    runs_on, gains = results(folder)
    how = [[model.name, served(model), tested(model, runs_on)] for model in models]
    won = [[model.name, *gain(model, gains)] for model in models if model.run]
    parts = [f"## {name}", NOTES.get(name, ""), table(["model", "`pat` packs", "tested"], how)]
    if won:
        parts += [
            "Throughput with `pat` over that of the fastest of SGLang's backends, where it was measured "
            "([batches](#batches)):",
            table(["model", "shared prefix", "nothing shared"], won),
            caption("NVIDIA H200; the release of SGLang is in the table above"),
        ]
    return "\n\n".join(part for part in parts if part)


def page(folder: Path) -> str:
    """The Markdown of docs/start/models.md."""
    parts = [
        f"{MADE}\n# Which models and GPUs does it work with?",
        "`--schedule-policy feather` works with every model that SGLang serves with a prefix cache, on every GPU. "
        "`--decode-attention-backend pat` decodes the layers with full attention. A backend of SGLang's decodes the "
        "layers with sliding windows or chunked attention, in the same server. A model that `pat` cannot serve is "
        f"refused at start-up with one line. Both parts work with SGLang {SUPPORTED[0]} to {SUPPORTED[-1]}.",
        "A model is found by its family below. *Run* means that its shapes, with random weights and in part fewer "
        "experts or layers, ran on an H200 and gave the answers of SGLang's own backends "
        "([how](../performance/models.md)). *Same kind* means that a model with the same kinds of layers ran. "
        "The attention shapes are those of each model's published configuration. A model that is not here: "
        "`feather doctor --matrix` and [what `pat` serves](../reference/support.md) have every rule.",
        "## GPUs",
        "Whether `pat` serves the models below depends on the GPU; `feather` alone works on every GPU that "
        "SGLang supports.",
        table(["GPU", "compute capability", "`pat`", "what was run on it"], gpu_rows(folder)),
        "An H100 has the compute capability of an H200 and gets the same compiled kernel; "
        "[its times](../performance/kernel.md) are beside those of the H200. On a GPU for which `pat` is refused, use "
        "`--schedule-policy feather` with one of SGLang's own backends.",
        "## Batches",
        f"The gains below are of servers. {perf_models.BATCHES} The gains of Qwen3 8B are of the "
        "[loads](../performance/servers.md#decode-backends-under-load) W1, W2, W3, W6 and W7 instead, whose requests "
        "come and go.",
        *(family(name, models, folder) for name, models in FAMILIES.items()),
    ]
    return "\n\n".join(parts) + "\n"
