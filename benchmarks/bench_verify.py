"""The attention of a verify step of speculative decoding: packed, beside FlashAttention-3 and FlashInfer.

    PYTHONPATH=.:kernels python benchmarks/bench_verify.py --json verify.json
    PYTHONPATH=.:kernels python benchmarks/bench_verify.py --requests 64 --groups 1 --drafts 8 --heads 64/8

One attention layer of requests in prefix groups, each with a few drafts in a chain after what it has committed. The
packed kernel takes every draft for a query row (`with_new_tokens`); the peers take a request's drafts as one causal
query, as SGLang calls them. Every output is checked against a float32 reference before it is timed. The floor is the
larger of unique KV bytes over copy bandwidth and FLOP over the matrix rate. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from decode_cases import COPY_BANDWIDTH, MATRIX_RATE, Heads, parse_heads

from feather_kernels.forest import Forest
from feather_sglang.attention.new_tokens import with_new_tokens
from feather_sglang.report.tables import grid

TOLERANCE = 2e-2  # of |out - reference| / |reference|
CHECKED = 8  # requests


class Batch(NamedTuple):
    """Requests in groups, with the committed tokens of each, and slots for its drafts.

    Attributes
    ----------
    forest : the requests; `table` has their rows.
    table : int32 [requests, tokens with drafts]
    """

    forest: Forest
    table: np.ndarray
    drafts: int
    heads: Heads
    head_dim: int

    @property
    def slots(self) -> int:
        """Of the pool, all in use."""
        return int(self.table.max()) + 1

    @property
    def floor(self) -> float:
        """Seconds that no kernel can go below."""
        kv = self.slots * 2 * self.heads.kv * self.head_dim * 2
        seen = int(with_new_tokens(self.forest, self.drafts).seq_len.sum())
        return max(kv / COPY_BANDWIDTH, 4 * self.head_dim * self.heads.query * seen / MATRIX_RATE)


def batch_of(
    requests: int, groups: int, prefix: int, own: int, drafts: int, heads: Heads, head_dim: int = 128, seed: int = 0
) -> Batch:
    """Requests in groups next to each other, with slots scattered at random."""
    rng = np.random.default_rng(seed)
    private = own + drafts
    slots = rng.permutation(groups * prefix + requests * private).astype(np.int32)
    shared, rest = slots[: groups * prefix].reshape(groups, prefix), slots[groups * prefix :].reshape(requests, private)
    group = np.arange(requests) * groups // requests
    table = np.ascontiguousarray(np.concatenate([shared[group], rest], axis=1))
    forest = Forest(
        np.full(groups, -1, np.int32), np.full(groups, prefix, np.int32), group.astype(np.int32),
        np.full(requests, prefix + own, np.int32), np.arange(requests, dtype=np.int64) * table.shape[1],
    )  # fmt: skip
    return Batch(forest, table, drafts, heads, head_dim)


class Tensors(NamedTuple):
    """A batch on the device: q (requests * drafts, heads, dim), k and v (slots, KV heads, dim)."""

    q: Any
    k: Any
    v: Any
    table: Any


def tensors(batch: Batch, dtype: Any, seed: int = 0) -> Tensors:
    """Random ones."""
    import torch

    draw = torch.Generator("cuda").manual_seed(seed)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=draw, device="cuda").to(dtype)

    rows = batch.forest.n_requests * batch.drafts
    caches = (random(batch.slots, batch.heads.kv, batch.head_dim) for _ in range(2))
    return Tensors(random(rows, batch.heads.query, batch.head_dim), *caches, torch.from_numpy(batch.table).cuda())


def reference(batch: Batch, given: Tensors, requests: Sequence[int]) -> Any:
    """(requests * drafts, heads, dim) in float32, with a mask."""
    import torch

    out = []
    for request in requests:
        length = int(batch.forest.seq_len[request])
        slots = given.table[request, : length + batch.drafts].long()
        k, v = (x[slots].float().repeat_interleave(batch.heads.group, 1).transpose(0, 1) for x in (given.k, given.v))
        q = given.q[request * batch.drafts : (request + 1) * batch.drafts].float().transpose(0, 1)
        seen = torch.ones(batch.drafts, len(slots), dtype=torch.bool, device=q.device).tril(length)
        out.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1))
    return torch.cat(out)


def packed(batch: Batch, given: Tensors) -> Callable[[], Any]:
    """This package's kernel, a query row a draft."""
    import torch

    from feather_kernels import PackedDecodeWrapper

    forest = with_new_tokens(batch.forest, batch.drafts)
    wrapper = PackedDecodeWrapper(
        batch.heads.query, batch.heads.kv, batch.head_dim, dtype=given.q.dtype, max_requests=forest.n_requests
    )
    wrapper.plan(forest, given.table)
    out = torch.empty_like(given.q)
    return lambda: wrapper.run(given.q, given.k, given.v, out=out)


