"""Building libraries: their configuration, where they are found, and the error when something is missing."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from feather_kernels import build
from feather_kernels.build import Configuration, kernel_library
from feather_kernels.errors import BuildError
from feather_kernels.tiles import TILES

COMPILER = """#!{python}
import os, sys, time
if "--version" in sys.argv:
    print("release {release}")
    sys.exit()
open(__file__ + ".runs", "a").write("x")
end = time.monotonic() + {wait}
while time.monotonic() < end and not os.path.exists(__file__ + ".go"):
    time.sleep(0.02)
sys.stderr.write({stderr!r})
if {code}:
    sys.exit({code})
open(sys.argv[sys.argv.index("-o") + 1], "w").write(" ".join(sys.argv))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEATHER_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEATHER_KERNELS_PREBUILT", raising=False)
    headers = tmp_path / "cutlass" / "include" / "cute"
    headers.mkdir(parents=True)
    (headers / "tensor.hpp").touch()
    monkeypatch.setenv("CUTLASS_HOME", str(tmp_path / "cutlass"))
    build._version.cache_clear()
    return tmp_path / "cache"


def install_nvcc(
    folder: Path, monkeypatch, release: str = "13.0", code: int = 0, stderr: str = "", wait: float = 0
) -> Path:
    """A stand-in for nvcc that writes down what it was asked for, and an "x" beside itself for every run.

    With `wait`, each run takes so many seconds, or until there is a file ``nvcc.go`` beside it.
    """
    nvcc = folder / f"cuda-{release}" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    nvcc.write_text(COMPILER.format(python=sys.executable, release=release, code=code, stderr=stderr, wait=wait))
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parents[1]))
    return nvcc


def test_each_choice_reaches_the_compiler_and_the_file_name():
    base = Configuration("float16", 128, 90)
    others = [
        Configuration("bfloat16", 128, 90),
        Configuration("float16", 64, 90),
        Configuration("float16", 128, 80),
        Configuration("float16", 128, 90, soft_cap=True),
        Configuration("float16", 128, 90, tiles=(("hopper", 64, 32), ("hopper", 128, 32))),
        Configuration("float16", 128, 90, tiles=(("portable", 64, 64),)),
        Configuration("float16", 128, 90, sinks=True),
        Configuration("float16", 128, 90, soft_cap=True, sinks=True),
        Configuration("float16", 128, 90, fp8_kv=True),
        Configuration("float16", 128, 90, sinks=True, fp8_kv=True),
        Configuration("float16", 128, 90, causal=True),
    ]
    assert len({other.name for other in others}) == len({other.prebuilt for other in others}) == len(others)
    for other in others:
        assert other.flags != base.flags
        assert other.name != base.name and other.prebuilt != base.prebuilt
    assert "-DFEATHER_SOFT_CAP=1" in others[3].flags and "-DFEATHER_SOFT_CAP=0" in base.flags
    assert "-DFEATHER_SINKS=1" in others[6].flags and "-DFEATHER_SINKS=0" in base.flags
    assert "-DFEATHER_KV_FP8=1" in others[8].flags and "-DFEATHER_KV_FP8=0" in base.flags
    assert "-DFEATHER_CAUSAL=1" in others[10].flags and not any("CAUSAL" in flag for flag in base.flags)
    with pytest.raises(BuildError, match=r"^causal blocks need compute capability 9\.0, not 8\.0"):
        Configuration("float16", 128, 80, causal=True)
    assert others[7].name == "packed_decode_float16_d128_cap_sinks_sm90a"
    assert "-gencode=arch=compute_90a,code=sm_90a" in base.flags and "-DFEATHER_HOPPER=1" in base.flags
    assert {"-DFEATHER_HOPPER_64=32", "-DFEATHER_HOPPER_128=32"} < set(others[4].flags)
    assert others[4].name == "packed_decode_float16_d128_hopper64x32_hopper128x32_sm90a"
    assert "-DFEATHER_PORTABLE_64=64" in others[5].flags and not any("_64=" in flag for flag in base.flags)
    assert "-gencode=arch=compute_80,code=sm_80" in others[2].flags and "-DFEATHER_HOPPER=0" in others[2].flags


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("float32", 128, 90), "dtype float32 is not supported: use float16 or bfloat16"),
        (("float16", 96, 90), "head_dim 96 is not supported: use one of 64, 128, 256"),
        (
            ("float16", 128, 75),
            "compute capability 7.5 is not supported: these kernels are built for 8.0, 8.6, 8.9, 9.0, 10.0, 12.0",
        ),
        (
            ("float16", 128, 90, False, (), False, False, False, 64),
            "64 KB of shared memory: the kernels are built for 100, 164, 228",
        ),
    ],
)
def test_what_is_not_supported_is_said(arguments, message):
    with pytest.raises(BuildError) as error:
        Configuration(*arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "tiles",
    [
        (("hopper", 64, 64), ("hopper", 64, 32)),
        (("hopper", 64, 32), ("portable", 64, 64)),
    ],
)
def test_tiles_that_contradict_each_other_are_said(tiles):
    with pytest.raises(BuildError, match=r"^tiles are .*: give those of one path, and one n for each m$"):
        Configuration("float16", 128, 90, tiles=tiles)


