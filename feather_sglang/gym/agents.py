"""Policies behind the environment, and agents that were trained in it as policies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from feather_sglang.scheduling.policies import Action, PolicyState, StopPolicy
from feather_sglang.scheduling.policies.bandit import Bandit
from feather_sglang.scheduling.policies.rehearsal import imitate

if TYPE_CHECKING:
    from feather_sglang.gym.env import BatchFormationEnv, Told


def behave(env: BatchFormationEnv, policy: StopPolicy, seed: int | None = None) -> dict[str, Any]:
    """Run an episode under a policy of a server, which is asked and told what a server would; the last ``info``."""
    explores = policy.explore
    observation, info = env.reset(seed=seed)
    terminated = False
    while not terminated:
        _tell(policy, info["told"], explores)
        action = policy.decide(PolicyState(*observation.tolist()))
        observation, _, terminated, _, info = env.step(np.int64(action.value))
    _tell(policy, info["told"], explores)
    policy.explore = explores
    return info


def _tell(policy: StopPolicy, told: Iterable[Told], explores: bool) -> None:
    for name, value in told:
        if name == "explore":
            policy.explore = value and explores
        elif name == "observe":
            policy.observe(value)
        else:
            getattr(policy, name)()


def save_agent(act: Callable[[np.ndarray], Any], path: str | os.PathLike[str]) -> None:
    """Write a policy file that answers as an agent does.

    Of the states that a table does not tell apart the agent is asked about the smallest; where no prefix is lost, a
    server admits without asking. Serve with it as with any other: ``--feather-policy-file FILE --feather-explore off``.

    Parameters
    ----------
    act : from an observation to an action.
    """
    learner = Bandit()
    imitate(learner, lambda state: Action(int(act(np.array(state[:-1], np.int64)))))
    learner.save(path)