def fa3(batch: Batch, given: Tensors) -> Callable[[], Any]:
    """FlashAttention-3 over a page table."""
    import torch
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    k, v = given.k.unsqueeze(1), given.v.unsqueeze(1)
    lens = torch.from_numpy(batch.forest.seq_len + batch.drafts).int().cuda()
    steps = torch.arange(0, len(given.q) + 1, batch.drafts, dtype=torch.int32, device="cuda")
    return lambda: flash_attn_with_kvcache(
        given.q, k, v, page_table=given.table, cache_seqlens=lens, cu_seqlens_q=steps, max_seqlen_q=batch.drafts,
        causal=True,
    )  # fmt: skip


def flashinfer(batch: Batch, given: Tensors) -> Callable[[], Any]:
    """FlashInfer's prefill over pages, by the backend that it chooses."""
    import flashinfer as package
    import torch

    requests, width = batch.table.shape
    memory = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = package.BatchPrefillWithPagedKVCacheWrapper(memory, "NHD", backend="fa2")
    wrapper.plan(
        torch.arange(0, len(given.q) + 1, batch.drafts, dtype=torch.int32),
        torch.arange(0, requests * width + 1, width, dtype=torch.int32),
        given.table.flatten(), torch.ones(requests, dtype=torch.int32), batch.heads.query, batch.heads.kv,
        batch.head_dim, 1, causal=True, q_data_type=given.q.dtype,
    )  # fmt: skip
    out = torch.empty_like(given.q)
    pages = given.k.unsqueeze(1), given.v.unsqueeze(1)
    return lambda: wrapper.run(given.q, pages, out=out)


SYSTEMS = {"pat": packed, "fa3": fa3, "flashinfer": flashinfer}


def measured(batch: Batch, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Microseconds of each system, or why there are none."""
    import torch
    from decode_timing import check_and_measure

    given = tensors(batch, torch.bfloat16)
    picked = np.linspace(0, batch.forest.n_requests - 1, CHECKED).astype(int).tolist()
    rows = [request * batch.drafts + draft for request in picked for draft in range(batch.drafts)]
    systems = {name: partial(SYSTEMS[name], batch, given) for name in names}
    return check_and_measure(systems, reference(batch, given, picked), rows, TOLERANCE, rounds, None)


def table(results: dict[str, Any], floor: float) -> str:
    """Times beside the floor."""
    lines = [["system", "us", "to floor", "relative error"]]
    for name, result in results.items():
        if "warm_us" in result:
            cells = [f"{result['warm_us']:,.0f}", f"{result['warm_us'] / floor / 1e6:.2f}x"]
            lines.append([name, *cells, f"{result['relative_error']:.1e}"])
        else:
            lines.append([name, result.get("error", "not run")])
    return grid(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one batch; 1 if this package is wrong or absent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, number, what in (
        ("--requests", 256, "of the batch"), ("--groups", 5, "of requests that share a prefix"),
        ("--prefix", 5000, "tokens of a group"), ("--own", 150, "tokens that each request has committed besides"),
        ("--drafts", 4, "of each request"), ("--rounds", 20, "of measuring"),
    ):  # fmt: skip
        parser.add_argument(flag, type=int, default=number, help=f"{what} (default: %(default)s)")
    parser.add_argument("--heads", default="32/8", help="query/KV heads (default: %(default)s)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="with commas (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write everything here")
    options = parser.parse_args(argv)
    try:
        heads = parse_heads(options.heads)
    except ValueError as error:
        parser.error(str(error))
    names = options.systems.split(",")
    if unknown := [name for name in names if name not in SYSTEMS]:
        parser.error(f"--systems: {', '.join(unknown)} is not among {', '.join(SYSTEMS)}")
    batch = batch_of(options.requests, options.groups, options.prefix, options.own, options.drafts, heads)
    results = measured(batch, names, options.rounds)
    print(table(results, batch.floor), f"floor {batch.floor * 1e6:,.0f} us", sep="\n")
    if options.json is not None:
        from decode_timing import machine

        content = {
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), "machine": machine(),
            "when": time.strftime("%Y-%m-%d %H:%M:%S"), "floor_us": batch.floor * 1e6, "systems": results,
        }  # fmt: skip
        options.json.write_text(json.dumps(content, indent=1))
    return 0 if "warm_us" in results.get("pat", {}) or "pat" not in names else 1


if __name__ == "__main__":
    sys.exit(main())
