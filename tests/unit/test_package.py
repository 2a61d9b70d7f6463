"""The installed package: entry points, and no SGLang or torch where none is needed."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import feather_sglang
from feather_sglang.adapter import doctor, hooks
from feather_sglang.adapter.hooks import SUPPORTED, Hook
from feather_sglang.cli import main
from feather_sglang.errors import FeatherError

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
    for command in ("ab", "train", "trace", "explain-plan", "doctor"):
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


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("name", ["\u00e9\u8de1", os.fsdecode(b"\xff"), "plain"], ids=ascii)
def test_any_name_can_be_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, name: str) -> None:
    """Strict outputs are those of a terminal or pipe with a locale, or PYTHONIOENCODING, of that encoding."""
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "make", "--requests", "3", "--out", f"{name}.jsonl"]) == 0
    for words, status in ((["trace", "inspect", f"{name}.jsonl"], 0), (["trace", "inspect", f"{name}.none"], 2)):
        shown = io.BytesIO()
        for stream in ("stdout", "stderr"):
            monkeypatch.setattr(sys, stream, io.TextIOWrapper(shown, encoding, errors="strict", write_through=True))
        assert main(words) == status
        assert name.encode(encoding, errors="backslashreplace") in shown.getvalue()


def pretend(monkeypatch: pytest.MonkeyPatch, version: str | None, *table: Hook) -> None:
    """Have the doctor see that SGLang, and check these hooks only."""
    for module in (doctor, hooks):
        monkeypatch.setattr(module, "installed_version", lambda: version)
        monkeypatch.setattr(module, "HOOKS", table)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which `feather doctor` finds no SGLang, and does not look for a GPU."""
    pretend(monkeypatch, None)
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
    pretend(monkeypatch, "0.5.99")
    monkeypatch.delenv("FEATHER_OPTIONS", raising=False)
    main(["doctor"])
    assert f"0.5.99: sglang 0.5.99 is newer than {SUPPORTED[-1]}" in capsys.readouterr().out


@pytest.mark.usefixtures("bare")
def test_the_doctor_names_only_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, SUPPORTED[0])
    monkeypatch.delenv("FEATHER_OPTIONS", raising=False)
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "not ready, because of activation: see above"


GEMMA = {  # as it is published: what it leaves out is what its kind has by default
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024,
    },
}  # fmt: skip


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("gpu", "changed", "pat", "rest", "flags"),
    [
        ("h100", {}, "served: packs 5 of 34 attention layers", "leaves 29 layers (sliding w", "feather --decode"),
        ("9.0", {"text_config": {**GEMMA["text_config"], "layer_types": ["full_attention"] * 34}},
         "served: packs 34 of 34", "leaves no layer", "feather --decode"),
        ("RTX 4090", {}, "not served: the pat backend was not run", "SGLang's own", "feather"),
        ("a100", {"model_type": "x", "text_config": {"kv_lora_rank": 512, "qk_rope_head_dim": 64,
         "num_attention_heads": 8, "num_hidden_layers": 2}},
         "not served: the pat backend was not run", "SGLang's own", "feather"),
        (None, {}, "not served: not available", "SGLang's own", "feather"),
    ],
)  # fmt: skip
def test_five_lines_for_a_model_and_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    gpu: str | None, changed: dict[str, Any], pat: str, rest: str, flags: str,
) -> None:  # fmt: skip
    pretend(monkeypatch, SUPPORTED[-1], FITS)
    monkeypatch.delenv("FEATHER_OPTIONS", raising=False)
    (tmp_path / "config.json").write_text(json.dumps(GEMMA | changed))
    for path in (tmp_path, tmp_path / "config.json"):
        assert main(["doctor", "--model", str(path), *(["--gpu", gpu] if gpu else [])]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["sglang", "policy", "pat", "rest", "flags"]
        assert lines[1].split()[1:] == ["served"] and lines[2].startswith(f"pat     {pat}")
        assert lines[3].startswith(f"rest    {rest}") and lines[4].startswith(f"flags   --schedule-policy {flags}")
        assert ("pat" in lines[4]) == (": packs" in lines[2])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "{}/none"], "No such file or directory; name a model's folder or its config.json"),
        (["--model", "{}"], "config.json: not a model's configuration (ValueError('not a JSON object'))"),
        (["--gpu", "voodoo2"], "--gpu 'voodoo2': not known; give one of h200, h100"),
    ],
)
def test_the_doctor_is_asked_for_what_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    (tmp_path / "config.json").write_text("[]")
    assert main(["doctor", *(word.format(tmp_path) for word in words)]) == 2
    assert says in capsys.readouterr().err


