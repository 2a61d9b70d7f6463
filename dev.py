#!/usr/bin/env python3
"""Set up what a fresh clone needs, then do one job: ``python3 dev.py ab``, ``test``, ``gpu``, ``docs`` and others.

Needs nothing but Python's standard library. Everything goes into ``.venv`` beside this file: without a GPU the pinned
packages of ``requirements/``, with one the SGLang that this Python already has, or else the newest supported release.
The second run finds its stamps and starts at once.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
REQUIREMENTS = ROOT / "requirements"
# Tested by default, the ends of the supported range: the first is installed, the other lies beside it.
RELEASES = ("0.5.23", "0.5.17")
TESTED = "FEATHER_TESTED_SGLANG"  # tells the tests which release they must find
FULL = "FEATHER_TESTS_FULL"  # tells the tests to try all samples of their sweeps (tests/effort.py)
QUICK = "--quick"  # before pytest's arguments: the inner loop's tests, on the first release only
# Two processes, each file in one of them, in the order of tests/conftest.py.
PROCESSES = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
INNER_LOOP = ["-m", "not slow", "tests/unit", "tests/property", "tests/kernels"]
ONLY = "--releases="  # before pytest's arguments: test on these instead, of those that have pins in requirements/
NEWEST, OLDEST = (tuple(map(int, release.split("."))) for release in RELEASES)
JOBS = {
    "ab": "compare scheduling policies (feather ab, with its arguments)",
    "test": f"run the tests ([{QUICK}] [{ONLY}A,B] and pytest's arguments)",
    "full": f"the same with all samples, and everything on each release ([{ONLY}A,B] and pytest's arguments)",
    "gpu": "see whether a machine with a Hopper GPU serves as the performance page says (see gpu --help)",
    "sanitize": "make 28,000 plans under the address and undefined-behaviour sanitizers (see sanitize --help)",
    "fuzz": "give damaged input to whatever feather reads, a million in all (see fuzz --help)",
    "soak": "let 20,000 requests come, go and be aborted on a server on the CPU (see soak --help)",
    "ranks": "let two schedulers whose clocks differ form the same batches, 10,000 rounds (see ranks --help)",
    "versions": "try SGLang releases ([A,B]; all supported ones) and print what works on each",
    "docs": "serve the documentation site (mkdocs serve's arguments); --build: build it strictly into build/site",
    "setup": "set up only",
}
FAULTS = ("fuzz", "soak", "ranks")  # programs of tests/faults
CHECKS = ROOT / "benchmarks" / "checks"
# What the checks on a GPU import besides SGLang: a Python that has all of it needs no set-up and no network.
GPU_MODULES = ("hypothesis", "numpy", "prometheus_client", "pytest", "rich", "torch", "tvm_ffi", "xxhash")
FEATURES = ("policies", "switching", "pat")  # as `feather doctor` calls them
# What one release is tried with: every hook against it, then its own scheduler under a policy of feather's and its own.
# An SGLang that does not import ends the first with its own error.
DOCTOR = """
import sys
from feather_sglang.adapter import cpu_shims
cpu_shims.install()
import sglang.srt.managers.scheduler
from feather_sglang.cli import main
sys.exit(main(["doctor", "--json"]))
"""
SMOKE_POLICIES, SMOKE_REQUESTS = ("fcfs", "feather"), 30
SMOKE = ["--groups", "3", "--prefix-tokens", "200", "--output-tokens", "8", "--rate", "100"]
LARGE = ("torch", "triton")  # among those pins
CPU_PYTHON = (3, 11)  # the Python that the pins in requirements/ were made for


class SetupError(Exception):
    """What went wrong and what to do, in one line."""


def say(text: str) -> None:
    print(f"dev.py: {text}", flush=True)


def has_gpu() -> bool:
    """Whether this machine shows an NVIDIA GPU that this process may use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return False
    if shutil.which("nvidia-smi") is None:
        return False
    seen = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return seen.returncode == 0 and "GPU" in seen.stdout


def installed_sglang() -> str | None:
    """The supported SGLang that the running Python imports, if any."""
    code = "import importlib.metadata as m, sglang; print('version', m.version('sglang'))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    found = re.search(r"^version (\d+)\.(\d+)\.(\d+)", answer.stdout, re.MULTILINE)
    if answer.returncode or not found:
        return None
    version = tuple(int(part) for part in found.groups())
    return ".".join(map(str, version)) if OLDEST <= version <= NEWEST else None


