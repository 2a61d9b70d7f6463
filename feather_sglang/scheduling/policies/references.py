"""Two references for evaluation: never stop, and stop by knowing the groups."""

from __future__ import annotations

from feather_sglang.scheduling.policies.base import Policy
from feather_sglang.scheduling.policies.protocol import ADD, STOP, Action, PolicyState


class AlwaysAdd(Policy):
    """Never stops: fills the batch as far as memory goes, as stock schedulers do."""

    name = "always-add"

    def decide(self, state: PolicyState) -> Action:
        """Answer ADD."""
        self.adds += 1
        return ADD


class Oracle(Policy):
    """Keep every batch to one prefix group. Needs ``state.group``, which no server knows."""

    name = "oracle"

    def decide(self, state: PolicyState) -> Action:
        """STOP where the candidate would bring a second group into the batch."""
        if state.group is None:
            raise ValueError("the oracle needs state.group = (candidate_group, batch_groups)")
        candidate, batch = state.group
        if state.batch_size <= 0 or all(group == candidate for group in batch):
            self.adds += 1
            return ADD
        self.stops += 1
        return STOP
