"""The server check of the pat backend without a server: the rule, the prompts, the schedule, and what it reports."""

import asyncio
import itertools
import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "checks"))

import check_pat_server as check
import pat_churn
import pat_compare
import pat_prompts
import sending
from pat_compare import Answer, Spread, Tolerance

CHUNK = 32  # tokens: sharing is found in multiples of it


def answer(tokens, logprobs=None, runner_up=1.0):
    """An answer whose second choice is everywhere token 99, less likely by so much."""
    logprobs = tuple(logprobs or [-0.5] * len(tokens))
    top = tuple({token: p, 99: p - runner_up} for token, p in zip(tokens, logprobs, strict=True))
    return Answer(tuple(tokens), logprobs, top)


def tolerance(largest=0.1, mean=0.05, floor=0.0):
    return Tolerance(Spread(largest, mean, 10, 1, 1), floor)


# The rule ---------------------------------------------------------------------------------------------------------


def test_the_spread_counts_positions_before_a_divergence():
    first = {"a": answer([1, 2, 3], [-1.0, -1.0, -1.0]), "b": answer([7, 8], [-2.0, -2.0])}
    second = {"a": answer([1, 2, 4], [-1.1, -1.3, -9.0]), "b": answer([7, 8], [-2.0, -2.0])}
    spread = pat_compare.spread(first, second)
    assert spread.largest == pytest.approx(0.3) and spread.mean == pytest.approx(0.1)
    assert spread[2:] == (4, 1, 2)


def test_equal_tokens_and_close_logprobs_are_right():
    reference = {"a": answer([1, 2, 3])}
    verdict = pat_compare.judge({"a": answer([1, 2, 3], [-0.45, -0.5, -0.5])}, reference, tolerance())
    assert not verdict.wrong and not verdict.near_ties and verdict.spread.equal == 1


@pytest.mark.parametrize(
    ("got", "runner_up", "words"),
    [
        (answer([1, 99, 5]), 0.15, None),  # a near tie: what follows may be anything
        (answer([1, 99, 5]), 0.25, "another token at 1"),
        (answer([1, 42, 5]), 0.15, "another token at 1"),  # not among the reference's most likely
        (answer([1, 2]), 0.15, "2 tokens, not 3"),
        (answer([1, 2, 3], [-0.5, -0.5, -0.75]), 0.15, "largest difference 0.25, allowed 0.2"),
        (answer([1, 2, 3], [-0.35, -0.35, -0.35]), 0.15, "mean difference 0.15, allowed 0.1"),
        (answer([1, 2, 3], [-0.5, math.nan, -0.5]), 0.15, "not finite"),
    ],
)
def test_what_is_wrong(got, runner_up, words):
    verdict = pat_compare.judge({"a": got}, {"a": answer([1, 2, 3], runner_up=runner_up)}, tolerance())
    if words is None:
        assert not verdict.wrong and verdict.largest_gap == pytest.approx(0.15)
    else:
        assert any(words in problem for problem in verdict.wrong)
    json.dumps(verdict.as_json(), allow_nan=words is not None and "finite" in words)


def test_a_shorter_request_is_compared_with_the_beginning():
    reference = answer([1, 2, 3])
    assert pat_compare.divergence("a", [1, 2], reference) is None
    assert pat_compare.divergence("a", [], reference) is None
    assert pat_compare.divergence("a", [1, 2, 3, 4], reference).gap == math.inf


def test_a_floor_for_arithmetic_that_hardly_differs():
    assert tolerance(1e-7, 1e-8, floor=1e-3).largest == tolerance(1e-7, 1e-8, floor=1e-3).mean == 1e-3


def test_positions_weigh_alike_in_the_mean_of_two_spreads():
    assert check.merged([Spread(0.2, 0.1, 30, 3, 4), Spread(0.3, 0.2, 10, 2, 4)]) == Spread(
        0.3, pytest.approx(0.125), 40, 5, 8
    )


# Prompts ----------------------------------------------------------------------------------------------------------


def encode(text):
    return list(text.encode())


def test_prompts_share_what_the_shape_says():
    made = pat_prompts.prompts(encode, rounds=2)
    assert len(made) == 2 * pat_prompts.PROMPTS
    values = list(made.values())
    first = values[: pat_prompts.PROMPTS]
    assert all(90 <= len(tokens) <= 1500 for tokens in first)

    def shared(a, b):
        return pat_compare.common(first[a], first[b])

    lengths = {shared(a, b) for a, b in itertools.combinations(range(24), 2)}
    assert shared(0, 5) >= 603 and shared(6, 9) >= 301 and shared(10, 11) >= 790
    assert shared(11, 14) >= 1100 and shared(15, 17) >= 995 and 790 <= shared(11, 15) < 1000
    assert first[18] == first[19] and max(shared(0, 6), shared(20, 23), shared(0, 20)) < CHUNK
    assert len(lengths) > 5
    assert pat_compare.common(values[0], values[24]) >= 603 and values[0] != values[24]
    assert values[18] == values[18 + 24]


