"""The types of an admission round: a proposal, the batch that it would join, the verdict, and the round itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Verdict(Enum):
    """Admitted, or why not now."""

    ADMIT = "admitted"
    OVERTAKES = "longer than it looked: it would pass an older request by too much, or its prefix was evicted"
    BATCHING = "its prefix is computed once more requests share it"
    EVICTS = "something would be evicted for it, so it goes last"
    KV_BUDGET = "memory would not suffice beside the running ones: no other request is proposed either"


class Proposal(NamedTuple):
    """A proposed request after the engine has looked it up in its prefix cache; all in tokens.

    Attributes
    ----------
    cached, missing
        Of its prompt: found, and to be computed.
    free
        Of the KV pool, without evicting anything, beyond what this round has taken.
    available
        Of the KV pool, with all that can be evicted.
    """

    request_id: Hashable
    cached: int
    missing: int
    free: int
    available: int


class Batch(NamedTuple):
    """The batch that a proposed request would join.

    Attributes
    ----------
    size
        Requests running or admitted so far.
    has_room
        Whether there is a free slot. Without one the stop policy is not asked: its answer could not be carried out.
    """

    size: int
    has_room: bool = True


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
    exempt
        Proposed because somebody is overdue or may not be passed any more; no look ahead at memory keeps it out.
    overdue
        Waiting requests that are, most urgent first; None: nobody has looked.
    overtakers, unavailable
        Out for this round: by ``Verdict.OVERTAKES``; as the engine cannot take them.
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
    exempt: Hashable | None = None
    overdue: deque[Hashable] | None = None
    overtakers: set[Hashable] = field(default_factory=set)
    unavailable: set[Hashable] = field(default_factory=set)
    last_call: bool = False
    deferrals: int = 0
    saved_tokens: int = 0
    pending_tokens: int = 0
    foreseen: bool = False
