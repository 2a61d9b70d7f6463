"""Compile the planner and the kernels: ahead of time (``python -m feather_kernels.build``) or at first use.

A library that was built ahead comes first (`prebuilt`), then the cache, then the compiler. It is cached by its sources,
its flags, the toolkit and the architecture, so that an edit, a new compiler or another GPU never meets a stale build.
Nothing is compiled at import, and nothing at all where ``SGLANG_CRASH_ON_JIT_COMPILE`` is set.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from feather_kernels import prebuilt
from feather_kernels.errors import BuildError
from feather_kernels.options import check_interface
from feather_kernels.paths import MOST_SHARED, SHARED_KB
from feather_kernels.tiles import built_tiles, n_choices, parse_tile

logger = logging.getLogger(__name__)

# Compute capability x 10 -> code generation target.
ARCHITECTURES = {80: "80", 86: "86", 89: "89", 90: "90a", 100: "100", 120: "120"}
PROVEN = (90,)  # those on whose GPUs the kernels were run
DTYPES = {"float16": "half", "bfloat16": "bfloat16"}
HEAD_DIMS = (64, 128, 256)
LATENT_DIM = 576  # columns of a latent, which are a key's
LATENT_VALUES = 512  # the first of them, which are the value's too; the others have positions
PATIENCE = 5.0  # seconds to wait for another process before saying so
NO_JIT = "SGLANG_CRASH_ON_JIT_COMPILE"  # SGLang's own: nothing may be compiled while it serves
AHEAD = "install feather-kernels, or set FEATHER_KERNELS_PREBUILT to what `python -m feather_kernels.build --out` made"
PLANNER, PLANNER_FLAGS = "plan", ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra")


def source_dir() -> Path:
    """Where the C++ sources lie: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "csrc", here.parent / "csrc"):
        if (folder / "packed_decode.cu").is_file():
            return folder
    raise BuildError(f"the C++ sources are missing beside {here}: reinstall feather-sglang")


def cache_dir() -> Path:
    """``$FEATHER_KERNELS_CACHE``, or a folder of the user's cache."""
    if given := os.environ.get("FEATHER_KERNELS_CACHE"):
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "feather_kernels"
    except RuntimeError:
        raise BuildError("no home folder to cache libraries in: set FEATHER_KERNELS_CACHE to a folder") from None


@functools.cache
def load_planner() -> Any:
    """The planner's module; needs no GPU, and a C++17 compiler at first use unless it was built ahead."""
    planner = _load(planner_library())
    check_interface(planner.interface())
    return planner


def planner_library() -> Path:
    """The path of the planner's library, compiled if it is not there yet."""
    return prebuilt.find(PLANNER, planner_file()) or compiled_planner()


def planner_file() -> str:
    """The file's name where it is built ahead."""
    return _built_ahead(PLANNER, _planner_source(), PLANNER_FLAGS)


def compiled_planner() -> Path:
    """The planner's library in the cache."""
    compiler = find_cxx()
    return _compile(PLANNER, _planner_source(), [compiler, *PLANNER_FLAGS], toolkit=_version(compiler))


