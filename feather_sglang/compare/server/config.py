"""Server configurations: flags, the schedule policy, and which of them can change while a server runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class ServerConfig:
    """A server under a policy: a name, and the flags that make it differ from the others.

    Attributes
    ----------
    server_flags : what only a start can set.
    policy, policy_options : what a running server can be switched to.
    policy_flags : those by which a server starts so.
    """

    name: str
    server_flags: tuple[str, ...]
    policy: str = "fcfs"
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    policy_flags: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.server_flags, *self.policy_flags)


def switch_flags(key: str) -> list[str]:
    """With these a server's policy can be switched by whoever has the key."""
    return ["--feather-allow-switch", "--admin-api-key", key]


def shown(command: Sequence[str], key: str | None) -> str:
    """A server's command without its admin key."""
    return shlex.join("KEY" if word == key else word for word in command)
