"""``--feather-allow-switch`` on the real scheduler: after a switch it schedules as if it had been started so."""

import asyncio
import inspect
import json
from types import SimpleNamespace

import pytest
from harness import Server
from sglang.srt.managers.io_struct import GetInternalStateReq, SetInternalStateReq
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.runtime_context import get_context

from feather_sglang.adapter import failures, hooks, plugin
from feather_sglang.adapter.hooks import lacks_policy
from feather_sglang.adapter.scheduler.state import STATE
from feather_sglang.adapter.switch import endpoint as switch_endpoint
from feather_sglang.adapter.switch import switch
from feather_sglang.adapter.switch.switch import Order
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policies import make_policy

ALLOWED = '{"allow_switch": true}'


@pytest.fixture
def server(tmp_path, monkeypatch):
    made = []

    def make(policy="fcfs", options=ALLOWED, **overrides):
        monkeypatch.setenv("FEATHER_OPTIONS", options)
        made.append(Server(tmp_path, policy, admin_api_key="key", max_running_requests=3, **overrides))
        return made[-1]

    yield make
    for one in made:
        one.close()


def order(one, name, drain=False, **options):
    """Send an order as the endpoint does; its HTTP status and answer."""
    manager = SimpleNamespace()

    async def set_internal_state(request):
        return [one.scheduler.set_internal_state(request).updated]

    async def get_internal_state():
        return [one.scheduler.get_internal_state(GetInternalStateReq()).internal_state]

    manager.set_internal_state, manager.get_internal_state = set_internal_state, get_internal_state
    given = json.dumps({"schedule_policy": name, "options": options, "drain": drain})
    return asyncio.run(switch_endpoint.send(Order.from_json(given), manager))


def state(one):
    return one.scheduler.get_internal_state(GetInternalStateReq()).internal_state[STATE]


def admitted(one):
    """The order in which a mixed set of requests is admitted from an empty cache, a few places at a time."""
    groups = [0, 1, 2, 0, 1, 2, 2, 1, 0, 1, 2, 0]
    one.step()
    assert one.scheduler.flush_cache()
    one.requests.clear()
    for number, group in enumerate(groups):
        prompt = [5 + group] * 200 + [40 + number] * (3 + number % 5)
        assert one.submit(f"{group}-{number}", prompt, max_new_tokens=2 + number % 4)
    seen = []
    while one.scheduler.waiting_queue or not one.scheduler.running_batch.is_empty():
        batch = one.step()
        seen += [req.rid for req in batch.reqs if req.rid not in seen] if batch else []
    one.drain()
    return seen


def wrapped(one):
    """The scheduler's and its policy's methods that are not their classes'."""
    own = {**vars(one.scheduler), **{f"policy.{name}": value for name, value in vars(one.scheduler.policy).items()}}
    return {name for name in own if inspect.isroutine(getattr(type(one.scheduler), name, None)) or "calc" in name}


def test_after_a_switch_admission_is_as_after_a_start(server):
    names = ("fcfs", "lpm", "feather-heuristic", "dfs-weight", "hrrn", "shortest-prefill-first", "feather", "fcfs")
    names = [name for name in names if not lacks_policy(switch.installed_version(), name)]
    one = server("fcfs")
    switched = []
    for name in names:
        assert order(one, name) == (200, {"schedule_policy": name})
        if name.startswith("feather"):
            one.feather.admission.prefill_delay = None  # as in one that is started: see `Server`
        switched.append(admitted(one))
        assert state(one)["schedule_policy"] == name and state(one)["rounds"] > 0
    started = {}
    for name in set(names):
        started[name] = admitted(server(name, "{}"))
    assert switched == [started[name] for name in names]
    assert len({tuple(found) for found in switched}) > 2  # the workload tells the policies apart


def test_after_a_flush_slots_are_handed_out_as_after_a_start(server):
    one = server("fcfs")

    def free():
        slots, rows = one.scheduler.token_to_kv_pool_allocator, one.scheduler.req_to_token_pool
        return slots.free_pages.tolist() + slots.release_pages.tolist(), list(rows.free_slots)

    before = free()
    admitted(one)
    assert free() != before
    assert one.scheduler.flush_cache() and free() == before


def test_nothing_of_a_feather_policy_stays(server):
    one, add_one_req = server("fcfs"), PrefillAdder.add_one_req
    before = wrapped(one)
    assert {"set_internal_state", "_get_new_batch_prefill_raw"} <= before and "process_batch_result" not in before
    order(one, "feather")
    assert {"process_batch_result", "update_running_batch"} <= wrapped(one)
    assert one.feather.name == "feather"
    admitted(one)
    assert PrefillAdder.add_one_req is add_one_req  # SGLang's classes stay as they are
    learner = one.feather
    order(one, "feather")
    assert one.feather is not learner  # what it learned is dropped
    order(one, "feather-order")
    assert "process_batch_result" not in wrapped(one)  # nobody learns
    order(one, "feather")
    assert "process_batch_result" in wrapped(one)
    order(one, "lpm")
    assert wrapped(one) == before and PrefillAdder.add_one_req is add_one_req
    assert not hasattr(one.scheduler, "feather")


