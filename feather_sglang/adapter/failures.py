"""How feather ends a server: at its start one that asked for what cannot be, and later one whose attention fails."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import signal
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


def end_server(what: str, error: Exception) -> NoReturn:
    """End the server in the middle of a step, as SGLang does where a backend raises, but with one line.

    The traceback is in the log with ``--log-level debug``.
    """
    line = f"{what}: {str(error).strip().partition(chr(10))[0] or repr(error)}"
    if (parent := multiprocessing.parent_process()) is None or parent.pid is None:
        raise FeatherError(line) from error
    logger.debug("feather: %s", what, exc_info=error)
    logger.error("feather: error: %s; the server ends", line)
    os.kill(parent.pid, signal.SIGQUIT)  # at which SGLang ends all of a server's processes
    raise SystemExit(REFUSED) from None


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
