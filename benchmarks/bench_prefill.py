"""The attention of a prefill step: packed, beside FlashAttention-3, its cascade, and FlashInfer.

    PYTHONPATH=.:kernels python benchmarks/bench_prefill.py --json prefill.json
    PYTHONPATH=.:kernels python benchmarks/bench_prefill.py --cases few-shot,long --systems pat,fa3 --tokens 16384
    PYTHONPATH=.:kernels python benchmarks/bench_prefill.py --host

One attention layer of requests with new tokens behind what the cache holds of each. The packed decode kernel takes
every new token for a query row (`with_new_tokens`), as ``--feather-pat-prefill`` does; FlashAttention-3 and FlashInfer
take a request's tokens as one causal query over its pages, as SGLang calls them. ``cascade`` uses FlashAttention-3
twice: each group's tokens over what the group shares, without a mask, then each request's over its own, and merges.
Every output is checked against a float32 reference before it is timed. ``warm`` is back to back, ``flushed`` after
other data filled L2. The floor is the larger of bytes (KV once, queries, output) over copy bandwidth and FLOP over the
matrix rate. ``host`` is what the packed plan takes a step on the CPU, ``model`` what the planner's costs say that it
takes on an H200; ``--host`` does only these, and needs no GPU. The rest needs a Hopper GPU.
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
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from decode_cases import COPY_BANDWIDTH, MATRIX_RATE, Heads, parse_heads

from feather_kernels.forest import Forest, IntArray
from feather_kernels.plan import PackPlan, Planner, default_parts
from feather_kernels.plans.batch_file import Batch as PlannedBatch
from feather_kernels.plans.explain import explain
from feather_sglang.attention.new_tokens import PROMPT_LEVELS, prompt_block, tokens_seen, with_new_tokens
from feather_sglang.report.tables import grid

TOLERANCE = 2e-2  # of |out - reference| / |reference|
CHECKED = 64  # rows
MEDIAN_PROMPT, SPREAD = 600, 1.1  # of the log-normal lengths, like prompts of public traces behind their cached part
LONGEST = 4096  # of a mix


class Batch(NamedTuple):
    """Requests with new tokens.

    Attributes
    ----------
    forest : what each request has in the cache; `table` has their rows.
    counts : int64 [requests], new tokens
    table : int32 [requests, tokens]
    """

    forest: Forest
    counts: IntArray
    table: IntArray
    heads: Heads
    head_dim: int

    @property
    def rows(self) -> int:
        """New tokens of all requests."""
        return int(self.counts.sum())

    @property
    def slots(self) -> int:
        """Of the pool, all in use."""
        return int(self.table.max()) + 1

    @property
    def seen(self) -> IntArray:
        """int32 [rows]: KV tokens that each new token sees."""
        return tokens_seen(self.forest.seq_len, self.counts)

    @property
    def floor(self) -> float:
        """Seconds that no kernel can go below."""
        values = self.slots * 2 * self.heads.kv + self.rows * 2 * self.heads.query
        flop = 4 * self.head_dim * self.heads.query * int(self.seen.sum())
        return max(2 * values * self.head_dim / COPY_BANDWIDTH, flop / MATRIX_RATE)


def batch_of(
    groups: Sequence[int], prefix: int, counts: IntArray, heads: Heads, head_dim: int = 128, seed: int = 0
) -> Batch:
    """Requests in groups next to each other, with slots scattered at random.

    Parameters
    ----------
    groups : requests of each; those of a group share ``prefix`` tokens, and have no others before their new ones
    counts : int [requests], new tokens
    """
    rng = np.random.default_rng(seed)
    slots = rng.permutation(len(groups) * prefix + int(counts.sum())).astype(np.int32)
    shared, rest = slots[: len(groups) * prefix].reshape(len(groups), prefix), slots[len(groups) * prefix :]
    group = np.repeat(np.arange(len(groups)), groups)
    table = np.zeros((len(group), prefix + int(counts.max())), np.int32)
    table[:, :prefix] = shared[group]
    table[:, prefix:][np.arange(counts.max()) < counts[:, None]] = rest  # row by row
    nodes = len(groups) if prefix else 0
    forest = Forest(
        np.full(nodes, -1, np.int32), np.full(nodes, prefix, np.int32), group if nodes else np.full(len(group), -1),
        np.full(len(group), prefix, np.int32), np.arange(len(group), dtype=np.int64) * table.shape[1],
    )  # fmt: skip
    return Batch(forest, counts, table, heads, head_dim)


def mix(draw: Callable[[], float], tokens: int) -> IntArray:
    """Lengths from a distribution until they fill a step; the last is cut."""
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, LONGEST, max(1, round(draw()))))
    return np.array(lengths)


def cases(tokens: int, heads: Heads) -> dict[str, Callable[[], Batch]]:
    """Batches by name, of at most so many new tokens."""
    rng = np.random.default_rng(1)

    def short() -> float:
        return rng.uniform(8, 128) if rng.random() < 0.6 else float(np.exp(rng.uniform(np.log(128), np.log(2048))))

    def like_traces() -> float:
        return float(rng.lognormal(np.log(MEDIAN_PROMPT), SPREAD))

    def alone(draw: Callable[[], float]) -> Batch:
        lengths = mix(draw, tokens)
        return batch_of([1] * len(lengths), 0, lengths, heads)

    def grouped(groups: int, requests: int, prefix: int, new: int) -> Batch:
        requests = max(groups, min(requests, tokens // new))
        sizes = np.bincount(np.arange(requests) % groups).tolist()
        return batch_of(sizes, prefix, np.full(requests, new), heads)

    return {
        "short": partial(alone, short),  # 60% of requests under 128 tokens
        "groups-5x5k": partial(grouped, 5, 500, 5000, 20),
        "groups-20x10k": partial(grouped, 20, 500, 10000, 20),
        "few-shot": partial(grouped, 1, 64, 4096, 100),
        "samples-1": partial(grouped, 1, 16, 2048, 1),
        "samples-16": partial(grouped, 1, 16, 2048, 16),
        "long": partial(grouped, 1, 1, 0, tokens),
        "chunk": partial(grouped, 1, 1, 2 * tokens, tokens),  # of a longer prompt
        "traces": partial(alone, like_traces),
    }


class Tensors(NamedTuple):
    """A batch on the device: q (rows, heads, dim), k and v (slots, KV heads, dim), table (requests, tokens)."""

    q: Any
    k: Any
    v: Any
    table: Any


def tensors(batch: Batch, dtype: Any, device: str = "cuda", seed: int = 0) -> Tensors:
    """Random ones."""
    import torch

    draw = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=draw, device=device).to(dtype)

    caches = (random(batch.slots, batch.heads.kv, batch.head_dim) for _ in range(2))
    return Tensors(random(batch.rows, batch.heads.query, batch.head_dim), *caches, torch.tensor(batch.table).to(device))


def reference(batch: Batch, given: Tensors, rows: Sequence[int]) -> Any:
    """(len(rows), heads, dim) in float32, from the definition."""
    import torch

    owner, seen, out = np.repeat(np.arange(len(batch.counts)), batch.counts), batch.seen, []
    for row in rows:
        slots = given.table[int(owner[row]), : int(seen[row])].long()
        k, v = given.k[slots].float(), given.v[slots].float()
        q = given.q[row].float().view(batch.heads.kv, -1, batch.head_dim)
        weights = (torch.einsum("hgd,thd->hgt", q, k) * batch.head_dim**-0.5).softmax(-1)
        out.append(torch.einsum("hgt,thd->hgd", weights, v).flatten(0, 1))
    return torch.stack(out)


# Systems ----------------------------------------------------------------------------------------------------------


def shape_of(batch: Batch) -> dict[str, int]:
    """What a planner or a wrapper for just this batch is made with."""
    return {
        "num_qo_heads": batch.heads.query, "num_kv_heads": batch.heads.kv, "head_dim": batch.head_dim,
        "max_requests": batch.rows, "max_parts": default_parts(batch.rows, batch.heads.query, PROMPT_LEVELS),
    }  # fmt: skip


def packed(batch: Batch, given: Tensors, block: int | None = None, **options: Any) -> Callable[[], Any]:
    """This package's decode kernel, a query row a new token."""
    import torch

    from feather_kernels import PackedDecodeWrapper

    wrapper = PackedDecodeWrapper(**shape_of(batch), dtype=given.q.dtype, **options)
    block = block or prompt_block(wrapper.planner.options)
    wrapper.plan(with_new_tokens(batch.forest, batch.counts, block), given.table)
    out = torch.empty_like(given.q)
    return lambda: wrapper.run(given.q, given.k, given.v, out=out)


