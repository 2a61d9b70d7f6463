"""Several replayed servers behind a router: SGLang's own schedulers, a process each, in lock-step virtual time."""

import json
import os
import signal
from dataclasses import asdict

import pytest
from rich.console import Console

from effort import newest_is_enough
from feather_sglang.cli import main
from feather_sglang.compare import ab as ab_command
from feather_sglang.errors import FeatherError
from feather_sglang.replay import jobs, replicas
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.processes import run_jobs
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import Trace
from feather_sglang.replay.traffic import chat
from feather_sglang.replay.workloads import shared_prefix

GROUPS = shared_prefix(8, 2000, output_tokens=20, rate=40, requests=80, jitter=0.5)
BURST = shared_prefix(3, 400, output_tokens=20, rate=1e5, requests=90)
SMALL = ["--requests", "80", "--rate", "60", "--prefix-tokens", "2000", "--output-tokens", "12", "--groups", "8"]


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    monkeypatch.setattr(ab_command, "draw", lambda *given: None)


def job(name, trace=GROUPS, policy="feather", **fleet):
    model = StepTimeModel(load_profile("h200"), load_model("qwen3-8b"))
    return jobs.Job(policy, trace, model, {"kv_tokens": 60_000}, {}, name, **fleet)


def run(folder, *given, work=replicas.serve):
    return run_jobs(given, 2, folder, Console(quiet=True), work)


def test_round_robin_is_the_trace_dealt_out_and_each_part_replayed(tmp_path):
    parts = [Trace(BURST.name, BURST.block_size, BURST.requests[place::2]) for place in range(2)]
    one, other = run(
        tmp_path, *(job(str(p), part, "oracle") for p, part in enumerate(parts)), work=jobs.replay
    ).values()
    both = run(tmp_path, job("both", BURST, "oracle", replicas=2, router="round-robin"))["both"]
    assert sorted(both.latencies) == sorted(one.latencies + other.latencies)
    assert both.batches == sorted(one.batches + other.batches)
    assert both.prefills == one.prefills + other.prefills
    assert both.summary.makespan == max(one.summary.makespan, other.summary.makespan)
    assert both.summary.stops == one.summary.stops + other.summary.stops > 0
    busy = [part.summary.gpu_busy * part.summary.makespan for part in (one, other)]
    assert both.summary.imbalance == pytest.approx(2 * max(busy) / sum(busy))
    assert both.summary.gpu_busy == pytest.approx(sum(busy) / 2 / both.summary.makespan)


@pytest.mark.parametrize("trace", [GROUPS, chat(12, rate=4.0, think_s=0.5)], ids=["groups", "conversations"])
def test_one_replica_is_the_server_alone(tmp_path, trace):
    alone = run(tmp_path, job("alone", trace), work=jobs.replay)["alone"]
    behind = run(tmp_path, job("alone", trace, replicas=1, router="cache-aware"))["alone"]
    assert asdict(behind.summary) == {**asdict(alone.summary), "imbalance": 1.0}
    assert behind.batches == alone.batches and behind.latencies == alone.latencies


@newest_is_enough
def test_cache_aware_keeps_groups_together_and_a_run_repeats(tmp_path):
    routers = ("cache-aware", "round-robin", "shortest-queue")
    found = [run(tmp_path, *(job(name, replicas=2, router=name) for name in routers)) for _ in range(2)]
    assert found[0] == found[1]
    aware, turns, shortest = (found[0][name].summary for name in routers)
    prompts = sum(request.input_length for request in GROUPS.requests)
    groups = {request.hash_ids[0]: request for request in GROUPS.requests}
    # A prefix is computed once where its group stays together, and once on each replica where it does not.
    assert aware.cache_hit - turns.cache_hit == pytest.approx(2000 * len(groups) / prompts, rel=0.05)
    assert aware.cache_hit > shortest.cache_hit
    assert aware.imbalance >= 1 and turns.imbalance >= 1


@newest_is_enough
def test_the_command_compares_routers_and_names_the_smallest_number(tmp_path, capsys):
    flags = ["--policies", "fcfs", "--replicas", "1,2,4", "--router", "round-robin,cache-aware", "--jobs", "1"]
    slo = ["--slo", "ttft=0.2", "--kv-tokens", "40000", "--profile", "rtx6000ada", "--scheduler-cost", "off"]
    assert main(["ab", *SMALL, *flags, *slo, "--out", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    names = ["fcfs round-robin", "fcfs cache-aware"]
    assert list(results["runs"]) == [f"{name} x{count}" for count in (1, 2, 4) for name in names]
    assert results["replicas"] == [1, 2, 4] and results["routers"] == ["round-robin", "cache-aware"]
    for name in names:
        shares = {count: results["runs"][f"{name} x{count}"]["slo_share"] for count in (1, 2, 4)}
        least = results["enough"]["replicas"][name]
        assert shares[1] < 0.95 and (least is None or all(shares[n] >= 0.95 for n in shares if n >= least))
    assert any(results["enough"]["replicas"].values())
    assert "95% from" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--router", "round-robin"], "goes with --replicas"),
        (["--replicas", "2", "--router", "random"], "name each once, out of cache-aware, round-robin"),
        (["--replicas", "2", "--router", ""], "name each once"),
        (["--replicas", "2", "--router", "round-robin,round-robin"], "name each once"),
        (["--replicas", "1,2", "--rate-scale", "1,2"], "give several values of one of the two"),
        (["--replicas", "2", "--engine", "server"], "--replicas goes with --engine replay"),
    ],
)
def test_flags_that_do_not_fit_are_one_line(tmp_path, capsys, flags, says):
    assert main(["ab", *SMALL, *flags, "--out", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "2,2", "two", ""])
def test_a_number_of_replicas_that_cannot_be_is_refused(tmp_path, capsys, value):
    with pytest.raises(SystemExit):
        main(["ab", *SMALL, "--replicas", value, "--out", str(tmp_path)])
    assert "expected a number of servers" in capsys.readouterr().err


def _dies(job, tell):
    """Of two replicas, the one that serves the tenth request is killed."""
    from feather_sglang.adapter import replay_engine

    request_of = replay_engine.Replay._request

    def request(self, one):
        if one.request_id == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return request_of(self, one)

    replay_engine.Replay._request = request
    return replicas.serve(job, tell)


def test_a_replica_that_dies_ends_the_run_with_one_line(tmp_path):
    with pytest.raises(FeatherError, match=r"under dying failed: .*a replica ended without a result"):
        run(tmp_path, job("dying", replicas=2, router="round-robin"), work=_dies)


@newest_is_enough
def test_a_request_that_cannot_be_served_ends_the_run(tmp_path):
    """Not only where it is: the others would wait for ever."""
    too_long = shared_prefix(2, 2000, output_tokens=4, requests=8)
    small = jobs.Job("fcfs", too_long, job("-").model, {"kv_tokens": 1000}, {}, "small", None, 2, "round-robin")
    with pytest.raises(FeatherError):
        run(tmp_path, small)
