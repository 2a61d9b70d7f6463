"""The GPU check of speculation without a server: its servers, and the answers that it calls wrong."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

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
    stock, pat = (flags_of(one.servers[backend]) for backend in ("fa3", check.PAT))
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


STEADY, LARGE = "decode:40,4,1000,100", "decode:500,5,5000,200"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--shape", "qwen3-8b", "--case", LARGE],
            r'needs 139,000 .* has 76,000: give --flags "--max-total-tokens 139000"',
        ),
        (["--case", "decode:80,5,100,20"], "80 requests, the server runs 64: give --running 80"),
        (["--case", STEADY, "--flags", "--max-total-tokens 9119"], "needs 9,120 KV tokens, the server has 9,119"),
        (["--case", "W1"], "W1: give a decode case"),
        (["--case", "decode:1"], "decode:1: give 3 to 4 whole numbers"),
    ],
)
def test_a_case_that_the_servers_have_no_room_for_is_refused_at_once(capsys, flags, says):
    with pytest.raises(SystemExit):
        check.arguments(flags)
    assert re.search(says, capsys.readouterr().err)


def test_a_case_that_just_fits_or_is_not_timed_is_not_refused():
    check.arguments(["--case", STEADY, "--flags", "--max-total-tokens 9120"])
    check.arguments(["--shape", "qwen3-8b", "--case", LARGE, "--repeat", "0"])


class Pool(FakeServer):
    """A server with less room than was asked for, or in which a batch was never complete."""

    kv_tokens, max_running = 76_000, 64

    def printed(self):
        return ""


@pytest.mark.parametrize(
    ("kv_tokens", "steady", "says"),
    [
        (9_000, {"tok_s": 5.0}, "does not fit: needs 9,120 KV tokens, the server has 9,000: give --flags"),
        (76_000, None, "33 of 40 requests ran at once at most, 7 were retracted, 2 had no whole answer; 76000 KV"),
        (76_000, {"tok_s": 5.0}, ""),
    ],
)
def test_a_batch_that_was_never_complete_is_named(checked, monkeypatch, kv_tokens, steady, says):
    monkeypatch.setattr(check, "Server", Pool)
    counted, summary = {"peak_running": 33, "failed": 0, "unfinished": 2}, SimpleNamespace(retractions=7)
    result = SimpleNamespace(counted=counted, summary=summary)
    monkeypatch.setattr(check, "measure", lambda *args, **kwargs: (result, SimpleNamespace(streams=steady)))
    monkeypatch.setattr(check, "steady", lambda streams: streams)
    one = checked("eagle", "--case", STEADY)
    one.servers["pat"].kv_tokens = kv_tokens
    one.servers["fa3"].kv_tokens = 76_000
    one.time()
    row, rows = one.rows["pat"], list(one.rows.values())
    assert row["not_timed"].startswith(says) and bool(row["not_timed"]) == bool(says)
    assert check.status(rows) == (3 if says else 0) and not row["problems"]
    assert ("not timed" in check.table(rows)) == bool(says) and "nan" not in check.table(rows)
    assert row.get("tok_s") == (None if says else 5.0)


def test_what_is_wrong_counts_before_what_was_not_run():
    row = {"problems": [], "left_out": "", "not_timed": ""}
    late, wrong, absent = row | {"not_timed": "x"}, row | {"problems": ["x"]}, row | {"left_out": "x"}
    assert [check.status(rows) for rows in ([row], [row, late], [row, absent], [late, wrong])] == [0, 3, 3, 1]


def test_unknown_drafters_are_refused(capsys):
    with pytest.raises(SystemExit):
        check.arguments(["--drafters", "oracle"])
    assert "oracle is not among none, standalone, eagle, ngram" in capsys.readouterr().err
