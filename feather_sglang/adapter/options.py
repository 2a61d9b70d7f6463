"""Options of the scheduler and the pat backend: ``--feather-*`` flags and the environment variable FEATHER_OPTIONS.

SGLang's ``ServerArgs`` has no room for a plugin's options and its scheduler runs in other processes, so the flags
travel in the one environment variable that ``sglang.Engine`` users set themselves. A flag wins over the variable.
What nobody needs first has no flag. Replays take the same flags and the same variable.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from feather_sglang.adapter.environment import disabled
from feather_sglang.errors import FeatherError, quoted
from feather_sglang.scheduling.admission.fairness import MAX_WAIT, MAX_WAIT_ROUNDS
from feather_sglang.scheduling.admission.gate import LONGEST
from feather_sglang.scheduling.admission.overtaking import SHARE_OF_OWN
from feather_sglang.scheduling.prefill_bound.promise import Promise
from feather_sglang.scheduling.tree.cht import CHUNK_TOKENS
from feather_sglang.slo import parse

VARIABLE = "FEATHER_OPTIONS"


def _whole(least: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        with contextlib.suppress(ValueError):
            if isinstance(value, int | str) and not isinstance(value, bool) and int(value) >= least:
                return int(value)
        raise ValueError(f"expected a whole number of at least {least}")

    return parse


def _number(expected: str, fits: Callable[[float], bool]) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            if not isinstance(value, bool) and fits(float(value)):
                return float(value)
        raise ValueError(f"expected {expected}")

    return parse


_seconds = _number("seconds, 0 or more", lambda value: 0 <= value < math.inf)
_milliseconds = _number("milliseconds, more than 0", lambda value: 0 < value < math.inf)
_share = _number("a number of at least 0, or inf", lambda value: value >= 0)


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


def _option(default: Any, parse: Callable[[Any], Any], metavar: str, text: str, **further: bool) -> Any:
    """``at_start``: it cannot change while a server runs; ``flag``: False where FEATHER_OPTIONS alone sets it."""
    known = {"parse": parse, "metavar": metavar, "help": text, "at_start": False, "flag": True}
    return field(default=default, metadata=known | further)


@dataclass(frozen=True)
class FeatherOptions:
    """All options; each field is a key of FEATHER_OPTIONS and, for most, a flag."""

    policy_file: str | None = _option(
        None, _readable_file, "FILE", "Policy file written by `feather train`; the policy starts from it."
    )
    chunk_size: int = _option(
        CHUNK_TOKENS, _whole(1), "TOKENS", "Tokens in a chunk of the Chunked Hash Tree.", flag=False
    )
    max_wait: float = _option(
        MAX_WAIT,
        _seconds,
        "SECONDS",
        "A request that has waited this long is overdue: from then on no stop policy ends admission, and the request "
        "is next once no other may pass it, or once twice as many requests were admitted since it arrived as waited "
        "then.",
    )
    max_wait_rounds: int = _option(
        MAX_WAIT_ROUNDS, _whole(1), "ROUNDS", "A request is also overdue after so many admission rounds.", flag=False
    )
    max_overtaking: float = _option(
        SHARE_OF_OWN,
        _share,
        "SHARE",
        "Bound on the work of later requests that are admitted before a request, in tokens of prefill: SHARE times the "
        "work that order of arrival would have put before it, its own included, plus 2,048. 0: nearly order of "
        "arrival; inf: only --feather-max-wait bounds the wait.",
    )
    seed: int = _option(
        0,
        _whole(0),
        "SEED",
        "Seed of the policy's exploration, the same on every rank. A replay takes --seed instead.",
        flag=False,
    )
    explore: bool = _option(True, _switch, "on|off", "Whether the stop policy explores and learns while it serves.")
    row_order: bool = _option(
        True, _switch, "on|off", "Keep rows of the running batch that share a prefix side by side."
    )
    gather: bool = _option(
        True,
        _switch,
        "on|off",
        "Where KV memory is short, a prefix may wait until more requests share it, requests that would evict others go "
        "last, and a request for which memory would not suffice is not admitted.",
    )
    pace: float | None = _option(
        None,
        _seconds_or_auto,
        "SECONDS|auto",
        "Longest time, in seconds, for which waiting requests are delayed so that more of them share a prefill step. "
        f"0: requests are never delayed. auto: up to {LONGEST} s, and only while requests come so fast that a prefill "
        "step for each would spend a third of the time on the fixed cost of steps; never under feather-order or "
        "--enable-mixed-chunk.",
    )
    tbt: float | None = _option(
        None,
        _milliseconds,
        "MS",
        "Upper bound, in milliseconds, on the time between two tokens of a request while other requests prefill. The "
        "server exceeds it under a load that does not allow it. feather-order does not take this flag.",
    )
    slo: str | None = _option(
        None,
        _bounds,
        "BOUNDS",
        "The latencies that you promise: ttft=SECONDS,tbt=MS, or multiples of what an idle server takes, as in "
        "ttft=10x,tbt=5x, which mooncake stands for. The server then bounds the time between tokens as --feather-tbt "
        "does, at 0.85 of tbt. It bounds no first token: ttft only says how soon that bound gives way to waiting "
        "prompts. feather-order does not take this flag.",
    )
    record_plan: str | None = _option(
        None,
        _writable_folder,
        "DIR",
        "Folder in which the pat backend keeps a recent batch, for `feather explain-plan DIR`.",
        at_start=True,
        flag=False,
    )
    record_trace: str | None = _option(
        None,
        _writable_folder,
        "DIR",
        "Folder in which the server records its requests as a trace for `feather ab`: times, lengths and hashes of "
        "prompts, but no tokens and no text. It works under any schedule policy.",
        at_start=True,
    )
    record_trace_mb: float = _option(
        1000.0,
        _number("megabytes, at least 1", lambda value: 1 <= value < math.inf),
        "MB",
        "Size of a recording, in megabytes: its oldest requests go when it is reached.",
        at_start=True,
        flag=False,
    )
    record_trace_hours: float = _option(
        24.0,
        _number("hours, more than 0", lambda value: 0 < value < math.inf),
        "HOURS",
        "Time after which a recording ends.",
        at_start=True,
        flag=False,
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
        "Whether pat also computes prompts, in the layers that it packs. auto: only in prefill steps that this should "
        "make a tenth faster. It needs --disable-prefill-cuda-graph and about 0.2 GB of GPU memory.",
        at_start=True,
    )
    unproven_gpu: bool = _option(
        False,
        _switch,
        "on|off",
        "Start pat on a GPU of a compute capability that its kernels are compiled for but were never run on. Without "
        "it such a GPU is refused.",
        at_start=True,
    )
    allow_switch: bool = _option(
        False,
        _switch,
        "on|off",
        "Let POST /feather/schedule_policy change the schedule policy of the running server. It needs --admin-api-key.",
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

    def as_json(self) -> dict[str, Any]:
        """All of them as FEATHER_OPTIONS has them: JSON knows no infinity."""
        return {name: "inf" if value == math.inf else value for name, value in asdict(self).items()}

    def of_policy(self) -> dict[str, Any]:
        """Those that can change while a server runs, in the same form."""
        return {name: value for name, value in self.as_json().items() if not _spec(name).metadata["at_start"]}

    def to_environment(self, environment: Any = os.environ) -> None:
        """Write FEATHER_OPTIONS for the processes that SGLang starts next."""
        environment[VARIABLE] = json.dumps(self.as_json())


def _spec(name: str) -> Any:
    return FeatherOptions.__dataclass_fields__[name]


def has_flag(name: str) -> bool:
    """Whether a flag sets that option; FEATHER_OPTIONS sets each."""
    return bool(_spec(name).metadata["flag"])


def flag_of(name: str) -> str:
    """The flag that sets an option."""
    return f"--feather-{name.replace('_', '-')}"


def parse_flag(name: str, value: Any) -> Any:
    """What a flag's value is to its option; raises ``FeatherError``, which names the flag."""
    # SGLang writes a null in YAML so.
    return _value(name, None if value == "None" else value, f"{flag_of(name)} {quoted(value)}")


