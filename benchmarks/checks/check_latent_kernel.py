"""Check whether the kernel for latent attention is right and how fast it is, on a GPU of compute capability 9.0.

    PYTHONPATH=kernels python benchmarks/checks/check_latent_kernel.py --forests 400
    PYTHONPATH=kernels python benchmarks/checks/check_latent_kernel.py --rows pat unshared --heads 8 16

Without ``--rows``, random forests only: each result's error against float32 is at most twice that of PyTorch's own
attention in bfloat16.

With it, one table: microseconds of a layer (a CUDA graph's replay), the floor (each latent once at an H200's copy
rate, or 2,176 FLOP a row and token at its matrix rate, whichever takes longer), and the best peer: FlashAttention-3
and FlashMLA of sgl-kernel, FlashInfer's MLA, SGLang's decode in Triton. A peer reads a request's drafts as one causal
query; Triton has no such call. What a peer plans or decides on the host is done before the clock starts.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import latent_cases
from decode_cases import COPY_BANDWIDTH, MATRIX_RATE, Case, Heads, Watchdog, grid, padded_slots, tree_case
from decode_systems import FLASHINFER_WORKSPACE, TRITON_SPLITS, Unavailable, describe
from decode_timing import Captured, measure_in_turn
from latent_cases import SCALE

from feather_kernels.build import LATENT_DIM
from feather_kernels.forest import Forest
from feather_kernels.latent import VALUE_DIM, LatentDecodeWrapper
from feather_kernels.trees import PAT_TREES

UNSHARED = tuple(f"{requests}_{tokens}" for requests in (16, 64, 256) for tokens in (1024, 4096, 32768))
AGENTS = ("1,16_63936,4064", "1,24_63936,4064")  # near a public report of Kimi K3: 12 heads a rank
DRAFTS = (2, 3, 4)
FLOP = 2 * (LATENT_DIM + VALUE_DIM)  # of a row and token
TOLERANCE = 1e-2  # of a timed result's error, relative
Call = Callable[[], torch.Tensor]


class Row(NamedTuple):
    """A batch of the table; with drafts, each request is that many query rows, the last tokens of its own tail."""

    name: str
    heads: int
    drafts: int = 1

    def case(self, page_size: int) -> Case:
        """Its forest, a row for each draft."""
        case = tree_case(self.name, Heads(self.heads, 1), page_size, LATENT_DIM)
        if self.drafts == 1:
            return case
        forest, drafts = case.forest, self.drafts
        tail = np.tile(np.arange(1 - drafts, 1), forest.n_requests)
        each = [np.repeat(of, drafts) for of in (forest.request_node, forest.seq_len, forest.row_offset)]
        return Case(
            f"{self.name} x{drafts}",
            Forest(forest.parent, forest.length, each[0], each[1] + tail.astype(np.int32), each[2]),
            case.table, case.n_pages, case.heads, page_size, LATENT_DIM,
        )  # fmt: skip


def rows_of(kinds: list[str], heads: list[int]) -> Iterator[Row]:
    """The rows that were asked for."""
    for count in heads:
        names = (PAT_TREES if "pat" in kinds else ()) + (UNSHARED if "unshared" in kinds else ())
        yield from (Row(name, count) for name in names)
        if "drafts" in kinds:
            yield from (Row("64_4096", count, drafts) for drafts in DRAFTS)
    if "agents" in kinds:
        yield from (Row(name, 12) for name in AGENTS)


class Inputs:
    """The tensors of a row."""

    def __init__(self, row: Row, page_size: int) -> None:
        self.row, self.case = row, row.case(page_size)
        forest = self.case.forest
        draw = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=draw)

        self.latents = normal(self.case.n_slots, 1, LATENT_DIM)
        self.q = normal(forest.n_requests, row.heads, LATENT_DIM)
        self.table = torch.from_numpy(self.case.table).cuda()
        self.lens = torch.from_numpy(forest.seq_len).cuda().int()
        # Peers: a request's drafts are one query.
        last = slice(row.drafts - 1, None, row.drafts)
        self.page_table = torch.from_numpy(self.case.page_table[last]).cuda().contiguous()
        self.request_lens = self.lens[last].contiguous()
        self.request_rows = torch.from_numpy(forest.row_offset[last]).cuda()
        self.paged = self.latents.view(self.case.n_pages, page_size, 1, LATENT_DIM)

    @property
    def floor_us(self) -> float:
        """Latents once, or the matrix units at full rate."""
        forest, drafts = self.case.forest, self.row.drafts
        lens = forest.seq_len[drafts - 1 :: drafts]
        unique = int(forest.length.sum() + (lens - forest.shared_length[drafts - 1 :: drafts]).sum())
        flop = FLOP * self.row.heads * int(forest.seq_len.sum())
        return 1e6 * max(unique * LATENT_DIM * 2 / COPY_BANDWIDTH, flop / MATRIX_RATE)

    def exact(self, rows: list[int]) -> torch.Tensor:
        """float32 [len(rows), heads, 512]."""
        chosen = torch.tensor(rows, device="cuda")
        begin = torch.from_numpy(self.case.forest.row_offset).cuda()[chosen]
        lens = self.lens[chosen].long()
        slots = padded_slots(self.table, begin, lens, self.case.page_size, int(lens.max()))
        values = self.latents[..., :VALUE_DIM]
        return latent_cases.attend(self.q[chosen], self.latents, values, slots, lens, SCALE)[0]

    def feather(self) -> Call:
        """This package's."""
        case, more = self.case, {}
        if self.row.drafts > 1:
            more = {"causal_tails": True, "grow": False}
        wrapper = LatentDecodeWrapper(
            self.row.heads, sm_scale=SCALE, page_size=case.page_size, max_requests=case.n_requests, **more
        )
        wrapper.plan(case.forest, self.table, self.lens)
        out = torch.empty(*self.q.shape[:2], VALUE_DIM, dtype=self.q.dtype, device="cuda")
        return lambda: wrapper.run(self.q, self.latents, out)

    def fa3(self) -> Call:
        """FlashAttention-3, called as SGLang calls it for latents."""
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        drafts, requests = self.row.drafts, len(self.request_lens)
        steps = torch.arange(0, (requests + 1) * drafts, drafts, dtype=torch.int32, device="cuda")
        values, rope = (part.contiguous() for part in self.q.split((VALUE_DIM, LATENT_DIM - VALUE_DIM), -1))
        return lambda: flash_attn_with_kvcache(
            q=rope, k_cache=self.paged[..., VALUE_DIM:], v_cache=self.paged[..., :VALUE_DIM], qv=values,
            page_table=self.page_table, cache_seqlens=self.request_lens, cu_seqlens_q=steps, max_seqlen_q=drafts,
            softmax_scale=SCALE, causal=True,
        )  # fmt: skip

    def flashmla(self) -> Call:
        """FlashMLA, on pages of 64."""
        from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

        heads, drafts, requests = self.row.heads, self.row.drafts, len(self.request_lens)
        metadata, splits = get_mla_metadata(self.request_lens, heads * drafts, 1)
        q = self.q.view(requests, drafts, heads, LATENT_DIM)
        return lambda: flash_mla_with_kvcache(
            q=q, k_cache=self.paged, block_table=self.page_table, cache_seqlens=self.request_lens,
            head_dim_v=VALUE_DIM, tile_scheduler_metadata=metadata, num_splits=splits, softmax_scale=SCALE, causal=True,
        )[0].view(requests * drafts, heads, VALUE_DIM)  # fmt: skip

    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int32: where each request's slots begin, and all of them, one behind the other."""
        lens = self.request_lens.long()
        padded = padded_slots(self.table, self.request_rows, lens, self.case.page_size, int(lens.max()))
        there = torch.arange(padded.shape[1], device="cuda") < lens[:, None]
        return torch.cat([lens.new_zeros(1), lens.cumsum(0)]).int(), padded[there].int()

    def flashinfer(self) -> Call:
        """FlashInfer's MLA, on pages of one token as SGLang plans it."""
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        wrapper = BatchMLAPagedAttentionWrapper(workspace(), backend="auto")
        indptr, slots = self.slots()
        drafts, requests = self.row.drafts, len(self.request_lens)
        steps = torch.arange(0, (requests + 1) * drafts, drafts, dtype=torch.int32, device="cuda")
        wrapper.plan(
            steps, indptr, slots, self.request_lens, self.row.heads, VALUE_DIM, LATENT_DIM - VALUE_DIM, 1, drafts > 1,
            SCALE, self.q.dtype, self.latents.dtype,
        )  # fmt: skip
        values, rope = (part.contiguous() for part in self.q.split((VALUE_DIM, LATENT_DIM - VALUE_DIM), -1))
        out = torch.empty_like(values)
        return lambda: wrapper.run(values, rope, self.latents[..., :VALUE_DIM], self.latents[..., VALUE_DIM:], out=out)

    def triton(self) -> Call:
        """SGLang's decode in Triton, by its own splits."""
        from sgl_kernel.utils import is_arch_support_pdl
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
        from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

        if self.row.drafts > 1:
            raise Unavailable("it decodes one row of a request")
        requests, heads = len(self.request_lens), self.row.heads
        indptr, slots = self.slots()
        splits = torch.empty(requests, dtype=torch.int32, device="cuda")
        get_num_kv_splits_triton[(1,)](
            splits, self.request_lens, requests, 1, heads, 1, TRITON_SPLITS,
            torch.cuda.get_device_properties("cuda").multi_processor_count,
            MAX_NUM_SEQ=max(256, 1 << (requests - 1).bit_length()),
        )  # fmt: skip
        parts = torch.empty(requests, heads, TRITON_SPLITS, VALUE_DIM, dtype=torch.float32, device="cuda")
        sums = torch.empty(parts.shape[:3], dtype=torch.float32, device="cuda")
        out = torch.empty(requests, heads, VALUE_DIM, dtype=self.q.dtype, device="cuda")
        values, pdl = self.latents[..., :VALUE_DIM], is_arch_support_pdl()

        def call() -> torch.Tensor:
            decode_attention_fwd(
                self.q, self.latents, values, out, indptr, slots, parts, sums, splits, TRITON_SPLITS, SCALE, 1.0, 1.0,
                has_mla=True, use_pdl=pdl,
            )  # fmt: skip
            return out

        return call