def find_cxx() -> str:
    """The C++ compiler: ``$CXX``, then the PATH."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError(
            "no C++ compiler for the planner: install feather-kernels, which has it compiled, or g++ (13 or later is "
            "tested), or set CXX"
        )
    return compiler


def _planner_source() -> Path:
    return source_dir() / "planner" / "plan.cpp"


@functools.cache
def load_kernel(
    dtype: str,
    head_dim: int,
    capability: int,
    soft_cap: bool = False,
    tiles: tuple[tuple[str, int, int], ...] = (),
    sinks: bool = False,
    fp8_kv: bool = False,
    causal: bool = False,
    shared_kb: int = 0,
) -> Any:
    """The forward and merge kernels of one configuration.

    Parameters
    ----------
    dtype : {"float16", "bfloat16"}
    head_dim : {64, 128, 256, 576}
        576: of latents, in bfloat16 on compute capability 9.0, and with none of what follows.
    capability : int
        Compute capability times ten (90 for an H100 or H200).
    soft_cap : bool
        With a soft cap on the scores.
    tiles : tuple of (path, m, n)
        Tiles of one path to build with another n than `feather_kernels.tiles.TILES` has.
    sinks : bool
        With attention sinks.
    fp8_kv : bool
        For caches in e4m3 instead of ``dtype``.
    causal : bool
        For plans with causal blocks (``PlannerOptions.causal_tails``), on the Hopper path.
    shared_kb : int
        For processors with so much shared memory (``Device.limited_kb``), on the portable path; by default as much as
        those of the compute capability have.

    Raises
    ------
    BuildError
        Unsupported configuration or GPU, no library built ahead and no nvcc, missing headers, or a failed compilation.
    """
    features = soft_cap, tiles, sinks, fp8_kv, causal, shared_kb
    return _load(kernel_library(Configuration(dtype, head_dim, capability, *features)))


@dataclass(frozen=True)
class Configuration:
    """The configuration of one library of kernels (see `load_kernel`).

    Raises
    ------
    BuildError
        A dtype, head dimension, GPU or tile that the kernels do not support.
    """

    dtype: str
    head_dim: int
    capability: int
    soft_cap: bool = False
    tiles: tuple[tuple[str, int, int], ...] = ()
    sinks: bool = False
    fp8_kv: bool = False
    causal: bool = False
    shared_kb: int = 0

    def __post_init__(self) -> None:
        if self.shared_kb and self.shared_kb not in SHARED_KB.values():
            known = ", ".join(map(str, sorted(set(SHARED_KB.values()))))
            raise BuildError(f"{self.shared_kb} KB of shared memory: the kernels are built for {known}")
        if self.dtype not in DTYPES:
            raise BuildError(f"dtype {self.dtype} is not supported: use float16 or bfloat16")
        if self.head_dim == LATENT_DIM:
            return self._check_latent()
        if self.head_dim not in HEAD_DIMS:
            known = ", ".join(map(str, HEAD_DIMS))
            raise BuildError(f"head_dim {self.head_dim} is not supported: use one of {known}")
        _target(self.capability)
        if self.causal and not self.hopper:
            raise BuildError(f"causal blocks need compute capability 9.0, not {self.capability / 10:.1f}")
        if len({path for path, *_ in self.tiles}) > 1 or len({m for _, m, _ in self.tiles}) < len(self.tiles):
            raise BuildError(f"tiles are {self.tiles}: give those of one path, and one n for each m")
        for path, m, n in self.tiles:
            if path == "hopper" and not self.hopper:
                raise BuildError(f"tile {m}x{n}: compute capability {self.capability / 10:.1f} has no path 'hopper'")
            rows = tuple(other for other, _ in built_tiles(path, self.head_dim))
            which, have = ("n", n_choices(path, m, self.head_dim, self._shared)) if m in rows else ("m", rows)
            if m not in rows or n not in have:
                *others, last = map(str, have)
                raise BuildError(
                    f"no tile {m}x{n} on the path {path!r} at head_dim {self.head_dim}: {which} may be "
                    f"{', '.join(others) + ' or ' if others else ''}{last}"
                )
            other = (m, n) not in built_tiles(path, self.head_dim, self._shared)
            if self.fp8_kv and path == "hopper" and other and self.head_dim != 128:
                raise BuildError(f"tile {m}x{n}: for an fp8 KV cache there is another n at head_dim 128 only")

    def _check_latent(self) -> None:
        """Latent attention has one tile, one type and one GPU."""
        if self.dtype != "bfloat16":
            raise BuildError(f"latent attention in {self.dtype} is not supported: use bfloat16")
        if self.capability != 90:
            raise BuildError(f"latent attention needs compute capability 9.0, not {self.capability / 10:.1f}")
        features = {"soft_cap": self.soft_cap, "tiles": self.tiles, "sinks": self.sinks, "fp8_kv": self.fp8_kv}
        if asked := [name for name, value in features.items() if value]:
            raise BuildError(f"latent attention has no {' or '.join(asked)}")

    @property
    def _shared(self) -> int:
        return self.shared_kb or SHARED_KB[self.capability]

    @property
    def hopper(self) -> bool:
        """Whether it has the Hopper path, too."""
        return self.capability == 90 and not self.shared_kb

    @property
    def others(self) -> list[tuple[str, int, int]]:
        """The tiles with another n than they are built with by default."""
        tiles = ((path, m, n) for path, m, n in self.tiles)
        return sorted(tile for tile in tiles if tile[1:] not in built_tiles(tile[0], self.head_dim, self._shared))

    @property
    def name(self) -> str:
        """File name of its library, without what tells versions apart."""
        features = "_cap" * self.soft_cap + "_sinks" * self.sinks + "_fp8kv" * self.fp8_kv + "_causal" * self.causal
        tiles = "".join(f"_{path}{m}x{n}" for path, m, n in self.others)
        shared = f"_{self.shared_kb}kb" if self.shared_kb else ""
        return f"packed_decode_{self.dtype}_d{self.head_dim}{features}{tiles}{shared}_sm{_target(self.capability)}"

    @property
    def flags(self) -> list[str]:
        """nvcc's, but for include folders."""
        target = _target(self.capability)
        return [
            *("-std=c++17", "-O3", "--expt-relaxed-constexpr", "--use_fast_math", "-DNDEBUG", "-shared"),
            *("-Xcompiler=-fPIC", "-Xptxas=-v", f"-gencode=arch=compute_{target},code=sm_{target}"),
            f"-DFEATHER_HOPPER={int(self.hopper)}",
            f"-DFEATHER_DTYPE_{DTYPES[self.dtype].upper()}=1",
            f"-DFEATHER_HEAD_DIM={self.head_dim}",
            f"-DFEATHER_SOFT_CAP={int(self.soft_cap)}",
            f"-DFEATHER_SINKS={int(self.sinks)}",
            f"-DFEATHER_KV_FP8={int(self.fp8_kv)}",
            *(["-DFEATHER_LATENT=1"] if self.head_dim == LATENT_DIM else []),
            *(["-DFEATHER_CAUSAL=1"] if self.causal else []),
            *(f"-DFEATHER_{path.upper()}_{m}={n}" for path, m, n in self.others),
            *([f"-DFEATHER_SHARED_KB={self._shared}"] if self._shared != MOST_SHARED else []),
        ]

    @property
    def prebuilt(self) -> str:
        """The file's name where it is built ahead: it changes with the sources and the flags."""
        return _built_ahead(self.name, _source(), self.flags)


