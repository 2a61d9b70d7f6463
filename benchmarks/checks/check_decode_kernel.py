"""Check whether the packed decode kernel is right, on random forests, on the GPU.

    PYTHONPATH=kernels python benchmarks/checks/check_decode_kernel.py --forests 1000 --seed 0
    PYTHONPATH=kernels python benchmarks/checks/check_decode_kernel.py --case 17
    PYTHONPATH=kernels python benchmarks/checks/check_decode_kernel.py --head-dim 256 --forests 100
    PYTHONPATH=kernels python benchmarks/checks/check_decode_kernel.py --sinks --forests 200
    PYTHONPATH=kernels python benchmarks/checks/check_decode_kernel.py --kv fp8 --forests 200
    compute-sanitizer --tool memcheck --kernel-name kns=forward \\
        python benchmarks/checks/check_decode_kernel.py --sanitize-small     # and --tool racecheck

Each case is a random batch with random arguments of the wrapper (`random_batches`). Outputs and scratch are NaN before
the run, and so is every KV element that no request reads. The result is right if

- its largest error against a float32 reference is at most twice that of PyTorch's own attention in the same dtype on
  the same batch (scaled_dot_product_attention; with a soft cap or sinks, matrix products and softmax in that dtype),
  plus one unit in the last place of the largest output, as far off as a rounded result may be;
- the log-sum-exp is within 1e-3 of the reference's;
- a second run of the plan gives the same bits, nothing beside the output is written, and a fused merge leaves the
  log-sum-exps of partial results as the next run expects them.

With ``--kv fp8`` the caches hold e4m3 with scales, and so do the references, exactly widened; the kernel for 16 bits
runs on the widened caches, too, and a table has both errors.

Then: CUDA graphs replayed after other batches were planned, and bad input, which must be one clear error and no output.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import random_batches
import torch
from random_batches import Batch, Choice

from feather_kernels.build import HEAD_DIMS
from feather_kernels.device import Device as Gpu
from feather_kernels.errors import BuildError
from feather_kernels.tiles import TILES, built_tiles, parse_tile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from decode_cases import Watchdog, attend, grid, padded_slots, take_slots

LSE_TOLERANCE = 1e-3
CHUNK = 1 << 26  # elements of K that the reference gathers at a time
SMALL_CASES = 12
NOTHING = -1  # the wrapper's note, as integers, of a partial row that nobody has written
FP8, NAN_E4M3 = torch.float8_e4m3fn, 0x7F
KV_SCALES = (1.0, 0.1, 0.3, 30.0)  # of values around 1: up to the end of e4m3's range, and down to where it has no ones
GUARD = 2  # rows around q and out that must not be read, or written
Make = Callable[..., Any]
Pair = tuple[torch.Tensor, torch.Tensor]


class Wrong(AssertionError):
    """A result is wrong; the message says how."""


@dataclass
class Outcome:
    """One case's verdict.

    Attributes
    ----------
    ratio : float
        Largest error over the allowed one; at most 1 is right.
    times : float
        Largest error over PyTorch's own.
    wide_times : float
        The same of the kernel for 16-bit caches, where the case's have 8.
    lse_error : float
    failure : str
        Empty if right.
    """

    choice: Choice
    ratio: float = 0.0
    times: float = 0.0
    wide_times: float = 0.0
    lse_error: float = 0.0
    failure: str = ""


class Device:
    """A batch on the device; KV elements that no request reads are NaN."""

    def __init__(self, batch: Batch, device: torch.device | str) -> None:
        choice, page_size = batch.choice, batch.choice.page_size
        dtype = getattr(torch, choice.dtype)
        draw = torch.Generator(device).manual_seed(choice.seed)
        shape = (batch.n_slots, choice.heads.kv, choice.head_dim)

        def normal(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(generator=draw)

        if choice.interleaved:
            both = normal(shape[0], 2, *shape[1:])
            self.k, self.v = both[:, 0], both[:, 1]
        else:
            self.k, self.v = normal(*shape), normal(*shape)
        if choice.spiky:
            self.k[torch.rand(shape[0], device=device, generator=draw) < 0.01] *= 10
        self.k_scale = self.v_scale = 1.0
        if choice.fp8_kv:
            self.k_scale, self.v_scale = KV_SCALES[choice.seed % 4], KV_SCALES[choice.seed // 4 % 4]
            self.k, self.v = to_fp8(self.k, self.k_scale), to_fp8(self.v, self.v_scale)
        tokens = torch.arange(page_size, device=device) < torch.from_numpy(batch.valid).to(device)[:, None]
        unused = ~tokens.view(-1, 1, 1)
        for cache in (self.k, self.v):
            if choice.fp8_kv:
                cache.view(torch.uint8).masked_fill_(unused, NAN_E4M3)
            else:
                cache.masked_fill_(unused, float("nan"))
        requests = batch.forest.n_requests
        guarded = torch.full((requests + 2 * GUARD, choice.heads.query, choice.head_dim), float("nan"), dtype=dtype)
        self._q = guarded.to(device)
        self.q = self._q[GUARD:-GUARD]
        self.q.normal_(generator=draw).mul_(choice.q_scale)
        self.sinks: torch.Tensor | None = None
        if choice.sinks:  # from next to nothing to nearly all of a softmax's sum
            drawn = torch.empty(choice.heads.query, device=device).normal_(generator=draw).mul_(4)
            self.sinks = drawn if choice.seed % 2 else drawn.to(dtype)
        self.table = torch.from_numpy(batch.table).to(device, getattr(torch, choice.table_dtype))
        self.planned_lens = torch.from_numpy(batch.forest.seq_len).to(device, torch.int32)
        self.lens = torch.from_numpy(batch.seq_len).to(device)
        self.rows = torch.from_numpy(batch.forest.row_offset).to(device)
        self.batch = batch

    @property
    def scale(self) -> float:
        choice = self.batch.choice
        return choice.head_dim**-0.5 if choice.sm_scale is None else choice.sm_scale

    @property
    def given(self) -> dict[str, Any]:
        """What `run` is given besides tensors of the batch."""
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        return sinks | ({"k_scale": self.k_scale, "v_scale": self.v_scale} if self.batch.choice.fp8_kv else {})


def to_fp8(cache: torch.Tensor, scale: float) -> torch.Tensor:
    """A cache divided by its scale, in e4m3: an interleaved one stays interleaved."""
    limit = torch.finfo(FP8).max
    quantized = torch.empty_strided(cache.shape, cache.stride(), dtype=FP8, device=cache.device)
    return quantized.copy_((cache.float() / scale).clamp_(-limit, limit))


class Guarded:
    """An output buffer of NaN, with rows around it that must stay as they are."""

    MARK = 7.0

    def __init__(self, q: torch.Tensor) -> None:
        self._all = torch.full((len(q) + 2 * GUARD, *q.shape[1:]), self.MARK, dtype=q.dtype, device=q.device)
        self.out = self._all[GUARD:-GUARD]
        self.out.fill_(float("nan"))

    def check(self) -> None:
        if not bool((self._all[:GUARD] == self.MARK).all() & (self._all[-GUARD:] == self.MARK).all()):
            raise Wrong("rows beside the output were written")


def chunks(lens: np.ndarray, width: int) -> Iterable[np.ndarray]:
    """Requests of similar length, so many that their K has at most `CHUNK` elements; ``width`` elements a token."""
    order, first = np.argsort(-lens.astype(np.int64), kind="stable"), 0
    while first < len(order):
        longest = max(int(lens[order[first]]), 1)
        most = max(1, CHUNK // (longest * width))
        alike = (
            int(np.searchsorted(-lens[order].astype(np.int64), -(longest // 2), side="right"))
            if longest > 256
            else len(order)
        )
        last = max(first + 1, min(first + most, alike, len(order)))
        yield order[first:last]
        first = last


def references(data: Device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The float32 output and log-sum-exp, and PyTorch's own output in the batch's dtype."""
    choice, batch = data.batch.choice, data.batch
    out = torch.empty(data.q.shape, dtype=torch.float32, device=data.q.device)
    lse = torch.empty(data.q.shape[:2], dtype=torch.float32, device=data.q.device)
    own = torch.empty_like(data.q)
    for requests in chunks(batch.seq_len, choice.heads.kv * choice.head_dim):
        chosen = torch.from_numpy(requests).to(data.q.device)
        lens = data.lens[chosen].long()
        width = -(-max(int(batch.seq_len[requests].max()), 1) // 16) * 16
        slots = padded_slots(data.table, data.rows[chosen], lens, choice.page_size, width)
        q = data.q[chosen]
        scores = data.scale * data.k_scale, choice.soft_cap, data.sinks, data.v_scale
        out[chosen], lse[chosen] = attend(q, data.k, data.v, slots, lens, *scores)
        keys, values = (take_slots(cache, slots).to(q.dtype) for cache in (data.k, data.v))
        own[chosen] = pytorch_attention(q, keys, values, lens, *scores)
    return out, lse, own


def pytorch_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lens: torch.Tensor, scale: float, soft_cap: float,
    sinks: torch.Tensor | None = None, v_scale: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """PyTorch's attention in the dtype of its input: the measure of what error is to be expected.

    Parameters
    ----------
    q : tensor [requests, query heads, head_dim]
    keys, values : tensor [requests, width, KV heads, head_dim]
    lens : int64 tensor [requests]
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    requests, query_heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    rows = q.view(requests, kv_heads, query_heads // kv_heads, head_dim)  # the group's heads as rows of one KV head
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    inside = (torch.arange(keys.shape[2], device=q.device) < lens[:, None])[:, None, None, :]
    if soft_cap or sinks is not None:
        scores = (rows @ keys.transpose(2, 3)) * scale
        if soft_cap:
            scores = (scores / soft_cap).tanh() * soft_cap
        scores = scores.masked_fill(~inside, float("-inf"))
        if sinks is not None:
            column = sinks.to(q.dtype).view(1, kv_heads, -1, 1).expand(requests, -1, -1, -1)
            scores = torch.cat([scores, column], -1)
        out = scores.softmax(-1)[..., : keys.shape[2]] @ values
    else:
        # cuDNN's would be compiled anew for every shape.
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            mask = inside.expand(-1, kv_heads, rows.shape[2], -1)
            out = torch.nn.functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
    out = out * v_scale
    return torch.where((lens > 0)[:, None, None, None], out, 0.0).to(q.dtype).flatten(1, 2)


def new_wrapper(make: Make, choice: Choice, data: Device, **more: Any) -> Any:
    """The wrapper that a case asks for."""
    more = ({"kv_dtype": FP8} if choice.fp8_kv else {}) | more
    return make(
        choice.heads.query, choice.heads.kv, choice.head_dim, page_size=choice.page_size, dtype=data.q.dtype,
        device=data.q.device, logit_soft_cap=choice.soft_cap, sm_scale=choice.sm_scale,
        sinks=choice.sinks, **{"max_requests": data.batch.forest.n_requests, **dict(choice.wrapper), **more},
    )  # fmt: skip


def poison_scratch(wrapper: Any) -> None:
    """The largest values in the partial results: whatever is read there must have been written by the same run.

    Their notes stay: what they hold between two runs, a step of NaN among it, says that nobody has written yet.
    """
    wrapper._part_out.fill_(-1)


def check_scratch(wrapper: Any) -> None:
    """A fused merge leaves every note as nobody had written it, or the next run would take in an old part."""
    notes = wrapper._part_stats
    if wrapper.planner.options.merge == "fused" and not bool((notes == NOTHING).all()):
        left = (notes != NOTHING).flatten(1).any(-1).nonzero()
        raise Wrong(f"{len(left)} partial rows are not left as the next run expects, first {int(left[0, 0])}")


def attend_once(
    wrapper: Any, data: Device, give_out: bool, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One run into poisoned memory; (out, lse or None)."""
    poison_scratch(wrapper)
    guarded = Guarded(data.q)
    out_to = guarded.out if give_out else None
    result = wrapper.run(data.q, data.k, data.v, out=out_to, return_lse=return_lse, **data.given)
    out, lse = result if return_lse else (result, None)
    check_scratch(wrapper)
    if give_out:
        if out.data_ptr() != guarded.out.data_ptr():
            raise Wrong("run() did not return the output that it was given")
        guarded.check()
    return out, lse


def compare(out: torch.Tensor, lse: torch.Tensor | None, expected: tuple[torch.Tensor, ...], outcome: Outcome) -> None:
    """Judge a result against `references`; `Wrong` if it is not right."""
    reference, reference_lse, own = expected
    if out.shape != reference.shape or out.dtype != own.dtype:
        raise Wrong(f"output is {out.dtype} {list(out.shape)}")
    if bool(out.isnan().any()):
        rows = out.isnan().any(-1).nonzero()
        raise Wrong(f"{len(rows)} rows are NaN or not written, first request {int(rows[0, 0])} head {int(rows[0, 1])}")
    if bool(own.isnan().any() | reference.isnan().any()):
        raise Wrong("the reference itself is NaN")
    errors = (out.float() - reference).abs()
    error, usual = float(errors.max()), float((own.float() - reference).abs().max())
    allowed = 2 * usual + torch.finfo(out.dtype).eps * float(reference.abs().max())
    outcome.ratio = max(outcome.ratio, error / allowed if allowed else 0.0)
    outcome.times = max(outcome.times, error / usual if usual else 0.0)
    if error > allowed:
        request, head = divmod(int(errors.amax(-1).argmax()), out.shape[1])
        raise Wrong(f"error {error:.2e} at request {request} head {head}; PyTorch's {usual:.2e}, allowed {allowed:.2e}")
    if lse is not None:
        if lse.shape != reference_lse.shape or lse.dtype != torch.float32:
            raise Wrong(f"lse is {lse.dtype} {list(lse.shape)}")
        same = lse == reference_lse  # both -inf where there is no token
        gap = float(torch.where(same, 0.0, (lse - reference_lse).abs()).max())
        outcome.lse_error = max(outcome.lse_error, gap)
        if not gap <= LSE_TOLERANCE:
            raise Wrong(f"log-sum-exp is off by {gap:.2e}")


def same_bits(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first.contiguous().view(torch.int16), second.contiguous().view(torch.int16))


@contextlib.contextmanager
def noted(outcome: Outcome) -> Iterator[None]:
    """Note in ``outcome`` what a case fails with, and go on behind the block."""
    try:
        yield
    except Wrong as wrong:
        outcome.failure = str(wrong)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        outcome.failure = "out of GPU memory"
    except (ValueError, TypeError, RuntimeError, AssertionError, AttributeError) as error:
        outcome.failure = f"{type(error).__name__}: {error}".splitlines()[0][:300]


def check_forest(choice: Choice, make: Make, device: torch.device | str) -> Outcome:
    """One random forest: plan, perhaps grow, run twice, compare."""
    outcome = Outcome(choice)
    with noted(outcome):
        batch = random_batches.make(choice)
        data = Device(batch, device)
        wrapper = new_wrapper(make, choice, data)
        lens = data.planned_lens.clone() if choice.growth or choice.give_lens else None
        wrapper.plan(batch.forest, data.table, lens)
        if lens is not None:
            lens.copy_(data.lens)
        first, expected = attend_once(wrapper, data, choice.give_out, choice.return_lse), references(data)
        compare(*first, expected, outcome)
        if choice.fp8_kv:
            outcome.wide_times = times_of_widened(choice, make, data, expected)
        second = attend_once(wrapper, data, True, choice.return_lse)
        if not all(same_bits(a, b) for a, b in zip(first, second, strict=True)):
            raise Wrong("a second run of the same plan gives other bits")
    return outcome


def times_of_widened(choice: Choice, make: Make, data: Device, expected: tuple[torch.Tensor, ...]) -> float:
    """The largest error of the kernel for 16-bit caches over PyTorch's own, on the same values."""
    wrapper = new_wrapper(make, replace(choice, fp8_kv=False, sm_scale=data.scale * data.k_scale), data)
    wrapper.plan(data.batch.forest, data.table, data.lens)
    keys, values = (cache.to(data.q.dtype) for cache in (data.k, data.v))
    sinks = {} if data.sinks is None else {"sinks": data.sinks}
    out = wrapper.run(data.q, keys, values, **sinks).float() * data.v_scale
    reference, _, own = expected
    usual = float((own.float() - reference).abs().max())
    return float((out.to(own.dtype).float() - reference).abs().max()) / usual if usual else 0.0


def check_capture(choice: Choice, make: Make, device: torch.device | str) -> Outcome:
    """A CUDA graph, captured once and replayed for two batches in turn: only contents change, no addresses."""
    choice = replace(choice, growth=0, interleaved=False, wrapper=_without(choice.wrapper, "debug"))
    outcome = Outcome(choice)
    try:
        forests = [
            Device(random_batches.make(c), device) for c in (choice, replace(choice, seed=choice.seed + 500_000))
        ]
        expected = [references(data) for data in forests]
        first = forests[0]
        k, v, table = (
            torch.empty_like(max((getattr(data, name) for data in forests), key=len)) for name in ("k", "v", "table")
        )
        for tensor, fill in ((k, float("nan")), (v, float("nan")), (table, 0)):
            if tensor.dtype == FP8:
                tensor.view(torch.uint8).fill_(NAN_E4M3)
            else:
                tensor.fill_(fill)
        q, lens, guarded = torch.empty_like(first.q), torch.zeros_like(first.lens), Guarded(first.q)
        sinks = None if first.sinks is None else torch.empty_like(first.sinks)
        wrapper = new_wrapper(make, choice, first)
        lse: list[torch.Tensor] = []

        def load(data: Device) -> None:
            for target, source in ((k, data.k), (v, data.v), (table, data.table), (q, data.q), (lens, data.lens)):
                target[: len(source)].copy_(source)
            if sinks is not None:
                sinks.copy_(data.sinks)
            wrapper.plan(data.batch.forest, table, lens)

        def run() -> None:
            given = first.given if sinks is None else first.given | {"sinks": sinks}
            lse[:] = [wrapper.run(q, k, v, out=guarded.out, return_lse=True, **given)[1]]

        load(forests[1])
        run()
        torch.cuda.synchronize()
        load(forests[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        before = None
        for turn in (0, 1, 0):
            load(forests[turn])
            poison_scratch(wrapper)
            guarded.out.fill_(float("nan"))
            lse[0].fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            compare(guarded.out, lse[0], expected[turn], outcome)
            guarded.check()
            check_scratch(wrapper)
            if turn == 0 and before is not None and not same_bits(before, guarded.out):
                raise Wrong("replays of the same batch give other bits")
            before = guarded.out.clone() if turn == 0 else before
    except Wrong as wrong:
        outcome.failure = f"graph: {wrong}"
    except (ValueError, TypeError, RuntimeError, AssertionError, AttributeError) as error:
        outcome.failure = f"graph: {type(error).__name__}: {error}".splitlines()[0][:300]
    return outcome


def _without(pairs: tuple[tuple[str, Any], ...], *names: str) -> tuple[tuple[str, Any], ...]:
    return tuple(pair for pair in pairs if pair[0] not in names)


def check_bad_input(make: Make, device: torch.device | str) -> list[str]:
    """Every mistake must end in one error of one line, the output untouched; what does not is returned."""
    choice = replace(random_batches.draw(7), requests=6, longest=80, kind="flat", page_size=4, growth=0, soft_cap=0.0,
                     sm_scale=None, interleaved=False, wrapper=(("debug", True),))  # fmt: skip
    batch = random_batches.make(choice)
    data = Device(batch, device)
    wrapper = new_wrapper(make, choice, data)
    wrapper.plan(batch.forest, data.table)
    out, mark = Guarded(data.q).out, Guarded.MARK
    q, k, v = data.q.contiguous(), data.k, data.v
    other = torch.float32
    fewer = random_batches.make(replace(choice, requests=5))
    outside = data.table.clone()
    outside[int(batch.forest.row_offset[0])] = len(batch.valid) + 3
    negative = data.table.clone()
    negative[int(batch.forest.row_offset[0])] = -1

    def run(q: Any = q, k: Any = k, v: Any = v, out: Any = out) -> Callable[[], Any]:
        return lambda: wrapper.run(q, k, v, out=out)

    def planned(table: torch.Tensor) -> Callable[[], Any]:
        def plan_and_run() -> None:
            wrapper.plan(batch.forest, table)
            wrapper.run(q, k, v, out=out)

        return plan_and_run

    def stale() -> None:
        wrapper.plan(fewer.forest, data.table)
        wrapper.run(q, k, v, out=out)

    def too_many() -> None:
        small = new_wrapper(make, choice, data, max_requests=5)
        small.plan(batch.forest, data.table)
        small.run(q, k, v, out=out)

    mistakes: dict[str, Callable[[], Any]] = {
        "run before plan": lambda: new_wrapper(make, choice, data).run(q, k, v, out=out),
        "q of another batch": run(q=q[:-1].contiguous()),
        "q without heads": run(q=q.flatten(1)),
        "q of another head_dim": run(q=q[..., : choice.head_dim // 2].contiguous()),
        "q of another dtype": run(q=q.to(other)),
        "q with heads apart": run(q=q.transpose(0, 1).contiguous().transpose(0, 1)),
        "k of another dtype": run(k=k.to(other)),
        "v of fewer heads": run(v=torch.cat([v, v], 1)),
        "k of another head_dim": run(k=k[..., : choice.head_dim // 2].contiguous()),
        "k without heads": run(k=k.flatten(1)),
        "out of another dtype": run(out=out.to(other)),
        "out of another shape": run(out=out[:-1]),
        "table of floats": planned(data.table.float()),
        "lens of another length": lambda: wrapper.plan(batch.forest, data.table, data.lens[:-1].contiguous()),
        "lens of int64": lambda: wrapper.plan(batch.forest, data.table, data.lens.long()),
        "a batch beyond max_requests": too_many,
        "a plan of another batch": stale,
        "a slot beyond the caches": planned(outside),
        "a negative slot": planned(negative),
        "a table that ends early": planned(data.table[: int(batch.forest.row_offset.max()) + 1].contiguous()),
        "a group of 129": lambda: make(129, 1, 64, device=device),
        "a merge of wide groups": lambda: make(17, 1, 64, device=device, merge="fused"),
        "a merge in three launches": lambda: make(8, 1, 64, device=device, launch="serial", merge="fused"),
        "a merge in a large tile": lambda: make(8, 1, 64, device=device, tiles=((128, 64),), merge="fused"),
        "an unknown merge": lambda: make(8, 1, 64, device=device, merge="none"),
        "an unknown strategy": lambda: make(8, 1, 64, device=device, strategy="best"),
        "a page size of 3": lambda: make(8, 1, 64, device=device, page_size=3),
    }  # fmt: skip
    if torch.device(device).type == "cuda":
        mistakes |= {
            "q on the CPU": run(q=q.cpu()),
            "k on the CPU": run(k=k.cpu()),
            "out on the CPU": run(out=out.cpu()),
            "table on the CPU": planned(data.table.cpu()),
        }
    problems = []
    for name, act in mistakes.items():
        out.fill_(mark)
        try:
            act()
            problems.append(f"{name}: no error")
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            if not str(error).strip() or "\n" in str(error).strip():
                problems.append(f"{name}: not one line: {str(error)[:80]!r}")
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        if not bool((out == mark).all()):
            problems.append(f"{name}: the output was written")
        wrapper.plan(batch.forest, data.table)
    result = wrapper.run(q, k, v)
    if bool(result.isnan().any()):
        problems.append("after all those errors, a right call gives NaN")
    return problems


def coverage(outcomes: list[Outcome]) -> str:
    """What the cases had, in one paragraph."""
    choices = [outcome.choice for outcome in outcomes]
    parts: dict[str, Counter[Any]] = {
        "groups": Counter(choice.heads.group for choice in choices),
        "KV heads": Counter(choice.heads.kv for choice in choices),
        "head_dim": Counter(choice.head_dim for choice in choices),
        "dtype": Counter(choice.dtype for choice in choices),
        "page size": Counter(choice.page_size for choice in choices),
        "kind": Counter(choice.kind for choice in choices),
        "grown": Counter(bool(choice.growth) for choice in choices),
    }
    for name in ("strategy", "split", "launch", "merge", "path", "tiles"):
        parts[name] = Counter(str(dict(choice.wrapper).get(name, "-")) for choice in choices)
    lines = []
    for name, counts in parts.items():
        pairs = sorted(counts.items(), key=lambda pair: str(pair[0]))
        lines.append(f"{name} " + " ".join(f"{value}:{count}" for value, count in pairs))
    return "; ".join(lines)


def summary(outcomes: list[Outcome], captures: list[Outcome], bad: list[str] | None, seconds: float) -> str:
    """The verdict, failures with the seed that repeats each, and the worst figures."""
    everything = outcomes + captures
    failed = [outcome for outcome in everything if outcome.failure]
    lines = []
    for kind, group in (("", outcomes), ("graph of ", captures)):
        wrong = [outcome for outcome in group if outcome.failure]
        lines += [f"FAILED {kind}--case {o.choice.seed}: {o.failure}\n    {o.choice}" for o in wrong[:12]]
        if len(wrong) > 12:
            lines.append(f"and {len(wrong) - 12} more failed: {' '.join(str(o.choice.seed) for o in wrong[12:60])}")
    lines += [f"FAILED bad input, {problem}" for problem in bad or []]
    if any(outcome.choice.fp8_kv for outcome in outcomes):
        lines.append(fp8_table(outcomes))
    if everything:
        worst = max(everything, key=lambda outcome: outcome.ratio)
        times = max(everything, key=lambda outcome: outcome.times)
        mean = sum(outcome.times for outcome in everything) / len(everything)
        lse = max(everything, key=lambda outcome: outcome.lse_error)
        if outcomes:
            lines.append(f"coverage: {coverage(outcomes)}")
        lines.append(
            f"worst error: {worst.ratio:.2f} of the allowed (case {worst.choice.seed}); {times.times:.2f} times "
            f"PyTorch's own (case {times.choice.seed}), {mean:.2f} in the mean; "
            f"log-sum-exp {lse.lse_error:.1e} (case {lse.choice.seed})"
        )
    inputs = "not checked" if bad is None else f"{len(bad)} problems" if bad else "right"
    lines.append(
        f"{len(outcomes)} forests and {len(captures)} graphs in {seconds:.0f} s: {len(everything) - len(failed)} "
        f"right, {len(failed)} wrong; bad input: {inputs}"
    )
    return "\n".join(lines)


def fp8_table(outcomes: list[Outcome]) -> str:
    """Errors with 8-bit caches, and of the kernel for 16 bits on the same values, over those of PyTorch's attention."""
    groups: dict[tuple[str, int, str], list[Outcome]] = {}
    for outcome in outcomes:
        choice = outcome.choice
        path = str(dict(choice.wrapper).get("path", "auto"))
        groups.setdefault((choice.dtype, choice.head_dim, path), []).append(outcome)
    rows = [["dtype head_dim path", "cases", "wrong", "of allowed", "times PyTorch's: fp8", "16 bits", "log-sum-exp"]]
    for (dtype, head_dim, path), group in sorted(groups.items()):
        means = (sum(getattr(one, name) for one in group) / len(group) for name in ("times", "wide_times"))
        most = max(group, key=lambda one: one.ratio).ratio
        wrong, lse = sum(bool(one.failure) for one in group), max(one.lse_error for one in group)
        numbers = [str(len(group)), str(wrong), f"{most:.2f}", *(f"{mean:.2f}" for mean in means), f"{lse:.1e}"]
        rows.append([f"{dtype} {head_dim} {path}", *numbers])
    return grid(rows)


def write(path: Path, outcomes: list[Outcome], captures: list[Outcome]) -> None:
    """Every outcome as JSON."""
    records = [
        {"graph": graph, "case": one.choice.seed, "batch": str(one.choice), "of_allowed": one.ratio,
         "times_pytorch": one.times, "times_pytorch_16_bits": one.wide_times, "lse_error": one.lse_error,
         "failure": one.failure}
        for graph, group in ((False, outcomes), (True, captures)) for one in group
    ]  # fmt: skip
    path.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "outcomes": records}, indent=1) + "\n")


def device_alive() -> bool:
    """Whether CUDA still answers; after an illegal access it does not."""
    try:
        torch.cuda.synchronize()
        return True
    except RuntimeError:
        return False


def build(
    watchdog: Watchdog, head_dims: tuple[int, ...], tiles: tuple[tuple[str, int, int], ...] = (), sinks: bool = False,
    fp8_kv: bool = False,
) -> bool:  # fmt: skip
    """Load the kernels, compiling what is not built yet; whether they have the Hopper path."""
    from feather_kernels.build import load_kernel

    gpu = Gpu.of()
    for dtype in ("float16", "bfloat16"):
        for head_dim in head_dims:
            watchdog.expect(900, f"building the kernels for {dtype}, head_dim {head_dim}")
            # A case that had to build its own would be taken for a hung kernel.
            for soft_cap, fp8 in itertools.product((False, True), sorted({False, fp8_kv})):
                features = soft_cap, tiles, sinks, fp8
                load_kernel(dtype, head_dim, gpu.capability, *features, shared_kb=gpu.limited_kb)
    return gpu.path == "hopper"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forests", type=int, default=1000, help="random forests (default: %(default)s)")
    parser.add_argument("--captures", type=int, default=20, help="CUDA graphs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first case; the others follow (default: %(default)s)")
    parser.add_argument("--case", type=int, action="append", help="only this case, and its CUDA graph; may be repeated")
    parser.add_argument(
        "--sanitize-small", action="store_true", help=f"{SMALL_CASES} tiny cases, for compute-sanitizer"
    )
    parser.add_argument("--path", choices=tuple(TILES), help="only this copy path of the kernel")
    parser.add_argument(
        "--tile", nargs="+", type=parse_tile, default=[], metavar="PATH:MxN",
        help="all cases on that path, with another n for that m (feather_kernels.tiles.n_choices)",
    )  # fmt: skip
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, help="all cases with this head dimension")
    parser.add_argument("--wide-groups", action="store_true", help="all cases with 17 to 128 query heads to a KV head")
    parser.add_argument("--sinks", action="store_true", help="all cases with attention sinks")
    parser.add_argument("--kv", choices=("16bit", "fp8"), default="16bit", help="the caches (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    parser.add_argument("--stop", type=int, default=20, help="end after so many failures (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="print every case before it runs")
    options = parser.parse_args(argv)
    if options.tile and options.path:
        parser.error("--tile names the path: leave out --path")
    return options


def with_tiles(choice: Choice, others: Sequence[tuple[str, int, int]]) -> tuple[tuple[str, Any], ...]:
    """The wrapper's arguments of a case with these (path, m, n) of one path instead of what is built by default."""
    path = others[0][0]
    n_of = {m: n for _, m, n in others}
    tiles = tuple((m, n_of.get(m, n)) for m, n in built_tiles(path, choice.head_dim))
    return (*_without(choice.wrapper, "path", "tiles"), ("path", path), ("tiles", tiles))


def run_all(
    jobs: Iterable[tuple[Callable[..., Outcome], Choice]], make: Make, watchdog: Watchdog, options: Any
) -> list:
    """Run the jobs until they end, too many fail, or the device is lost."""
    outcomes: list[Outcome] = []
    failures = 0
    for check, choice in jobs:
        if options.path:
            choice = replace(choice, wrapper=(*_without(choice.wrapper, "path", "tiles"), ("path", options.path)))
        if options.head_dim:  # not all tiles are built for every head dimension
            choice = replace(choice, head_dim=options.head_dim, wrapper=_without(choice.wrapper, "tiles"))
        if options.tile:
            choice = replace(choice, wrapper=with_tiles(choice, options.tile))
        if options.wide_groups:
            choice = random_batches.with_wide_group(choice, Gpu.of().path == "hopper")
        choice = replace(choice, sinks=options.sinks, fp8_kv=options.kv == "fp8")
        if options.verbose:
            print(f"case {choice.seed}: {choice}", flush=True)
        watchdog.expect(600 if options.sanitize_small else 30, f"{check.__name__}, case {choice.seed}: {choice}")
        outcome = check(choice, make, "cuda")
        if not device_alive():
            outcome.failure = f"the device was lost: {outcome.failure}"
        outcomes.append(outcome)
        failures += bool(outcome.failure)
        if outcome.failure.startswith("the device") or failures >= options.stop:
            break
        if torch.cuda.memory_reserved() > 64 << 30:
            torch.cuda.empty_cache()
    return outcomes


def main(argv: list[str] | None = None) -> int:
    from feather_kernels import PackedDecodeWrapper

    options = arguments(argv)
    if not torch.cuda.is_available():
        print("no CUDA device: this check runs the kernel on a GPU", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    watchdog, begun = Watchdog(), time.monotonic()
    try:
        dims = (options.head_dim,) if options.head_dim else (64, 128)
        hopper = build(watchdog, dims, tuple(options.tile), options.sinks, options.kv == "fp8")
    except BuildError as error:
        print(f"check_decode_kernel.py: error: {error}", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}; kernels loaded in {time.monotonic() - begun:.0f} s", flush=True)
    begun = time.monotonic()
    captures: list[Outcome] = []
    bad = None

    def run(check: Callable[..., Outcome], draw: Callable[..., Choice], seeds: Iterable[int]) -> list[Outcome]:
        return run_all(((check, draw(seed, hopper)) for seed in seeds), PackedDecodeWrapper, watchdog, options)

    if options.sanitize_small:
        small = range(options.seed, options.seed + SMALL_CASES)
        outcomes = run(check_forest, random_batches.small, options.case or small)
    else:
        first = options.seed
        outcomes = run(check_forest, random_batches.draw, options.case or range(first, first + options.forests))
        if device_alive():
            graphs = options.case or range(first, first + options.captures)
            captures = run(check_capture, random_batches.draw, graphs)
        plain = not (options.head_dim or options.wide_groups or options.sinks or options.kv == "fp8")
        if plain and not options.case and device_alive():
            watchdog.expect(60, "bad input")
            bad = check_bad_input(PackedDecodeWrapper, "cuda")
    watchdog.stop()
    print(summary(outcomes, captures, bad, time.monotonic() - begun))
    if options.json:
        write(options.json, outcomes, captures)
    return int(any(outcome.failure for outcome in outcomes + captures) or bool(bad))


if __name__ == "__main__":
    sys.exit(main())
