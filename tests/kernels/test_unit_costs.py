"""The fit of unit costs, and the work in a plan's queues, without a GPU."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import measure_unit_costs as costs
from decode_cases import Heads, tree_case

from feather_kernels.plan import make_plan


def launch(m, units, steps, us):
    return costs.Launch("1,2_3,4", "32/8", "naive", m, 16, units, steps, us)


def test_the_fit_finds_the_costs_that_times_were_made_of():
    processors, empty, true = 10, 2.0, {8: (500.0, 170.0), 64: (1300.0, 1200.0)}
    launches = [
        launch(m, units, units * steps, empty + units * (unit + steps * step) / processors / 1e3)
        for m, (unit, step) in true.items()
        for units, steps in ((200, 1), (300, 4), (500, 2))
    ]
    launches.append(launch(64, 19, 19, 1e6))  # less than a unit for every team: latency, not throughput
    found = costs.fit(launches, processors, empty)
    assert {m: pytest.approx(values[:2]) for m, values in found.items()} == true
    assert [values[2] for values in found.values()] == [3, 3]


def test_queues_are_counted_with_their_units_and_begun_steps():
    heads = Heads(32, 8)
    case = tree_case("1,384_512,48", heads)
    plan = make_plan(case.forest, num_qo_heads=32, num_kv_heads=8, head_dim=128, merge="kernel", strategy="naive")
    found = dict(costs.launches_of(plan, case.name, heads))
    items = {queue: plan.items[plan.items[:, 7] == 3 - queue] for queue in range(4)}
    assert set(found) == {queue for queue, rows in items.items() if len(rows)} == {0, 3}
    for queue, row in found.items():
        lengths = [int(stop - start) for start, stop in items[queue][:, 2:4]]
        assert row.units == 8 * len(lengths) and row.m == {0: 128, 3: 8}[queue]
        assert row.steps == 8 * sum(-(-length // row.n) for length in lengths)
