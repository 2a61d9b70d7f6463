"""The profile of mixed batches without a GPU: its batches, ncu's CSV by marks, a script in ncu's place, its tables."""

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import decode_systems
import decode_timing
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


def test_ids_order_the_launches_and_other_lines_are_skipped():
    text = log(None, *[{"kernel": f"kernel{number}"} for number in range(11)])
    lines = text.splitlines()
    shuffled = [*lines[:2], "a line of the program", *reversed(lines[2:])]
    (segment,) = mixing.segments("\n".join(shuffled))
    assert [one["kernel"] for one in segment] == [f"kernel{number}" for number in range(11)]


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


def test_the_table():
    lines = mixing.table(FINISHED).splitlines()
    assert len(lines) == 2 + 5 and len({line.count("|") for line in lines}) == 1
    assert lines[0].startswith("| rows | groups | order | unique KV GB | fa3 us | fa3 DRAM GB | fa3 L2 | feather us |")
    assert "| 500 | 20 | arrival | 0.250 | 1,470 (1.47x) | 3.000 (12.00x, 30%) | 41% | 153 (1.53x) |" in lines[6]


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


def test_a_finished_run_is_reported_without_a_gpu(tmp_path, capsys):
    source, counters = tmp_path / "mixing.json", tmp_path / "mixing.csv"
    run = json.loads(json.dumps(FINISHED)) | {"counters_error": "ncu was busy"}
    for record in run["records"]:
        record["systems"] = {"fa3": {"warm_us": 10.0}, "feather": {"error": "out of GPU memory"}}
    source.write_text(json.dumps(run))
    assert mixing.main(["--from", str(source)]) == 0
    text = capsys.readouterr().out
    for part in ("counters are missing: ncu was busy", "feather: out of GPU memory", "| 10 (1.00x) | - |"):
        assert part in text
    call = {"kernel": FORWARD, "dram": 3e8, "sectors": "100,000,000"}
    counters.write_text(log(*[None, call, call, None] * 5))
    assert mixing.main(["--from", str(source), "--csv", str(counters)]) == 0
    assert "| 10 (1.00x) | 0.300 (1.20x, 10%) | 50%, 3.20 GB |" in capsys.readouterr().out
    assert "counters_error" not in json.loads(source.read_text())
    assert json.loads(source.read_text())["records"][0]["systems"]["fa3"]["counters"]["dram_read_bytes"] == 3e8


@pytest.mark.parametrize(
    "argv", [["--groups", "0"], ["--groups", "200"], ["--orders", "none"], ["--requests", "1"], ["--heads", "7"]]
)
def test_bad_arguments_are_one_clear_line(argv, capsys):
    with pytest.raises(SystemExit):
        mixing.arguments(argv)
    assert argv[1] in capsys.readouterr().err.splitlines()[-1]


def test_no_gpu_and_no_such_system_are_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        mixing.main([])
    with pytest.raises(SystemExit, match="--systems: system 'fa4'"):
        mixing.main(["--systems", "fa4"])


@pytest.fixture
def fake_ncu(tmp_path):
    """A program that does as ncu does: its arguments into a file, its log where it is told."""

    def make(body):
        program = tmp_path / "ncu"
        program.write_text(
            f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\narguments = sys.argv[1:]\n"
            f"Path({str(tmp_path / 'seen')!r}).open('a').write(' '.join(arguments) + '\\n')\n"
            f"log = Path(arguments[arguments.index('--log-file') + 1])\n{body}\n"
        )
        os.chmod(program, 0o755)
        return str(program)

    return make


def test_ncu_runs_this_script_again(fake_ncu, tmp_path):
    ncu = fake_ncu(f"log.write_text({log(None)!r})")
    assert mixing.segments(mixing.run_ncu(ncu, ["--runs", "3"], tmp_path / "log.csv")) == [[]]
    (seen,) = (tmp_path / "seen").read_text().splitlines()
    for part in ("--profile-from-start off", "--cache-control none", ",".join(mixing.METRICS), "--runs 3 --counted"):
        assert part in seen
    assert str(Path(mixing.__file__).resolve()) in seen