def test_a_tile_that_is_built_anyhow_is_no_other_library():
    base = Configuration("float16", 128, 90)
    same = Configuration("float16", 128, 90, tiles=(("hopper", 128, 64), ("hopper", 64, 64)))
    assert (same.name, same.flags) == (base.name, base.flags)
    pair = (("hopper", 128, 32), ("hopper", 64, 32))
    assert len({Configuration("float16", 128, 90, tiles=tiles).prebuilt for tiles in (pair, pair[::-1])}) == 1


def test_with_an_fp8_cache_some_tiles_cannot_be_built():
    assert Configuration("float16", 64, 90, tiles=(("hopper", 64, 64),), fp8_kv=True).others == []
    for head_dim, tile in ((128, ("hopper", 64, 32)), (64, ("portable", 64, 64))):
        assert Configuration("float16", head_dim, 90, tiles=(tile,), fp8_kv=True).others == [tile]
    for head_dim, n in ((64, 128), (256, 32)):
        with pytest.raises(BuildError, match=f"^tile 64x{n}: for an fp8 KV cache there is another n at head_dim 128"):
            Configuration("float16", head_dim, 90, tiles=(("hopper", 64, n),), fp8_kv=True)


def test_a_hopper_tile_needs_a_hopper_gpu():
    with pytest.raises(BuildError, match=r"^tile 64x32: compute capability 8\.0 has no path 'hopper'$"):
        Configuration("float16", 128, 80, tiles=(("hopper", 64, 32),))


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (("hopper", 64, 128), "no tile 64x128 on the path 'hopper' at head_dim 128: n may be 32 or 64"),
        (("hopper", 16, 32), "no tile 16x32 on the path 'hopper' at head_dim 128: n may be 16"),
        (("hopper", 32, 32), "no tile 32x32 on the path 'hopper' at head_dim 128: m may be 8, 16, 64 or 128"),
    ],
)
def test_a_tile_that_cannot_be_built_is_said(tile, message):
    with pytest.raises(BuildError) as error:
        Configuration("float16", 128, 90, tiles=(tile,))
    assert str(error.value) == message


def test_the_macros_that_choose_n_are_those_of_the_source():
    """What the flags set, the source reads; without them it has what TILES has."""
    source = (build.source_dir() / "traits.h").read_text()
    tiles = [(path, m, n) for path, built in TILES.items() for m, n in built if m > 16]
    for path, m, n in tiles:
        macro = f"FEATHER_{path.upper()}_{m}"
        assert f"#ifndef {macro}\n#define {macro} {n}\n#endif\n" in source and source.count(macro) == 3
    assert len(re.findall("#ifndef FEATHER_(?:PORTABLE|HOPPER)_", source)) == len(tiles)


