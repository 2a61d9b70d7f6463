"""Told to end by a signal: out through all ``finally`` blocks, amid an event loop too; no server stays behind."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_told: list[BaseException] = []  # what the signals of this process asked for, not yet or just now raised
_in_run = False  # what comes during a ``run`` is raised at its end


@contextmanager
def on_signals() -> Iterator[None]:
    """Raise ``KeyboardInterrupt``, or ``SystemExit(128 + number)``, on a signal that is not ignored (as under nohup).

    A signal that comes while a finalizer runs, out of which no exception gets, ends the next ``run``.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: handler for number in numbers if (handler := signal.getsignal(number)) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _told.clear()


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` of `main`; a signal cancels its tasks, and is raised once they have ended."""
    global _in_run
    _in_run = True
    try:
        return asyncio.run(_unless_told(main))
    finally:
        _in_run = False
        main.close()  # it may never have begun
        if _told:
            _raise()


async def _unless_told(main: Coroutine[Any, Any, T]) -> T:
    if _told:
        raise asyncio.CancelledError
    return await main


def _leave(number: int, frame: object) -> None:
    _told.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        if not _in_run:  # raised in there, it would leave a loop half made or half closed
            _raise()
        return
    # Raised in here, it could take from the loop what it was about to do, and the tasks concerned would wait forever.
    loop.call_soon_threadsafe(_cancel, loop)


def _cancel(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()


def _raise() -> NoReturn:
    raise _told[-1] from None
