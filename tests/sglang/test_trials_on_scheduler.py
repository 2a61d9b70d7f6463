"""``--feather-modes-budget`` inside the installed SGLang: modes are tried, what came of requests is counted."""

import json
from itertools import pairwise

import pytest
from harness import OverlapServer, Server

from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.modes import trials
from feather_sglang.scheduling.modes.mode import Mode, Prefill, Ranking
from feather_sglang.scheduling.modes.mode_policy import ModePolicy
from feather_sglang.slo import Timing, parse

STEP = 0.01  # seconds of any step
BUDGET, WINDOW = 0.3, 8
BOUNDS = "ttft=0.2,tbt=15"  # a prefill step between two tokens is too long
USUAL, RIVALS = Mode(Ranking.IN_TIME, Prefill.SPACED), (Mode(Ranking.OLDEST), Mode(Ranking.RATIO))


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Serves bursts of requests, more than can have a first token in time; who had which times, by its own account."""
    monkeypatch.setenv("FEATHER_DEBUG_CHECK", "1")
    for name, value in (("WINDOW", WINDOW), ("SECONDS", 0.3), ("STAKE", 1.0), ("STAKED", 0.0)):
        monkeypatch.setattr(trials, name, value)
    modes = tmp_path / "modes.json"
    ModePolicy({}, USUAL, rivals=RIVALS).save(modes)
    made = []

    def serve(kind, steps, budget=BUDGET):
        told = {"slo": BOUNDS, "modes": str(modes), "modes_budget": budget, "pace": 0}
        monkeypatch.setenv("FEATHER_OPTIONS", json.dumps(told))
        one = kind(tmp_path, "feather", max_running_requests=8, chunked_prefill_size=1024)
        made.append(one)
        one.feather.clock = lambda: STEP * one.steps
        one.modes, one.came, one.times = [], {}, {}
        for number in range(240):
            rid = f"r{number}"
            one.came[rid] = STEP * one.steps
            assert one.submit(rid, [20 + number] * (20 + 37 * number % 60), max_new_tokens=4 + number % 5)
            for _ in range(0 if number % 6 else steps):
                step(one)
        while one.scheduler.waiting_queue or not all(req.finished() for req in one.requests.values()):
            step(one)
            assert one.steps < 5000
        one.assert_nothing_left()
        return one

    yield serve
    for one in made:
        one.close()


def step(one):
    now = STEP * one.steps
    one.step()
    one.modes.append(one.feather.admission.mode)
    for rid, req in one.requests.items():
        seen = one.times.setdefault(rid, [])
        seen += [now] * (len(req.output_ids) - len(seen))


def within(one):
    """How many were within the bounds, by their tokens."""
    timings = (
        Timing.of(times[0] - one.came[rid], [later - earlier for earlier, later in pairwise(times)])
        for rid, times in one.times.items()
    )
    return sum(map(parse(BOUNDS).met, timings))


@pytest.mark.parametrize("kind", [Server, OverlapServer])
def test_other_modes_are_tried_and_what_came_of_requests_is_counted(served, kind):
    one = served(kind, 7)
    outcomes, stats = one.feather.meters.outcomes, one.feather.stats()["trials"]
    assert stats["count"] and set(one.modes) > {USUAL} and set(one.modes) <= {USUAL, *RIVALS}
    assert outcomes.judged == len(one.requests) and outcomes.within == within(one)
    untried = served(kind, 7, budget=0)
    assert set(untried.modes) == {USUAL} and untried.outputs() == one.outputs()
    # By its own account: in a queue this short a single trial changes all that comes after it.
    assert 0 < outcomes.within and stats["lost"] <= BUDGET * outcomes.within + 2 * WINDOW


def test_whether_the_server_is_healthy_says_nothing_of_the_bounds(served):
    one = served(Server, 7, budget=0.01)
    judged = one.feather.meters.outcomes.judged
    for rid in ("HEALTH_CHECK_1", "last"):
        one.came[rid] = STEP * one.steps
        assert one.submit(rid, [7] * 20, max_new_tokens=2)
        while not one.requests[rid].finished():
            step(one)
    step(one)
    assert one.feather.meters.outcomes.judged == judged + 1


def test_a_file_that_names_no_other_modes_ends_start_up(tmp_path, monkeypatch):
    modes = tmp_path / "modes.json"
    ModePolicy({}, USUAL).save(modes)
    monkeypatch.setenv("FEATHER_OPTIONS", json.dumps({"slo": BOUNDS, "modes": str(modes), "modes_budget": 0.01}))
    with pytest.raises(FeatherError, match=r"modes.json names no other modes to try: run feather learn again$"):
        Server(tmp_path, "feather")
