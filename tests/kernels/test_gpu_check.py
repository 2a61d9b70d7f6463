"""The GPU check itself, without a GPU: it accepts a right kernel, and every kind of wrong one."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "checks"))

import check_decode_kernel as check
import random_batches
import torch
from random_batches import draw, make, small

from effort import samples
from feather_kernels import Planner
from feather_kernels.errors import PlanError
from feather_kernels.pack import MERGES
from feather_kernels.reference import reference_decode
from feather_kernels.tiles import TILES
from feather_kernels.wrapper import PackedDecodeWrapper


class HostWrapper(PackedDecodeWrapper):
    """The wrapper's checks and the planner's plans, run by the NumPy reference."""

    def __init__(
        self, q_heads, kv_heads, head_dim, *, device="cpu", page_size=1, dtype=torch.float16, max_requests=1024,
        strategy="profit", split="balanced", tiles=None, launch="persistent", merge=None, path="auto", sm_scale=None,
        logit_soft_cap=0.0, debug=False, grow=True, fan_in=16, min_chunk=64, kv_dtype=None, **_,
    ):  # fmt: skip
        if q_heads > 128 * kv_heads:
            raise ValueError("a group is too large")
        if page_size & (page_size - 1):
            raise ValueError("page_size is no power of two")
        self._tiles = TILES["portable" if path == "portable" else "hopper"] if tiles is None else tiles
        may_fuse = launch == "persistent" and max(self._tiles[0][0], q_heads // kv_heads) <= 16
        if merge == "fused" and not may_fuse:
            raise ValueError("merge is 'fused' in several launches, a large tile, or of wide groups")
        self.config = SimpleNamespace(
            device=torch.device(device), dtype=dtype, kv_dtype=kv_dtype or dtype, num_qo_heads=q_heads,
            num_kv_heads=kv_heads, head_dim=head_dim,
        )  # fmt: skip
        self.page_size, self.debug = page_size, debug
        self.sm_scale, self.logit_soft_cap = sm_scale, logit_soft_cap
        self.planner = Planner(
            q_heads, kv_heads, head_dim, max_requests=max_requests, strategy=strategy, split=split, grow=grow, n_sm=8,
            tiles=self._tiles, merge=merge or ("fused" if may_fuse else "kernel"), fan_in=fan_in, min_chunk=min_chunk,
        )  # fmt: skip
        self.pack_plan, self._table, self.runs = None, None, 0
        self._part_out = torch.zeros(1, dtype=torch.int16)
        self._part_stats = torch.full((4, q_heads, 2), check.NOTHING, dtype=torch.int32)

    def plan(self, forest, table, seq_lens=None):
        if table.dtype not in (torch.int32, torch.int64):
            raise PlanError("table is not of integers")
        if seq_lens is not None and (seq_lens.dtype != torch.int32 or len(seq_lens) != forest.n_requests):
            raise PlanError("seq_lens is of the wrong kind")
        self.pack_plan, self._table = self.planner.plan(forest), table
        self._lens = torch.from_numpy(np.array(forest.seq_len)) if seq_lens is None else seq_lens
        return self.pack_plan

    def run(self, q, k_cache, v_cache, out=None, return_lse=False, sinks=None, k_scale=1.0, v_scale=1.0):
        k_cache, v_cache = self._checked(q, k_cache, v_cache, out)
        self.runs += 1
        arrays = [tensor.double().numpy() for tensor in (q, k_cache, v_cache)]
        values, sums = reference_decode(
            self.pack_plan, *arrays, self._table.numpy(), self.page_size, self.sm_scale, self.logit_soft_cap,
            self._lens.numpy(), None if sinks is None else sinks.double().numpy(), k_scale, v_scale,
        )  # fmt: skip
        out = torch.empty_like(q) if out is None else out
        self.write(out, torch.from_numpy(values))
        lse = torch.from_numpy(sums).float()
        HostGraph.last = self, (q, k_cache, v_cache, out), lse, (sinks, k_scale, v_scale)
        return (out, lse) if return_lse else out

    def write(self, out, values):
        out.copy_(values)


class HostGraph:
    """Replays the last run before its capture ended, on the same tensors."""

    last = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.captured = HostGraph.last

    def replay(self):
        wrapper, tensors, lse, (sinks, *scales) = self.captured
        lse.copy_(wrapper.run(*tensors, True, sinks, *scales)[1])


def host_choice(seed):
    """Small enough for NumPy."""
    choice = draw(seed)
    return check.replace(choice, requests=min(choice.requests, 12), longest=min(choice.longest, 90))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("seed", range(samples(48, 16)))
def test_a_right_kernel_passes(seed, sinks):
    outcome = check.check_forest(check.replace(host_choice(seed), sinks=sinks), HostWrapper, "cpu")
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"
    assert outcome.ratio <= 1 and outcome.lse_error < 1e-4


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("seed", range(samples(16, 6)))
def test_a_right_kernel_passes_with_fp8_kv(seed, sinks):
    outcome = check.check_forest(check.replace(host_choice(seed), sinks=sinks, fp8_kv=True), HostWrapper, "cpu")
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"
    assert outcome.ratio <= 1 and outcome.lse_error < 1e-4 and 0 < outcome.wide_times < 3
    assert f"{outcome.choice.dtype} {outcome.choice.head_dim}" in check.fp8_table([outcome])


@pytest.mark.parametrize("seed", range(samples(16, 6)))
def test_a_right_kernel_passes_with_wide_groups(seed):
    choice = random_batches.with_wide_group(host_choice(seed))
    assert 16 < choice.heads.query // choice.heads.kv <= 128
    outcome = check.check_forest(choice, HostWrapper, "cpu")
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"


def test_wide_groups_are_no_wider_than_a_tile():
    for seed in range(100):
        for hopper in (True, False):
            choice = random_batches.with_wide_group(draw(seed, hopper), hopper)
            portable = not hopper or dict(choice.wrapper)["path"] == "portable"
            assert 16 < choice.heads.query // choice.heads.kv <= (64 if portable else 128)


@pytest.mark.parametrize("seed", range(check.SMALL_CASES))
def test_a_right_kernel_passes_the_tiny_cases(seed):
    outcome = check.check_forest(small(seed), HostWrapper, "cpu")
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"


def test_the_tiny_cases_have_every_launch_and_path():
    wrappers = [dict(small(seed).wrapper) for seed in range(check.SMALL_CASES)]
    assert {w["launch"] for w in wrappers} == set(random_batches.LAUNCHES)
    assert {w["path"] for w in wrappers} == {"auto", "portable", "hopper"}
    assert {w["merge"] for w in wrappers} == {None, *MERGES}


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("draw", [draw, small])
def test_every_merge_is_drawn_where_the_wrapper_allows_it(draw, hopper):
    choices = [draw(seed, hopper) for seed in range(400)]
    wrappers = [dict(choice.wrapper) for choice in choices]
    fused = [w for w in wrappers if w["merge"] == "fused"]
    assert all(w["launch"] == "persistent" and w.get("tiles", ((8, 16),))[0][0] <= 16 for w in fused)
    for launch in random_batches.LAUNCHES:
        drawn = {w["merge"] for w in wrappers if w["launch"] == launch}
        assert drawn == {None, *MERGES} - ({"fused"} if launch != "persistent" else set())
    for choice, wrapper in zip(choices, wrappers, strict=True):
        assert f"merge={wrapper['merge']}" in str(choice)
    if draw is not small:
        assert {w["tiles"][0][0] > 16 for w in wrappers if "tiles" in w} == {True, False}
    assert "merge None:" in check.coverage([check.Outcome(choice) for choice in choices])


def test_poison_is_for_the_results_only():
    wrapper = HostWrapper(8, 2, 64)
    check.poison_scratch(wrapper)
    assert (wrapper._part_out == -1).all() and (wrapper._part_stats == check.NOTHING).all()


class Unwritten(HostWrapper):
    def write(self, out, values):
        out[:-1].copy_(values[:-1])


class Imprecise(HostWrapper):
    def write(self, out, values):
        out.copy_(values * (1 + 8 * torch.finfo(out.dtype).eps) + 4 * torch.finfo(out.dtype).eps)


class Unsteady(HostWrapper):
    def write(self, out, values):
        out.copy_(values)
        if self.runs % 2:
            out[0, 0, 0] = torch.nextafter(out[0, 0, 0].float(), torch.tensor(9.0)) * (1 + torch.finfo(out.dtype).eps)


class Overrun(HostWrapper):
    def write(self, out, values):
        out.copy_(values)
        out.as_strided(out.shape, out.stride(), out.storage_offset() + out.stride(0))[-1] = 1


class Deaf(HostWrapper):
    """A wrong kernel that ignores the growth of tails."""

    def run(self, *arguments, **named):
        self._lens = torch.from_numpy(np.array(self.pack_plan.forest.seq_len))
        return super().run(*arguments, **named)


class Leaving(HostWrapper):
    """A wrong kernel that merges a part and leaves it there for the next run."""

    def write(self, out, values):
        out.copy_(values)
        self._part_stats[2, 1, 0] = 7


class OneSinkEach(HostWrapper):
    """A wrong kernel that uses one head's sink for all heads."""

    def run(self, *arguments, sinks, **named):
        return super().run(*arguments, sinks=sinks[:1].expand(len(sinks)), **named)


