"""A replay drives SGLang's own event loop in virtual time: the host prepares a step while the GPU computes another."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import tokenized
from rich.console import Console
from sglang.srt.sampling.sampling_params import SamplingParams

from effort import newest_is_enough
from feather_sglang.adapter.step_log import SIZES, TIMES, VARIABLE
from feather_sglang.calibrate import recording
from feather_sglang.cli import main
from feather_sglang.compare import ab
from feather_sglang.replay import jobs as replays
from feather_sglang.replay import processes
from feather_sglang.replay.idle import IdleServer
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import Trace, TraceRequest
from feather_sglang.simulation.host_time import NO_HOST_TIME, HostTime

NO_OVERLAP = "--disable-overlap-schedule"
PROFILE = load_profile("h200")
OUTPUT = 40


class Launch(NamedTuple):
    """A step: when the host began to launch it, the launch's three times, and the clocks before and after."""

    begun: float
    prepare: float
    launch: float
    compute: float
    free: float  # when the GPU had computed all before
    launched: float
    ready: float

    @property
    def started(self) -> float:
        return self.ready - self.compute


def noted(job, tell):
    os.environ["FEATHER_OPTIONS"] = json.dumps(job.options)
    from feather_sglang.adapter.replay_engine import Replay, ReplaySettings

    with tempfile.TemporaryDirectory() as folder:
        engine = Replay(Path(folder), job.policy, job.trace, job.model, ReplaySettings(**job.settings))
        time, launches, launch = engine.time, [], engine.time.launch

        def note(*given):
            before = time.now, *given, time.gpu
            ready = launch(*given)
            launches.append((*before, time.now, ready))
            return ready

        time.launch = note
        engine.run(job.trace)  # whatever a first run leaves behind makes no difference
        launches.clear()
        outcome = engine.run(job.trace, tell)
    served = [(one.request.request_id, one.due, one.first_token, one.finish, list(one.gaps)) for one in outcome.served]
    return launches, served, outcome.makespan, outcome.gpu_busy, outcome.scheduler_seconds, len(outcome.batches)


class Ran(NamedTuple):
    prefills: list[Launch]
    decodes: list[Launch]
    served: dict[int, tuple[float, float, float, list[float]]]  # due, first token, finish, gaps
    makespan: float
    gpu_busy: float


def step_model(host, graphs=True):
    return StepTimeModel(replace(PROFILE, host=host), load_model("qwen3-8b"), "fa3", graphs)


def replayed(tmp_path, trace, host, *flags, graphs=True, policy="fcfs", **settings):
    settings = {"kv_tokens": 200_000, "stream_interval": 1, "server_flags": flags, **settings}
    job = replays.Job(policy, trace, step_model(host, graphs), settings, {})
    result = processes.run_jobs([job], 1, tmp_path, Console(quiet=True), noted)[policy]
    launches, served, makespan, busy, _, count = result
    steps = [Launch(*one) for one in launches]
    decodes = steps[len(steps) - count :] if len(trace.requests) == 1 or all_at_once(trace) else []
    prefills = steps[: len(steps) - len(decodes)]
    return Ran(prefills, decodes, {rid: tuple(rest) for rid, *rest in served}, makespan, busy)


def all_at_once(trace):
    return len({request.arrival_s for request in trace.requests}) == 1


def burst(rows, prompt=500, output=OUTPUT, at=1.0):
    """Prompts that share nothing and fit one prefill step."""
    return Trace("burst", prompt, [TraceRequest(n, at, prompt, output, (n,)) for n in range(rows)])


# Where the host decides: prices so different that a sum tells of which they are.
SLOW = HostTime(
    front_request=0.002, front_token=1e-6, front_piece=0.0004, hop_in=0.003, hop_out=0.001, turn=0.0005,
    take_request=0.0007, take_token=2e-7, form_decode=0.011, form_decode_row=1e-4, form_prefill=0.004,
    form_prefill_row=2e-4, launch_decode=0.017, launch_decode_row=2e-4, prepare_prefill=0.006, prepare_prefill_row=1e-4,
    graph_layer=0.0001, eager_layer=0.002, result_decode=0.009, result_decode_row=3e-4, result_prefill=0.005,
    result_prefill_row=1e-4, stream_piece=0.0002,
)  # fmt: skip
QUICK = HostTime(
    turn=1e-4, form_decode=2e-4, launch_decode=5e-4, result_decode=1e-4, form_prefill=1e-4, graph_layer=1e-5
)


def decode_turn(host, rows):
    """What the host takes for a decode step whose rows are each sent a piece."""
    launch = sum(host.launch(rows, False, 36, True))
    return host.turn + host.form(rows, False, 0) + launch + host.result(rows, False, rows)


