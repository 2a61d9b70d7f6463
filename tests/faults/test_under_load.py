"""A loaded scheduler goes on through faults around it and answers every request once."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from types import SimpleNamespace

import pytest
import sglang.srt.managers.scheduler as sglang_scheduler
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    GetInternalStateReq,
    PauseGenerationReqInput,
    SetInternalStateReq,
)

from feather_sglang.adapter.attention import engines
from feather_sglang.adapter.switch import endpoint
from feather_sglang.adapter.switch.switch import Order
from feather_sglang.scheduling.policies import make_policy


def prompt(number, groups=5, tokens=130):
    return [2 + number % groups] * tokens + [20 + number % 400, 20 + number // 400]


def submit(one, numbers, most=4, name="r", **options):
    for number in numbers:
        assert one.submit(f"{name}{number:05}", prompt(number), max_new_tokens=1 + number % most, **options)


def assert_answered_once(one, complete=True):
    assert one.answers == dict.fromkeys(one.requests, 1)
    if complete:
        assert all(len(req.output_ids) == req.sampling_params.max_new_tokens for req in one.requests.values())
    one.assert_nothing_left()


def test_half_of_two_thousand_requests_are_aborted(server):
    """While they wait, while they run, and all that are left at the end; the others get all of their tokens."""
    one, rng = server(max_running_requests=64, max_total_tokens=16384), random.Random(0)
    submit(one, range(2000), most=3)
    doomed = rng.sample(sorted(one.requests), 1000)
    while doomed or one.scheduler.waiting_queue:
        for _ in range(40):
            if doomed:
                one.abort(doomed.pop())
        one.step()
    one.drain()
    served = [req for req in one.requests.values() if len(req.output_ids) == req.sampling_params.max_new_tokens]
    assert len(served) >= 1000
    assert_answered_once(one, complete=False)
    submit(one, range(30), name="all")
    one.step()
    one.scheduler.abort_request(AbortReq(abort_all=True))
    one.drain()
    assert_answered_once(one, complete=False)


def test_requests_leave_nothing_to_pythons_collector(server):
    """It collects the old ones rarely: what is left to it looks like a leak for hours."""
    one = server(max_running_requests=8)

    def serve(name):
        submit(one, range(60), name=name)
        for number in range(0, 60, 3):
            one.abort(f"{name}{number:05}")
            one.step()
        one.drain()
        one.step()
        one.requests.clear()

    serve("first")
    gc.collect()
    gc.freeze()  # what is there already is not looked at again
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        serve("second")
        gc.collect()
        found = {type(one) for one in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()
    assert not {kind for kind in found if kind.__module__.startswith(("feather_sglang", "sglang"))}


def test_a_storm_of_retractions(server, monkeypatch):
    monkeypatch.setattr(sglang_scheduler, "TEST_RETRACT", True)  # SGLANG_TEST_RETRACT, read on import
    monkeypatch.setattr(sglang_scheduler, "TEST_RETRACT_INTERVAL", 2)
    one = server(max_running_requests=12)
    submit(one, range(60), most=16)
    one.drain()
    assert sum(req.retraction_count for req in one.requests.values()) >= 8
    assert_answered_once(one)


def test_pauses_and_flushes_under_load(server):
    """SGLang refuses to flush while requests run: after a pause that retracts them all it may."""
    one = server(max_running_requests=8)
    scheduler = one.scheduler
    for turn in range(6):
        submit(one, range(turn * 20, turn * 20 + 20), most=6)
        for _ in range(3):
            one.step()
        mode = ("retract", "in_place", "abort")[turn % 3]
        scheduler.pause_generation(PauseGenerationReqInput(mode=mode if mode != "abort" else "in_place"))
        if mode == "abort":  # as the tokenizer does it
            scheduler.abort_request(AbortReq(abort_all=True))
        assert scheduler.flush_cache() == (mode == "retract")
        scheduler.continue_generation(ContinueGenerationReqInput())
    one.drain()
    assert_answered_once(one, complete=False)


@pytest.mark.parametrize("by", ["an hour", "a little, again and again"])
def test_a_clock_that_goes_backwards(server, monkeypatch, by):
    monkeypatch.setenv("FEATHER_OPTIONS", '{"tbt": 50, "max_wait": 30}')
    one, rng, now, calls = server(paced=True, max_running_requests=8), random.Random(0), [1e5], [0]

    def clock():
        calls[0] += 1
        now[0] += rng.choice((-0.5, 0.001, 0.4)) if by != "an hour" else -3600 if calls[0] == 60 else 0.01
        return now[0]

    one.feather.clock = clock
    submit(one, range(80))
    one.drain(600)
    assert calls[0] > 60 and not one.feather.failed
    assert 0 <= one.feather.stats()["longest_wait_s"] < 1e4
    assert_answered_once(one)


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "emptied": lambda path: path.write_bytes(b""),
    "damaged": lambda path: path.write_bytes(path.read_bytes().replace(b'"version"', b'"vers\x00on"')),
    "another kind": lambda path: make_policy("heuristic").save(path),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "gone": lambda path: path.rmdir() if path.is_dir() else path.unlink(),
}


def test_a_policy_file_that_is_damaged_while_its_policy_serves(server, monkeypatch, tmp_path):
    """The server has read it, and goes on; a switch to a policy that would read it is refused in one line."""
    path = tmp_path / "policy.json"
    make_policy("bandit").save(path)
    whole = path.read_bytes()
    monkeypatch.setenv("FEATHER_OPTIONS", json.dumps({"policy_file": str(path), "allow_switch": True}))
    one, served = server(admin_api_key="key", max_running_requests=4), 0
    manager = SimpleNamespace()

    async def set_internal_state(request):
        return [one.scheduler.set_internal_state(SetInternalStateReq(server_args=request.server_args)).updated]

    async def get_internal_state():
        return [one.scheduler.get_internal_state(GetInternalStateReq()).internal_state]

    manager.set_internal_state, manager.get_internal_state = set_internal_state, get_internal_state
    for what, damage in DAMAGE.items():
        submit(one, range(served, served + 6))
        served += 6
        one.step()
        damage(path)
        one.drain()
        one.step()
        status, answer = asyncio.run(endpoint.send(Order("feather", {}), manager))
        assert status == 400 and str(path) in answer["error"] and "\n" not in answer["error"], what
        assert one.feather.name == "feather" and not one.feather.failed
    path.write_bytes(whole)
    assert asyncio.run(endpoint.send(Order("feather", {}), manager)) == (200, {"schedule_policy": "feather"})
    submit(one, range(served, served + 6))
    one.drain()
    assert_answered_once(one)


class OutOfMemory:
    """Planning that fails for want of memory, every other time."""

    def __init__(self, plan, error):
        self.plan, self.error, self.calls = plan, error, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls % 2:
            raise self.error
        return self.plan(*args)


@pytest.mark.parametrize("where", ["the planner", "Python"])
def test_out_of_memory_in_planning_costs_the_sharing_of_a_batch(server, monkeypatch, caplog, where):
    from feather_kernels import PlanError

    monkeypatch.setenv("FEATHER_PAT_REFERENCE", "1")
    error = PlanError("memory does not suffice for this batch") if where == "the planner" else MemoryError()
    one = server(decode_attention_backend="pat", max_running_requests=6)
    plan = OutOfMemory(engines.Engines.plan, error)
    monkeypatch.setattr(engines.Engines, "plan", lambda *args: plan(*args))
    submit(one, range(20), most=5)
    one.drain()
    assert plan.calls > 10
    assert sum("without sharing" in record.message for record in caplog.records) == 1
    assert_answered_once(one)
