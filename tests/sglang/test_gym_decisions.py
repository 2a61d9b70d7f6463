"""The environment's server decides as SGLang's scheduler does, and so a policy behind it as on a server."""

from functools import partial

import pytest
from rich.console import Console

from effort import newest_is_enough
from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.gym import BatchFormationEnv, behave
from feather_sglang.replay import processes
from feather_sglang.replay.jobs import Job, engine_of
from feather_sglang.replay.model_shape import DEFAULT_MODEL, load_model
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.workloads import shared_prefix
from feather_sglang.scheduling.policies import Action, load_policy, make_policy
from feather_sglang.scheduling.policies.rehearsal import imitate

KV_TOKENS = 1_000_000
NO_BOUNDS = {"max_wait": 600, "max_overtaking": "inf", "pace": 0}


class Logged:
    """A policy, and all that passes between it and a scheduler."""

    def __init__(self, policy):
        self.policy, self.name, self.log = policy, policy.name, []

    def decide(self, state):
        action = self.policy.decide(state)
        self.log.append((tuple(state[:3]), action))
        return action

    def __getattr__(self, name):
        value = getattr(self.policy, name)
        if name not in ("observe", "cancel", "end_episode"):
            return value
        return lambda *given: (self.log.append((name, *given)), value(*given))[-1]

    @property
    def explore(self):
        return self.policy.explore

    @explore.setter
    def explore(self, allowed):
        self.log.append(("explore", allowed))
        self.policy.explore = allowed


def _decisions(file, job, tell):
    """In a process of its own: what SGLang's scheduler asks and tells."""
    with engine_of(job) as engine:
        logged = engine.feather.admission.policy = Logged(load_policy(file))
        outcome = engine.run(job.trace)
        return logged.log, outcome.makespan, engine.feather.admission.stops


@pytest.fixture
def taught(tmp_path):
    """A file of the shipped bandit, which explores, and stops in batches of eight where prefix is lost."""
    bandit = make_policy("bandit")
    imitate(bandit, lambda state: Action.STOP if state.batch_size >= 8 else Action.ADD)
    bandit.save(tmp_path / "policy.json")
    return tmp_path / "policy.json"


@newest_is_enough
@pytest.mark.parametrize(
    ("profile", "workload", "options"),
    [
        ("rtx6000ada", {"prefix_tokens": 3000, "output_tokens": 40, "rate": 40.0, "jitter": 0.9}, NO_BOUNDS),
        ("h200", {"prefix_tokens": 12000, "output_tokens": 30, "rate": 60.0, "jitter": 1.0, "levels": 3}, {}),
    ],
    ids=["no bounds on waiting", "chunks and delays"],
)
def test_the_bandit_decides_as_inside_the_scheduler(profile, workload, options, taught, tmp_path):
    trace = shared_prefix(requests=400, groups=4, seed=3, **workload)
    model = StepTimeModel(load_profile(profile), load_model(DEFAULT_MODEL))
    settings = {"kv_tokens": KV_TOKENS, "max_running": 48, "scheduler_cost": "off"}
    given = {**FeatherOptions().updated(options).of_policy(), "policy_file": None}
    job = Job("feather", trace, model, settings, given)
    work = partial(_decisions, taught)
    log, makespan, stops = processes.run_jobs([job], 1, tmp_path, Console(quiet=True), work)["feather"]

    env = BatchFormationEnv(trace, profile=profile, kv_tokens=KV_TOKENS, max_running=48, **options)
    behind = Logged(load_policy(taught))
    info = behave(env, behind)
    assert len(log) > 400 and stops > 0
    assert [entry for entry in behind.log if entry[0] != "explore"] == [e for e in log if e[0] != "explore"]
    assert info["makespan"] == makespan and info["stops"] == stops
