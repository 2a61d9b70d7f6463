"""The base of all policies: parameters, counters, and policy files."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from feather_sglang.errors import FeatherError, quoted
from feather_sglang.scheduling.policies.parameters import Spec, checked
from feather_sglang.scheduling.policies.policy_file import mapping, read_document, write_document
from feather_sglang.scheduling.policies.protocol import Action, PolicyState


class Policy:
    """A policy without memory; learners add a table.

    Parameters
    ----------
    seed : seeds whatever the policy draws; the same seed and inputs give the same decisions.
    explore : False freezes a learner: greedy decisions, nothing learnt. Not part of the policy file.
    params : by name, see ``SPEC``.
    """

    name: str = ""
    SPEC: ClassVar[Spec] = {}

    def __init__(self, *, seed: int = 0, explore: bool = True, **params: Any) -> None:
        self.params = checked(self.name, self.SPEC, params)
        self.seed = seed
        self.explore = explore
        self.adds = 0
        self.stops = 0

    def decide(self, state: PolicyState) -> Action:
        """Answer ADD or STOP."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Nothing is learnt, so nothing is to be taken back."""

    def observe(self, reward: float) -> None:
        """Nothing is learnt."""

    def end_episode(self) -> None:
        """No decision waits for a reward."""

    def reseed(self, seed: int) -> None:
        """Start new random numbers."""
        self.seed = seed

    def stats(self) -> dict[str, float]:
        """Return the decisions taken, by action."""
        decisions = self.adds + self.stops
        return {
            "decisions": decisions,
            "adds": self.adds,
            "stops": self.stops,
            "stop_share": self.stops / decisions if decisions else 0.0,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy file, atomically."""
        write_document(path, self.name, {"params": self.params, **self._export()})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from a policy file of the same kind; on any fault FeatherError, and this object as it was."""
        document = read_document(path)
        if document["policy"] != self.name:
            raise FeatherError(f"policy file {path} is for policy {quoted(document['policy'])}, not {self.name!r}")
        try:
            given = mapping(document.get("params"), "params")
            given.pop("features", None)  # of older releases; the description of the states says the same
            params = checked(self.name, self.SPEC, given)
            fresh = type(self)(seed=self.seed, explore=self.explore, **params)
            fresh._restore(document)
        except (FeatherError, ValueError) as error:
            raise FeatherError(f"policy file {path} is damaged: {error}") from error
        self.__dict__.update(fresh.__dict__)

    def _export(self) -> dict[str, Any]:
        """Content of the policy file beside the parameters."""
        return {}

    def _restore(self, document: dict[str, Any]) -> None:
        """Take over what `_export` wrote; ValueError names the first thing wrong."""
