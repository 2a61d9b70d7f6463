"""Policy files: identical continuation, atomic writing, and refusal in one clear line."""

import copy
import json
import os

import pytest
from test_policies import LEARNERS, POLICIES, answers

from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policies import PolicyState, load_policy, make_policy


@pytest.fixture(params=POLICIES)
def trained(request):
    policy = make_policy(request.param, seed=7)
    answers(policy, 1, 2000)
    policy.decide(PolicyState(30, 20, 5, group=(1, {1})))  # a decision still without its reward
    return policy


@pytest.fixture
def path(tmp_path):
    return tmp_path / "policy.json"


def test_a_loaded_policy_continues_identically(trained, path):
    trained.save(path)
    other = make_policy(trained.name, seed=99)
    other.load(path)
    assert answers(other, 2, 1000) == answers(trained, 2, 1000)


def test_what_was_loaded_is_saved_identically(trained, path, tmp_path):
    trained.save(path)
    other = make_policy(trained.name, seed=99)
    other.load(path)
    other.save(tmp_path / "again.json")
    assert path.read_bytes() == (tmp_path / "again.json").read_bytes()


def test_load_policy_finds_the_kind_and_starts_a_new_episode(trained, path):
    trained.save(path)
    policy = load_policy(path)
    assert type(policy) is type(trained) and policy.params == trained.params
    trained.end_episode()
    assert answers(policy, 2, 1000) == answers(trained, 2, 1000)


def test_parameters_come_from_the_file(path):
    make_policy("qlearning", gamma=0.7).save(path)
    policy = make_policy("qlearning")
    policy.load(path)
    assert policy.params["gamma"] == 0.7
    assert load_policy(path).params == policy.params


@pytest.mark.parametrize("name", LEARNERS)
def test_a_file_that_names_its_features_continues_identically(name, path):
    """As releases wrote it in which free KV memory could be a feature; one that has it is refused."""
    trained, other = make_policy(name, seed=7), make_policy(name, seed=99)
    answers(trained, 1, 2000)
    edited(trained, path, lambda d: d["params"].update(features="paper"))
    other.load(path)
    assert answers(other, 2, 1000) == answers(trained, 2, 1000)
    edited(
        trained, path, lambda d: (d["params"].update(features="headroom"), d["discretiser"].update(features="headroom"))
    )
    assert "train it again" in refusal(other, path)


@pytest.mark.parametrize("name", LEARNERS)
def test_freezing_is_the_callers_choice_not_the_files(name, path):
    policy = make_policy(name, explore=False)
    policy.save(path)
    assert load_policy(path).explore and not load_policy(path, explore=False).explore
    policy.load(path)
    assert not policy.explore


def test_a_seed_starts_new_random_numbers(path):
    policy = make_policy("qlearning", seed=7)
    answers(policy, 1, 30)
    policy.save(path)
    continued, one, two = (answers(load_policy(path, seed=seed), 2, 1000) for seed in (None, 1, 1))
    assert one == two != continued


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(trained, path, monkeypatch):
    trained.save(path)
    old = path.read_bytes()

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    answers(trained, 3, 100)
    with pytest.raises(FeatherError, match=r"cannot write policy file .*: No space left on device"):
        trained.save(path)
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]


def test_an_unwritable_place_is_one_clear_line(tmp_path):
    with pytest.raises(FeatherError, match=r"cannot write policy file .*missing.*: No such file or directory"):
        make_policy("bandit").save(tmp_path / "missing" / "policy.json")


def refusal(policy, path):
    """Load `path` into `policy`: it must refuse in one line and leave the policy as it was."""
    before = copy.deepcopy(policy.__dict__)
    with pytest.raises(FeatherError) as error:
        policy.load(path)
    after = policy.__dict__
    assert before.keys() == after.keys()
    assert before.get("_trial") == after.get("_trial")
    plain = ("params", "explore", "seed", "adds", "stops", "table", "rewards", "_waiting", "_epsilon", "_open")
    assert all(before[name] == after[name] for name in plain if name in before)
    if "_random" in before:
        assert before["_random"].getstate() == after["_random"].getstate()
    message = str(error.value)
    assert "\n" not in message and str(path) in message and len(message) < 400
    return message


def test_a_missing_file_is_refused(path):
    assert "cannot read policy file" in refusal(make_policy("bandit"), path)
    with pytest.raises(FeatherError, match="No such file"):
        load_policy(path)


def test_a_directory_is_refused(tmp_path):
    assert "Is a directory" in refusal(make_policy("bandit"), tmp_path)


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"format": "pickle", "version": 1}', '{"table": {}}'])
def test_a_foreign_file_is_refused(text, path):
    path.write_text(text)
    assert "is not a policy file" in refusal(make_policy("bandit"), path)


