"""``BatchFormationEnv``: gymnasium's own checks, episodes, agents as policies, and what a decision costs."""

import cProfile
import importlib
import pstats
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.errors import FeatherError
from feather_sglang.gym import BatchFormationEnv, behave, save_agent
from feather_sglang.replay.batch_sharing import BatchSharing, CommonSharing, nodes_of
from feather_sglang.replay.traffic import chat
from feather_sglang.replay.workloads import shared_prefix
from feather_sglang.scheduling.policies import Action, load_policy, make_policy
from feather_sglang.scheduling.policies.discretiser import corners

NO_BOUNDS = {"max_wait": 600, "max_overtaking": "inf", "pace": 0}
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "train_agent.py"


def environment(requests=200, of=300, **given):
    trace = shared_prefix(requests=of, prefix_tokens=5000, output_tokens=60, seed=1)
    return BatchFormationEnv(trace, requests=requests, **{"max_running": 64, **NO_BOUNDS, **given})


def episode(env, seed, answer=lambda state: 0):
    state, _ = env.reset(seed=seed)
    steps = [state.tolist()]
    while True:
        state, reward, terminated, truncated, info = env.step(answer(state))
        assert not truncated
        if terminated:
            return steps, info
        steps.append([*state.tolist(), reward])


def test_it_passes_gymnasiums_checks():
    check_env(environment())


def test_an_episode_is_a_part_of_the_trace_that_the_seed_draws():
    env = environment()
    first, info = episode(env, 1)
    assert (first, info) == episode(env, 1)
    assert first != episode(env, 2)[0]
    assert len(first) > 190  # who finds an empty batch is admitted without a question
    assert any(step[-1] > 0 for step in first[1:])
    whole = environment(requests=None)
    assert episode(whole, 1) == episode(whole, 2)


def test_stopping_where_prefix_is_lost_pays_on_the_papers_card():
    env = environment()
    never = episode(env, 0)[1]
    stopping = episode(env, 0, lambda state: int(state[0] >= 8 and state[1] > 0))[1]
    assert never["stops"] == 0 < stopping["stops"]
    assert stopping["output_tok_s"] > 1.1 * never["output_tok_s"]


def test_a_frozen_policy_stays_frozen_behind_it():
    frozen = make_policy("bandit", explore=False)
    behave(environment(), frozen)
    assert not frozen.explore and not frozen.table


def test_an_agent_is_loaded_as_a_policy_that_answers_as_it_does(tmp_path):
    rng = random.Random(0)
    answers = {state: rng.randrange(2) for _, state in corners()}
    save_agent(lambda state: answers[(*state.tolist(), None)], tmp_path / "agent.json")
    policy = load_policy(tmp_path / "agent.json", explore=False)
    asked = [state for state in answers if state.batch_size and state.tip_loss]
    assert [policy.decide(state) for state in asked] == [Action(answers[state]) for state in asked]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: environment(kv_tokens=1000).reset(), "more than kv_tokens 1,000"),
        (lambda: BatchFormationEnv(chat(sessions=5)), "conversations"),
        (lambda: environment(requests=0), "requests 0"),
        (lambda: environment(no_option=1), "no_option"),
        (lambda: environment(requests=1).reset(), "no decision"),
    ],
    ids=["memory", "conversations", "size", "option", "alone"],
)
def test_what_it_cannot_do_is_one_line(make, says):
    with pytest.raises(FeatherError, match=says) as error:
        make()
    assert "\n" not in str(error.value)


def test_without_gymnasium_it_is_one_line(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("feather_sglang.gym")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(FeatherError, match=r"^feather_sglang\.gym needs .*\[gym\]'$"):
        importlib.import_module("feather_sglang.gym")


def test_a_decision_costs_few_calls():
    """It is what bounds decisions a second, whatever else this machine does (``docs/guide/training.md``)."""
    env = environment(of=200)
    policy = make_policy("heuristic")
    profile = cProfile.Profile()
    profile.enable()
    behave(env, policy)
    profile.disable()
    decisions = policy.adds + policy.stops
    assert decisions > 300
    assert pstats.Stats(profile).total_calls < 500 * decisions


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=8), st.data())
def test_what_all_rows_share_is_kept_up_to_date(prompts, data):
    """As rows join and leave, beside a comparison of all of them."""
    size = 4
    paths = [
        (group, 10 + branch, *range(100 + 10 * i, 110 + 10 * i))[: -(-n // size)]
        for i, (group, branch, n) in enumerate(prompts)
    ]
    nodes = nodes_of(paths)
    common, batch = CommonSharing(size), []
    for row in data.draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=20)):
        common.change(nodes[row], prompts[row][2], prompts[row][2], row not in batch)
        batch.remove(row) if row in batch else batch.append(row)
        found = common.of(nodes[batch[0]]) if batch else None
        if found is not None:
            whole = BatchSharing.from_paths([paths[r] for r in batch], size, [prompts[r][2] for r in batch])
            assert found == BatchSharing(
                whole.rows, whole.total_tokens, whole.unique_tokens, whole.common_tokens, (), (), 0
            )


@pytest.mark.slow
def test_an_agent_of_stable_baselines_trains_and_is_loaded(tmp_path):
    command = [
        sys.executable,
        str(BENCHMARK),
        "--steps",
        "4096",
        "--requests",
        "600",
        "--out",
        str(tmp_path / "a.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the agent, as a policy" in done.stdout
    policy = load_policy(tmp_path / "a.json", explore=False)
    assert policy.name == "bandit" and len(policy.table) == sum(1 for _, s in corners() if s.batch_size and s.tip_loss)
    assert np.isfinite(list(policy.table.values())).all()
