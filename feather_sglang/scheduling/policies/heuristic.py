"""Fixed rules (paper 4.3.2)."""

from __future__ import annotations

from typing import Any, ClassVar

from feather_sglang.scheduling.policies.base import Policy
from feather_sglang.scheduling.policies.parameters import Number, Spec
from feather_sglang.scheduling.policies.protocol import ADD, STOP, Action, PolicyState


class Heuristic(Policy):
    """ADD what costs nothing; tolerate more loss while the batch is small or many peers will share the new prefix.

    The paper gives the rules and no numbers. Ours, in chunks of 64 tokens: a batch under 8 may lose 16 chunks (1,024
    tokens), any batch 2, and 4 where at least 8 waiting requests share what remains.
    """

    name = "heuristic"
    SPEC: ClassVar[Spec] = {
        "small_batch": Number(8, 1, 1e6, integer=True),
        "small_batch_loss": Number(16, 0, 1e9, integer=True),
        "max_loss": Number(2, 0, 1e9, integer=True),
        "many_peers": Number(8, 1, 1e9, integer=True),
        "many_peers_loss": Number(4, 0, 1e9, integer=True),
    }

    def __init__(self, *, seed: int = 0, explore: bool = True, **params: Any) -> None:
        super().__init__(seed=seed, explore=explore, **params)
        self._small = self.params["small_batch"]
        self._small_loss = self.params["small_batch_loss"]
        self._max_loss = self.params["max_loss"]
        self._many = self.params["many_peers"]
        self._many_loss = self.params["many_peers_loss"]

    def decide(self, state: PolicyState) -> Action:
        """Apply the rules in the paper's order."""
        batch, loss, peers, _ = state
        if (
            loss <= 0
            or batch <= 0
            or (batch < self._small and loss <= self._small_loss)
            or loss <= self._max_loss
            or (peers >= self._many and loss <= self._many_loss)
        ):
            self.adds += 1
            return ADD
        self.stops += 1
        return STOP