def _built_ahead(name: str, source: Path, flags: Sequence[str]) -> str:
    key = hashlib.sha256(" ".join([_source_key(source), *flags]).encode()).hexdigest()[:16]
    return f"{name}-{key}.so"


def kernel_library(configuration: Configuration) -> Path:
    """The path of one configuration's library, compiled if it is not there yet."""
    return prebuilt.find(configuration.name, configuration.prebuilt) or compiled_kernel(configuration)


def compiled_kernel(configuration: Configuration) -> Path:
    """One configuration's library in the cache."""
    compiler = find_nvcc()
    command = [compiler, *configuration.flags, f"-I{cutlass_include()}"]
    return _compile(configuration.name, _source(), command, toolkit=_version(compiler))


def _source() -> Path:
    return source_dir() / "packed_decode.cu"


@functools.cache
def load_memory_probe(capability: int) -> Any:
    """The kernel behind ``feather_kernels.tune.memory_probe``; compiled at first use."""
    target, compiler = _target(capability), find_nvcc()
    flags = ["-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC", f"-gencode=arch=compute_{target},code=sm_{target}"]
    source = source_dir() / "memory_probe.cu"
    return _load(_compile(f"memory_probe_sm{target}", source, [compiler, *flags], toolkit=_version(compiler)))


