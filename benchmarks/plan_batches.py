"""Batches to plan without a GPU: PAT's trees, unequal lengths, and batches of the public traces."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from feather_kernels.forest import Forest
from feather_kernels.trees import MIXED_TREES, PAT_TREES, UNLIKE_TREES, named_forest, tree_forest

COUNTS = (16, 64, 256)  # requests of a batch
DRAWS = 6  # batches of each count, of a trace
SIGMA = 1.2  # of the logarithm of a length: nine in ten within a factor of seven
TRACES = {"conversation": "mooncake_conversation.jsonl", "synthetic": "mooncake_synthetic_first1800.jsonl"}
BLOCK = 512  # tokens that a trace has one hash for


def batch_sets(traces: Path | None) -> dict[str, list[Forest]]:
    """The batches of each kind; of the two traces only where their folder is given."""
    rng = np.random.default_rng(0)
    sets = {
        "PAT's 20 trees": [named_forest(name) for name in PAT_TREES],
        "unlike, mixed": [named_forest(name) for name in (*UNLIKE_TREES, *MIXED_TREES)],
        "log-normal": [
            _log_normal(rng, count, mean) for count in COUNTS for mean in (300, 1000, 4000) for _ in range(2)
        ],
    }
    for name, file in TRACES.items() if traces else ():
        sets[name] = _windows(Path(traces or "", file))
    return sets


def _log_normal(rng: np.random.Generator, count: int, mean: float) -> Forest:
    """Requests that share nothing."""
    lengths = np.maximum(1, rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, count)).astype(np.int32)
    return tree_forest((count,), (int(lengths.max()),)).with_seq_len(lengths)


def _windows(path: Path) -> list[Forest]:
    """Requests that follow each other in a trace, when half of each answer is written, at places evenly spread."""
    try:
        with path.open() as file:
            requests = [json.loads(line) for line in file]
    except OSError as error:
        raise SystemExit(f"--traces: {path}: {error.strerror}") from None
    places = [(count, int(at)) for count in COUNTS for at in np.linspace(0, len(requests) - count, DRAWS)]
    return [_forest(list(islice(requests, at, at + count))) for count, at in places]


def _forest(requests: list[dict[str, Any]]) -> Forest:
    """Shared are full blocks of prompts, by their hashes."""
    seq_len = np.array([request["input_length"] + request["output_length"] // 2 for request in requests], np.int32)
    blocks = -(-int(seq_len.max()) // BLOCK)
    table = -1 - np.arange(len(requests) * blocks, dtype=np.int64).reshape(len(requests), blocks)  # nobody else's
    for row, request in zip(table, requests, strict=True):
        hashes = request["hash_ids"][: request["input_length"] // BLOCK]
        row[: len(hashes)] = hashes
    return Forest.from_block_table(table, seq_len, BLOCK)
