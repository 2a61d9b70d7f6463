"""The check of a GPU, as far as it goes without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from feather_kernels import self_test
from feather_kernels.build import BuildError
from feather_kernels.device import Device
from feather_kernels.self_test import Variant, Verdict, variants

LIMITED = Device("NVIDIA H200", 90, 132, 102400, 101376)


def test_each_feature_is_tried_with_each_type_and_head_dimension():
    some, every = variants(False), variants(True)
    assert len(some) == 2 * 3 * 4 and len(every) == 2 * 3 * 8 and set(some) < set(every)
    assert len({one.configuration(LIMITED).name for one in every}) == len(every)


def test_without_a_gpu_it_is_one_line(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert self_test.main(["--out", str(tmp_path / "gpu.json")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not (tmp_path / "gpu.json").exists()


def test_the_file_has_every_verdict_and_what_fails_does_not_end_it(tmp_path: Path, monkeypatch, capsys):
    """On a GPU that is made up, where one kernel cannot be built and one computes something else."""

    def compare(variant: Variant, path: str) -> Verdict:
        if variant.sinks:
            return Verdict(variant, failure="3 away")
        return Verdict(variant, "portable", 2, 1e-3, 2e-2)

    def library(configuration):
        if configuration.fp8_kv:
            raise BuildError("no nvcc")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Gpu", (), {"total_memory": 1 << 30}))
    monkeypatch.setattr(Device, "of", lambda: LIMITED)
    monkeypatch.setattr(self_test, "kernel_library", library)
    monkeypatch.setattr(self_test, "compare", compare)
    monkeypatch.setattr(self_test, "timed", lambda variant, path: 5.0)
    out = tmp_path / "new" / "gpu.json"
    assert self_test.main(["--out", str(out)]) == 1
    content = json.loads(out.read_text())
    assert (content["asked"], content["right"]) == (24, 12) and len(content["variants"]) == 24
    failures = {one["failure"] for one in content["variants"]}
    assert failures == {"", "3 away", "no nvcc"} and content["device"]["shared_per_sm"] == 102400


def test_a_lost_device_ends_it_with_what_there_is(monkeypatch):
    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    monkeypatch.setattr(Device, "of", lambda: LIMITED)
    monkeypatch.setattr(self_test, "kernel_library", lambda configuration: None)
    monkeypatch.setattr(self_test, "compare", lost)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    (verdict,) = self_test.check_all(variants(False), "auto", 1)
    assert verdict.failure == "CUDA error: an illegal memory access"
