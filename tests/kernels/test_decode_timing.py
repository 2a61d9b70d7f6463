"""The host side of the benchmark's CUDA graphs, without a GPU."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_prefill
import bench_verify
import decode_timing
from decode_cases import Heads


class System:
    """Stands for a wrapper whose buffers the graphs read and write."""

    def call(self) -> str:
        return "out"


@pytest.fixture
def no_device(monkeypatch):
    """CUDA graphs and events that do nothing; a single run takes 100 us."""
    graph = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(decode_timing.Captured, "_capture", lambda self, call, runs: (graph, call()))
    event = SimpleNamespace(record=lambda: None)
    monkeypatch.setattr(decode_timing, "events", lambda: (event, event))
    monkeypatch.setattr(decode_timing, "elapsed_us", lambda pair: 300.0)
    for name in ("synchronize", "_sleep", "graph_pool_handle"):
        monkeypatch.setattr(decode_timing.torch.cuda, name, lambda *arguments: None)


def test_a_captured_system_outlives_its_maker(no_device):
    system = System()
    alive = weakref.ref(system)
    captured = decode_timing.Captured(system.call)
    del system
    gc.collect()
    assert alive() is not None, "the graphs would run on freed memory"
    assert captured.out == "out"
    del captured
    gc.collect()
    assert alive() is None


def test_a_replay_lasts_about_a_millisecond(no_device):
    assert decode_timing.Captured(System().call).runs == 10


@pytest.fixture
def clock(monkeypatch):
    """Calls that run as they are, and take 5 us; the names and rounds of what was timed."""
    timed = []

    def times(systems, rounds, flush):
        timed.append((list(systems), rounds, flush))
        return {name: decode_timing.Times([5.0] * rounds) for name in systems}

    monkeypatch.setattr(decode_timing, "Captured", lambda call: SimpleNamespace(poisoned_run=call))
    monkeypatch.setattr(decode_timing, "measure_in_turn", times)
    return timed


def test_only_what_is_right_is_timed(clock):
    exact, rows = torch.ones(2, 4, 8), [0, 3]
    out = torch.ones(5, 4 * 8)
    slip, nan, unwritten = out.clone(), out.clone(), out.clone()
    slip[3] += 0.1
    nan[0, 0] = float("nan")
    unwritten[2, 5] = float("nan")  # where nothing is compared

    def absent():
        raise ImportError("no such\n  library " + "x" * 300)

    made = {"right": out, "slip": slip, "nan": nan, "unwritten": unwritten}
    systems = {name: lambda out=out: lambda: out for name, out in made.items()} | {"absent": absent}
    found = decode_timing.check_and_measure(systems, exact, rows, 0.02, 3, None)
    assert clock == [(["right"], 3, None)]
    assert found["right"] == {"relative_error": 0.0, "warm_us": 5.0, "warm_min_us": 5.0}
    assert found["slip"]["error"] == "wrong: relative error 7.1e-02, at most 0.02 is right"
    assert found["nan"]["error"].startswith("wrong: ") and found["unwritten"]["error"].startswith("wrong: ")
    why = found["absent"]["error"]
    assert why.startswith("ImportError: no such library x") and len(why) == 200
    loose = decode_timing.check_and_measure({"slip": systems["slip"]}, exact, rows, 0.08, 1, None)
    assert loose["slip"]["warm_us"] == 5.0


@pytest.mark.parametrize("bench", [bench_prefill, bench_verify])
def test_a_benchmark_compares_the_rows_that_its_reference_has(clock, monkeypatch, bench):
    """Of unequal values, so that a row taken for another one would be wrong."""
    if bench is bench_prefill:
        batch, flush = bench.batch_of([3, 2], 40, np.array([5, 1, 9, 2, 30]), Heads(8, 2), head_dim=16), ["a flush"]
        rows, every = batch.rows, range(batch.rows)
    else:
        batch, flush = bench.batch_of(12, 3, 40, 9, 4, Heads(8, 2), head_dim=16), []
        rows, every = 48, range(12)
    draw = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, batch.slots, 2, 16, generator=draw)
    given = bench.Tensors(torch.randn(rows, 8, 16, generator=draw), k, v, torch.from_numpy(batch.table))
    monkeypatch.setattr(bench, "tensors", lambda batch, dtype: given)

    def right(batch, given):
        return lambda: bench.reference(batch, given, every)

    def turned(batch, given):
        return lambda: bench.reference(batch, given, every).roll(1, 0)

    monkeypatch.setattr(bench, "SYSTEMS", {"right": right, "turned": turned, "idle": None})
    found = bench.measured(batch, ["turned", "right"], 2, *flush)
    assert clock == [(["right"], 2, flush[0] if flush else None)] and list(found) == ["turned", "right"]
    assert found["right"]["relative_error"] < 1e-6 and "warm_us" not in found["turned"]
