"""Built-in workloads: the load, the sharing and the shape that they promise, and their facts in `feather trace`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.cli import main
from feather_sglang.errors import FeatherError
from feather_sglang.replay.trace_facts import describe
from feather_sglang.replay.traces import Trace, TraceRequest, load_trace, save_trace
from feather_sglang.replay.workloads import no_sharing, shared_prefix


def test_the_default_is_the_papers_workload():
    trace = shared_prefix()
    facts = describe(trace)
    assert (facts.requests, facts.first_level_groups, facts.alone) == (1000, 5, 0)
    assert facts.input_length.mean == facts.input_length.largest == 5020
    assert facts.output_length.mean == facts.output_length.largest == 200
    assert facts.unique_prompt_tokens == 5 * 5000 + 1000 * 20
    assert facts.sharing_ratio == pytest.approx(1 - 45_000 / 5_020_000)
    assert (facts.levels_mean, facts.levels_max) == (1, 1)


def test_groups_get_about_the_same_number_of_requests():
    trace = shared_prefix(requests=5000)
    sizes = np.bincount([r.hash_ids[0] for r in trace.requests if r.hash_ids[0] < 10**9])
    sizes = sizes[sizes > 1]
    assert len(sizes) == 5 and sizes.min() > 900 and sizes.max() < 1100


@pytest.mark.parametrize("rate", [2.0, 100.0])
def test_arrivals_are_a_poisson_process(rate):
    times = np.array([r.arrival_s for r in shared_prefix(requests=4000, rate=rate).requests])
    gaps = np.diff(times)
    assert times[0] == 0 and gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # exponential gaps
    assert (gaps < np.log(2) / rate).mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("levels", [1, 2, 3, 4, 6])
def test_levels_keep_the_prefix_length_and_branch_in_two(levels):
    trace = shared_prefix(groups=2, prefix_tokens=4800, unique_tokens=30, levels=levels, requests=600)
    facts = describe(trace)
    assert (facts.first_level_groups, facts.levels_max, facts.levels_mean) == (2, levels, levels)
    assert {r.input_length for r in trace.requests} == {4830}
    part = 4800 // max(4, levels) if levels > 1 else 4800
    lengths = [part] * (levels - 1) + [4800 - part * (levels - 1)]  # paper, figure 3.7
    shared = sum(2 * 2**level * length for level, length in enumerate(lengths))
    assert facts.unique_prompt_tokens == shared + 600 * 30


def test_tokens_share_exactly_the_prefix():
    trace = shared_prefix(groups=2, prefix_tokens=64, unique_tokens=10, requests=20)
    prompts = [trace.tokens(r) for r in trace.requests]
    assert len({p[:64].tobytes() for p in prompts}) == 2
    assert len({p[64:].tobytes() for p in prompts}) == 20


def test_unique_parts_may_be_longer_than_the_prefix_or_absent():
    long = shared_prefix(prefix_tokens=100, unique_tokens=250, requests=10)
    assert {len(r.hash_ids) for r in long.requests} == {4} and describe(long).input_length.largest == 350
    none = shared_prefix(prefix_tokens=100, unique_tokens=0, requests=200)
    assert describe(none).unique_prompt_tokens == 500


def test_no_sharing_shares_nothing():
    facts = describe(no_sharing(prompt_tokens=300, requests=50, jitter=0.5))
    assert facts.sharing_ratio == 0 and facts.first_level_groups == 0 and facts.alone == 50 and facts.levels_max == 0
    assert facts.input_length.mean == pytest.approx(300, rel=0.15)


def test_jitter_spreads_lengths_around_their_mean():
    trace = shared_prefix(requests=2000, unique_tokens=100, output_tokens=200, jitter=0.5)
    output = np.array([r.output_length for r in trace.requests])
    own = np.array([r.input_length - 5000 for r in trace.requests])
    assert (output.min(), output.max()) == (100, 300) and output.mean() == pytest.approx(200, rel=0.02)
    assert (own.min(), own.max()) == (50, 150)


def test_the_seed_decides_everything():
    assert shared_prefix(seed=3) == shared_prefix(seed=3) != shared_prefix(seed=4)
    assert no_sharing(seed=3, jitter=0.1) == no_sharing(seed=3, jitter=0.1) != no_sharing(seed=4, jitter=0.1)


@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 60),
    st.integers(0, 300),
    st.integers(1, 4),
    st.floats(0, 1),
)
def test_every_workload_survives_its_file(tmp_path_factory, groups, levels, part, unique, requests, jitter):
    trace = shared_prefix(
        groups=groups,
        prefix_tokens=part * max(4, levels),
        unique_tokens=unique,
        levels=levels,
        requests=requests,
        jitter=jitter,
    )
    path = tmp_path_factory.getbasetemp() / "made.jsonl"
    save_trace(trace, path)
    again = load_trace(path)
    assert again.requests == trace.requests and again.block_size == trace.block_size


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups": 0},
        {"prefix_tokens": 0},
        {"unique_tokens": -1},
        {"output_tokens": 0},
        {"requests": 0},
        {"levels": 0},
        {"levels": 17},
        {"levels": 2, "prefix_tokens": 5001},
        {"rate": 0},
        {"rate": float("nan")},
        {"jitter": 1.5},
        {"seed": -1},
    ],
)
def test_impossible_workloads_are_refused_by_name(wrong):
    name = "prefix_tokens" if "prefix_tokens" in wrong else next(iter(wrong))
    with pytest.raises(FeatherError, match=f"^{name} "):
        shared_prefix(**wrong)


# The command ---------------------------------------------------------------------------------------------------------


def test_make_then_inspect(tmp_path, capsys):
    path = tmp_path / "made.jsonl"
    made = ["--groups", "3", "--prefix-tokens", "400", "--levels", "2", "--requests", "200", "--rate", "10"]
    assert main(["trace", "make", *made, "--output-tokens", "7", "--seed", "1", "--out", str(path)]) == 0
    assert "3 groups x 400 tokens, 2 levels, 200 requests" in capsys.readouterr().out
    assert main(["trace", "inspect", "--json", str(path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["requests"], facts["first_level_groups"], facts["levels_max"]) == (200, 3, 2)
    assert facts["unique_prompt_tokens"] == 3 * (100 + 2 * 300) + 200 * 20
    assert facts["output_length"]["largest"] == 7 and facts["rate"] == pytest.approx(10, rel=0.2)
    assert main(["trace", "inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "first-level groups" in shown and "sharing ratio" in shown and "200 in" in shown


def test_make_without_sharing(tmp_path, capsys):
    path = tmp_path / "made.jsonl"
    assert main(["trace", "make", "--no-sharing", "--prompt-tokens", "64", "--requests", "9", "--out", str(path)]) == 0
    assert describe(load_trace(path)).sharing_ratio == 0


def test_mistakes_are_one_line_and_status_2(tmp_path, capsys):
    assert main(["trace", "make", "--groups", "0", "--out", str(tmp_path / "x")]) == 2
    assert main(["trace", "inspect", str(tmp_path / "none.jsonl")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("feather: error: ") for line in lines)


def test_inspect_says_that_it_sorted(tmp_path, capsys):
    path = tmp_path / "late.jsonl"
    save_trace(Trace("late", 4, [TraceRequest(0, 9.0, 4, 1, (1,)), TraceRequest(1, 2.0, 4, 1, (2,))]), path)
    assert main(["trace", "inspect", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "1 of 2 requests were out of order" in err and "out of order" in json.loads(out)["notices"][0]


def test_brackets_in_a_name_are_text(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")
    path = tmp_path / "t[red].jsonl"
    assert main(["trace", "make", "--requests", "2", "--out", str(path)]) == 0
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert main(["trace", "inspect", str(path)]) == 0
    made, title, *_ = capsys.readouterr().out.splitlines()
    assert made.startswith(f"{path}: ") and title.strip() == "t[red]"
    assert main(["trace", "inspect", str(path)]) == 0
    assert f"notice: {path}: 1 of 2" in capsys.readouterr().err


def test_one_request_has_facts():
    facts = describe(no_sharing(requests=1))
    assert (facts.requests, facts.duration_s, facts.rate) == (1, 0, 0)
