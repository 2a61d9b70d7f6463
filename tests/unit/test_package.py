"""The installed package: entry points, and no SGLang or torch where none is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import feather_sglang

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
    for command in ("ab", "train", "trace", "bench", "doctor"):
        assert f"    {command} " in shown


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
