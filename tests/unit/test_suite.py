"""``feather suite`` without replays: which cells run, which results are kept, and the report."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from feather_sglang.adapter.environment import sglang_variables
from feather_sglang.cli import main
from feather_sglang.errors import FeatherError
from feather_sglang.replay import on_ray, server_flags
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.processes import Event
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import save_trace
from feather_sglang.replay.workloads import no_sharing, shared_prefix
from feather_sglang.report.summary import RunSummary
from feather_sglang.slo import parse
from feather_sglang.suite import command, runner
from feather_sglang.suite.cases import CASES, Case, chosen, patterns
from feather_sglang.suite.report import answer, geometric_mean, page, rows_of, summary, tables
from feather_sglang.suite.runner import Suite, Terms

TERMS = Terms(StepTimeModel(load_profile("h200"), load_model("qwen3-8b"), "pat"), parse("mooncake"), "0.5.23")
SMALL = (
    Case("a", "small ones", partial(shared_prefix, 2, 100, output_tokens=4, requests=20), short=10),
    Case("b", "small ones", partial(no_sharing, 100, 4, requests=10)),
)
SLICE = Case("conversation 2, load 0.5, 200K", "slices", None, load=0.5, file="t.jsonl", first=2, count=5, short=3)

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "measured"


@pytest.fixture(autouse=True)
def no_sglang_variables(monkeypatch):
    """Those that an engine in this process has set, in another file's tests."""
    for name in sglang_variables():
        monkeypatch.delenv(name)


def figures(job):
    """A made-up run whose figures follow from the job alone."""
    size = len(job.trace.requests) + len(job.policy)
    return RunSummary(
        job.policy, size, 100.0 * size, 1 / size, tbt_p99_ms=9.0, ttft_p99=2.0, makespan=3.0, goodput=size / 3,
        slo_share=0.5, slowdown_p50=1.0, slowdown_p99=2.0, max_wait=2.0, cache_hit=0.123456789,
    )  # fmt: skip


class Replays:
    """Stands for the processes; notes which jobs ran, and may end after some of them."""

    def __init__(self, monkeypatch, ends_after=None, fails=()):
        self.ran, self.ends_after, self.fails = [], ends_after, fails
        for module in (runner, on_ray):
            monkeypatch.setattr(module, "events", self.events)

    def events(self, jobs, at_a_time, logs, work):
        for job in jobs:
            if len(self.ran) == self.ends_after:
                raise KeyboardInterrupt
            yield Event(job.name, "start")
            if any(name in job.name for name in self.fails):
                yield Event(job.name, "crash", "it ended without a result\nTraceback")
                continue
            self.ran.append(job)
            yield Event(job.name, "progress", 1)
            yield Event(job.name, "done", SimpleNamespace(summary=figures(job), feather=None))


def run(out, cases=SMALL, policies=("fcfs", "feather"), terms=TERMS, said=None):
    console = Console(quiet=True)
    return Suite(cases, policies, terms, out, (said if said is not None else []).append).run(2, console)


def test_an_interrupted_suite_goes_on_and_ends_up_the_same(tmp_path, monkeypatch):
    whole = Replays(monkeypatch)
    expected = run(tmp_path / "whole")
    assert len(whole.ran) == 4
    first = Replays(monkeypatch, ends_after=3)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out")
    rest = Replays(monkeypatch)
    assert run(tmp_path / "out") == expected
    assert [job.name for job in first.ran + rest.ran] == [job.name for job in whole.ran]
    again = Replays(monkeypatch)
    assert run(tmp_path / "out") == expected and again.ran == []
    files = {file.name: file.read_bytes() for file in (tmp_path / "out" / "cells").iterdir()}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "whole" / "cells").iterdir()}