def test_the_command_builds_with_another_n(cache, tmp_path, monkeypatch, capsys):
    install_nvcc(tmp_path, monkeypatch)
    arguments = ["--dtype", "float16", "--head-dim", "128", "--tile", "hopper:128x32", "hopper:64x32"]
    assert build.main(arguments) == 0
    tiles = (("hopper", 64, 32), ("hopper", 128, 32))
    assert capsys.readouterr().out == f"{kernel_library(Configuration('float16', 128, 90, tiles=tiles))}\n"
    with pytest.raises(SystemExit):
        build.main(["--tile", "64x32"])
    assert "'64x32': give portable or hopper, and m x n, such as hopper:64x32" in capsys.readouterr().err


def test_a_library_is_compiled_once_and_again_for_another_toolkit(cache, tmp_path, monkeypatch):
    install_nvcc(tmp_path, monkeypatch)
    first = kernel_library(Configuration("float16", 64, 90))
    command = first.read_text()
    assert "packed_decode.cu" in command and "-DFEATHER_HEAD_DIM=64" in command
    first.write_text("kept")
    assert kernel_library(Configuration("float16", 64, 90)).read_text() == "kept"
    install_nvcc(tmp_path, monkeypatch, release="13.1")
    assert kernel_library(Configuration("float16", 64, 90)) != first


def test_an_edit_rebuilds_what_it_is_a_part_of_and_nothing_else(cache, tmp_path, monkeypatch):
    sources = shutil.copytree(build.source_dir(), tmp_path / "csrc")
    monkeypatch.setattr(build, "source_dir", lambda: sources)
    planner, kernels = sources / "planner" / "plan.cpp", sources / "packed_decode.cu"
    keys = {}
    for file in (None, "planner/rounds.h", "sm90/forward.cuh", "heuristics.h", "common/plan_buffer.h"):
        if file is not None:
            (sources / file).write_text((sources / file).read_text() + "\n")
        keys[file] = build._source_key(planner), build._source_key(kernels)
    (first, rounds, hopper, heuristics, buffer) = keys.values()
    assert rounds[0] != first[0] and rounds[1] == first[1]
    assert hopper[0] == rounds[0] and hopper[1] != rounds[1]
    assert heuristics[0] != hopper[0] and heuristics[1] != hopper[1]
    assert buffer[0] != heuristics[0] and buffer[1] != heuristics[1]


def test_every_source_is_part_of_a_library():
    sources = build.source_dir()
    files = {file for file in sources.rglob("*") if file.is_file()}
    roots = [file for file in files if file.suffix in (".cpp", ".cu")]
    assert set().union(*map(build._sources, roots)) == files


def test_a_failed_compilation_is_one_line_and_leaves_no_library(cache, tmp_path, monkeypatch):
    install_nvcc(tmp_path, monkeypatch, code=1, stderr="note\nmerge.cuh(7): error: expected a ;\nmore\n")
    with pytest.raises(BuildError, match=r"could not compile packed_decode.cu \(merge.cuh\(7\): error") as error:
        kernel_library(Configuration("float16", 64, 90))
    log = Path(str(error.value).rsplit(" ", 1)[1])
    assert "expected a ;" in log.read_text()
    assert not list(cache.glob("*.so"))


def test_where_nothing_may_be_compiled_the_cache_still_serves(cache, tmp_path, monkeypatch):
    nvcc = install_nvcc(tmp_path, monkeypatch)
    cached = kernel_library(Configuration("float16", 64, 90))
    monkeypatch.setenv("SGLANG_CRASH_ON_JIT_COMPILE", "True")
    assert kernel_library(Configuration("float16", 64, 90)) == cached
    with pytest.raises(BuildError, match=r"^SGLANG_CRASH_ON_JIT_COMPILE forbids compiling packed_decode_float16_d128_"):
        kernel_library(Configuration("float16", 128, 90))
    assert nvcc.with_name("nvcc.runs").read_text() == "x"
    monkeypatch.setenv("SGLANG_CRASH_ON_JIT_COMPILE", "0")
    assert kernel_library(Configuration("float16", 128, 90)).is_file()