class OneScale(HostWrapper):
    """A wrong kernel that scales values by the scale of the keys."""

    def run(self, *arguments, k_scale=1.0, v_scale=1.0, **named):
        return super().run(*arguments, k_scale=k_scale, v_scale=k_scale, **named)


class OddFirst(HostWrapper):
    """A wrong kernel that leaves the columns in the order of the widening."""

    def write(self, out, values):
        pairs = values.unflatten(-1, (-1, 8, 2)).transpose(-1, -2)
        out.copy_(pairs.flatten(-3) if self.config.kv_dtype != self.config.dtype else values)


class WrongSum(HostWrapper):
    def run(self, *arguments, return_lse=False, **named):
        result = super().run(*arguments, return_lse=return_lse, **named)
        return (result[0], result[1] / 0.6931) if return_lse else result


@pytest.mark.parametrize(
    ("wrapper", "message", "wanted"),
    [
        (Unwritten, "not written", {"give_out": True}),
        (Imprecise, "error", {"soft_cap": 0.0}),
        (Unsteady, "other bits", {"soft_cap": 0.0}),
        (Overrun, "beside the output", {"give_out": True}),
        (Leaving, "1 partial rows are not left as the next run expects, first 2", {"wrapper": (("merge", "fused"),)}),
        (Deaf, "error", {"growth": 300, "soft_cap": 0.0}),
        (WrongSum, "log-sum-exp", {"return_lse": True}),
        (OneSinkEach, "error", {"sinks": True}),
        (OneScale, "error", {"fp8_kv": True, "seed": 6}),
        (OddFirst, "error", {"fp8_kv": True}),
    ],
)
def test_a_wrong_kernel_does_not(wrapper, message, wanted):
    choice = check.replace(host_choice(3), requests=6, longest=40, kind="flat", **wanted)
    if "growth" in wanted:
        choice = check.replace(choice, wrapper=(("grow", True),))
    assert not check.check_forest(choice, HostWrapper, "cpu").failure
    assert message in check.check_forest(choice, wrapper, "cpu").failure


