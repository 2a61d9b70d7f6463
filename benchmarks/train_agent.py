"""Train an agent of Stable-Baselines3 on batch formation, and write it as a policy file that a server loads.

A PPO agent decides ADD or STOP in ``BatchFormationEnv``; the table says how many output tokens a second it, never to
stop, and the fixed rules reach on requests that it was not trained on.
Run: ``pip install 'feather-sglang[gym]' stable-baselines3``, then ``python benchmarks/train_agent.py [--steps 20000]``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from rich.console import Console
from rich.table import Table
from stable_baselines3 import PPO

from feather_sglang.gym import BatchFormationEnv, behave, save_agent
from feather_sglang.replay.workloads import shared_prefix
from feather_sglang.scheduling.policies import load_policy, make_policy

# Batches of one prefix make others wait, which the bounds on waiting would end (docs/lab/trends.md).
OPTIONS = {"max_wait": 600, "max_overtaking": "inf", "pace": 0}
LARGEST = 20.0  # of a logarithm


def seen(state: np.ndarray) -> np.ndarray:
    """A state as the agent sees it: batch sizes, chunks and peers differ by orders of magnitude."""
    return np.log2(1.0 + state).astype(np.float32)


class AgentView(gymnasium.Wrapper):
    """States as logarithms, rewards in thousands of tokens a second, and ADD where no prefix is lost.

    A policy that is loaded from a file does not ask its table there.
    """

    def __init__(self, env: BatchFormationEnv) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(0.0, LARGEST, env.observation_space.shape, np.float32)
        self._free = True

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode."""
        state, info = self.env.reset(**options)
        return self._see(state), info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take a decision."""
        state, reward, terminated, truncated, info = self.env.step(0 if self._free else action)
        return self._see(state), reward / 1e3, terminated, truncated, info

    def _see(self, state: np.ndarray) -> np.ndarray:
        self._free = bool(state[0] <= 0 or state[1] <= 0)
        return seen(state)


def environment(requests: int, seed: int) -> BatchFormationEnv:
    """The paper's workload on its card, where stopping pays."""
    trace = shared_prefix(requests=requests, output_tokens=100, seed=seed)
    return BatchFormationEnv(trace, requests=min(400, requests), max_running=128, **OPTIONS)


def main() -> None:
    """Train, write the policy file, print what it is worth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="decisions to train on (20000)")
    parser.add_argument("--requests", type=int, default=2000, help="of the trace (2000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("agent.json"), help="policy file (agent.json)")
    args = parser.parse_args()
    view = AgentView(environment(args.requests, args.seed))
    model = PPO("MlpPolicy", view, n_steps=1024, batch_size=256, gamma=0.98, seed=args.seed, device="cpu")
    model.learn(args.steps)
    save_agent(lambda state: model.predict(seen(state), deterministic=True)[0], args.out)

    held_out = environment(400, args.seed + 1)
    table = Table("policy", "output tok/s", "stops")
    policies = {"never stop": make_policy("always-add"), "fixed rules": make_policy("heuristic")}
    policies["the agent, as a policy"] = load_policy(args.out, explore=False)
    for name, policy in policies.items():
        info = behave(held_out, policy, seed=0)
        table.add_row(name, f"{info['output_tok_s']:,.0f}", str(info["stops"]))
    Console().print(table)


if __name__ == "__main__":
    main()
