"""Decode batches to explain: recorded by a live server in a JSON file, or made from the tree notation.

A file has the forest and what the planner was given, nothing else of the requests: no tokens, no ids, no slots.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from feather_kernels.errors import PlanError
from feather_kernels.forest import Forest
from feather_kernels.plan import PackPlan
from feather_kernels.tiles import TILES, are_tiles
from feather_kernels.trees import parse_tree, tree_forest

FORMAT, VERSION = "feather-batch", 1
LARGEST_FILE = 1 << 28  # bytes
LATEST = "batch-latest.json"  # what a server writes into its folder
MOST_NODES, MOST_TOKENS = 1 << 20, 2**31 - 1  # of a tree given as text, and of a request of it
_NUMBERS = (
    "num_qo_heads", "num_kv_heads", "head_dim", "n_sm", "tail_warps", "max_requests", "max_items", "max_members",
    "max_parts",
)  # fmt: skip
_NAMES = "strategy", "split", "merge"


@dataclass(frozen=True)
class Batch:
    """A batch and how to plan it."""

    source: str  # where it comes from, for people
    forest: Forest
    arguments: Mapping[str, Any]  # of ``feather_kernels.make_plan``
    padding: int = 0  # rows at the end that only pad the batch to the size of a CUDA graph
    checksum: int | None = None  # `checksum_of` the plan that the server ran


def path_of(tiles: Any) -> str:
    """The kernel's path with these tiles: m = 32 is of one alone, m = 128 of the other; else the largest one tells."""
    rows = {m for m, _ in tiles}
    if rows & {32, 128}:
        return "portable" if 32 in rows else "hopper"
    return "portable" if tuple(tiles[-1]) in TILES["portable"] else "hopper"


def checksum_of(plan: PackPlan) -> int:
    """A number that two plans have in common if their items do, wherever the requests' rows lie in memory."""
    return zlib.crc32(plan.members.tobytes(), zlib.crc32(plan.items[:, 2:].tobytes()))


def batch_text(plan: PackPlan, requests: int) -> str:
    """The file of a planned batch, whose rows from ``requests`` on are padding."""
    names = (*_NUMBERS, *_NAMES, "kv_value_bytes", "tiles", "head_pack")
    arguments, forest = {name: getattr(plan.options, name) for name in names}, plan.forest
    arrays = {name: getattr(forest, name).tolist() for name in ("parent", "length", "request_node", "seq_len")}
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "padding": plan.n_requests - requests,
            "checksum": checksum_of(plan),
            "planner": arguments,
            "forest": arrays,
        }
    )


def _quoted(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _text(path: Path) -> str:
    with path.open("rb") as stream:  # perhaps a pipe without an end
        content = stream.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise PlanError(f"{path} has more than {LARGEST_FILE} bytes: no recorded batch is that large")
    return content.decode("utf-8")


def load_batch(path: Path) -> Batch:
    """Read a recorded batch; of a folder, the one that a server has written there last.

    Raises ``PlanError`` for no file, or one that is no recorded batch of this version.
    """
    try:
        if path.is_dir():
            path = path / LATEST
        found = json.loads(_text(path))
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}; a server with record_plan in FEATHER_OPTIONS writes it") from None
    except PlanError:
        raise
    except (ValueError, RecursionError):
        raise PlanError(f"{path}: not JSON, so no recorded batch") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise PlanError(f'{path}: no recorded batch (its "format" is not "{FORMAT}")')
    if found.get("version") != VERSION:
        raise PlanError(
            f"{path}: a batch of version {_quoted(found.get('version'))}, this feather reads version {VERSION}: use "
            "the feather that recorded it"
        )
    try:
        return _batch(path, found)
    except KeyError as error:
        raise PlanError(f"{path}: {error} is missing") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"{path}: {error}") from None


def _batch(path: Path, found: dict[str, Any]) -> Batch:
    planner, arrays = found["planner"], found["forest"]
    if not isinstance(planner, dict) or not isinstance(arrays, dict):
        raise ValueError("planner and forest must be JSON objects")
    arguments: dict[str, Any] = {name: _whole(name, planner[name]) for name in _NUMBERS}
    arguments |= {name: str(planner[name]) for name in _NAMES}
    arguments["tiles"] = tuple((_whole("tiles", m), _whole("tiles", n)) for m, n in planner["tiles"])
    tiles, head_dim = arguments["tiles"], arguments["head_dim"]
    # Without a GPU a server has those that are built by default, at any head_dim.
    if not tiles or not any(set(tiles) <= set(TILES[path]) or are_tiles(path, head_dim, tiles) for path in TILES):
        raise ValueError(f"the kernels have no tiles {tiles} at head_dim {head_dim}")
    if "kv_value_bytes" in planner:  # older files are of 16 bits
        arguments["kv_value_bytes"] = _whole("kv_value_bytes", planner["kv_value_bytes"], most=2)
    if planner["head_pack"] is not None:
        arguments["head_pack"] = _whole("head_pack", planner["head_pack"])
    nowhere = np.zeros(len(arrays["seq_len"]), np.int64)  # where rows lie in memory changes nothing in a plan
    forest = Forest(arrays["parent"], arrays["length"], arrays["request_node"], arrays["seq_len"], nowhere)
    padding = _whole("padding", found["padding"], least=0)
    if padding > forest.n_requests:
        raise ValueError(f"padding is {padding}, and there are {forest.n_requests} rows")
    source = f"{path.name}, recorded {found['time']}"
    return Batch(source, forest, arguments, padding, _whole("checksum", found["checksum"], 0, 2**32 - 1))


def _whole(name: str, value: Any, least: int = 1, most: int = 2**31 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {_quoted(value)}: expected a whole number from {least} to {most}")
    return value


def tree_batch(text: str, arguments: Mapping[str, Any]) -> Batch:
    """A batch from ``feather_kernels.trees``' notation, ``"1,4,256_32,256,32"``: nodes and tokens per level.

    Raises ``PlanError`` for text that is no tree, and for a tree too large to be meant.
    """
    example = 'give nodes and tokens per level, as in "1,4,256_32,256,32"'
    try:
        nodes, tokens = parse_tree(text)
        if sum(nodes) <= MOST_NODES and sum(tokens) <= MOST_TOKENS and min(tokens) >= 0:
            return Batch(f"tree {text}", tree_forest(nodes, tokens), arguments)
    except ValueError:
        raise PlanError(f"--tree {_quoted(text)}: {example}") from None
    raise PlanError(f"--tree {_quoted(text)}: at most {MOST_NODES:,} nodes, and 0 to {MOST_TOKENS:,} tokens a request")
