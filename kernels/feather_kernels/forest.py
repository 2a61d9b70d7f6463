"""The prefix forest of a decode batch: which KV tokens are shared, and by which requests.

Pure host data. How a forest is packed is the business of ``plan.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from feather_kernels.errors import PlanError, is_whole

IntArray = npt.NDArray[np.integer]
Ints = IntArray | Sequence[int]
_LARGEST_PAGE = 1 << 30  # tokens


@dataclass(frozen=True, eq=False)
class Forest:
    """Shared KV runs with parents, and the private tail of every request (PAT 5.1, "tree structure block table").

    Request ``r`` shares the nodes on the path from a root to ``request_node[r]``; positions from there to
    ``seq_len[r]`` are its private tail. Its KV token at position ``p`` is in table entry
    ``row_offset[r] + p // page_size``. Nodes with fewer than two requests, without tokens, or with the same requests
    as their only child are legal; planning folds them away.

    The arrays are read again by every plan: do not write to them.

    Parameters
    ----------
    parent : int32 [nodes]
        Index of the parent, smaller than the node's own; -1 for a root.
    length : int32 [nodes]
        Tokens in the node.
    request_node : int32 [requests]
        Deepest shared node of each request, -1 for none.
    seq_len : int32 [requests]
        KV tokens of each request, shared ones included.
    row_offset : int64 [requests]
        Where each request's row starts in the flat table, in entries.

    Raises
    ------
    PlanError
        Shapes that do not fit together. The numbers themselves are checked when a plan is made.
    """

    parent: IntArray
    length: IntArray
    request_node: IntArray
    seq_len: IntArray
    row_offset: IntArray

    def __post_init__(self) -> None:
        for name in ("parent", "length", "request_node", "seq_len", "row_offset"):
            dtype = np.int64 if name == "row_offset" else np.int32
            object.__setattr__(self, name, _vector(name, getattr(self, name), dtype))
        _same_length("parent", self.parent, "length", self.length)
        _same_length("request_node", self.request_node, "seq_len", self.seq_len)
        _same_length("request_node", self.request_node, "row_offset", self.row_offset)

    @property
    def n_nodes(self) -> int:
        """Nodes of all trees."""
        return len(self.parent)

    @property
    def n_requests(self) -> int:
        """Requests of the batch."""
        return len(self.request_node)

    @cached_property
    def node_end(self) -> npt.NDArray[np.int64]:
        """int64 [nodes]: position after each node's last token."""
        end = np.zeros(self.n_nodes, np.int64)
        for node, parent in enumerate(self.parent.tolist()):
            end[node] = self.length[node] + (end[parent] if parent >= 0 else 0)
        return end

    @cached_property
    def shared_length(self) -> npt.NDArray[np.int64]:
        """int64 [requests]: tokens before each request's private tail."""
        ends = np.append(self.node_end, 0)  # request_node -1 finds the 0
        return ends[self.request_node]

    def with_seq_len(self, seq_len: Ints) -> Forest:
        """The same sharing after the private tails have grown (or shrunk) to ``seq_len``, int32 [requests]."""
        return Forest(
            self.parent, self.length, self.request_node, _vector("seq_len", seq_len, np.int32), self.row_offset
        )

    @classmethod
    def from_nodes(
        cls,
        node_ids: Ints,
        parent_ids: Ints,
        lengths: Ints,
        request_node_ids: Ints,
        seq_lens: Ints,
        row_offset: Ints,
    ) -> Forest:
        """A forest from radix-tree nodes, in time linear in nodes and requests (up to sorting).

        Nodes may come in any order and may belong to one request or none (a whole radix cache can be given); the
        result holds shared nodes only, in canonical order: by lowest request below, then from root to leaf.

        Parameters
        ----------
        node_ids : int64 [nodes]
            Distinct numbers of any size.
        parent_ids : int64 [nodes]
            The parent's id, -1 for a root.
        lengths : int32 [nodes]
            Tokens in each node, 0 allowed (a radix cache's empty root).
        request_node_ids : int64 [requests]
            Id of the deepest node of each request, -1 for none. A request may end inside the tree.
        seq_lens : int32 [requests]
            KV tokens of each request, at least those of its nodes.
        row_offset : int64 [requests]
            Start of each request's row in the flat table, in entries; with SGLang's ``req_to_token`` the request's
            pool index times the table's row stride.

        Raises
        ------
        PlanError
            Duplicate or unknown ids, a cycle, a negative length, or a request shorter than its nodes.
        """
        ids, parents = _vector("node_ids", node_ids, np.int64), _vector("parent_ids", parent_ids, np.int64)
        length = _vector("lengths", lengths, np.int32)
        deepest = _vector("request_node_ids", request_node_ids, np.int64)
        seq_len, row = _vector("seq_lens", seq_lens, np.int32), _vector("row_offset", row_offset, np.int64)
        _same_length("node_ids", ids, "parent_ids", parents)
        _same_length("node_ids", ids, "lengths", length)
        _same_length("request_node_ids", deepest, "seq_lens", seq_len)
        _same_length("request_node_ids", deepest, "row_offset", row)
        found = np.empty((2, len(ids)), np.int32), np.empty(len(deepest), np.int32)
        source = ids, parents, length, deepest, seq_len
        return _shared(cls, _planner().forest_from_nodes, source, *found, seq_len, row)

    @classmethod
    def from_block_table(
        cls, table: IntArray, seq_lens: Ints, page_size: int, row_offset: Ints | None = None
    ) -> Forest:
        """A forest from a plain block table, by exact comparison of page ids, O(requests * pages) at worst.

        Only full pages are shared: a page that is still being filled belongs to the tail. Equal tokens in different
        pages are not shared. For users without a radix tree; with one, `from_nodes` never looks at the table.

        Parameters
        ----------
        table : int32 or int64 [requests, pages]
            Page ids, on the host; entries past a request's last page are not read.
        seq_lens : int32 [requests]
            KV tokens of each request.
        page_size : int
            Tokens a page, a power of two.
        row_offset : int64 [requests], optional
            Start of each request's row in the device's table, if not that of ``table`` itself.

        Raises
        ------
        PlanError
            A table that is no matrix of int32 or int64, a page size that is no power of two, a sequence longer than
            its row.
        """
        if not isinstance(table, np.ndarray) or table.ndim != 2 or table.dtype not in (np.int32, np.int64):
            kind = f"{table.dtype} {list(table.shape)}" if isinstance(table, np.ndarray) else type(table).__name__
            raise PlanError(f"table is {kind}: give a NumPy array int32 or int64 [requests, pages]")
        if not is_whole(page_size) or not 1 <= page_size <= _LARGEST_PAGE or page_size & (page_size - 1):
            raise PlanError(f"page_size is {page_size!r}: give a power of two up to {_LARGEST_PAGE}")
        seq_len = _vector("seq_lens", seq_lens, np.int32)
        if len(seq_len) != len(table):
            raise PlanError(f"table has {len(table)} rows and seq_lens {len(seq_len)} entries: give one row a request")
        table = _exportable(np.ascontiguousarray(table))
        if row_offset is None:
            row_offset = np.arange(len(table), dtype=np.int64) * table.shape[1]
        found = np.empty((2, len(table)), np.int32), np.empty(len(table), np.int32)
        build = _planner().forest_from_block_table
        return _shared(cls, build, (table, int(page_size), seq_len), *found, seq_len, row_offset)


