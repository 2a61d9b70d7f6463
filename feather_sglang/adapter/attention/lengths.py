"""Sequence lengths of a step's rows beyond the tokens that SGLang counts, and how far they may grow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from feather_kernels.forest import Forest, IntArray
from feather_sglang.attention.new_tokens import tokens_seen, with_new_tokens

FILL = 1  # KV tokens of the rows that pad a batch to the size of a CUDA graph
DRAFT_TAIL = 8

Lens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Lengths:
    """Offsets of one kind of step, in tokens."""

    own: int = 0  # of a decode step itself that SGLang does not count
    ahead: int = 0  # beyond SGLang's count that are decoded under one plan, these included
    drafts: int = 0  # new ones of each request, with a query row each; 0 in a decode step
    tail: int = DRAFT_TAIL  # that may be committed under a plan with drafts: each draft of their request reads them

    @property
    def rows(self) -> int:
        """Query rows of a request."""
        return max(1, self.drafts)

    @property
    def beyond(self) -> int:
        """The most tokens beyond SGLang's count that a plan reads."""
        return self.drafts or self.ahead

    def seen(self, committed: Lens) -> Lens:
        """int32 [query rows]: KV tokens that each row sees after these of its request, [requests]."""
        return tokens_seen(committed, self.drafts) if self.drafts else committed

    def with_drafts(self, forest: Forest) -> Forest:
        """The forest of the query rows of these requests."""
        return with_new_tokens(forest, self.drafts) if self.drafts else forest

    def within_tail(self, seen: IntArray, planned: IntArray) -> bool:
        """Whether no row reads too many tokens that were committed under its plan."""
        return not self.drafts or int((seen - planned).max()) <= self.tail


PLAIN = Lengths()  # of a decode step whose tokens SGLang counts
