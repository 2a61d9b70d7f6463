"""Figures of a run, tables and plots, on records made by hand."""

from dataclasses import asdict, replace

import pytest
from rich.console import Console

from feather_sglang.errors import FeatherError
from feather_sglang.report import plots
from feather_sglang.report.summary import RunSummary
from feather_sglang.report.tables import BEST, SERVER_FIGURES, comparison, verdict


def summary(policy="fcfs", speed=1.0):
    return RunSummary.from_times(
        policy,
        arrivals=[0.0, 1.0],
        first_tokens=[0.5, 3.0],
        finishes=[4.5, 5.0],
        output_tokens=200,
        input_tokens=1000,
        cached_tokens=250,
        token_gaps=[0.010, 0.030],
        batch_rows=[1, 3],
        batch_seconds=[1.0, 3.0],
        makespan=5.0 / speed,
        scheduler_seconds=0.1,
        retractions=2,
        stops=7,
    )


def test_every_figure_by_hand():
    one = summary()
    assert one.output_tok_s == 40.0
    assert one.ttft_mean == pytest.approx((0.5 + 2.0) / 2) and one.max_wait == 2.0
    assert one.ttft_p99 == pytest.approx(0.5 + 0.99 * 1.5)
    assert one.ttft_p50 == 1.25 and one.tbt_p50_ms == pytest.approx(20.0) and one.e2e_p50 == 4.25
    assert one.tbt_mean_ms == pytest.approx(20.0)
    assert one.e2e_mean == pytest.approx((4.5 + 4.0) / 2)
    assert one.mean_batch == pytest.approx((1 * 1 + 3 * 3) / 4)  # by time
    assert one.cache_hit == 0.25 and one.scheduler_share == pytest.approx(0.02)
    assert (one.retractions, one.stops, one.requests) == (2, 7, 2)


def test_an_empty_run_is_all_zeros():
    empty = RunSummary.from_times(
        "fcfs",
        arrivals=[],
        first_tokens=[],
        finishes=[],
        output_tokens=0,
        input_tokens=0,
        cached_tokens=0,
        token_gaps=[],
        batch_rows=[],
        batch_seconds=[],
        makespan=0.0,
        scheduler_seconds=0.0,
    )
    assert all(
        value in (0, 0.0, "fcfs")
        for name, value in asdict(empty).items()
        if not name.startswith(
            ("kv_", "admission_", "gpu_", "dram_", "sm_", "watt", "slo_", "goodput", "slowdown_", "imbalance")
        )
    )


def test_the_table_fits_a_terminal_and_shows_ratios():
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    console.print(comparison([summary(), summary("feather-bandit", speed=1.5)], "title"))
    text = console.export_text()
    assert "1.00x" in text and "1.50x" in text and "feather-bandit" in text
    assert "…" not in text and max(map(len, text.splitlines())) <= 80


def test_names_are_no_markup():
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    console.print(comparison([RunSummary("run[/x]", 9, 10.0), RunSummary("fa3[lpm]", 9, 10.0)], "a [/b]"))
    text = console.export_text()
    assert text.count("run[/x]") == 2 and "fa3[lpm]" in text and "a [/b]" in text


def test_what_a_run_cannot_tell_is_a_dash_and_never_the_best():
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    console.print(comparison([RunSummary("other", 9, 10.0), summary()], figures=SERVER_FIGURES))
    rows = {line[1:21].strip(): line.split("│")[2:4] for line in console.export_text().splitlines() if "│" in line}
    assert [cell.strip() for cell in rows["max wait s"]] == ["-", "2.0"]
    assert [cell.strip() for cell in rows["KV use peak"]] == ["-", "-"]
    assert [cell.strip() for cell in rows["to other"]] == ["1.00x", "4.00x"]


def printed_rows(*summaries):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(comparison(summaries))
    lines = [line.strip("│").split("│") for line in console.export_text().splitlines() if line.startswith("│")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_the_best_of_a_row_is_marked_where_nothing_is_bold():
    rows = printed_rows(summary(), summary("lpm", speed=2.0))
    assert [cell.startswith(BEST) for cell in rows["output tok/s"]] == [False, True]
    assert not any(
        cell.startswith(BEST) for cell in rows["TTFT mean s"] + rows["mean batch"]
    )  # level; neither is better


def test_rows_say_which_bound_was_missed():
    rows = printed_rows(replace(summary(), slo_share=0.5, slo_missed_ttft=0.375, slo_missed_tbt=0.25))
    assert rows["TTFT bound missed"] == ["37.5%"] and rows["TBT bound missed"] == ["25.0%"]
    assert "TPOT bound missed" not in rows and "TTFT bound missed" not in printed_rows(summary())


def judged(policy, share=None, speed=1.0, mean=1.0, p99=2.0):
    return RunSummary(policy, 9, 100 * speed, slo_share=share, ttft_mean=mean, ttft_p99=p99)


@pytest.mark.parametrize(
    ("others", "better"),
    [
        ([judged("a", 0.8), judged("b", 0.9)], "b"),
        ([judged("a", 0.8), judged("b", 0.8, speed=1.1)], "b"),
        ([judged("a", 0.5), judged("b", 0.4)], None),
    ],
)
def test_with_bounds_the_verdict_is_for_whoever_serves_most_within_them(others, better):
    said = verdict([judged("fcfs", 0.5), *others])
    assert said.startswith(f"{better} ") if better else said.startswith("no policy ")


@pytest.mark.parametrize(
    ("others", "better"),
    [
        ([judged("a", mean=0.6), judged("b", mean=0.5)], "b"),
        ([judged("a", mean=0.6), judged("slow", mean=0.5, speed=0.98)], "a"),
        ([judged("a", mean=0.6), judged("tail", mean=0.5, p99=2.3)], "a"),
        ([judged("a", mean=1.1)], None),
    ],
)
def test_without_bounds_it_is_for_the_lowest_mean_that_costs_neither_throughput_nor_tail(others, better):
    said = verdict([judged("fcfs"), *others])
    assert said.startswith(f"{better} ") if better else said.startswith("no policy ")


def test_one_run_has_no_verdict():
    assert verdict([judged("fcfs", 0.5)]) is verdict([]) is None


def test_plots_are_written(tmp_path):
    files = [
        plots.throughput({"a": 1.0, "b": 2.0}, tmp_path / "t.png"),
        plots.batch_size({"a": [(0.0, 3, 0.1), (1.0, 5, 0.1)]}, tmp_path / "b.png"),
        plots.latency({"a": [1.0, 2.0], "b": []}, tmp_path / "l.png"),
        plots.learning_curve([1.0, 2.0], 1.5, tmp_path / "c.png"),
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5000 for file in files)
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_a_plot_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    target = tmp_path / "t.png"
    target.write_bytes(b"old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(FeatherError, match=r"cannot write plot .*: No space left"):
        plots.throughput({"a": 1.0}, target)
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]
