"""Measure on a GPU what `fit_step_time.py` needs besides decode attention of equal rows: copy, matrix products,
prefill attention, and decode attention of rows of mixed lengths.

    python benchmarks/measure_steps.py --out steps.json [--one-batch result.jsonl]

Needs a Hopper GPU with torch and sgl-kernel. `--one-batch` takes the result file of SGLang's own
`python -m sglang.benchmark.one_batch --model-path <qwen3-8b> --load-format dummy --attention-backend fa3
--disable-prefill-cuda-graph --cuda-graph-max-bs-decode 512 --batch-size 1 1 16 128 500 --input-len 64 512 2048 8192
20000 --output-len 8` and adds its whole-step times, which no parameter but the elementwise term and the fixed overhead
is fitted to. Times are medians of five rounds, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SHAPES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 24576), "down": (12288, 4096)}  # Qwen3-8B
ROWS = (1, 32, 64, 128, 256, 384, 500, 512, 1024, 2048, 4096, 8192, 16384)
SLOTS = 1_500_000  # KV pool: larger than any L2


def microseconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """Return the time of one call of `work`."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    rounds = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        torch.cuda.synchronize()
        rounds.append(start.elapsed_time(end) / repeats * 1e3)
    return sorted(rounds)[2]


def copy() -> dict[str, float]:
    """Copy 2 GiB on the device; bytes counts reading and writing."""
    source = torch.empty(2**31, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return {"bytes": 2 * 2**31, "us": microseconds(lambda: target.copy_(source))}


def products() -> list[dict[str, float]]:
    """Time a layer's four products, from CUDA graphs; six weights in turn, so that none stays in the L2."""
    table = []
    for rows in ROWS:
        line: dict[str, float] = {"rows": rows}
        for name, (inner, outer) in SHAPES.items():
            weights = [torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(6)]
            x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
            torch.nn.functional.linear(x, weights[0])
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for weight in weights:
                    torch.nn.functional.linear(x, weight)
            line[name] = microseconds(graph.replay) / len(weights)
        table.append(line)
    return table


def prefill_attention() -> list[dict[str, float]]:
    """Time FlashAttention-3 over a paged pool (page size 1), rows of one prefix group."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    keys = torch.randn(SLOTS, 1, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    values = torch.randn_like(keys)
    cases = [
        (new, cached, rows) for new in (20, 64, 200, 512) for cached in (1000, 5000, 20000) for rows in (8, 64, 200)
    ]
    cases += [(8192, 0, 1), (8192, 0, 4), (8192, 8192, 1), (20000, 0, 1), (2048, 8192, 8), (20, 20000, 1)]
    table = []
    for new, cached, rows in cases:
        if new * rows > 40_000:
            continue
        slots = torch.randperm(SLOTS, device="cuda", dtype=torch.int32)
        pages = torch.empty(rows, cached + new, device="cuda", dtype=torch.int32)
        pages[:, :cached] = slots[:cached]
        pages[:, cached:] = slots[cached : cached + rows * new].view(rows, new)
        queries = torch.randn(new * rows, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        steps = torch.arange(rows + 1, device="cuda", dtype=torch.int32)
        arguments = {
            "page_table": pages,
            "cache_seqlens": torch.full((rows,), cached + new, device="cuda", dtype=torch.int32),
            "cu_seqlens_q": steps * new,
            "cu_seqlens_k_new": steps * (cached + new),
            "max_seqlen_q": new,
            "causal": True,
        }

        def attend(q: torch.Tensor = queries, rest: dict[str, Any] = arguments) -> None:
            flash_attn_with_kvcache(q, keys, values, **rest)

        table.append({"new": new, "cached": cached, "rows": rows, "us": microseconds(attend)})
    return table


def mixed_lengths() -> list[list[int]]:
    """Return batches of unequal rows: one long row among short ones, and lengths spread as in conversations."""
    batches = [[long, *[short] * rest] for long in (30_000, 100_000) for short in (1000, 5000) for rest in (7, 31, 99)]
    draw = random.Random(0)
    for rows in (4, 16, 32, 64, 128):
        for spread in (0.5, 1.2):
            batches.append([min(int(draw.lognormvariate(8.7, spread)) + 1, 120_000) for _ in range(rows)])
    return [batch for batch in batches if sum(batch) < SLOTS]


def decode_attention() -> list[dict[str, Any]]:
    """Time FlashAttention-3 decode over a paged pool (page size 1), rows of mixed lengths that share nothing."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    keys = torch.randn(SLOTS, 1, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    values = torch.randn_like(keys)
    table = []
    for lengths in mixed_lengths():
        slots = torch.randperm(SLOTS, device="cuda", dtype=torch.int32)
        pages = torch.zeros(len(lengths), max(lengths), device="cuda", dtype=torch.int32)
        start = 0
        for row, length in enumerate(lengths):
            pages[row, :length] = slots[start : start + length]
            start += length
        steps = torch.arange(len(lengths) + 1, device="cuda", dtype=torch.int32)
        queries = torch.randn(len(lengths), HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        arguments = {
            "page_table": pages,
            "cache_seqlens": torch.tensor(lengths, device="cuda", dtype=torch.int32),
            "cu_seqlens_q": steps,
            "max_seqlen_q": 1,
            "causal": True,
        }

        def attend(q: torch.Tensor = queries, rest: dict[str, Any] = arguments) -> None:
            flash_attn_with_kvcache(q, keys, values, **rest)

        table.append({"lengths": lengths, "us": microseconds(attend)})
    return table


def whole_steps(path: Path) -> list[dict[str, float]]:
    """Read the result file of SGLang's one-batch benchmark; of repeated settings the last."""
    table = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        table[row["batch_size"], row["input_len"]] = {
            "rows": row["batch_size"],
            "input": row["input_len"],
            "output": row["output_len"],
            "prefill_us": row["prefill_latency"] * 1e6,
            "decode_us": row["median_decode_latency"] * 1e6,
        }
    return list(table.values())


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one-batch", type=Path)
    args = parser.parse_args()
    result = {
        "source": f"benchmarks/measure_steps.py, {torch.cuda.get_device_name()}, torch {torch.__version__}",
        "copy": copy(),
        "products": products(),
        "prefill_attention": prefill_attention(),
        "decode_attention_mixed": decode_attention(),
        "whole_steps": whole_steps(args.one_batch) if args.one_batch else [],
    }
    rounded = json.loads(json.dumps(result), parse_float=lambda text: float(f"{float(text):.5g}"))
    args.out.write_text(json.dumps(rounded, indent=1) + "\n")


if __name__ == "__main__":
    main()