def check_forest(forest: Any) -> None:
    """Raise `PlanError` for what is no forest."""
    if not isinstance(forest, Forest):
        raise PlanError(f"forest is {type(forest).__name__}: give a Forest")


def _shared(
    cls: type[Forest],
    build: Callable[..., int],
    source: tuple[IntArray | int, ...],
    nodes: IntArray,
    request_node: IntArray,
    seq_len: IntArray,
    row_offset: Ints,
) -> Forest:
    """Let C++ find the shared nodes of ``source``; ``nodes`` has room for their parents and lengths."""
    parent, length = nodes
    try:
        count = build(*source, parent, length, request_node)
    except ValueError as error:
        raise PlanError(str(error)) from None
    return cls(parent[:count], length[:count], request_node, seq_len, _vector("row_offset", row_offset, np.int64))


def _planner() -> Any:
    from feather_kernels.build import load_planner  # here: `python -m feather_kernels.build` imports this package first

    return load_planner()


def _vector(name: str, values: Ints, dtype: type[np.integer]) -> IntArray:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # rows of unlike lengths, or a tensor on a GPU
        raise PlanError(f"{name} is no vector of integers: {str(error).splitlines()[0]}") from None
    if array.ndim != 1:
        raise PlanError(f"{name} has {array.ndim} dimensions: give a vector")
    if array.size and array.dtype.kind not in "iu":
        raise PlanError(f"{name} is {array.dtype}: give integers")
    if array.dtype != dtype and array.size:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise PlanError(f"{name} has a value outside {np.dtype(dtype)}: {array.min()} to {array.max()}")
    return _exportable(np.ascontiguousarray(array, dtype))


def _exportable(array: IntArray) -> IntArray:
    return array if array.flags.writeable else array.copy()  # DLPack exports no read-only array


def _same_length(first: str, a: IntArray, second: str, b: IntArray) -> None:
    if len(a) != len(b):
        raise PlanError(f"{first} has {len(a)} entries and {second} has {len(b)}: give as many of both")
