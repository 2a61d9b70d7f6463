"""What the rows of a decode batch have in common, in the order in which the kernel meets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    adjacent_lcp_tokens : prefix shared with the row before, summed over rows.
    groups : distinct first blocks.
    reuse : row distance -> tokens whose last earlier use lies that many rows before; first uses are in none.
    """

    rows: int
    total_tokens: int
    unique_tokens: int
    common_tokens: int
    adjacent_lcp_tokens: int
    groups: int
    reuse: tuple[tuple[int, int], ...]

    @classmethod
    def from_paths(cls, paths: Sequence[tuple[int, ...]], block_size: int, lengths: Sequence[int]) -> BatchSharing:
        """Compare the rows of a batch by the hash ids of their prompts, in O(ids).

        Parameters
        ----------
        paths : hash ids of each row's prompt, in row order.
        block_size : tokens in a block.
        lengths : tokens of each row, prompt alone or with what it has generated.
        """
        nodes: dict[tuple[int, int], int] = {}  # (parent node, hash id) -> node
        last_row: list[int] = []  # node -> latest row through it
        longest: list[int] = []  # node -> longest row through it
        reuse: dict[int, int] = {}
        first_uses = 0
        for row, (path, length) in enumerate(zip(paths, lengths, strict=True)):
            node = -1
            done = 0
            for hash_id in path:
                end = min(done + block_size, length)
                key = (node, hash_id)
                node = nodes.setdefault(key, len(last_row))
                if node == len(last_row):
                    last_row.append(row)
                    longest.append(end)
                    first_uses += end - done
                else:
                    shared = max(min(end, longest[node]) - done, 0)
                    distance = row - last_row[node]
                    reuse[distance] = reuse.get(distance, 0) + shared
                    first_uses += end - done - shared
                    last_row[node] = row
                    longest[node] = max(longest[node], end)
                done = end
            first_uses += max(length - done, 0)
        return cls(
            rows=len(paths),
            total_tokens=sum(lengths),
            unique_tokens=first_uses,
            common_tokens=_common(paths, block_size, lengths),
            adjacent_lcp_tokens=reuse.get(1, 0),
            groups=len({path[:1] for path in paths}),
            reuse=tuple(sorted(reuse.items())),
        )


def _common(paths: Sequence[tuple[int, ...]], block_size: int, lengths: Sequence[int]) -> int:
    if not paths:
        return 0
    if len(paths) == 1:
        return lengths[0]
    # The first and the last path in lexical order differ at least as early as any two.
    pairs = zip(min(paths), max(paths), strict=False)
    blocks = next((i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, paths)))
    return min(blocks * block_size, *lengths)
