"""Promises of a feather policy beyond scheduling: activation, off, failure, reward, fairness, no regret, its log."""

import logging
import os

import pytest

from feather_sglang.adapter import hooks, plugin
from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.adapter.scheduler import guard, rounds
from feather_sglang.adapter.scheduler.decision_log import digest
from feather_sglang.adapter.scheduler.feather_scheduler import FeatherScheduler
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policies import make_policy


def prompt(group, unique=0):
    return [2 + group] * 130 + [20 + unique] * 4


# Off is off -----------------------------------------------------------------------------------------------------


def test_under_a_stock_policy_nothing_is_wrapped_on_the_hot_path(server):
    one = server("lpm")
    assert not hasattr(one.scheduler, "feather")
    per_step = [name for name in vars(one.scheduler) if name.startswith(("_get_new", "_add_request", "update_running"))]
    assert per_step == [] and "process_batch_result" not in vars(one.scheduler)
    assert "calc_priority" not in vars(one.scheduler.policy)


def test_without_a_policy_to_learn_nothing_is_measured(server):
    assert "process_batch_result" not in vars(server("feather-order").scheduler)
    assert "process_batch_result" in vars(server("feather").scheduler)


def test_the_plugin_alone_adds_the_policies_and_changes_no_per_step_function(preloaded):
    """In a process of its own: without it no feather policy; with it every per-step function as SGLang defined it."""
    code = """
import pkgutil
from feather_sglang.adapter import cpu_shims; cpu_shims.install()
from feather_sglang.adapter.hooks import HOOKS, exists
resolve = lambda hook: pkgutil.resolve_name(hook.target.rpartition('.')[0]).__dict__[hook.target.rpartition('.')[2]]
hooks = [hook for hook in HOOKS if hook.kind != 'start' and (exists(hook) or not hook.optional)]
before = [resolve(hook) for hook in hooks]
import os
from sglang.srt import plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args
os.environ['SGLANG_PLUGINS'] = 'none-such'
plugins.load_plugins()
try:
    prepare_server_args(['--model-path', 'none-such', '--schedule-policy', 'feather'])
except SystemExit as ended:
    assert ended.code == 2
del os.environ['SGLANG_PLUGINS']
plugins._plugins_loaded = False
plugins.load_plugins()
assert hasattr(ServerArgs.add_cli_args, '__wrapped__')
assert [resolve(hook) for hook in hooks] == before
print('untouched', len(hooks))
"""
    shown, errors = preloaded.run(code, os.environ)
    assert shown.startswith("untouched"), errors[-2000:]
    assert "invalid choice: 'feather'" in errors


# Loud activation ------------------------------------------------------------------------------------------------


def test_a_hook_that_does_not_fit_ends_start_up(server, monkeypatch):
    monkeypatch.setattr(hooks, "mismatches", lambda part: ["Scheduler.run: takes (self), expected (self, x, ...)"])
    with pytest.raises(FeatherError, match=r"does not fit --schedule-policy feather-bandit: Scheduler\.run: takes"):
        server()


def test_a_missing_take_over_hook_is_no_silent_fcfs(server, monkeypatch):
    monkeypatch.setattr(plugin.HookRegistry, "_patched", set())
    with pytest.raises(FeatherError, match="could not be hooked"):
        plugin.accept_policy(lambda *a: None, None, "feather", None)
    assert plugin.accept_policy(lambda policy, name, cache: name, None, "lpm", None) == "lpm"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ('{"chunk_size": "x"}', "chunk_size='x'"),
        ('{"policy_file": "/no/such/file"}', "no such file"),
    ],
)
def test_bad_options_end_start_up(server, monkeypatch, options, says):
    monkeypatch.setenv("FEATHER_OPTIONS", options)
    with pytest.raises(FeatherError, match=says):
        server()


def test_the_radix_cache_is_needed(server):
    with pytest.raises(FeatherError, match=r"does not support --disable-radix-cache; drop it or choose another policy"):
        server(disable_radix_cache=True)


def test_a_policy_file_of_another_kind_is_refused(server, monkeypatch, tmp_path):
    path = tmp_path / "heuristic.json"
    make_policy("heuristic").save(path)
    monkeypatch.setenv("FEATHER_OPTIONS", f'{{"policy_file": "{path}"}}')
    with pytest.raises(FeatherError, match="holds a heuristic policy, --schedule-policy feather-bandit needs bandit"):
        server()


