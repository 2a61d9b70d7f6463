"""SGLang's flags, read by the installed release's own parser: its names, types, choices and defaults.

SGLang is imported when flags are read, not before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from feather_sglang.adapter.hooks import installed_version
from feather_sglang.adapter.options import VARIABLE
from feather_sglang.errors import FeatherError

_MODEL = ["--model-path", "none"]  # SGLang's parser insists on one
_CONSERVATIVENESS = "schedule_conservativeness"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are a user's mistakes, and which knows no --help."""

    def __init__(self) -> None:
        super().__init__(add_help=False)

    def error(self, message: str) -> NoReturn:
        raise FeatherError(f"--server-flags: {message}")


def read_flags(words: Sequence[str]) -> dict[str, Any]:
    """What these words change: values by field of ``ServerArgs``, without those that are SGLang's defaults anyway.

    The defaults of ``--schedule-conservativeness`` (`estimates_output`) and ``--stream-interval`` count as changes. A
    flag that the installed release does not know, or a value that it does not take, raises ``FeatherError``.
    """
    if not words:
        return {}
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    before = os.environ.pop(VARIABLE, None)  # into which --feather-* flags are put as they are parsed
    try:
        load_plugins()
        parser = _Parser()
        ServerArgs.add_cli_args(parser)
        # SGLang's defaults of these say something as well: a replay has others.
        parser.set_defaults(**dict.fromkeys((_CONSERVATIVENESS, "stream_interval")))
        usual = vars(parser.parse_args(_MODEL))
        found, unknown = parser.parse_known_args([*_MODEL, *words])
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before
    if unknown:
        raise FeatherError(f"--server-flags: sglang {installed_version()} does not know {unknown[0]}")
    return {name: value for name, value in vars(found).items() if name not in usual or value != usual[name]}


def estimates_output(words: Sequence[str]) -> bool:
    """Whether SGLang is to estimate how much requests will generate, as it does for those that may end early.

    For requests that ignore the end of a sequence it reserves all that they may generate, whatever the flag says.
    """
    return any(word.startswith(f"--{_CONSERVATIVENESS.replace('_', '-')}") for word in words)


@contextlib.contextmanager
def starting_with(words: Sequence[str]) -> Iterator[None]:
    """Where SGLang, or a policy of feather's, does not start with these flags, say so in one line."""
    try:
        yield
    except SystemExit as end:  # by which feather ends a start in a child process
        if not isinstance(end.__context__, FeatherError):
            raise
        flags = f"--server-flags {' '.join(words)}: " if words else ""
        raise FeatherError(f"{flags}{end.__context__}") from None
    except (AssertionError, ValueError) as error:
        if not words:
            raise
        said = " ".join(str(error).split())
        raise FeatherError(f"--server-flags {' '.join(words)}: SGLang refuses to start with them: {said}") from error