def test_a_merge_kernel_may_leave_its_parts():
    choice = check.replace(host_choice(3), requests=6, longest=40, wrapper=(("merge", "kernel"),))
    assert not check.check_forest(choice, Leaving, "cpu").failure


@pytest.mark.parametrize("more", [{}, {"sinks": True}, {"fp8_kv": True}], ids=["plain", "sinks", "fp8"])
@pytest.mark.parametrize("seed", [0, 5, 11, 16])
def test_a_graph_replayed_for_other_batches(seed, more, monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", HostGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    choice = check.replace(host_choice(seed), **more)
    outcome = check.check_capture(choice, HostWrapper, "cpu")
    assert not outcome.failure, f"{outcome.failure}: {outcome.choice}"

    class Frozen(HostWrapper):
        """A wrong wrapper that keeps its first plan."""

        def plan(self, *arguments):
            return self.pack_plan or super().plan(*arguments)

    assert check.check_capture(choice, Frozen, "cpu").failure.startswith("graph: ")


@pytest.mark.parametrize("seed", range(6))
def test_the_reference_does_not_depend_on_its_chunks(seed, monkeypatch):
    data = check.Device(make(host_choice(seed)), "cpu")
    whole = check.references(data)
    monkeypatch.setattr(check, "CHUNK", 1)
    assert len(list(check.chunks(data.batch.seq_len, 1))) == data.batch.forest.n_requests
    for first, second in zip(whole, check.references(data), strict=True):
        assert torch.allclose(first.float(), second.float(), atol=2e-2 if first.dtype != torch.float32 else 1e-5)


def test_chunks_hold_every_request_once_and_similar_lengths():
    lens = np.random.default_rng(0).integers(0, 30_000, 1000).astype(np.int32)
    parts = list(check.chunks(lens, 1024))
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))
    for part in parts:
        longest = int(lens[part].max())
        assert len(part) == 1 or len(part) * longest * 1024 <= check.CHUNK
        assert longest <= 256 or lens[part].min() >= longest // 2


