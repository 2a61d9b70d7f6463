"""The batches of the benchmark of prefill, its reference, its floor, and how it calls its peers; no GPU."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_prefill as bench
from decode_cases import COPY_BANDWIDTH, MATRIX_RATE, Heads
from plan_checks import check_plan

from feather_kernels.plan import Planner
from feather_kernels.reference import merge, reference_decode

SMALL = [([3, 2], 40, [5, 1, 9, 2, 30]), ([1, 1, 1], 0, [7, 1, 20]), ([1, 4], 16, [3] * 5)]


def small(groups, prefix, counts):
    batch = bench.batch_of(groups, prefix, np.array(counts), Heads(8, 2), head_dim=16)
    return batch, bench.tensors(batch, torch.float32, "cpu")


@pytest.mark.parametrize("one", SMALL)
def test_what_times_are_checked_against_is_what_the_kernel_computes(one):
    batch, given = small(*one)
    plan = Planner(**bench.shape_of(batch)).plan(bench.with_new_tokens(batch.forest, batch.counts, 4))
    out, _ = reference_decode(plan, given.q.numpy(), given.k.numpy(), given.v.numpy(), batch.table.ravel(), 1)
    exact = bench.reference(batch, given, range(batch.rows))
    assert np.abs(out - exact.numpy()).max() < 1e-5


def test_groups_share_slots_and_nobody_else_does():
    batch, _ = small([3, 2], 40, [5, 1, 9, 2, 30])
    used = [row[: 40 + count] for row, count in zip(batch.table, batch.counts, strict=True)]
    assert len(np.unique(np.concatenate(used))) == batch.slots == 2 * 40 + batch.rows
    assert all((row[:40] == used[0][:40]).all() for row in used[:3]) and (used[3][:40] == used[4][:40]).all()
    assert len(np.unique(np.concatenate([row[40:] for row in used]))) == batch.rows


def test_the_floor_is_of_bytes_or_of_products():
    batch = bench.batch_of([2], 30, np.array([2, 1]), Heads(4, 4))
    assert batch.seen.tolist() == [31, 32, 31]
    values = 33 * 2 * 4 + 3 * 2 * 4  # keys and values once, queries and outputs
    assert batch.floor == pytest.approx(max(2 * 128 * values / COPY_BANDWIDTH, 4 * 128 * 4 * 94 / MATRIX_RATE))
    long = bench.batch_of([1], 0, np.array([4000]), Heads(32, 8))
    assert long.floor == pytest.approx(4 * 128 * 32 * 4000 * 4001 / 2 / MATRIX_RATE)


@pytest.mark.parametrize("tokens", [700, 8192, 16384])
def test_cases_fit_a_step(tokens):
    for name, case in bench.cases(tokens, Heads(32, 8)).items():
        batch = case()
        assert 0 < batch.rows <= tokens or name == "few-shot", name
        assert batch.counts.min() > 0 and batch.table.shape == (len(batch.counts), batch.seen.max())


def test_cases_are_what_they_are_called():
    batches = {name: case() for name, case in bench.cases(65536, Heads(32, 8)).items()}
    short = batches["short"]
    assert np.mean(short.counts < 128) == pytest.approx(0.6, abs=0.1) and short.forest.n_nodes == 0
    assert len(batches["groups-5x5k"].counts) == 500 and batches["groups-20x10k"].forest.n_nodes == 20
    assert batches["few-shot"].rows == 6400 and batches["samples-16"].rows == 256 and len(batches["long"].counts) == 1
    assert np.median(batches["traces"].counts) == pytest.approx(bench.MEDIAN_PROMPT, rel=0.3)
    again = bench.cases(65536, Heads(32, 8))["short"]()
    assert (again.counts == short.counts).all() and (again.table == short.table).all()


@pytest.mark.parametrize("name", ["groups-5x5k", "samples-16"])
def test_the_plan_reads_what_is_shared_by_whole_tiles(name):
    """Of 32 tokens, which two or three requests fill; and each request's own."""
    batch = bench.cases(8192, Heads(32, 8))[name]()
    plan, _ = bench.on_host(batch, rounds=1)
    shared, own = batch.forest.seq_len.repeat(batch.counts), batch.seen - batch.forest.seq_len.repeat(batch.counts)
    assert shared.sum() / 32 < plan.tokens_read < 1.05 * shared.sum() / 32 + own.sum()