def cpu_python() -> str:
    """A Python of the release that the pins need, able to make virtual environments."""
    name = f"python{CPU_PYTHON[0]}.{CPU_PYTHON[1]}"
    for candidate in (sys.executable, shutil.which(name)):
        check = f"import sys, venv, ensurepip; raise SystemExit(sys.version_info[:2] != {CPU_PYTHON})"
        if candidate and subprocess.run([candidate, "-c", check], capture_output=True).returncode == 0:
            return candidate
    raise SetupError(
        f"without a GPU this needs {name} with its venv module; this is Python {platform.python_version()}, "
        f"and no usable {name} is on the PATH: install it and run again"
    )


def environment(**extra: str) -> dict[str, str]:
    """The environment of every command that is run here."""
    variables = {**os.environ, **extra}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # without .pyc files SGLang takes three times as long to start
    return variables


def run(command: list[str], mistake: str, **extra: str) -> None:
    """Run a step of the set-up, or end with the one line that says what failed."""
    if subprocess.run(command, cwd=ROOT, env=environment(**extra)).returncode:
        raise SetupError(mistake)


def pip_install(*arguments: str) -> None:
    """Install without compiling: of all that is installed a small part is ever imported, and compiled then."""
    options = ["--no-input", "--disable-pip-version-check", "--no-compile"]
    quiet = [] if sys.stdout.isatty() else ["-qq"]
    what = " ".join(word for word in arguments if not word.startswith("--"))
    run(
        [str(python()), "-m", "pip", "install", *options, *quiet, *arguments],
        f"pip could not install {what}: see above; check the network or pip's own configuration, then run again",
    )


def python() -> Path:
    return VENV / "bin" / "python"


def overlay(release: str) -> Path:
    """Where another SGLang release lies, ahead of the environment's own when it is on PYTHONPATH."""
    return VENV / f"sglang-{release}"


def beside(release: str) -> dict[str, str]:
    """The environment variables under which Python imports that release, of those that are installed."""
    return {} if release == RELEASES[0] else {"PYTHONPATH": str(overlay(release))}


def key_of(*parts: object) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.read_bytes() if isinstance(part, Path) else str(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def step(name: str, key: str, work: Callable[[], None], text: str) -> None:
    """Do a step of the set-up unless its stamp in the environment holds the same key."""
    stamp = VENV / f"stamp-{name}"
    if stamp.is_file() and stamp.read_text() == key:
        return
    say(text)
    begun = time.monotonic()
    work()
    stamp.write_text(key)
    say(f"done in {time.monotonic() - begun:.0f} s")


def make_venv(base: str, *options: str) -> None:
    run([base, "-m", "venv", "--clear", *options, str(VENV)], f"{base} could not make a virtual environment in {VENV}")


def set_up_without_gpu(releases: tuple[str, ...]) -> None:
    """The pinned packages and the first release in ``.venv``; the other releases as overlays."""
    files = [REQUIREMENTS / name for name in ("cpu.txt", "dev.txt", f"cpu-{RELEASES[0]}.txt")]

    def install() -> None:
        make_venv(cpu_python())
        # Unpacking takes most of the time, and half of it goes to two packages; all that they need is pinned, too.
        pins = [line for file in files for line in file.read_text().splitlines() if not line.startswith("#")]
        large = [pin for pin in pins if pin.partition("==")[0] in LARGE]
        others = VENV / "pins.txt"
        others.write_text("\n".join(pin for pin in pins if pin not in large) + "\n")
        groups = [*([pin] for pin in large), ["-r", str(others)]]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda group: pip_install("--no-deps", *group), groups))

    key = key_of("cpu", str(ROOT), *files)
    step("environment", key, install, f"no GPU: installing SGLang {RELEASES[0]} for the CPU into .venv (2.6 GB)")
    for release in releases:
        if release == RELEASES[0]:
            continue
        pins = REQUIREMENTS / f"cpu-{release}.txt"

        def add(release: str = release, pins: Path = pins) -> None:
            shutil.rmtree(overlay(release), ignore_errors=True)
            pip_install("--no-deps", "--target", str(overlay(release)), "-r", str(pins))

        step(f"sglang-{release}", key + key_of(pins), add, f"adding SGLang {release} beside it (0.3 GB)")