def test_bad_input_is_refused():
    assert check.check_bad_input(HostWrapper, "cpu") == []


def test_bad_input_that_is_accepted_is_reported():
    class Careless(HostWrapper):
        def run(self, q, k_cache, v_cache, out=None, return_lse=False):
            if q.dim() == 2:
                raise ValueError("two\nlines")
            if out is not None:
                out.zero_()
            return torch.zeros_like(q)

    problems = check.check_bad_input(Careless, "cpu")
    assert any(problem.startswith("q without heads: not one line") for problem in problems)
    assert "q of another dtype: no error" in problems and "q of another dtype: the output was written" in problems


@pytest.mark.parametrize("seed", range(0, 200, 7))
def test_a_batch_is_what_its_seed_says(seed):
    choice = draw(seed)
    batch, again = make(choice), make(draw(seed))
    assert np.array_equal(batch.table, again.table) and np.array_equal(batch.seq_len, again.seq_len)
    assert choice.heads.group == 1 + seed % 16 and choice.heads.query <= random_batches.QUERY_HEADS
    assert batch.forest.n_requests == choice.requests
    assert np.all(batch.seq_len >= batch.forest.seq_len) and np.all(batch.forest.seq_len >= batch.forest.shared_length)
    reads = np.zeros((len(batch.valid), choice.page_size), bool)
    for row, tokens in zip(batch.forest.row_offset, batch.seq_len, strict=True):
        positions = np.arange(tokens)
        reads[batch.table[row + positions // choice.page_size], positions % choice.page_size] = True
    assert np.array_equal(reads, np.arange(choice.page_size) < batch.valid[:, None])
    assert np.any(batch.valid == 0)  # pages that nobody reads


def test_the_summary_names_the_seed_of_a_failure():
    good = check.check_forest(host_choice(1), HostWrapper, "cpu")
    bad = check.Outcome(host_choice(2), failure="error 1")
    text = check.summary([good, bad], [], None, 1.0)
    assert "FAILED --case 2: error 1" in text and "1 right, 1 wrong" in text
    assert "groups 2:1 3:1" in check.coverage([good, bad])


@pytest.mark.parametrize("seed", [3, 8])
def test_a_case_on_tiles_of_another_n(seed):
    others = check.arguments(["--tile", "hopper:128x32", "hopper:64x32"]).tile
    choice = check.replace(host_choice(seed), head_dim=128)
    choice = check.replace(choice, wrapper=check.with_tiles(choice, others))
    assert dict(choice.wrapper)["tiles"] == ((8, 16), (16, 16), (64, 32), (128, 32))
    assert dict(choice.wrapper)["path"] == "hopper"
    assert not check.check_forest(choice, HostWrapper, "cpu").failure
