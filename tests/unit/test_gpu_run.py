"""The check of a GPU machine without a GPU: refusals, commands, outcomes, the table and its judgement."""

from __future__ import annotations

import copy
import json
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "checks"))

import check_gpu
import gpu_found
import gpu_parts
import gpu_report
import gpu_run
from gpu_report import BOUND_MS, CASES, OURS, PROMISE, STOCK

ROOT = Path(__file__).resolve().parents[2]
H200 = gpu_found.Gpu("NVIDIA H200", 143_771)


# Refusals -------------------------------------------------------------------------------------------------------------


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, prints: str, status: int = 0) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{prints}'\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_hopper_gpu_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "NVIDIA H200, 9.0, 143771")
    assert gpu_found.hopper() == H200


@pytest.mark.parametrize(
    ("prints", "status", "visible", "reason"),
    [
        ("NVIDIA A100, 8.0, 81920", 0, "0", "NVIDIA A100 has compute capability 8.0"),
        ("No devices were found", 6, "0", "nvidia-smi names no GPU 0: No devices were found"),
        ("NVIDIA H200, 9.0, 143771", 0, "-1", "CUDA_VISIBLE_DEVICES hides every GPU"),
        (None, 0, "0", "nvidia-smi, which names it, does not run here"),
    ],
)
def test_other_machines_are_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prints: str | None,
    status: int,
    visible: str,
    reason: str,
) -> None:
    nvidia_smi(tmp_path, monkeypatch, prints or "", status)
    if prints is None:
        (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert check_gpu.main(["--out", str(tmp_path / "gpu.json")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "needs an NVIDIA Hopper GPU" in said and reason in said
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--time-limit 30", "--time-limit 30: give at least 120 seconds"),
        ("--compare none.json", "--compare none.json: there is no such file"),
        ("--out .", "--out .: is no file; name another"),
    ],
)
def test_mistakes_in_the_command_line_are_told(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_gpu.arguments(flags.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["not JSON", "[]", '{"machine": {}}'])
def test_an_older_file_that_is_none_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    nvidia_smi(tmp_path, monkeypatch, "NVIDIA H200, 9.0, 143771")
    old = tmp_path / "old.json"
    old.write_text(text)
    assert check_gpu.main(["--compare", str(old), "--out", str(tmp_path / "new.json")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(old) in said and not (tmp_path / "new.json").exists()


# Commands -------------------------------------------------------------------------------------------------------------


def test_the_programs_take_the_flags_that_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import check_pat_server

    sys.path.insert(0, str(ROOT / "benchmarks"))
    import server_arguments

    monkeypatch.setattr(metadata, "entry_points", lambda group: [type("Point", (), {"name": "feather"})])
    command = gpu_parts.answers_command(tmp_path, 300.0)
    assert Path(command[1]).is_file()
    options = check_pat_server.arguments(command[2:])
    assert (options.chosen, options.reference, options.spread, options.random) == (["feather"], "fa3", "", True)
    command = gpu_parts.servers_command(tmp_path, 280.0)
    assert Path(command[1]).is_file()
    bench = server_arguments.arguments(command[2:], "")
    assert [server.name for server in bench.servers] == [STOCK, OURS, PROMISE] and bench.one_server
    assert [server.policy for server in bench.servers] == ["fcfs", "feather", "feather"]
    assert bench.servers[2].policy_options == {"tbt": str(BOUND_MS)} and not bench.servers[1].policy_options
    assert [case.name for case in bench.cases] == [case.name for case in CASES]
    assert "--disable-prefill-cuda-graph" in bench.for_all
    assert json.loads((bench.model / "config.json").read_text())["vocab_size"] == gpu_parts.VOCABULARY


def test_python_finds_the_checkout_and_sglang_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    monkeypatch.setenv("PYTHONPATH", "/before")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    variables = gpu_parts.environment(tmp_path)
    first, kernels, plugin, before = variables["PYTHONPATH"].split(":")
    assert (first, kernels, before) == (str(ROOT), str(ROOT / "kernels"), "/before")
    (found,) = metadata.distributions(path=[plugin])
    (point,) = found.entry_points
    assert (point.group, f"{point.name} = {point.value}") == (gpu_parts.PLUGINS, gpu_parts.PLUGIN)
    assert found.metadata["Name"] == "feather-sglang" and "PYTHONDONTWRITEBYTECODE" not in variables
    declared = (ROOT / "pyproject.toml").read_text().partition(f'[project.entry-points."{gpu_parts.PLUGINS}"]\n')[2]
    assert declared.splitlines()[0].replace('"', "") == gpu_parts.PLUGIN


def test_an_installed_package_needs_no_entry_point_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [type("Point", (), {"name": "feather"})])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert gpu_parts.environment(tmp_path)["PYTHONPATH"] == f"{ROOT}:{ROOT / 'kernels'}"


# What came of each part -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "printed", "result", "said"),
    [
        (0, "....\n220 passed in 81.20s (0:01:21)\nleaked something\n", "right", "220 passed"),
        (0, "220 skipped in 4.00s\n", "not run", "220 skipped"),
        (1, "FAILED tests/gpu/t.py::a - no\n1 failed, 219 passed in 3.1s\n", "wrong", "FAILED tests/gpu/t.py::a - no"),
        (4, "ERROR: usage\nno module named hypothesis\n", "not run", "status 4: no module named hypothesis"),
        (None, "....\n", "not run", "time ran out"),
        (1, "", "not run", "it printed nothing"),
    ],
)
def test_what_pytest_says(status: int | None, printed: str, result: str, said: str) -> None:
    outcome = gpu_parts.tests_outcome(status, printed)
    assert outcome.result == result and said in outcome.said and "\n" not in outcome.said


@pytest.mark.parametrize(
    ("status", "printed", "result", "said"),
    [
        (0, "1 variants right\n", "right", "20 of 24 answers equal, 1 part at near ties"),
        (1, "WRONG feather: together: p0: another token\n1 wrong\n", "wrong", "together: p0: another token"),
        (1, "WRONG: the stock servers: not up\n", "not run", "the stock servers: not up"),
        (3, "not run: feather (no time left)\n", "not run", "no time left"),
        (None, "waiting\n", "not run", "time ran out: waiting"),
    ],
)
def test_what_the_answers_say(tmp_path: Path, status: int | None, printed: str, result: str, said: str) -> None:
    file = tmp_path / "answers.json"
    row = {"together": {"spread": {"equal": 20, "answers": 24, "largest": 0.01}, "near_ties": [{}]}}
    file.write_text(json.dumps({"variants": [row], "allowed": {"largest": 0.02}}))
    outcome = gpu_parts.answers_outcome(status, printed, file)
    assert outcome.result == result and said in outcome.said


def record(server: str, case: str, rate: float, unfinished: int = 0) -> dict[str, Any]:
    overall = {"tok_s": rate, "failed": 0, "unfinished": unfinished, "longest_gap_ms": {"p99": rate / 10}}
    return {"server": server, "case": case, "overall": overall}


def test_what_the_servers_say(tmp_path: Path) -> None:
    file = tmp_path / "servers.json"
    records = [record(STOCK, "W6", 2000.0), record(OURS, "W6", 8000.0), record(PROMISE, "W6", 7900.0),
               record(STOCK, "W3", 100.0, unfinished=1), record(PROMISE, "W3", 110.0),
               {"server": OURS, "case": "W3", "error": "it did not answer"}]  # fmt: skip
    servers = {STOCK: {"error": None}, OURS: {"error": "status 1", "log_end": ["CUDA error: no memory", "at exit"]},
               PROMISE: {"error": None}}  # fmt: skip
    file.write_text(json.dumps({"records": records, "servers": servers}))
    found = gpu_parts.servers_outcome(1, "", file)
    rates = {STOCK: 2000.0, OURS: 8000.0, PROMISE: 7900.0}
    assert found["W6"] == {**rates, "longest_gap_ms": {name: rate / 10 for name, rate in rates.items()}, "said": ""}
    assert found["W3"][STOCK] is None and found["W3"][OURS] is None
    assert "requests failed or were cut" in found["W3"]["said"] and "it did not answer" in found["W3"]["said"]
    lone = found[CASES[2].name]["said"]
    assert lone == f"{STOCK}: time ran out; {OURS}: status 1: CUDA error: no memory; {PROMISE}: time ran out"


def test_servers_without_a_result_file_are_explained_by_what_was_printed(tmp_path: Path) -> None:
    found = gpu_parts.servers_outcome(1, "ImportError: no sglang\n", tmp_path / "servers.json")
    assert all("no results: ImportError: no sglang" in case["said"] for case in found.values())


# The table and the judgement ------------------------------------------------------------------------------------------


@pytest.fixture
def new() -> dict[str, Any]:
    """A run in which all is well, on the machine of the page."""
    page = gpu_report.page_figures(check_gpu.MEASURED)
    checks = {name: {"result": "right", "said": "fine", "seconds": 1.0} for name in ("tests", "answers")}
    cases = {name: {**figures, "said": ""} for name, figures in page["cases"].items()}
    cases["W6"] |= {PROMISE: cases["W6"][OURS], "longest_gap_ms": {OURS: 140.0, PROMISE: 60.0}}
    return {"machine": page["machine"], "checks": checks, "cases": cases}


def on_page(file: str, server: str, case: str) -> float:
    records = json.loads((check_gpu.MEASURED / file).read_text())["records"]
    (rate,) = (one["overall"]["tok_s"] for one in records if (one["server"], one["case"]) == (server, case))
    return float(rate)


def test_the_page_has_every_figure() -> None:
    page = gpu_report.page_figures(check_gpu.MEASURED)
    ratios = {case.name: gpu_report.beside_stock(page["cases"][case.name]) for case in CASES}
    for name in ("W6", "W3"):
        ours, stock = on_page("servers_h200_pat.json", OURS, name), on_page("servers_h200_fa3.json", STOCK, name)
        assert ratios[name] == ours / stock
    assert ratios[CASES[2].name] == pytest.approx(179.75 / 185.9, rel=1e-3)


def test_a_run_as_the_page_says_passes(new: dict[str, Any]) -> None:
    page = gpu_report.page_figures(check_gpu.MEASURED)
    assert not gpu_report.failures(new, page, is_page=True)
    text = gpu_report.report(new, page, is_page=True)
    assert text.count("passes") == 4 and text.count("as on the page") == 6


def test_what_is_below_the_page_is_said_and_does_not_fail(new: dict[str, Any]) -> None:
    page = gpu_report.page_figures(check_gpu.MEASURED)
    new["cases"]["W6"][OURS] *= 0.8
    assert not gpu_report.failures(new, page, is_page=True)
    assert gpu_report.report(new, page, is_page=True).count("below the page") == 2


@pytest.mark.parametrize("is_page", [True, False])
def test_what_is_wrong_or_missing_fails_whatever_it_is_compared_with(new: dict[str, Any], is_page: bool) -> None:
    old = copy.deepcopy(new)
    new["checks"]["tests"] |= {"result": "wrong", "said": "1 failed"}
    new["cases"]["W3"] = {STOCK: 100.0, OURS: None, "said": f"{OURS}: time ran out"}
    failures = gpu_report.failures(new, old, is_page)
    assert failures == ["tests: wrong: 1 failed", f"W3, nothing shared: not measured: {OURS}: time ran out"]
    assert gpu_report.report(new, old, is_page).count("FAILS") == 2


@pytest.mark.parametrize(
    ("rate", "gap", "fails"), [(0.98, 69.0, 0), (0.94, 10.0, 0), (0.92, 69.0, 1), (1.0, 71.0, 1), (0.9, 150.0, 2)]
)
@pytest.mark.parametrize("is_page", [True, False])
def test_a_promise_may_cost_little_throughput_and_must_shorten_gaps(
    new: dict[str, Any], rate: float, gap: float, fails: int, is_page: bool
) -> None:
    old = copy.deepcopy(new)
    new["cases"]["W6"] |= {PROMISE: rate * new["cases"]["W6"][OURS], "longest_gap_ms": {OURS: 140.0, PROMISE: gap}}
    assert len(gpu_report.failures(new, old, is_page)) == fails


def test_a_promise_that_was_not_measured_fails(new: dict[str, Any]) -> None:
    old = copy.deepcopy(new)
    new["cases"]["W6"] |= {PROMISE: None, "said": f"{PROMISE}: time ran out"}
    (failure,) = gpu_report.failures(new, old, is_page=True)
    assert "time ran out" in failure


@pytest.mark.parametrize(("factor", "fails"), [(0.96, False), (0.94, True), (1.3, False)])
def test_a_ratio_may_be_a_little_worse_than_in_the_older_file(new: dict[str, Any], factor: float, fails: bool) -> None:
    old = copy.deepcopy(new)
    new["cases"]["W3"][OURS] *= factor
    failures = gpu_report.failures(new, old, is_page=False)
    assert [failure.partition(":")[0] for failure in failures] == ["W3, nothing shared"] * fails
    assert not fails or "more than 5% below the older file's" in failures[0]


def test_times_are_compared_on_one_gpu_with_one_release_only(new: dict[str, Any]) -> None:
    old = copy.deepcopy(new)
    for server in (STOCK, OURS):
        new["cases"]["W6"][server] *= 0.8
    (failure,) = gpu_report.failures(new, old, is_page=False)
    here, there = new["cases"]["W6"][OURS], old["cases"]["W6"][OURS]
    assert f"tok/s of pat+feather: {here:,.0f}, more than 10% below the older file's {there:,.0f}" in failure
    old["machine"] = {"gpu": "NVIDIA H100", "versions": old["machine"]["versions"]}
    assert not gpu_report.failures(new, old, is_page=False)
    assert gpu_report.report(new, old, is_page=False).count("not compared") == 3


def test_a_case_that_the_older_file_lacks_is_not_compared(new: dict[str, Any]) -> None:
    old = copy.deepcopy(new)
    old["cases"]["W6"] = {STOCK: None, OURS: None, "said": "time ran out"}
    assert not gpu_report.failures(new, old, is_page=False)
    assert gpu_report.report(new, old, is_page=False).count("not compared") == 2


# A run ----------------------------------------------------------------------------------------------------------------


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu_run.GpuRun:
    """A run whose parts are little programs: tests that pass, answers that break, servers that do not end."""
    monkeypatch.setattr(gpu_run, "machine", lambda: {"gpu": "G", "versions": {}})
    monkeypatch.setattr(gpu_run, "SERVERS_SECONDS", 3.0)
    monkeypatch.setattr(gpu_parts, "tests_command", lambda gpu: python("print('3 passed in 0.1s')"))
    monkeypatch.setattr(gpu_parts, "answers_command", lambda folder, limit: python("raise SystemExit('no memory')"))
    one = gpu_run.GpuRun(tmp_path / "results" / "gpu.json", 20.0, H200)
    rates = [record(server, "W6", rate) for server, rate in ((STOCK, 10.0), (OURS, 20.0))]
    text = json.dumps({"records": rates, "servers": {STOCK: {}, OURS: {}}})
    code = (
        f"import pathlib, time; pathlib.Path({str(one.folder / 'servers.json')!r}).write_text({text!r}); time.sleep(60)"
    )
    monkeypatch.setattr(gpu_parts, "servers_command", lambda folder, limit: python(code))
    return one


def test_a_part_that_fails_loses_nothing_of_the_others(run: gpu_run.GpuRun, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(gpu_run.GpuRun, "say", lambda self, text: seen.append(json.loads(self.out.read_text())))
    monkeypatch.setattr(run, "remaining", lambda: 3.0)
    content = run.run()
    assert content["checks"][gpu_parts.TESTS]["result"] == "right"
    assert content["checks"][gpu_parts.ANSWERS] | {"seconds": 0} == {
        "result": "not run", "said": "it ended with status 1: no memory", "seconds": 0,
    }  # fmt: skip
    assert (content["cases"]["W6"][STOCK], content["cases"]["W6"][OURS]) == (10.0, 20.0)
    assert "time ran out" in content["cases"]["W3"]["said"]
    assert json.loads(run.out.read_text()) == content and len(seen) == 5
    assert all(one["cases"].keys() == content["cases"].keys() for one in seen)


def test_an_earlier_runs_figures_are_not_taken_for_this_ones(
    run: gpu_run.GpuRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.folder / gpu_parts.SERVERS_FILE).write_text(json.dumps({"records": [record(OURS, "W6", 1.0)], "servers": {}}))
    monkeypatch.setattr(gpu_parts, "servers_command", lambda folder, limit: python("raise SystemExit('broken')"))
    content = run.run()
    assert content["cases"]["W6"][OURS] is None and "no results: broken" in content["cases"]["W6"]["said"]


def test_the_command_is_kept(run: gpu_run.GpuRun) -> None:
    assert shlex.split(run.content["command"])[:2] == ["dev.py", "gpu"] and run.content["when"]
