"""The figures that the Chunked Hash Tree promises, on a reduced size, and the program that measures them in full.

Times on a shared machine are noisy upwards only, so each figure is the best of several attempts.
"""

import importlib.util
import json
import os
import sys
import timeit
from array import array
from collections import defaultdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_cht
from cht_measure import PAPER_US, Prompts, SteadyQueue, garbage_collection_off, measure_calls, measure_scaling

from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.tree.chunk_hash import hash_vector

ATTEMPTS = 5


def best_of(attempts, measure, enough):
    """Return the least value per name over the attempts; stop as soon as it is enough."""
    best = {}
    for _ in range(attempts):
        for name, value in measure().items():
            best[name] = min(value, best.get(name, value))
        if enough(best):
            break
    return best


def test_no_operation_is_slower_than_the_papers():
    # Medians: all calls of an operation take some milliseconds together, so one turn that another process takes of
    # this processor would decide a mean.
    def medians():
        return {name: measured["median_us"] for name, measured in measure_calls(requests=1_000).items()}

    def within(best):
        return {name: best[name] <= paper * slowness() for name, paper in PAPER_US.items()}

    best = best_of(ATTEMPTS, medians, lambda best: all(within(best).values()))
    assert all(within(best).values()), (best, slowness())


HASH_US = 13.0  # of a prompt of 5,000 tokens on the machine that the targets are kept on


def slowness():
    """How much slower this machine is just now than that one, at work that is C alone; at least 1."""
    prompt = array("q", range(5_000))
    times = timeit.repeat(lambda: hash_vector(prompt, 64, 0), number=200, repeat=5)
    return max(1.0, min(times) / 200 * 1e6 / HASH_US)


def test_the_workload_has_the_papers_calls():
    calls = {name: measured["calls"] for name, measured in measure_calls(requests=500, tokens=100).items()}
    assert calls["insert"] == calls["add_to_batch"] == calls["finish"] == 500
    assert calls["find_best"] == 2_640  # 26,405 for 5,000 requests
    assert calls["fresh"] + calls["repeated"] == calls["find_best"]


class Lines:
    """Counts the Python lines of single calls, by name, instead of the times that `Laps` takes."""

    def __init__(self):
        self.counts = defaultdict(list)

    def __call__(self, name, function, *arguments):
        events = 0

        def trace(frame, event, argument):
            nonlocal events
            events += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            result = function(*arguments)
        finally:
            sys.settrace(before)
        self.counts[name].append(events)
        return result


def test_no_operation_takes_more_steps_where_a_hundred_times_as_many_wait():
    counted = []
    for waiting in (100, 10_000):
        queue, lines = SteadyQueue(waiting, Prompts()), Lines()
        with garbage_collection_off():  # of which others are told, in Python
            for _ in range(100):
                queue.every_operation(lines)
        counted.append(lines.counts)
    assert len(counted[0]) == 10 and counted[0] == counted[1]


def test_no_operation_hides_a_loop_over_all_that_wait():
    # What one call into C does is one step to Python. A loop over 10,000 there takes many times an operation's time;
    # what memory and neighbours on a shared machine add is less than that time again.
    def ratios():
        return {name: row["ratio"] for name, row in measure_scaling(blocks=3, cycles=100).items()}

    best = best_of(ATTEMPTS, ratios, lambda best: max(best.values()) <= bench_cht.MAX_RATIO)
    assert len(best) == 10
    for name, ratio in best.items():
        assert ratio <= 2, name


@pytest.mark.slow
def test_the_program_prints_verdicts_and_writes_json_and_plot(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_cht, "LENGTHS", (100, 200))
    monkeypatch.setattr(bench_cht, "SIZES", (10, 100))
    figures, plot = tmp_path / "cht.json", tmp_path / "cht.png"
    assert bench_cht.main(["--quick", "--no-sglang", "--json", str(figures), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "Table 5.1" in printed and "Figure 5.9" in printed and "at most the paper's 153.7 us" in printed
    results = json.loads(figures.read_text())
    assert results["sglang"] is None and list(results["rounds"]) == ["100", "200"]
    assert len(results["verdicts"]) == 5
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_missed_target_is_called_missed():
    results = {
        "quick": False,
        "sglang": "0.0",
        "calls": {name: {"mean_us": paper + (name == "finish")} for name, paper in PAPER_US.items()},
        "scaling": {"insert": {"ratio": 1.1}, "finish": {"ratio": 1.3}},
        "rounds": {"20000": {"feather_us": 10.0, "lpm_us": 20_000.0, "dfs-weight_us": 900.0}},
    }
    reached = {verdict["target"]: verdict["reached"] for verdict in bench_cht.verdicts(results)}
    assert [target for target, ok in reached.items() if not ok] == [
        "finish at most the paper's 39.0 us",
        "every operation at 10,000 waiting at most 1.2x its cost at 100; dearest: finish",
        "a round at 20,000 tokens at least 100x cheaper than dfs-weight",
    ]


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(flag, tmp_path):
    with pytest.raises(FeatherError, match="create it first"):
        bench_cht.main(["--no-sglang", flag, str(tmp_path / "missing" / "file")])


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_a_folder_or_a_pipe_is_refused_before_measuring(flag, tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path, tmp_path / "pipe.png"):
        with pytest.raises(FeatherError, match=f"{path}: it exists and is no regular file"):
            bench_cht.main(["--no-sglang", flag, str(path)])


@pytest.mark.parametrize("name", ["cht.foo", "cht"])
def test_a_plot_of_an_unknown_kind_is_refused_before_measuring(name, tmp_path):
    with pytest.raises(FeatherError, match=r"must end in one of \.png, \.pdf, \.svg"):
        bench_cht.main(["--no-sglang", "--plot", str(tmp_path / name)])


def test_without_sglang_one_line_says_what_to_do(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sglang" else find_spec(name))
    monkeypatch.delitem(sys.modules, "stock_policies", raising=False)
    with pytest.raises(FeatherError, match=r"SGLang is not installed.*--no-sglang"):
        bench_cht.main([])