@pytest.mark.parametrize("name", ["groups-5x5k", "chunk"])
def test_a_whole_step_fits_the_memory_that_is_planned_for(name):
    """Nothing is packed less for want of it."""
    plan, _ = bench.on_host(bench.cases(8192, Heads(32, 8))[name](), rounds=1)
    check_plan(plan, plan.forest)
    assert not plan.widened and 8000 < plan.n_parts <= plan.options.max_parts == 2 * plan.n_requests + 2048


def flash_attention(
    q, k, v, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, causal, return_softmax_lse
):  # fmt: skip
    """What FlashAttention-3 computes, from its definition: a mask's last row sees all."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    steps = cu_seqlens_q.tolist()
    assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and len(page_table) == len(cache_seqlens) == len(steps) - 1
    for row, (begin, end, length) in enumerate(zip(steps, steps[1:], cache_seqlens.tolist(), strict=False)):
        slots = page_table[row, :length].long()
        keys, values = (cache[slots, 0].repeat_interleave(q.shape[1] // cache.shape[2], 1) for cache in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], keys) * q.shape[2] ** -0.5
        if causal:
            seen = torch.ones(end - begin, length, dtype=torch.bool).tril(length - end + begin)
            scores = scores.masked_fill(~seen, float("-inf"))
        lse[:, begin:end] = scores.logsumexp(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return (out, lse, None) if return_softmax_lse else out


def merge_states(one, one_lse, other, other_lse):
    pairs = zip(one.numpy(), other.numpy(), one_lse.numpy(), other_lse.numpy(), strict=True)
    merged = [merge(np.stack([a, b]), np.stack([x, y]))[0] for a, b, x, y in pairs]
    return torch.from_numpy(np.stack(merged)).float(), None


@pytest.mark.parametrize("one", SMALL)
@pytest.mark.parametrize("name", ["fa3", "cascade"])
def test_peers_are_called_for_the_same_attention(monkeypatch, name, one):
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(merge_state_v2=merge_states))
    kernels = SimpleNamespace(flash_attn_with_kvcache=flash_attention)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", kernels)
    batch, given = small(*one)
    if name == "cascade" and not batch.forest.n_nodes:
        with pytest.raises(ValueError, match="no two requests share"):
            bench.cascade(batch, given)
        return
    out = bench.SYSTEMS[name](batch, given)()
    assert (out - bench.reference(batch, given, range(batch.rows))).abs().max() < 1e-5


def test_without_a_gpu_it_says_what_planning_takes(tmp_path, capsys):
    file = tmp_path / "host.json"
    assert bench.main(["--host", "--cases", "samples-1,few-shot", "--json", str(file)]) == 0
    records = json.loads(file.read_text())["records"]
    assert [record["case"] for record in records] == ["samples-1", "few-shot"]
    assert all(record["host_us"] > 0 and record["tokens_read"] < record["tokens_seen"] for record in records)
    assert all(record["model_us"] > record["floor_us"] for record in records)
    assert "few-shot: 64 requests, 6,400 new tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--cases", "long,wide"], "wide is not among short, "), (["--systems", "fa9"], "fa9 is not among pat, "),
        (["--heads", "3/2"], "must be a multiple"), (["--tokens", "0"], "give 1 or more"),
    ],
)  # fmt: skip
def test_mistakes_are_said(capsys, words, says):
    with pytest.raises(SystemExit):
        bench.main(words)
    assert says in capsys.readouterr().err
