"""The wrapper's host side, without a GPU: which tensors it takes, and where its copies are waited for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from plan_checks import HEADS

from feather_kernels.errors import PlanError
from feather_kernels.forest import Forest
from feather_kernels.plan import Planner
from feather_kernels.wrapper import PackedDecodeWrapper


class HostWrapper(PackedDecodeWrapper):
    """Plans into the host's memory; ``recorded`` has the streams that its copies were recorded on."""

    def __init__(self):
        self.device, self.dtype, self.page_size, self.debug = torch.device("cpu"), torch.float16, 1, True
        self.num_qo_heads, self.num_kv_heads, self.head_dim = HEADS.values()
        self.planner, self.recorded = Planner(**HEADS, max_requests=8), []
        self._plan = torch.zeros(len(self.planner.buffer), dtype=torch.int32)
        self._staging = [torch.zeros_like(self._plan) for _ in range(2)]
        self._copied = [SimpleNamespace(synchronize=lambda: None, record=self.recorded.append)] * 2
        self._turn, self._seq_lens = 0, torch.zeros(8, dtype=torch.int32)


@pytest.fixture
def wrapper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"the stream of {device}")
    return HostWrapper()


def alone(seq_len, row_offset):
    """Requests that share nothing."""
    return Forest([], [], np.full(len(seq_len), -1), seq_len, row_offset)


def tensor(heads, first=0):
    """Three rows that begin `first` entries behind a place for any copy."""
    size = 3 * heads * 64
    return torch.zeros(size + first, dtype=torch.float16)[first:].view(3, heads, 64)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out"])
def test_a_tensor_that_begins_between_16_bytes_is_refused(wrapper, name):
    wrapper.plan(alone([1, 1, 1], [0, 1, 2]), torch.arange(3))
    heads = {"q": 8, "k_cache": 2, "v_cache": 2, "out": 8}
    for first in (0, 8):
        wrapper._checked(*(tensor(count, first) for count in heads.values()))
    tensors = {key: tensor(count, 4 if key == name else 0) for key, count in heads.items()}
    with pytest.raises(PlanError, match=f"{name} has strides .* 16-byte aligned"):
        wrapper._checked(*tensors.values())


def test_rows_of_requests_without_tokens_may_lie_behind_the_table(wrapper):
    table = torch.arange(3)
    for forest in (alone([3, 0], [0, 3]), alone([0, 0], [3, 3]), alone([], [])):
        assert wrapper.plan(forest, table).n_requests == forest.n_requests
    with pytest.raises(PlanError, match="a row starts at entry 3 of a table of 3"):
        wrapper.plan(alone([3, 1], [0, 3]), table)


def test_a_copy_is_recorded_on_the_wrappers_device(wrapper):
    wrapper.plan(alone([1], [0]), torch.arange(1))
    assert wrapper.recorded == ["the stream of cpu"]
