"""What may become of a proposed request."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import NamedTuple


class Verdict(Enum):
    """Admitted, or why not now."""

    ADMIT = "admitted"
    OVERTAKES = "longer than it looked: it would pass an older request by too much, or its prefix was evicted"
    BATCHING = "its prefix is computed once more requests share it"
    EVICTS = "something would be evicted for it: it goes last"
    KV_BUDGET = "memory would not suffice beside the running ones: nobody else is proposed either"
    ENGINE = "the engine cannot take it in this round: an adapter is not loaded, say"


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
    """What a proposed request would join.

    Attributes
    ----------
    size
        Requests running or admitted so far.
    has_room
        Whether there is a free slot. Without one the stop policy is not asked: its answer could not be carried out.
    """

    size: int
    has_room: bool = True
