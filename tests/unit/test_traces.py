"""Traces: lines that are read, refused, mended and written, and the tokens made from hash ids."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.errors import FeatherError
from feather_sglang.replay.traces import FIRST_TOKEN, VOCABULARY, Trace, TraceRequest, load_trace, save_trace
from oracles.sequences import common

GOOD = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [3, 4]}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@st.composite
def traces(draw):
    block = draw(st.integers(1, 40))
    arrivals = sorted(draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=8)))
    requests = []
    for i, microseconds in enumerate(arrivals):
        length = draw(st.integers(1, 200))
        ids = draw(st.lists(st.integers(0, 2**63 - 1), min_size=-(-length // block), max_size=-(-length // block)))
        arrival = round((microseconds - arrivals[0]) / 1e6, 6)
        requests.append(TraceRequest(i, arrival, length, draw(st.integers(1, 99)), tuple(ids)))
    return Trace("made", block, requests)


@given(traces())
def test_a_saved_trace_reads_back_the_same(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("traces") / "made.jsonl"
    save_trace(trace, path)
    assert load_trace(path) == trace


def test_mooncake_lines_are_read_with_blocks_of_512(tmp_path):
    later = {**GOOD, "timestamp": 1500.5, "input_length": 512, "hash_ids": [9]}
    trace = load_trace(write(tmp_path / "t.jsonl", GOOD, later))
    assert trace.block_size == 512 and trace.name == "t" and trace.notices == []
    assert trace.requests == [TraceRequest(0, 0.0, 700, 5, (3, 4)), TraceRequest(1, 1.5005, 512, 5, (9,))]
    assert "block_size" not in next(iter(open_lines(trace, tmp_path)))


def open_lines(trace, folder):
    save_trace(trace, folder / "again.jsonl")
    return [json.loads(line) for line in (folder / "again.jsonl").read_text().splitlines()]


def test_time_starts_with_the_first_request(tmp_path):
    rows = [{**GOOD, "timestamp": 1.7e12}, {**GOOD, "timestamp": 1.7e12 + 250}]
    assert [r.arrival_s for r in load_trace(write(tmp_path / "t", *rows)).requests] == [0.0, 0.25]


def test_a_trace_out_of_order_is_sorted_with_a_notice(tmp_path):
    rows = [{**GOOD, "timestamp": t, "output_length": n} for n, t in enumerate([30, 10, 20, 10], 1)]
    trace = load_trace(write(tmp_path / "t", *rows))
    assert [r.output_length for r in trace.requests] == [2, 4, 3, 1]  # equal times keep their order
    assert [r.arrival_s for r in trace.requests] == [0.0, 0.0, 0.01, 0.02]
    assert len(trace.notices) == 1 and "2 of 4 requests were out of order" in trace.notices[0]


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path):
    path = tmp_path / "t"
    path.write_text("\ufeff" + json.dumps(GOOD) + "\n\n" + json.dumps(GOOD), encoding="utf-8")
    assert len(load_trace(path).requests) == 2


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("timestamp", -1, "must lie between 0"),
        ("timestamp", float("nan"), "must lie between 0"),
        ("timestamp", float("inf"), "must lie between 0"),
        ("timestamp", True, "must be a number of milliseconds"),
        ("timestamp", "5", "must be a number of milliseconds"),
        ("input_length", 0, "must lie between 1"),
        ("input_length", 10**300, "must lie between 1"),
        ("input_length", 700.0, "must be a whole number"),
        ("input_length", True, "must be a whole number"),
        ("output_length", 0, "must lie between 1"),
        ("output_length", None, "must be a whole number"),
        ("hash_ids", [3], "1 ids, but input_length 700 has 2 blocks of 512"),
        ("hash_ids", [3, 4, 5], "3 ids"),
        ("hash_ids", "34", "must be a list"),
        ("hash_ids", [3, -4], "must be whole numbers"),
        ("hash_ids", [3, 2**63], "must be whole numbers"),
        ("hash_ids", [3, 4.0], "must be whole numbers"),
        ("hash_ids", [3, False], "must be whole numbers"),
        ("block_size", 0, "must lie between 1"),
        ("block_size", 500, "differs from the lines before"),
    ],
)
def test_a_bad_field_is_named_with_file_line_and_reason(tmp_path, field, value, reason):
    path = write(tmp_path / "t.jsonl", GOOD)
    with path.open("a") as stream:
        stream.write(json.dumps({**GOOD, field: value}) + "\n")
    with pytest.raises(FeatherError) as caught:
        load_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: {field}: ") and reason in message and "\n" not in message
    assert len(message) < len(str(path)) + 160


@pytest.mark.parametrize("field", GOOD)
def test_a_missing_field_is_named(tmp_path, field):
    with pytest.raises(FeatherError, match=f":1: {field}: missing"):
        load_trace(write(tmp_path / "t", {k: v for k, v in GOOD.items() if k != field}))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the trace is empty"),
        (b"\n \n", "the trace is empty"),
        (b'{"timestamp": \n', ":1: line: not JSON"),
        (b"timestamp,input_length\n0,5\n", ":1: line: not JSON"),
        (b"[1, 2]\n", ":1: line: not a JSON object"),
        (b"7\n", ":1: line: not a JSON object"),
        (b"\xff\xfe{}\n", ":1: line: not UTF-8"),
        (b"\x00\x01\x02\n", ":1: line: not JSON"),
        (b"[" * 100_000 + b"\n", ":1: line: not"),
        (b'{"input_length": ' + b"9" * 5000 + b"}\n", ":1: line: not usable JSON"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path, content, reason):
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(FeatherError) as caught:
        load_trace(path)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(FeatherError, match="no such trace file"):
        load_trace(tmp_path / "none")
    with pytest.raises(FeatherError, match="is a directory"):
        load_trace(tmp_path)


def test_a_last_line_whose_writer_was_killed_is_left_out_with_a_notice(tmp_path):
    path = write(tmp_path / "t.jsonl", GOOD)
    with path.open("a") as stream:
        stream.write(json.dumps(GOOD)[:20])
    trace = load_trace(path)
    assert len(trace.requests) == 1 and len(trace.notices) == 1 and f"{path}:2: " in trace.notices[0]


def test_lines_behind_those_asked_for_are_not_read(tmp_path):
    path = write(tmp_path / "t.jsonl", GOOD, {**GOOD, "timestamp": 5})
    with path.open("a") as stream:
        stream.write("no JSON\n")
    assert [r.arrival_s for r in load_trace(path, requests=2).requests] == [0.0, 0.005]


@pytest.mark.parametrize("cut", [1, 12])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_packed_trace_that_is_cut_is_refused_in_one_line(tmp_path, suffix, cut):
    path = tmp_path / f"t.jsonl{suffix}"
    save_trace(Trace("t", 512, [TraceRequest(n, n, 700, 5, (n, n + 1)) for n in range(50)]), path)
    assert len(load_trace(path).requests) == 50
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(FeatherError) as caught:
        load_trace(path)
    assert "damaged" in str(caught.value) and "\n" not in str(caught.value)


@given(st.binary(max_size=300))
def test_no_bytes_whatever_raise_anything_else(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "bytes"
    path.write_bytes(content)
    with pytest.raises(FeatherError):
        load_trace(path)


@given(st.dictionaries(st.sampled_from([*GOOD, "block_size"]), st.none() | st.integers() | st.floats() | st.text("a1")))
def test_no_json_whatever_raises_anything_else(tmp_path_factory, row):
    path = write(tmp_path_factory.getbasetemp() / "row", row)
    with pytest.raises(FeatherError, match=f"^{path}:1: "):
        load_trace(path)


def test_a_trace_that_cannot_be_written_leaves_the_old_file(tmp_path):
    path = write(tmp_path / "t.jsonl", GOOD)
    broken = Trace("broken", 512, [TraceRequest(0, float("nan"), 1, 1, (1,))])
    with pytest.raises(ValueError):
        save_trace(broken, path)
    assert json.loads(path.read_text()) == GOOD and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FeatherError, match="cannot write trace"):
        save_trace(load_trace(path), tmp_path / "no" / "folder")


# Tokens --------------------------------------------------------------------------------------------------------------


@given(
    st.integers(6, 50),
    st.lists(st.integers(0, 2**63 - 1), max_size=4),
    st.lists(st.integers(0, 2**63 - 1), max_size=4),
    st.lists(st.integers(0, 2**63 - 1), max_size=4),
    st.data(),
)
def test_prompts_agree_as_far_as_their_ids_and_no_further(block, shared, one, other, data):
    rows = []
    for i, ids in enumerate((shared + one, shared + other)):
        if not ids:
            ids = [i]
        length = (len(ids) - 1) * block + data.draw(st.integers(1, block))
        rows.append(TraceRequest(i, 0.0, length, 1, tuple(ids)))
    trace = Trace("t", block, rows)
    a, b = (trace.tokens(row) for row in rows)
    assert (len(a), len(b)) == (rows[0].input_length, rows[1].input_length)
    assert a.typecode == "q" and all(FIRST_TOKEN <= t < VOCABULARY for t in a)
    blocks = common(rows[0].hash_ids, rows[1].hash_ids)
    shortest = min(len(a), len(b))
    agreed = common(a, b)
    assert agreed >= min(blocks * block, shortest)
    # Ids that differ show within five tokens, unless a prompt ends before.
    assert agreed <= blocks * block + 4 or agreed == shortest
    assert trace.tokens(rows[0]) == a


def test_tokens_never_change_between_releases():
    row = TraceRequest(0, 0.0, 14, 1, (5, 1_000_000))
    tokens = list(Trace("t", 8, [row]).tokens(row))
    assert tokens == [15, 10, 10, 10, 10, 27236, 27943, 17896, 8320, 41, 10, 10, 10, 11705]


def test_tokens_of_a_block_do_not_repeat():
    row = TraceRequest(0, 0.0, 4096, 1, tuple(range(8)))
    tokens = Trace("t", 512, [row]).tokens(row)
    assert len(set(tokens)) > 3700  # 4096 draws of 31,990 leave about 3,850 distinct


# Parts ---------------------------------------------------------------------------------------------------------------


def rows_at(*times):
    return Trace("t", 4, [TraceRequest(i, t, 4, 1, (i,)) for i, t in enumerate(times)], ["a notice"])


def test_head_scaled_and_split():
    trace = rows_at(0.0, 1.0, 3.0, 7.0)
    assert trace.head(2).requests == trace.requests[:2] and trace.head(99) == trace and not trace.head(-1).requests
    assert [r.arrival_s for r in trace.scaled(2).requests] == [0.0, 0.5, 1.5, 3.5]
    first, rest = trace.split(0.5)
    assert first.requests == trace.requests[:2]
    assert [(r.request_id, r.arrival_s) for r in rest.requests] == [(2, 0.0), (3, 4.0)]
    assert trace.split(1)[1].requests == [] and trace.split(0)[1] == trace
    assert first.notices == rest.notices == trace.notices


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_scale_must_be_positive(rate):
    with pytest.raises(FeatherError, match="rate scale"):
        rows_at(0.0).scaled(rate)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_split_must_lie_in_the_trace(fraction):
    with pytest.raises(FeatherError, match="split"):
        rows_at(0.0).split(fraction)


@given(traces(), st.floats(0, 1))
def test_a_split_loses_nothing(trace, fraction):
    first, rest = trace.split(fraction)
    both = first.requests + rest.requests
    assert [r[2:] for r in both] == [r[2:] for r in trace.requests]
    assert all(a.arrival_s <= b.arrival_s for part in (first, rest) for a, b in pairwise(part.requests))
