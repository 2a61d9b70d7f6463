"""A real server under each feather policy: the same answers as under fcfs, and nothing left behind.

One file, as its tests share the answers under fcfs: a file's tests run in one process.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "checks"))

from decision_logs import compare

from effort import newest_is_enough
from feather_sglang.adapter.ports import free_port
from feather_sglang.cli import main
from feather_sglang.replay.traces import load_trace
from feather_sglang.scheduling.policy_names import SWITCH_PATH
from operations import queried_metrics
from preloaded import Preloaded
from server.cases import KEY, LOSES_FIRST_LOGPROB, REFERENCE, ROOMY, FeatherServer
from server.sglang_server import SGLangServer, server_environment
from server.tiny_model import write_model
from server.workload import Answer, Request, stream_all

pytestmark = pytest.mark.timeout(600)
DOCS = Path(__file__).parents[2] / "docs"
ENGINE = Path(__file__).with_name("engine_program.py")


def test_fcfs_answers_do_not_depend_on_the_batch(fcfs: list[dict[str, Answer]], requests: list[Request]) -> None:
    # Without this the comparisons below would show rounding, not scheduling.
    at_once, in_turn = fcfs
    assert {name: answer.text for name, answer in at_once.items()} == {
        name: answer.text for name, answer in in_turn.items()
    }
    assert len({answer.text for answer in at_once.values()}) > 0.9 * len(requests)
    for request in requests:
        if "logprobs" in request.body:
            assert len(at_once[request.name].logprobs) == at_once[request.name].completion_tokens > 0


@pytest.mark.of_cases("pat")
def test_before_any_request_the_metrics_are_there_that_are_queried(
    feather_server: FeatherServer,
) -> None:
    """The first test on its server."""
    server, found = feather_server.server, metrics(feather_server)
    names = {name for name, *_ in found}
    asked = queried_metrics()
    assert len(asked) > 15 and {name for name in asked if name.startswith("feather_")} <= names
    served = {"feather_pat_prefill"} if "--feather-pat-prefill" in feather_server.case.flags else set()
    listed = re.findall(r"^\|`(feather_\w+)`\|(\w+)", (DOCS / "reference" / "metrics.md").read_text(), re.MULTILINE)
    for name, kind in listed:
        shown = f"{name}_count" if kind == "histogram" else name
        assert (shown in names) is (not name.startswith("feather_pat_prefill") or bool(served)), name
    (info,) = (labels for name, labels, value in found if name == "feather_policy_info")
    assert f'policy="{feather_server.case.policy}"' in info and 'options="{}"' in info
    assert [value for name, _, value in found if name.startswith("feather_policy_fail")] == [0.0, 0.0]
    (state,) = server.get("/server_info")["internal_states"]
    assert state["feather"]["schedule_policy"] == feather_server.case.policy and not state["feather"]["failed"]


@pytest.mark.of_cases("pat")
def test_metrics_tell_what_was_served(feather_server: FeatherServer, served: dict[str, Answer]) -> None:
    deadline = time.monotonic() + 10  # they are written twice a second, also by an idle scheduler
    while (found := metrics(feather_server)) and time.monotonic() < deadline:
        values = {name: value for name, labels, value in found if not labels}
        admitted = sum(v for name, labels, v in found if name.endswith("decisions_total") and '"admitted"' in labels)
        if values["feather_wait_seconds_count"] == admitted >= len(served):
            break
        time.sleep(0.2)
    assert values["feather_wait_seconds_count"] == admitted >= len(served)
    assert 0 < values["feather_round_seconds_count"] and values["feather_policy_failures_total"] == 0
    assert values["feather_pat_saved_bytes_total"] == pytest.approx(
        # K and V of two KV heads of 32 in float32, in each of two layers
        (values["feather_pat_attended_tokens_total"] - values["feather_pat_read_tokens_total"]) * 2 * 2 * 2 * 32 * 4
    )
    assert {name for name in queried_metrics() if name.startswith("sglang:")} <= {name for name, *_ in found}


def metrics(feather_server: FeatherServer) -> list[tuple[str, str, float]]:
    """(name, labels, value) of every series that the server shows."""
    lines = feather_server.server.get("/metrics").splitlines()
    series = (re.match(r"([\w:]+)(\{.*\})? (\S+)", line) for line in lines if not line.startswith("#"))
    return [(one[1], one[2] or "", float(one[3])) for one in series if one]


def test_same_greedy_tokens_as_fcfs(
    feather_server: FeatherServer, served: dict[str, Answer], fcfs: list[dict[str, Answer]]
) -> None:
    assert {name: answer.finish_reason for name, answer in served.items()} == {
        name: answer.finish_reason for name, answer in fcfs[0].items()
    }
    assert {name: answer.text for name, answer in served.items()} == {
        name: answer.text for name, answer in fcfs[0].items()
    }
    for name, answer in served.items():
        assert answer.completion_tokens == fcfs[0][name].completion_tokens
        logprobs = fcfs[0][name].logprobs
        if LOSES_FIRST_LOGPROB and feather_server.case.retracts and len(answer.logprobs) == len(logprobs) - 1:
            logprobs = logprobs[1:]  # the first and no other: see there
        assert answer.logprobs == pytest.approx(logprobs, abs=1e-3)


def test_prefixes_are_reused(feather_server: FeatherServer, served: dict[str, Answer]) -> None:
    prompts = sum(answer.prompt_tokens for answer in served.values())
    cached = sum(answer.cached_tokens for answer in served.values())
    # All but the first request of each group can reuse about 600 of 630 tokens. feather-order admits as fcfs does,
    # which computes a new prefix as often as it stands in the round; and a small pool evicts.
    assert cached > (0.6 if feather_server.case.retracts else 0.85) * prompts


@pytest.mark.of_cases("pat")
def test_decoding_reads_shared_tokens_once(feather_server: FeatherServer, served: dict[str, Answer]) -> None:
    lines = [line for line in feather_server.server.get("/metrics").splitlines() if line.startswith("feather_pat_")]
    counts = {line.split("{")[0].split(" ")[0]: float(line.split(" ")[-1]) for line in lines}
    assert counts["feather_pat_plans_total"] > 0 and counts["feather_pat_plans_kept_total"] > 0
    assert 0 < counts["feather_pat_read_tokens_total"] < 0.6 * counts["feather_pat_attended_tokens_total"]
    packs = "--feather-pat-prefill" in feather_server.case.flags
    assert (counts.get("feather_pat_prefills_total", 0) > 0) is packs
    if packs:
        attended, read = (counts[f"feather_pat_prefill_{what}_tokens_total"] for what in ("attended", "read"))
        assert read <= 0.2 * attended


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


@pytest.mark.of_cases("switches")
def test_new_weights_under_load(
    feather_server: FeatherServer, fcfs: list[dict[str, Answer]], requests: list[Request], model: Path, tmp_path: Path
) -> None:
    """SGLang serves whom it has accepted and then loads; paused, it loads at once, and they go on with the new ones."""
    server, chosen = feather_server.server, requests[:40]
    old, other = {request.name: fcfs[0][request.name].text for request in chosen}, write_model(tmp_path / "new", seed=1)

    def load(weights: Path, paused: bool) -> dict[str, str]:
        answers: dict[str, Answer] = {}
        thread = threading.Thread(target=lambda: answers.update(feather_server.answers(chosen)))
        thread.start()
        server.wait_until_busy()
        if paused:
            server.post("/pause_generation", {"mode": "retract"})
        server.post("/update_weights_from_disk", {"model_path": str(weights)})
        if paused:
            server.post("/continue_generation", {})
        thread.join(120)
        server.wait_until_idle()
        assert server.load() == (0, 0, 0)
        return {name: answer.text for name, answer in answers.items()}

    def now() -> dict[str, str]:
        return {name: answer.text for name, answer in feather_server.answers(chosen).items()}

    during = load(other, paused=False)
    new = now()
    assert all(new[name] != text for name, text in old.items())
    assert all(text in (old[name], new[name]) for name, text in during.items()) and set(during) == set(old)
    during = load(model, paused=True)
    assert set(during) == set(old) and all(during.values())
    assert now() == old


@pytest.mark.of_cases("switches")
def test_a_policy_is_switched_under_the_admin_key_alone(
    feather_server: FeatherServer, fcfs: list[dict[str, Answer]], requests: list[Request]
) -> None:
    server = feather_server.server
    chosen = [request for request in requests if "regex" not in request.body][:20]

    def switch(name: str, key: str | None = KEY, **more: bool) -> tuple[int, Any]:
        status, text = server.answer(SWITCH_PATH, {"schedule_policy": name, **more}, key)
        return status, json.loads(text)

    def state() -> dict[str, Any]:
        (found,) = server.get("/server_info")["internal_states"]
        return {"reported": found["schedule_policy"], **found["feather"]}

    message = {"server_args": {'{"schedule_policy": "lpm"}': 1}}  # what the endpoint sends to the schedulers
    for key in (None, "guessed"):
        assert switch("lpm", key)[0] == server.answer("/set_internal_state", message, key)[0] == 401
    for name in ("fcfs", "lpm", "feather-order", "feather", "fcfs"):
        server.wait_until_idle()
        assert switch(name) == (200, {"schedule_policy": name})
        before = state()
        assert before["schedule_policy"] == before["reported"] == name and before["rounds"] == 0
        answers = stream_all(server.url, chosen)
        assert {name: answer.text for name, answer in answers.items()} == {
            request.name: fcfs[0][request.name].text for request in chosen
        }
        after = state()
        assert after["rounds"] > 0 and after["admission_seconds"] > 0

    thread = threading.Thread(target=stream_all, args=(server.url, chosen))
    thread.start()
    server.wait_until_busy()
    status, answer = switch("lpm")
    thread.join(60)
    assert status == 409 and "running or waiting: switch when idle" in answer["error"]
    assert state()["schedule_policy"] == "fcfs"
    answers = {}
    thread = threading.Thread(target=lambda: answers.update(stream_all(server.url, chosen)))
    thread.start()
    server.wait_until_busy()
    for name in ("feather-heuristic", "lpm"):
        assert switch(name, drain=True) == (200, {"schedule_policy": name}) and state()["schedule_policy"] == name
    thread.join(60)
    assert {name: answer.text for name, answer in answers.items()} == {
        request.name: fcfs[0][request.name].text for request in chosen
    }
    status, answer = switch("fifo")
    assert status == 400 and answer["error"].startswith("unknown schedule policy 'fifo'")


@pytest.mark.of_cases("switches")
def test_a_switch_is_watched_and_taken_back(
    feather_server: FeatherServer, requests: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    server, over = feather_server.server, threading.Event()
    chosen = [request for request in requests if "regex" not in request.body][:10]

    def load() -> None:
        while not over.is_set():
            stream_all(server.url, chosen)

    def switch(policy: str, keep: str) -> tuple[int, str]:
        flags = ("--watch", "2s", "--settle", "0s", "--keep", keep, "--admin-key", KEY)
        status = main(["switch", server.url, policy, *flags])
        (state,) = server.get("/server_info")["internal_states"]
        return status, state["feather"]["schedule_policy"]

    thread = threading.Thread(target=load)
    thread.start()
    try:
        server.wait_until_busy()
        assert switch("feather-order", "tok/s>=0.01x,tbt_p99<=100x") == (0, "feather-order"), capsys.readouterr()
        assert switch("hrrn", "ttft_p50<=0.0001x") == (1, "feather-order"), capsys.readouterr()
    finally:
        over.set()
        thread.join(60)


@pytest.mark.of_cases("records")
def test_what_was_served_is_recorded_and_can_be_replayed(
    feather_server: FeatherServer, served: dict[str, Answer], tmp_path: Path
) -> None:
    """Last: the recording goes on after the policy was switched."""
    server, prompt = feather_server.server, list(range(40, 140))
    for _ in range(2):
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True}}
        status, text = server.answer("/generate", body, server.key)
        assert status == 200, text
        prompt = [*prompt, *json.loads(text)["output_ids"], *range(50)]
    (file,) = feather_server.recorded.iterdir()
    deadline, trace = time.monotonic() + 20, load_trace(file)
    while trace.requests[-1].input_length != 159 and time.monotonic() < deadline:
        time.sleep(0.1)
        trace = load_trace(file)
    lengths = Counter((request.input_length, request.output_length) for request in trace.requests)
    assert not Counter((answer.prompt_tokens, answer.completion_tokens) for answer in served.values()) - lengths
    assert trace.requests[-1].after is not None and trace.requests[-1].hash_ids[0] == trace.requests[-2].hash_ids[0]
    out = tmp_path / "out"
    assert main(["ab", str(file), "--requests", "30", "--policies", "fcfs,feather", "--out", str(out)]) == 0
    assert set(json.loads((out / "results.json").read_text())["runs"]) == {"fcfs", "feather"}


def test_the_log_tells_of_no_failure(feather_server: FeatherServer, compiled: dict[str, str]) -> None:
    """Runs last on each server: the debug check has seen all of the above, and feather compiled nothing."""
    server, log = feather_server.server, feather_server.server.text()
    assert server.alive()
    assert f"{feather_server.case.policy} is active" in log
    assert "Traceback" not in log and "goes on as fcfs" not in log
    assert not Path(compiled["FEATHER_KERNELS_CACHE"]).exists()
    assert ("Retract requests" in log) == feather_server.case.retracts or not feather_server.case.retracts


@newest_is_enough
def test_two_ranks_form_the_same_batches(
    model: Path,
    logs: Path,
    tmp_path: Path,
    preloaded: Preloaded,
    requests: list[Request],
    fcfs: list[dict[str, Answer]],
) -> None:
    # Batches that differ between the ranks hang in the next collective operation, or mix the rows of the answers.
    chosen = requests[::3]  # of all groups; two ranks on few cores wait for each other in every layer of every step
    bound = ("--feather-tbt", "40", "--chunked-prefill-size", "512")  # by times that each rank measures for itself
    flags = ("--tp", "2", "--schedule-policy", "feather-bandit", *ROOMY, *bound)
    environment = {
        "FEATHER_DEBUG_CHECK": "1", "FEATHER_DECISION_LOG": str(tmp_path), "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    }  # fmt: skip
    with SGLangServer(model, logs / "ranks.txt", *flags, start=preloaded, **environment) as server:
        answers = stream_all(server.url, chosen)
        server.wait_until_idle()
        log = server.text()
    assert {name: answer.text for name, answer in answers.items()} == {
        request.name: fcfs[0][request.name].text for request in chosen
    }
    assert log.count("feather-bandit is active") == 2
    assert "Traceback" not in log
    decided = compare([tmp_path / "rank0.log", tmp_path / "rank1.log"])
    assert decided.difference is None
    assert decided.rows["prefill"] >= len(chosen) and decided.rows["decode"] > 16 * len(chosen)
    assert 0 < decided.adds + decided.stops


def test_engine_takes_a_policy_its_options_and_pat(
    model: Path, preloaded: Preloaded, requests: list[Request], fcfs: list[dict[str, Answer]]
) -> None:
    chosen = [request for request in requests if set(request.body) == {"prompt", "max_tokens", "ignore_eos"}]
    bodies = [request.body for request in chosen]
    work = json.dumps({"model": str(model), "policy": "feather-bandit", "requests": bodies, "port": free_port()})
    variables = {"FEATHER_OPTIONS": '{"chunk_size": 32, "seed": 5}', "FEATHER_DEBUG_CHECK": "1", **REFERENCE}
    printed, errors = preloaded.run_file([str(ENGINE), work], server_environment(**variables))
    answers = [line for line in printed.splitlines() if line.startswith("[")][-1:]
    assert answers and json.loads(answers[0]) == [fcfs[0][request.name].text for request in chosen], errors[-3000:]
    assert "feather-bandit is active" in errors + printed
    assert "pat is active" in errors + printed
