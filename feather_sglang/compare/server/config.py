"""What to start: a server's flags, its schedule policy, and what of them can change while it runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.scheduling.policy_names import FEATHER, STOCK

COMMON_FLAGS = (
    "--load-format dummy --skip-tokenizer-init --sampling-backend pytorch --max-total-tokens 200000 "
    "--max-running-requests 500 --cuda-graph-max-bs-decode 512 --context-length 32768 --mem-fraction-static 0.8"
)
NO_PREFILL_GRAPHS = "--disable-prefill-cuda-graph"
BACKENDS = {
    "fa3": "--attention-backend fa3",
    "flashinfer": "--attention-backend flashinfer",
    "triton": "--attention-backend triton",
    "trtllm_mha": "--attention-backend fa3 --decode-attention-backend trtllm_mha",  # both in pages, which SGLang sets
    "hpc_ops": "--attention-backend fa3 --decode-attention-backend hpc_ops",
    "pat": "--attention-backend fa3 --decode-attention-backend pat",
}
POLICY_FLAG = "--schedule-policy"
SWITCHED = {
    f"--feather-{spec.name.replace('_', '-')}": spec.name
    for spec in fields(FeatherOptions)
    if not spec.metadata["at_start"]
}  # flags of a policy's options that can change while the server runs


@dataclass(frozen=True)
class ServerConfig:
    """A server under a policy: a name, and the flags that make it differ from the others.

    Attributes
    ----------
    told : options that a running server is told along with the policy; None: those that the flags name.
    """

    name: str
    flags: tuple[str, ...]
    told: Mapping[str, Any] | None = None

    @property
    def policy(self) -> str:
        """The schedule policy, SGLang's default if the flags name none."""
        return self._split()[1].get(POLICY_FLAG, "fcfs")

    @property
    def policy_options(self) -> Mapping[str, Any]:
        """Options of the schedule policy that can change while a server runs, by name."""
        if self.told is not None:
            return self.told
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
                switched[name] = value if equals else next(words, "")
            else:
                rest.append(word)
        return tuple(rest), switched


def parse_server(text: str) -> ServerConfig:
    """``NAME=FLAGS``, or known names joined by ``+`` such as ``pat`` or ``fa3+feather-order``."""
    name, equals, flags = text.partition("=")
    if equals and name and not name.startswith("-"):
        words = tuple(shlex.split(flags))
        if words[-1:] == (POLICY_FLAG,):
            raise ValueError(f"{text}: {POLICY_FLAG} names no policy")
        if words and words[-1] in SWITCHED:
            raise ValueError(f"{text}: {words[-1]} has no value")
        return ServerConfig(name, words)
    parts: list[str] = []
    for part in text.split("+"):
        if part in BACKENDS:
            parts += BACKENDS[part].split()
        elif part in STOCK + FEATHER:
            parts += [POLICY_FLAG, part]
        else:
            known = ", ".join((*BACKENDS, *STOCK, *FEATHER))
            raise ValueError(f"{text}: give NAME=FLAGS, or names joined by +, of {known}")
    return ServerConfig(text, tuple(parts))


def switch_flags(key: str) -> list[str]:
    """With these a server's policy can be switched by whoever has the key."""
    return ["--feather-allow-switch", "--admin-api-key", key]


def shown(command: Sequence[str], key: str | None) -> str:
    """A server's command without its admin key."""
    return shlex.join("KEY" if word == key else word for word in command)


def words_of_start(command: str, server: Mapping[str, Any]) -> list[str]:
    """What a server in a file of ``bench_server.py`` was started with, but for the flags of its own.

    Parameters
    ----------
    command : of the benchmark. A file that does not hold the server's command is from when prefill graphs were off by
        default.
    """
    if "command" in server:
        return shlex.split(server["command"])
    words = shlex.split(command)
    given = {flag: words[words.index(flag) + 1] for flag in ("--common", "--flags") if flag in words[:-1]}
    common = given.get("--common", f"{COMMON_FLAGS} {NO_PREFILL_GRAPHS}")
    return shlex.split(common) + shlex.split(given.get("--flags", ""))