def _parse(given: dict[str, Any], head: str) -> dict[str, Any]:
    """The values of a JSON object; a mistake raises ``FeatherError``, its line beginning with ``head``."""
    known = FeatherOptions.__dataclass_fields__
    for name in given:
        if name not in known:
            raise FeatherError(f"{head}unknown option {quoted(name)}; the options are {', '.join(known)}")
    return {name: _value(name, value, f"{head}{name}={quoted(value)}") for name, value in given.items()}


def _value(name: str, value: Any, called: str) -> Any:
    """The value of an option; None stands for the default where that is none."""
    if value is None and _spec(name).default is None:
        return None
    try:
        return _spec(name).metadata["parse"](value)
    except (TypeError, ValueError, OverflowError) as error:
        raise FeatherError(f"{called}: {error}") from None


def check_file(name: str, path: Any) -> None:
    """Read the file that an option names, if it is one to read; raises ``FeatherError`` for what is wrong with it."""
    from feather_sglang.scheduling.policies import load_policy

    if name == "policy_file":
        load_policy(path)


def switch_allowed(environment: Any = os.environ) -> bool:
    """Whether FEATHER_OPTIONS allows to switch policies; only one that names the option is read."""
    named = "allow_switch" in environment.get(VARIABLE, "") and not disabled()
    return named and FeatherOptions.from_environment(environment).allow_switch


