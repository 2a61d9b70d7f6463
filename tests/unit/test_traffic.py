"""Traffic like today's: the shapes that its generators promise, and requests that follow answers."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.cli import main
from feather_sglang.errors import FeatherError
from feather_sglang.replay.arrivals import Arrivals
from feather_sglang.replay.trace_facts import describe
from feather_sglang.replay.traces import TraceRequest, load_trace, save_trace
from feather_sglang.replay.traffic import LONGEST_CONTEXT, TRAFFIC, agents, chat, few_shot, samples

SEEDS = st.integers(0, 10**6)


@pytest.mark.parametrize("name", TRAFFIC)
def test_the_seed_decides(name):
    make = TRAFFIC[name]
    assert make(seed=3) == make(seed=3) != make(seed=4)


@pytest.mark.parametrize("name", TRAFFIC)
def test_it_survives_its_file(name, tmp_path, capsys):
    assert main(["trace", "make", "--traffic", name, "--seed", "5", "--out", str(tmp_path / "t.jsonl")]) == 0
    again = load_trace(tmp_path / "t.jsonl")
    trace = TRAFFIC[name](seed=5)
    assert again.requests == trace.requests and again.block_size == trace.block_size


def test_a_flag_that_it_would_ignore_is_refused(tmp_path, capsys):
    flags = ["--traffic", "chat", "--groups", "3", "--unique-tokens", "9", "--out", str(tmp_path / "t")]
    assert main(["trace", "make", *flags]) == 2
    assert capsys.readouterr().err == "feather: error: --traffic chat: takes no --groups, --unique-tokens\n"


@pytest.mark.parametrize("make", [chat, agents])
@given(seed=SEEDS)
def test_a_turn_opens_with_the_prompt_and_the_answer_before(make, seed):
    trace = make(sessions=10, seed=seed)
    requests = trace.requests
    assert [r.request_id for r in requests] == list(range(len(requests)))
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)
    followed = [r.after for r in requests if r.after is not None]
    assert len(set(followed)) == len(followed)  # a conversation does not part
    assert len(requests) - len(followed) == 10
    for request in requests:
        assert request.input_length + request.output_length <= LONGEST_CONTEXT
        if request.after is not None:
            before = requests[request.after]
            assert request.hash_ids[: len(before.hash_ids)] == before.hash_ids
            assert request.input_length >= before.input_length + before.output_length + trace.block_size
            assert request.arrival_s == pytest.approx(before.arrival_s + request.think_s, abs=1e-5)
    # What one conversation adds is its own.
    own = [r.hash_ids[-1] for r in requests]
    assert len(set(own)) == len(own)


@pytest.mark.parametrize(
    ("make", "figures", "input_mean", "output_mean", "turns"),
    [(chat, {"sessions": 3000}, None, 440, 2.5), (agents, {"sessions": 1500}, 8600, 180, None)],
)
def test_lengths_and_turns_are_what_was_published(make, figures, input_mean, output_mean, turns):
    trace = make(**figures)
    facts = describe(trace)
    assert facts.output_length.mean == pytest.approx(output_mean, rel=0.1)
    if input_mean:
        assert facts.input_length.mean == pytest.approx(input_mean, rel=0.15)
    if turns:
        assert len(trace.requests) / figures["sessions"] == pytest.approx(turns, rel=0.1)
        own = [r.input_length - 1024 for r in trace.requests if r.after is None]
        assert np.mean(own) == pytest.approx(300, rel=0.15)
    thinking = [r.think_s for r in trace.requests if r.after is not None]
    assert np.mean(thinking) == pytest.approx({chat: 60.0, agents: 2.0}[make], rel=0.1)


@given(seed=SEEDS)
def test_samples_of_a_prompt_differ_in_their_outputs_alone(seed):
    trace = samples(prompts=5, each=16, seed=seed)
    assert len(trace.requests) == 80 and {r.arrival_s for r in trace.requests} == {0.0}
    prompts = {}
    for request in trace.requests:
        prompts.setdefault(request.hash_ids, []).append(request.output_length)
    assert [len(outputs) for outputs in prompts.values()] == [16] * 5
    assert describe(trace).first_level_groups == 5
    assert all(len(set(outputs)) > 1 for outputs in prompts.values())


def test_few_shot_has_a_prefix_per_task():
    facts = describe(few_shot())
    assert facts.first_level_groups == 57 and facts.alone == 0 and facts.output_length.largest <= 6
    assert facts.input_length.mean == pytest.approx(800, rel=0.02)


def test_a_figure_that_cannot_be():
    for make, wrong in (
        (chat, {"sessions": 0}),
        (agents, {"rate": 0}),
        (samples, {"each": 0}),
        (samples, {"seed": -1}),
    ):
        with pytest.raises(FeatherError, match=r"must lie between"):
            make(**wrong)


# When they come ---------------------------------------------------------------------------------------------------


def serve(trace, seconds):
    """The times at which requests come to a server that takes so long for each, all at the same time."""
    arrivals, running, came, now = trace.arrivals(), [], {}, 0.0
    while True:
        for due, request in arrivals.until(now):
            came[request.request_id] = due
            running.append((now + seconds(request), request.request_id))
        moments = [end for end, _ in running] + ([arrivals.next] if arrivals.next is not None else [])
        if not moments:
            return came
        now = max(now, min(moments))
        for end, request_id in [pair for pair in running if pair[0] <= now]:
            running.remove((end, request_id))
            arrivals.ended(request_id, end)


@given(seed=SEEDS, slow=st.floats(0, 5))
def test_a_turn_comes_as_long_after_the_answer_as_its_user_thinks(seed, slow):
    trace = chat(sessions=8, seed=seed)
    came = serve(trace, lambda request: slow)
    assert len(came) == len(trace.requests)
    for request in trace.requests:
        if request.after is None:
            assert came[request.request_id] == request.arrival_s
        else:
            assert came[request.request_id] == pytest.approx(came[request.after] + slow + request.think_s)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), st.lists(st.integers(0, 25), max_size=10))
def test_without_turns_they_come_in_the_order_of_the_trace(times, moments):
    requests = [TraceRequest(i, float(at), 1, 1, (i,)) for i, at in enumerate(sorted(times))]
    arrivals, seen = Arrivals(requests), []
    for now in [*sorted(moments), 30]:
        seen += [request.request_id for _, request in arrivals.until(float(now))]
        assert seen == [r.request_id for r in requests if r.arrival_s <= now]
        assert arrivals.next == next((r.arrival_s for r in requests if r.arrival_s > now), None)


def test_which_answers_a_prompt_quotes():
    trace = chat(sessions=50)
    by_id = {r.request_id: r for r in trace.requests}
    last = max(trace.requests, key=lambda r: r.input_length)
    spans = list(trace.arrivals().answers_in(last))
    before = by_id[last.after]
    assert spans[0] == (before.request_id, before.input_length, before.input_length + before.output_length)
    assert all(begin >= end for (_, begin, _), (_, _, end) in pairwise(spans))
    assert by_id[spans[-1][0]].after is None


def test_a_part_begins_conversations_anew_where_it_cuts_them():
    trace = chat(sessions=50)
    part = trace.part(30, 40)
    assert part.requests[0].arrival_s == 0 and len(part.requests) == 40
    ids = {r.request_id for r in part.requests}
    for was, now in zip(trace.requests[30:70], part.requests, strict=True):
        assert now.after == (was.after if was.after in ids else None)
    assert len(serve(part, lambda request: 1.0)) == 40
    first, rest = trace.split(0.5)
    assert len(serve(first, lambda request: 1.0)) + len(serve(rest, lambda request: 1.0)) == len(trace.requests)


# Their file -------------------------------------------------------------------------------------------------------

FIRST = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [3, 4]}
SECOND = {"timestamp": 9, "input_length": 720, "output_length": 5, "hash_ids": [3, 4], "after": 0, "think": 1500}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_turn_in_a_file(tmp_path):
    trace = load_trace(write(tmp_path / "t.jsonl", FIRST, SECOND))
    assert trace.requests[1] == TraceRequest(1, 0.009, 720, 5, (3, 4), 0, 1.5)
    save_trace(trace, tmp_path / "again.jsonl")
    assert json.loads((tmp_path / "again.jsonl").read_text().splitlines()[1]) == SECOND


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"after": 1}, "after: must be an earlier line, counted from 0, not 1"),
        ({"after": -1}, "after: must lie between 0"),
        ({"after": None}, "after: must be a whole number, not null"),
        ({"think": -1}, "think: must lie between 0"),
        ({"input_length": 704}, "input_length: must be at least 705, prompt and answer of line 0, not 704"),
        ({"hash_ids": [3, 5]}, "hash_ids: must open with those of line 0"),
    ],
)
def test_a_turn_that_does_not_fit_is_refused(tmp_path, change, says):
    path = write(tmp_path / "t.jsonl", FIRST, SECOND | change)
    with pytest.raises(FeatherError) as error:
        load_trace(path)
    assert str(error.value).startswith(f"{path}:2: {says}")


def test_thinking_without_an_answer_is_refused(tmp_path):
    path = write(tmp_path / "t.jsonl", FIRST | {"think": 3})
    with pytest.raises(FeatherError, match="think: goes with after"):
        load_trace(path)