def test_a_counter_that_this_ncu_lacks_is_left_out(fake_ncu, tmp_path):
    lacking = f"if any({mixing.SECTORS!r} in one for one in arguments):"
    ncu = fake_ncu(
        f"{lacking}\n    log.write_text('==ERROR== Failed to find metric {mixing.SECTORS}')\n    sys.exit(1)\n"
        f"log.write_text({log(None)!r})"
    )
    assert '"ID"' in mixing.run_ncu(ncu, [], tmp_path / "log.csv")
    assert len((tmp_path / "seen").read_text().splitlines()) == 2


def test_an_ncu_that_fails_is_one_line(fake_ncu, tmp_path):
    ncu = fake_ncu("log.write_text('==PROF== Connected\\n==ERROR== LibraryNotLoaded\\n')\nsys.exit(9)")
    with pytest.raises(mixing.NoCounters, match=r"ended with 9: ==ERROR== LibraryNotLoaded$"):
        mixing.run_ncu(ncu, [], tmp_path / "log.csv")
    with pytest.raises(mixing.NoCounters, match="no such-a-program: install Nsight Compute"):
        mixing.run_ncu("such-a-program", [], tmp_path / "log.csv")


@pytest.fixture
def no_device(monkeypatch):
    """Two systems on the CPU, CUDA calls written down: one whose calls are right, one that does not exist here."""
    seen = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append("mark"))
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: seen.append(name))

    def right(inputs):
        def call():
            seen.append("call")
            return decode_systems.reference(inputs, list(range(inputs.case.n_requests))).half()

        return decode_systems.Ready(call)

    def absent(inputs):
        raise decode_systems.Unavailable("two does not import")

    pools = decode_systems.Pools
    monkeypatch.setattr(pools, "__init__", _on_the_cpu(pools.__init__))
    monkeypatch.setattr(decode_systems, "choose_systems", lambda text: {"one": right, "two": absent})
    monkeypatch.setattr(decode_timing, "Captured", lambda call: SimpleNamespace(poisoned_run=call, runs=1, out=call()))
    monkeypatch.setattr(decode_timing, "machine", lambda: {"gpu": "none"})
    monkeypatch.setattr(
        decode_timing, "measure_in_turn",
        lambda systems, rounds, flush: {name: decode_timing.Times(warm=[100.0] * rounds) for name in systems},
    )  # fmt: skip
    return seen


def _on_the_cpu(init):
    return lambda self, elements, dtype, seed: init(self, elements, dtype, device="cpu", seed=seed)


def test_every_cell_has_a_mark_and_the_calls_behind_it(no_device):
    mixing.counted(options())
    batches = 1 + 1 + 3
    warm = ["call"] * mixing.WARM_CALLS
    one = [*warm, "start", "mark", "call", "call", "stop"]
    assert no_device == [*one, "start", "mark", "stop"] * batches


def test_one_command_measures_counts_and_reports(no_device, fake_ncu, tmp_path, capsys):
    call = {"kernel": FORWARD, "dram": 5e6}
    ncu = fake_ncu(f"log.write_text({log(*[None, call, call, None] * 5)!r})")
    out = tmp_path / "mixing.json"
    argv = ["--requests", "12", "--groups", "1,stranger,3", "--prefix", "40", "--tail", "5", "--heads", "4/2"]
    assert mixing.main([*argv, "--json", str(out), "--ncu", ncu]) == 1  # a system is missing
    found = json.loads(out.read_text())
    assert [record["order"] for record in found["records"]] == ["prefix", "arrival", *mixing.ORDERS]
    for record in found["records"]:
        assert record["systems"]["two"] == {"error": "two does not import"}
        assert record["systems"]["one"]["relative_error"] < 1e-2 and record["systems"]["one"]["warm_us"] == 100.0
        assert record["systems"]["one"]["counters"]["dram_read_bytes"] == 5e6
    assert (tmp_path / "mixing.csv").exists() and "one, 12 requests: 3 groups" in capsys.readouterr().out
    assert mixing.main([*argv, "--json", str(out), "--ncu", "such-a-program"]) == 1
    assert "install Nsight Compute" in json.loads(out.read_text())["counters_error"]
    assert "counters are missing: no such-a-program" in capsys.readouterr().out
