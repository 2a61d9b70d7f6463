"""The installed package: entry points, and no SGLang or torch where none is needed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import feather_sglang
from feather_sglang.adapter import doctor
from feather_sglang.adapter.hooks import SUPPORTED
from feather_sglang.cli import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(feather_sglang.__file__).parent
HEAVY = {"sglang", "torch", "torchvision", "transformers"}


def imported_by(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").partition(".")[0])
    return names


def test_only_the_adapter_imports_sglang_or_torch() -> None:
    found = {
        str(file.relative_to(PACKAGE)): sorted(imported_by(file) & HEAVY)
        for file in PACKAGE.rglob("*.py")
        if "adapter" not in file.relative_to(PACKAGE).parts
    }
    assert {name: heavy for name, heavy in found.items() if heavy} == {}


def test_help_needs_neither_sglang_nor_torch() -> None:
    code = "import sys; from feather_sglang.cli import main\ntry: main(['--help'])\nfinally: print(sorted(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not any(f"'{name}'" in shown for name in HEAVY)
    for command in ("ab", "train", "trace", "bench", "explain-plan", "doctor"):
        assert [line for line in shown.splitlines() if line.split()[:1] == [command]]


def test_console_script_and_plugin_are_registered() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="feather")
    (plugin,) = metadata.entry_points(group="sglang.srt.plugins", name="feather")
    assert script.value == "feather_sglang.cli:main"
    assert plugin.value == "feather_sglang.adapter.plugin:register"
    assert metadata.version("feather-sglang") == feather_sglang.__version__


def test_a_users_mistake_is_one_line_and_status_2(tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"
    ended = subprocess.run(
        [sys.executable, "-m", "feather_sglang.cli", "ab", str(missing)], capture_output=True, text=True
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith("feather: error: ") and str(missing) in line


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which `feather doctor` finds no SGLang, and does not look for a GPU."""
    monkeypatch.setattr(doctor, "installed_version", lambda: None)
    monkeypatch.setattr(doctor, "_torch", lambda: ("none", "none"))
    monkeypatch.setattr(doctor, "_pat", lambda: "not available")
    monkeypatch.setenv("COLUMNS", "400")


@pytest.mark.usefixtures("bare")
def test_the_doctor_reads_the_policy_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p[red].json"
    path.write_text("{}")
    monkeypatch.setenv("FEATHER_OPTIONS", json.dumps({"policy_file": str(path)}))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert f"{path} is not a policy file" in shown
    assert f"because of sglang (feather supports {SUPPORTED[0]} to {SUPPORTED[-1]}), options: see above" in shown


@pytest.mark.usefixtures("bare")
def test_the_doctor_says_that_a_release_is_newer_than_the_tested_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda: "0.5.99")
    monkeypatch.setattr(doctor, "HOOKS", ())
    monkeypatch.delenv("FEATHER_OPTIONS", raising=False)
    main(["doctor"])
    assert f"0.5.99: sglang 0.5.99 is newer than {SUPPORTED[-1]}" in capsys.readouterr().out


@pytest.mark.usefixtures("bare")
def test_the_doctor_names_only_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda: SUPPORTED[0])
    monkeypatch.setattr(doctor, "HOOKS", ())
    monkeypatch.delenv("FEATHER_OPTIONS", raising=False)
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "not ready, because of activation: see above"


def package_table() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_package_of_the_checkout_is_installed() -> None:
    folders = {
        ".".join(file.parent.relative_to(base).parts)
        for base, name in ((ROOT, "feather_sglang"), (ROOT / "kernels", "feather_kernels"))
        for file in (base / name).rglob("__init__.py")
    }
    assert set(package_table()["packages"]) == folders | {"feather_kernels.csrc", "feather_sglang.patches"}


@pytest.mark.parametrize("package", ["feather_kernels", "feather_kernels.csrc", "feather_sglang", "feather_sglang.patches"])
def test_every_file_beside_the_python_modules_is_installed(package: str) -> None:
    table = package_table()
    folder = ROOT / table["package-dir"].get(package, package)
    ours = {file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    data = {file for pattern in table["package-data"][package] for file in folder.glob(pattern)}
    assert {file.name for file in ours - data if file.suffix != ".py"} == set()


def test_the_planner_needs_no_torch() -> None:
    code = (
        "import sys; import feather_kernels, feather_kernels.build, feather_kernels.tiles; print(sorted(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not any(f"'{name}'" in shown for name in HEAVY)
