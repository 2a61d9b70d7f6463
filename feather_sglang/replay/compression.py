"""Traces packed as .gz or .zst: told by a file's first bytes when it is read, by its name when it is written."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from feather_sglang.errors import FeatherError

SUFFIXES = (".gz", ".zst")
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
_GZIP, _ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def bare(path: str | os.PathLike[str]) -> Path:
    """The name of a file without what says how it is packed."""
    return Path(path).with_suffix("") if Path(path).suffix in SUFFIXES else Path(path)


def unpacked(stream: Any, path: Path) -> BinaryIO:
    """The content of a file that is open for reading, whatever packs it."""
    head = stream.peek(4)[:4]
    if head.startswith(_GZIP):
        return gzip.open(stream)  # type: ignore[return-value]
    if head == _ZSTANDARD:
        return io.BufferedReader(_Zstandard(stream, path), 1 << 16)
    return stream


class _Zstandard(io.RawIOBase):
    """The content of frames; damage raises ``EOFError``, as does a frame that is cut, which zstandard passes over."""

    def __init__(self, stream: Any, path: Path) -> None:
        self._stream, self._zstandard = stream, _zstandard(path)
        self._frame: Any = None
        self._packed = self._content = b""

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with what comes next."""
        while not self._content and (self._packed or self._more()):
            self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._content = self._frame.decompress(self._packed)
            except self._zstandard.ZstdError as error:
                raise EOFError(str(error)) from None
            self._packed = self._frame.unused_data
            self._frame = None if self._frame.eof else self._frame
        taken, self._content = self._content[: len(buffer)], self._content[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def _more(self) -> bool:
        """Read on; a small piece, as little may stand for much."""
        self._packed = self._stream.read(4096)
        if not self._packed and self._frame is not None:
            raise EOFError("the file ends within a frame")
        return bool(self._packed)


def packed(chunks: Iterable[bytes], path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The chunks as a file of that name holds them."""
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        yield from chunks
        return
    packer = zlib.compressobj(wbits=31) if suffix == ".gz" else _zstandard(Path(path)).ZstdCompressor().compressobj()
    yield from map(packer.compress, chunks)
    yield packer.flush()


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise FeatherError(f"{path}: is a .zst file: install the package zstandard, or use .gz") from None
    return zstandard
