"""The formats that are known, and which one a file is in."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from feather_sglang.errors import FeatherError
from feather_sglang.replay.formats.benchmarks import BENCH_SERVING, VLLM
from feather_sglang.replay.formats.block_hashes import BAILIAN, MOONCAKE
from feather_sglang.replay.formats.found import Format
from feather_sglang.replay.formats.length_tables import AZURE, BURSTGPT, cells
from feather_sglang.replay.formats.openai_log import OPENAI
from feather_sglang.replay.formats.sglang_log import SGLANG_LOG, parsed
from feather_sglang.replay.lines import lines

FORMATS = {one.name: one for one in (MOONCAKE, BAILIAN, AZURE, BURSTGPT, BENCH_SERVING, SGLANG_LOG, VLLM, OPENAI)}
_LINES_TRIED = 50  # a server's log begins with other lines


def format_of(path: Path) -> Format:
    """The format of a file, by its first lines; raises ``FeatherError`` where it is none of those known."""
    for line in islice(lines(path), _LINES_TRIED):
        row = parsed(line.text) or dict.fromkeys(cells(line))
        for one in FORMATS.values():
            if one.fits(row):
                return one
    raise FeatherError(f"{path}: is in none of the known formats; name one: --format {' or '.join(FORMATS)}")