def test_a_model_without_a_tokenizer_gets_random_tokens_of_its_vocabulary(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check.metadata, "entry_points", lambda group: [type("Point", (), {"name": "feather"})])
    with pytest.raises(SystemExit):
        check.arguments(["--model", str(tmp_path)])
    assert "or one with a config.json alone, for random weights" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    assert check.arguments(["--model", str(tmp_path)]).random
    made = pat_prompts.prompts(pat_prompts.encoder(tmp_path))
    first = list(made.values())
    assert {token for prompt in first for token in prompt} == set(range(pat_prompts.FIRST_TOKEN, 100))
    assert pat_compare.common(first[0], first[5]) >= 603 and first[0] != first[5]
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not check.arguments(["--model", str(tmp_path)]).random


# The schedule -----------------------------------------------------------------------------------------------------


class FakeServer:
    """Answers ``/generate`` with the given function of the request, as far as `sending` reads it."""

    def __init__(self, generate):
        self.generate = generate

    async def call(self, address, path, body=None, timeout=30.0):
        if path != "/generate":
            return ""
        request = json.loads(body)
        if request["stream"]:
            raise asyncio.TimeoutError
        tokens, reason = self.generate(request["input_ids"], request["sampling_params"]["max_new_tokens"])
        return {"output_ids": tokens, "meta_info": {"finish_reason": {"type": reason}}}


def churn(monkeypatch, generate):
    for module in (pat_churn, sending):
        monkeypatch.setattr(module, "call", FakeServer(generate).call)
    expected = {name: answer(range(number, number + 8), runner_up=0.15) for name, number in (("a", 10), ("b", 20))}
    one = pat_churn.Churn(None, {"a": [10], "b": [20]}, expected, tolerance(), most_jobs=16, pace=0.001)
    asyncio.run(one.run(0.1))
    return one


def right(prompt, count):
    return [*range(prompt[0], prompt[0] + count)], "length"


def test_churn_counts_what_became_of_each_request(monkeypatch):
    one = churn(monkeypatch, right)
    assert not one.problems and one.fates["equal"] > 10 and one.fates["hung up"] > 0


@pytest.mark.parametrize(
    ("generate", "words"),
    [
        (lambda prompt, count: right([prompt[0] + 1], count), "another token at 0"),
        (lambda prompt, count: (right(prompt, count)[0][:-1], "length"), "requests lost"),
        (lambda prompt, count: (right(prompt, count)[0], "abort"), "requests lost (ended by abort"),
    ],
)
def test_churn_finds_wrong_and_lost_requests(monkeypatch, generate, words):
    assert any(words in problem for problem in churn(monkeypatch, generate).problems)


@pytest.mark.parametrize(("reason", "fate", "right"), [("abort", "abort", True), ("length", "finish", False)])
def test_drafts_that_were_accepted_beyond_what_was_asked_for_count_for_those_given_up_only(reason, fate, right):
    one = pat_churn.Churn(None, {}, {"a": answer(range(8))}, tolerance(), most_jobs=1, pace=0.001)
    job = pat_churn.Job(0.0, "a", 8, fate, 0.0)
    said = one._outcome(job, {"output_ids": list(range(10)), "meta_info": {"finish_reason": {"type": reason}}})
    assert said == ("aborted" if right else "wrong") and bool(one.problems) is not right


def test_churn_accepts_near_ties(monkeypatch):
    one = churn(monkeypatch, lambda prompt, count: ([*right(prompt, count)[0][:-1], 99], "length"))
    assert not one.problems and one.fates["near tie"] > 10 and not one.fates["equal"]


# Metrics, log, answers, table ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "read", "kept", "right"),
    [
        (True, 400, 5, True),
        (True, 950, 5, False),
        (False, 1000, 5, True),
        (False, 990, 5, False),
        (True, 400, 0, False),
    ],
)
def test_metrics_say_whether_kv_was_shared(shares, read, kept, right):
    counts = {"plans": 3.0, "plans_kept": kept, "attended_tokens": 1000.0, "read_tokens": read}
    assert (check.check_metrics(counts, counts, check.Variant(shares=shares)) == []) == right


def test_the_log():
    assert check.check_log("feather: pat is active", "") == []
    (problem,) = check.check_log("pat is active", "Traceback (most recent call last):\n  File\nAssertionError: no")
    assert problem.endswith("AssertionError: no")
    assert check.check_log("", "")
