"""Tables (CSV) of times and lengths: Azure's LLM inference traces and BurstGPT. Neither tells of prefixes."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial

from feather_sglang.errors import FeatherError
from feather_sglang.replay.formats.found import Format, Found, Source, moment, whole
from feather_sglang.replay.lines import Line, lines


def cells(line: Line) -> list[str]:
    """The cells of a line of a table."""
    try:
        return next(csv.reader([line.text]))
    except csv.Error as error:
        raise FeatherError(f"{line.where}: line: no line of a table: {error}") from None


def read(time: str, prompt: str, answer: str, source: Source) -> Iterator[Found]:
    """Its requests, of the columns of these names."""
    content = lines(source.path)
    first = next(content, None)
    columns = cells(first) if first is not None else []
    if not {time, prompt, answer} <= set(columns):
        raise FeatherError(f"{source.path}:1: must have the columns {time}, {prompt} and {answer}")
    for line in content:
        row = dict(zip(columns, cells(line), strict=False))
        yield Found(
            line.where,
            moment(row.get(time), line.where),
            whole(row, prompt, line.where),
            whole(row, answer, line.where),
        )


def _table(name: str, time: str, prompt: str, answer: str) -> Format:
    return Format(name, {time, prompt, answer}.issubset, partial(read, time, prompt, answer))


AZURE = _table("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = _table("burstgpt", "Timestamp", "Request tokens", "Response tokens")
