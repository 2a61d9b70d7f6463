"""How feather ends the start-up of a server that asked for what cannot be."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
from collections.abc import Iterator
from typing import Any, NoReturn

from feather_sglang.errors import FeatherError

logger = logging.getLogger(__name__)
REFUSED = 78  # a process's exit code (sysexits.h: a configuration error)
_command_line = False  # whether SGLang read its flags in this process


def begin_command_line() -> None:
    """This process is one of SGLang's commands, not a program of the user's."""
    global _command_line
    _command_line = True


def end_start_up(error: FeatherError) -> NoReturn:
    """One line and no traceback in a process of SGLang's; the error itself in a program of the user's."""
    if multiprocessing.parent_process() is not None:
        logger.error("feather: error: %s", error)
        raise SystemExit(REFUSED) from None
    if not _command_line:
        raise error
    # Python prints this with status 1 when all else has ended, so it is last on the screen.
    raise SystemExit(f"feather: error: {error}") from None


@contextlib.contextmanager
def refusals_end_start_up() -> Iterator[None]:
    """`end_start_up` for whatever is refused within."""
    try:
        yield
    except FeatherError as error:
        end_start_up(error)


@functools.cache
def expect_refusals() -> None:
    """Let a server whose scheduler refuses to start end as it does: this is the process that waits for it."""
    from sglang.srt.entrypoints import engine

    original = getattr(engine, "_scheduler_died_error", None)
    if original is None:  # then SGLang's traceback follows the scheduler's line
        return

    @functools.wraps(original)
    def scheduler_died_error(rank: int, process: Any) -> Any:
        error = original(rank, process)
        if process.exitcode == REFUSED:
            end_start_up(FeatherError("the server cannot start: the line of its scheduler above says why"))
        return error

    engine._scheduler_died_error = scheduler_died_error
