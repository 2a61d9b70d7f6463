"""The forest of a batch whose requests bring several tokens each: drafts to verify, or prompts to prefill.

Every new token is a query row with a sequence of its own, so no mask is needed. A request's new tokens are cut into
blocks: what stands before a block is a node that its rows share, below the prefixes that requests share, and a row's
private tail is the block up to itself. The blocks of a request share no node of their own: each reads what earlier
blocks wrote, as the query tiles of a causal kernel do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from feather_kernels.forest import Forest
from feather_kernels.options import PlannerOptions

PROMPT_LEVELS = 2  # shared levels of a prompt's row that memory is for: a prefix, and what stands before its block

Ints = npt.NDArray[np.integer]


def with_new_tokens(forest: Forest, counts: int | Ints, block: int | None = None) -> Forest:
    """The forest of the new tokens of all requests, request by request.

    A forest's ``seq_len`` is what each request has committed, and a new token's slot follows its predecessor's in the
    table. Each request brings ``counts`` tokens, at least one; ``block`` of them, by default all, read together what
    stands before them.
    """
    counts = np.broadcast_to(counts, forest.n_requests)
    block = block or int(counts.max(initial=1))
    blocks = -(-counts // block)
    owner = np.repeat(np.arange(forest.n_requests), blocks)  # of each block
    before = forest.seq_len[owner] + _ranks(blocks) * block
    rows = np.repeat(np.arange(forest.n_requests), counts)
    first = forest.n_nodes + np.cumsum(blocks) - blocks
    return Forest(
        np.append(forest.parent, forest.request_node[owner]),
        np.append(forest.length, before - forest.shared_length[owner]),
        first[rows] + _ranks(counts) // block,
        tokens_seen(forest.seq_len, counts),
        forest.row_offset[rows],
    )


def prompt_block(options: PlannerOptions) -> int:
    """Tokens of a prompt's block: those whose query heads fill the largest tile."""
    return max(1, options.tiles[-1][0] // options.group_size)


def tokens_seen(committed: Ints, counts: int | Ints) -> npt.NDArray[np.int32]:
    """int32 [new tokens]: KV tokens that each new token sees, itself included, after ``committed`` [requests]."""
    counts = np.broadcast_to(counts, len(committed))
    return (np.repeat(committed, counts) + _ranks(counts) + 1).astype(np.int32)


def _ranks(counts: Ints) -> npt.NDArray[np.int64]:
    """0, 1, ... below each of the counts, one after the other."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
