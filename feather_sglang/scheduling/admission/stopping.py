"""ADD or STOP: what the stop policy is asked, and what it is told of it."""

from __future__ import annotations

from feather_sglang.scheduling.policies import Action, PolicyState, StopPolicy


class Stopping:
    """Keeps a stop policy's book: only decisions that were carried out are rewarded.

    Parameters
    ----------
    policy
        ``None`` where admission is left to the engine.

    Attributes
    ----------
    stops
        How often it said STOP.
    """

    def __init__(self, policy: StopPolicy | None) -> None:
        self.policy = policy
        self.stops = 0
        self._unsettled = False  # whether the last ADD has not been carried out yet
        self._frozen: tuple[StopPolicy, bool] | None = None  # who may not explore, and whether it does otherwise

    def stops_at(self, state: PolicyState) -> bool:
        """Ask the policy; an ADD is unsettled until ``carried_out`` or ``cancel``."""
        assert self.policy is not None
        if self.policy.decide(state) is Action.STOP:
            self.stops += 1
            return True
        self._unsettled = True
        return False

    def carried_out(self) -> None:
        """The engine admitted whom the policy had added."""
        self._unsettled = False

    def cancel(self) -> None:
        """The engine did not: an ADD that was not carried out teaches nothing."""
        if self._unsettled and self.policy is not None:
            self.policy.cancel()
        self._unsettled = False

    def reward(self, reward: float | None) -> None:
        """Credit decode tokens/s to the decisions since the last reward."""
        if reward is not None and self.policy is not None:
            self.policy.observe(reward)

    def explore(self, allowed: bool) -> None:
        """Whether STOP may be tried now.

        Not while memory is short: its reward would not see the prefixes that are lost by it. Nor where nobody has
        waited long: the reward would not see that a trial makes requests wait.
        """
        if self._frozen is not None and (allowed or self._frozen[0] is not self.policy):
            policy, explores = self._frozen
            policy.explore, self._frozen = explores, None
        if not allowed and self._frozen is None and self.policy is not None:
            self.policy.end_episode()
            self._frozen, self.policy.explore = (self.policy, self.policy.explore), False
