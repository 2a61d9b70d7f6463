"""The end of a command by a signal: it runs all ``finally`` blocks, also in an event loop, and leaves no process."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_told: list[BaseException] = []  # what the signals of this process asked for, not yet or just now raised
_waits = False  # what comes during a ``run``, or while it is put off, is raised at the end of that


@contextmanager
def on_signals() -> Iterator[None]:
    """Raise ``KeyboardInterrupt``, or ``SystemExit(128 + number)``, on a signal that is not ignored (as under nohup).

    A signal that comes while a finalizer runs, out of which no exception gets, ends the next ``run``. Where handlers
    cannot be set, in another thread than the main one, signals do what they did.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
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


def name_of(status: object) -> str | None:
    """The signal that an exit status tells of; None if it tells of none of these."""
    told = {128 + number: number.name for number in (signal.SIGTERM, signal.SIGHUP)}
    return told.get(status) if isinstance(status, int) else None


@contextmanager
def put_off() -> Iterator[None]:
    """Raise what a signal asks for at the end of the block, not within: it makes something that could get lost."""
    global _waits
    before, _waits = _waits, True
    try:
        yield
    finally:
        _waits = before
    if _told and not _waits:
        _raise()


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` of `main`; a signal cancels its tasks, and is raised once they have ended."""
    global _waits
    _waits = True
    try:
        return asyncio.run(_unless_told(main))
    finally:
        _waits = False
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
        if not _waits:  # raised in there, it would leave a loop half made or half closed
            _raise()
        return
    # Raised in here, it could take from the loop what it was about to do, and the tasks concerned would wait forever.
    loop.call_soon_threadsafe(_cancel, loop)


def _cancel(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()


def _raise() -> NoReturn:
    raise _told[-1] from None
