"""Training in passes: what is kept of an interrupted one, when it ends, and what the policy file says."""

import json
from types import SimpleNamespace

import pytest

from feather_sglang.replay.jobs import Job
from feather_sglang.replay.train import Pass, Passes, learned, train
from feather_sglang.replay.workloads import no_sharing
from feather_sglang.scheduling.policies import Action, PolicyState, load_policy, make_policy
from feather_sglang.scheduling.policies.policy_file import read_document
from feather_sglang.scheduling.policies.rehearsal import FIRST_RULES, NEVER, StopRule

TERMS = {"profile": "some", "seed": 0}
BEST = StopRule(16)
MIXED = PolicyState(16, 20, 9)


class Replays:
    """Stands for the processes: a rule is the better the nearer it is to the best one, and the policy is as good."""

    def __init__(self, ends_after=None):
        self.ran, self.ends_after, self.passes = [], ends_after, None

    def __call__(self, jobs, work):
        (rules,) = work.args
        for job in jobs:
            if len(self.ran) == self.ends_after:
                raise KeyboardInterrupt
            self.ran.append(job.name)
            rule = rules.get(job.name)
            if rule is None:
                frozen = load_policy(job.options["policy_file"], explore=job.options["explore"])
                rate = 200.0 if frozen.decide(MIXED) is Action.STOP else 100.0
            else:
                rate = 100.0 if rule == NEVER else max(90.0, 200.0 - 3 * abs(rule.batch - BEST.batch) - rule.peers)
            self.passes.add(job.name, Pass(rule, rate, 1))


def trained(folder, replays, resume=False, terms=TERMS, rounds=4):
    job = Job("feather-bandit", no_sharing(requests=2), SimpleNamespace(), {}, {}, "training")
    passes = replays.passes = Passes(folder / "passes.json", terms)
    if resume:
        passes.resume()
    return train(rounds, make_policy("bandit"), folder / "policy.json", job, passes, replays)


def test_it_ends_once_the_policy_settles_and_finds_the_best_rule(tmp_path):
    replays = Replays()
    taken = trained(tmp_path, replays, rounds=9)
    assert [one.rule for one in taken[:5]] == list(FIRST_RULES) and taken[5].rule is None
    assert max((one for one in taken if one.rule is not None), key=lambda one: one.rate).rule == BEST
    assert [one.rule is None for one in taken].count(True) < 9  # of nine rounds: nothing changes any more
    policy = load_policy(tmp_path / "policy.json", explore=False)
    assert policy.decide(MIXED) is Action.STOP and policy.decide(PolicyState(1, 20, 3)) is Action.ADD
    assert read_document(tmp_path / "policy.json")["trained"] == TERMS


@pytest.mark.parametrize("ends_after", [0, 1, 5, 6, 8])
def test_an_interrupted_training_goes_on_and_ends_up_the_same(tmp_path, ends_after):
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole, first, rest = Replays(), Replays(ends_after), Replays()
    expected = trained(tmp_path / "whole", whole)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut", first)
    assert trained(tmp_path / "cut", rest, resume=True) == expected
    assert first.ran + rest.ran == whole.ran
    files = [(tmp_path / name / "policy.json").read_bytes() for name in ("whole", "cut")]
    assert files[0] == files[1]


@pytest.mark.parametrize("spoil", ["terms", "cut", "other"])
def test_what_does_not_fit_is_not_taken_over(tmp_path, spoil):
    first, again = Replays(), Replays()
    expected = trained(tmp_path, first)
    file = tmp_path / "passes.json"
    if spoil == "cut":
        file.write_text(file.read_text()[:50])
    elif spoil == "other":
        file.write_text(json.dumps({"provenance": TERMS, "passes": {"a": [1]}}))
    terms = {**TERMS, "seed": 1} if spoil == "terms" else TERMS
    assert trained(tmp_path, again, resume=True, terms=terms) == expected and again.ran == first.ran


@pytest.mark.parametrize(
    ("rate", "stops", "worth"),
    [(120.0, 5, True), (101.0, 5, False), (100.0, 0, False), (102.0, 0, False), (90.0, 5, False)],
)
def test_no_stops_and_no_gain_are_nothing_learned(rate, stops, worth):
    passes = [Pass(NEVER, 100.0, 0), Pass(None, 150.0, 9), Pass(BEST, 130.0, 9), Pass(None, rate, stops)]
    assert learned(passes)[0] is worth
