"""The paths of a prefill batch's requests in SGLang's radix tree, which show the prefixes that they share.

A request holds a lock on its ``last_node`` from its admission on, so the slots of that node's path stay as they are and
stand in the request's row; only a part of the path may count, where less was looked up than is there. Two requests have
equal slots up to where their paths part.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from feather_sglang.attention.packed_prefill.prefix_paths import Path

logger = logging.getLogger(__name__)


def cached_paths(tree: Any, requests: Sequence[Any]) -> list[Path]:
    """Of each request the nodes of its cached prefix, as `forest_of_paths` takes them; none where there is no tree."""
    nodes = [getattr(request, "last_node", None) for request in requests]
    collect = getattr(getattr(tree, "tree_core", None), "collect_path_info", None)
    if collect is not None:  # whatever language the tree is written in
        known = sorted({node for node in nodes if isinstance(node, int)})  # not that of a streaming session
        infos = dict(zip(known, collect(known), strict=True))
        return [
            [(info.node_id, info.path_end) for info in infos[node]] if isinstance(node, int) else [] for node in nodes
        ]
    resolve = getattr(tree, "resolve_node_handle", lambda node: node)
    seen: dict[int, Path] = {}
    try:
        return [[] if node is None else _path(resolve(node), seen) for node in nodes]
    except NotImplementedError:  # a tree in Rust before 0.5.22
        _say_unknown()
        return [[] for _ in nodes]


@functools.cache
def _say_unknown() -> None:
    logger.warning(
        "feather: this SGLang's radix tree does not say which prefixes prompts share, so pat reads them for each: set "
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python"
    )


def _path(node: Any, seen: dict[int, Path]) -> Path:
    """From below the root to ``node``; ``seen`` has the paths that are known, by ``id``."""
    chain = []
    while id(node) not in seen and getattr(node, "parent", None) is not None and getattr(node, "key", None) is not None:
        chain.append(node)
        node = node.parent
    path = seen.setdefault(id(node), ())
    for below in reversed(chain):
        path = seen[id(below)] = (*path, (id(below), (path[-1][1] if path else 0) + len(below.key)))
    return path
