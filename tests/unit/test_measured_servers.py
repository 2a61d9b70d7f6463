"""The results of policies and of `pat` on real servers in docs/measured: no loss is recorded unnoticed."""

import json
from pathlib import Path
from statistics import mean

import pytest

MEASURED = Path(__file__).parents[2] / "docs" / "measured"
BACKENDS = ("pat", "fa3", "flashinfer")
STEADY = ("server_h200_decode.json", "server_h200_decode_flashinfer.json", "server_h200_decode_triton.json")


def records(name):
    """By case and server, where nothing failed: a faster server must not be one that answers fewer requests."""
    content, found = json.loads((MEASURED / name).read_text()), {}
    assert content["machine"]["gpu"] == "NVIDIA H200"
    for record in content["records"]:
        counted = record["overall"]
        assert not counted["failed"] and not counted["unfinished"] and counted["requests"] == counted["finished"]
        found.setdefault(record["case"], {}).setdefault(record["server"], []).append(record)
    return found


def rates(name):
    """Tokens a second by case and server: of the steady window where there should be one, without it of no worth."""
    return {
        case: {
            server: mean(one["steady"]["tok_s"] if one["steady_case"] else one["overall"]["tok_s"] for one in whole)
            for server, runs in servers.items()
            if (whole := [one for one in runs if one["steady"] or not one["steady_case"]])
        }
        for case, servers in records(name).items()
    }


def policies(backend):
    """By case and policy, of a backend."""
    return {
        case: {
            server.partition("+")[2] or "fcfs": {
                "tok_s": mean(one["overall"]["tok_s"] for one in runs),
                **{figure: mean(one["overall"]["ttft_s"][figure] for one in runs) for figure in ("mean", "p99")},
            }
            for server, runs in servers.items()
        }
        for case, servers in records(f"servers_h200_{backend}.json").items()
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_feather_gains_where_prefixes_exceed_the_pool_and_loses_nothing_elsewhere(backend):
    least = {"W2": 1.78, "W6": 1.7, "W3": 0.995}  # the others share, and their prefixes fit
    for case, runs in policies(backend).items():
        feather, fcfs = runs["feather"], runs["fcfs"]
        assert feather["tok_s"] >= least.get(case, 1.0) * fcfs["tok_s"], case
        assert feather["tok_s"] >= 0.995 * max(one["tok_s"] for one in runs.values()), case
        for figure, most in (("mean", 1.03), ("p99", 1.1)):
            assert feather[figure] <= most * fcfs[figure], (case, figure)
    assert {"W1", "W2", "W3", "W6", "W7"} <= set(policies(backend))


def test_pat_is_faster_in_whole_runs_and_level_where_nothing_is_shared():
    one_gpu = {name: {case: runs["fcfs"]["tok_s"] for case, runs in policies(name).items()} for name in BACKENDS}
    for other in ("fa3", "flashinfer"):
        ratios = {case: one_gpu["pat"][case] / rate for case, rate in one_gpu[other].items()}
        assert min(ratios.values()) > 1 and ratios["W3"] < 1.05
        assert min(ratios[case] for case in ("W1", "W7")) > 2
    two_gpus = {case: runs["pat"] / runs["fa3"] for case, runs in rates("server_h200_tp2.json").items()}
    assert min(two_gpus.values()) > 1 and two_gpus["W5:1200"] > 2.2


def test_pat_is_faster_in_batches_that_only_decode_but_for_small_ones():
    merged = {}
    for name in STEADY:
        for case, found in rates(name).items():
            merged.setdefault(case, {}).update(found)
    ratios = {
        case: found["pat"] / max(rate for server, rate in found.items() if server != "pat")
        for case, found in merged.items()
        if "pat" in found and len(found) > 1
    }
    behind = {case: ratio for case, ratio in ratios.items() if ratio < 1}
    assert len(ratios) >= 27 and len(behind) <= 4 and min(ratios.values()) > 0.94
    assert all(case.startswith("decode:32,") for case in behind)
    assert ratios["decode:500,5,5000,64"] > 2.6


def test_a_long_request_alone_loses_little_to_pat():
    ratios = {case: found["pat"] / found["fa3"] for case, found in rates("server_h200_long.json").items()}
    assert min(ratios.values()) > 0.965
    assert all(case.startswith("decode:1,0,") for case, ratio in ratios.items() if ratio < 0.99)
