"""``feather suite`` and conversations on the real replay engine, in processes of their own."""

import json
from functools import partial

import pytest

from effort import newest_is_enough
from feather_sglang.adapter.hooks import installed_version
from feather_sglang.cli import main
from feather_sglang.replay import traffic
from feather_sglang.replay.traces import Trace, TraceRequest, save_trace
from feather_sglang.replay.workloads import shared_prefix
from feather_sglang.suite import cases
from feather_sglang.suite.cases import Case

pytestmark = newest_is_enough
TINY = (
    Case("shared", "small ones", partial(shared_prefix, 3, 400, output_tokens=12, rate=50, requests=40), short=40),
    Case("chats", "small ones", partial(traffic.chat, 6, 1.0, 5.0), short=10),
)


def suite(out, *flags):
    assert main(["suite", "--short", "--policies", "feather", "--out", str(out), *flags]) == 0
    return (out / "suite.json").read_text()


def test_a_suite_of_two_cases(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cases, "CASES", TINY)
    text = suite(tmp_path / "a", "--page", str(tmp_path / "page.md"))
    results = json.loads(text)
    assert list(results["cases"]) == ["shared", "chats"] and results["skipped"] == []
    for case in results["cases"].values():
        assert list(case["policies"]) == ["fcfs", "feather"]
        for figures in case["policies"].values():
            assert 0 < figures["ttft_mean"] <= figures["ttft_p99"] <= figures["max_wait"] < figures["makespan"]
            assert 0 <= figures["slo_share"] <= 1
            assert figures["goodput"] * figures["makespan"] == pytest.approx(
                case["requests"] * figures["slo_share"], rel=1e-3
            )
    assert "## Small ones" in (tmp_path / "page.md").read_text() and "goodput" in capsys.readouterr().out
    # A cell that is lost is run again, and all is as it was.
    lost = tmp_path / "a" / "cells" / "chats-feather.json"
    before = {file: file.stat().st_mtime_ns for file in lost.parent.iterdir()}
    lost.unlink()
    assert suite(tmp_path / "a") == text
    assert {file for file in lost.parent.iterdir() if file.stat().st_mtime_ns != before[file]} == {lost}


CROWD = Case("crowd", "small ones", partial(traffic.agents, 25, 3.0), short=100)


def test_who_is_told_of_the_bounds_serves_more_within_them(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "CASES", (CROWD,))
    out = tmp_path / "out"
    # A piece for every token: in one of sixteen the others make up for a token that was late.
    flags = ["--policies", "feather,feather+slo", "--server-flags=--stream-interval 1"]
    assert main(["suite", "--short", *flags, "--out", str(out)]) == 0
    policies = json.loads((out / "suite.json").read_text())["cases"]["crowd"]["policies"]
    told, untold = policies["feather+slo"], policies["feather"]
    assert told["slo_share"] > untold["slo_share"] + 0.2
    assert told["output_tok_s"] > 0.95 * untold["output_tok_s"]


@pytest.mark.parametrize("policy", ["fcfs", "feather"])
def test_a_conversation_finds_its_answers_in_the_cache(tmp_path, policy):
    """Three turns of one user: each prompt is the one before, its answer and 64 tokens more, ten seconds later."""
    turns, path = [], ()
    for number in range(3):
        path = (*path, *(range(100 * number, 100 * number + 3)))  # two blocks of answer and one of a question
        length = 64 * len(path)
        after = number - 1 if number else None
        turns.append(TraceRequest(number, 10.0 * number, length, 128, path, after, 10.0 if number else 0.0))
    save_trace(Trace("turns", 64, turns), tmp_path / "turns.jsonl")
    flags = ["--policies", policy, "--scheduler-cost", "off", "--out", str(tmp_path / "out")]
    assert main(["ab", str(tmp_path / "turns.jsonl"), *flags]) == 0
    run = json.loads((tmp_path / "out" / "results.json").read_text())["runs"][policy]
    # No KV is made for an answer's last token, unless the next step is under way when the answer is seen to end.
    under_way = installed_version() == "0.5.17"
    cached = sum(turn.input_length + turn.output_length - (not under_way) for turn in turns[:2])
    assert run["cache_hit"] == cached / sum(turn.input_length for turn in turns)
    answering = run["e2e_mean"] * 3
    assert run["makespan"] == pytest.approx(20 + answering, rel=1e-6)
