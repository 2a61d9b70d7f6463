"""The wheel ``feather-kernels``: its content, and how an old or damaged one is treated."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from feather_kernels import build, prebuilt
from feather_kernels.build import Configuration
from feather_kernels.errors import BuildError
from feather_kernels.wheel import platform_tag
from kernel_wheel import ONE_KERNEL, PLANNER_ALONE, build_wheel, install, without_compilers

pytestmark = pytest.mark.slow
KERNEL = Configuration("float16", 64, 80)
PLAN = """
import numpy as np
from feather_kernels import Forest, Planner
table = np.arange(40, dtype=np.int32).reshape(2, 20)
table[1, :16] = table[0, :16]
forest = Forest.from_block_table(table, [20, 18], page_size=1)
print(Planner(8, 2, 64, max_requests=2, max_parts=64, n_sm=4).plan(forest).n_requests)
"""


def can_compile_kernels() -> bool:
    try:
        build.find_nvcc()
        build.cutlass_include()
    except BuildError:
        return False
    return True


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The planner, and one kernel where there is nvcc."""
    return build_wheel(tmp_path_factory.mktemp("wheel"), *(ONE_KERNEL if can_compile_kernels() else PLANNER_ALONE))


@pytest.fixture
def installed(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel's package, installed for this test alone; there is no compiler."""
    folder = install(wheel, tmp_path / "site")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("FEATHER_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    prebuilt._manifest.cache_clear()
    return folder / prebuilt.PACKAGE


def test_it_depends_on_tvm_ffi_alone_and_names_what_it_was_built_with(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
        manifest = json.loads(archive.read(f"{prebuilt.PACKAGE}/{prebuilt.MANIFEST}"))
    assert re.findall(r"^Requires-Dist: ([\w-]+)", metadata, re.MULTILINE) == ["apache-tvm-ffi"]
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    assert build.planner_file() in manifest["libraries"] and manifest["toolkit"]["c++"]
    assert (KERNEL.prebuilt in manifest["libraries"]) == can_compile_kernels()
    assert ("+cu" in wheel.name) == can_compile_kernels() == ("nvcc" in manifest["toolkit"])


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump of binutils")
def test_its_tag_is_that_of_the_newest_symbol_that_a_library_needs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    libraries = list(tmp_path.rglob("*.so"))
    needed = subprocess.run(["objdump", "-T", *map(str, libraries)], capture_output=True, text=True, check=True).stdout
    newest = max(map(int, re.findall(r"GLIBC_2\.(\d+)", needed)))
    assert wheel.stem.endswith(platform_tag(libraries))
    assert int(platform_tag(libraries).split("_")[2]) >= max(28, newest)


@pytest.mark.parametrize(
    ("names", "tag"),
    [
        (b"\0GLIBC_2.14\0GLIBCXX_3.4.21\0", "manylinux_2_28"),
        (b"\0GLIBC_2.34\0GLIBC_2.2.5\0", "manylinux_2_34"),
        (b"\0GLIBCXX_3.4.30\0", "manylinux_2_35"),
        (b"\0CXXABI_1.3.13\0", "manylinux_2_34"),
    ],
)
def test_the_tag_of_symbol_versions(names: bytes, tag: str, tmp_path: Path) -> None:
    (tmp_path / "a.so").write_bytes(names)
    assert platform_tag([tmp_path / "a.so"]).startswith(f"{tag}_")


def test_without_any_compiler_it_plans_and_the_doctor_is_healthy(wheel: Path, tmp_path: Path) -> None:
    site = install(wheel, tmp_path / "site")
    environment = {
        **os.environ, **without_compilers(site, tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH", "SGLANG_CRASH_ON_JIT_COMPILE"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, "-c", PLAN], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("2\n", "")
    command = [sys.executable, "-m", "feather_sglang.cli", "doctor", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, env=environment).stdout)
    assert report["healthy"] and prebuilt.DISTRIBUTION in report["kernels"]
    assert not (tmp_path / "cache").exists()
    shutil.rmtree(site)
    refused = subprocess.run([sys.executable, "-c", PLAN], capture_output=True, text=True, env=environment)
    assert refused.stderr.splitlines()[-1].startswith("feather_kernels.errors.BuildError: no C++ compiler")


@pytest.mark.parametrize("kernels", [(), (KERNEL.prebuilt,)], ids=["the planner alone", "a kernel"])
def test_without_a_gpu_the_doctor_says_where_its_kernels_would_come_from(
    kernels: tuple[str, ...], installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from feather_sglang.adapter import doctor

    manifest = prebuilt.Manifest("3.4.5", {}, dict.fromkeys((build.planner_file(), *kernels), "0"))
    (installed / prebuilt.MANIFEST).write_text(manifest.to_json())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def find_nvcc() -> str:
        raise BuildError("no nvcc")

    monkeypatch.setattr(build, "find_nvcc", find_nvcc)
    assert ("feather-kernels 3.4.5 with 1 kernels" in doctor._pat()) == bool(kernels)
    assert ("no nvcc" in doctor._pat()) == (not kernels)


def test_an_intact_one_is_used(installed: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert build.planner_library() == installed / build.planner_file()
    if can_compile_kernels():
        assert build.kernel_library(KERNEL) == installed / KERNEL.prebuilt
    assert build.load_planner.__wrapped__().plan and not caplog.records


def test_one_of_other_sources_is_not_used_and_one_line_says_so(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sources = shutil.copytree(build.source_dir(), tmp_path / "csrc")
    (sources / "heuristics.h").write_text((sources / "heuristics.h").read_text() + "\n")
    monkeypatch.setattr(build, "source_dir", lambda: sources)
    with pytest.raises(BuildError, match=r"^no C\+\+ compiler for the planner"):
        build.planner_library()
    (record,) = caplog.records
    assert "plan from other sources" in record.getMessage() and "\n" not in record.getMessage()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def turn_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        ("library", cut),
        ("library", turn_a_bit),
        ("library", Path.unlink),
        ("manifest", cut),
        ("manifest", Path.unlink),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_damaged_one_is_not_used_and_one_line_names_the_file(
    part: str, damage: object, installed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = installed / (build.planner_file() if part == "library" else prebuilt.MANIFEST)
    damage(file)  # type: ignore[operator]
    for _ in range(2):
        with pytest.raises(BuildError, match=r"^no C\+\+ compiler for the planner"):
            build.planner_library()
    lines = {record.getMessage() for record in caplog.records}
    assert len(lines) == 1 and "reinstall" in lines.pop()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"libraries": 3, "version": 1, "toolkit": {}}'])
def test_a_manifest_that_is_none_is_damaged(text: str, installed: Path) -> None:
    (installed / prebuilt.MANIFEST).write_text(text)
    assert prebuilt.find("plan", build.planner_file()) is None
    assert prebuilt.describe() == f"{prebuilt.DISTRIBUTION} is damaged"