def test_the_gpu_computes_one_step_at_a_time_and_nothing_before_its_launch(tmp_path):
    for host in (QUICK, SLOW, NO_HOST_TIME):
        ran = replayed(tmp_path, burst(8), host)
        steps = [*ran.prefills, *ran.decodes]
        assert len(ran.decodes) >= OUTPUT - 1 and ran.prefills
        for before, step in pairwise(steps):
            assert step.begun >= before.launched and step.free == before.ready
            assert step.started >= before.ready - 1e-12
        assert all(step.started >= step.begun + step.prepare - 1e-12 for step in steps)
        assert ran.gpu_busy == pytest.approx(sum(step.compute for step in steps))
        assert ran.makespan >= ran.gpu_busy


@newest_is_enough
def test_a_gpu_that_is_slower_than_the_host_does_not_idle_between_decode_steps(tmp_path):
    ran = replayed(tmp_path, burst(8), QUICK)
    assert all(step.compute > decode_turn(QUICK, 8) for step in ran.decodes)
    for before, step in pairwise(ran.decodes):
        assert step.begun < before.ready and step.started == pytest.approx(before.ready, abs=1e-12)
    # So each token takes as long as its step is computed.
    for _, _, _, gaps in ran.served.values():
        assert gaps[2:-1] == pytest.approx([step.compute for step in ran.decodes[2 : OUTPUT - 2]], rel=1e-6)


@newest_is_enough
def test_a_host_that_is_slower_than_the_gpu_sets_the_pace(tmp_path):
    ran = replayed(tmp_path, burst(8), SLOW)
    turn = decode_turn(SLOW, 8)
    assert all(step.compute < turn for step in ran.decodes)
    between = [later.begun - before.begun for before, later in pairwise(ran.decodes)]
    assert between[2 : OUTPUT - 2] == pytest.approx([turn] * (OUTPUT - 4))
    for before, step in pairwise(ran.decodes):
        assert step.started > before.ready  # it idled


@pytest.mark.parametrize("host", [QUICK, SLOW], ids=["quick", "slow"])
def test_without_overlap_host_and_gpu_add_up(tmp_path, host):
    ran = replayed(tmp_path, burst(8), host, NO_OVERLAP)
    turn = decode_turn(host, 8)
    assert len(ran.decodes) == OUTPUT - 1
    between = [later.begun - before.begun for before, later in pairwise(ran.decodes)]
    assert between == pytest.approx([turn + step.compute for step in ran.decodes[:-1]])
    overlapped = replayed(tmp_path, burst(8), host)
    assert ran.makespan > overlapped.makespan + 0.9 * (OUTPUT - 2) * min(turn, ran.decodes[0].compute)


@newest_is_enough
def test_without_a_host_overlap_makes_no_difference(tmp_path):
    plain = replayed(tmp_path, burst(8), None, NO_OVERLAP, scheduler_cost="off")
    overlapped = replayed(tmp_path, burst(8), None, scheduler_cost="off")
    assert len(plain.decodes) == OUTPUT - 1 <= len(overlapped.decodes) <= OUTPUT  # one more, on some releases
    assert overlapped.makespan == pytest.approx(plain.makespan)
    assert plain.makespan == pytest.approx(1.0 + plain.gpu_busy)
    assert all(one.begun == one.launched for one in plain.decodes)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("flags", [(), (NO_OVERLAP,)], ids=["overlap", "plain"])
def test_a_lone_requests_first_token_takes_the_sum_of_its_way(tmp_path, graphs, flags):
    trace = burst(1, prompt=3000, output=1)
    ran = replayed(tmp_path, trace, SLOW, *flags, graphs=graphs)
    due, first, finish, gaps = ran.served[0]
    model, host = step_model(SLOW, graphs), SLOW
    computed, launched = model.prefill([3000], [0]), 36 * (host.graph_layer if graphs else host.eager_layer)
    assert (computed > launched) == graphs  # the longer of both counts
    # Up to some release the step that would follow is launched before SGLang sees that there is none.
    more = len(ran.decodes) * (host.turn + host.form(1, False, 0) + sum(host.launch(1, False, 36, graphs)))
    assert len(ran.decodes) <= (not flags)
    by_hand = (
        (host.front_request + 3000 * host.front_token + host.hop_in)
        + (host.turn + host.take_request + 3000 * host.take_token)
        + (host.form_prefill + host.form_prefill_row + host.prepare_prefill + host.prepare_prefill_row)
        + max(computed, launched + more)
        + host.result(1, True, 1)
        + (host.front_piece + host.hop_out)
    )
    # Under overlap the loop goes round once more, with nothing to form, before it looks at a lone result.
    turn = 0.0 if flags or ran.decodes or computed > launched else host.turn
    assert first - due == pytest.approx(by_hand + turn)
    assert finish == first and gaps == [] and due == 1.0


