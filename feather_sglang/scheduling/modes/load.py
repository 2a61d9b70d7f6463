"""What a server's load looks like: the state that a mode is chosen by."""

from __future__ import annotations

from bisect import bisect_right
from itertools import product
from typing import NamedTuple

MEMORY = ("free", "tight", "short")
LATE = ("none", "some", "most")
STEP = ("small", "large", "over")
_LATE_EDGES = (1e-9, 0.5)  # share of the oldest waiting
_STEP_EDGES = (0.35, 0.65)  # of the bound between tokens; beyond, no prefill step fits beside a decode step


class Load(NamedTuple):
    """The load when an admission round opens.

    Attributes
    ----------
    tight
        All that is asked for exceeds the KV pool.
    short
        And prefixes compete for it: arrivals meet others of their prefix.
    late
        Share of the oldest waiting whose first token cannot come in time any more, 0 to 1.
    step
        A decode step over the bound between tokens; 0: not known yet.
    """

    tight: bool = False
    short: bool = False
    late: float = 0.0
    step: float = 0.0

    def key(self) -> str:
        """Name of the state in a table: memory, late, step."""
        memory = MEMORY[2 if self.short else int(self.tight)]
        late = LATE[bisect_right(_LATE_EDGES, self.late)]
        return f"{memory}/{late}/{STEP[bisect_right(_STEP_EDGES, self.step)]}"


KEYS = tuple("/".join(parts) for parts in product(MEMORY, LATE, STEP))