@functools.cache
def workspace() -> torch.Tensor:
    """FlashInfer's, for all rows in turn."""
    return torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device="cuda")


PEERS = ("fa3", "flashmla", "flashinfer", "triton")


def measure(
    row: Row, page_size: int, rounds: int, peers: Sequence[str] = PEERS
) -> tuple[dict[str, float], dict[str, str], float]:
    """Microseconds of each system that is right, why others have none, and the floor."""
    pages = dict.fromkeys(("feather", *peers), page_size) | ({"flashmla": 64} if "flashmla" in peers else {})
    inputs: dict[int, Inputs] = {}
    captured, errors = {}, {}
    for name, size in pages.items():
        if row.name in PAT_TREES and size > 32 and name == "flashmla":
            size = 64 if aligned(row.name, 64) else 0  # what is shared must be whole pages
        if not size:
            errors[name] = "its pages of 64 cannot share these prefixes"
            continue
        given = inputs.setdefault(size, Inputs(row, size)) if size not in inputs else inputs[size]
        chosen = sorted({0, given.case.n_requests // 2, given.case.n_requests - 1})
        try:
            one = Captured(getattr(given, name)())
            out, exact = one.poisoned_run().view(-1, row.heads, VALUE_DIM)[chosen].float(), given.exact(chosen)
            error = float((out - exact).norm() / exact.norm())
            if error <= TOLERANCE:
                captured[name] = one
            else:
                errors[name] = f"wrong: relative error {error:.1e}"
        except Exception as problem:  # whatever a peer lacks here
            errors[name] = describe(problem)
    times = measure_in_turn(captured, rounds, None)
    return {name: sorted(of.warm)[len(of.warm) // 2] for name, of in times.items()}, errors, inputs[page_size].floor_us


def aligned(name: str, page_size: int) -> bool:
    """Whether all that is shared is whole pages."""
    return all(int(tokens) % page_size == 0 for tokens in name.partition("_")[2].split(",")[:-1])


def table(
    rows: list[Row], page_size: int, rounds: int, watchdog: Watchdog, peers: Sequence[str], file: Path | None
) -> int:
    """Print a line a batch, then means; returns how many results of this package are missing.

    With a file, it gets every time, and why a peer has none.
    """
    lines = [["batch", "heads", "us", "floor", "ratio", *peers, "of the best"]]
    shares: dict[tuple[int, str], list[float]] = {}
    missing, found = 0, []
    for row in rows:
        watchdog.expect(60, f"{row}")
        times, errors, floor = measure(row, page_size, rounds, peers)
        found.append({**row._asdict(), "floor_us": floor, "us": times, "left_out": errors})
        if file is not None:
            file.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": found}, indent=1))
        shown = [f"{times[name]:.1f}" if name in times else "-" for name in peers]
        name = f"{row.name}{f' x{row.drafts}' if row.drafts > 1 else ''}"
        if "feather" not in times:
            missing += 1
            lines.append([name, str(row.heads), "wrong", f"{floor:.1f}", "", *shown, ""])
            print(f"{row}: {errors['feather']}", file=sys.stderr, flush=True)
            continue
        mine, best = times["feather"], min((times[name] for name in peers if name in times), default=math.nan)
        lines.append(
            [name, str(row.heads), f"{mine:.1f}", f"{floor:.1f}", f"{mine / floor:.2f}", *shown, f"{mine / best:.2f}"]
        )
        print("  ".join(lines[-1]), file=sys.stderr, flush=True)
        kind = "shared" if "," in row.name.partition("_")[0] else "drafts" if row.drafts > 1 else "unshared"
        shares.setdefault((row.heads, kind), []).append(mine / best)
    print(grid(lines))
    for (heads, kind), of in shares.items():
        mean = math.exp(sum(map(math.log, of)) / len(of))
        print(
            f"{heads} heads, {kind}: {mean:.2f} of the best peer (geometric mean of {len(of)}), {max(of):.2f} at most"
        )
    return missing


def check_forests(first: int, count: int, watchdog: Watchdog) -> int:
    """Print what is wrong, then one line; returns how many."""
    begin, wrong, worst, worst_lse = time.perf_counter(), 0, 0.0, 0.0
    for seed in range(first, first + count):
        watchdog.expect(60, f"forest {seed}")
        outcome = latent_cases.check_forest(latent_cases.draw(seed))
        worst, worst_lse = max(worst, outcome.times), max(worst_lse, outcome.lse_error)
        if outcome.failure:
            wrong += 1
            print(f"forest {seed}: {outcome.failure}: {outcome.choice}", flush=True)
    print(
        f"{count - wrong} of {count} random forests are right; largest error {worst:.2f} times PyTorch's, log-sum-exp "
        f"off by {worst_lse:.1e} at most; {time.perf_counter() - begin:.0f} s"
    )
    return wrong


def main() -> int:
    """Check, or measure."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--forests", type=int, default=0, help="random forests to check")
    parser.add_argument("--seed", type=int, default=0, help="the first forest's")
    parser.add_argument("--rows", nargs="+", choices=("pat", "unshared", "agents", "drafts"), default=[])
    parser.add_argument("--heads", nargs="+", type=int, default=[8, 16, 32, 64, 128])
    parser.add_argument("--page-size", type=int, default=1, help="of this package and FlashAttention-3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--json", type=Path, help="write every time of the table there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: this check runs on a GPU of compute capability 9.0")
    with Watchdog() as watchdog:
        bad = check_forests(options.seed, options.forests, watchdog) if options.forests else 0
        if options.rows:
            rows = list(rows_of(options.rows, options.heads))
            bad += table(rows, options.page_size, options.rounds, watchdog, options.peers, options.json)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
