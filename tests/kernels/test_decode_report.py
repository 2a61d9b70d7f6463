"""The decode benchmark without a GPU: its command line, its order of cases, and its report on given times."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_decode_kernel as bench
import decode_report as report
import decode_systems
import torch
from decode_cases import Heads, tree_case
from decode_systems import ABLATIONS, PEERS, Inputs, Pools, choose_systems, reference

from feather_kernels.device import Device


def record(tree=1, page_size=1, heads="32/8", floor=10.0, **times):
    systems = {
        name.replace("_", "-"): {"error": value}
        if isinstance(value, str)
        else {"warm_us": value, "bytes_moved": 3_000_000}
        for name, value in times.items()
    }
    return {"tree": tree, "page_size": page_size, "heads": heads, "floor_us": floor, "systems": systems}


RECORDS = [
    record(1, fa3=60.0, flashinfer=40.0, feather=20.0, feather_naive=30.0),
    record(2, fa3=10.0, flashinfer="out of GPU memory", feather=80.0, feather_naive=30.0),
    record(1, heads="64/8", fa3=50.0, flashinfer=40.0, feather=10.0, feather_naive=30.0),
]


def test_geometric_means_a_column_for_heads():
    header, *lines = report.means(RECORDS).splitlines()
    assert header.split()[-4:] == ["p1", "32/8", "p1", "64/8"]
    cells = {line.split()[0]: line.split()[1:] for line in lines}
    assert cells["feather"] == ["4.00", "1.00"]
    assert cells["fa3"] == [f"{math.sqrt(6):.2f}", "5.00"]
    assert cells["flashinfer"] == ["4.00", "(1)", "4.00"]


def test_where_a_peer_is_ahead():
    text = report.behind(RECORDS)
    assert "ahead in 1 of 3 rows" in text and "2  32/8 p1: 80.0 us, fa3 10.0 (8.00)" in text
    assert "feather / fa3: worst 8.00 at  2  32/8 p1" in report.worst(RECORDS)
    assert "feather / flashinfer: worst 0.50" in report.worst(RECORDS)
    assert "flashinfer: out of GPU memory (1 cases" in report.errors(RECORDS)


def test_the_default_pass_is_the_80_rows_at_two_page_sizes():
    options = bench.arguments([])
    planned = bench.cases(options)
    assert len(planned) == 2 * 80 and planned[0] == (0, Heads(32, 8), 1)
    chosen = choose_systems(options.systems)
    assert set(chosen) == {*PEERS, "feather", *ABLATIONS}
    assert set(bench.systems_for(chosen, 1, options)) == set(chosen)
    assert set(bench.systems_for(chosen, 32, options)) == {*PEERS, "feather"}


def test_a_peer_that_is_not_here_says_why(monkeypatch):
    chosen = choose_systems("sglang")
    assert set(chosen) == {"fa3", "flashinfer", "triton", "trtllm_mha", "hpc_ops", "feather"}
    case = SimpleNamespace(page_size=64, head_dim=128)
    inputs = SimpleNamespace(case=case, q=torch.zeros(1), k=torch.zeros(1))
    for name, module, says in (
        ("hpc_ops", "hpc", "HPC-Ops does not import: "),
        ("trtllm_mha", "flashinfer.decode", "TensorRT-LLM's decode of FlashInfer does not import: "),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        captured, result = bench.prepare(name, chosen[name], inputs, (None, []), 0.0)
        assert captured is None and result["error"].startswith(says)
        parts = {"attention_decode_bf16": None, "trtllm_batch_decode_with_kv_cache": None}
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**parts))
        monkeypatch.setattr(case, "page_size", 1)
        assert "takes pages of" in bench.prepare(name, chosen[name], inputs, (None, []), 0.0)[1]["error"]


@pytest.mark.parametrize(
    ("capability", "head_dim", "tile"),
    [((9, 0), 64, (128, 64)), ((9, 0), 128, (128, 64)), ((9, 0), 256, (64, 64)), ((8, 0), 128, (64, 32))],
)
def test_the_fixed_tile_is_the_largest_that_is_built(capability, head_dim, tile, monkeypatch):
    options = {}
    gpu = Device(f"a GPU of {capability}", 10 * capability[0] + capability[1], 100, 233472, 232448)
    monkeypatch.setattr(Device, "of", lambda device: gpu)
    monkeypatch.setattr(decode_systems, "feather", lambda **given: lambda inputs: options.update(given))
    case = SimpleNamespace(head_dim=head_dim)
    decode_systems.feather_fixed(SimpleNamespace(q=torch.zeros(1), case=case))
    assert options == {"tiles": (tile,)}


@pytest.mark.parametrize("page_size", [1, 32])
def test_pools_hold_the_case_and_the_reference_attends_to_it(page_size):
    import torch

    case = tree_case("1,2,8_64,32,32", Heads(4, 2), page_size, head_dim=16)
    pools = Pools(Pools.elements(case), torch.float32, device="cpu")
    inputs = pools.inputs(case)
    assert isinstance(inputs, Inputs) and inputs.paged_kv[0].shape == (case.n_pages, page_size, 2, 16)
    out = reference(inputs, [3, 0])
    positions = torch.arange(int(case.forest.seq_len[3]))
    slots = inputs.page_table[3][positions // page_size].long() * page_size + positions % page_size
    keys, values = inputs.k[slots].repeat_interleave(2, 1), inputs.v[slots].repeat_interleave(2, 1)
    scores = torch.einsum("hd,lhd->hl", inputs.q[3], keys) / 4
    expected = torch.einsum("hl,lhd->hd", scores.softmax(-1), values)
    assert torch.allclose(out[0], expected, atol=1e-5)


def test_counters_of_ncu_as_a_table(capsys):
    import profile_decode_kernel as profile

    head = '"ID","Process ID","Kernel Name","Grid Size","Block Size","Metric Name","Metric Unit","Metric Value"'
    name = "void feather::forward<__half, (int)128>(feather::Params<T1>)"
    rows = [
        f'"{number}","9","{name}","(132, 1, 1)","(384, 1, 1)","{metric}","{unit}","{value}"'
        for number in range(2)
        for metric, unit, value in (
            ("gpu__time_duration.sum", "usecond", 90.0 + number),
            ("dram__bytes_read.sum", "Mbyte", "1,033.5"),
            ("lts__t_sector_hit_rate.pct", "%", 41.4),
            ("launch__registers_per_thread", "register/thread", 168),
        )
    ]
    table = profile.parse("\n".join(["==PROF== Connected to process", head, *rows]))
    columns, line = table.splitlines()
    assert "DRAM read MB" in columns and "tensor %" in columns
    assert line.split()[-12:] == ["132", "384", "90.5", "1033.5", "-", "-", "41", "-", "-", "-", "168", "-"]
    assert line.startswith("forward<__half, (int)128>") and " 2 " in line
    assert profile.main(["--metrics"]) == 0 and capsys.readouterr().out.count(",") == len(profile.METRICS) - 1
    with pytest.raises(ValueError, match="no CSV of ncu"):
        profile.parse("==ERROR== nothing")
