"""The ranks' decision logs: the differences that a line shows, and those that the comparison finds."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "checks"))

from decision_logs import AHEAD, compare

from feather_sglang.adapter.scheduler import decision_log
from feather_sglang.adapter.scheduler.decision_log import DecisionLog, digest, log_file
from feather_sglang.errors import FeatherError

STATS = {"deferrals": {"batching": 0}, "policy": {"adds": 0, "stops": 0}}
IDS = st.lists(st.text(st.characters(), max_size=6), min_size=1, max_size=6)


def batch(mode, ids, extends=None):
    reqs = [SimpleNamespace(rid=rid) for rid in ids]
    return SimpleNamespace(forward_mode=SimpleNamespace(name=mode), reqs=reqs, extend_lens=extends)


def steps(count=40):
    """Batches of a rank, and what it had counted at each."""
    for step in range(count):
        ids = [f"r{step}-{row}" for row in range(1 + step % 5)]
        stats = {"deferrals": {"batching": step // 9}, "policy": {"adds": 3 * step, "stops": step // 4}}
        if step % 3:
            yield batch("DECODE", ids, [999] * len(ids)), stats  # SGLang leaves the prefill's lengths there
        else:
            yield batch("MIXED" if step % 2 else "EXTEND", ids, [10 + row for row in range(len(ids))]), stats


def write(file, decided, policy="feather"):
    log = DecisionLog(file, policy)
    for one, stats in decided:
        log.note(one, stats)
    log.close()
    return file


@pytest.fixture
def ranks(tmp_path):
    return [write(tmp_path / f"rank{rank}.log", steps()) for rank in range(2)]


def change(file, line, edit):
    """Edit one line of a log (counted from 1)."""
    lines = file.read_bytes().splitlines(keepends=True)
    lines[line - 1 : line] = edit(lines[line - 1])
    file.write_bytes(b"".join(lines))


# A line -----------------------------------------------------------------------------------------------------------


@given(IDS, IDS)
@example(["\ud800"], ["\udfff"])  # half of a character, as JSON may spell it
def test_the_digest_tells_rows_and_their_order_apart(ids, others):
    # A zero within an id could stand for two ids; then the number of rows differs, which has its own column.
    same = "\0".join(ids) == "\0".join(others)
    assert (digest(ids, ()) == digest(others, ())) == same


@given(st.lists(st.integers(0, 1 << 40), min_size=2, max_size=6))
def test_the_digest_tells_extents_apart(extends):
    ids = [f"r{row}" for row in range(len(extends))]
    assert digest(ids, extends) != digest(ids, ())
    moved = [*extends[1:], extends[0]]
    assert (digest(ids, extends) == digest(ids, moved)) == (extends == moved)


def test_a_line(tmp_path):
    stats = {"deferrals": {"batching": 7}, "policy": {"adds": 40, "stops": 2}}
    prefill, decode = batch("EXTEND", ["b", "a"], [5, 6]), batch("DECODE", ["a", "b"], [5, 6])
    file = write(tmp_path / "rank0.log", [(prefill, stats), (decode, STATS | {"policy": None})], "feather-order")
    head, first, second = file.read_text().splitlines()
    assert head == f"{decision_log.HEAD}: feather-order"
    assert first == f"0 prefill 2 {digest(['b', 'a'], [5, 6])} 40 2 7"
    assert second == f"1 decode 2 {digest(['a', 'b'], ())} 0 0 0"


def test_every_line_is_on_file_at_once(tmp_path):
    log = DecisionLog(tmp_path / "rank0.log", "feather")
    for count, (one, stats) in enumerate(steps(5), start=2):
        log.note(one, stats)
        assert (tmp_path / "rank0.log").read_bytes().count(b"\n") == count


# The file ---------------------------------------------------------------------------------------------------------


def test_off_unless_asked_for(monkeypatch, tmp_path):
    monkeypatch.delenv(decision_log.DECISION_LOG, raising=False)
    assert log_file(0, None) is None
    monkeypatch.setenv(decision_log.DECISION_LOG, str(tmp_path / "new" / "folder"))
    names = {log_file(tp, dp).name for tp in (0, 1) for dp in (None, 0, 1)}
    assert names == {"rank0.log", "rank1.log", "dp0-rank0.log", "dp0-rank1.log", "dp1-rank0.log", "dp1-rank1.log"}


def test_a_log_that_cannot_be_written_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(decision_log.DECISION_LOG, str(tmp_path / "file" / "folder"))
    with pytest.raises(FeatherError, match=r"rank0\.log cannot be written \(.+\); name another folder") as raised:
        log_file(0, None)
    assert "\n" not in str(raised.value)


def test_a_log_that_cannot_be_written_any_more_ends(tmp_path, caplog):
    log = DecisionLog(tmp_path / "rank0.log", "feather")
    log._stream.close()
    log._stream = open("/dev/full", "ab", buffering=0)
    for one, stats in steps(3):
        log.note(one, stats)
    log.close()
    assert caplog.text.count("decisions are no longer logged") == 1


# The comparison ---------------------------------------------------------------------------------------------------


def test_equal_logs(ranks):
    found = compare(ranks)
    assert found.difference is None
    assert found.batches == {"prefill": 7, "mixed": 7, "decode": 26} and found.batches.total() == 40
    assert found.rows.total() == sum(1 + step % 5 for step in range(40))
    assert (found.adds, found.stops, found.postponed) == (117, 9, 4)


def test_several_policies_in_one_file(ranks):
    for file in ranks:
        write(file, steps(20), "feather-heuristic")
    found = compare(ranks)
    assert found.difference is None and found.batches.total() == 60
    assert (found.adds, found.stops, found.postponed) == (117 + 57, 9 + 4, 4 + 2)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize(
    ("line", "edit", "says"),
    [
        (9, lambda line: [], "line 9: rank0.log has '7 decode"),  # one batch less
        (9, lambda line: [line, line], "line 10: rank0.log has '8 decode"),
        (12, lambda line: [line.replace(line.split()[3], b"0123456789abcdef")], "line 12: "),  # other rows
        (12, lambda line: [line.replace(b" 30 ", b" 31 ")], "line 12: "),  # an ADD more
        (14, lambda line: [line.replace(b" 3 1\n", b" 4 1\n")], "line 14: "),  # a STOP more
        (14, lambda line: [line.replace(b" 3 1\n", b" 3 2\n")], "line 14: "),  # a prefix more that waits
        (1, lambda line: [line.replace(b"feather", b"feather-order")], "line 1: rank0.log has '# step"),
    ],
)
def test_what_differs(ranks, line, edit, says, killed):
    before = ranks[1].read_bytes()
    change(ranks[1], line, edit)
    assert ranks[1].read_bytes() != before
    found = compare(ranks, killed)
    assert found.difference is not None and found.difference.startswith(says) and "rank1.log" in found.difference
    assert found.batches.total() == max(0, int(says.split()[1].rstrip(":")) - 2)


def test_swapped_rows_differ(tmp_path):
    decided = list(steps())
    swapped = [(batch(one.forward_mode.name, [req.rid for req in one.reqs][::-1], one.extend_lens), stats)
               for one, stats in decided]  # fmt: skip
    files = [write(tmp_path / "rank0.log", decided), write(tmp_path / "rank1.log", [*decided[:8], *swapped[8:]])]
    assert compare(files).difference.startswith("line 10: ")


@pytest.mark.parametrize("lacks", range(AHEAD + 2))
def test_an_end_before_the_other_only_if_killed(ranks, lacks):
    lines = ranks[1].read_bytes().splitlines(keepends=True)
    ranks[1].write_bytes(b"".join(lines[: len(lines) - lacks]))
    for files in (ranks, ranks[::-1]):
        assert (compare(files).difference is None) == (lacks == 0)
        assert (compare(files, killed=True).difference is None) == (lacks <= AHEAD)
    if lacks:
        assert f"line {42 - lacks}: rank0.log has '" in compare(ranks).difference
        assert compare(ranks).difference.endswith("rank1.log ends")


@pytest.mark.parametrize("cut", [1, 5])
def test_an_unfinished_line_only_if_killed(ranks, cut):
    ranks[0].write_bytes(ranks[0].read_bytes()[:-cut])
    assert compare(ranks).difference.startswith("line 41: ")
    assert compare(ranks, killed=True).difference is None


def test_what_goes_on_beyond_the_shortest_is_compared_too(tmp_path):
    decided = list(steps())
    files = [write(tmp_path / f"rank{rank}.log", decided[: 38 if rank == 2 else 40]) for rank in range(3)]
    assert compare(files, killed=True).difference is None
    change(files[1], 41, lambda line: [line.replace(b" 117 ", b" 118 ")])
    assert compare(files, killed=True).difference.startswith("line 41: ")


def test_files_that_are_none(ranks, tmp_path):
    with pytest.raises(FeatherError, match=r"rank7\.log: No such file .* FEATHER_DECISION_LOG\?"):
        compare([ranks[0], tmp_path / "rank7.log"])
    for file in ranks:
        change(file, 5, lambda line: [b"Traceback (most recent call last):\n"])
    with pytest.raises(FeatherError, match=r"rank0\.log: line 5 is no decision: 'Traceback"):
        compare(ranks)
