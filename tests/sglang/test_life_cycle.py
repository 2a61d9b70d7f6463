"""A request's whole life under the feather policies, in the real scheduler; the tree equals its queues throughout."""

import random
import time

import pytest
from harness import Server

from feather_sglang.adapter.switch.switch import Order

POLICIES = ["feather", "feather-heuristic", "feather-bandit", "feather-qlearning", "feather-order"]


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setenv("FEATHER_DEBUG_CHECK", "1")


def prompt(group, unique, prefix=100, tail=8):
    return [2 + group] * prefix + [20 + unique] * tail


def workload(server, count=24, groups=4, **options):
    for i in range(count):
        assert server.submit(f"r{i:02}", prompt(i % groups, i), max_new_tokens=4 + i % 7, **options)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What fcfs generates for ``workload``."""
    one = Server(tmp_path_factory.mktemp("fcfs"), "fcfs")
    workload(one)
    one.drain()
    one.assert_nothing_left()
    outputs = one.outputs()
    one.close()
    assert len({tuple(tokens) for tokens in outputs.values()}) > 12  # the model tells prompts apart
    return outputs


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_the_same_tokens_as_fcfs(server, expected, policy):
    one = server(policy)
    workload(one)
    one.drain()
    assert one.outputs() == expected
    one.assert_nothing_left()
    assert (
        one.feather.admission.state.fairness.round > 0
        and one.feather.rows.permutations + (policy != "feather-order") > 0
    )


def test_the_policys_time_in_a_round_has_its_proposals(server, monkeypatch):
    """What is measured is the choice of requests, too, and each second of it once."""
    one = server()
    propose = one.feather.admission.propose

    def slow(batch):
        time.sleep(0.02)
        return propose(batch)

    monkeypatch.setattr(one.feather.admission, "propose", slow)
    before = one.feather.guard.seconds
    start = time.perf_counter()
    one.submit("r00", prompt(0, 0), max_new_tokens=2)
    one.drain()
    assert 0.02 <= one.feather.guard.seconds - before <= time.perf_counter() - start


def test_chunked_prefill(server, expected):
    one = server(chunked_prefill_size=32)
    workload(one)
    chunked = 0
    while one.step() is not None or one.scheduler.waiting_queue:
        chunked += one.scheduler.chunked_req is not None
    assert chunked > 10
    assert one.outputs() == expected
    one.assert_nothing_left()


def test_mixed_chunked_prefill(server, expected):
    one = server(chunked_prefill_size=32, enable_mixed_chunk=True)
    workload(one)
    one.drain()
    assert one.outputs() == expected
    one.assert_nothing_left()


def test_retraction(server, monkeypatch):
    """A pool too small for the outputs makes SGLang retract; the requests come back and finish with full length."""
    one = server(max_total_tokens=700, schedule_conservativeness=0.01)
    for i in range(8):
        # SGLang reserves the whole output of a request that ignores its end token; this one could end, but does not.
        one.submit(f"r{i}", prompt(i % 2, i), max_new_tokens=120, ignore_eos=False)
    retracted = []
    queued = one.feather.life_cycle.queued
    monkeypatch.setattr(one.feather.life_cycle, "queued", lambda req: (retracted.append(req.rid), queued(req))[1])
    one.drain()
    assert retracted
    assert all(len(tokens) == 120 for tokens in one.outputs().values())
    one.assert_nothing_left()


def test_priorities_and_preemption(server):
    one = server(
        max_running_requests=2,
        enable_priority_scheduling=True,
        schedule_low_priority_values_first=True,
        priority_scheduling_preemption_threshold=0,
    )
    assert one.submit("slow0", prompt(0, 0), max_new_tokens=40, priority=9)
    assert one.submit("slow1", prompt(0, 1), max_new_tokens=40, priority=9)
    for _ in range(5):
        one.step()
    assert one.submit("urgent", prompt(1, 2), max_new_tokens=4, priority=0)
    assert one.submit("late", prompt(0, 3), max_new_tokens=4, priority=9)
    order = []
    while one.step() is not None or one.scheduler.waiting_queue:
        order += [rid for rid, req in one.requests.items() if req.finished() and rid not in order]
    order += [rid for rid, req in one.requests.items() if rid not in order]
    assert order[0] == "urgent" and any(req.is_retracted or req.retraction_count for req in one.requests.values())
    assert {rid: len(tokens) for rid, tokens in one.outputs().items()} == {
        "slow0": 40,
        "slow1": 40,
        "urgent": 4,
        "late": 4,
    }
    one.assert_nothing_left()


def test_aborts_waiting_and_running(server):
    one = server(max_running_requests=4)
    workload(one, count=12)
    for _ in range(3):
        one.step()
    running = [req.rid for req in one.scheduler.running_batch.reqs]
    waiting = [req.rid for req in one.scheduler.waiting_queue]
    assert running and waiting
    one.abort(running[0])
    one.abort(waiting[0])
    one.abort(waiting[-1])
    one.drain()
    assert len(one.requests[running[0]].output_ids) < 11
    assert one.outputs()[waiting[0]] == one.outputs()[waiting[-1]] == []
    survivors = set(one.requests) - {running[0], waiting[0], waiting[-1]}
    assert all(len(one.outputs()[rid]) == one.requests[rid].sampling_params.max_new_tokens for rid in survivors)
    one.assert_nothing_left()


def expire(server):
    """Let SGLang drop what is past its time limit: in the loop that receives requests, up to 0.5.17 in the step."""
    for abort in getattr(server.scheduler, "_poll_timeout_aborts", list)():
        server.scheduler.abort_request(abort)
    server.step()


def test_timeouts_waiting_and_running(server, monkeypatch):
    one = server(max_running_requests=2)
    for i in range(6):
        one.submit(f"r{i}", prompt(i % 2, i), max_new_tokens=200)
    for _ in range(2):
        one.step()
    running = {req.rid for req in one.scheduler.running_batch.reqs} | {req.rid for req in one.scheduler.last_batch.reqs}
    assert len(running) == 2 and len(one.scheduler.waiting_queue) == 4
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "0.01")
    time.sleep(0.02)
    expire(one)
    assert not one.scheduler.waiting_queue and set(one.feather.admission.tree.active) == running
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "0.01")
    time.sleep(0.02)
    expire(one)
    one.drain()
    assert all(0 < len(one.outputs()[rid]) < 20 for rid in running)
    one.assert_nothing_left()


def test_an_id_used_again_after_an_abort(server):
    one = server(max_running_requests=1)
    one.submit("a", prompt(0, 0), max_new_tokens=6)
    one.step()
    one.submit("b", prompt(1, 1))
    one.abort("b")
    assert one.submit("b", prompt(2, 2), max_new_tokens=3)
    one.drain()
    assert len(one.outputs()["b"]) == 3
    one.assert_nothing_left()


def test_abort_of_a_chunked_request(server):
    one = server(chunked_prefill_size=32)
    one.submit("long", prompt(0, 0, prefix=300))
    one.step()
    assert one.scheduler.chunked_req is not None
    one.abort("long")
    one.submit("other", prompt(1, 1))
    one.drain()
    assert len(one.outputs()["other"]) == 8
    one.assert_nothing_left()


def test_queue_limit(server):
    one = server(max_running_requests=1, max_queued_requests=2)
    accepted = [one.submit(f"r{i}", prompt(0, i)) for i in range(5)]
    assert accepted == [True, True, False, False, False]
    one.drain()
    one.assert_nothing_left()


def test_flush_cache_and_pause(server, expected):
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    one = server(max_running_requests=6)
    workload(one)
    for _ in range(6):
        one.step()
    one.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    assert one.scheduler.running_batch.is_empty() and len(one.scheduler.waiting_queue) > 6
    one.scheduler.continue_generation(ContinueGenerationReqInput())
    one.drain()
    assert one.outputs() == expected
    one.step()
    assert one.scheduler.flush_cache()
    workload(one, count=4)
    one.drain()
    one.assert_nothing_left()


@pytest.mark.parametrize("by", ["priority", "age"])
def test_an_id_that_is_used_again_is_another_request(server, monkeypatch, by):
    """A finished request leaves the tree in the next admission round: there is none while nobody waits."""
    monkeypatch.delenv("FEATHER_DEBUG_CHECK")  # which opens rounds of its own
    priorities = {"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}
    flags = {**priorities, "disable_priority_preemption": True} if by == "priority" else {}
    first = {}
    for policy in ("fcfs", "feather"):
        one = server(policy, max_running_requests=1, **flags)

        def submit(rid, group, priority, one=one):
            one.submit(rid, prompt(group, group), max_new_tokens=3, **({"priority": priority} if flags else {}))

        submit("talk", 0, 9)
        while one.step() is not None:
            pass
        assert one.requests["talk"].finished()
        if policy == "feather":
            later = one.feather.clock() + 130  # past max_wait, if it were the first one's age
            one.feather.clock = lambda later=later: later
        submit("other", 1, 5)
        submit("talk", 2, 0)
        first[policy] = [req.rid for req in one.step().reqs]
        one.drain()
    assert first["feather"] == first["fcfs"] == (["talk"] if flags else ["other"])
    assert one.feather.admission.overdue_admissions == 0


@pytest.mark.parametrize("aborted", [False, True])
def test_two_requests_of_one_id_are_both_served(server, monkeypatch, aborted):
    """With an abort beside them as many wait as the tree knows, but not the same."""
    monkeypatch.delenv("FEATHER_DEBUG_CHECK")  # it tells requests apart by their ids
    one = server(max_running_requests=1)
    one.submit("busy", prompt(0, 0), max_new_tokens=10)
    for _ in range(3):
        one.step()
    requests = []
    for rid, group in (("twin", 1), ("twin", 2), *[("gone", 0)] * aborted):
        one.submit(rid, prompt(group, 5 + group), max_new_tokens=5)
        requests.append(one.requests[rid])
    if aborted:
        one.abort("gone")
    for _ in range(60):
        one.step()
    assert all(twin.finished() for twin in requests[:2]) and not one.scheduler.waiting_queue
    assert [len(request.output_ids) for request in requests] == [5, 5, *[0] * aborted]
    assert not one.feather.failed and not one.feather.life_cycle._twins


@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_the_time_of_a_pause_is_nobodys(server, monkeypatch, mode, switched):
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput, SetInternalStateReq

    monkeypatch.setenv("FEATHER_OPTIONS", '{"allow_switch": true}')
    one = server("fcfs" if switched else "feather", admin_api_key="key")
    go_on = one.scheduler.continue_generation  # as SGLang's table of handlers holds it
    if switched:
        order = Order("feather", {}).as_message()
        assert one.scheduler.set_internal_state(SetInternalStateReq(server_args=order)).updated
    feather, now = one.feather, [0.0]
    feather.clock = lambda: now[0]

    def step(seconds):
        now[0] += seconds
        return one.step()

    for rid, token in (("a", 5), ("b", 6)):
        one.submit(rid, [token] * 1500, max_new_tokens=60)
        step(0.05)
    for _ in range(5):
        step(0.01)
    rate, before = feather.meters.decode.rate, feather.meters.prefill.seconds_per_token
    assert rate == pytest.approx(200) and before == pytest.approx(0.05 / 1500, rel=0.05)
    one.scheduler.pause_generation(PauseGenerationReqInput(mode=mode))
    now[0] += 600
    if mode == "retract":
        one.scheduler.flush_cache()  # as where the weights are new; releases before 0.5.21 refuse
    go_on(ContinueGenerationReqInput())
    step(0.1)
    for _ in range(6):
        step(0.01)
    assert feather.meters.decode.rate == pytest.approx(200, rel=0.01)
    assert feather.meters.prefill.seconds_per_token == pytest.approx(before, rel=0.05)


def test_five_hundred_random_events(server):
    """Arrivals, aborts of anything, retractions and chunks in random order; the debug check holds after each step."""
    rng = random.Random(3)
    one = server(max_total_tokens=900, schedule_conservativeness=0.05, chunked_prefill_size=64, max_running_requests=12)
    born = 0
    for _ in range(500):
        event = rng.random()
        if event < 0.35 and len(one.scheduler.waiting_queue) < 40:
            length = rng.choice([0, 20, 100, 150])
            tokens = prompt(rng.randrange(5), rng.randrange(200), prefix=length, tail=rng.randrange(1, 20))
            one.submit(f"e{born}", tokens, max_new_tokens=rng.randrange(1, 60))
            born += 1
        elif event < 0.40 and born:
            one.abort(f"e{rng.randrange(born)}")
        else:
            one.step()
    one.drain()
    assert born > 120
    one.assert_nothing_left()