def find_nvcc() -> str:
    """The CUDA compiler: ``$CUDA_HOME/bin/nvcc``, then the PATH, then /usr/local/cuda."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places = [
        *(Path(home) / "bin" / "nvcc" for home in homes if home),
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
    ]
    for place in places:
        if place and Path(place).is_file():
            return str(place)
    raise BuildError(
        "no nvcc to compile the attention kernels: install feather-kernels, which has them compiled, or the CUDA "
        "toolkit (12.4 or later), set CUDA_HOME, or point FEATHER_KERNELS_PREBUILT at libraries built ahead with "
        "`python -m feather_kernels.build --out DIR`"
    )


def cutlass_include() -> Path:
    """CUTLASS and CuTe headers: ``$CUTLASS_HOME/include``, or those that flashinfer-python ships."""
    places = []
    if os.environ.get("CUTLASS_HOME"):
        places.append(Path(os.environ["CUTLASS_HOME"]) / "include")
    flashinfer = importlib.util.find_spec("flashinfer")
    if flashinfer and flashinfer.submodule_search_locations:
        places.append(Path(next(iter(flashinfer.submodule_search_locations))) / "data" / "cutlass" / "include")
    for place in places:
        if (place / "cute" / "tensor.hpp").is_file():
            return place
    raise BuildError("no CUTLASS headers: install flashinfer-python (it ships them) or set CUTLASS_HOME to a checkout")


def _target(capability: int) -> str:
    if capability in ARCHITECTURES:
        return ARCHITECTURES[capability]
    have = ", ".join(f"{key / 10:.1f}" for key in ARCHITECTURES)
    raise BuildError(f"compute capability {capability / 10:.1f} is not supported: these kernels are built for {have}")


@functools.cache
def _version(compiler: str) -> str:
    try:
        answer = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"cannot run the compiler {compiler}: {error.strerror}") from None
    if answer.returncode:
        raise BuildError(f"{compiler} --version failed: {answer.stderr.strip().splitlines()[-1:]}")
    return answer.stdout


def _sources(source: Path) -> set[Path]:
    """The files that a library is made of: its source, and what that includes of ours, however deep."""
    root, todo, files = source_dir(), [source], set[Path]()
    while todo:
        file = todo.pop()
        if file in files or not file.is_file():
            continue
        files.add(file)
        todo += [root / name for name in re.findall(r'^#include "(.+)"', file.read_text(), re.MULTILINE)]
    return files


def _source_key(source: Path) -> str:
    """A key of those files: an edit of any of them rebuilds the library."""
    digest = hashlib.sha256()
    for file in sorted(_sources(source)):
        digest.update(file.relative_to(source_dir()).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _compile(name: str, source: Path, command: list[str], toolkit: str) -> Path:
    """Compile one source to a shared library in the cache, unless it is there; returns its path."""
    flags = " ".join(word for word in command[1:] if not word.startswith("-I"))
    key = hashlib.sha256("\0".join((_source_key(source), flags, toolkit)).encode()).hexdigest()[:16]
    library = cache_dir() / f"{name}-{key}.so"
    try:
        if not library.is_file():  # else nothing is written: the cache may be read-only
            if os.environ.get(NO_JIT, "").lower() in ("1", "true", "yes", "y"):
                raise BuildError(f"{NO_JIT} forbids compiling {name}, which was not built ahead: {AHEAD}")
            library.parent.mkdir(parents=True, exist_ok=True)
            with _alone(library):
                if not library.is_file():  # nobody has compiled it meanwhile
                    _run_compiler(library, name, source, command)
    except OSError as error:
        raise BuildError(
            f"cannot compile {source.name} into {library.parent}: {error.strerror}; set FEATHER_KERNELS_CACHE to a "
            "folder that can be written"
        ) from None
    return library


def _run_compiler(library: Path, name: str, source: Path, command: list[str]) -> None:
    """Compile one source; the library appears whole or not at all, with its log beside it."""
    from tvm_ffi import libinfo

    ffi = Path(libinfo.find_libtvm_ffi())
    folders = (source_dir(), libinfo.find_include_path(), libinfo.find_dlpack_include_path())
    includes = [f"-I{folder}" for folder in folders]
    handle, scratch = tempfile.mkstemp(suffix=".so", prefix=name, dir=library.parent)
    os.close(handle)
    full = [*command, *includes, str(source), "-o", scratch, f"-L{ffi.parent}", "-ltvm_ffi"]
    try:
        answer = subprocess.run(full, capture_output=True, text=True)
        log = library.with_suffix(".log")
        log.write_text(" ".join(full) + "\n" + answer.stdout + answer.stderr)
        if answer.returncode:
            errors = [line for line in answer.stderr.splitlines() if "error" in line] or ["unknown error"]
            raise BuildError(f"could not compile {source.name} ({errors[0].strip()}); the full log is {log}")
        os.replace(scratch, library)  # whole or not at all: another process may be loading it
    finally:
        Path(scratch).unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(library: Path) -> Iterator[None]:
    """Let one process at a time compile a library: the ranks of a server all want it at once.

    The system takes the lock from a process that dies. Where a file cannot be locked, each compiles for itself.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            lock = held.enter_context(library.with_suffix(".lock").open("a"))
            notice = time.monotonic() + PATIENCE
            while not _locked(lock):
                if time.monotonic() >= notice:
                    logger.warning("waiting for another process to compile %s (it holds %s)", library.stem, lock.name)
                    notice = float("inf")
                time.sleep(0.1)
        yield


