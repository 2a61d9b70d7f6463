"""``--server-flags`` of a replay: SGLang's flags, read by SGLang's own parser and sorted by ``flag_table``."""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from feather_sglang.errors import FeatherError
from feather_sglang.replay.flag_table import HANDED, OWN, PREFILL_GRAPHS_OFF, REFUSED, RIGHT, WITHOUT_EFFECT, Group
from feather_sglang.replay.given import defaults, flag
from feather_sglang.replay.processes import events


@dataclass
class ServerFlags:
    """A server's flags, sorted by their treatment in a replay.

    Attributes
    ----------
    handed : flags for the replayed scheduler, in one spelling and order.
    own : values of the replay's own flags, by attribute.
    without_effect : flags that change nothing in a replay.
    """

    handed: tuple[str, ...] = ()
    own: dict[str, Any] = field(default_factory=dict)
    without_effect: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        """What of them belongs to the settings of a replayed server."""
        return {"server_flags": list(self.handed)} if self.handed else {}

    def notices(self) -> list[str]:
        """Lines for the user."""
        if not self.without_effect:
            return []
        return [f"--server-flags: no effect in a replay: {', '.join(self.without_effect)}"]


def split(text: str) -> list[str]:
    """The words of ``--server-flags``."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise FeatherError(f"--server-flags {text}: {error}") from None


def take(
    args: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None], others: Sequence[str] = ()
) -> ServerFlags:
    """Read ``args.server_flags``, and put what the replay has flags of its own for into ``args``.

    Parameters
    ----------
    add_arguments : adds the command's own flags: where one is not at its default, it was given.
    others : what the command has no flag for, but uses from ``own``.
    """
    words = split(args.server_flags)
    flags = sort_flags(_read(words)) if words else ServerFlags()
    known = defaults(add_arguments)
    for name, value in flags.own.items():
        if name in others:
            continue
        if name not in known:
            raise FeatherError(f"--server-flags: {flag(name)} cannot be set here; leave it out")
        now = getattr(args, name, value)
        if now not in (value, known[name]):
            raise FeatherError(f"{flag(name)} {_word(now)}: --server-flags say {_word(value)}; give one of the two")
        setattr(args, name, value)
    return flags


def sort_flags(values: dict[str, Any]) -> ServerFlags:
    """Sort what a server's flags change, by field of ``ServerArgs``; raises ``FeatherError`` for what has no replay."""
    handed, own, without_effect = [], {}, []
    for name, value in sorted(values.items()):
        refusal = _group(REFUSED, name)
        if _group(HANDED, name):
            handed.append(_spelt(name, value))
        elif name in OWN:
            own[OWN[name]] = value
        elif name in PREFILL_GRAPHS_OFF and value == PREFILL_GRAPHS_OFF[name]:
            own["prefill_graphs"] = "off"
        elif refusal and value not in RIGHT.get(name, ()):
            raise FeatherError(f"--server-flags: {_spelt(name, value)}: {refusal.what}; {refusal.instead}")
        elif refusal or _fits(WITHOUT_EFFECT, name):
            without_effect.append(_spelt(name, value).partition("=")[0])
        elif name.startswith("feather_"):
            own[name] = value
        else:
            raise FeatherError(f"--server-flags: {_spelt(name, value)}: not known to a replay; {Group.instead}")
    return ServerFlags(tuple(handed), own, tuple(without_effect))


def _group(groups: Sequence[Group], name: str) -> Group | None:
    """The first of these groups that has a field."""
    return next((group for group in groups if _fits(group.fields, name)), None)


def _fits(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, one) for one in patterns)


def _word(value: Any) -> Any:
    return ("off", "on")[value] if isinstance(value, bool) else value


def _spelt(name: str, value: Any) -> str:
    """A flag as a command line has it, one word."""
    if value is True:
        return flag(name)
    return f"{flag(name)}={value if isinstance(value, str) else json.dumps(value)}"


class _Reading(NamedTuple):
    """The flags that the child process is to read, and the name of its log."""

    words: tuple[str, ...]
    name: str = "server-flags"


def _read_in_child(reading: _Reading, tell: Any) -> dict[str, Any]:
    from feather_sglang.adapter import cpu_shims

    cpu_shims.install()
    from feather_sglang.adapter.server_flags import read_flags

    return read_flags(reading.words)


def _read(words: Sequence[str]) -> dict[str, Any]:
    """What these words change, by SGLang's parser in a process that may import SGLang."""
    with (
        tempfile.TemporaryDirectory() as logs,
        closing(events([_Reading(tuple(words))], 1, Path(logs), _read_in_child)) as heard,
    ):
        event = next(event for event in heard if event.kind != "start")
    if event.kind == "mistake":
        raise FeatherError(event.value)
    if event.kind != "done":
        raise FeatherError(f"--server-flags: SGLang could not read them: {event.value}")
    return dict(event.value)
