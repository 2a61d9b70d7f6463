"""Options of the scheduler and the pat backend: ``--feather-*`` flags and the environment variable FEATHER_OPTIONS.

SGLang's ``ServerArgs`` has no room for a plugin's options and its scheduler runs in other processes, so the flags
travel in the one environment variable that ``sglang.Engine`` users set themselves. A flag wins over the variable.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from feather_sglang.errors import FeatherError, quoted
from feather_sglang.scheduling.admission.fairness import MAX_WAIT, MAX_WAIT_ROUNDS
from feather_sglang.scheduling.admission.gate import BOUND
from feather_sglang.scheduling.admission.overtaking import SHARE_OF_OWN
from feather_sglang.scheduling.prefill_bound.promise import Promise
from feather_sglang.scheduling.tree.cht import CHUNK_TOKENS
from feather_sglang.slo import parse

VARIABLE = "FEATHER_OPTIONS"


def _positive_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str) or int(value) < 1:
        raise ValueError("expected a whole number of at least 1")
    return int(value)


def _seed(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str) or int(value) < 0:
        raise ValueError("expected a whole number of at least 0")
    return int(value)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not 0 <= float(value) < float("inf"):
        raise ValueError("expected seconds, 0 or more")
    return float(value)


def _milliseconds(value: Any) -> float:
    if isinstance(value, bool) or not 0 < float(value) < float("inf"):
        raise ValueError("expected milliseconds, more than 0")
    return float(value)


def _share(value: Any) -> float:
    if isinstance(value, bool) or not float(value) >= 0:
        raise ValueError("expected a number of at least 0, or inf")
    return float(value)


def _bounds(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected ttft=SECONDS,tbt=MS")
    try:
        Promise(parse(value))
    except FeatherError as error:
        raise ValueError(str(error).partition(": ")[2]) from None
    return value


def _seconds_or_auto(value: Any) -> float | None:
    return None if value == "auto" else _seconds(value)


_SWITCH_WORDS = {"on": True, "true": True, "off": False, "false": False}


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    # SGLang hands on what YAML takes for a boolean as "true" or "false".
    if isinstance(value, str) and (word := value.lower()) in _SWITCH_WORDS:
        return _SWITCH_WORDS[word]
    raise ValueError("expected on or off")


def _switch_or_auto(value: Any) -> str:
    if value == "auto":
        return "auto"
    try:
        return "on" if _switch(value) else "off"
    except ValueError:
        raise ValueError("expected on, auto or off") from None


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected a name")
    return value


def _readable_file(value: Any) -> str:
    try:
        if isinstance(value, str) and Path(value).is_file():
            return os.path.abspath(value)
    except OSError as error:  # a name that is too long, a folder that must not be entered
        raise ValueError(f"no such file ({error.strerror})") from None
    raise ValueError("no such file")


def _writable_folder(value: Any) -> str:
    try:
        found = isinstance(value, str) and Path(value).is_dir()
    except OSError as error:
        raise ValueError(f"no such directory ({error.strerror})") from None
    if not found:
        raise ValueError("no such directory: create it first")
    if not os.access(value, os.W_OK):
        raise ValueError("this directory cannot be written to")
    return os.path.abspath(value)


def _option(default: Any, parse: Callable[[Any], Any], metavar: str, text: str, at_start: bool = False) -> Any:
    """``at_start``: it cannot change while a server runs."""
    return field(default=default, metadata={"parse": parse, "metavar": metavar, "help": text, "at_start": at_start})


@dataclass(frozen=True)
class FeatherOptions:
    """What an operator can set; one field is one flag and one key of FEATHER_OPTIONS."""

    policy_file: str | None = _option(
        None, _readable_file, "FILE", "Policy file written by `feather train`; the learner goes on from it."
    )
    chunk_size: int = _option(CHUNK_TOKENS, _positive_int, "TOKENS", "Tokens in a chunk of the Chunked Hash Tree.")
    max_wait: float = _option(
        MAX_WAIT,
        _seconds,
        "SECONDS",
        "While a request has waited this long, nobody is stopped; it is next once overtaken by as many as were ahead.",
    )
    max_wait_rounds: int = _option(MAX_WAIT_ROUNDS, _positive_int, "ROUNDS", "The same bound in admission rounds.")
    max_overtaking: float = _option(
        SHARE_OF_OWN,
        _share,
        "SHARE",
        "Later requests that go before a request take at most SHARE times the work that arrival order would have put "
        "before it, itself included, and 2,048 tokens; inf: no bound but --feather-max-wait.",
    )
    seed: int = _option(0, _seed, "SEED", "Seed of the policy's exploration; the same on every rank.")
    explore: bool = _option(True, _switch, "on|off", "off freezes the policy: it neither explores nor learns.")
    row_order: bool = _option(
        True, _switch, "on|off", "Keep the rows of the running batch in depth-first prefix order."
    )
    gather: bool = _option(
        True,
        _switch,
        "on|off",
        "Where memory is short, let a prefix wait for more of the requests that share it, let those who evict go last, "
        "and keep out whom memory would not suffice for.",
    )
    pace: float | None = _option(
        None,
        _seconds_or_auto,
        "SECONDS|auto",
        "Longest time for which waiting requests are delayed so that more of them share a prefill step; 0: never; "
        f"auto: {BOUND}, only where a prefill step for each request would take a third of the time beyond its tokens, "
        "and never under feather-order or --enable-mixed-chunk.",
    )
    tbt: float | None = _option(
        None,
        _milliseconds,
        "MS",
        "Bound on the time between two tokens of a request while other requests prefill, in milliseconds; gives way as "
        "far as the load does not allow it.",
    )
    slo: str | None = _option(
        None,
        _bounds,
        "BOUNDS",
        "Bounds on the first token and between tokens: ttft=SECONDS,tbt=MS (10x: times an idle server's) or mooncake. "
        "Prefill is bounded as by --feather-tbt, with 0.85 of tbt. Tried in replays only so far.",
    )
    record_plan: str | None = _option(
        None,
        _writable_folder,
        "DIR",
        "The pat backend keeps a recent batch there, for `feather explain-plan DIR`.",
        at_start=True,
    )
    pat_beside: str | None = _option(
        None,
        _name,
        "BACKEND",
        "SGLang's attention backend for the layers that pat does not pack; by default the one that SGLang would decode "
        "with.",
        at_start=True,
    )
    pat_prefill: str = _option(
        "off",
        _switch_or_auto,
        "on|auto|off",
        "pat computes prompts, too, in the layers that it packs; auto: in steps that it should make a tenth faster. "
        "Needs --disable-prefill-cuda-graph, and 0.2 GB or so.",
        at_start=True,
    )
    allow_switch: bool = _option(
        False,
        _switch,
        "on|off",
        "POST /feather/schedule_policy changes the schedule policy of the running server. Needs --admin-api-key.",
        at_start=True,
    )

    @classmethod
    def from_environment(cls, environment: Any = os.environ) -> FeatherOptions:
        """Read FEATHER_OPTIONS, a JSON object; an unset or empty variable gives the defaults.

        Raises
        ------
        FeatherError
            If it is no JSON object, or names an unknown option or a value that does not fit.
        """
        text = environment.get(VARIABLE, "")
        if not text.strip():
            return cls()
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FeatherError(f'{VARIABLE}: not JSON ({error}); write it as {{"max_wait": 30}}') from None
        if not isinstance(given, dict):
            raise FeatherError(f'{VARIABLE}: expected a JSON object such as {{"max_wait": 30}}, found {quoted(text)}')
        return replace(cls(), **_parse(given, f"{VARIABLE}: "))

    @classmethod
    def from_flags(cls, given: dict[str, Any]) -> FeatherOptions:
        """Values of flags, by the names of the options; raises ``FeatherError``, which names the flag."""
        values: dict[str, Any] = {}
        for name, value in given.items():
            values |= _parse({name: value}, "", f"--feather-{name.replace('_', '-')} {value}")
        return replace(cls(), **values)

    def updated(self, given: dict[str, Any]) -> FeatherOptions:
        """Options of another policy on the same server; null stands for the default where that is none.

        Raises
        ------
        FeatherError
            If it names an unknown option, a value that does not fit, or an option that only a start can set.
        """
        values = _parse(given, "options: ")
        for spec in fields(self):
            if spec.name in given and spec.metadata["at_start"]:
                raise FeatherError(f"options: {spec.name} cannot change while the server runs")
        return replace(self, **values)

    def to_environment(self, environment: Any = os.environ) -> None:
        """Write FEATHER_OPTIONS for the processes that SGLang starts next."""
        environment[VARIABLE] = json.dumps(asdict(self))


def _parse(given: dict[str, Any], head: str, called: str | None = None) -> dict[str, Any]:
    """The values of a JSON object; a mistake raises ``FeatherError``, its line beginning with ``head``.

    ``called``: what a value is called; by default its name and it.
    """
    known = {spec.name: spec for spec in fields(FeatherOptions)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise FeatherError(f"{head}unknown option {quoted(name)}; the options are {', '.join(known)}")
        if value is None and known[name].default is None:
            values[name] = None
            continue
        try:
            values[name] = known[name].metadata["parse"](value)
        except (TypeError, ValueError, OverflowError) as error:
            raise FeatherError(f"{head}{called or f'{name}={quoted(value)}'}: {error}") from None
    return values


def check_file(name: str, path: Any) -> None:
    """Read the file that an option names, if it is one to read; raises ``FeatherError`` for what is wrong with it."""
    from feather_sglang.scheduling.policies import load_policy

    if name == "policy_file":
        load_policy(path)


def switch_allowed(environment: Any = os.environ) -> bool:
    """Whether FEATHER_OPTIONS allows to switch policies; only one that names the option is read."""
    return "allow_switch" in environment.get(VARIABLE, "") and FeatherOptions.from_environment(environment).allow_switch


def packs_prefill(environment: Any = os.environ) -> bool:
    """The same of whether pat computes prompts, all or some."""
    named = "pat_prefill" in environment.get(VARIABLE, "")
    return named and FeatherOptions.from_environment(environment).pat_prefill != "off"


class _SetOption(argparse._StoreAction):
    """Put one ``--feather-*`` flag into FEATHER_OPTIONS as it is parsed.

    SGLang's ``--config`` takes store actions only.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        value, option = values, option_string
        name = self.dest.removeprefix("feather_")
        spec = FeatherOptions.__dataclass_fields__[name]
        try:
            current = asdict(FeatherOptions.from_environment())
            unset = value == "None" and spec.default is None  # what SGLang makes of a null in YAML
            current[name] = None if unset else spec.metadata["parse"](value)
            if not unset:
                check_file(name, current[name])
        except (TypeError, ValueError) as error:
            parser.error(f"argument {option}: {value!r}: {error}")
        except FeatherError as error:
            parser.error(f"argument {option}: {error}")
        FeatherOptions(**current).to_environment()
        setattr(namespace, self.dest, current[name])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one ``--feather-*`` flag per option to SGLang's server parser."""
    group = parser.add_argument_group("feather", "options of the feather schedule policies and the pat backend")
    for spec in fields(FeatherOptions):
        default = ("on" if spec.default else "off") if isinstance(spec.default, bool) else spec.default
        if spec.metadata["parse"] is _seconds_or_auto:
            default = "auto"
        # What is off by default may be named without a value.
        alone: dict[str, Any] = {"nargs": "?", "const": "on"} if default == "off" else {}
        group.add_argument(
            f"--feather-{spec.name.replace('_', '-')}",
            dest=f"feather_{spec.name}",
            action=_SetOption,
            metavar=spec.metadata["metavar"],
            default=argparse.SUPPRESS,
            help=f"{spec.metadata['help']} Default: {default}.",
            **alone,
        )
