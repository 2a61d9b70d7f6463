"""The GPU check of speculation without a server: what it starts, and when it says that something is wrong."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "checks"))

import check_speculation as check
from pat_compare import Answer, Tolerance, spread

RIGHT = {name: Answer((1, 2, 3), (-0.1, -0.2, -0.3), ({1: -0.1}, {2: -0.2}, {3: -0.3})) for name in "ab"}
WRONG = RIGHT | {"b": Answer((1, 7, 3), (-0.1, -4.0, -0.3))}


class FakeServer:
    """A server whose counters say that it read a share of the KV tokens."""

    def __init__(self, configuration, command, log, environment):
        self.configuration, self.command, self.environment = configuration, command, environment
        self.address = None

    def flush(self):
        pass

    def check(self):
        pass

    def tail(self, lines):
        return []


@pytest.fixture
def checked(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "Server", FakeServer)
    counts = iter(range(100))
    monkeypatch.setattr(
        check, "read_metrics", lambda server: {"attended_tokens": 10.0 * (n := next(counts)), "read_tokens": 4.0 * n}
    )

    def make(drafter, *flags):
        options = check.arguments(["--drafters", drafter, "--churn", "0", *flags])
        one = check.SpeculationCheck(drafter, options, tmp_path)
        one.start()
        return one

    return make


def flags_of(server):
    words = list(server.configuration.flags)
    last = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            last[word] = None if following.startswith("--") else following
    return last


@pytest.mark.parametrize("drafter", ["standalone", "eagle"])
def test_both_backends_get_the_same_chains_and_draft(checked, drafter):
    one = checked(drafter, "--drafts", "6")
    stock, pat = (flags_of(one.servers[backend]) for backend in (check.STOCK, check.PAT))
    assert pat.pop("--decode-attention-backend") == "pat" and pat == stock
    assert (pat["--speculative-num-steps"], pat["--speculative-num-draft-tokens"]) == ("5", "6")
    assert pat["--speculative-eagle-topk"] == "1" and pat["--speculative-attention-mode"] == "decode"
    model, draft = (
        json.loads((Path(folder) / "config.json").read_text())
        for folder in (one.logs / "model", pat["--speculative-draft-model-path"])
    )
    assert {key for key in model | draft if model.get(key) != draft.get(key)} == (
        {"draft_noise"} if drafter == "standalone" else {"architectures", "num_hidden_layers"}
    )


@pytest.mark.parametrize(("drafter", "third"), [("standalone", True), ("eagle", True), ("ngram", False)])
def test_a_third_server_decodes_the_draft_model_with_pat(checked, drafter, third):
    one = checked(drafter, "--drafts-by-pat")
    assert (check.DRAFTS_TOO in one.servers) == (check.DRAFTS_TOO in one.rows) == third
    if third:
        too, pat = (flags_of(one.servers[backend]) for backend in (check.DRAFTS_TOO, check.PAT))
        assert too.pop("--speculative-draft-attention-backend") == "pat" and too == pat


def test_simulated_acceptance_is_for_times_alone(checked):
    one = checked("eagle", "--accept", "2.5")
    assert one.options.names == ["eagle"]
    assert all(server.environment["SGLANG_SIMULATE_ACC_LEN"] == "2.5" for server in one.servers.values())
    assert check.arguments(["--drafters", "eagle"]).names == ["none", "eagle"]


@pytest.mark.parametrize(("answers", "wrong"), [(RIGHT, False), (WRONG, True)])
def test_answers_are_judged(checked, monkeypatch, answers, wrong):
    one = checked("ngram")
    monkeypatch.setattr(one, "answers", lambda backend, together=True: answers if backend == "pat" else RIGHT)
    one.judge({"together": RIGHT, "alone": RIGHT}, Tolerance(spread(RIGHT, RIGHT), check.FLOOR))
    assert bool(one.rows["pat"]["problems"]) is wrong and not one.rows["fa3"]["problems"]
    assert one.rows["pat"]["read"] == pytest.approx(0.4)
    assert ("wrong" in check.table(list(one.rows.values()))) is wrong


def test_unknown_drafters_are_refused(capsys):
    with pytest.raises(SystemExit):
        check.arguments(["--drafters", "oracle"])
    assert "oracle is not among none, standalone, eagle, ngram" in capsys.readouterr().err
