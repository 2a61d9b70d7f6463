"""``--feather-record-trace`` on the real scheduler, under SGLang's own policies and feather's."""

import json
import time

import pytest
from harness import OverlapServer, Server

from feather_sglang.replay.traces import load_trace


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """Makes a scheduler that records; and gives what it has recorded once so many requests are in it."""
    folder, made = tmp_path / "recorded", []
    folder.mkdir()
    monkeypatch.setenv("FEATHER_OPTIONS", json.dumps({"record_trace": str(folder)}))

    def make(policy, kind=Server, **overrides):
        made.append(kind(tmp_path, policy, **overrides))
        return made[-1]

    def recorded(count):
        (file,) = folder.iterdir()
        deadline = time.monotonic() + 20
        while len(lines := file.read_text().splitlines()) < count:
            assert time.monotonic() < deadline, f"{len(lines)} of {count} lines"
            time.sleep(0.01)
        return [json.loads(line) for line in lines], load_trace(file)

    yield make, recorded
    for one in made:
        one.close()


@pytest.mark.parametrize(("policy", "kind"), [("fcfs", Server), ("lpm", OverlapServer), ("feather", OverlapServer)])
def test_each_finished_request_is_recorded_once(recording, policy, kind):
    make, recorded = recording
    one = make(policy, kind, max_running_requests=3)
    for number in range(7):
        assert one.submit(f"r{number}", [5] * 130 + [20 + number] * (3 + number), max_new_tokens=2 + number)
    one.submit("aborted", [9] * 20)
    one.abort("aborted")
    for _ in range(200):
        one.step()
    rows, trace = recorded(7)
    assert {(r["input_length"], r["output_length"]) for r in rows} == {(133 + n, 2 + n) for n in range(7)}
    assert len(rows) == 7 and len({tuple(r["hash_ids"][:2]) for r in rows}) == 1
    assert len({r["hash_ids"][2] for r in rows}) == 7 and trace.block_size == 64
    assert not any("priority" in row for row in rows)


def test_a_further_turn_says_what_it_follows(recording):
    make, recorded = recording
    one = make("fcfs", enable_priority_scheduling=True)
    one.submit("first", [7] * 100, max_new_tokens=5, priority=3)
    one.drain()
    answer = list(one.requests["first"].output_ids)
    time.sleep(0.05)
    one.submit("second", [7] * 100 + answer + [8] * 50, max_new_tokens=5, priority=1)
    one.drain()
    rows, trace = recorded(2)
    assert [row["priority"] for row in rows] == [3, 1] and trace.requests[1].after == 0
    assert 0.05 <= trace.requests[1].think_s < 5


def test_nothing_is_wrapped_where_nobody_records(tmp_path, monkeypatch):
    monkeypatch.setenv("FEATHER_OPTIONS", "")
    one = Server(tmp_path, "fcfs")
    assert "process_batch_result" not in vars(one.scheduler)
    one.close()