def test_a_server_that_starts_with_feather_can_leave_it(server):
    one = server("feather")
    assert order(one, "fcfs")[0] == 200
    assert not hasattr(one.scheduler, "feather") and "process_batch_result" not in vars(one.scheduler)
    admitted(one)
    assert state(one)["stops"] == 0 and "failed" not in state(one)


def test_sglang_reports_the_new_policy(server):
    one = server("fcfs")
    order(one, "lpm")
    assert one.scheduler.schedule_policy == "lpm"
    assert get_context().resolved_server_args_dict()["schedule_policy"] == "lpm"


def test_requests_in_flight_keep_the_policy(server):
    one = server("fcfs")
    for number in range(4):
        one.submit(f"r{number}", [7] * 20 + [number + 9])
    assert order(one, "lpm")[0] == 409
    one.step()
    assert order(one, "feather")[1]["error"].startswith("requests are running or waiting: switch when idle, or")
    assert one.scheduler.policy.policy.value == "fcfs" and not hasattr(one.scheduler, "feather")
    one.drain()
    assert order(one, "lpm")[0] == 200


@pytest.mark.parametrize("policy", ["lpm", "feather"])
def test_an_order_that_may_drain_waits_for_the_running_and_keeps_the_waiting(server, monkeypatch, policy):
    monkeypatch.setenv("FEATHER_DEBUG_CHECK", "1")
    one = server(policy)
    for number in range(8):  # three may run
        one.submit(f"r{number}", [7 + number % 2] * 100 + [number + 9], max_new_tokens=6)
    one.step()
    one.step()
    running = {req.rid for req in one.scheduler.running_batch.reqs}
    assert len(running) == 3 and order(one, "feather-heuristic", drain=True)[0] == 200
    assert state(one)["schedule_policy"] == policy and state(one)["draining"] == "feather-heuristic"
    one.submit("late", [7] * 50, max_new_tokens=3)
    while state(one)["draining"]:
        batch = one.step()
        assert batch is None or {req.rid for req in batch.reqs} <= running or one.feather.name == "feather-heuristic"
    assert one.feather.name == "feather-heuristic" and len(one.scheduler.waiting_queue) >= 3
    one.drain()
    assert {rid: len(req.output_ids) for rid, req in one.requests.items()} == {
        **{f"r{number}": 6 for number in range(8)}, "late": 3,
    }  # fmt: skip
    assert not one.feather.failed and one.feather.admission.stats()["waiting"] == 0


def test_feather_is_left_at_once_whatever_runs(server):
    one = server("feather")
    for number in range(8):
        one.submit(f"r{number}", [7] * 100 + [number + 9], max_new_tokens=6)
    one.step()
    assert order(one, "fcfs")[0] == 409
    assert order(one, "feather-heuristic", drain=True)[0] == 200 and state(one)["draining"]
    assert order(one, "fcfs", drain=True)[0] == 200  # which also takes back the order before
    assert not hasattr(one.scheduler, "feather") and state(one)["draining"] is None
    one.drain()
    assert one.scheduler.schedule_policy == "fcfs"
    assert [len(req.output_ids) for req in one.requests.values()] == [6] * 8


def test_the_answer_comes_once_all_have_drained(monkeypatch):
    monkeypatch.setattr(switch_endpoint, "DRAIN_POLL_SECONDS", 0)
    states = [{"schedule_policy": "lpm", "draining": "feather"}] * 2 + [{"schedule_policy": "feather"}] * 3

    async def get_internal_state():
        return [{"feather": states.pop(0)}]

    manager = SimpleNamespace(get_internal_state=get_internal_state)
    assert asyncio.run(switch_endpoint.drained(manager)) == {"schedule_policy": "feather"} and len(states) == 2


def test_without_the_flag_the_policy_tells_of_itself(server):
    one = server("feather", '{"max_wait": 9}')
    admitted(one)
    found = state(one)
    assert found["schedule_policy"] == "feather" and found["options"]["max_wait"] == 9 and found["rounds"] > 3
    assert json.loads(json.dumps(found)) == found and not found["failed"] and "admission_seconds" not in found
    one = server("fcfs", "{}")
    assert STATE not in one.scheduler.get_internal_state(GetInternalStateReq()).internal_state


