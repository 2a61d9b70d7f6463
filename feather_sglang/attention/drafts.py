"""The forest of a batch whose requests each bring several tokens, as speculative decoding does when it verifies.

A request's drafts are a chain: the first sees what the request has committed and itself, each further one its
predecessors, too. So every draft is a query row with a sequence of its own, and what a request has committed is a run
that its drafts share: a level below the prefixes that requests share. No mask is needed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from feather_kernels.forest import Forest


def with_drafts(forest: Forest, drafts: int) -> Forest:
    """The forest of the drafts of all requests, request by request.

    Parameters
    ----------
    forest : Forest
        The requests; ``seq_len`` is what each has committed. A draft's slot follows its predecessor's in the table.
    drafts : int
        Tokens that each request brings.
    """
    own = np.arange(forest.n_nodes, forest.n_nodes + forest.n_requests, dtype=np.int32)
    return Forest(
        np.append(forest.parent, forest.request_node),
        np.append(forest.length, forest.seq_len - forest.shared_length),
        np.repeat(own, drafts),
        draft_lengths(forest.seq_len, drafts),
        np.repeat(forest.row_offset, drafts),
    )


def draft_lengths(committed: npt.NDArray[np.integer], drafts: int) -> npt.NDArray[np.int32]:
    """int32 [requests * drafts]: KV tokens that each draft sees, itself included, after ``committed`` [requests]."""
    return (committed[:, None] + np.arange(1, drafts + 1)).ravel().astype(np.int32)
