"""The servers of ``bench_server.py`` by name: their flags, and their names in result files."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from feather_sglang.adapter.options import FeatherOptions, flag_of
from feather_sglang.compare.server.config import BACKENDS, NO_PREFILL_GRAPHS, POLICY_FLAG, ServerConfig
from feather_sglang.scheduling.policy_names import FEATHER, STOCK

COMMON_FLAGS = (
    "--load-format dummy --skip-tokenizer-init --sampling-backend pytorch --max-total-tokens 200000 "
    "--max-running-requests 500 --cuda-graph-max-bs-decode 512 --context-length 32768 --mem-fraction-static 0.8"
)
# Flags of a policy's options that can change while the server runs.
SWITCHED = {flag_of(spec.name): spec.name for spec in fields(FeatherOptions) if not spec.metadata["at_start"]}


def parse_server(text: str) -> ServerConfig:
    """``NAME=FLAGS``, or known names joined by ``+`` such as ``pat`` or ``fa3+feather-order``."""
    name, equals, flags = text.partition("=")
    if equals and name and not name.startswith("-"):
        words = shlex.split(flags)
        if words[-1:] == [POLICY_FLAG]:
            raise ValueError(f"{text}: {POLICY_FLAG} names no policy")
        if words and words[-1] in SWITCHED:
            raise ValueError(f"{text}: {words[-1]} has no value")
        return server_of(name, words)
    parts: list[str] = []
    for part in text.split("+"):
        if part in BACKENDS:
            parts += BACKENDS[part].split()
        elif part in STOCK + FEATHER:
            parts += [POLICY_FLAG, part]
        else:
            known = ", ".join((*BACKENDS, *STOCK, *FEATHER))
            raise ValueError(f"{text}: give NAME=FLAGS, or names joined by +, of {known}")
    return server_of(text, parts)


def server_of(name: str, flags: Sequence[str]) -> ServerConfig:
    """The server of these flags: what only a start can set, and what a switch can change."""
    rest, by_switch, policy, options = [], [], "fcfs", {}
    words = iter(flags)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != POLICY_FLAG and flag not in SWITCHED:
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        by_switch += [flag, value]
        if flag == POLICY_FLAG:
            policy = value
        else:
            options[SWITCHED[flag]] = value
    return ServerConfig(name, tuple(rest), policy, options, tuple(by_switch))


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