@pytest.mark.parametrize(
    "change",
    [
        {"slo": parse("ttft=1")}, {"seed": 1}, {"sglang": "0.5.17"}, {"scheduler_cost": "off"}, {"short": True},
        {"model": StepTimeModel(load_profile("h200"), load_model("qwen3-8b"), "fa3")},
        {"server": {"server_flags": ["--enable-mixed-chunk"]}}, {"environment": {"IN_BATCH_PREFIX": "8"}},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_what_a_cell_depends_on_makes_it_run_again(tmp_path, monkeypatch, change):
    Replays(monkeypatch)
    run(tmp_path)
    other = Replays(monkeypatch)
    cases = SMALL[:1] if "short" in change else SMALL
    run(tmp_path, cases=cases, terms=replace(TERMS, **change))
    assert len(other.ran) == 2 * len(cases)


def test_the_servers_of_a_suite_are_started_with_the_users_flags(tmp_path, monkeypatch, capsys):
    values = {"prefill_max_requests": 2, "max_running_requests": 64, "decode_attention_backend": "fa3", "host": "h"}
    monkeypatch.setattr(server_flags, "_read", lambda words: {**values, "disable_prefill_cuda_graph": True})
    monkeypatch.setattr(command, "check_sglang", lambda policies: "0.5.23")
    words = ["suite", "--short", "--cases", "W4", "--policies", "feather", "--server-flags", "--one --two"]
    for count in (2, 0):  # the second time they are kept
        replays = Replays(monkeypatch)
        assert main([*words, "--out", str(tmp_path / "out"), "--page", str(tmp_path / "page.md")]) == 0
        assert len(replays.ran) == count
        for job in replays.ran:
            assert job.settings["server_flags"] == ["--prefill-max-requests=2"] and job.settings["max_running"] == 64
            assert job.model.attention_name == "fa3" and not job.model.prefill_graphs
    assert "--host" in capsys.readouterr().out
    assert "`--max-running=64 --prefill-graphs=off --prefill-max-requests=2`" in (tmp_path / "page.md").read_text()
    values["max_total_tokens"] = 9000
    assert main([*words, "--out", str(tmp_path / "no")]) == 2
    assert "--kv-tokens cannot be set here" in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_results_depend_on_sglangs_variables(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "check_sglang", lambda policies: "0.5.23")
    words = ["suite", "--short", "--cases", "W4", "--policies", "fcfs", "--scheduler-cost", "off"]
    variable = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"
    for value, count in (("8", 1), ("8", 0), ("16", 1)):
        monkeypatch.setenv(variable, value)
        replays = Replays(monkeypatch)
        assert main([*words, "--out", str(tmp_path / "out"), "--page", str(tmp_path / "page.md")]) == 0
        assert len(replays.ran) == count
        assert json.loads((tmp_path / "out" / "suite.json").read_text())["environment"][variable] == value
        assert f"{variable}={value}" in (tmp_path / "page.md").read_text()


def test_a_cell_of_other_code_or_half_a_file_runs_again(tmp_path, monkeypatch):
    Replays(monkeypatch)
    expected = run(tmp_path)
    one, two, *_ = sorted((tmp_path / "cells").iterdir())
    one.write_text(one.read_text()[:40])
    two.write_text(two.read_text().replace(runner.code_digest(), "another"))
    other = Replays(monkeypatch)
    assert run(tmp_path) == expected and len(other.ran) == 2


def test_a_cell_that_fails_costs_itself_alone_and_is_tried_again(tmp_path, monkeypatch):
    Replays(monkeypatch, fails=["a-feather"])
    said = []
    results = run(tmp_path, said=said)
    cell = results["cases"]["a"]["policies"]["feather"]
    assert cell == {"error": "it ended without a result"} and results["cases"]["b"]["policies"]["feather"]["makespan"]
    assert len(said) == 1 and said[0].startswith("a-feather: it ended without a result; see ")
    assert "`feather`: it ended without a result." in page(results, "x")
    second = Replays(monkeypatch)
    assert "error" not in run(tmp_path)["cases"]["a"]["policies"]["feather"] and len(second.ran) == 1


def test_a_slice_comes_at_its_load_of_what_fcfs_sustains(tmp_path, monkeypatch):
    trace = no_sharing(100, 4, rate=2.0, requests=10)
    save_trace(trace, tmp_path / "t.jsonl")
    replays = Replays(monkeypatch)
    terms = replace(TERMS, folder=tmp_path)
    results = run(tmp_path / "out", [SLICE], terms=terms)
    capacity, *cells = replays.ran
    assert capacity.trace.requests[-1].arrival_s < 1e-4 and capacity.policy == "fcfs"
    # fcfs took 3 s for all at once: at half that load the requests come within 6 s.
    assert [cell.trace.requests[-1].arrival_s for cell in cells] == [pytest.approx(6.0)] * 2
    assert [len(cell.trace.requests) for cell in cells] == [5, 5]
    case = results["cases"][SLICE.name]
    assert case["load"] == 0.5 and case["rate"] == pytest.approx(4 / 6, rel=1e-3)
    both = Replays(monkeypatch)
    run(tmp_path / "out", [SLICE, replace(SLICE, name=SLICE.name.replace("0.5", "1"), load=1.0)], terms=terms)
    assert [job.trace.requests[-1].arrival_s for job in both.ran] == [pytest.approx(3.0)] * 2  # its capacity is known


def test_without_the_file_a_slice_is_left_out_by_name(tmp_path, monkeypatch):
    Replays(monkeypatch)
    for folder in (None, tmp_path):
        said = []
        results = run(tmp_path / "out", [SLICE, *SMALL], terms=replace(TERMS, folder=folder), said=said)
        assert results["skipped"] == [SLICE.name] and list(results["cases"]) == ["a", "b"]
        assert said == [f"left out, no such file in --traces: {SLICE.name}"]


def test_a_file_that_is_too_short_is_one_line(tmp_path):
    save_trace(no_sharing(100, 4, requests=6), tmp_path / "t.jsonl")
    with pytest.raises(FeatherError, match="ends before request 7"):
        SLICE.trace(tmp_path, 0, short=False)


def test_names_of_cells_do_not_collide(tmp_path, monkeypatch):
    cells = [
        runner.Cell(case, policy, SMALL[1].make(), TERMS, tmp_path, False) for case in CASES for policy in command.EVERY
    ]
    assert len({cell.path for cell in cells}) == len(cells)


def test_the_short_form_has_every_kind_of_case_load_and_pool():
    short, full = chosen(True, []), chosen(False, [])
    assert {case.kind for case in short} == {case.kind for case in full} and set(short) < set(full)
    for file in {case.file for case in full if case.file}:
        slices = [case for case in full if case.file == file]
        assert {(case.load, case.kv_tokens) for case in slices} == {
            (load, kv) for load in (0.5, 0.8, 1.0, 1.2) for kv in (200_000, 500_000, 824_000)
        }
        few = [case for case in short if case.file == file]
        assert {case.load for case in few} == {0.5, 0.8, 1.0, 1.2}
        assert {case.kv_tokens for case in few} == {200_000, 500_000, 824_000}
    assert [case.name for case in chosen(True, ["W*", "chat"])] == ["W1", "W2", "W3", "W4", "W5", "W6", "W7", "chat"]


def test_a_case_whose_name_has_commas_can_be_named():
    names = [case.name for case in CASES]
    assert any("," in name for name in names) and patterns(",".join(names)) == names
    one = next(name for name in names if "," in name)
    assert patterns(f"W*, {one},chat") == ["W*", one, "chat"]
    assert [case.name for case in chosen(False, patterns(one))] == [one]


def test_a_case_that_is_made_has_its_requests():
    for case in CASES:
        if case.make is not None:
            trace = case.trace(None, 0, short=True) if case.short else case.trace(None, 1, short=False)
            assert trace.name == case.name and trace.least_pool(1) <= case.kv_tokens
            assert not case.short or len(trace.requests) == case.short


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--cases", "W9"], "--cases W9: fits none of W1, W2"),
        (["--cases", ","], "--cases ,: "),
        (["--policies", "fifo"], "--policies fifo: unknown ['fifo']; choose from"),
        (["--slo", "soon"], "--slo 'soon': expected ttft=SECONDS"),
        (["--slo", ""], "--slo '': expected ttft=SECONDS"),
        (["--jobs", "0"], "--jobs 0: must be at least 1"),
        (["--traces", "/no/folder"], "--traces /no/folder: no such folder"),
        (["--profile", "h100"], "unknown hardware profile 'h100'"),
        (["--show", "/no/file"], "--show /no/file: cannot read: No such file"),
        (["--show", __file__], "no results of feather suite"),
        (["--show", str(MEASURED / "tail.json")], "no results of feather suite"),
    ],
)
def test_a_mistake_is_one_line_before_anything_long_starts(tmp_path, capsys, flags, says):
    assert main(["suite", "--out", str(tmp_path / "out"), *flags]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("feather: error: ") and says in error and "\n" not in error
    assert not (tmp_path / "out").exists()


class TestReport:
    results: dict

    @pytest.fixture(autouse=True)
    def made(self, tmp_path, monkeypatch):
        Replays(monkeypatch)
        self.results = run(tmp_path)

    def test_ratios_are_to_fcfs(self):
        fcfs, feather = self.results["cases"]["a"]["policies"].values()
        rows = rows_of(self.results["cases"]["a"])
        ratio = feather["output_tok_s"] / fcfs["output_tok_s"]
        assert rows[1][:2] == ["fcfs", "2,400"] and rows[2][:2] == ["feather", f"2,700 ({ratio:.2f}x)"]
        other = 17 / 14
        assert summary(self.results)[2][1] == f"{(ratio * other) ** 0.5:.2f}x"
        assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)

    def test_who_did_the_same_shares_a_row(self):
        case = self.results["cases"]["a"]
        case["policies"]["lof"] = dict(case["policies"]["fcfs"])
        assert [row[0] for row in rows_of(case)] == ["policy", "fcfs, lof", "feather"]
        assert [row[0] for row in summary(self.results)[1:]] == ["fcfs", "feather", "lof"]

    def test_the_answer_names_who_serves_most_and_came_through_all_cases(self):
        for case, shares in zip(self.results["cases"].values(), ((0.2, 0.4), (0.4, 0.8)), strict=True):
            for policy, share in zip(case["policies"].values(), shares, strict=True):
                policy["slo_share"] = share
            case["policies"]["lof"] = {**case["policies"]["fcfs"], "slo_share": 1.0}
        self.results["cases"]["b"]["policies"]["lof"] = {"error": "gone"}
        rate = summary(self.results)[2][1]
        feather, fcfs = answer(self.results).split("; ")
        assert all(word in feather for word in ("`feather`", "60%", rate))
        assert all(word in fcfs for word in ("`fcfs`", "30%", "1.00x"))

    def test_nothing_is_divided_by_nothing(self):
        for policy in self.results["cases"]["a"]["policies"].values():
            policy["goodput"] = 0.0
        assert "(" not in rows_of(self.results["cases"]["a"])[2][5]
        self.results["cases"]["b"]["policies"]["fcfs"] = {"error": "gone"}
        assert summary(self.results)[2][-1] == "1"

    def test_results_are_small_and_give_the_same_report_again(self, tmp_path, capsys):
        text = json.dumps(self.results, separators=(",", ":"))
        cells = sum(len(case["policies"]) for case in self.results["cases"].values())
        assert len(text) < 800 + 400 * cells  # 300 cells are within 200 KB with half to spare
        (tmp_path / "r.json").write_text(text)
        assert main(["suite", "--show", str(tmp_path / "r.json"), "--page", str(tmp_path / "p.md")]) == 0
        written = (tmp_path / "p.md").read_text()
        assert written == page(self.results, f"feather suite --show {tmp_path / 'r.json'} --page {tmp_path / 'p.md'}")
        assert "## Small ones" in written and "### a" in written
        console = Console(width=120, record=True, quiet=True)
        for table in tables(self.results):
            console.print(table)
        assert "to fcfs" in capsys.readouterr().out


