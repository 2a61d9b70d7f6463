"""The flags of a command that were given, which are those that are not at their defaults."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from feather_sglang.errors import FeatherError


def flag(name: str) -> str:
    """A flag by its name in the namespace."""
    return f"--{name.replace('_', '-')}"


def defaults(add_arguments: Callable[[argparse.ArgumentParser], None]) -> dict[str, Any]:
    """The flags that the function adds, by name, and their defaults."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return {action.dest: action.default for action in parser._actions}


def given(args: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None]) -> list[str]:
    """Names of the flags, of those that the function adds, that are not at their defaults."""
    return [name for name, default in defaults(add_arguments).items() if getattr(args, name, default) != default]


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise ``FeatherError`` where one of these flags has a value below 1; one that is not there has none."""
    for name in names:
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise FeatherError(f"{flag(name)} {value}: must be at least 1")
