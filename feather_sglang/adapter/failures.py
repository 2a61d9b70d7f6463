"""How feather ends the start-up of a server that asked for what cannot be."""

from __future__ import annotations

import logging
import multiprocessing
from typing import NoReturn

from feather_sglang.errors import FeatherError

logger = logging.getLogger(__name__)
_command_line = False  # whether SGLang read its flags in this process


def begin_command_line() -> None:
    """This process is one of SGLang's commands, not a program of the user's."""
    global _command_line
    _command_line = True


def end_start_up(error: FeatherError) -> NoReturn:
    """One line and no traceback in a process of SGLang's; the error itself in a program of the user's."""
    if multiprocessing.parent_process() is not None:
        logger.error("feather: error: %s", error)
        raise SystemExit(1) from None
    if not _command_line:
        raise error
    # Python prints this with status 1 when all else has ended, so it is last on the screen.
    raise SystemExit(f"feather: error: {error}") from None