def _ints(values: IntArray) -> Any:
    """An int32 tensor on the host."""
    import torch

    return torch.from_numpy(np.asarray(values, np.int32))


def _steps(counts: IntArray) -> Any:
    """Where each sequence of tokens begins, int32 [sequences + 1], on the host."""
    return _ints(np.concatenate([[0], np.cumsum(counts)]))


def _fa3(
    given: Tensors, table: Any, lens: IntArray, counts: IntArray, causal: bool, lse: bool = False
) -> Callable[[], Any]:
    """FlashAttention-3 over a page table as SGLang calls it, by sequences of queries."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    k, v = given.k.unsqueeze(1), given.v.unsqueeze(1)
    lengths, steps, most = _ints(lens).to(table.device), _steps(counts).to(table.device), int(counts.max())
    return lambda: flash_attn_with_kvcache(
        given.q, k, v, page_table=table, cache_seqlens=lengths, cu_seqlens_q=steps, max_seqlen_q=most, causal=causal,
        return_softmax_lse=lse,
    )  # fmt: skip


def fa3(batch: Batch, given: Tensors) -> Callable[[], Any]:
    """FlashAttention-3, each request by itself."""
    return _fa3(given, given.table, batch.forest.seq_len + batch.counts, batch.counts, causal=True)


def cascade(batch: Batch, given: Tensors) -> Callable[[], Any]:
    """FlashAttention-3 over what each group shares, then over what each request has alone, merged by log-sum-exp."""
    from sgl_kernel import merge_state_v2

    if not batch.forest.n_nodes or batch.forest.n_requests == batch.forest.n_nodes:
        raise ValueError("no two requests share anything")
    prefix = int(batch.forest.length[0])
    first = np.searchsorted(batch.forest.request_node, np.arange(batch.forest.n_nodes))
    shared = _fa3(
        given, given.table[first.tolist(), :prefix].contiguous(), batch.forest.length,
        np.add.reduceat(batch.counts, first), causal=False, lse=True,
    )  # fmt: skip
    alone = _fa3(given, given.table[:, prefix:].contiguous(), batch.counts, batch.counts, causal=True, lse=True)

    def call() -> Any:
        (one, one_lse, *_), (other, other_lse, *_) = shared(), alone()
        return merge_state_v2(one, one_lse.T.contiguous(), other, other_lse.T.contiguous())[0]

    return call


def flashinfer(batch: Batch, given: Tensors) -> Callable[[], Any]:
    """FlashInfer's prefill over pages, by the kernels that SGLang asks it for."""
    import flashinfer as package
    import torch

    lens = batch.forest.seq_len + batch.counts
    pages = given.table[torch.arange(given.table.shape[1], device="cuda") < _ints(lens).cuda()[:, None]]
    memory = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = package.BatchPrefillWithPagedKVCacheWrapper(memory, "NHD", backend="fa2")
    wrapper.plan(
        _steps(batch.counts), _steps(lens), pages, torch.ones(len(lens), dtype=torch.int32),
        batch.heads.query, batch.heads.kv, batch.head_dim, 1, causal=True, q_data_type=given.q.dtype,
    )  # fmt: skip
    out = torch.empty_like(given.q)
    caches = given.k.unsqueeze(1), given.v.unsqueeze(1)
    return lambda: wrapper.run(given.q, caches, out=out)


