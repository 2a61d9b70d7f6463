"""Tables (CSV) of times and lengths: Azure's LLM inference traces and BurstGPT. Neither tells of prefixes."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial

from feather_sglang.errors import FeatherError
from feather_sglang.replay.formats.found import Format, Found, Source, moment, whole
from feather_sglang.replay.lines import lines


def read(time: str, prompt: str, answer: str, source: Source) -> Iterator[Found]:
    """Its requests, of the columns of these names."""
    content = lines(source.path)
    first = next(content, None)
    columns = next(csv.reader([first.text])) if first is not None else []
    if not {time, prompt, answer} <= set(columns):
        raise FeatherError(f"{source.path}:1: must have the columns {time}, {prompt} and {answer}")
    for line in content:
        row = dict(zip(columns, next(csv.reader([line.text])), strict=False))
        yield Found(
            line.where, moment(row[time], line.where), whole(row, prompt, line.where), whole(row, answer, line.where)
        )


def _table(name: str, time: str, prompt: str, answer: str) -> Format:
    return Format(name, {time, prompt, answer}.issubset, partial(read, time, prompt, answer))


AZURE = _table("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = _table("burstgpt", "Timestamp", "Request tokens", "Response tokens")
