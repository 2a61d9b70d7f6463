"""The wrapper's host side, without a GPU: which tensors it takes, and where its copies are waited for."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from plan_checks import HEADS

import feather_kernels.config as config_module
import feather_kernels.wrapper as wrapper_module
from feather_kernels.config import FP8, KernelConfig
from feather_kernels.device import Device, NRule
from feather_kernels.errors import PlanError
from feather_kernels.forest import Forest
from feather_kernels.inputs import check_kv_scales, check_scores
from feather_kernels.tiles import TILES
from feather_kernels.wrapper import PackedDecodeWrapper


class HostConfig(KernelConfig):
    """The configuration of a layer on the CPU that asks for libraries of compute capability 9.0."""

    def __post_init__(self):
        device = torch.device("cpu")
        self._settle(device=device, kv_dtype=self.kv_dtype or self.dtype, path="hopper", tiles=TILES["hopper"])


@pytest.fixture
def runs(monkeypatch):
    """The libraries that wrappers on the host load, and what those run with, instead of running; ``recorded`` has the
    streams that copies of plans were recorded on."""
    seen = SimpleNamespace(loaded=[], ran=[], recorded=[], capturing=False)

    def load_kernel(dtype, head_dim, capability, soft_cap, tiles, sinks, fp8_kv, causal):
        name = soft_cap, sinks, fp8_kv
        seen.loaded.append(name)
        return SimpleNamespace(forward=lambda *given: seen.ran.append((name, *given)), merge=lambda *_: None)

    monkeypatch.setattr(wrapper_module, "KernelConfig", HostConfig)
    monkeypatch.setattr(config_module, "load_kernel", load_kernel)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: seen.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"the stream of {device}")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return seen


@pytest.fixture
def made(runs):
    """Makes wrappers with a plan of three requests."""

    def make(**options):
        wrapper = PackedDecodeWrapper(*HEADS.values(), max_requests=8, sm_scale=0.125, debug=True, **options)
        copied = SimpleNamespace(synchronize=lambda: None, record=runs.recorded.append)
        wrapper.scratch._copied = [copied, copied]
        wrapper.plan(alone([1, 1, 1], [0, 1, 2]), torch.arange(3))
        return wrapper

    return make


def alone(seq_len, row_offset):
    """Requests that share nothing."""
    return Forest([], [], np.full(len(seq_len), -1), seq_len, row_offset)


def tensor(heads, first=0):
    """Three rows that begin `first` entries behind a place for any copy."""
    size = 3 * heads * 64
    return torch.zeros(size + first, dtype=torch.float16)[first:].view(3, heads, 64)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out"])
def test_a_tensor_that_begins_between_16_bytes_is_refused(made, name):
    wrapper = made()
    heads = {"q": 8, "k_cache": 2, "v_cache": 2, "out": 8}
    for first in (0, 8):
        wrapper._checked(*(tensor(count, first) for count in heads.values()))
    tensors = {key: tensor(count, 4 if key == name else 0) for key, count in heads.items()}
    with pytest.raises(PlanError, match=f"{name} has strides .* 16-byte aligned"):
        wrapper._checked(*tensors.values())


def test_rows_of_requests_without_tokens_may_lie_behind_the_table(made):
    wrapper = made()
    table = torch.arange(3)
    for forest in (alone([3, 0], [0, 3]), alone([0, 0], [3, 3]), alone([], [])):
        assert wrapper.plan(forest, table).n_requests == forest.n_requests
    with pytest.raises(PlanError, match="request 1 has a row of 1 entries from entry 3 on, in a table of 3"):
        wrapper.plan(alone([3, 1], [0, 3]), table)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_row_must_end_within_the_table(made, page_size):
    wrapper = made(page_size=page_size)
    table = torch.zeros(10, dtype=torch.int32)
    assert wrapper.plan(alone([4 * page_size, page_size], [6, 9]), table).n_requests == 2
    with pytest.raises(PlanError, match="request 0 has a row of 5 entries from entry 6 on, in a table of 10"):
        wrapper.plan(alone([4 * page_size + 1, page_size], [6, 9]), table)
    with pytest.raises(PlanError, match="request 1 has a row of 1 entries from entry 9223372036854775807 on"):
        wrapper.plan(alone([1, 1], [0, 2**63 - 1]), table)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize(("slots", "stride"), [(1, 2**30), (2**31 + 1, 0)], ids=["2 GB from slot to slot", "slots"])
def test_what_the_kernels_32_bits_do_not_hold_is_refused(made, name, slots, stride):
    wrapper = made()
    caches = {"k_cache": tensor(2), "v_cache": tensor(2)}
    wrapper._checked(tensor(8), **{key[0]: cache for key, cache in caches.items()}, out=None)
    caches[name] = torch.zeros(128, dtype=torch.float16).as_strided((slots, 2, 64), (stride, 64, 1))
    with pytest.raises(PlanError, match=f"{name} has {slots} slots, {2 * stride} bytes from one to the next"):
        wrapper._checked(tensor(8), **{key[0]: cache for key, cache in caches.items()}, out=None)


@pytest.mark.parametrize("given", [None, 3, [1, 2], np.zeros(3, np.int32)], ids=["none", "number", "list", "array"])
def test_what_is_no_tensor_or_forest_is_one_line(made, given):
    wrapper = made()
    with pytest.raises(PlanError, match=r"table is .*: give a"):
        wrapper.plan(alone([1], [0]), given)
    with pytest.raises(PlanError, match=r"forest is .*: give a Forest"):
        wrapper.plan(given, torch.arange(3))
    for name in ("q", "k_cache", "v_cache"):
        tensors = {"q": tensor(8), "k_cache": tensor(2), "v_cache": tensor(2), "out": tensor(8), name: given}
        with pytest.raises(PlanError, match=f"{name} is .*: give a tensor"):
            wrapper._checked(*tensors.values())


@pytest.mark.parametrize("scale", ["1", None, float("nan"), float("inf"), 0.0])
def test_scales_are_numbers(scale):
    with pytest.raises(PlanError, match="sm_scale is"):
        check_scores(scale, 0.0)
    with pytest.raises(PlanError, match="k_scale is"):
        check_kv_scales(FP8, scale, 1.0)
    if scale != 0:
        with pytest.raises(PlanError, match="logit_soft_cap"):
            check_scores(1.0, scale)


def test_a_copy_is_recorded_on_the_wrappers_device(made, runs):
    made()
    assert runs.recorded == ["the stream of cpu"]


def test_layers_of_one_plan_may_have_other_scores_and_sinks(made, runs):
    wrapper = made()
    tensors = tensor(8), tensor(2), tensor(2)
    sinks = torch.zeros(8)
    wrapper.run(*tensors)
    wrapper.run(*tensors, sm_scale=0.5)
    wrapper.run(*tensors, logit_soft_cap=30.0)
    wrapper.run(*tensors, sinks=sinks)
    wrapper.run(*tensors, logit_soft_cap=30.0, sinks=sinks.half())
    given = [(name[:2], *args[12:14], args[14] is not None) for name, *args in runs.ran]
    assert given == [
        ((False, False), 0.125, 0.0, False), ((False, False), 0.5, 0.0, False), ((True, False), 0.125, 30.0, False),
        ((False, True), 0.125, 0.0, True), ((True, True), 0.125, 30.0, True),
    ]  # fmt: skip
    kernels = [(False, False, False), (True, False, False), (False, True, False), (True, True, False)]
    assert runs.loaded == kernels  # each once
    for wrong in ({"sinks": sinks[:4]}, {"sinks": sinks.bfloat16()}, {"sinks": torch.zeros(16)[::2]}):
        with pytest.raises(PlanError, match=r"^sinks is .* give torch.float16 or float32 \[8\] on cpu$"):
            wrapper.run(*tensors, **wrong)
    for wrong in ({"sm_scale": 0.0}, {"logit_soft_cap": -1.0}):
        with pytest.raises(PlanError, match="give a positive scale and no negative cap"):
            wrapper.run(*tensors, **wrong)
    for wrong in ({"k_scale": 0.5}, {"v_scale": 2.0}):
        with pytest.raises(PlanError, match=r"caches in torch.float16 have none$"):
            wrapper.run(*tensors, **wrong)
    assert len(runs.ran) == 5


def test_caches_in_fp8_have_scales_and_kernels_of_their_own(made, runs):
    wrapper = made(kv_dtype=torch.float8_e4m3fn)
    q, *caches = tensor(8), tensor(2), tensor(2)
    with pytest.raises(PlanError, match=r"k_cache is torch.float16 on cpu: the wrapper is for torch.float8_e4m3fn"):
        wrapper.run(q, *caches)
    caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
    for wrong in ({"k_scale": 0.0}, {"v_scale": float("nan")}):
        with pytest.raises(PlanError, match="give finite scales above 0"):
            wrapper.run(q, *caches, **wrong)
    wrapper.run(q, *caches, sm_scale=0.5, logit_soft_cap=30.0, k_scale=0.25, v_scale=3.0)
    wrapper.run(q, *caches, sinks=torch.zeros(8))
    assert runs.loaded == [(False, False, True), (True, False, True), (False, True, True)]
    given = [(name, args[1].dtype, *args[12:14], args[15]) for name, *args in runs.ran]
    assert given == [
        ((True, False, True), torch.uint8, 0.125, 30.0, 3.0), ((False, True, True), torch.uint8, 0.125, 0.0, 1.0)
    ]  # fmt: skip


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn])
def test_a_capture_loads_nothing(made, runs, kv_dtype):
    wrapper = made(kv_dtype=kv_dtype, sinks=True)
    tensors = tensor(8), *(tensor(2).to(kv_dtype) for _ in range(2))
    sinks = torch.zeros(8)
    wrapper.run(*tensors, sinks=sinks)
    runs.capturing = True
    wrapper.run(*tensors, sinks=sinks)  # its kernels are there
    for missing, soft_cap in ((r"False, False", 0.0), (r"True, False", 3.0)):
        with pytest.raises(PlanError, match=rf"captured and its kernels .* not loaded: call load\({missing}\) before$"):
            wrapper.run(*tensors, logit_soft_cap=soft_cap)
    assert runs.loaded == [(False, True, kv_dtype != torch.float16)] and len(runs.ran) == 2


# How it launches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("launch", "queues"), [("persistent", [0b1111]), ("serial", [1, 2, 4, 8])])
def test_queues_are_launched_together_or_one_by_one(made, runs, launch, queues):
    wrapper = made(launch=launch)
    wrapper.run(tensor(8), tensor(2), tensor(2))
    assert [args[-1] for args in runs.ran] == queues
    assert wrapper.planner.options.merge == ("fused" if launch == "persistent" else "kernel")
    with pytest.raises(ValueError, match="merge is 'fused': that needs launch='persistent'"):
        made(launch="serial", merge="fused")
    with pytest.raises(ValueError, match="launch is 'parallel': use one of persistent, streams, serial"):
        made(launch="parallel")


def test_who_names_no_other_launch_reads_none_of_its_code(made, runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "feather_kernels.launches", None)
    made().run(tensor(8), tensor(2), tensor(2))
    assert len(runs.ran) == 1


# Which library a wrapper asks for --------------------------------------------------------------------------------


class Asked(Exception):
    """Raised in place of loading a library: ``args`` are what was asked for."""


@pytest.fixture
def asks(monkeypatch):
    """What a wrapper for 8 / 2 heads asks for on a GPU of this name."""

    def ask(name="NVIDIA H200", capability=(9, 0), head_dim=128, **arguments):
        major, minor = capability
        properties = SimpleNamespace(
            name=name, major=major, minor=minor, multi_processor_count=132, shared_memory_per_multiprocessor=233472,
            shared_memory_per_block_optin=232448, regs_per_multiprocessor=65536,
        )  # fmt: skip
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)

        def load_kernel(*asked, **limits):
            raise Asked(*asked, *limits.values())

        monkeypatch.setattr(config_module, "load_kernel", load_kernel)
        with pytest.raises(Asked) as error:
            PackedDecodeWrapper(8, 2, head_dim, **arguments)
        return error.value.args

    return ask


N_32 = ((8, 16), (16, 16), (64, 32), (128, 32))


def test_by_default_and_for_the_default_tiles_it_is_the_same_library(asks):
    usual = ("float16", 128, 90, False, (), False, False, False)
    assert asks() == asks(tiles=TILES["hopper"]) == asks(tiles=[[64, 64], [128, 64]]) == usual
    assert asks(path="portable") == asks(name="NVIDIA H100 80GB HBM3") == usual
    assert asks(head_dim=96) == ("float16", 96, 90, False, (), False, False, False)  # which says that there is none
    a100 = {"name": "NVIDIA A100", "capability": (8, 0)}
    assert asks(**a100, logit_soft_cap=3.0) == ("float16", 128, 80, True, (), False, False, False)
    assert asks(**a100, kv_dtype=torch.float8_e4m3fn) == ("float16", 128, 80, False, (), False, True, False)
    with pytest.raises(ValueError, match=r"kv_dtype is torch.float8_e5m2: use torch.float16, as queries have, or"):
        asks(kv_dtype=torch.float8_e5m2)


def test_on_a_gpu_that_keeps_to_a_smaller_ones_limits_it_is_that_ones_library(asks, monkeypatch):
    monkeypatch.setenv("FEATHER_KERNELS_LIMITS", "l40s")
    assert asks() == ("float16", 128, 90, False, (), False, False, False, 100)
    assert asks(head_dim=256)[4] == ()  # the tile of 32 rows has another n, which is the usual one there
    with pytest.raises(ValueError, match="path is 'hopper'"):
        asks(path="hopper")
    with pytest.raises(ValueError, match=r"for m = 32 n may be \(16,\)"):
        asks(head_dim=256, tiles=((32, 32), (64, 32)))
    ada = {"name": "NVIDIA L40S", "capability": (8, 9)}
    assert asks(**ada) == ("float16", 128, 89, False, (), False, False, False)
    for blackwell in ((10, 0), (12, 0)):
        assert asks(name="a Blackwell", capability=blackwell)[2] == 10 * blackwell[0]
        with pytest.raises(ValueError, match="path is 'hopper'"):
            asks(name="a Blackwell", capability=blackwell, path="hopper")


def test_who_will_run_with_sinks_asks_for_their_kernels_alone(asks):
    assert asks(sinks=True)[3:6:2] == (False, True)
    assert asks(sinks=True, logit_soft_cap=3.0)[3:6:2] == (True, True)
    assert asks(sinks=True, kv_dtype=torch.float8_e4m3fn)[5:7] == (True, True)


def test_causal_blocks_are_another_library_on_the_hopper_path(asks):
    assert asks(causal_tails=True, grow=False)[-1] is True
    with pytest.raises(ValueError, match="causal_tails is True: that needs the path 'hopper'"):
        asks(causal_tails=True, grow=False, path="portable")


def test_another_n_is_another_library(asks):
    others = (("hopper", 64, 32), ("hopper", 128, 32))
    assert asks(tiles=N_32)[4] == asks(tiles=N_32[::-1])[4] == others
    assert asks(tiles=N_32[2:], merge="kernel")[4] == others
    assert asks(path="portable", tiles=((32, 32), (64, 64)))[4] == (("portable", 64, 64),)


def test_a_gpus_rule_chooses_its_library_on_its_own_path_alone(asks, monkeypatch):
    rule = NRule({8: ((None, 16),), 16: ((None, 16),), 32: ((None, 32),), 64: ((None, 32),), 128: ((None, 32),)})
    known = replace(Device.load("h200"), n_rule={"hopper": rule, "portable": NRule({**rule.pieces, 64: ((None, 64),)})})
    monkeypatch.setattr(Device, "of", lambda device: known)
    assert asks()[4] == (("hopper", 64, 32), ("hopper", 128, 32))
    assert asks(path="portable")[4] == ()
    assert asks(name="NVIDIA A100", capability=(8, 0))[4] == (("portable", 64, 64),)
    assert asks(tiles=TILES["hopper"])[4] == ()  # what is asked for comes first


@pytest.mark.parametrize(
    "tiles, message",
    [
        (((64, 128),), "use the largest one or more of"),
        (((64, 64), (128, 128)), r"for m = 128 n may be \(32, 64\)$"),
    ],
)
def test_tiles_that_are_not_there_are_said(asks, tiles, message):
    with pytest.raises(ValueError, match=message):
        asks(tiles=tiles)
