"""The lab's generated tables agree with docs/measured, and its results keep the promised bound."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_tail

DOCS = Path(__file__).parents[2] / "docs"
ROWS = json.loads((DOCS / "measured" / "tail.json").read_text())
PAGE = (DOCS / "lab" / "tail.md").read_text()


def part(name):
    return PAGE.split(f"<!-- {name} -->\n")[1].split("<!-- end -->")[0].strip()


def ratios(what, policy="feather"):
    return [bench_tail.RATIOS[what](row, policy) for row in ROWS.values()]


def test_the_page_shows_the_results():
    assert list(ROWS) == [one.name for one in bench_tail.REPORT]
    assert part("bench_tail") == bench_tail.tables(ROWS).strip()
    assert part("server") == bench_tail.server_table(DOCS / "measured" / "tail_h200.json").strip()


def test_the_tail_is_that_of_arrival_order_and_the_mean_about_that_of_response_ratio():
    assert max(ratios("longest wait to fcfs's")) < 1.45 < max(ratios("longest wait to fcfs's", "hrrn"))
    assert max(ratios("p99 TTFT to fcfs's")) < 1.35 < max(ratios("p99 TTFT to fcfs's", "hrrn"))
    means = ratios("mean TTFT to hrrn's")
    assert bench_tail.geometric_mean(means) < 1.02
    to_fcfs = [row["feather"]["ttft_mean"] / row["fcfs"]["ttft_mean"] for row in ROWS.values()]
    assert bench_tail.geometric_mean(to_fcfs) < 0.57 and max(to_fcfs) < 1
    assert min(ratios("tok/s to the best of SGLang's")) > 0.985


def test_where_fcfs_is_overloaded_the_tail_is_below_that_of_response_ratio():
    overloaded = [row for name, row in ROWS.items() if "load 1.2" in name]
    late = [row["feather"]["ttft_p99"] / row["hrrn"]["ttft_p99"] for row in overloaded]
    assert len(late) == 4 and bench_tail.geometric_mean(late) < 0.92 and max(late) < 1.10
    assert max(row["feather"]["max_wait"] / row["hrrn"]["max_wait"] for row in overloaded) < 0.80


def test_constants_were_chosen_on_other_requests():
    def requests(parts):
        return {(one.trace, number) for one in parts for number in range(one.first, one.first + one.count)}

    assert not requests(bench_tail.REPORT) & requests(bench_tail.TUNE)
    assert len(bench_tail.REPORT) >= 12
    assert {one.kv_tokens for one in bench_tail.REPORT} == {200_000, 500_000, 824_000}
    assert {0.5, 0.8, 1.0, 1.2} == {one.load for one in bench_tail.REPORT}


def test_a_server_agrees_on_who_gains():
    results = json.loads((DOCS / "measured" / "tail_h200.json").read_text())
    mean = {
        policy: {
            figure: sum(run[figure] for run in results["server"] if run["policy"] == policy) / 2
            for figure in ("ttft_mean", "ttft_p99", "max_wait")
        }
        for policy in ("fcfs", "feather")
    }
    assert mean["feather"]["ttft_mean"] < 0.75 * mean["fcfs"]["ttft_mean"]
    assert mean["feather"]["ttft_p99"] < 1.1 * mean["fcfs"]["ttft_p99"]
    assert mean["feather"]["max_wait"] < 1.25 * mean["fcfs"]["max_wait"]