def test_a_wheel_has_every_variant_that_there_is_and_the_flags_leave_some_out():
    def names(*flags: str) -> set[str]:
        return {one.name for one in build.variants(build.parser().parse_args(["--wheel", "x", *flags]))}

    every = names()
    assert len(every) == 2 * 3 * 8 * 3 + 1  # types, head dimensions, features; causal blocks on Hopper; latents
    hopper = names("--arch", "90", "--fp8-kv", "0")
    assert hopper < every and not any("fp8kv" in name or "sm80" in name for name in hopper)
    assert names("--arch") == set()
    with pytest.raises(BuildError, match=r"^causal blocks need compute capability 9\.0"):
        build.variants(build.parser().parse_args(["--arch", "80", "--causal", "1"]))


def start_build() -> subprocess.Popen[str]:
    """Another process that wants the library for float16 and 64, and says at once if it has to wait."""
    code = 'from feather_kernels import build; build.PATIENCE = 0; build.main("--dtype float16 --head-dim 64".split())'
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_runs(nvcc: Path, count: int) -> None:
    runs, end = nvcc.with_name("nvcc.runs"), time.monotonic() + 60
    while not runs.is_file() or len(runs.read_text()) < count:
        assert time.monotonic() < end, f"nvcc has not been run {count} times"
        time.sleep(0.02)


def test_one_process_compiles_and_others_wait_and_say_so(cache, tmp_path, monkeypatch):
    nvcc = install_nvcc(tmp_path, monkeypatch, wait=60)
    with start_build() as first:
        wait_for_runs(nvcc, 1)
        with start_build() as second:
            notice = second.stderr.readline()
            nvcc.with_name("nvcc.go").touch()
            answers = [process.communicate() for process in (first, second)]
    library = kernel_library(Configuration("float16", 64, 90))
    lock = library.with_suffix(".lock")
    assert notice == f"waiting for another process to compile {library.stem} (it holds {lock})\n"
    assert answers == [(f"{library}\n", "")] * 2 and first.returncode == second.returncode == 0
    assert nvcc.with_name("nvcc.runs").read_text() == "x"


def test_a_process_that_dies_compiling_leaves_the_work_to_the_next(cache, tmp_path, monkeypatch):
    nvcc = install_nvcc(tmp_path, monkeypatch, wait=60)
    with start_build() as first:
        wait_for_runs(nvcc, 1)
        with start_build() as second:
            assert "waiting" in second.stderr.readline()
            first.kill()
            wait_for_runs(nvcc, 2)  # while the dead one's compiler still runs
            nvcc.with_name("nvcc.go").touch()
            assert Path(second.communicate()[0].strip()) == kernel_library(Configuration("float16", 64, 90))


def test_a_library_that_is_there_needs_no_lock(cache, tmp_path, monkeypatch):
    """The cache may be read-only."""
    install_nvcc(tmp_path, monkeypatch)
    library = kernel_library(Configuration("float16", 64, 90))
    library.with_suffix(".lock").unlink()
    monkeypatch.setattr(build.fcntl, "flock", lambda *_: pytest.fail("locked"))
    assert kernel_library(Configuration("float16", 64, 90)) == library
    assert sorted(cache.iterdir()) == [library.with_suffix(".log"), library]


def test_without_locks_each_process_compiles(cache, tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOTSUP, "a file system without locks")

    install_nvcc(tmp_path, monkeypatch)
    monkeypatch.setattr(build.fcntl, "flock", flock)
    assert kernel_library(Configuration("float16", 64, 90)).is_file()