def set_up_with_gpu() -> None:
    """The SGLang of the running Python, seen through ``.venv``; or a full installation of the newest release."""
    present = installed_sglang()

    def install() -> None:
        if present is None:
            make_venv(sys.executable)
            pip_install(f"sglang=={RELEASES[0]}")
            return
        make_venv(sys.executable, "--system-site-packages")
        if sys.prefix != sys.base_prefix:  # --system-site-packages looks past a virtual environment to its base
            site = next((VENV / "lib").glob("python*/site-packages"))
            (site / "outer_environment.pth").write_text("\n".join(p for p in sys.path if "site-packages" in p) + "\n")

    source = f"using SGLang {present} of {sys.executable}" if present else f"installing SGLang {RELEASES[0]}"
    step("environment", key_of("gpu", str(ROOT), sys.executable, present), install, f"GPU found: {source}")


def install_package(gpu: bool) -> None:
    """Our own package, editable, and the file that lets SGLang start where it finds no GPU."""

    def install() -> None:
        check = "import setuptools; raise SystemExit(int(setuptools.__version__.split(chr(46))[0]) < 77)"
        has_setuptools = subprocess.run([str(python()), "-c", check], capture_output=True)
        isolation = ["--no-build-isolation"] if has_setuptools.returncode == 0 else []
        if gpu:
            pip_install(*isolation, "--editable", ".[test]")
        else:
            pip_install(*isolation, "--no-deps", "--editable", ".")
        run([str(python()), "-m", "feather_sglang.adapter.cpu_shims"], "could not prepare .venv for SGLang on a CPU")

    # The environment's stamp is part of the key: a new environment has no package yet.
    key = key_of(VENV / "stamp-environment", ROOT / "pyproject.toml")
    step("package", key, install, "installing feather-sglang into .venv")


def install_docs() -> None:
    """What the documentation site is built with."""
    pins = REQUIREMENTS / "docs.txt"
    key = key_of(VENV / "stamp-environment", pins)
    step("docs", key, lambda: pip_install("-r", str(pins)), "adding what the documentation is built with (0.2 GB)")


def set_up(releases: tuple[str, ...]) -> bool:
    """Bring ``.venv`` up to date; returns whether there is a GPU."""
    gpu = has_gpu()
    if gpu:
        set_up_with_gpu()
    else:
        set_up_without_gpu(releases)
    install_package(gpu)
    return gpu


def run_ab(arguments: list[str]) -> int:
    set_up(RELEASES[:1])
    return subprocess.run([str(VENV / "bin" / "feather"), "ab", *arguments], env=environment()).returncode


def has_all_for_gpu() -> bool:
    """Whether the running Python has SGLang and whatever else the checks on a GPU import."""
    return all(map(importlib.util.find_spec, GPU_MODULES)) and installed_sglang() is not None


def run_gpu(arguments: list[str]) -> int:
    """Check a Hopper GPU, with .venv's Python where the running one lacks something; without one the check refuses."""
    program = sys.executable
    found = subprocess.run([program, str(CHECKS / "gpu_found.py")], capture_output=True).returncode == 0
    if found and not has_all_for_gpu():
        set_up(RELEASES[:1])
        program = str(python())
    return subprocess.run([program, str(CHECKS / "check_gpu.py"), *arguments], env=environment()).returncode


def pinned_releases() -> tuple[str, ...]:
    """The SGLang releases that have pins in ``requirements/``, oldest first."""
    found = (file.stem.removeprefix("cpu-") for file in REQUIREMENTS.glob("cpu-*.txt"))
    return tuple(sorted(found, key=lambda release: tuple(map(int, release.split(".")))))


def refuse_gpu(asked: str) -> None:
    """Refuse other releases than the one that a GPU's environment has."""
    if has_gpu():
        raise SetupError(f"{asked}: with a GPU the installed SGLang is tested; hide it (CUDA_VISIBLE_DEVICES=)")


def check_pinned(releases: tuple[str, ...], flag: str = "") -> None:
    """Refuse, in one line, releases that have no pins."""
    pinned = pinned_releases()
    if unknown := [release for release in releases if release not in pinned]:
        raise SetupError(f"{flag}{','.join(unknown)}: no pins for it in requirements/; there are {', '.join(pinned)}")


