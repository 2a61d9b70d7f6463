"""An exception in any callback: logged once, counted once, and every request is answered once, as under fcfs."""

from __future__ import annotations

import logging
from operator import attrgetter

import pytest
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

from faults.conftest import Answers
from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.adapter.scheduler.feather_scheduler import take_over
from feather_sglang.adapter.scheduler.guard import failure_counter
from feather_sglang.scheduling.policies import make_policy

# Whatever SGLang's calls reach, by room; each is called in the work below, or the test fails.
CALLED = {
    "admission": (
        "arrived aborted finished retracted open_round propose check admitted close_round row_order "
        "prefill_work waiting_work"
    ),
    "admission.order": "next",
    "admission.stopping": "reward cancel carried_out explore",
    "policy": "decide observe",
    "life_cycle": "_look_up alive synchronise admitted computed",
    "meters": "clock readings",
    "meters.decode": "step restart take",
    "meters.prefill": "step begin idle",
    "meters.agreement": "readings",
    "rounds.prefixes": "use count",
    "rounds.limit": "wanted begin open allow admitted end",
    "rounds.limit.bound": "look begin_gap launched tell_in_force",
    "rows.admission.tree": "insert find_best finish",
}
CASES = [(room, name) for room, names in CALLED.items() for name in names.split()]


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    """A server for all cases: each takes over anew."""
    from harness import Server

    one = Server(
        tmp_path_factory.mktemp("model"), "fcfs", chunked_prefill_size=128, enable_metrics=False, max_running_requests=6
    )
    yield one
    one.close()


class Broken:
    """A method that fails once, before it has done its work or after it, and counts how often it was called."""

    def __init__(self, method, after):
        self.method, self.after, self.calls = method, after, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.after:
            self.method(*args, **kwargs)
        raise RuntimeError("broken on purpose")


def work(one, number):
    """Prefixes, chunks, aborts of those who wait and who run, a pause that retracts, a load report; ends idle."""
    scheduler = one.scheduler

    def submit(i):
        one.submit(f"{number}-{i:02}", [2 + i % 2] * 300 + [20 + i, 30 + number % 400], max_new_tokens=6 + i % 3)

    for i in range(8):
        submit(i)
        if i in (4, 6):
            one.step()
    scheduler.policy.waiting_queue_prefix_matched(scheduler.waiting_queue)
    one.abort(f"{number}-01")
    one.abort(scheduler.waiting_queue[-1].rid)
    for _ in range(3):
        one.step()
    scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    scheduler.continue_generation(ContinueGenerationReqInput())
    for i in (8, 9):
        submit(i)
        one.step()
    one.drain(500)
    one.step()


STATEFUL = [case for case in CASES if case[0] in ("admission", "life_cycle", "rows.admission.tree")]


@pytest.mark.parametrize(
    ("room", "name", "after"),
    [*((*case, False) for case in CASES), *((*case, True) for case in STATEFUL)],
    ids=lambda value: {False: "before", True: "after"}.get(value) if isinstance(value, bool) else value,
)
def test_every_request_is_answered_once(scheduler, monkeypatch, caplog, room, name, after):
    one, counter = scheduler, failure_counter()
    before, one.answers, one.requests = counter._value.get(), Answers(), {}
    one.answers.install(one.scheduler)
    feather = take_over(one.scheduler, "feather", FeatherOptions(tbt=40.0, pace=0.0), make_policy("bandit", seed=1))
    place = attrgetter(room)(feather)
    broken = Broken(getattr(place, name), after)
    monkeypatch.setattr(place, name, broken)
    try:
        with caplog.at_level(logging.ERROR):
            work(one, CASES.index((room, name)))
    finally:
        feather.uninstall()
        del one.scheduler.feather
        monkeypatch.undo()
    assert broken.calls == 1, "called again after it has failed, or never"
    assert feather.failed and counter._value.get() == before + 1
    assert sum("goes on as fcfs" in record.message for record in caplog.records) == 1
    assert one.answers == dict.fromkeys(one.requests, 1)
    complete = [rid for rid, req in one.requests.items() if len(req.output_ids) == req.sampling_params.max_new_tokens]
    assert len(complete) >= 8  # of 10, two of which were aborted
    one.assert_pools_full()
