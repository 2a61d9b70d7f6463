"""SGLang servers: what to start, starting and stopping them, and what their logs say."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from feather_sglang import ending
from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.adapter.ports import free_port
from feather_sglang.compare.server.client import Address, HttpError, call
from feather_sglang.scheduling.policy_names import FEATHER, STOCK, SWITCH_PATH

COMMON_FLAGS = (
    "--load-format dummy --skip-tokenizer-init --sampling-backend pytorch --max-total-tokens 200000 "
    "--max-running-requests 500 --cuda-graph-max-bs-decode 512 --context-length 32768 --mem-fraction-static 0.8 "
    "--disable-prefill-cuda-graph"
)
BACKENDS = {
    "fa3": "--attention-backend fa3",
    "flashinfer": "--attention-backend flashinfer",
    "triton": "--attention-backend triton",
    "pat": "--attention-backend fa3 --decode-attention-backend pat",
}
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")
T = TypeVar("T")
POLICY_FLAG = "--schedule-policy"
SWITCHED = {
    f"--feather-{spec.name.replace('_', '-')}": spec.name
    for spec in fields(FeatherOptions)
    if not spec.metadata["at_start"]
}  # flags of a policy's options that can change while the server runs
END_SECONDS = 30.0  # in which a killed server's processes must be gone, and with them its GPU memory
_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+).*?gen throughput \(token/s\): ([\d.]+)")


class ServerFailed(RuntimeError):
    """A server that did not come up, or is gone."""


@dataclass(frozen=True)
class Configuration:
    """A name and the flags that make it differ from the others."""

    name: str
    flags: tuple[str, ...]

    @property
    def stock(self) -> bool:
        """Nothing of this project decides how it runs."""
        words = [word for flag in self.flags for word in flag.split("=", 1)]
        return not any(word == "pat" or word.startswith(("feather", "--feather")) for word in words)

    @property
    def policy(self) -> str:
        """The schedule policy, SGLang's default if the flags name none."""
        return self._split()[1].get(POLICY_FLAG, "fcfs")

    @property
    def policy_options(self) -> dict[str, str]:
        """Options of the schedule policy that can change while a server runs, by name."""
        return {SWITCHED[flag]: value for flag, value in self._split()[1].items() if flag in SWITCHED}

    @property
    def server_flags(self) -> tuple[str, ...]:
        """The flags but for the schedule policy and those options."""
        return self._split()[0]

    def _split(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """What only a start can set, and the value of each flag that a switch can change."""
        rest, switched = [], {}
        words = iter(self.flags)
        for word in words:
            name, equals, value = word.partition("=")
            if name == POLICY_FLAG or name in SWITCHED:
                switched[name] = value if equals else next(words)
            else:
                rest.append(word)
        return tuple(rest), switched


def parse_server(text: str) -> Configuration:
    """``NAME=FLAGS``, or known names joined by ``+`` such as ``pat`` or ``fa3+feather-order``."""
    name, equals, flags = text.partition("=")
    if equals and name and not name.startswith("-"):
        words = tuple(shlex.split(flags))
        if words[-1:] == (POLICY_FLAG,):
            raise ValueError(f"{text}: {POLICY_FLAG} names no policy")
        if words and words[-1] in SWITCHED:
            raise ValueError(f"{text}: {words[-1]} has no value")
        return Configuration(name, words)
    parts: list[str] = []
    for part in text.split("+"):
        if part in BACKENDS:
            parts += BACKENDS[part].split()
        elif part in STOCK + FEATHER:
            parts += [POLICY_FLAG, part]
        else:
            known = ", ".join((*BACKENDS, *STOCK, *FEATHER))
            raise ValueError(f"{text}: give NAME=FLAGS, or names joined by +, of {known}")
    return Configuration(text, tuple(parts))


def in_turns(items: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """(round, item) in order: every other round backwards, so that drift meets all alike."""
    for number in range(1, rounds + 1):
        for item in items if number % 2 else items[::-1]:
            yield number, item


def switch_flags(key: str) -> list[str]:
    """With these a server's policy can be switched by whoever has the key."""
    return ["--feather-allow-switch", "--admin-api-key", key]


def shown(command: Sequence[str], key: str | None) -> str:
    """A server's command without its admin key."""
    return shlex.join("KEY" if word == key else word for word in command)


class Server:
    """One SGLang server in a process group of its own.

    Parameters
    ----------
    command : all but the port.
    log : file for what it prints.
    key : its admin key, where it was given one.
    """

    def __init__(self, configuration: Configuration, command: Sequence[str], log: Path, key: str | None = None) -> None:
        self.configuration = configuration
        self.address = Address("127.0.0.1", free_port(), key)
        self.command = [*command, *configuration.flags, "--host", self.address.host, "--port", str(self.address.port)]
        self.log = log
        self.info: dict[str, Any] = {}
        self.start_seconds: float | None = None
        self._begun = time.monotonic()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=own_group
            )

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
        return self._process.poll() is None

    def check(self) -> None:
        """Raise ``ServerFailed`` if it has ended."""
        if not self.alive():
            raise ServerFailed(f"the server ended with status {self._process.returncode}")

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
        found = [state["feather"] for state in states if "feather" in state]
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
        return self.log.stat().st_size

    def stop(self) -> None:
        """Kill all of it and wait until none is left."""
        end_group(self._process)


def read_log(text: str, batch: int | None = None) -> dict[str, Any]:
    """What the scheduler's own lines say of one case.

    Parameters
    ----------
    batch : throughput is the median of lines with so many requests running; by default with the most seen. The first
        such line is left out, as its interval began before.
    """
    lines = [(int(running), float(rate)) for running, rate in _DECODE.findall(text)]
    most = max((running for running, _ in lines), default=0)
    full = [rate for running, rate in lines if running == (batch or most)][1:]
    return {
        "peak_running": most or None,
        "full_batch_tok_s": round(median(full), 1) if full else None,
        "retractions": retracted(text),
    }


def retracted(text: str) -> int:
    """Requests that were retracted because the KV pool was full; one line may tell of several."""
    return sum(map(int, _RETRACTED.findall(text)))


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
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = status.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # it has just ended
        if int(its_group) == group and state not in "ZX":
            return True
    return False


def own_group() -> None:
    """In the child: a group that can be killed as a whole, and an end with its parent even if that is killed.

    No session of its own: what cleans up after a session should find the server too.
    """
    os.setpgrp()
    _LIBC.prctl(_PDEATHSIG, signal.SIGKILL)
