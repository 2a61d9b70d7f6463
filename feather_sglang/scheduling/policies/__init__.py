"""Stop policies: after each candidate, admit it (ADD) or end this round's admission (STOP). Paper section 4.3.

Knows nothing of SGLang or of the Chunked Hash Tree: a policy sees ``PolicyState`` and a reward
(docs/design/decisions.md).

May import: errors, file_writing.
"""

from __future__ import annotations

import os
from typing import Any

from feather_sglang.errors import FeatherError, quoted
from feather_sglang.scheduling.policies.bandit import Bandit
from feather_sglang.scheduling.policies.base import Policy
from feather_sglang.scheduling.policies.heuristic import Heuristic
from feather_sglang.scheduling.policies.policy_file import read_document
from feather_sglang.scheduling.policies.protocol import Action, PolicyState, StopPolicy
from feather_sglang.scheduling.policies.q_learning import QLearning
from feather_sglang.scheduling.policies.references import AlwaysAdd, Oracle

__all__ = ["POLICIES", "Action", "PolicyState", "StopPolicy", "load_policy", "make_policy"]

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Heuristic, Bandit, QLearning, AlwaysAdd, Oracle)
}


def make_policy(name: str, *, seed: int = 0, explore: bool = True, **params: Any) -> StopPolicy:
    """Return a fresh policy.

    Parameters
    ----------
    name : one of ``POLICIES``.
    seed : the same seed and the same inputs give the same decisions.
    explore : False for a frozen policy: greedy decisions, nothing learnt.
    params : the policy's own parameters (docs/design/decisions.md); an unknown one is a FeatherError that lists them.
    """
    if name not in POLICIES:
        raise FeatherError(f"unknown policy {quoted(name)}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name](seed=seed, explore=explore, **params)


def load_policy(path: str | os.PathLike[str], *, seed: int | None = None, explore: bool = True) -> StopPolicy:
    """Return the policy that a policy file holds, ready for a new process.

    Parameters
    ----------
    path : a policy file.
    seed : None continues the file's random numbers; a seed starts new ones.
    explore : False for a frozen policy.
    """
    name = read_document(path)["policy"]
    if name not in POLICIES:
        raise FeatherError(
            f"policy file {path} holds the unknown policy {quoted(name)}: known are {', '.join(POLICIES)}"
        )
    policy = POLICIES[name](explore=explore)
    policy.load(path)
    policy.end_episode()  # what the earlier process decided has no reward in this one
    if seed is not None:
        policy.reseed(seed)
    return policy