def chosen_releases(arguments: list[str]) -> tuple[str, ...]:
    """The SGLang releases to test on; takes the flag for them off the arguments."""
    if not arguments or not arguments[0].startswith(ONLY):
        return RELEASES
    refuse_gpu(arguments[0])
    chosen = tuple(arguments.pop(0).removeprefix(ONLY).split(","))
    check_pinned(chosen, ONLY)
    return chosen


class Tried(NamedTuple):
    """What became of one SGLang release; ``problems`` says why something is not right, a line each."""

    release: str
    imports: bool
    features: dict[str, bool]  # whether the hooks of each fit
    starts: bool
    patches: bool  # whether the series of patches/ fits
    seconds: float
    problems: list[str]

    @property
    def works(self) -> bool:
        """Whether everything does."""
        return self.imports and all(self.features.values()) and self.starts and self.patches


def look_at_hooks(release: str) -> tuple[dict[str, str | None] | None, str]:
    """Why each feature does not fit the release, None where it does; or None and why that could not be found out."""
    command = [str(python()), "-c", DOCTOR]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(CUDA_VISIBLE_DEVICES="", **beside(release))
    )
    start = done.stdout.find("{")
    if start < 0:
        return None, done.stderr.strip().rpartition("\n")[2]
    report = json.loads(done.stdout[start:])
    if report["sglang"] != release:
        return None, f"sglang {report['sglang']} was imported"
    return report["features"], ""


def start_and_serve(release: str) -> str | None:
    """Start the release's scheduler under each policy and serve some requests; what went wrong, or None."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*SMOKE, "--requests", str(SMOKE_REQUESTS), "--policies", ",".join(SMOKE_POLICIES), "--out", folder]
        done = subprocess.run(
            [str(python()), "-m", "feather_sglang.cli", "ab", *flags],
            capture_output=True,
            text=True,
            env=environment(CUDA_VISIBLE_DEVICES="", **beside(release)),
        )
        if done.returncode:
            return done.stderr.strip().rpartition("\n")[2]
        runs: dict[str, Any] = json.loads((Path(folder) / "results.json").read_text())["runs"]
    for policy, result in runs.items():
        if result["requests"] != SMOKE_REQUESTS:
            return f"{policy} served {result['requests']} of {SMOKE_REQUESTS} requests"
    decided = runs["feather"]["feather"]
    if not decided or not decided["rounds"]:
        return "feather decided nothing"
    if decided["failed"]:
        return "feather failed and went on as fcfs"
    return None


def check_patches(release: str) -> str | None:
    """Why the release's series does not fit its sources, or None; ``tests/server/test_patches.py`` runs it patched."""
    command = [str(python()), "-m", "feather_sglang.cli", "patch", "check"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(**beside(release)))
    return (done.stdout + done.stderr).strip().rpartition("\n")[2] if done.returncode else None


def try_release(release: str) -> Tried:
    """Import one release, check its hooks, start its scheduler, see whether its patches fit."""
    begun = time.monotonic()
    reasons, unknown = look_at_hooks(release)
    features = {feature: reasons is not None and reasons[feature] is None for feature in FEATURES}
    if reasons is None:
        problems = [f"does not import: {unknown}"]
    else:
        problems = [f"{feature}: {reason}" for feature, reason in reasons.items() if reason is not None]
    failure = start_and_serve(release)
    if failure is not None:
        problems.append(f"does not start: {failure}")
    unfit = check_patches(release)
    if unfit is not None:
        problems.append(f"patches: {unfit}")
    seconds = time.monotonic() - begun
    return Tried(release, reasons is not None, features, failure is None, unfit is None, seconds, problems)