def test_options_come_with_the_order(server, tmp_path):
    path = tmp_path / "policy.json"
    make_policy("bandit").save(path)
    one = server("fcfs", '{"allow_switch": true, "chunk_size": 32}')
    order(one, "feather", max_wait=7, policy_file=str(path), explore="off")
    assert (one.feather.options.max_wait, one.feather.options.chunk_size) == (7.0, 32)
    assert one.feather.policy.explore is False
    order(one, "feather-heuristic")
    assert (one.feather.options.max_wait, one.feather.options.policy_file) == (120.0, None)


def test_prefill_is_paced_from_a_switch_on(server):
    one = server("fcfs")
    order(one, "feather", pace=0.5)
    assert one.feather.admission.prefill_delay.bound == 0.5 and state(one)["delayed_rounds"] == 0
    one.feather.admission.delayed_rounds = 3
    assert state(one)["delayed_rounds"] == 3
    order(one, "feather-heuristic")
    assert one.feather.admission.prefill_delay.bound == 0.1 and state(one)["delayed_rounds"] == 0
    order(one, "feather", pace=0)
    assert one.feather.admission.prefill_delay is None
    order(one, "feather-order")
    assert one.feather.admission.prefill_delay is None
    order(one, "fcfs")
    assert "delayed_rounds" not in state(one)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("feather", {"pace": -1}, "options: pace=-1: expected seconds, 0 or more"),
        ("feather-order", {"pace": 1}, "--schedule-policy feather-order leaves admission to SGLang"),
        ("feather", {"chunk_size": 0}, "options: chunk_size=0: expected a whole number of at least 1"),
        ("feather", {"chunks": 3}, "options: unknown option 'chunks'"),
        ("feather", {"allow_switch": "off"}, "options: allow_switch cannot change while the server runs"),
        ("feather", {"policy_file": "/no/such"}, "options: policy_file='/no/such': no such file"),
        ("feather", {"policy_file": "a" * 5000}, "aaa...: no such file (File name too long)"),
        ("feather", {"policy_file": "/tmp/" + "a" * 300}, "...: no such file (File name too long)"),
        ("feather", {"policy_file": f"{__file__}/below"}, "no such file"),
        ("feather", {"c" * 5000: 1}, "options: unknown option 'cccc"),
        ("feather", {"slo": "d" * 5000}, "expected ttft=SECONDS"),
        ("feather", {"policy_file": __file__}, "test_switch.py is damaged: not JSON"),
        ("feather", {"slo": "ttft=2"}, "options: slo='ttft=2': give both bounds, ttft and tbt"),
        ("feather-order", {"slo": "ttft=2,tbt=50"}, "--schedule-policy feather-order leaves admission to SGLang"),
    ],
)
def test_an_order_that_cannot_be_carried_out_changes_nothing(server, name, options, says):
    one = server("lpm")
    status, answer = order(one, name, **options)
    assert status == 400 and says in answer["error"] and "\n" not in answer["error"] and len(answer["error"]) < 700
    assert one.scheduler.schedule_policy == "lpm" and one.scheduler.policy.policy.value == "lpm"
    assert state(one)["refused"]["reason"] == answer["error"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"schedule_policy": "feather", "drain": 1}', '"drain" must be true or false'),
        ("lpm", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ('["lpm"]', 'expected {"schedule_policy": NAME}'),
        ('{"schedule_policy": "lpm", "seed": 1}', "expected"),
        ('{"schedule_policy": "fifo"}', "unknown schedule policy 'fifo'; choose from fcfs, lpm"),
        ('{"schedule_policy": "lpm", "options": {"seed": 1}}', "lpm takes none"),
        ('{"schedule_policy": "feather", "options": 3}', "feather takes them"),
        (f'{{"schedule_policy": "{"f" * 10**6}"}}', "unknown schedule policy 'ffff"),
        ('{"schedule_policy": "feather", "options": {"slo": ' + "[" * 900 + "]" * 900 + "}}", "'slo' must be a number"),
    ],
)
def test_a_mistaken_order_is_one_clear_line(text, says):
    with pytest.raises(FeatherError) as error:
        Order.from_json(text)
    assert says in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 300


def test_a_check_that_breaks_refuses_and_the_server_goes_on(server, monkeypatch):
    one = server("lpm")
    monkeypatch.setattr(switch, "refuse_unsupported", lambda *args: [][1])
    status, answer = order(one, "feather")
    assert status == 400 and answer["error"] == "the order could not be checked: IndexError('list index out of range')"
    assert one.scheduler.schedule_policy == "lpm"
    monkeypatch.undo()
    assert order(one, "feather")[0] == 200


