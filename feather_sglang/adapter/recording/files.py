"""Files that lines are appended to, bounded in size: the oldest of them goes when a new one would be too many."""

from __future__ import annotations

import os
import time
from pathlib import Path

FILES = 8  # among which the size is divided


class RotatedFiles:
    """Appends lines, each by one call to the system, so that a killed writer leaves whole ones.

    Parameters
    ----------
    size : bytes of all files together, at most.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._size = size // FILES
        self._name = f"requests-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._folder = folder
        self._paths: list[Path] = []
        self._number = self._written = 0
        self._file = -1
        self._begin()

    @property
    def path(self) -> Path:
        """The file that is written."""
        return self._paths[-1]

    def fits(self, line: bytes) -> bool:
        """Whether the file has room for a line; an empty one has for any."""
        return not self._written or self._written + len(line) <= self._size

    def rotate(self) -> None:
        """Begin a new file."""
        self.close()
        self._begin()

    def append(self, line: bytes) -> None:
        """Write a line; raises ``OSError`` where it cannot, and leaves whole lines then."""
        before, rest = self._written, line
        try:
            while rest:
                done = os.write(self._file, rest)
                self._written, rest = self._written + done, rest[done:]
        except OSError:
            os.ftruncate(self._file, before)
            raise

    def close(self) -> None:
        """Write no more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin(self) -> None:
        while len(self._paths) >= FILES:
            self._paths.pop(0).unlink(missing_ok=True)
        self._paths.append(self._folder / f"{self._name}-{self._number:04}.jsonl")
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._number, self._written = self._number + 1, 0
