"""How feather ends the start-up of a server that asked for what cannot be."""

from __future__ import annotations

import logging
import multiprocessing
from typing import NoReturn

from feather_sglang.errors import FeatherError

logger = logging.getLogger(__name__)


def end_start_up(error: FeatherError) -> NoReturn:
    """One line and no traceback in a process that SGLang has started; the error itself in a program of the user's."""
    if multiprocessing.parent_process() is None:
        raise error
    logger.error("feather: error: %s", error)
    raise SystemExit(1) from None
