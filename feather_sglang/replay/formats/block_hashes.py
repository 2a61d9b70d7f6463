"""Traces that name the blocks of prompts: Mooncake's (blocks of 512, milliseconds), Qwen-Bailian's (of 16, seconds).

Qwen-Bailian's ``parent_chat_id`` is not read: the file does not say when an answer ended, so turns come at their times.
"""

from __future__ import annotations

from collections.abc import Iterator

from feather_sglang.errors import FeatherError
from feather_sglang.replay.formats.found import Format, Found, Source, moment, whole
from feather_sglang.replay.lines import json_rows

_NEEDED = {"timestamp", "input_length", "output_length", "hash_ids"}


def read(source: Source) -> Iterator[Found]:
    """Its requests."""
    for where, row in json_rows(source.path, source.notices):
        if "after" in row or "block_size" in row:
            raise FeatherError(f"{where}: is a trace as `feather` writes it: use it as it is")
        ids = row.get("hash_ids")
        if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 2**63 for one in ids):
            raise FeatherError(f"{where}: hash_ids: must be a list of whole numbers from 0 to 2**63 - 1")
        prompt, answer = whole(row, "input_length", where), whole(row, "output_length", where)
        yield Found(where, moment(row.get("timestamp"), where), prompt, answer, tuple(ids))


MOONCAKE = Format("mooncake", lambda row: row.keys() >= _NEEDED and "chat_id" not in row, read, 1e-3, 512)
BAILIAN = Format("bailian", lambda row: row.keys() >= _NEEDED | {"chat_id"}, read, 1.0, 16)
