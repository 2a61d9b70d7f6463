"""benchmarks/bench_decode_layer.py without a GPU: the layer, the records, and mistakes in one line."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_decode_layer as layer
import decode_systems
import decode_timing


def test_attention_runs_behind_the_first_product_of_every_layer(monkeypatch):
    ran = []
    monkeypatch.setattr(layer, "PRODUCTS", ((4, 6), (4, 4), (4, 8), (4, 4)))
    monkeypatch.setattr(torch, "mm", lambda rows, weight, out: ran.append(weight))
    weights = [[f"{index}{product}" for product in "abcd"] for index in range(layer.WEIGHTS)]
    layers = layer.Layers([[torch.empty(1)]], requests=3)
    layers._weights = weights
    layers.around(lambda: ran.append("before"), lambda: ran.append("attention"))()
    one = ["{}a", "before", "attention", "{}b", "{}c", "{}d"]
    assert ran == [step.format(index % layer.WEIGHTS) for index in range(layer.LAYERS) for step in one]


def test_right_results_are_timed_and_others_said(monkeypatch):
    def right(inputs):
        every = list(range(inputs.case.n_requests))
        return decode_systems.Ready(lambda: decode_systems.reference(inputs, every).bfloat16())

    def wrong(inputs):
        return decode_systems.Ready(lambda: decode_systems.reference(inputs, [0] * inputs.case.n_requests).bfloat16())

    def absent(inputs):
        raise decode_systems.Unavailable("it does not import")

    pair = [SimpleNamespace(record=lambda: None, synchronize=lambda: None)] * 2
    monkeypatch.setattr(decode_timing, "events", lambda: pair)
    monkeypatch.setattr(decode_timing, "elapsed_us", lambda pair: 60.0)
    monkeypatch.setattr(
        decode_timing, "Captured",
        lambda call: SimpleNamespace(poisoned_run=call, runs=1, call=call, single=SimpleNamespace(replay=call)),
    )  # fmt: skip
    monkeypatch.setattr(
        decode_timing, "measure_in_turn",
        lambda systems, rounds, flush: {
            name: decode_timing.Times(warm=[3.0] * rounds, flushed=[4.0] * rounds) for name in systems
        },
    )  # fmt: skip
    monkeypatch.setattr(layer, "other_run", lambda inputs: lambda: None)
    monkeypatch.setattr(layer, "PRODUCTS", ((4, 6), (4, 4), (4, 8), (4, 4)))
    monkeypatch.setattr(layer, "WEIGHTS", 1)
    weights = [[torch.zeros(shape) for shape in layer.PRODUCTS]]
    case = layer.batch("2,9_40,8")
    pools = decode_systems.Pools(decode_systems.Pools.elements(case), torch.bfloat16, device="cpu")
    record = layer.measure(case, {"one": right, "two": absent, "three": wrong}, pools, weights, None, 3)
    one = record["systems"]["one"]
    assert record["name"] == "2,9_40,8" and record["products_us"] == 10.0  # of six layers
    assert [one[column] for column in layer.COLUMNS] == [0.0, 0.0, 3.0, 4.0] and one["relative_error"] < 0.01
    assert record["systems"]["two"] == {"error": "it does not import"}
    assert record["systems"]["three"]["error"].startswith("wrong: relative error")
    assert layer.prefetch({"records": [record]}) == "no feather was measured"
    row = layer.report({"records": [record]}).splitlines()[-1]
    assert "| 0.0, 0.0, 3.0, 4.0 | it does not import | wrong: relative error" in row


def test_a_prefetch_gains_no_more_than_cold_kv_costs():
    """33.6 MB, of which L2 holds 20, in 4.7 us; 8.2 MB in 1.9 us; and what is faster cold."""
    times = {"5,32_1000,100": (25.0, 18.0, 15.0, 30.0), "1_2000": (18.0, 11.0, 9.0, 20.0), "2_10": (5.0, 4.0, 4.5, 9.0)}
    systems = {name: {"feather": dict(zip(layer.COLUMNS, some, strict=True))} for name, some in times.items()}
    records = [{"name": name, "products_us": 100.0, "systems": some} for name, some in systems.items()]
    content = {"machine": {"l2_bytes": 20e6}, "records": records}
    _, shared, alone, none, last = layer.prefetch(content).splitlines()
    assert shared.split() == ["5,32_1000,100", "0.50", "3.0", "2.4%", "20", "4.7"]
    assert alone.split()[2:] == ["2.0", "1.7%", "8", "1.9"] and none.split()[1:4] == ["0.50", "0.0", "0.0%"]
    assert last == "of a layer 2.4% at most, 1.4% in the mean; more than memory takes: 1_2000"
