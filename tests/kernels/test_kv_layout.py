"""benchmarks/bench_kv_layout.py without a GPU: places of pages, copies, when they pay, and errors in one line."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_kv_layout as layout
import decode_systems
import decode_timing
from decode_cases import Heads

HEADS = Heads(4, 2)


@pytest.mark.parametrize("page_size", [1, 16])
def test_both_layouts_are_one_batch_at_other_places_of_a_pool(page_size):
    contiguous, scattered = (
        layout.placed("2,5_64,40", HEADS, page_size, name, pool_tokens=3200) for name in ("contiguous", "scattered")
    )
    used = contiguous.table >= 0
    assert (used == (scattered.table >= 0)).all() and contiguous.n_slots == scattered.n_slots == 3200
    pairs = set(zip(contiguous.table[used].tolist(), scattered.table[used].tolist(), strict=True))
    assert len(pairs) == len({first for first, _ in pairs}) == len({second for _, second in pairs})  # one to one
    assert {first for first, _ in pairs} == set(range(len(pairs)))
    assert max(second for _, second in pairs) > len(pairs)
    small = layout.placed("3_100", HEADS, page_size, "scattered", pool_tokens=1)
    assert small.n_pages == 3 * -(-100 // page_size)


def test_a_copy_puts_the_batchs_pages_next_to_each_other():
    case = layout.placed("1,3_32,16", HEADS, 16, "scattered", pool_tokens=400)
    pages = layout.pages_in_order(case)
    assert len(pages) == len(set(pages.tolist())) == 5 and pages[:2].tolist() == case.table[:2].tolist()
    cache = torch.arange(case.n_slots, dtype=torch.float32)[:, None, None].expand(-1, 2, 8).contiguous()
    copied = layout.gather(cache, 16, torch.from_numpy(pages))().view(-1, 2, 8)[:, 0, 0]
    assert copied.tolist() == [page * 16 + slot for page in pages for slot in range(16)]


@pytest.fixture
def fake_gpu(monkeypatch):
    """Contiguous runs take 100 us, scattered ones 104 warm and 110 flushed, a copy 50."""
    monkeypatch.setattr(
        decode_timing, "Captured", lambda call: SimpleNamespace(poisoned_run=call, runs=1, call=call, single=None)
    )

    def times(systems, rounds, flush):
        for one in systems.values():
            one.call()
        warm = {name: 104.0 if "scattered" in name else 50.0 if name == "copy" else 100.0 for name in systems}
        flushed = {name: 110.0 if us == 104 else us for name, us in warm.items()}
        return {name: decode_timing.Times([warm[name]] * rounds, [flushed[name]] * rounds) for name in systems}

    monkeypatch.setattr(decode_timing, "measure_in_turn", times)


def right(inputs):
    every = list(range(inputs.case.n_requests))
    return decode_systems.Ready(lambda: decode_systems.reference(inputs, every).to(inputs.q.dtype))


def absent(inputs):
    raise decode_systems.Unavailable("it does not import")


def test_a_record_and_its_report(fake_gpu):
    options = SimpleNamespace(
        heads=HEADS, pool_tokens=600, seed=0, dtype="bfloat16", repeats=2, pages=[1, 16], batches=("2,5_64,40",)
    )
    pools = decode_systems.Pools(600 * 2 * layout.HEAD_DIM, torch.bfloat16, device="cpu")
    systems = {"feather": right, "fa3-planned": absent}
    record = layout.measure("2,5_64,40", 1, systems, pools, None, options)
    assert record["kv_bytes"] == (2 * 64 + 5 * 40) * 2 * 2 * 128 * 2
    assert record["runs"]["fa3-planned scattered"] == {"error": "it does not import"}
    assert layout.lost(record, "feather", "warm") == pytest.approx(0.04)
    assert layout.steps_to_pay(record, 50) == pytest.approx(5)
    rates = layout.gathers(pools, options, 4e12)
    assert rates["contiguous"] == 4000 and rates["page 1"] == pytest.approx(2 * 600 * 512 / 100e-6 / 1e9)
    content = {
        "machine": {"copy_bandwidth": record["kv_bytes"] / 10e-6}, "gathers": rates, "records": [record],
        "left_out": ["1,4_32,9 p64: no"],
    }  # fmt: skip
    text = layout.report(content)
    (line,) = (line for line in text.splitlines() if line.startswith("2,5_64,40"))
    assert line.split()[4:] == ["+4.0%", "+10.0%", "-", "-", "50", "20", "5", "2"]
    assert "page 1: scattered pages cost feather +10.0%, at worst +10.0%; a copy at its best pays after 2 steps" in text
    assert text.endswith("left out: 1,4_32,9 p64: no")
    record["runs"]["feather scattered"]["flushed_us"] = 100.1
    assert layout.report(content).count("never") == 3


def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch):
    for words, message in (
        (["--heads", "3"], "give query/KV heads"), (["--pages", "3"], "give powers of two"),
        (["--pool-tokens", "0"], "--pool-tokens 0: give at least 1"),
        (["--repeats", "0"], "--repeats 0: give at least 1"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            layout.main(words)
        assert message in capsys.readouterr().err
    monkeypatch.setattr(decode_systems, "systems_on_gpu", lambda text: {})
    monkeypatch.setattr(decode_timing, "copy_bandwidth", lambda: 1.0)
    with pytest.raises(SystemExit, match="--batches 1,x: give nodes and tokens"):
        layout.main(["--batches", "1,x"])
    with pytest.raises(SystemExit, match="--batches: no batch"):
        layout.main(["--batches", "1,4_32,9", "--pages", "64"])
    (tmp_path / "other.json").write_text(json.dumps({"records": []}))
    with pytest.raises(SystemExit, match="not written by this benchmark"):
        layout.main(["--from", str(tmp_path / "other.json")])


def test_scattered_places_are_drawn_by_the_seed():
    tables = [layout.placed("3_50", HEADS, 1, "scattered", 5000, seed).table for seed in (0, 0, 1)]
    assert np.array_equal(tables[0], tables[1]) and not np.array_equal(tables[0], tables[2])
