"""A real server under each feather policy: the same answers as under fcfs, and nothing left behind."""

from __future__ import annotations

import threading
import time

import pytest

from server.cases import FeatherServer
from server.workload import Answer, Request

pytestmark = pytest.mark.timeout(600)


def test_fcfs_answers_do_not_depend_on_the_batch(fcfs: list[dict[str, Answer]], requests: list[Request]) -> None:
    # Without this the comparisons below would show rounding, not scheduling.
    at_once, in_turn = fcfs
    assert {name: answer.text for name, answer in at_once.items()} == {
        name: answer.text for name, answer in in_turn.items()
    }
    assert len({answer.text for answer in at_once.values()}) > 0.9 * len(requests)


def test_same_greedy_tokens_as_fcfs(served: dict[str, Answer], fcfs: list[dict[str, Answer]]) -> None:
    assert {name: answer.finish_reason for name, answer in served.items()} == {
        name: answer.finish_reason for name, answer in fcfs[0].items()
    }
    assert {name: answer.text for name, answer in served.items()} == {
        name: answer.text for name, answer in fcfs[0].items()
    }
    for name, answer in served.items():
        assert answer.completion_tokens == fcfs[0][name].completion_tokens
        assert answer.logprobs == pytest.approx(fcfs[0][name].logprobs, abs=1e-3)


def test_prefixes_are_reused(feather_server: FeatherServer, served: dict[str, Answer]) -> None:
    prompts = sum(answer.prompt_tokens for answer in served.values())
    cached = sum(answer.cached_tokens for answer in served.values())
    # All but the first request of each group can reuse about 600 of 630 tokens. feather-order admits as fcfs does,
    # which computes a new prefix as often as it stands in the round; and a small pool evicts.
    assert cached > (0.6 if feather_server.case.retracts else 0.85) * prompts


def test_disconnects_and_aborts_leave_nothing_behind(
    feather_server: FeatherServer, fcfs: list[dict[str, Answer]], requests: list[Request]
) -> None:
    server = feather_server.server
    # Of every five clients one hangs up while it waits or during prefill and one in the middle of its stream.
    hang_up = {r.name: (0, 5)[i % 5] for i, r in enumerate(requests) if i % 5 < 2}
    answers = feather_server.answers(requests, stop_after=hang_up)
    server.wait_until_idle()
    for name, answer in answers.items():
        if name not in hang_up:
            assert answer.text == fcfs[0][name].text

    thread = threading.Thread(target=feather_server.answers, args=(requests,))
    thread.start()
    server.wait_until_busy()
    server.post("/abort_request", {"rid": "", "abort_all": True})
    thread.join(60)
    server.wait_until_idle()
    server.post("/flush_cache", {})  # answers 400 if a request is left
    assert server.load() == (0, 0, 0)


def test_pause_and_resume(
    feather_server: FeatherServer, fcfs: list[dict[str, Answer]], requests: list[Request]
) -> None:
    server, answers = feather_server.server, {}
    thread = threading.Thread(target=lambda: answers.update(feather_server.answers(requests[:50])))
    thread.start()
    server.wait_until_busy()
    for mode in ("retract", "in_place"):
        server.post("/pause_generation", {"mode": mode})
        time.sleep(0.1)
        server.post("/continue_generation", {})
        time.sleep(0.1)
    thread.join(60)
    server.wait_until_idle()
    assert {name: answer.text for name, answer in answers.items()} == {
        request.name: fcfs[0][request.name].text for request in requests[:50]
    }


def test_the_log_tells_of_no_failure(feather_server: FeatherServer) -> None:
    """Runs last on each server: the debug check has seen all of the above."""
    server, log = feather_server.server, feather_server.server.text()
    assert server.alive()
    assert f"{feather_server.case.policy} is active" in log
    assert "Traceback" not in log and "goes on as fcfs" not in log
    assert ("Retract requests" in log) == feather_server.case.retracts or not feather_server.case.retracts
