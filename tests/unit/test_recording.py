"""A recording: what is kept of a request, which turns follow which, how large it becomes, and what ends it."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import samples
from feather_sglang.adapter.recording.files import FILES, RotatedFiles
from feather_sglang.adapter.recording.recorder import Recorder
from feather_sglang.adapter.recording.requests import BLOCK, Finished, TraceLines
from feather_sglang.replay.traces import load_trace
from oracles.sequences import common


def trace_of(folder, rows):
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_trace(folder / "t.jsonl")


# Lines ---------------------------------------------------------------------------------------------------------------

SHORT = st.lists(st.integers(0, 1), max_size=5)  # repeated to make many lengths, many of them with equal beginnings


@settings(max_examples=samples(300, 60), deadline=None)
@given(st.lists(st.tuples(SHORT, st.integers(1, 300), st.integers(0, 8), st.integers(1, 130)), min_size=1, max_size=9))
def test_any_requests_make_a_trace_that_can_be_read(tmp_path_factory, drawn):
    """Prompts of few tokens, some of them behind prompt and answer of an earlier request."""
    made: list[Finished] = []
    for number, (pattern, length, earlier, answer) in enumerate(drawn):
        before = [*made[earlier].prompt, *made[earlier].output] if earlier < len(made) else []
        prompt = before + ([7, *pattern] * length)[:length]
        made.append(Finished(number, number + 0.5, prompt, [number % 3] * answer))
    lines = TraceLines(0.0)
    rows = [lines.line(one) for one in made]
    trace = trace_of(tmp_path_factory.mktemp("recorded"), rows)
    for request, one, (_, _, earlier, _) in zip(trace.requests, made, drawn, strict=True):
        assert (request.input_length, request.output_length) == (len(one.prompt), len(one.output))
        assert (request.after is not None) or earlier >= request.request_id  # who quotes another is a further turn
        if request.after is not None:
            quoted = [*made[request.after].prompt, *made[request.after].output]
            assert quoted == one.prompt[: len(quoted)]
            assert request.think_s == pytest.approx(one.arrival - made[request.after].finish)


@settings(max_examples=samples(200, 50), deadline=None)
@given(SHORT, SHORT, st.integers(1, 400), st.integers(1, 400))
def test_ids_agree_as_far_as_blocks_do(first, second, many, more):
    prompts = [([7, *first] * many)[:many], ([7, *second] * more)[:more]]
    lines = TraceLines(0.0)
    ids = [lines.line(Finished(0, 9, prompt, [9]))["hash_ids"] for prompt in prompts]
    equal, shared = common(*prompts), common(*ids)
    assert shared == (len(ids[0]) if prompts[0] == prompts[1] else equal // BLOCK)


def test_what_is_kept_apart_shares_no_ids_and_each_recording_has_its_own():
    prompt = list(range(100))
    lines = TraceLines(0.0)
    ids = [lines.line(Finished(0, 9, prompt, [1], isolation=(who,)))["hash_ids"] for who in ("one", "two", "one")]
    assert ids[0] == ids[2] and not set(ids[0]) & set(ids[1])
    other = TraceLines(0.0).line(Finished(0, 9, prompt, [1], isolation=("one",)))["hash_ids"]
    assert not set(other) & set(ids[0])


def test_a_request_that_came_before_an_answer_ended_does_not_follow_it():
    lines = TraceLines(0.0)
    lines.line(Finished(0.0, 5.0, [1, 2], [3]))
    assert "after" not in lines.line(Finished(4.9, 6.0, [1, 2, 3, 4], [5]))
    row = lines.line(Finished(5.25, 7.0, [1, 2, 3, 4], [5], priority=3))
    assert (row["after"], row["think"], row["priority"], row["timestamp"]) == (0, 250.0, 3, 5250.0)


# Files ---------------------------------------------------------------------------------------------------------------


def test_files_together_are_no_larger_than_the_recording_may_be(tmp_path):
    files = RotatedFiles(tmp_path, 8000)
    for number in range(500):
        line = b"%03d" % number + b"x" * 96 + b"\n"
        if not files.fits(line):
            files.rotate()
        files.append(line)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 8000
    kept = b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir())).splitlines()
    assert [int(line[:3]) for line in kept] == list(range(500 - len(kept), 500)) and len(kept) > 60
    assert len(list(tmp_path.iterdir())) == FILES and files.path.stat().st_mode & 0o077 == 0


# The recorder --------------------------------------------------------------------------------------------------------


class Scheduler:
    """Finishes the requests of a batch when it processes it."""

    def process(self, batch):
        for req in batch.reqs:
            req.finished_reason = "length"
        return "processed"


def batch_of(*names, prompt=range(200), output=(1, 2)):
    times = SimpleNamespace(scheduler_recv_time=time.perf_counter())
    return SimpleNamespace(
        reqs=[
            SimpleNamespace(
                rid=name,
                finished_reason=None,
                origin_input_ids=list(prompt),
                output_ids_through_stop=list(output),
                extra_key=None,
                lora_id=None,
                priority=5,
                time_stats=times,
            )
            for name in names
        ]
    )


def eventually(holds):
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lines_in(folder):
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]


def test_who_finishes_is_written_once_and_at_once(tmp_path):
    recorder = Recorder(RotatedFiles(tmp_path, 10**6), 60)
    batch, original = batch_of("a", "b", "HEALTH_CHECK_1"), Scheduler().process
    assert recorder.process_batch_result(original, batch) == "processed"
    assert recorder.process_batch_result(original, batch) == "processed"  # under overlap it is in two batches
    recorder.process_batch_result(original, batch_of("aborted", output=()))
    recorder.process_batch_result(original, batch_of("c"))
    eventually(lambda: len(lines_in(tmp_path)) == 3)
    assert {(row["input_length"], row["output_length"]) for row in lines_in(tmp_path)} == {(200, 2)}
    assert not any("priority" in row for row in lines_in(tmp_path))  # this server does not know them


def test_a_full_disk_ends_the_recording_with_one_line_and_nothing_else(tmp_path, monkeypatch, caplog):
    files = RotatedFiles(tmp_path, 10**6)
    recorder, original = Recorder(files, 60), Scheduler().process
    recorder.process_batch_result(original, batch_of("a"))
    eventually(lambda: len(lines_in(tmp_path)) == 1)
    write, room = os.write, [20]

    def full(file, content):
        if file != files._file:
            return write(file, content)
        if room:
            return write(file, content[: room.pop()])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        for name in "bcd":
            assert recorder.process_batch_result(original, batch_of(name)) == "processed"
        eventually(lambda: recorder.ended)
        assert recorder.process_batch_result(original, batch_of("e")) == "processed"
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    assert len(lines_in(tmp_path)) == 1  # and no half of a second line


def test_a_request_that_cannot_be_read_ends_the_recording_and_not_the_server(tmp_path, caplog):
    recorder, batch = Recorder(RotatedFiles(tmp_path, 10**6), 60), batch_of("a")
    del batch.reqs[0].time_stats
    assert recorder.process_batch_result(Scheduler().process, batch) == "processed"
    assert recorder.ended and len(caplog.records) == 1


def test_a_disk_that_hangs_holds_up_nobody_and_is_told_of(tmp_path, caplog):
    files, hanging = RotatedFiles(tmp_path, 10**8), threading.Event()
    append = files.append
    files.append = lambda line: (hanging.wait(30), append(line))
    recorder, original = Recorder(files, 60), Scheduler().process
    began = time.monotonic()
    for _ in range(15):
        recorder.process_batch_result(original, batch_of(*map(str, range(100)), prompt=[1]))
    assert time.monotonic() - began < 10
    hanging.set()
    eventually(lambda: "missing in the recording" in caplog.text)
    eventually(lambda: len(lines_in(tmp_path)) in (1000, 1001))


def test_a_killed_server_leaves_the_lines_that_it_had_written(tmp_path):
    child = os.fork()
    if child == 0:
        recorder, original = Recorder(RotatedFiles(tmp_path, 10**8), 60), Scheduler().process
        while True:
            recorder.process_batch_result(original, batch_of(*"abcd", prompt=range(3000)))
            time.sleep(0.001)
    try:
        eventually(lambda: any(path.stat().st_size > 200_000 for path in tmp_path.iterdir()))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    (file,) = tmp_path.iterdir()
    trace = load_trace(file)
    assert len(trace.requests) > 150 and {request.input_length for request in trace.requests} == {3000}


def test_a_recording_ends_when_its_time_is_over(tmp_path):
    recorder, original = Recorder(RotatedFiles(tmp_path, 10**6), 0.0), Scheduler().process
    recorder.process_batch_result(original, batch_of("a"))
    eventually(lambda: recorder.ended)
    assert lines_in(tmp_path) == []


def test_a_further_turn_never_follows_a_line_of_another_file(tmp_path):
    recorder, original = Recorder(RotatedFiles(tmp_path, FILES * 400), 60), Scheduler().process
    prompt = [5]
    for turn in range(12):
        recorder.process_batch_result(original, batch_of("a", prompt=prompt, output=[turn]))
        eventually(lambda: recorder._queue.empty() and recorder._lines._line > 0)
        time.sleep(0.02)
        prompt = [*prompt, turn, 9]
    traces = [load_trace(path) for path in sorted(tmp_path.iterdir())]
    assert len(traces) > 1 and all(trace.requests[0].after is None for trace in traces)
    assert any(request.after is not None for trace in traces for request in trace.requests)