BLOCKS = {"causal_tails": True, "grow": False}
SYSTEMS: dict[str, Callable[..., Callable[[], Any]]] = {
    "pat": packed, "pat-blocks": partial(packed, **BLOCKS), "pat-profit": partial(packed, strategy="profit"),
    "pat-block8": partial(packed, block=8), "fa3": fa3, "cascade": cascade, "flashinfer": flashinfer,
}  # fmt: skip
STOCK = ("fa3", "flashinfer")


# Measuring --------------------------------------------------------------------------------------------------------


def on_host(batch: Batch, rounds: int = 5, **options: Any) -> tuple[PackPlan, float]:
    """A step's plan, and the microseconds that its forest and it take."""
    planner, times = Planner(**shape_of(batch), **options), []
    for _ in range(rounds):
        start = time.perf_counter()
        plan = planner.plan(with_new_tokens(batch.forest, batch.counts, prompt_block(planner.options)))
        times.append(time.perf_counter() - start)
    return plan, median(times) * 1e6


def modelled_us(batch: Batch, plan: PackPlan, **options: Any) -> float:
    """What the planner's costs say that its kernel takes."""
    return explain(PlannedBatch("", plan.forest, {**shape_of(batch), **options})).plan.modelled_us


def measured(batch: Batch, names: Sequence[str], rounds: int, flush: Any) -> dict[str, Any]:
    """Microseconds of each system, or why there are none."""
    import torch
    from decode_timing import check_and_measure

    given = tensors(batch, torch.bfloat16)
    picked = np.unique(np.linspace(0, batch.rows - 1, CHECKED).astype(int)).tolist()
    systems = {name: partial(SYSTEMS[name], batch, given) for name in names}
    return check_and_measure(systems, reference(batch, given, picked), picked, TOLERANCE, rounds, flush)