def test_without_nvcc_or_headers_the_message_says_what_to_do(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "find_nvcc", lambda: (_ for _ in ()).throw(BuildError("no nvcc")))
    with pytest.raises(BuildError, match="no nvcc"):
        kernel_library(Configuration("float16", 64, 90))
    monkeypatch.undo()
    monkeypatch.setenv("CUTLASS_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match="no CUTLASS headers: install flashinfer-python"):
        build.cutlass_include()


@pytest.mark.parametrize(("folder", "reason"), [("file/cache", "Not a directory"), ("x" * 300, "File name too long")])
def test_a_cache_that_cannot_be_written_is_named(cache, tmp_path, monkeypatch, folder, reason):
    install_nvcc(tmp_path, monkeypatch)
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEATHER_KERNELS_CACHE", str(tmp_path / folder))
    with pytest.raises(BuildError) as error:
        kernel_library(Configuration("float16", 64, 90))
    advice = "set FEATHER_KERNELS_CACHE to a folder that can be written"
    assert str(error.value) == f"cannot compile packed_decode.cu into {tmp_path / folder}: {reason}; {advice}"


def test_a_compiler_that_cannot_be_run_is_named(cache, monkeypatch):
    monkeypatch.setenv("CXX", "ccache g++")
    with pytest.raises(BuildError) as error:
        build.load_planner.__wrapped__()
    assert str(error.value) == "cannot run the compiler ccache g++: No such file or directory"


def test_a_library_that_cannot_be_loaded_is_named(cache, tmp_path, monkeypatch):
    library = tmp_path / Configuration("float16", 64, 90).prebuilt
    library.write_bytes(b"cut off")
    monkeypatch.setenv("FEATHER_KERNELS_PREBUILT", str(tmp_path))
    with pytest.raises(BuildError, match="file too short") as error:
        build.load_kernel.__wrapped__("float16", 64, 90)
    assert str(error.value).startswith(f"cannot load {library}: ") and "\n" not in str(error.value)


def test_a_library_in_the_current_folder_is_loaded(monkeypatch):
    build.load_planner()  # so that it is there
    monkeypatch.chdir(build.cache_dir())
    monkeypatch.setenv("FEATHER_KERNELS_CACHE", ".")
    assert build.load_planner.__wrapped__().plan


def test_the_cache_is_the_users_unless_named(tmp_path, monkeypatch):
    monkeypatch.delenv("FEATHER_KERNELS_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, folder in (("", tmp_path / ".cache"), (str(tmp_path / "xdg"), tmp_path / "xdg")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert build.cache_dir() == folder / "feather_kernels"


def test_a_user_without_a_home_must_name_the_cache(tmp_path, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("FEATHER_KERNELS_CACHE", str(tmp_path))
    assert build.cache_dir() == tmp_path
    monkeypatch.delenv("FEATHER_KERNELS_CACHE")
    with pytest.raises(BuildError, match="no home folder to cache libraries in: set FEATHER_KERNELS_CACHE to a folder"):
        build.cache_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / "feather_kernels"


def test_a_folder_for_copies_that_cannot_be_written_is_named(cache, tmp_path, monkeypatch, capsys):
    install_nvcc(tmp_path, monkeypatch)
    out = tmp_path / "file"
    out.touch()
    assert build.main(["--dtype", "float16", "--head-dim", "64", "--out", str(out)]) == 2
    library = out / Configuration("float16", 64, 90).prebuilt
    assert capsys.readouterr().err == f"feather_kernels.build: error: cannot write {library}: File exists\n"


def test_a_prebuilt_library_needs_no_compiler_and_is_used_only_for_its_own_sources_and_flags(
    cache, tmp_path, monkeypatch
):
    monkeypatch.setenv("CXX", str(install_nvcc(tmp_path, monkeypatch)))
    out = tmp_path / "out"
    assert build.main(["--dtype", "float16", "--head-dim", "64", "--out", str(out)]) == 0
    library = out / Configuration("float16", 64, 90).prebuilt
    assert library.is_file()
    monkeypatch.setenv("FEATHER_KERNELS_PREBUILT", str(out))
    monkeypatch.setattr(build, "find_nvcc", lambda: (_ for _ in ()).throw(BuildError("no nvcc")))
    monkeypatch.setattr(build, "find_cxx", lambda: pytest.fail("the planner is there"))
    assert build.planner_library() == out / build.planner_file()
    assert kernel_library(Configuration("float16", 64, 90)) == library
    assert build.main(["--dtype", "float16", "--head-dim", "64", "--out", str(out)]) == 0  # it is there already
    with pytest.raises(BuildError, match="no nvcc"):
        kernel_library(Configuration("float16", 64, 90, soft_cap=True))


def test_the_command_reports_a_mistake_without_a_traceback(tmp_path):
    environment = {**os.environ, "FEATHER_KERNELS_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "feather_kernels.build", "--head-dim", "96"]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert answer.returncode == 2 and "Traceback" not in answer.stderr
