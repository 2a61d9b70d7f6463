"""One SGLang server: started, waited for, asked to flush or switch, and ended with all of its processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from feather_sglang import ending
from feather_sglang.adapter.ports import free_port
from feather_sglang.compare.server.client import Address, HttpError, call
from feather_sglang.compare.server.config import ServerConfig
from feather_sglang.scheduling.policy_names import SWITCH_PATH

END_SECONDS = 30.0  # in which a killed server's processes must be gone, and with them its GPU memory
TAIL_LINES = 30
_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class ServerFailed(RuntimeError):
    """A server that did not come up, or is gone."""


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and these variables; compiled files are written, as imports take long without."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | dict(variables)


class Server:
    """One SGLang server in a process group of its own; ``with Server(...) as server`` ends it at the end.

    Parameters
    ----------
    command : all but the port.
    log : file for what it prints.
    key : its admin key, where it was given one.
    environment : its variables; None: those of this process.
    """

    def __init__(
        self,
        configuration: ServerConfig,
        command: Sequence[str],
        log: Path,
        key: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.configuration = configuration
        self.address = Address("127.0.0.1", free_port(), key)
        self.command = [*command, *configuration.flags, "--host", self.address.host, "--port", str(self.address.port)]
        self.log = log
        self.info: dict[str, Any] = {}
        self.start_seconds: float | None = None
        self._begun = time.monotonic()
        with log.open("wb") as output:
            self._process = self.launched(environment, output)

    def launched(self, environment: Mapping[str, str] | None, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Its process, which leads a group of its own, ends with this process, and prints to that file."""
        return subprocess.Popen(
            self.command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=own_group
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop()

    def wait(self, deadline: float) -> None:
        """Return once it answers; raise ``ServerFailed`` when it has ended or time is up."""
        while True:
            self.check()
            try:
                ending.run(call(self.address, "/health", timeout=10))
                break
            except (OSError, EOFError, HttpError, asyncio.TimeoutError):
                if time.monotonic() > deadline:
                    raise ServerFailed(f"not up after {time.monotonic() - self._begun:.0f} s") from None
            time.sleep(0.25)
        self.start_seconds = round(time.monotonic() - self._begun, 1)
        self.info = ending.run(call(self.address, "/server_info"))

    @property
    def group(self) -> int:
        """Its process group."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether its first process runs."""
        return self._process.poll() is None

    def check(self) -> None:
        """Raise ``ServerFailed`` if it has ended."""
        if (status := self._process.poll()) is not None:
            raise ServerFailed(f"the server ended with status {status}")

    def flush(self, timeout: float = 20.0) -> None:
        """Abort what still runs and empty the cache; a server that does not become idle raises ``ServerFailed``."""
        ending.run(call(self.address, "/abort_request", b'{"rid": "", "abort_all": true}'))
        self._post_when_idle("/flush_cache", b"", 400, timeout, "the cache cannot be flushed")

    def switch(self, policy: str, options: Mapping[str, Any], timeout: float = 20.0) -> None:
        """Go on under another schedule policy, or afresh under the same; it must have been started so that it may."""
        order = {"schedule_policy": policy, "options": dict(options)}
        self._post_when_idle(SWITCH_PATH, json.dumps(order).encode(), 409, timeout, f"no switch to {policy}")

    def _post_when_idle(self, path: str, body: bytes, busy: int, timeout: float, problem: str) -> None:
        """POST until it is taken; a refusal with another status than `busy`, that of open requests, is final."""
        deadline = time.monotonic() + timeout
        while True:
            self.check()
            try:
                ending.run(call(self.address, path, body))
                return
            except HttpError as refusal:
                if refusal.status != busy or time.monotonic() > deadline:
                    raise ServerFailed(f"{problem}: {refusal}") from None
            time.sleep(0.1)

    def counters(self) -> dict[str, Any] | None:
        """What its schedulers have counted since their last switch, all replicas together; None where they do not."""
        states = ending.run(call(self.address, "/server_info"))["internal_states"]
        found = [state["feather"] for state in states if "admission_seconds" in state.get("feather", ())]
        if len(found) < len(states):
            return None
        busiest = max(found, key=lambda state: state["admission_seconds"])
        return {**busiest, "stops": sum(state["stops"] for state in found)}

    @property
    def kv_tokens(self) -> int | None:
        """KV tokens that its pool holds, as it says itself."""
        return self.info.get("max_total_num_tokens")

    @property
    def max_running(self) -> int | None:
        """Requests that may run together, as it says itself."""
        states = self.info.get("internal_states") or [{}]
        return states[0].get("effective_max_running_requests_per_dp") or self.info.get("max_running_requests")

    def printed(self, offset: int = 0) -> str:
        """What it printed after the first `offset` bytes."""
        with self.log.open("rb") as stream:
            stream.seek(offset)
            return stream.read().decode(errors="replace")

    def printed_bytes(self) -> int:
        """How much it printed so far."""
        return self.log.stat().st_size

    def tail(self, lines: int = TAIL_LINES) -> list[str]:
        """The last lines that it printed."""
        return self.printed().splitlines()[-lines:]

    def stop(self) -> None:
        """Kill all of it and wait until none is left."""
        end_group(self._process)


def end_group(leader: subprocess.Popen[bytes]) -> None:
    """Kill a process and its whole group, which it leads, and wait until none of it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    deadline = time.monotonic() + END_SECONDS
    while group_alive(leader.pid) and time.monotonic() < deadline:
        time.sleep(0.1)


def group_alive(group: int) -> bool:
    """Whether some process of the group is left that is not a zombie."""
    return any(one.state not in "ZX" for one in processes_of(group))


class GroupProcess(NamedTuple):
    """A process as the kernel sees it: its number, its command, its state, and the time it has used."""

    pid: int
    command: bytes
    state: str
    cpu_seconds: float

    @property
    def schedules(self) -> bool:
        """Whether it is one of SGLang's schedulers."""
        return self.command.startswith(b"sglang::scheduler")


def processes_of(group: int) -> Iterator[GroupProcess]:
    """The processes of a group."""
    ticks = os.sysconf("SC_CLK_TCK")
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                cpu = (int(fields[11]) + int(fields[12])) / ticks
                yield GroupProcess(int(folder.name), (folder / "cmdline").read_bytes(), fields[0], cpu)
        except OSError:
            continue  # it has just ended


def own_group() -> None:
    """In the child: a group that can be killed as a whole, and an end with its parent even if that is killed.

    No session of its own: what cleans up after a session should find the server too.
    """
    os.setpgrp()
    _LIBC.prctl(_PDEATHSIG, signal.SIGKILL)
