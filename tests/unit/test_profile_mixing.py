"""The profile of mixed batches without a GPU: its batches, ncu's CSV by marks, a script in ncu's place, its tables."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import decode_systems
import profile_mixing as mixing
import torch
from decode_cases import Heads, tree_case

SMALL = dict(
    requests=[12], groups=["1", "stranger", "3"], orders=list(mixing.ORDERS), prefix=40, tail=5, heads=Heads(4, 2),
    seed=3, systems="one,two", rounds=2, runs=2, json=None,
)  # fmt: skip
HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)
MARK = "at::cuda::<unnamed>::spin_kernel(long)"


def options(**changes):
    return argparse.Namespace(**{**SMALL, **changes})


def rows_of(case):
    """Slots of each row, in the batch's order, and the rows' groups."""
    return [tuple(row) for row in case.page_table.tolist()], case.forest.request_node.tolist()


def launch(number, kernel, us=1.0, dram=0.0, rate=10.0, hits=50.0, sectors="0"):
    """ncu's rows of a kernel with its counters, in base units."""
    found = zip(mixing.METRICS, ("ns", "byte", "sector", "%", "%"), (us * 1e3, dram, sectors, rate, hits), strict=True)
    shown = [(metric, unit, f"{value:,.2f}" if isinstance(value, float) else value) for metric, unit, value in found]
    start = f'"{number}","7","python3.12","127.0.0.1","{kernel}","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0"'
    return [f'{start},"Command line profiler metrics","{m}","{unit}","{value}"' for m, unit, value in shown]


def log(*kernels):
    """What ncu writes into its log: its own lines, then the CSV. Mark for None."""
    rows = ["==PROF== Connected to process 7 (/usr/bin/python3.12)", HEADER]
    for number, kernel in enumerate(kernels):
        rows += launch(number, MARK) if kernel is None else launch(number, **kernel)
    return "\n".join([*rows, "==PROF== Disconnected from process 7", ""])


FORWARD, COMBINE = "void flash::forward<cutlass::half_t, (int)128>(Params<T1>)", "void flash::combine(Params)"


def content(*batches):
    """A finished run: (batch, KV bytes, us and DRAM bytes of two systems)."""
    records = [
        {
            **mixing.Batch(*batch)._asdict(),
            "kv_bytes": kv,
            "systems": {
                name: {"warm_us": us, "counters": {"dram_read_bytes": dram, "dram_pct": 30.2, "l2_hit_pct": 41.4}}
                for name, (us, dram) in (("fa3", fa3), ("feather", feather))
            },
        }
        for batch, kv, fa3, feather in batches
    ]
    return {"machine": {"runs": 2}, "records": records}


FINISHED = content(
    ((500, "1", "prefix"), 100_000_000, (1000.0, 2e8), (100.0, 1e8)),
    ((500, "stranger", "arrival"), 120_000_000, (1010.0, 2.2e8), (110.0, 1.2e8)),
    ((500, "20", "prefix"), 250_000_000, (1050.0, 5e8), (150.0, 2.5e8)),
    ((500, "20", "interleaved"), 250_000_000, (1575.0, 4e9), (150.0, 2.5e8)),
    ((500, "20", "arrival"), 250_000_000, (1470.0, 3e9), (153.0, 2.5e8)),
)


def test_groups_are_dealt_evenly_or_leave_one_stranger():
    assert mixing.group_sizes(128, "5") == [25, 26, 25, 26, 26]
    assert mixing.group_sizes(500, "20") == [25] * 20
    assert mixing.group_sizes(500, "stranger") == [499, 1]
    assert mixing.batches([128], ["1", "stranger", "5"], mixing.ORDERS) == [
        (128, "1", "prefix"), (128, "stranger", "arrival"), (128, "5", "prefix"), (128, "5", "interleaved"),
        (128, "5", "arrival"),
    ]  # fmt: skip


def test_a_group_is_the_tree_of_the_decode_benchmark():
    mine, tree = mixing.grouped_case([64, 64], 512, 120, Heads(32, 8)), tree_case("2,128_512,120", Heads(32, 8))
    assert mine.name == tree.name and np.array_equal(mine.table, tree.table)
    assert np.array_equal(mine.page_table, tree.page_table) and mine.kv_bytes == tree.kv_bytes


@pytest.mark.parametrize("groups", ["1", "stranger", "3", "5"])
def test_an_order_moves_rows_and_nothing_else(groups):
    sizes = mixing.group_sizes(12, groups)
    prefix = mixing.grouped_case(sizes, 40, 5, Heads(4, 2))
    slots, group = rows_of(prefix)
    assert group == sorted(group)
    for order in mixing.ORDERS:
        rows = mixing.row_order(prefix.forest.request_node, order, seed=3)
        case = mixing.reordered(prefix, rows)
        assert sorted(rows.tolist()) == list(range(12))
        assert rows_of(case) == ([slots[row] for row in rows], [group[row] for row in rows])
        assert np.array_equal(case.paged.indices.reshape(12, -1), case.page_table)
        assert case.kv_bytes == prefix.kv_bytes == (40 * len(sizes) + 12 * 5) * 2 * 2 * 128 * 2
        assert case.n_slots == prefix.n_slots and case.table is prefix.table
        assert len({row[:40] for row in rows_of(case)[0]}) == len(sizes)