# Functions of the standard library stand for SGLang's.
FITS = Hook("json.loads", "calls", ("s",), "reads")
MOVED = Hook("json.no_such_name", "start", (), "starts", part="switch")
LACKS = Hook("json.dumps", "calls", ("obj", "layer"), "writes a step's KV", part="pat")
BROKEN = Hook("json.load", "scheduler", ("fp", "queue"), "an admission round opens")


def examined(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], list[str]]:
    """Exit status, report and lines of ``feather doctor``."""
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert main(["doctor", "--verbose"]) == status
    return status, report, capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("bare")
def test_the_doctor_says_what_a_newer_release_lacks_and_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, "0.5.99", FITS, MOVED, LACKS)
    monkeypatch.delenv("FEATHER_OPTIONS", raising=False)
    status, report, shown = examined(capsys)
    assert status == 0 and report["healthy"]  # the policies fit, and the rest was not asked for
    assert [hook["features"] for hook in report["hooks"] if hook["problem"]] == [["switching"], ["pat"]]
    features = report["features"]
    assert list(features) == ["policies", "switching", "pat"] and features["policies"] is None
    for feature, hook in (("switching", MOVED), ("pat", LACKS)):
        assert features[feature].startswith(f"sglang 0.5.99 is newer than {SUPPORTED[-1]}")
        assert features[feature].endswith(f"{hooks.mismatch(hook)} (for: {hook.purpose})")
        place = next(number for number, line in enumerate(shown) if line.startswith(f"differs {hook.target}"))
        assert shown[place + 1].endswith(hook.purpose)
        assert shown[place + 2].strip() == f"without it no {feature}: {hooks.mismatch(hook)}"
    assert shown[2] == f"pat     not served: {features['pat']}"
    assert {line for line in shown if line.startswith("policies ")} >= {"policies    all hooks fit"}


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("version", ["0.5.99", "0.6.0", SUPPORTED[-1]])
def test_the_doctor_and_a_refused_start_say_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    pretend(monkeypatch, version, FITS, BROKEN, MOVED, LACKS)
    status, report, shown = examined(capsys)
    assert status == 1 and "hooks" in report["problems"]
    for part, feature in hooks.FEATURES.items():
        with pytest.raises(FeatherError) as refused:
            hooks.require_fit("--flag", part)
        assert str(refused.value) == f"this SGLang does not fit --flag: {report['features'][feature]}"
        assert f"{feature:12}{report['features'][feature]}" in shown
    # A number that is refused hides no hook.
    assert sum(line.startswith("differs ") for line in shown) == 3


def test_a_hook_that_several_features_need_counts_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, SUPPORTED[-1], BROKEN._replace(also=("switch",)))
    assert [bool(hooks.misfit(part)) for part in hooks.FEATURES] == [True, True, False]


def test_a_refusal_stays_one_line_however_much_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, SUPPORTED[-1], *[BROKEN] * 9)
    reason = hooks.misfit()
    assert reason is not None and reason.count(BROKEN.purpose) == hooks.SHOWN and "and 6 more" in reason
    pretend(monkeypatch, SUPPORTED[-1], FITS)
    assert hooks.misfit() is None and hooks.require_fit("--flag") is None
    pretend(monkeypatch, None, FITS)
    assert hooks.misfit() == "SGLang is not installed"


def package_table() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_package_of_the_checkout_is_installed() -> None:
    folders = {
        ".".join(file.parent.relative_to(base).parts)
        for base, name in ((ROOT, "feather_sglang"), (ROOT / "kernels", "feather_kernels"))
        for file in (base / name).rglob("__init__.py")
    }
    assert set(package_table()["packages"]) == folders | {"feather_kernels.csrc", "feather_sglang.patches"}


PACKAGES = ["feather_kernels", "feather_kernels.csrc", "feather_sglang", "feather_sglang.patches"]


@pytest.mark.parametrize("package", PACKAGES)
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
