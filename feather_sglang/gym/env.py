"""``BatchFormationEnv``: an agent in the stop policy's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from greenlet import getcurrent, greenlet

from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.errors import FeatherError
from feather_sglang.gym.server import BatchServer, Prompts
from feather_sglang.replay.model_shape import DEFAULT_MODEL, load_model
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import Trace
from feather_sglang.scheduling.policies import Action, PolicyState
from feather_sglang.scheduling.policies.base import Policy

_LARGEST = 2**31 - 1
_ACTIONS = tuple(Action)
Told = tuple[str, Any]  # a method or an attribute of ``StopPolicy``, and what it was told


class Asked(Policy):
    """A policy whose answers come from outside, and that notes what else it is told.

    Parameters
    ----------
    ask : gives the answer to a question.

    Attributes
    ----------
    told : since somebody has taken it, in order.
    """

    name = "agent"

    def __init__(self, ask: Callable[[PolicyState], Action]) -> None:
        self._ask = ask
        self.told: list[Told] = []
        super().__init__()
        self.told.clear()

    def decide(self, state: PolicyState) -> Action:
        """Ask."""
        return self._ask(state)

    def observe(self, reward: float) -> None:
        """Note a reward."""
        self.told.append(("observe", reward))

    def cancel(self) -> None:
        """Note that the last ADD could not be carried out."""
        self.told.append(("cancel", None))

    def end_episode(self) -> None:
        """Note that decisions without a reward get none."""
        self.told.append(("end_episode", None))

    @property
    def explore(self) -> bool:
        """Whether it may explore now."""
        return self._explore

    @explore.setter
    def explore(self, allowed: bool) -> None:
        self._explore = allowed
        self.told.append(("explore", allowed))


class BatchFormationEnv(gymnasium.Env[np.ndarray, np.int64]):
    """Batch formation of a server, one stop decision after the other (docs/design/decisions.md).

    Observation, action and reward are those of the server's policies. The observation is ``PolicyState``: batch size,
    tip loss in chunks, peers. The action is ``Action``: 0 admits the candidate, 1 ends the admission round. The reward
    is decode tokens/s between two admission rounds: the mean of what was measured since the decision before, 0 where
    nothing was. ``info["told"]`` has each of them, and what else a server tells its policy (``behave``); with the last
    step come ``output_tok_s`` of the episode, its ``makespan`` and its ``stops``.

    Parameters
    ----------
    trace : requests without conversations.
    requests : in an episode, from a place of the trace that ``reset`` draws; None: all of them.
    profile, model, attention : whose step times count, as in ``feather train``.
    kv_tokens : of a pool that holds all requests of an episode.
    max_running, chunk_tokens : limits of running requests, and of tokens in a prefill step.
    options : ``FEATHER_OPTIONS`` of the server, by name.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  as gymnasium declares it

    def __init__(
        self,
        trace: Trace,
        *,
        requests: int | None = None,
        profile: str = "rtx6000ada",
        model: str = DEFAULT_MODEL,
        attention: str | None = None,
        kv_tokens: int = 1_000_000,
        max_running: int = 500,
        chunk_tokens: int = 8192,
        **options: Any,
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(0, _LARGEST, (len(PolicyState._fields) - 1,), np.int64)
        self.action_space = gymnasium.spaces.Discrete(len(Action))
        self.options = FeatherOptions().updated(options)
        for name, value in (("requests", requests), ("max_running", max_running), ("chunk_tokens", chunk_tokens)):
            if value is not None and value < 1:
                raise FeatherError(f"{name} {value}: must be at least 1")
        self._model = StepTimeModel(load_profile(profile), load_model(model), attention)
        self._limits = {"kv_tokens": kv_tokens, "max_running": max_running, "chunk_tokens": chunk_tokens}
        self._trace = trace
        self._requests = min(requests or len(trace.requests), len(trace.requests))
        self._prompts = Prompts(trace, self.options.chunk_size)
        self._state = np.zeros(self.observation_space.shape, np.int64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode; returns the first decision to take."""
        super().reset(seed=seed)
        part, first, places = self._trace, 0, len(self._trace.requests) - self._requests
        if places:
            first = int(self.np_random.integers(places + 1))
            part = part.part(first, self._requests)
        self._policy = Asked(getcurrent().switch)
        self.server = BatchServer(part, self._prompts, self._model, self.options, self._policy, **self._limits)
        self._serving = greenlet(self.server.run)  # until it asks
        if not self._go_on():
            raise FeatherError(f"{part.name}: no decision in {len(part.requests)} requests from number {first} on")
        return self._state, self._info()

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take the decision; returns the next one."""
        asked = self._go_on(_ACTIONS[action])
        info = self._info()
        rates = [value for name, value in info["told"] if name == "observe"]
        if not asked:
            info |= self.server.outcome()
        return self._state, sum(rates) / len(rates) if rates else 0.0, not asked, False, info

    def _go_on(self, *answer: Action) -> bool:
        """Serve until the next question; returns whether there is one."""
        question = self._serving.switch(*answer)
        if question is not None:
            self._state = np.array(question[:-1], np.int64)
        return question is not None

    def _info(self) -> dict[str, Any]:
        told, self._policy.told = self._policy.told, []
        return {"told": told}