def test_the_three_orders():
    group = np.repeat([0, 1, 2], [3, 3, 2])
    assert mixing.row_order(group, "prefix", 0).tolist() == list(range(8))
    assert group[mixing.row_order(group, "interleaved", 0)].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    arrival = mixing.row_order(group, "arrival", 1)
    assert arrival.tolist() == mixing.row_order(group, "arrival", 1).tolist() != list(range(8))
    assert arrival.tolist() != mixing.row_order(group, "arrival", 2).tolist()


def test_a_systems_reference_sees_the_moved_rows():
    """What every output is compared with belongs to the request that stands in the row."""
    (_, prefix), (_, moved) = mixing.cases(options(groups=["3"], orders=["prefix", "arrival"]))
    rows = mixing.row_order(prefix.forest.request_node, "arrival", SMALL["seed"])
    inputs = decode_systems.Pools(decode_systems.Pools.elements(prefix), torch.float32, device="cpu").inputs(prefix)
    shuffled = inputs._replace(
        case=moved, q=inputs.q[rows], table=torch.from_numpy(moved.table), seq_lens=inputs.seq_lens[rows]
    )
    expected = decode_systems.reference(inputs, rows.tolist())
    assert torch.allclose(decode_systems.reference(shuffled, list(range(12))), expected, atol=1e-5)


def test_kernels_belong_to_the_mark_before_them():
    kernels = ({"kernel": FORWARD, "us": 90.0, "dram": 4e8}, {"kernel": COMBINE, "us": 10.0, "sectors": "n/a"})
    found = mixing.segments(log({"kernel": "before any mark"}, None, *kernels, None, None, kernels[0]))
    assert [len(segment) for segment in found] == [2, 0, 1]
    assert found[0][0]["kernel"] == FORWARD and found[0][0]["dram__bytes_read.sum"] == 4e8
    assert found[0][0][mixing.SECONDS] == pytest.approx(90e-6)
    assert mixing.SECTORS not in found[0][1]
    with pytest.raises(mixing.NoCounters, match="no CSV"):
        mixing.segments("==ERROR== nothing")


def test_counters_of_a_call_are_sums_and_rates_by_time():
    (segment,) = mixing.segments(
        log(
            None,
            *2 * [
                {"kernel": FORWARD, "us": 90.0, "dram": 4e8, "rate": 50.0, "hits": 40.0, "sectors": "1,000,000"},
                {"kernel": COMBINE, "us": 10.0, "dram": 1e6, "rate": 10.0, "hits": 90.0, "sectors": "500"},
            ],
        )
    )  # fmt: skip
    counters = mixing.per_call(segment, runs=2)
    assert counters == {
        "kernels": {"forward<cutlass::half_t, (int)128>": 1.0, "combine": 1.0},
        "us": 100.0, "dram_read_bytes": 4.01e8, "sm_read_bytes": 1_000_500 * 32, "dram_pct": 46.0, "l2_hit_pct": 45.0,
    }  # fmt: skip
    del segment[0][mixing.SECTORS]
    assert "sm_read_bytes" not in mixing.per_call(segment, runs=2)


def test_counters_are_attached_in_the_order_of_the_run():
    run = content(((12, "1", "prefix"), 1000, (10.0, 0), (5.0, 0)), ((12, "3", "prefix"), 2000, (20.0, 0), (6.0, 0)))
    for record in run["records"]:
        for result in record["systems"].values():
            del result["counters"]
    run["records"][1]["systems"]["fa3"] = {"error": "does not import"}
    calls = [[{"kernel": FORWARD, "dram": dram}] * 2 for dram in (1e6, 2e6, 4e6)]
    mixing.attach(run, log(None, *calls[0], None, *calls[1], None, None, *calls[2]))
    found = [record["systems"][name].get("counters", {}) for record in run["records"] for name in ("fa3", "feather")]
    assert [one.get("dram_read_bytes") for one in found] == [1e6, 2e6, None, 4e6]


def test_marks_that_do_not_fit_are_said():
    run = json.loads(json.dumps(FINISHED))
    for record in run["records"]:
        for result in record["systems"].values():
            del result["counters"]
    call = {"kernel": FORWARD, "dram": 1e6}
    with pytest.raises(mixing.NoCounters, match="3 of 10 marks: the counted run ended early"):
        mixing.attach(run, log(None, call, call, None, call, call, None, call))
    counted = [result for record in run["records"] for result in record["systems"].values() if "counters" in result]
    assert len(counted) == 2  # the last one may have been cut short
    with pytest.raises(mixing.NoCounters, match="11 marks and this run has 10 cells"):
        mixing.attach(run, log(*[None] * 11))


def test_the_findings():
    fa3, feather = mixing.findings(FINISHED)
    assert fa3 == (
        "fa3, 500 requests: 20 groups in prefix order take 1.05x the time and 2.50x the DRAM bytes of one group "
        "(unique KV: 2.50x); interleaved order 1.50x the time and 8.00x the DRAM bytes of that; arrival order 1.40x "
        "the time and 6.00x the DRAM bytes of that; one stranger among one group 1.01x the time and 1.10x the DRAM "
        "bytes of the group alone."
    )
    assert feather.startswith("feather, 500 requests: 20 groups in prefix order take 1.50x the time and 2.50x the")
    assert mixing.findings(content(((12, "1", "prefix"), 1, (1.0, 1), (1.0, 1)))) == []
