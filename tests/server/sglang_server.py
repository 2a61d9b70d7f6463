"""A real SGLang server on the CPU, as a context manager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from feather_sglang.adapter.ports import free_port
from feather_sglang.compare.server.config import ServerConfig
from feather_sglang.compare.server.process import Server, ServerFailed, environment_with
from preloaded import Preloaded

START_SECONDS = 420  # four times what a slow machine takes that does something else beside
CPU_FLAGS = (
    "--device cpu --dtype float32 --attention-backend torch_native --disable-cuda-graph --mem-fraction-static 0.3 "
    "--grammar-backend llguidance --sleep-on-idle --enable-cache-report"
).split()


def server_environment(**extra: str) -> dict[str, str]:
    """The environment of a program that runs SGLang without a GPU and without a network."""
    return environment_with({
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # Some of SGLang's small functions are compiled at their first call, which takes longer than all other calls.
        "TORCHDYNAMO_DISABLE": "1",
        **extra,
    })  # fmt: skip


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


class SGLangServer(Server):
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
        self._preloaded = start if isinstance(start, Preloaded) else None
        command = [
            *(LAUNCH if isinstance(start, Preloaded) else start),
            *flags_for(model, "--nccl-port", str(free_port())),
        ]
        super().__init__(
            ServerConfig(log.stem, flags),
            command,
            log,
            key,
            environment=server_environment(**environment),
        )
        self.url = f"http://{self.address.host}:{self.address.port}"
        self.key = key

    def launched(self, environment: Mapping[str, str] | None, output: IO[bytes]) -> Any:
        """The same, or forked from a process that has imported SGLang."""
        if self._preloaded is None:
            return super().launched(environment, output)
        with open(os.devnull) as nothing:  # it takes the arguments, not the Python
            return self._preloaded.python(
                self.command[1:], environment or {}, (nothing, output, output), own_session=True
            )

    def __enter__(self) -> SGLangServer:
        try:
            self.wait(time.monotonic() + START_SECONDS)
        except BaseException as problem:
            end = "\n".join(self.tail())
            self.stop()
            if isinstance(problem, ServerFailed):
                raise AssertionError(f"{problem}:\n{end}") from None
            raise
        return self

    def text(self) -> str:
        """What the server has printed so far."""
        return self.printed()

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

    def wait_until_busy(self, seconds: float = 30) -> None:
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
