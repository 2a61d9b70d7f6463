"""A real SGLang server on the CPU, as a context manager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from feather_sglang.adapter.ports import free_port
from feather_sglang.compare.server.process import end_group
from preloaded import Preloaded

START_SECONDS = 420  # four times what a slow machine takes that does something else beside
CPU_FLAGS = (
    "--device cpu --dtype float32 --attention-backend torch_native --disable-cuda-graph --mem-fraction-static 0.3 "
    "--grammar-backend llguidance --sleep-on-idle --enable-cache-report --host 127.0.0.1"
).split()


def server_environment(**extra: str) -> dict[str, str]:
    """The environment of a program that runs SGLang without a GPU and without a network."""
    variables = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # Some of SGLang's small functions are compiled at their first call, which takes longer than all other calls.
        "TORCHDYNAMO_DISABLE": "1",
        **extra,
    }
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def run_to_end(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that ends by itself, in that environment."""
    return subprocess.run(
        command, capture_output=True, text=True, env=server_environment(**environment), timeout=START_SECONDS
    )


LAUNCH = (sys.executable, "-m", "sglang.launch_server")
SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")


def flags_for(model: Path, *flags: str) -> list[str]:
    """With those that a CPU needs."""
    return ["--model-path", str(model), *CPU_FLAGS, *flags]


class SGLangServer:
    """``with SGLangServer(model, log, "--schedule-policy", "feather") as server: server.url ...``.

    The log file holds what the server printed. Leaving the block ends every process of the server.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *flags: str,
        start: Preloaded | tuple[str, ...] = LAUNCH,
        key: str | None = None,
        **environment: str,
    ) -> None:
        """``start``: a command that takes the flags, or what to fork; ``key``: the admin key of the flags, if any."""
        self.key = key
        self._start = start
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        ports = ("--port", str(self.port), "--nccl-port", str(free_port()))
        self._flags = flags_for(model, *ports, *flags)
        self._environment = server_environment(**environment)

    def __enter__(self) -> SGLangServer:
        with self.log.open("wb") as output, open(os.devnull) as nothing:
            if isinstance(self._start, Preloaded):
                command = [*LAUNCH[1:], *self._flags]
                files = (nothing, output, output)
                self._process = self._start.python(command, self._environment, files, own_session=True)
            else:
                self._process = subprocess.Popen(
                    [*self._start, *self._flags],
                    stdout=output,
                    stderr=output,
                    env=self._environment,
                    start_new_session=True,
                )
        try:
            self._await_health()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _await_health(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise AssertionError(f"the server ended with {self._process.returncode}:\n{self.text()[-4000:]}")
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"no answer from the server after {START_SECONDS} s:\n{self.text()[-4000:]}")

    def stop(self) -> None:
        """End the whole process group; SGLang's own shutdown only adds seconds to a test."""
        end_group(self._process)

    def alive(self) -> bool:
        return self._process.poll() is None

    def text(self) -> str:
        """What the server has printed so far."""
        return self.log.read_text(errors="replace")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            content = response.read()
        return json.loads(content) if content.startswith((b"{", b"[")) else content.decode()

    def post(self, path: str, body: dict[str, Any]) -> None:
        """With the server's own key; fails if the server refuses."""
        status, text = self.answer(path, body, self.key)
        assert status == 200, f"{path}: {status} {text}"

    def answer(self, path: str, body: dict[str, Any], key: str | None) -> tuple[int, str]:
        """Status and text of what the server answers to whoever has that key; a refusal is an answer too."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return int(response.status), response.read().decode()
        except urllib.error.HTTPError as refusal:
            return refusal.code, refusal.read().decode()

    def load(self) -> tuple[int, int, int]:
        """Running requests, waiting requests, and KV tokens in use that no cache entry could give back."""
        (rank,) = self.get("/v1/loads")["loads"]
        return rank["num_running_reqs"], rank["num_waiting_reqs"], rank["num_used_tokens"]

    def wait_until_busy(self, seconds: float = 10) -> None:
        """Return once some request runs; fail if none comes."""
        self._wait(seconds, lambda running, waiting: running > 0)

    def wait_until_idle(self, seconds: float = 20) -> None:
        """Return once nothing runs and nothing waits; fail if that does not come."""
        self._wait(seconds, lambda running, waiting: running + waiting == 0)

    def _wait(self, seconds: float, reached: Callable[[int, int], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not reached(*(load := self.load())[:2]):
            if time.monotonic() > deadline:
                raise AssertionError(f"(running, waiting, tokens) is still {load} after {seconds} s")
            time.sleep(0.02)