def test_what_the_variable_sets_is_for_feather_whose_cells_run_again(tmp_path, monkeypatch):
    Replays(monkeypatch)
    run(tmp_path)
    rest = Replays(monkeypatch)
    results = run(tmp_path, terms=replace(TERMS, options={"chunk_size": 32}))
    assert [(job.policy, job.options) for job in rest.ran] == [("feather", {"seed": 0, "chunk_size": 32})] * 2
    assert results["options"] == {"chunk_size": 32}


def test_the_command_reads_the_variable(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(command, "check_sglang", lambda policies: "0.5.23")
    monkeypatch.setattr(command, "Suite", lambda cases, policies, terms, *rest: given.append(terms) or 1 / 0)
    monkeypatch.setenv("FEATHER_OPTIONS", '{"chunk_size": 32, "max_wait": 120}')
    with pytest.raises(ZeroDivisionError):
        main(["suite", "--seed", "3", "--out", str(tmp_path)])
    assert given[0].options == {"chunk_size": 32} and given[0].seed == 3


ODD = (None, True, -1, 10**400, float("nan"), float("inf"), "", "\ud800", [], [1], {}, {"a": []}, [[]], "x")


def places(value, path=()):
    """The path of every entry of a document."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def replaced(value, path, odd):
    if not path:
        return odd
    made = value.copy()
    made[path[0]] = replaced(value[path[0]], path[1:], odd)
    return made


def test_odd_results_are_shown_or_refused_in_one_line(tmp_path, monkeypatch, capsys):
    Replays(monkeypatch)
    results = {**run(tmp_path), "skipped": ["c"], "server": {"server_flags": ["--x"]}, "environment": {"A": "b"}}
    results["cases"].pop("b")
    path, refused = tmp_path / "odd.json", 0
    for place in places(results):
        for odd in ODD:
            path.write_text(json.dumps(replaced(results, place, odd)))
            status = main(["suite", "--show", str(path), "--page", str(tmp_path / "p.md")])
            error = capsys.readouterr().err
            assert status in (0, 1) or (status == 2 and error.startswith(f"feather: error: --show {path}: ")), place
            assert error.count("\n") == (status == 2), (place, odd, error)
            refused += status == 2
    assert refused > 100


@pytest.mark.parametrize("text", ["[" * 100_000, '{"version":' * 2000, "[]", "1", "null", '{"version": 1}'])
def test_what_is_no_result_is_one_line(tmp_path, capsys, text):
    (tmp_path / "odd.json").write_text(text)
    assert main(["suite", "--show", str(tmp_path / "odd.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
