"""What the benchmark's CUDA graphs need of the host, without a GPU."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import decode_timing


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
