"""``dev.py``: what it refuses, and that a finished step is not done again."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from feather_sglang.adapter.hooks import FEATURES, SUPPORTED

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def dev(tmp_path: Path) -> ModuleType:
    """dev.py of a copy of the checkout's set-up files, so that it makes its environment elsewhere."""
    shutil.copy(ROOT / "dev.py", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    spec = importlib.util.spec_from_file_location("dev_copy", tmp_path / "dev.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_dev(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(folder / "dev.py"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )


def test_a_step_is_done_once_per_key(dev: ModuleType) -> None:
    dev.VENV.mkdir()
    done = []
    for key in ("a", "a", "b", "b"):
        dev.step("environment", key, lambda key=key: done.append(key), "working")
    assert done == ["a", "b"]


def test_an_interrupted_step_is_done_again(dev: ModuleType) -> None:
    dev.VENV.mkdir()

    def fail() -> None:
        raise dev.SetupError("no network")

    with pytest.raises(dev.SetupError):
        dev.step("environment", "a", fail, "working")
    done = []
    dev.step("environment", "a", lambda: done.append("again"), "working")
    assert done == ["again"]


def test_the_key_follows_the_requirement_files(dev: ModuleType) -> None:
    pins = dev.REQUIREMENTS / "cpu.txt"
    before = dev.key_of("cpu", pins)
    pins.write_text(pins.read_text() + "# changed\n")
    assert dev.key_of("cpu", pins) != before


def test_the_supported_releases_are_those_with_pins(dev: ModuleType) -> None:
    assert dev.pinned_releases() == SUPPORTED
    for release in SUPPORTED:
        pins = (dev.REQUIREMENTS / f"cpu-{release}.txt").read_text().splitlines()
        assert f"sglang=={release}" in pins
        # An overlay hides what lies under it, so each names all that the releases pin apart from each other.
        assert [pin.partition("==")[0] for pin in pins[1:]] == ["openai", "sglang", "tokenizers", "transformers"]


def test_the_ends_of_the_supported_range_are_tested_by_default(dev: ModuleType) -> None:
    assert dev.RELEASES == (SUPPORTED[-1], SUPPORTED[0])
    numbers = [tuple(map(int, release.split("."))) for release in SUPPORTED]
    assert (dev.OLDEST, dev.NEWEST) == (numbers[0], numbers[-1])


def test_releases_to_test_on_can_be_named(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "has_gpu", lambda: False)
    arguments = ["--releases=0.5.22,0.5.17", "-k", "cht"]
    assert dev.chosen_releases(arguments) == ("0.5.22", "0.5.17") and arguments == ["-k", "cht"]
    assert dev.chosen_releases(arguments) == dev.RELEASES and arguments == ["-k", "cht"]
    ended = run_dev(dev.ROOT, "test", "--releases=0.5.22,0.5.9")
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert f"0.5.9: no pins for it in requirements/; there are {', '.join(SUPPORTED)}" in ended.stderr


def test_with_a_gpu_no_other_release_is_tested(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "has_gpu", lambda: True)
    with pytest.raises(dev.SetupError, match="with a GPU the installed SGLang is tested"):
        dev.chosen_releases(["--releases=0.5.17"])


FITS: dict[str, str | None] = dict.fromkeys(FEATURES.values())
DECIDED = {"rounds": 9, "failed": False}
PYTHON_OF_A_RELEASE = """#!{python}
import json, os, pathlib, sys
fake = json.loads(pathlib.Path({answers!r}).read_text())[os.environ.get("PYTHONPATH", "")[-6:] or {newest!r}]
if sys.argv[1] == "-c":  # the doctor
    print("a word of SGLang's")
    sys.exit(fake["doctor"]) if isinstance(fake["doctor"], str) else print(json.dumps(fake["doctor"], indent=2))
elif sys.argv[-2:] == ["patch", "check"]:
    sys.exit(print(fake["patches"]) or 1 if fake["patches"] else 0)
elif isinstance(fake["runs"], str):
    sys.exit(fake["runs"])
else:
    folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
    (folder / "results.json").write_text(json.dumps({{"runs": fake["runs"]}}))
"""


@pytest.mark.parametrize(
    ("gpu", "has_all", "set_up", "program"),
    [(True, True, [], "running"), (True, False, [1], "venv"), (False, False, [], "running")],
)
def test_a_gpu_is_checked_by_the_running_python_where_it_has_everything(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, gpu: bool, has_all: bool, set_up: list[int], program: str
) -> None:
    commands, done = [], []

    def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0 if gpu else 2)

    monkeypatch.setattr(dev.subprocess, "run", run)
    monkeypatch.setattr(dev, "has_all_for_gpu", lambda: has_all)
    monkeypatch.setattr(dev, "set_up", lambda releases: done.append(1))
    assert dev.run_gpu(["--time-limit", "300"]) == (0 if gpu else 2) and done == set_up
    checked = {"running": sys.executable, "venv": str(dev.python())}[program]
    assert commands[-1] == [checked, str(dev.CHECKS / "check_gpu.py"), "--time-limit", "300"]


@pytest.fixture
def releases(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What a Python of each release says, with no SGLang: all is well until a test changes it."""
    monkeypatch.setattr(dev, "has_gpu", lambda: False)
    monkeypatch.setattr(dev, "set_up", lambda releases: False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    answers = dev.ROOT / "answers.json"
    program = PYTHON_OF_A_RELEASE.format(python=sys.executable, answers=str(answers), newest=SUPPORTED[-1])
    dev.python().parent.mkdir(parents=True)
    dev.python().write_text(program)
    dev.python().chmod(0o755)

    class Fakes(dict[str, dict[str, Any]]):
        def write(self) -> None:
            answers.write_text(json.dumps(self))

    served = {"fcfs": {"requests": 30, "feather": None}, "feather": {"requests": 30, "feather": DECIDED}}
    return Fakes(
        {
            release: {"doctor": {"sglang": release, "features": FITS}, "runs": served, "patches": ""}
            for release in SUPPORTED
        }
    )


def tried(dev: ModuleType, fakes: Any, capsys: pytest.CaptureFixture[str], *asked: str) -> tuple[int, list[str]]:
    """Exit status and lines of ``dev.py versions``, without what it says meanwhile."""
    fakes.write()
    status = dev.run_versions(list(asked))
    return status, [line for line in capsys.readouterr().out.splitlines() if not line.startswith("dev.py: ")]


def test_all_releases_are_tried_and_one_table_tells(
    dev: ModuleType, releases: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dev.FEATURES == tuple(FEATURES.values())
    status, shown = tried(dev, releases, capsys)
    assert status == 0 and [line.split()[0] for line in shown] == ["release", *SUPPORTED]
    assert all(line.split()[1:-1] == ["yes"] * 6 for line in shown[1:])
    status, shown = tried(dev, releases, capsys, "0.5.22,0.5.18")
    assert status == 0 and [line.split()[0] for line in shown] == ["release", "0.5.22", "0.5.18"]


@pytest.mark.parametrize(
    ("doctor", "runs", "marks", "says"),
    [
        ("ImportError: no kernel", {}, "NO NO NO NO yes yes", "does not import: ImportError: no kernel"),
        ({"sglang": "0.5.23"}, {}, "NO NO NO NO yes yes", "does not import: sglang 0.5.23 was imported"),
        ({"features": {**FITS, "pat": "x: not found"}}, {}, "yes yes yes NO yes yes", "pat: x: not found"),
        ({}, "feather: error: it crashed", "yes yes yes yes NO yes", "does not start: feather: error: it crashed"),
        ({}, {"fcfs": {"requests": 29}}, "yes yes yes yes NO yes", "does not start: fcfs served 29 of 30 requests"),
        ({}, {"feather": {"feather": None}}, "yes yes yes yes NO yes", "does not start: feather decided nothing"),
        (
            {},
            {"feather": {"feather": {**DECIDED, "failed": True}}},
            "yes yes yes yes NO yes",
            "does not start: feather failed",
        ),
    ],
)
def test_what_does_not_work_on_a_release_is_marked_and_said(
    dev: ModuleType, releases: Any, capsys: pytest.CaptureFixture[str], doctor: Any, runs: Any, marks: str, says: str
) -> None:
    fake = releases["0.5.19"]
    fake["doctor"] = doctor if isinstance(doctor, str) else {**fake["doctor"], **doctor}
    if isinstance(runs, str):
        fake["runs"] = runs
    else:
        fake["runs"] = {policy: {**run, **runs.get(policy, {})} for policy, run in fake["runs"].items()}
    status, shown = tried(dev, releases, capsys, "0.5.19,0.5.23")
    assert status == 1 and len(shown) == 4
    assert shown[1].split()[1:-1] == marks.split() and shown[2].split()[1:-1] == ["yes"] * 6
    assert shown[3].startswith(f"0.5.19 {says}")


def test_patches_that_do_not_fit_are_said(dev: ModuleType, releases: Any, capsys: pytest.CaptureFixture[str]) -> None:
    releases["0.5.19"]["patches"] = "sglang 0.5.19: does not fit: a.py:3: has 'x' for 'y'"
    status, shown = tried(dev, releases, capsys, "0.5.19")
    assert status == 1 and shown[1].split()[1:-1] == [*["yes"] * 5, "NO"]
    assert shown[2] == "0.5.19 patches: sglang 0.5.19: does not fit: a.py:3: has 'x' for 'y'"


def test_versions_that_cannot_be_tried_are_refused(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, says in ((["0.5.22,0.5.9"], r"versions 0\.5\.9: no pins"), (["0.5.22", "0.5.21"], "one list")):
        with pytest.raises(dev.SetupError, match=says):
            dev.run_versions(arguments)
    monkeypatch.setattr(dev, "has_gpu", lambda: True)
    with pytest.raises(dev.SetupError, match="with a GPU the installed SGLang is tested"):
        dev.run_versions(["0.5.22"])


def test_a_wrong_python_is_refused_in_one_line(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "CPU_PYTHON", (3, 99))
    with pytest.raises(dev.SetupError, match=r"needs python3\.99 .* is on the PATH: install it and run again"):
        dev.cpu_python()


@pytest.mark.slow
def test_no_network_is_one_clear_line(dev: ModuleType) -> None:
    # A pip that finds no index stands for a machine without a network.
    ended = run_dev(dev.ROOT, "setup", PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull)
    assert ended.returncode == 2
    assert "check the network or pip's own configuration" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_an_unknown_job_is_refused(dev: ModuleType) -> None:
    ended = run_dev(dev.ROOT, "tset")
    assert ended.returncode == 2
    assert "invalid choice: 'tset'" in ended.stderr