def records_trace(environment: Any = os.environ) -> bool:
    """The same of whether requests are recorded."""
    named = "record_trace" in environment.get(VARIABLE, "") and not disabled()
    return named and FeatherOptions.from_environment(environment).record_trace is not None


def packs_prefill(environment: Any = os.environ) -> bool:
    """The same of whether pat computes prompts, all or some."""
    named = "pat_prefill" in environment.get(VARIABLE, "") and not disabled()
    return named and FeatherOptions.from_environment(environment).pat_prefill != "off"


class ReplayFlag(argparse._StoreAction):
    """One ``--feather-*`` flag of a replay."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Take its value; a mistake in it raises ``FeatherError``."""
        name = self.dest.removeprefix("feather_")
        value = parse_flag(name, values)
        if value is not None:
            check_file(name, value)
        setattr(namespace, self.dest, value)


class ServerFlag(ReplayFlag):
    """One ``--feather-*`` flag of a server; a store action, as SGLang's ``--config`` takes no others."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *given: Any) -> None:
        """Put its value into FEATHER_OPTIONS; a mistake in it ends the program with one line."""
        if disabled():
            return
        try:
            super().__call__(parser, namespace, *given)
            value = {self.dest.removeprefix("feather_"): getattr(namespace, self.dest)}
            replace(FeatherOptions.from_environment(), **value).to_environment()
        except FeatherError as error:
            parser.error(str(error))


def add_flags(
    parser: argparse.ArgumentParser, action: type[ReplayFlag] = ServerFlag, without: Collection[str] = ()
) -> None:
    """Add one ``--feather-*`` flag per option that has one; those not given are not in the namespace."""
    group = parser.add_argument_group("feather", "options of the feather schedule policies and the pat backend")
    for spec in fields(FeatherOptions):
        if not has_flag(spec.name) or spec.name in without:
            continue
        # What is off by default may be named without a value.
        alone: dict[str, Any] = {"nargs": "?", "const": "on"} if _shown_default(spec.name) == "off" else {}
        group.add_argument(
            flag_of(spec.name),
            dest=f"feather_{spec.name}",
            action=action,
            metavar=spec.metadata["metavar"],
            default=argparse.SUPPRESS,
            help=help_of(spec.name),
            **alone,
        )


def help_of(name: str) -> str:
    """What an option means, and its default."""
    return f"{_spec(name).metadata['help']} Default: {_shown_default(name)}."


def _shown_default(name: str) -> str:
    default = _spec(name).default
    if isinstance(default, bool):
        return "on" if default else "off"
    return "auto" if _spec(name).metadata["parse"] is _seconds_or_auto else str(default)