def table(rows: list[Tried]) -> str:
    """The releases, a line each, then what is wrong with them."""
    words = {True: "yes", False: "NO"}
    lines = [("release", "imports", *(f"hooks: {feature}" for feature in FEATURES), "starts", "patches", "seconds")]
    for row in rows:
        checks = (row.imports, *(row.features[feature] for feature in FEATURES), row.starts, row.patches)
        lines.append((row.release, *(words[check] for check in checks), f"{row.seconds:.0f}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*shown, *(f"{row.release} {problem}" for row in rows for problem in row.problems)])


def run_versions(arguments: list[str]) -> int:
    """Install each release for the CPU, try it, and print one table."""
    if len(arguments) > 1:
        raise SetupError(f"versions takes one list, A,B: not {' '.join(arguments)}")
    releases = tuple(arguments[0].split(",")) if arguments else pinned_releases()
    check_pinned(releases, "versions ")
    refuse_gpu("versions")
    set_up(releases)
    rows = []
    for release in releases:
        say(f"trying SGLang {release}")
        rows.append(try_release(release))
    print(table(rows))
    return 0 if all(row.works for row in rows) else 1


def run_docs(arguments: list[str]) -> int:
    """Serve the site, or build it so that a broken link or a missing page is an error."""
    set_up(RELEASES[:1])
    install_docs()
    job = ["build", "--strict"] if arguments[:1] == ["--build"] else ["serve"]
    command = [str(VENV / "bin" / "mkdocs"), *job, *(arguments[1:] if job[0] == "build" else arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment(NO_MKDOCS_2_WARNING="1")).returncode


def run_quick_tests(arguments: list[str]) -> int:
    """What an edit breaks first: no server, nothing slow."""
    set_up(RELEASES[:1])
    command = [str(python()), "-m", "pytest", "-q", *PROCESSES, *INNER_LOOP, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment()).returncode


def run_full_tests(arguments: list[str]) -> int:
    """What `run_tests` runs, with all samples of each sweep."""
    os.environ[FULL] = "1"
    return run_tests(arguments)


def run_tests(arguments: list[str]) -> int:
    """The whole suite on one SGLang release, and without a GPU the tests that touch SGLang on the others too."""
    if arguments[:1] == [QUICK]:
        return run_quick_tests(arguments[1:])
    releases = chosen_releases(arguments)
    gpu = set_up(releases)
    install_docs()
    failed = []
    for release in RELEASES[:1] if gpu else releases:
        first = release == RELEASES[0]
        name = "the installed SGLang" if gpu else f"SGLang {release}"
        say(f"testing {'everything' if first else 'tests/sglang and tests/server'} on {name}")
        folders = [] if first else ["tests/server", "tests/sglang"]
        command = [str(python()), "-m", "pytest", *(arguments or [*PROCESSES, *folders])]
        variables = {} if gpu else {TESTED: release, **beside(release)}
        if subprocess.run(command, cwd=ROOT, env=environment(**variables)).returncode:
            failed.append(name)
    say(f"FAILED on {', '.join(failed)}" if failed else "all tests passed")
    return 1 if failed else 0


def run_sanitizers(arguments: list[str]) -> int:
    """Make plans with a sanitized planner; the tests make a few of them."""
    set_up(RELEASES[:1])
    program = ROOT / "tests" / "kernels" / "sanitized_plans.py"
    return subprocess.run([str(python()), str(program), *arguments], cwd=ROOT, env=environment()).returncode


def run_fault(name: str, arguments: list[str]) -> int:
    """Run a program of ``tests/faults`` in full; the tests run a little of it."""
    set_up(RELEASES[:1])
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("tests", "kernels", "."))
    command = [str(python()), str(ROOT / "tests" / "faults" / f"{name}.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(PYTHONPATH=paths)).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="dev.py", description="Set up .venv beside this file, then do one job.")
    parser.add_argument("job", choices=JOBS, help="; ".join(f"{name}: {text}" for name, text in JOBS.items()))
    parser.add_argument("arguments", nargs="*", default=[], help="handed on to the job")
    choice = parser.parse_args(sys.argv[1:2])
    arguments = sys.argv[2:]
    try:
        if sys.platform != "linux":
            raise SetupError(f"SGLang is published for Linux only; this is {sys.platform}")
        if choice.job == "setup":
            if arguments:
                parser.error("setup takes no arguments")
            set_up(RELEASES)
            install_docs()
            return 0
        jobs: dict[str, Callable[[list[str]], int]] = {
            "ab": run_ab, "test": run_tests, "full": run_full_tests, "gpu": run_gpu, "sanitize": run_sanitizers,
            "versions": run_versions, "docs": run_docs, **{name: partial(run_fault, name) for name in FAULTS},
        }  # fmt: skip
        return jobs[choice.job](arguments)
    except SetupError as error:
        print(f"dev.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dev.py: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
