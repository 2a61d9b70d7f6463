"""The server benchmark without a server: the order of its runs, and its report on given measurements."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_server as bench
import server_report as report
from server_cases import Misfit, bench_case, check_fit
from server_driver import plan
from server_names import parse_server

from feather_sglang.compare.server.cases import parse_case
from feather_sglang.compare.server.stats import spread


def record(server, case, rate, *, round=1, **changes):
    """A measurement of a batch with that throughput."""
    whole = {
        "requests": 4, "finished": 4, "failed": 0, "unfinished": 0, "output_tokens": 40, "seconds": 2.0, "tok_s": rate,
        "ttft_s": spread([1.0, 2.0]), "tpot_ms": spread([1e3 / rate]), "e2e_s": spread([3.0]), "cache_hit": 0.5,
        "peak_running": 4, "late_ms": None, "errors": [],
    } | changes.pop("overall", {})  # fmt: skip
    log = {"peak_running": 4, "full_batch_tok_s": None, "retractions": 0}
    return {
        "server": server, "case": case, "round": round, "steady_case": False, "steady": None, "overall": whole,
        "client_cpu": 0.1, "log": log, **changes,
    }  # fmt: skip


class TestPlan:
    def test_every_other_round_goes_backwards(self):
        servers = [parse_server(f"{name}=") for name in "abc"]

        def order(rounds, together):
            return [(number, "".join(s.name for s in group)) for number, group in plan(servers, rounds, together)]

        assert order(2, 1) == [(1, "a"), (1, "b"), (1, "c"), (2, "c"), (2, "b"), (2, "a")]
        assert order(2, 2) == [(1, "ab"), (1, "c"), (2, "c"), (2, "ba")]

    def test_one_server_takes_neighbours_that_differ_in_the_policy_alone(self):
        servers = [parse_server(name) for name in ("fa3", "fa3+lpm", "fa3+feather", "pat+feather", "pat", "fa3+hrrn")]
        assert [server.policy for server in servers] == ["fcfs", "lpm", "feather", "feather", "fcfs", "hrrn"]
        groups = [[server.name for server in group] for _, group in plan(servers, 2, switching=True)]
        first = [["fa3", "fa3+lpm", "fa3+feather"], ["pat+feather", "pat"], ["fa3+hrrn"]]
        assert groups == first + [group[::-1] for group in first[::-1]]
        paced = [parse_server("fa3+feather"), parse_server("x=--attention-backend fa3 --feather-pace 1")]
        assert [len(group) for _, group in plan(paced, 1, switching=True)] == [2]

    def test_what_can_never_be_complete_is_refused(self):
        case = parse_case("decode:10,2,100,50")
        check_fit(case, None, None)
        check_fit(case, case.kv_tokens, 10)
        with pytest.raises(Misfit, match="KV tokens"):
            check_fit(case, case.kv_tokens - 1, 10)
        with pytest.raises(Misfit, match="runs 9"):
            check_fit(case, case.kv_tokens, 9)
        check_fit(bench_case("W2"), 1000, 9)  # that one is meant to be too large


class TestReport:
    def test_ratios_are_to_the_best_stock_server(self):
        records = [record("fa3", "W1", 100.0), record("flashinfer", "W1", 200.0), record("pat", "W1", 500.0)]
        (row,) = report.comparison(records, ["fa3", "flashinfer"]).splitlines()[1:]
        assert row.split() == ["W1", "100", "10.00", "0.50", "200", "5.00", "1.00", "500", "2.00", "2.50"]

    def test_rounds_are_averaged_and_their_distance_is_shown(self):
        records = [record("fa3", "W1", 300.0), record("fa3", "W1", 100.0, round=2)]
        assert report.comparison(records, ["fa3"]).splitlines()[1].split()[1] == "200"
        assert report.details(records).splitlines()[1].endswith("50.0%")

    def test_marks_are_explained(self):
        records = [
            record("a", "W1", 100.0, client_cpu=0.8),
            record("b", "W1", 100.0, overall={"unfinished": 1}),
            record("c", "W1", 100.0, overall={"failed": 1}),
            {"server": "d", "case": "W1", "round": 1, "error": "gone"},
            record("e", "W1", 100.0, steady_case=True),
        ]
        table = report.comparison(records, ["a"])
        assert "100!" in table and "100~" in table and "100?" in table and "-?" in table
        assert all(f"\n{sign} " in table for sign in "!~-?")
        assert "d W1: gone" == report.progress(records[3])
        assert "never all running" in report.progress(records[4])

    def test_steady_cases_are_judged_by_their_window(self):
        window = {"seconds": 2.0, "output_tokens": 50, "tok_s": 900.0, "tpot_ms": spread([4.0])}
        batch = record("a", "decode:4,1,100", 100.0, steady_case=True, steady=window)
        assert report.tok_s(batch) == 900 and report.tpot_ms(batch) == 4
        assert "all run for 2.0 s, 900 tok/s, TPOT 4 ms" in report.progress(batch)

    def test_several_files_are_one_report(self):
        server = {"stock": True, "error": None, "start_seconds": [9.0], "probes": []}
        machine = {"gpu": "H200", "versions": {"sglang": "0.5.17"}}
        base = {"model": {"vocab_size": 9}, "machine": machine, "compare_tokens": False, "seconds": 5.0}
        first = base | {
            "servers": {"fa3": server, "pat": server}, "order": ["fa3", "pat"], "missing": ["pat W1", "pat W2"],
            "records": [record("fa3", "W1", 100.0), record("fa3", "W1", 300.0, round=2)],
        }  # fmt: skip
        second = base | {
            "servers": {"fa3": server, "pat": server | {"error": "gone"}}, "order": ["pat", "fa3"], "missing": [],
            "records": [record("pat", "W1", 500.0), record("fa3", "W1", 200.0)],
        }  # fmt: skip
        whole = report.merged([first, second])
        assert [(r["server"], r["round"]) for r in whole["records"]] == [("fa3", 1), ("fa3", 2), ("pat", 1), ("fa3", 3)]
        assert whole["missing"] == ["pat W2"] and whole["seconds"] == 10
        assert whole["servers"]["fa3"]["start_seconds"] == [9.0, 9.0] and whole["servers"]["pat"]["error"] == "gone"
        assert report.comparison(whole["records"], ["fa3"]).splitlines()[1].split()[1] == "200"
        assert len(first["records"]) == 2 and first["servers"]["fa3"] is server  # as they were

    @pytest.mark.parametrize(
        "change, word",
        [
            ({"model": {"vocab_size": 8}}, "model"), ({"machine": {"gpu": "A100", "versions": {}}}, "GPU"),
            ({"machine": {"gpu": "H200", "versions": {"sglang": "0.5.21"}}}, "SGLang"),
        ],
    )  # fmt: skip
    def test_files_of_different_machines_are_refused(self, change, word, tmp_path):
        content = {
            "model": {"vocab_size": 9}, "machine": {"gpu": "H200", "versions": {"sglang": "0.5.17"}}, "servers": {},
            "order": [], "records": [], "missing": [],
        }  # fmt: skip
        paths = [tmp_path / "one.json", tmp_path / "two.json"]
        for path, one in zip(paths, (content, content | change), strict=True):
            path.write_text(json.dumps(one))
        with pytest.raises(SystemExit, match=f"differ in {word}"):
            bench.main(["--from", *map(str, paths)])

    @pytest.mark.parametrize("change", [{"failed": 1}, {"unfinished": 1}])
    def test_lost_requests_are_a_status(self, change, tmp_path, capsys):
        server = {"stock": True, "error": None, "start_seconds": [9.0], "probes": []}
        content = {
            "model": {}, "machine": {"gpu": "H200", "versions": {"sglang": "0.5.17"}}, "servers": {"fa3": server},
            "order": ["fa3"], "missing": [],
        }  # fmt: skip
        for lost, status in (({}, 0), (change, 1)):
            records = [record("fa3", "W1", 10.0, overall=lost)]
            (tmp_path / "run.json").write_text(json.dumps(content | {"records": records}))
            assert bench.main(["--from", str(tmp_path / "run.json")]) == status

    def test_agreement_of_tokens_ends_at_the_first_that_differs(self):
        assert [report.agreeing([1, 2, 3], other) for other in ([1, 2, 3], [1, 9, 3], [1, 2], [])] == [3, 1, 2, 0]

    def test_what_admission_took(self):
        counted = {"rounds": 200, "seconds": 0.05, "stops": 1234}
        (row,) = report.details([record("fa3", "W1", 100.0, admission=counted)]).splitlines()[1:]
        assert row.split()[-8:-5] == ["0.250", "2.5%", "1,234"]  # 50 ms of a run of 2 s
        (row,) = report.details([record("fa3", "W1", 100.0)]).splitlines()[1:]
        assert row.split()[-8:-5] == ["-", "-", "-"]
