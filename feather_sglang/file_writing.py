"""Atomic writing of files: a reader sees the old file or the new one, never a part; and a limit on sizes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from feather_sglang.errors import FeatherError


def check_target(path: str | os.PathLike[str], what: str) -> None:
    """Raise ``FeatherError`` where a device, a pipe or a folder would have to give way to the file."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise FeatherError(f"cannot write {what} {path}: it exists and is no regular file; name another")


def check_new(path: Path, overwrite: bool) -> None:
    """Raise ``FeatherError`` where a file of an earlier run would give way, which nobody asked for."""
    if not overwrite and path.is_file():  # of anything else ``check_target`` tells
        raise FeatherError(f"{path} is there already: give --overwrite, or another name by --out")


def read_text(path: str | os.PathLike[str], most: int) -> str:
    """Read a file, or a device or a pipe, of at most so many bytes; raises ``FeatherError`` for a larger one."""
    with open(path, "rb") as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise FeatherError(f"{path} has more than {most} bytes: no file of feather's is that large")
    return content.decode("utf-8")


def make_folder(path: Path, *files: str) -> Path:
    """Make the output folder, in which files of these names can be written, or say in one line why not."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FeatherError(f"--out {path}: cannot make the folder: {error.strerror}") from error
    for name in files:
        check_target(path / name, "results")
    return path


def write_json(path: Path, content: Any) -> None:
    """Write results as JSON."""
    replace_text(path, json.dumps(content, indent=1), "results")


def replace_text(path: str | os.PathLike[str], text: str, what: str) -> None:
    """Write a file by renaming, so that one that cannot be written leaves the old one."""
    replace_bytes(path, text.encode(errors="backslashreplace"), what)


def replace_bytes(path: str | os.PathLike[str], content: bytes, what: str) -> None:
    """Write a file by renaming; a link stays, and leads to it."""
    replace_chunks(path, [content], what)


def replace_chunks(path: str | os.PathLike[str], chunks: Iterable[bytes], what: str) -> None:
    """The same piece by piece."""
    check_target(path, what)
    target = Path(os.path.realpath(path))
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            with scratch.open("wb") as stream:
                stream.writelines(chunks)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(scratch, target)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise FeatherError(f"cannot write {what} {path}: {error.strerror or error}") from error
