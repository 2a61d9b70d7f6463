"""The runs of a server's result file that `benchmarks/replay_servers.py` replays, and those that it leaves out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import replay_servers

from feather_sglang.errors import FeatherError
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel

SERVERS = (
    *("servers_0517_h200_fa3.json", "servers_0517_h200_flashinfer.json", "servers_0517_h200_pat.json"),
    *("servers_0523_h200_500k.json", "servers_0523_h200_fa3.json", "servers_0523_h200_llama.json"),
    *("servers_0523_h200_pat.json", "servers_h200_fa3.json", "servers_h200_flashinfer.json", "servers_h200_pat.json"),
    *("servers_h200_policies.json", "bounds_h200_traces.json", "bounds_h200.json", "bounds_h200_graphs.json"),
)
ROOT = Path(__file__).resolve().parents[2]
QWEN = {"num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}


SEEN = {"tok_s": 9.0, "unfinished": 0, "ttft_s": {"mean": 1.0, "p99": 2.0}, "e2e_s": {"mean": 3.0},
        "tbt_ms": {"p99": 4.0}}  # fmt: skip


def content(typed: str = "bench_server.py --common '--load-format dummy'", **start: Any) -> dict[str, Any]:
    """One server under two policies, switched."""
    pat = ["--attention-backend", "fa3", "--decode-attention-backend", "pat"]
    paced = [*pat, "--schedule-policy", "feather", "--feather-pace", "0.1"]
    return {
        "command": typed, "model": QWEN, "seed": 3, "arrivals": "poisson", "stream_interval": 8,
        "machine": {"gpu": "G", "versions": {"sglang": "0.5.23"}},
        "servers": {"pat": {"flags": pat, "kv_tokens": 90_000, "max_running": 40, **start}, "paced": {"flags": paced}},
        "records": [{"case": case, "server": name, "overall": SEEN}
                    for case in ("W3", "decode:8,2,100") for name in ("pat", "paced")],
    }  # fmt: skip


def test_each_workload_policy_and_backend_is_replayed_with_the_servers_sizes() -> None:
    runs, left_out = replay_servers.runs_of(content())
    assert left_out == ["decode:8,2,100: a steady batch"]
    assert [(run["case"], run["attention"], run["policy"]) for run in runs] == [
        ("W3", "pat", "fcfs"),
        ("W3", "pat", "feather"),
    ]
    job = replay_servers.job_of(runs[1], "one")
    assert job.settings == {"kv_tokens": 90_000, "max_running": 40, "stream_interval": 8}
    assert runs[1]["server"] == {"output_tok_s": 9.0, "ttft_mean": 1.0, "ttft_p99": 2.0, "e2e_mean": 3.0,
                                 "tbt_p99_ms": 4.0}  # fmt: skip
    assert job.options == {"seed": 3, "pace": "0.1"} and job.model.attention_name == "pat"
    assert replay_servers.job_of(runs[0], "two").options == {} and len(job.trace.requests) == 300


@pytest.mark.parametrize(
    ("command", "start", "graphs"),
    [
        ("bench_server.py --common '--load-format dummy'", {}, "on"),
        ("bench_server.py", {}, "off"),  # as the benchmark's own common flags have it
        ("bench_server.py", {"command": "launch_server --attention-backend fa3"}, "on"),
        ("bench_server.py --common ''", {"command": "launch_server --disable-prefill-cuda-graph"}, "off"),
    ],
)
def test_prefill_graphs_are_those_of_the_server(command: str, start: dict[str, str], graphs: str) -> None:
    runs, _ = replay_servers.runs_of(content(command, **start))
    assert {run["prefill_graphs"] for run in runs} == {graphs}


@pytest.mark.parametrize(
    ("flags", "packed"),
    [([], {}), (["--feather-pat-prefill", "off"], {}), (["--feather-pat-prefill=auto"], {"pat_prefill": "auto"}),
     (["--feather-pat-prefill", "on"], {"pat_prefill": "on"}), (["--feather-pat-prefill"], {"pat_prefill": "on"}),
     (["--feather-pat-prefill", "--enable-metrics"], {"pat_prefill": "on"})],
)  # fmt: skip
def test_prefill_is_packed_as_on_the_server(flags: list[str], packed: dict[str, str]) -> None:
    servers = content("bench_server.py")  # without prefill graphs
    servers["servers"]["pat"]["flags"] += flags
    (run, _), _ = replay_servers.runs_of(servers)
    assert {key: value for key, value in run.items() if key == "pat_prefill"} == packed
    step = [20] * 409, [5000] * 409, [(i % 5,) for i in range(409)], 5000
    shorter = replay_servers.job_of(run, "one").model.prefill(*step) < StepTimeModel(
        load_profile("h200"), load_model("qwen3-8b"), "pat", prefill_graphs=False
    ).prefill(*step)
    assert shorter == bool(packed)


def test_what_a_replay_cannot_be_is_named() -> None:
    of_two = content("bench_server.py --common '--load-format dummy' --flags '--tp 2'")
    assert replay_servers.runs_of(of_two)[1][0] == "pat: several GPUs"
    other = content()
    other["servers"]["pat"]["flags"] = ["--attention-backend=triton"]
    assert "pat: the profile has no triton" in replay_servers.runs_of(other)[1]
    with pytest.raises(FeatherError, match="no built-in shape"):
        replay_servers.runs_of({**content(), "model": {**QWEN, "hidden_size": 1}})


@pytest.mark.parametrize(("rate", "kept"), [(900.0, 2), (1100.0, 0)])
def test_many_single_tokens_in_streams_are_left_out(rate: float, kept: int) -> None:
    single = {**content(), "stream_interval": 1}
    for record in single["records"]:
        record["overall"] = {**SEEN, "tok_s": rate}
    runs, left_out = replay_servers.runs_of(single)
    assert len(runs) == kept and len(left_out) == 3 - kept


def test_a_servers_own_settings_are_replayed() -> None:
    chunked = content()
    chunked["servers"]["paced"]["flags"] += ["--chunked-prefill-size", "2048", "--prefill-decode-interval", "4"]
    runs, _ = replay_servers.runs_of(chunked)
    settings = replay_servers.job_of(runs[1], "one").settings
    assert settings["chunked_prefill"] == 2048 and settings["server_flags"] == ["--prefill-decode-interval", "4"]
    assert "settings" not in runs[0]


def test_what_was_replayed_before_is_kept() -> None:
    runs, _ = replay_servers.runs_of(content())
    replay_servers.keep(runs, [{**runs[1], "replay": {"output_tok_s": 7.0}}, {**runs[0], "seed": 9, "replay": {}}])
    assert "replay" not in runs[0] and runs[1]["replay"] == {"output_tok_s": 7.0}


def test_nothing_to_replay_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "servers.json"
    file.write_text(json.dumps({**content(), "records": []}))
    with pytest.raises(FeatherError, match="nothing to replay"):
        replay_servers.main([str(file), "--json", str(tmp_path / "replays.json")])


def test_the_committed_replays_are_of_what_servers_were_measured_on() -> None:
    folder = ROOT / "docs" / "measured"
    replayed = json.loads((folder / "replays.json").read_text())["runs"]
    files = (json.loads((folder / name).read_text()) for name in SERVERS)
    asked = [run for file in files for run in replay_servers.runs_of(file)[0]]
    assert [{key: value for key, value in run.items() if key != "replay"} for run in replayed] == asked


def test_rounds_are_one_run_and_what_was_cut_is_left_out() -> None:
    twice = content()
    twice["records"] = [{"case": "W3", "server": "pat", "overall": {**SEEN, "tok_s": rate}} for rate in (8.0, 12.0)]
    (run,), _ = replay_servers.runs_of(twice)
    assert run["server"]["output_tok_s"] == 10.0
    twice["records"][1]["overall"]["unfinished"] = 3
    assert replay_servers.runs_of(twice) == ([], ["W3, pat: not to its end"])