def _locked(lock: IO[str]) -> bool:
    """Take the lock if nobody has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _load(library: Path) -> Any:
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(library.absolute()))  # a bare name is looked up where the system's libraries lie
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BuildError(f"cannot load {library}: {reason}") from None


def _copied(library: Path, target: Path) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copyfile(library, target))
    except shutil.SameFileError:
        return target
    except OSError as error:
        raise BuildError(f"cannot write {target}: {error.strerror}") from None


# What a wheel has where nothing less is asked for; elsewhere the first of each, but all types and two head dimensions.
CHOICES: dict[str, tuple[Any, ...]] = {
    "arch": (90, 80), "dtype": tuple(sorted(DTYPES)), "head_dim": (*HEAD_DIMS, LATENT_DIM),
    "soft_cap": (0, 1), "sinks": (0, 1), "fp8_kv": (0, 1), "causal": (0, 1),
}  # fmt: skip


def variants(options: argparse.Namespace) -> list[Configuration]:
    """The configurations that the flags ask for; in a wheel, what no flag names stands for all that there are."""
    usual = {name: values[:1] for name, values in CHOICES.items()}
    usual |= {"dtype": CHOICES["dtype"], "head_dim": (64, 128)}
    asked = {name: getattr(options, name) for name in CHOICES}
    left_out = CHOICES if options.wheel else usual
    arch, dtype, head_dim, *features = (left_out[name] if asked[name] is None else asked[name] for name in CHOICES)
    made = []
    for kind, dim, capability, cap, sinks, fp8, causal in itertools.product(dtype, head_dim, arch, *features):
        flags = bool(cap), tuple(options.tile), bool(sinks), bool(fp8), bool(causal), options.shared_kb
        try:
            made.append(Configuration(kind, dim, capability, *flags))
        except BuildError:
            if not options.wheel:
                raise
    return [one for one in made if not (one.head_dim == LATENT_DIM and one.causal)]


def parser() -> argparse.ArgumentParser:
    """The flags of ``python -m feather_kernels.build``."""
    parser = argparse.ArgumentParser(
        prog="python -m feather_kernels.build", description=main.__doc__,
        epilog="With --wheel, what no flag names stands for all that there are.",
    )  # fmt: skip
    parser.add_argument(
        "--arch", type=int, nargs="*", choices=sorted(ARCHITECTURES), metavar="NN",
        help="compute capability times ten (default: 90); none: the planner alone",
    )  # fmt: skip
    parser.add_argument("--dtype", nargs="+", choices=sorted(DTYPES))
    parser.add_argument("--head-dim", type=int, nargs="+", choices=(*HEAD_DIMS, LATENT_DIM))
    for feature in ("soft-cap", "sinks", "fp8-kv", "causal"):
        parser.add_argument(f"--{feature}", type=int, nargs="+", choices=(0, 1), help="without, with, or both")
    parser.add_argument(
        "--shared-kb", type=int, default=0, choices=sorted({0, *SHARED_KB.values()}),
        help="shared memory of a processor that kernels keep to, to try them on a larger GPU (default: what it has)",
    )  # fmt: skip
    parser.add_argument(
        "--tile",
        nargs="+",
        type=parse_tile,
        default=[],
        metavar="PATH:MxN",
        help="a tile with another n, such as hopper:64x32",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="also copy the planner and the libraries here, for " + prebuilt.FOLDER
    )
    parser.add_argument("--wheel", type=Path, metavar="DIR", help="write the wheel feather-kernels of all of them here")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="libraries to compile at the same time")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Build ahead of time; prints each library's path."""
    options = parser().parse_args(arguments)
    os.environ.pop(NO_JIT, None)  # to compile is what this command is for
    try:
        configurations = variants(options)
        found, found_planner = (
            (compiled_kernel, compiled_planner) if options.wheel else (kernel_library, planner_library)
        )
        files = {}
        with ThreadPoolExecutor(max(1, options.jobs)) as pool:
            for configuration, library in zip(configurations, pool.map(found, configurations), strict=True):
                files[configuration.prebuilt] = _kept(library, configuration.prebuilt, options.out)
                print(files[configuration.prebuilt], flush=True)
        if options.out or options.wheel or not configurations:
            files[planner_file()] = _kept(found_planner(), planner_file(), options.out)
            print(files[planner_file()], flush=True)
        if options.wheel:
            print(_wheel(options.wheel, files, bool(configurations)))
    except BuildError as error:
        print(f"feather_kernels.build: error: {error}", file=sys.stderr)
        return 2
    return 0


def _kept(library: Path, name: str, out: Path | None) -> Path:
    return _copied(library, out / name) if out else library


def _wheel(folder: Path, files: dict[str, Path], kernels: bool) -> Path:
    """The wheel of these libraries, by the names that they have in it; its version names the CUDA of its kernels."""
    from feather_kernels.wheel import write_wheel

    try:
        version = importlib.metadata.version("feather-sglang")
    except importlib.metadata.PackageNotFoundError:
        raise BuildError("feather-sglang is not installed, whose version the wheel has: pip install it first") from None
    toolkit = {"c++": _version(find_cxx())}
    if kernels:
        toolkit["nvcc"] = _version(find_nvcc())
        release = re.search(r"release (\d+)\.", toolkit["nvcc"])
        version += f"+cu{release[1]}" if release else ""
    return write_wheel(folder, files, toolkit, version)


if __name__ == "__main__":
    sys.exit(main())
