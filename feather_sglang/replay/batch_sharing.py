"""Shared prefixes of requests by the hash ids of their prompts, and the row order of a decode batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def nodes_of(paths: Iterable[tuple[int, ...]]) -> list[list[int]]:
    """Each path's nodes from the root, numbered as they come up: an id behind the same ids is the same node."""
    numbers: dict[tuple[int, int], int] = {}  # (parent node, hash id) -> node
    found = []
    for path in paths:
        node, nodes = -1, []
        for hash_id in path:
            node = numbers.setdefault((node, hash_id), len(numbers))
            nodes.append(node)
        found.append(nodes)
    return found


@dataclass(frozen=True)
class BatchSharing:
    """The sharing of one composition and row order. All counts are tokens of KV cache in one layer.

    Rows only grow while a composition lasts, and what they grow by is their own; so one object serves every step
    until a row joins, leaves or moves.

    Attributes
    ----------
    rows, total_tokens : rows of the batch and the sum of their lengths, every row counted in full.
    unique_tokens : tokens that the batch keeps in memory; shared ones once.
    common_tokens : length of the prefix that all rows share (a lone row shares all it has).
    reuse : row distance -> tokens whose last earlier use lies that many rows before; first uses are in none.
    shared : rows -> tokens that exactly so many rows share, each token once; two rows or more.
    parts : stretches of KV that the same rows share, a row's own end among them, summed over rows.
    """

    rows: int
    total_tokens: int
    unique_tokens: int
    common_tokens: int
    reuse: tuple[tuple[int, int], ...]
    shared: tuple[tuple[int, int], ...]
    parts: int

    @classmethod
    def from_paths(cls, paths: Sequence[tuple[int, ...]], block_size: int, lengths: Sequence[int]) -> BatchSharing:
        """Compare the rows of a batch by the hash ids of their prompts, in O(ids).

        Parameters
        ----------
        paths : hash ids of each row's prompt, in row order.
        block_size : tokens in a block.
        lengths : tokens of each row, prompt alone or with what it has generated.
        """
        last_row: list[int] = []  # node -> latest row through it
        longest: list[int] = []  # node -> longest row through it
        start: list[int] = []  # node -> tokens before it
        above: list[int] = []  # node -> parent node
        rows_of: list[int] = []  # node -> rows through it
        ends: list[int] = []  # row -> last node
        reuse: dict[int, int] = {}
        first_uses = 0
        for row, (nodes, length) in enumerate(zip(nodes_of(paths), lengths, strict=True)):
            parent = -1
            done = 0
            for node in nodes:
                end = min(done + block_size, length)
                if node == len(last_row):
                    last_row.append(row)
                    longest.append(end)
                    start.append(done)
                    above.append(parent)
                    rows_of.append(1)
                    first_uses += end - done
                else:
                    shared = max(min(end, longest[node]) - done, 0)
                    distance = row - last_row[node]
                    reuse[distance] = reuse.get(distance, 0) + shared
                    first_uses += end - done - shared
                    last_row[node] = row
                    longest[node] = max(longest[node], end)
                    rows_of[node] += 1
                done, parent = end, node
            ends.append(parent)
            first_uses += max(length - done, 0)
        return cls(
            rows=len(paths),
            total_tokens=sum(lengths),
            unique_tokens=first_uses,
            common_tokens=_common(paths, block_size, lengths),
            reuse=tuple(sorted(reuse.items())),
            shared=_shared(rows_of, start, longest),
            parts=_parts(rows_of, above, ends),
        )


def _shared(rows_of: list[int], start: list[int], longest: list[int]) -> tuple[tuple[int, int], ...]:
    tokens: dict[int, int] = {}
    for rows, begin, end in zip(rows_of, start, longest, strict=True):
        if rows > 1:
            tokens[rows] = tokens.get(rows, 0) + end - begin
    return tuple(sorted(tokens.items()))


def _parts(rows_of: list[int], above: list[int], ends: list[int]) -> int:
    # Where a node has fewer rows than the one above, a new stretch begins for each of them.
    begun = sum(rows for rows, node in zip(rows_of, above, strict=True) if node < 0 or rows_of[node] != rows)
    return begun + sum(node < 0 or rows_of[node] > 1 for node in ends)


def _common(paths: Sequence[tuple[int, ...]], block_size: int, lengths: Sequence[int]) -> int:
    if not paths:
        return 0
    if len(paths) == 1:
        return lengths[0]
    # The first and the last path in lexical order differ at least as early as any two.
    pairs = zip(min(paths), max(paths), strict=False)
    blocks = next((i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, paths)))
    return min(blocks * block_size, *lengths)


class CommonSharing:
    """What rows share that join and leave one by one, without what depends on their order: O(ids of the one row).

    Parameters
    ----------
    block_size : tokens in a block.

    Attributes
    ----------
    rows, total_tokens : as in ``BatchSharing``; whoever lets the rows grow counts their tokens.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rows = self.total_tokens = 0
        self._rows_of: dict[int, int] = {}  # node -> rows that fill it
        self._blocks = 0  # of all rows together
        self._ends: dict[int, int] = {}  # node that a prompt ends within -> rows of such prompts
        self._cut = 0  # nodes that one row fills in part and another one has, too

    def change(self, nodes: Sequence[int], prompt_tokens: int, length: int, joins: bool) -> None:
        """Let a row of so many tokens join or leave."""
        step = 1 if joins else -1
        full = prompt_tokens // self.block_size
        self.rows += step
        self.total_tokens += step * length
        self._blocks += step * full
        for place, node in enumerate(nodes):
            filled, ended = self._rows_of.get(node, 0), self._ends.get(node, 0)
            self._cut -= 0 < ended < filled + ended or ended > 1
            if place < full:
                filled += step
            else:
                ended += step
            self._cut += 0 < ended < filled + ended or ended > 1
            for counts, rows in ((self._rows_of, filled), (self._ends, ended)):
                if rows:
                    counts[node] = rows
                else:
                    counts.pop(node, None)

    def of(self, nodes: Sequence[int]) -> BatchSharing | None:
        """The sharing of the batch, of which a row has these nodes; None where a prompt ends within another's block."""
        if self._cut:
            return None
        size, rows, common = self.block_size, self.rows, 0
        if rows == 1:
            common = self.total_tokens
        else:
            for node in nodes:
                if self._rows_of.get(node) != rows:
                    break
                common += size
        unique = self.total_tokens - size * (self._blocks - len(self._rows_of))
        return BatchSharing(rows, self.total_tokens, unique, common, (), (), 0)
