"""What a format tells of a request, and what an import tells a format."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from feather_sglang.errors import FeatherError, quoted
from feather_sglang.replay.formats.tokens import BlockIds, Tokenizer


class Found(NamedTuple):
    """One request; None for what the file does not say.

    Attributes
    ----------
    where : file and line.
    time : in the format's unit.
    hash_ids : of the prompt's blocks.
    """

    where: str
    time: float | None
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] | None = None


@dataclass
class Source:
    """A file to import.

    Attributes
    ----------
    tokenizer : of the model; None where nobody named one.
    rate : requests a second that the file as a whole tells of.
    notices : of what was left out.
    """

    path: Path
    tokenizer: Tokenizer | None
    blocks: BlockIds
    rate: float | None = None
    notices: list[str] = field(default_factory=list)


class Format(NamedTuple):
    """One format.

    Attributes
    ----------
    fits : whether a file is in this format, by an object of its first lines, or the columns of its first one.
    unit : seconds in a unit of its times.
    block_size : tokens in a block of its hash ids; None: it has none, or they are made here.
    """

    name: str
    fits: Callable[[dict[str, Any]], bool]
    read: Callable[[Source], Iterator[Found]]
    unit: float = 1.0
    block_size: int | None = None


def whole(row: dict[str, Any], name: str, where: str) -> int:
    """A number of tokens."""
    value = row.get(name)
    try:
        if value is not None and not isinstance(value, bool) and float(value) == int(value) >= 0:
            return int(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise FeatherError(f"{where}: {name}: must be a whole number, not {quoted(value)}")


_DATE = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(\.\d+)?\s*(Z|[+-]\d\d:?\d\d)?")


def moment(value: Any, where: str) -> float:
    """A time: a number in the format's unit, or a date, in seconds."""
    try:
        if not isinstance(value, bool) and math.isfinite(number := float(value)):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    if isinstance(value, str) and (match := _DATE.fullmatch(value.strip())):
        day, clock, fraction, zone = match.groups()
        offset = "+00:00" if zone in (None, "Z") else zone if ":" in zone else f"{zone[:3]}:{zone[3:]}"
        try:
            return datetime.fromisoformat(f"{day}T{clock}{offset}").astimezone(timezone.utc).timestamp() + float(
                fraction or 0
            )
        except (ValueError, OverflowError):
            pass
    raise FeatherError(f"{where}: time: must be a number or a date such as 2024-05-10 00:00:00.01, not {quoted(value)}")