def test_a_policy_that_this_server_does_not_have_is_refused(server, monkeypatch):
    one = server("fcfs")
    monkeypatch.setattr(one.scheduler, "enable_priority_scheduling", True)
    assert "does not allow lpm" in order(one, "lpm")[1]["error"]
    monkeypatch.setattr(one.scheduler, "enable_priority_scheduling", False)
    monkeypatch.setattr(switch, "STOCK", (*switch.STOCK, "older"))
    assert "has no schedule policy older" in order(one, "older")[1]["error"]
    monkeypatch.setattr(one.scheduler.tree_cache, "disable", True)
    assert "would run fcfs in place of lpm" in order(one, "lpm")[1]["error"]
    for version, says in (("0.5.20", "0.5.20 has no schedule policy"), ("0.5.23", "-first needs a prefix cache, and")):
        monkeypatch.setattr(switch, "installed_version", lambda version=version: version)
        assert says in order(one, "shortest-prefill-first")[1]["error"]
    monkeypatch.setattr(hooks, "mismatches", lambda part: ["x: not found"])
    assert "does not fit --schedule-policy feather: x: not found" in order(one, "feather")[1]["error"]


def test_one_rank_alone_does_not_switch(server, monkeypatch):
    one = server("fcfs")
    monkeypatch.setattr(switch.Agreement, "all", lambda self, mine: False)
    assert order(one, "lpm") == (400, {"error": "another rank refused; its log says why"})
    assert one.scheduler.policy.policy.value == "fcfs"


def test_without_the_flag_sglang_refuses(server):
    one = server("fcfs", "{}")
    message = Order("lpm").as_message()
    assert not one.scheduler.set_internal_state(SetInternalStateReq(server_args=message)).updated
    assert "set_internal_state" not in vars(one.scheduler) and one.scheduler.schedule_policy == "fcfs"
    assert order(one, "lpm")[0] == 500  # as a plugin that is missing in the schedulers alone would


def test_sglangs_own_orders_still_arrive(server):
    one = server("fcfs")
    changed = one.scheduler.set_internal_state(SetInternalStateReq(server_args={"pp_max_micro_batch_size": 2}))
    assert changed.updated and get_context().resolved_server_args_dict()["pp_max_micro_batch_size"] == 2


def test_replicas_that_differ_are_named():
    async def set_internal_state(request):
        return [True, False]

    async def get_internal_state():
        busy = {"status": 409, "reason": "1 request is running or waiting: switch when idle"}
        return [{"feather": {"schedule_policy": "lpm", "refused": None}},
                {"feather": {"schedule_policy": "fcfs", "refused": busy}}]  # fmt: skip

    manager = SimpleNamespace(set_internal_state=set_internal_state, get_internal_state=get_internal_state)
    status, answer = asyncio.run(switch_endpoint.send(Order("lpm"), manager))
    assert status == 409 and "lpm, fcfs" in answer["error"] and "1 request" in answer["error"]


def test_without_a_key_start_up_ends(monkeypatch):
    monkeypatch.setenv("FEATHER_OPTIONS", ALLOWED)
    for arguments, says in (
        ({}, "--feather-allow-switch needs --admin-api-key"),
        ({"admin_api_key": "k", "tokenizer_worker_num": 2}, "does not support --tokenizer-worker-num above 1"),
    ):
        with pytest.raises(FeatherError, match=says):
            plugin.check_server_args(lambda args: None, SimpleNamespace(**arguments))


def test_a_command_ends_with_one_line(monkeypatch):
    monkeypatch.setenv("FEATHER_OPTIONS", ALLOWED)
    monkeypatch.setattr(failures, "_command_line", True)
    with pytest.raises(SystemExit, match=r"^feather: error: --feather-allow-switch"):
        plugin.check_server_args(lambda args: None, SimpleNamespace())


def test_a_hook_that_does_not_fit_ends_start_up(server, monkeypatch):
    monkeypatch.setattr(hooks, "mismatches", lambda part: [f"{part} differs"])
    with pytest.raises(FeatherError, match="does not fit --feather-allow-switch: switch differs"):
        server("fcfs")


def test_admission_is_timed_alike_under_every_policy(server):
    one = server("fcfs")
    for name in ("fcfs", "feather"):
        order(one, name)
        assert state(one)["rounds"] == 0 and state(one)["admission_seconds"] == 0.0
        admitted(one)
        found = state(one)
        assert found["rounds"] > 3 and 0 < found["admission_seconds"] < 5.0
        for _ in range(50):
            one.step()  # nobody waits: no round, no time
        assert state(one) == found


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        ({"pp_size": 2}, "--pp-size above 1"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode"),
        ({"enable_dp_attention": True}, "data-parallel attention"),
        ({"attn_dp_size": 2}, "data-parallel attention"),  # since 0.5.22
    ],
)
def test_schedulers_that_do_not_hear_of_an_order_between_the_same_steps(args, flag):
    with pytest.raises(FeatherError, match=f"cannot be switched under {flag}"):
        switch.refuse_unswitchable(SimpleNamespace(server_args=SimpleNamespace(**args)))