# Never worse than off -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken",
    ["propose", "open_round", "check", "admitted", "close_round", "arrived", "row_order", "decode", "prefill"],
)
def test_a_failure_is_logged_once_counted_and_served_as_fcfs(server, monkeypatch, caplog, broken):
    one = server()
    counter = guard.failure_counter()
    before = counter._value.get()
    for i in range(3):
        one.submit(f"early{i}", prompt(i), max_new_tokens=12)
    one.step()

    def fail(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    if broken in ("decode", "prefill"):
        monkeypatch.setattr(getattr(one.feather.meters, broken), "step", fail)
    else:
        monkeypatch.setattr(one.feather.admission, broken, fail)
    with caplog.at_level(logging.ERROR):
        for i in range(12):
            one.submit(f"r{i:02}", prompt(i % 3, i), max_new_tokens=5)
            one.step()
        one.drain()
    assert all(len(tokens) in (5, 12) for tokens in one.outputs().values())
    assert one.feather.failed and counter._value.get() == before + 1
    assert sum("goes on as fcfs" in record.message for record in caplog.records) == 1
    assert one.scheduler.running_batch.is_empty()
    assert guard.failure_gauge()._value.get() == 1
    one.feather.guard.end()  # another policy takes over
    assert guard.failure_gauge()._value.get() == 0


# Stop, reward, fairness, no regret ------------------------------------------------------------------------------


def strict():
    return make_policy("heuristic", small_batch=1, small_batch_loss=0, max_loss=0, many_peers_loss=0)


def test_stop_keeps_other_groups_out_and_the_batch_open(server):
    one = server("feather-heuristic")
    one.feather.admission.policy = strict()
    for i in range(6):
        one.submit(f"r{i}", prompt(i % 2, i), max_new_tokens=10)
    one.step()
    assert {req.rid for req in one.scheduler.waiting_queue} == {"r1", "r3", "r5"}
    assert not one.scheduler.running_batch.batch_is_full
    one.step()
    one.submit("late", prompt(0, 9), max_new_tokens=2)  # the same group: admitted at once, STOP or not
    one.step()
    assert "late" not in {req.rid for req in one.scheduler.waiting_queue}
    one.drain()
    assert one.feather.admission.stopping.stops > 0
    one.assert_nothing_left()


def test_the_bound_ends_the_wait(server):
    one = server("feather-heuristic")
    one.feather.admission.policy = strict()
    one.feather.admission.state.fairness.max_wait_rounds = 8
    one.submit("a00", prompt(0), max_new_tokens=4)
    one.submit("a01", prompt(0, 1), max_new_tokens=4)
    one.step()
    one.submit("b", prompt(1), max_new_tokens=4)
    for i in range(2, 60):
        one.submit(f"a{i:02}", prompt(0, i), max_new_tokens=4)
        one.step()  # the prefill of the newcomer
        one.step()  # a decode step
        if one.requests["b"].finished():
            break
    assert one.requests["b"].finished() and one.feather.admission.overdue_admissions >= 1
    one.drain()


def test_the_reward_is_decode_tokens_over_decode_time(server):
    """On a clock that advances 1 s per decode step and 100 s per prefill step."""
    one = server()
    now = [0.0]
    one.feather.clock = lambda: now[0]
    rewards = []
    one.feather.policy.observe = rewards.append
    forward = one.scheduler.run_batch

    def run_batch(batch, *args, **kwargs):
        now[0] += 1.0 if batch.forward_mode.is_decode() else 100.0
        return forward(batch, *args, **kwargs)

    one.scheduler.run_batch = run_batch
    for i in range(4):
        one.submit(f"r{i}", prompt(0, i), max_new_tokens=20)
    for _ in range(6):
        one.step()
    one.submit("late", prompt(0, 8), max_new_tokens=20)
    one.step()
    assert rewards == [4.0]  # four rows, one token each per second; the prefill's 100 s do not enter
    for _ in range(6):
        one.step()
    one.submit("later", prompt(0, 9), max_new_tokens=20)
    one.step()
    assert rewards == [4.0, 5.0]
    one.drain()


def test_without_sharing_requests_are_served_first_come_first_served(server):
    """No regret: unrelated prompts of one length are admitted in arrival order and the policy never stops."""
    one = server(max_running_requests=3)
    for i in range(15):
        one.submit(f"r{i:02}", [10 + i] * 70, max_new_tokens=4)
    order = []
    while one.step() is not None or one.scheduler.waiting_queue:
        waiting = {req.rid for req in one.scheduler.waiting_queue}
        order += sorted(rid for rid in one.requests if rid not in waiting and rid not in order)
    assert order == sorted(one.requests)
    assert one.feather.admission.stopping.stops == 0
    assert one.feather.policy.stats()["stops"] == 0


@pytest.mark.parametrize("by", ["extra_key", "lora_id"])
def test_extra_keys_and_adapters_isolate(server, by):
    one = server("feather-heuristic")
    one.feather.admission.policy = strict()
    one.submit("a0", prompt(0), max_new_tokens=10, **{by: "tenant1"})
    one.submit("a1", prompt(0), max_new_tokens=10, **{by: "tenant1"})
    one.submit("b", prompt(0), max_new_tokens=10, **{by: "tenant2"})
    one.step()
    assert {req.rid for req in one.scheduler.waiting_queue} == {"b"}  # equal tokens, nothing to share
    one.drain()


def test_the_debug_check_finds_a_difference(server, monkeypatch):
    monkeypatch.setitem(os.environ, "FEATHER_DEBUG_CHECK", "1")
    one = server()
    one.submit("a", prompt(0))
    one.step()
    one.feather.admission.finished("a")
    with pytest.raises(AssertionError, match="differ"):
        one.step()
    one.feather.guard.fail("on purpose", RuntimeError())
    with pytest.raises(AssertionError, match="went on as fcfs"):
        one.step()


# The decision log -----------------------------------------------------------------------------------------------


@pytest.fixture
def log_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEATHER_DECISION_LOG", str(tmp_path / "decisions"))
    return tmp_path / "decisions"


@pytest.mark.parametrize("policy", ["feather", "feather-order"])
def test_the_decision_log_has_every_batch_that_ran(server, log_folder, policy):
    one = server(policy, chunked_prefill_size=128, enable_mixed_chunk=True)
    ran = []

    def step():
        """Note what SGLang is about to run; afterwards it changes the batch."""
        forward = one.scheduler.run_batch
        one.scheduler.run_batch = lambda batch: ran.append(described(batch)) or forward(batch)
        batch = one.step()
        one.scheduler.run_batch = forward
        return batch

    def described(batch):
        mode = batch.forward_mode
        name = "decode" if mode.is_decode() else "mixed" if mode.is_mixed() else "prefill"
        return name, [req.rid for req in batch.reqs], () if mode.is_decode() else list(batch.extend_lens)

    for i in range(12):
        one.submit(f"r{i:02}", prompt(i % 3, i), max_new_tokens=4 + i)
        step()
    while step() is not None:
        pass
    head, *lines = (log_folder / "rank0.log").read_text().splitlines()
    assert head.endswith(f": {policy}")
    assert [line.split()[:4] for line in lines] == [
        [str(step), mode, str(len(rids)), digest(rids, extends)] for step, (mode, rids, extends) in enumerate(ran)
    ]
    assert {mode for mode, _, _ in ran} == {"decode", "mixed", "prefill"}
    stats = one.feather.policy.stats() if one.feather.policy else {"adds": 0, "stops": 0}
    assert lines[-1].split()[4:] == [str(stats["adds"]), str(stats["stops"]), "0"]
    assert bool(stats["adds"]) == (policy == "feather")
    one.feather.uninstall()
    assert "get_next_batch_to_run" not in vars(one.scheduler)


def test_a_decision_log_that_cannot_be_written_ends_start_up(server, log_folder):
    log_folder.write_text("a file")
    with pytest.raises(FeatherError, match=r"rank0\.log cannot be written"):
        server()


def test_a_decision_that_cannot_be_described_is_a_failure_like_others(server, log_folder, monkeypatch):
    one = server()
    monkeypatch.setattr(one.feather._decisions, "note", lambda *args: 1 / 0)
    one.submit("a", prompt(0))
    one.drain()
    assert one.feather.failed and one.requests["a"].finished()
    assert (log_folder / "rank0.log").read_text().count("\n") == 1


def computed_tokens(server, policy):
    one = server(policy)
    for i in range(6):
        one.submit(f"r{i}", [2 + i % 2] * 500 + [20 + i] * 4, max_new_tokens=3)
    one.drain()
    one.assert_nothing_left()
    return sum(len(req.origin_input_ids) - req.cached_tokens for req in one.requests.values())


def test_a_prefix_that_arrives_many_times_at_once_is_computed_once(server):
    once = 2 * 500 + 6 * 4
    assert once <= computed_tokens(server, "feather-bandit") < once + 6 * 4
    assert computed_tokens(server, "feather-order") > 2 * once


# Prefixes that wait ---------------------------------------------------------------------------------------------


@pytest.fixture
def gathering_server(server, monkeypatch):
    """Checked after every step, on a clock that tests set, under a policy that never stops."""

    def make(gather="on", **overrides):
        monkeypatch.setenv("FEATHER_DEBUG_CHECK", "1")
        monkeypatch.setenv("FEATHER_OPTIONS", f'{{"gather": "{gather}"}}')
        one = server("feather-heuristic", **overrides)
        one.feather.admission.policy = make_policy("always-add")
        one.now = 0.0
        one.feather.clock = lambda: one.now
        return one

    return make


def long_prompt(group, unique=0):
    return [2 + group] * 1200 + [100 + unique] * 4


def run_on_clock(one, seconds_per_token):
    """A step takes a second, and so much for each prompt token in it."""
    forward = one.scheduler.run_batch

    def run_batch(batch, *args, **kwargs):
        one.now += 1.0 + (0 if batch.forward_mode.is_decode() else seconds_per_token * sum(batch.extend_lens))
        return forward(batch, *args, **kwargs)

    one.scheduler.run_batch = run_batch


def tokens_computed_for_three_waves(one):
    """Beside a large batch of one prefix, one request of each of five others comes three times; two of these fit."""
    run_on_clock(one, 0.002)
    due = [(0.0, "tiny", [9] * 9, 1)] + [(1.0, f"large{i}", long_prompt(0, i), 110) for i in range(30)]
    due += [(6.0 + 25 * i, f"wave{i} {group}", long_prompt(group, i), 1) for i in range(3) for group in range(1, 6)]
    expected = {rid: outputs for _, rid, _, outputs in due}
    while due or one.scheduler.waiting_queue:
        while due and due[0][0] <= one.now:
            _, rid, tokens, outputs = due.pop(0)
            assert one.submit(rid, tokens, max_new_tokens=outputs)
        if one.step() is None:
            one.now += 1.0
    one.drain()
    assert {rid: len(tokens) for rid, tokens in one.outputs().items()} == expected
    one.assert_nothing_left()
    return sum(len(req.origin_input_ids) - req.cached_tokens for req in one.requests.values())


def test_prefixes_that_wait_are_computed_less_often(gathering_server):
    one = gathering_server("on", max_total_tokens=6000)
    on = tokens_computed_for_three_waves(one)
    assert one.feather.admission.stats()["deferrals"]["batching"] > 0 and one.feather.admission.overdue_admissions == 0
    one = gathering_server("off", max_total_tokens=6000)
    assert one.feather.admission.state.deferrals.prefix_batching is None
    assert on < 0.7 * tokens_computed_for_three_waves(one)
    assert one.feather.admission.stats()["deferrals"]["batching"] == 0


def waiting(one):
    return {req.rid for req in one.scheduler.waiting_queue}


def let_gather(one, monkeypatch, enough):
    """Memory is short, and prefixes wait for so many."""
    gathering = one.feather.admission.state.deferrals.prefix_batching
    monkeypatch.setattr(gathering, "short", lambda demand_tokens, running: True)
    monkeypatch.setattr(gathering, "waits", lambda missing, together, waited, running: together < enough)


def test_postponed_requests_stay_in_the_queue_while_others_run(gathering_server, monkeypatch):
    one = gathering_server()
    let_gather(one, monkeypatch, enough=3)
    for rid in ("a0", "a1", "b0", "b1", "b2", "c0"):
        one.submit(rid, long_prompt(ord(rid[0]) - ord("a"), int(rid[1])))
    one.step()
    assert waiting(one) == {"a0", "a1", "b1", "b2", "c0"}  # b's come as soon as their prefix is computed
    for _ in range(4):
        one.step()
        assert waiting(one) == {"a0", "a1", "c0"} and set(one.feather.admission.state.deferrals.batching) == {
            "a0",
            "c0",
        }
    one.abort("c0")
    one.abort("a0")
    one.submit("a2", long_prompt(0, 2))
    one.step()
    assert waiting(one) == {"a1", "a2"}
    one.submit("a3", long_prompt(0, 3))
    one.step()
    assert waiting(one) == {"a2", "a3"}
    one.drain()
    outputs = {rid: len(tokens) for rid, tokens in one.outputs().items()}
    assert outputs == {"a0": 0, "c0": 0, **dict.fromkeys(("a1", "a2", "a3", "b0", "b1", "b2"), 8)}
    one.assert_nothing_left()
    assert not one.feather.admission.state.deferrals.batching


def test_a_server_with_nothing_else_to_do_serves_the_overdue(gathering_server, monkeypatch):
    one = gathering_server()
    let_gather(one, monkeypatch, enough=1000)
    one.feather.admission.state.fairness.max_wait = 30.0
    one.submit("lone", long_prompt(1))
    one.submit("short", [9] * 40)
    assert one.step() is not None and waiting(one) == {"lone"}
    for _ in range(12):
        one.step()
    assert waiting(one) == {"lone"} and one.requests["short"].finished()
    one.now = 30.0
    one.drain()
    assert one.requests["lone"].finished() and one.feather.admission.overdue_admissions == 1
    one.assert_nothing_left()


def test_who_was_retracted_does_not_wait(gathering_server, monkeypatch):
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    one = gathering_server()
    one.submit("a", long_prompt(0))
    for _ in range(3):
        one.step()
    one.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    one.scheduler.continue_generation(ContinueGenerationReqInput())
    assert waiting(one) == {"a"} and one.requests["a"].output_ids
    let_gather(one, monkeypatch, enough=1000)
    monkeypatch.setattr(rounds, "cached_tokens", lambda req: 0)  # as if it were evicted already
    one.submit("b", long_prompt(1))
    one.step()
    assert waiting(one) == {"b"}
    one.feather.admission.state.fairness.max_wait = 0.0
    one.drain()
    one.assert_nothing_left()


def test_prefill_is_measured_and_idle_time_is_not(gathering_server):
    one = gathering_server()
    run_on_clock(one, 0.01)
    meter = one.feather.meters.prefill
    alone, two = 0.01 + 1 / 1204, 0.01 + 1 / 1244  # seconds a token: of one long prompt, and with a short one
    one.now = 1000.0
    one.submit("first", long_prompt(0), max_new_tokens=6)
    assert meter.seconds_per_token is None
    one.step()
    assert meter.seconds_per_token == pytest.approx(alone)
    one.step()
    one.step()  # a decode step that follows another is timed
    one.submit("second", long_prompt(1), max_new_tokens=1)
    one.submit("little", [9] * 40, max_new_tokens=1)
    one.step()
    one.step()  # what lies between two decode steps is known when the later one has ended
    measured = alone + (two - alone) / 64
    assert meter.seconds_per_token == pytest.approx(measured)
    assert one.feather.admission.state.deferrals.prefix_batching.seconds_per_token == pytest.approx(
        alone
    )  # of the last round
    one.drain()
    for group in (2, 3):
        one.now += 1000.0
        one.submit(f"after {group}", long_prompt(group), max_new_tokens=group - 1)
        one.drain()
        measured += (alone - measured) / 64
        assert meter.seconds_per_token == pytest.approx(measured)
    one.assert_nothing_left()


def test_output_lengths_are_learnt(gathering_server):
    one = gathering_server()
    gathering = one.feather.admission.state.deferrals.prefix_batching
    one.submit("long", prompt(0), max_new_tokens=20)
    assert gathering.output_tokens == 20  # so many it may have
    one.submit("short", prompt(1), max_new_tokens=7)
    while not one.requests["short"].finished():
        one.step()
    one.step()
    assert gathering.output_tokens == 7
    one.drain()
    assert 7 < gathering.output_tokens < 20
    one.assert_nothing_left()


def test_a_model_with_recurrent_state_does_not_gather(gathering_server, monkeypatch):
    one = gathering_server()
    for hybrid in (True, False):
        monkeypatch.setattr(one.scheduler, "is_hybrid_ssm", hybrid)
        policy = make_policy("heuristic")
        feather = FeatherScheduler(one.scheduler, "feather-heuristic", FeatherOptions(), policy)
        assert (feather.admission.state.deferrals.prefix_batching is None) == hybrid
    order = FeatherScheduler(one.scheduler, "feather-order", FeatherOptions(), None)
    assert order.admission.state.deferrals.prefix_batching is None  # it leaves admission to SGLang
