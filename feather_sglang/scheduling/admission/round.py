"""What lives for one admission round."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class Round:
    """One admission round: made when it opens, dropped when the next one does.

    Attributes
    ----------
    delayed
        Nobody is proposed, so that more requests share a prefill step (gate).
    stopped
        The stop policy has ended it for everybody outside the main branch of the batch.
    open_proposal
        Proposed, and not settled yet.
    due
        Proposed because it is its turn, whatever it was to wait for.
    hurried
        Proposed because somebody is overdue or may not be passed any more; no look ahead at memory keeps it out.
    overdue
        Waiting requests that are, most urgent first; None: nobody has looked.
    overtakers, unavailable
        Out for this round: by ``Verdict.OVERTAKES``, by ``Verdict.ENGINE``.
    last_call
        Those who go last are proposed now.
    deferrals
        Prefixes deferred in this round for the first time.
    saved_tokens
        That others need not compute if they wait for what was admitted in this round.
    pending_tokens
        Of admitted prompts, still to be computed.
    foreseen
        Memory has been looked ahead at.
    """

    delayed: bool = False
    stopped: bool = False
    open_proposal: Hashable | None = None
    due: Hashable | None = None
    hurried: Hashable | None = None
    overdue: deque[Hashable] | None = None
    overtakers: set[Hashable] = field(default_factory=set)
    unavailable: set[Hashable] = field(default_factory=set)
    last_call: bool = False
    deferrals: int = 0
    saved_tokens: int = 0
    pending_tokens: int = 0
    foreseen: bool = False