@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe", b"not json", b"[" * 200_000], ids=range(4))
def test_a_file_that_is_not_json_is_refused(content, path):
    path.write_bytes(content)
    assert "is damaged: not JSON" in refusal(make_policy("bandit"), path)


def test_another_kind_is_refused(path):
    make_policy("qlearning").save(path)
    assert "is for policy 'qlearning', not 'bandit'" in refusal(make_policy("bandit"), path)


def edited(policy, path, edit):
    policy.save(path)
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("name", ["explore", "seed", "self", "epsilonn"])
def test_a_parameter_of_another_name_is_refused(trained, path, name):
    edited(trained, path, lambda d: d["params"].update({name: False}))
    assert f"has no parameter {name!r}" in refusal(trained, path)


def test_a_newer_file_is_refused(trained, path):
    edited(trained, path, lambda d: d.update(version=2, table="in a form yet to be invented"))
    assert "has version 2, this release reads up to 1: update feather-sglang" in refusal(trained, path)


def test_an_unknown_kind_is_refused(trained, path):
    edited(trained, path, lambda d: d.update(policy="oracle-of-delphi"))
    with pytest.raises(FeatherError, match="unknown policy 'oracle-of-delphi': known are heuristic, bandit"):
        load_policy(path)


def test_every_truncation_is_refused(trained, path):
    trained.save(path)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 2, max(1, len(whole) // 60)):
        path.write_bytes(whole[:length])
        refusal(trained, path)


def table_row(document):
    return next(iter(document["table"].values()))


DAMAGE = {
    "version": lambda d: d.update(version="1"),
    "version true": lambda d: d.update(version=True),
    "version 0": lambda d: d.update(version=0),
    "policy": lambda d: d.update(policy=None),
    "no params": lambda d: d.pop("params"),
    "params": lambda d: d.update(params=[1]),
    "unknown param": lambda d: d["params"].update(speed=1),
    "param NaN": lambda d: d["params"].update(margin=float("nan")),
    "param infinite": lambda d: d["params"].update(trial=float("inf")),
    "param huge": lambda d: d["params"].update(margin=10**400),
    "param type": lambda d: d["params"].update(margin="2%"),
    "no table": lambda d: d.pop("table"),
    "table": lambda d: d.update(table=[]),
    "table state": lambda d: d["table"].update({"99.0.0.0": [0, 0, 0, 0, 0]}),
    "row NaN": lambda d: table_row(d).__setitem__(0, float("nan")),
    "row infinite": lambda d: table_row(d).__setitem__(0, float("inf")),
    "row huge": lambda d: table_row(d).__setitem__(0, 10**400),
    "row negative": lambda d: table_row(d).__setitem__(1, -1),
    "row text": lambda d: table_row(d).__setitem__(0, "1.0"),
    "row boolean": lambda d: table_row(d).__setitem__(0, True),
    "row null": lambda d: table_row(d).__setitem__(0, None),
    "row short": lambda d: table_row(d).pop(),
    "row type": lambda d: d["table"].update({next(iter(d["table"])): 5}),
    "bins": lambda d: d["discretiser"].update(batch_bins=7),
    "no bins": lambda d: d.pop("discretiser"),
    "other features": lambda d: d["discretiser"].update(features="headroom", headroom_edges=[0.05, 0.2, 0.5]),
    "no trial": lambda d: d.pop("trial"),
    "trial running": lambda d: d["trial"].update(running=1),
    "trial share": lambda d: d["trial"].update(stopping=1.01),
    "trial NaN": lambda d: d["trial"].update(rest=float("nan")),
    "trial short": lambda d: d["trial"].pop("patience"),
    "waiting": lambda d: d.update(waiting={}),
    "waiting state": lambda d: d.update(waiting=[[0, 1]]),
    "waiting fraction": lambda d: d.update(waiting=[[0.5, 1]]),
    "waiting count": lambda d: d["waiting"][0].__setitem__(1, 0),
}
ONLY = {
    "bandit": {"credited": lambda d: d.update(credited=-1), "no credited": lambda d: d.pop("credited")},
    "qlearning": {
        "epsilon": lambda d: d["epsilon"].update({next(iter(d["epsilon"])): 1.5}),
        "epsilon state": lambda d: d["epsilon"].update({"x": 0.5}),
        "episode": lambda d: d.pop("episode"),
        "episode weight": lambda d: d["episode"].update(weight=1.0),
        "episode code": lambda d: d["episode"].update(codes=[[10**9, 1]]),
        "no random": lambda d: d.pop("random"),
        "random short": lambda d: d["random"].pop(),
        "random text": lambda d: d["random"].__setitem__(3, "x"),
        "random negative": lambda d: d["random"].__setitem__(3, -1),
        "random large": lambda d: d["random"].__setitem__(3, 2**62),
        "random index": lambda d: d["random"].__setitem__(624, 10**6),
    },
}
CASES = [(name, what) for name in LEARNERS for what in [*DAMAGE, *ONLY[name]]]


@pytest.mark.parametrize("name, what", CASES)
def test_damage_is_refused_and_the_policy_stays_as_it_was(name, what, path):
    policy = make_policy(name, seed=7)
    answers(policy, 1, 2000)
    policy.decide(PolicyState(30, 20, 5))
    edited(policy, path, {**DAMAGE, **ONLY[name]}[what])
    message = refusal(policy, path)
    assert "is damaged" in message or "not 'None'" in message
