"""One run of ``check_gpu.py``: its parts, side by side where nothing is timed, and the result file after each."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gpu_parts
from gpu_found import Gpu
from gpu_report import CASES, NOT_RUN

from feather_sglang import ending
from feather_sglang.compare.server.machine import machine
from feather_sglang.compare.server.process import end_group, own_group
from feather_sglang.file_writing import replace_text

GRACE = 15.0  # seconds for a program to end what it has started
RESERVE = 10.0  # seconds of the time limit that are kept for the end
SERVERS_SECONDS = 250.0  # kept for the servers, which take 220: two starts, and the cases


class GpuRun:
    """One run: the parts in order, and the result file, which is written anew after each.

    Parameters
    ----------
    out : the result file; what the parts print and need is in a folder of its name without the suffix.
    limit : seconds for everything.
    """

    def __init__(self, out: Path, limit: float, gpu: Gpu) -> None:
        self.out, self.limit, self.gpu = out, limit, gpu
        self.begun = time.monotonic()
        self.folder = out.resolve().parent / f"{out.stem}-files"
        self.folder.mkdir(parents=True, exist_ok=True)
        unknown = {"result": NOT_RUN, "said": "it was not reached", "seconds": 0.0}
        self.content: dict[str, Any] = {
            "command": shlex.join(["dev.py", "gpu", *sys.argv[1:]]),
            "when": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": machine(),
            "checks": {name: dict(unknown) for name in (gpu_parts.TESTS, gpu_parts.ANSWERS)},
            "cases": {case.name: {"said": NOT_RUN} for case in CASES},
        }

    def run(self) -> dict[str, Any]:
        """All parts, each whatever becomes of the others; what the result file holds."""
        with ending.on_signals():
            return self._run()

    def _run(self) -> dict[str, Any]:
        for name in (gpu_parts.ANSWERS_FILE, gpu_parts.SERVERS_FILE):  # an earlier run's
            (self.folder / name).unlink(missing_ok=True)
        self.write()
        environment = gpu_parts.environment(self.folder)
        limit = max(self.remaining() - SERVERS_SECONDS, self.remaining() / 2)
        commands = {
            gpu_parts.TESTS: gpu_parts.tests_command(self.gpu),
            gpu_parts.ANSWERS: gpu_parts.answers_command(self.folder, limit - GRACE),
        }
        self.say(f"{' and '.join(commands)}, side by side, {limit:.0f} s at most; what they print is in {self.folder}")
        run_together(commands, environment, self.folder, limit, self.checked)
        limit = self.remaining()
        self.say(f"servers, {limit:.0f} s at most")
        commands = {"servers": gpu_parts.servers_command(self.folder, limit - GRACE)}
        run_together(commands, environment, self.folder, limit, self.measured)
        return self.content

    def checked(self, name: str, status: int | None, printed: str, seconds: float) -> None:
        """Note what came of the tests or the answers."""
        if name == gpu_parts.TESTS:
            outcome = gpu_parts.tests_outcome(status, printed)
        else:
            outcome = gpu_parts.answers_outcome(status, printed, self.folder / gpu_parts.ANSWERS_FILE)
        self.content["checks"][name] = {**outcome._asdict(), "seconds": round(seconds, 1)}
        self.say(f"{name}: {outcome.result}: {outcome.said}")
        self.write()

    def measured(self, name: str, status: int | None, printed: str, seconds: float) -> None:
        """Note what the servers did."""
        self.content["cases"] = gpu_parts.servers_outcome(status, printed, self.folder / gpu_parts.SERVERS_FILE)
        self.say(f"{name}: ended after {seconds:.0f} s")
        self.write()

    def remaining(self) -> float:
        """Seconds that are left of the limit, but for the end."""
        return max(0.0, self.limit - RESERVE - (time.monotonic() - self.begun))

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"[{time.monotonic() - self.begun:4.0f} s] {text}", flush=True)

    def write(self) -> None:
        """Replace the result file; whoever reads it sees the old one or the new one."""
        self.content["seconds"] = round(time.monotonic() - self.begun, 1)
        replace_text(self.out, json.dumps(self.content, indent=1) + "\n", "results")


def run_together(
    commands: Mapping[str, list[str]],
    environment: Mapping[str, str],
    folder: Path,
    limit: float,
    ended: Callable[[str, int | None, str, float], None],
) -> None:
    """Start all, and tell of each when it ends: its name, status (None: time ran out), what it printed, and seconds.

    None of them is left, whatever happens.

    Parameters
    ----------
    folder : for what they print.
    limit : seconds.
    """
    begun = time.monotonic()
    logs = {name: folder / f"{name.replace(' ', '-')}.log" for name in commands}
    running = {}
    try:
        for name, command in commands.items():
            with logs[name].open("wb") as output:
                running[name] = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    preexec_fn=own_group,
                )  # fmt: skip
        while running:
            late = time.monotonic() - begun > limit
            for name, process in list(running.items()):
                if process.poll() is None and not late:
                    continue
                status = process.poll()
                end(running.pop(name))
                ended(name, status, logs[name].read_text(errors="replace"), time.monotonic() - begun)
            time.sleep(0.5)
    finally:
        for process in running.values():
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a program to end, so that it ends its servers; then end its whole group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    end_group(process)
