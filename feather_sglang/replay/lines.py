"""Lines of traces and logs, packed or not, read as they are asked for: the first ones of a large file cost little."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from feather_sglang.errors import FeatherError
from feather_sglang.replay.compression import DAMAGED, unpacked

LONGEST_LINE = 1 << 28  # bytes: of a prompt of ten million tokens in blocks of one


class Line(NamedTuple):
    """Text that is not blank, where it stands, and whether its end was written, too."""

    where: str
    text: str
    ended: bool


def lines(source: Path) -> Iterator[Line]:
    """Lines that are not blank; what cannot be read raises ``FeatherError``."""
    where = f"{source}"
    try:
        with source.open("rb") as stream:
            content = unpacked(stream, source)
            for number, raw in enumerate(iter(lambda: content.readline(LONGEST_LINE), b""), start=1):
                where = f"{source}:{number}"
                if len(raw) == LONGEST_LINE:
                    raise FeatherError(f"{where}: line: longer than {LONGEST_LINE} bytes")
                if text := raw.decode("utf-8-sig").strip():
                    yield Line(where, text, raw.endswith(b"\n"))
    except UnicodeDecodeError as error:
        raise FeatherError(f"{where}: line: not UTF-8 (byte {error.start + 1})") from None
    except IsADirectoryError:
        raise FeatherError(f"{source}: is a directory, not a trace file") from None
    except FileNotFoundError:
        raise FeatherError(f"{source}: no such trace file") from None
    except DAMAGED as error:
        raise FeatherError(f"{source}: is damaged after {where}: {error}") from None
    except OSError as error:
        raise FeatherError(f"{source}: cannot read: {error.strerror or error}") from error


def json_rows(source: Path, notices: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of a file of JSON lines, each with where it stands.

    A last line whose writer was killed is left out, and the `notices` say so.
    """
    first = True
    for line in lines(source):
        try:
            row = json.loads(line.text)
        except json.JSONDecodeError as error:
            if not (first or line.ended):
                notices.append(f"{line.where}: the last line is not whole: left out")
                return
            raise FeatherError(f"{line.where}: line: not JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:
            raise FeatherError(f"{line.where}: line: not usable JSON: {str(error).splitlines()[0]}") from None
        if not isinstance(row, dict):
            raise FeatherError(f"{line.where}: line: not a JSON object")
        yield line.where, row
        first = False