def table_of(record: dict[str, Any]) -> str:
    """Times of a case beside its floor."""
    lines = [["system", "warm us", "flushed us", "to floor", "relative error"]]
    for name, result in record["systems"].items():
        if "warm_us" in result:
            us = [f"{result[f'{kind}_us']:,.0f}" for kind in ("warm", "flushed")]
            cells = [*us, f"{result['warm_us'] / record['floor_us']:.2f}x", f"{result['relative_error']:.1e}"]
            lines.append([name, *cells])
        else:
            lines.append([name, result.get("error", "not run")])
    times = {name: result["warm_us"] for name, result in record["systems"].items() if "warm_us" in result}
    stock = [times[name] for name in STOCK if name in times]
    facts = (
        "{case}: {requests} requests, {rows:,} new tokens, floor {floor_us:,.0f} us, model {model_us:,.0f} us (in "
        "causal blocks {blocks_us:,.0f}), host {host_us:,.0f} us"
    )
    ratio = f", pat {times['pat'] / min(stock):.2f} of the best stock kernel" if stock and "pat" in times else ""
    return f"{facts.format(**record)}{ratio}\n{grid(lines)}" if record["systems"] else facts.format(**record)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cases; 1 if this package is wrong or absent in one."""
    options = _options(argv)
    flush = None
    if not options.host:
        from decode_timing import Flush

        flush = Flush()
    records = []
    for name in options.cases:
        batch = cases(options.tokens, options.heads)[name]()
        plan, host_us = on_host(batch)
        blocks, _ = on_host(batch, 1, **BLOCKS)
        record = {
            "case": name, "requests": len(batch.counts), "rows": batch.rows, "floor_us": batch.floor * 1e6,
            "host_us": host_us, "model_us": modelled_us(batch, plan), "blocks_us": modelled_us(batch, blocks, **BLOCKS),
            "tokens_seen": int(batch.seen.sum()),
            "tokens_read": plan.tokens_read,
            "systems": {} if options.host else measured(batch, options.systems, options.rounds, flush),
        }  # fmt: skip
        print(table_of(record), flush=True)
        records.append(record)
    if options.json is not None:
        content = {
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "when": time.strftime("%Y-%m-%d %H:%M:%S"), "heads": str(options.heads), "records": records,
        }  # fmt: skip
        if not options.host:
            from decode_timing import machine

            content["machine"] = machine()
        options.json.write_text(json.dumps(content, indent=1))
    ours = [name for name in options.systems if not options.host and name.startswith("pat")]
    return int(any("warm_us" not in record["systems"][name] for record in records for name in ours))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = cases(1, Heads(1, 1))
    parser.add_argument("--cases", default=",".join(known), help="with commas (default: %(default)s)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="with commas (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="new tokens of a step, at most (default: %(default)s)")
    parser.add_argument("--heads", default="32/8", help="query/KV heads (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="of measuring (default: %(default)s)")
    parser.add_argument("--host", action="store_true", help="only what the plan takes on the CPU")
    parser.add_argument("--json", type=Path, help="write everything here")
    options = parser.parse_args(argv)
    try:
        options.heads = parse_heads(options.heads)
    except ValueError as error:
        parser.error(str(error))
    if options.tokens < 1:
        parser.error(f"--tokens {options.tokens}: give 1 or more")
    for name, names in (("cases", known), ("systems", SYSTEMS)):
        chosen = getattr(options, name).split(",")
        if unknown := [one for one in chosen if one not in names]:
            parser.error(f"--{name}: {', '.join(unknown)} is not among {', '.join(names)}")
        setattr(options, name, chosen)
    return options


if __name__ == "__main__":
    sys.exit(main())