@newest_is_enough
@pytest.mark.parametrize("output", [1, 30])
@pytest.mark.parametrize("prompt", [300, 3000, 20_000])
def test_an_idle_server_is_what_a_lone_request_meets(tmp_path, prompt, output):
    """`IdleServer`, the measure of slowdowns, says of each request what a replay of it alone shows."""
    host = PROFILE.known_host()
    trace = burst(1, prompt=prompt, output=output)
    ran = replayed(tmp_path, trace, host, chunked_prefill=8192)
    due, first, _, gaps = ran.served[0]
    request = trace.requests[0]
    if output == 1 and ran.decodes:  # a release that launches one step more, as for a longer answer
        request = request._replace(output_length=2)
    timing = IdleServer(step_model(host), trace, 8192, host).timing(request)
    assert first - due == pytest.approx(timing.ttft, rel=0.01)
    if output > 1:
        assert sorted(gaps)[len(gaps) // 2] == pytest.approx(timing.tpot, rel=0.02)


@newest_is_enough
def test_pieces_come_every_so_many_tokens(tmp_path):
    served = {n: replayed(tmp_path, burst(1), QUICK, stream_interval=n).served[0] for n in (1, 16)}
    for _, first, finish, gaps in served.values():
        assert len(gaps) == OUTPUT - 1 and sum(gaps) == pytest.approx(finish - first)
    assert len(set(served[16][3])) == 3 < len(set(served[1][3]))  # 1, then 16, 16 and 7 tokens
    assert served[16][1] == served[1][1]


@newest_is_enough
@pytest.mark.parametrize("policy", ["fcfs", "feather"])
def test_under_model_a_replay_is_repeated_to_the_byte(tmp_path, policy, monkeypatch):
    small = ["--requests", "60", "--rate", "50", "--prefix-tokens", "400", "--output-tokens", "12", "--groups", "3"]
    monkeypatch.setattr(ab, "draw", lambda *given: None)  # the plots, a third of the time
    texts = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert main(["ab", *small, "--policies", policy, "--out", "out"]) == 0
        results = json.loads(Path("out", "results.json").read_text())
        for run in results["runs"].values():
            assert run["scheduler_share"] > 0
        texts.append(json.dumps(results))
    assert texts[0] == texts[1]


# Logged steps ------------------------------------------------------------------------------------------------------

LOGGED = ("process_input_requests", "get_next_batch_to_run", "run_batch", "process_batch_result")


def handed(server, rid, tokens, outputs):
    """A request as the scheduler's loop takes it in."""
    params = SamplingParams(max_new_tokens=outputs, temperature=0.0, ignore_eos=True)
    request = tokenized(rid, tokens, params, stream=True)
    params.verify(512)
    server.scheduler.process_input_requests([request])


@pytest.mark.parametrize("policy", ["fcfs", "feather"])
def test_logged_steps_are_read_back(tmp_path, monkeypatch, server, policy):
    logs = tmp_path / "steps"
    logs.mkdir()
    monkeypatch.setenv(VARIABLE, str(logs))
    one = server(policy, chunked_prefill_size=64)
    handed(one, "a", range(10, 110), 20)
    one.step()
    handed(one, "b", range(200, 250), 5)
    while one.step() is not None:
        one.scheduler.process_input_requests([])
    lines = recording._read(logs)
    assert [line[1:3] for line in lines if line[0] == "request"] == [["a", 100], ["b", 50]]
    steps = recording.table(lines)
    assert set(steps.dtype.names) == {"prefill", *SIZES, *TIMES, "pieces", "begin_result", "ready", "end_result"}
    prefill, decode = steps["prefill"], ~steps["prefill"]
    assert sorted(steps["came_tokens"])[-3:] == [0, 50, 100] and steps["came"].sum() == 2
    assert steps["new_tokens"][prefill].sum() == 150
    assert steps["new_tokens"][prefill].max() <= 64 and (steps["new_tokens"][decode] == 0).all()
    assert decode.sum() == 19 and steps["rows"].max() == 2
    first = sum(len(line[2]) for line in lines if line[0] == "result")
    assert first == 2
    # Each stage begins where the one before ends.
    for before, after in pairwise(("received", "formed", "launch", "forward", "launched", "begin_result", "ready")):
        assert (steps[after] >= steps[before]).all(), (before, after)
    assert (steps["end_result"] >= steps["ready"]).all() and (steps["end_result"][:-1] <= steps["launch"][1:]).all()
    assert steps["pieces"].sum() == 25 and (steps["kv_tokens"][decode] > 50).all()  # a piece for every token


def test_without_the_variable_nothing_of_the_scheduler_is_wrapped(server, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    scheduler = server("fcfs").scheduler
    assert not set(LOGGED) & set(vars(scheduler))
    assert "forward_batch_generation" not in vars(scheduler.tp_worker)
