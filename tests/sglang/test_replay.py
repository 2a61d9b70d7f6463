"""Replay through the installed SGLang's own scheduler, in processes of its own, by the commands a user types."""

import json
import subprocess
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path

import pytest
from rich.console import Console

from effort import full_only, newest_is_enough, on_newest, samples
from feather_sglang.adapter.hooks import PAGES_SINCE, installed_version, lacks_pages, lacks_policy
from feather_sglang.cli import main
from feather_sglang.compare import ab as replay_command
from feather_sglang.errors import FeatherError
from feather_sglang.replay import arguments as replay_arguments
from feather_sglang.replay import jobs as replay_jobs
from feather_sglang.replay import processes
from feather_sglang.replay import train as replay_train
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import save_trace
from feather_sglang.replay.workloads import shared_prefix
from feather_sglang.scheduling.policy_names import SINCE, STOCK

pages_need_a_gpu = pytest.mark.skipif(
    lacks_pages(installed_version()), reason="needs a GPU: this SGLang hands out KV pages with a GPU kernel"
)
SMALL = ["--requests", "60", "--rate", "50", "--prefix-tokens", "400", "--output-tokens", "12", "--groups", "3"]


@pytest.fixture(autouse=True)
def no_plots(request, monkeypatch):
    """They take a third of a small comparison's time; one test looks at them."""
    if request.function is not test_every_policy_serves_the_workload_and_writes_everything:
        monkeypatch.setattr(replay_command, "draw", lambda *given: None)


def ab(out, *flags):
    assert main(["ab", *flags, "--out", str(out)]) == 0
    return json.loads((out / "results.json").read_text())


def without_cpu_time(results):
    del results["command"]
    for run in results["runs"].values():
        for name in [name for name in run if name.startswith("scheduler")]:
            del run[name]
    return results


def test_every_policy_serves_the_workload_and_writes_everything(tmp_path, capsys):
    every = "fcfs,lpm,dfs-weight,hrrn,shortest-prefill-first,k-lpm,feather-order,feather-bandit"
    policies = every if on_newest() else "dfs-weight,k-lpm,feather-bandit"
    results = ab(tmp_path / "out", *SMALL, "--policies", policies)
    assert list(results["runs"]) == policies.split(",")
    for run in results["runs"].values():
        assert run["requests"] == 60 and run["retractions"] == 0
        # Three prefixes are computed once each at best; a cache that never hits would give 0.
        assert 0.7 < run["cache_hit"] <= 1 - 3 / 60 + 0.01
        assert 0 < run["ttft_mean"] <= run["ttft_p99"] <= run["max_wait"] < run["makespan"]
        assert 0 < run["scheduler_share"] < 1
        assert not (run["feather"] or {}).get("failed", False)
        assert run["goodput"] is None
    assert "slo" not in results and results["version"] == 1 and results["sglang"].startswith("0.5.")
    assert all(
        (tmp_path / "out" / f"{name}.png").stat().st_size > 5000 for name in ("throughput", "batch_size", "latency")
    )
    table = capsys.readouterr().out
    assert "output tok/s" in table and "TTFT p99 s" in table


@newest_is_enough
def test_a_sweep_says_which_rate_is_sustained(tmp_path, capsys):
    """Alone everybody meets the bounds; all at once hardly anybody does."""
    flags = [*SMALL, "--policies", "fcfs,feather", "--scheduler-cost", "off", "--slo", "ttft=3x,tbt=5x"]
    results = ab(tmp_path / "out", *flags, "--rate-scale", "0.01,10000")
    assert results["slo"] == "ttft=3x,tbt=5x" and list(results["runs"])[:2] == ["fcfs @0.01x", "feather @0.01x"]
    lowest, highest = results["rates"].values()
    assert highest == pytest.approx(1e6 * lowest, rel=0.01)
    for policy in ("fcfs", "feather"):
        low, high = (results["runs"][f"{policy} @{scale}x"] for scale in ("0.01", "10000"))
        assert low["slo_share"] == 1 > 0.5 > high["slo_share"]
        assert lowest <= results["sustained"]["rates"][policy] < highest
        assert low["goodput"] == pytest.approx(60 / low["makespan"])
        # Cached prompts take less than the whole prompt computed alone.
        assert low["slowdown_p50"] < 1 <= low["slowdown_p99"] * 1.1 and high["slowdown_p50"] > 3
    assert "95% up to" in capsys.readouterr().out


@newest_is_enough
def test_one_comparison_has_feather_with_and_without_a_promise(tmp_path):
    """Of 1 ms between tokens, which no load keeps: rows say that this bound was missed, and by whom."""
    flags = [*SMALL, "--scheduler-cost", "off", "--slo", "ttft=1000,tbt=1"]
    results = ab(tmp_path / "out", *flags, "--policies", "fcfs,feather,feather+slo")
    assert list(results["runs"]) == ["fcfs", "feather", "feather+slo"]
    assert [results["options"][name]["slo"] for name in ("feather", "feather+slo")] == [None, "ttft=1000,tbt=1"]
    for run in results["runs"].values():
        assert run["slo_missed_ttft"] == 0 and run["slo_missed_tbt"] == 1 and run["slo_missed_tpot"] is None
    told, untold = (results["runs"][name]["tbt_p99_ms"] for name in ("feather+slo", "feather"))
    assert told < untold


@newest_is_enough
def test_k_lpm_lets_nobody_wait_as_long_as_lpm(tmp_path):
    """Where the cache holds a few of the prefixes, which lpm keeps; k-lpm keeps them for three requests in four."""
    flags = ["--requests", "100", "--groups", "6", "--rate", "60", "--prefix-tokens", "400", "--output-tokens", "12"]
    flags += ["--kv-tokens", "1500", "--max-running", "2", "--scheduler-cost", "off", "--policies", "fcfs,lpm,k-lpm"]
    fcfs, lpm, k_lpm = ab(tmp_path, *flags)["runs"].values()
    assert k_lpm["max_wait"] < 0.9 * lpm["max_wait"]
    assert fcfs["cache_hit"] < k_lpm["cache_hit"] < lpm["cache_hit"]


@newest_is_enough
def test_the_oracle_mixes_no_groups(tmp_path):
    """So its batches are no larger than those of one prefix group, and it stops where the others go on."""
    flags = ["--requests", "90", "--groups", "3", "--rate", "100000", "--prefix-tokens", "400", "--output-tokens", "20"]
    runs = ab(tmp_path, *flags, "--scheduler-cost", "off", "--policies", "feather,oracle")["runs"]
    assert runs["oracle"]["stops"] > 0 == runs["feather"]["stops"]
    assert runs["oracle"]["mean_batch"] < 0.6 * runs["feather"]["mean_batch"]
    assert runs["oracle"]["requests"] == 90


def test_which_stock_policies_this_sglang_has():
    from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy, CacheAwarePolicy

    has = {policy.value for policy in (*CacheAwarePolicy, *CacheAgnosticPolicy)}
    assert [name for name in STOCK if name not in has] == [n for n in STOCK if lacks_policy(installed_version(), n)]


@pytest.mark.parametrize("engine", ["replay", "server"])
@pytest.mark.parametrize(("version", "name"), [("0.5.19", "hrrn"), ("0.5.20", "shortest-prefill-first")])
def test_a_policy_that_this_sglang_lacks_is_one_line(tmp_path, monkeypatch, capsys, engine, version, name):
    monkeypatch.setattr(replay_arguments, "installed_version", lambda: version)
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    flags = ["--engine", engine, *(["--model", str(tmp_path)] if engine == "server" else [])]
    assert main(["ab", *flags, "--policies", f"fcfs,{name}", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    says = f"--policies: sglang {version} has no {name}; leave it out, or install sglang {SINCE[name]} or later"
    assert error == f"feather: error: {says}\n" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("version", ["0.5.17", "0.5.21"])
def test_pages_that_this_sglang_has_on_a_gpu_only_are_one_line(tmp_path, monkeypatch, capsys, version):
    monkeypatch.setattr(replay_arguments, "installed_version", lambda: version)
    assert main(["ab", *SMALL, "--policies", "fcfs", "--page-size", "16", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"feather: error: --page-size 16: sglang {version} ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    for release, size in ((version, 1), (PAGES_SINCE, 16), ("0.5.99", 16)):
        monkeypatch.setattr(replay_arguments, "installed_version", lambda release=release: release)
        replay_arguments.check_pages(size)


@newest_is_enough
def test_another_seed_is_another_workload(tmp_path):
    flags = [*SMALL, "--policies", "fcfs", "--scheduler-cost", "off", "--seed"]
    first, other = ab(tmp_path / "a", *flags, "3"), ab(tmp_path / "b", *flags, "4")
    assert first["runs"]["fcfs"]["requests"] == 60
    assert without_cpu_time(other)["runs"]["fcfs"] != without_cpu_time(first)["runs"]["fcfs"]


def priced(tmp_path, **seconds):
    """A profile whose host takes nothing but that; None: it has no host."""
    document = json.loads((resources.files("feather_sglang.replay") / "profiles" / "h200.json").read_text())
    for name, entry in document["host"].items():
        entry["value"] = seconds.get(name, 0.0)
    if "host" in seconds:
        del document["host"]
    path = tmp_path / f"{'-'.join(seconds)}.json"
    path.write_text(json.dumps(document))
    return str(path)


@newest_is_enough
def test_an_expensive_scheduler_pays(tmp_path):
    """All at once: the batches are the same then, and each decode step waits for its forming of 50 ms."""
    flags = [*SMALL, "--rate-scale", "100000", "--policies", "fcfs", "--profile"]
    free = ab(tmp_path / "a", *flags, "h200", "--scheduler-cost", "off")["runs"]["fcfs"]
    dear = ab(tmp_path / "b", *flags, priced(tmp_path, form_decode=0.05))["runs"]["fcfs"]
    assert dear["mean_batch"] == free["mean_batch"] > 50
    assert free["scheduler_share"] == 0 and dear["scheduler_share"] > 0.6
    assert dear["makespan"] >= 0.05 * 11 > free["makespan"]
    assert dear["tbt_mean_ms"] == pytest.approx(50, rel=0.15) and free["tbt_mean_ms"] < 25
    measured = ab(tmp_path / "c", *flags, priced(tmp_path, form_decode=9.0), "--scheduler-cost", "measured")
    measured = measured["runs"]["fcfs"]  # forming takes what it takes here, not what the profile says
    assert 0 < measured["scheduler_share"] < 1 and free["makespan"] < measured["makespan"] < 5


@newest_is_enough
def test_a_profile_without_a_host_replays_with_none_only(tmp_path, capsys):
    flags = [*SMALL, "--policies", "fcfs", "--profile", priced(tmp_path, host=None)]
    for cost in ([], ["--scheduler-cost", "measured"]):
        assert main(["ab", *flags, *cost, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert "profile h200 has no host times: give --scheduler-cost off" in error and error.count("\n") == 1
        assert not (tmp_path / "out" / "results.json").exists()
    assert ab(tmp_path / "out", *flags, "--scheduler-cost", "off")["runs"]["fcfs"]["requests"] == 60


def test_memory_pressure_chunks_and_retractions(tmp_path):
    """A pool of three prefixes' size with long outputs: evictions and chunked prompts, and yet everybody is served."""
    flags = ["--requests", "60", "--rate", "200", "--prefix-tokens", "400", "--output-tokens", "60", "--groups", "6"]
    results = ab(
        tmp_path, *flags, "--kv-tokens", "1500", "--chunked-prefill", "128", "--policies", "fcfs,feather-bandit"
    )
    roomy = ab(tmp_path / "roomy", *flags, "--policies", "fcfs")["runs"]["fcfs"]
    for run in results["runs"].values():
        assert run["requests"] == 60
        assert run["cache_hit"] < roomy["cache_hit"] and run["mean_batch"] < roomy["mean_batch"]


@newest_is_enough
def test_without_sharing_feather_is_within_one_percent_of_fcfs(tmp_path):
    runs = ab(
        tmp_path,
        *("--no-sharing", "--requests", "150", "--rate", "60", "--output-tokens", "60"),
        *("--scheduler-cost", "off", "--policies", "fcfs,feather-bandit,feather-heuristic,feather-qlearning"),
    )["runs"]
    for name, run in runs.items():
        assert run["output_tok_s"] >= 0.99 * runs["fcfs"]["output_tok_s"], name
        assert run["stops"] == 0


@newest_is_enough
@pytest.mark.parametrize("groups", ["5", "20"][: samples(2, 1)])
def test_on_an_h200_the_bandit_does_not_stop_for_locality(tmp_path, groups):
    """Ordered mixed batches cost no more there, so it may not lose more than 1% to row order alone."""
    flags = ["--requests", "400", "--groups", groups, "--scheduler-cost", "off"]
    runs = ab(tmp_path, *flags, "--policies", "feather-order,feather-bandit")["runs"]
    assert runs["feather-bandit"]["output_tok_s"] >= 0.99 * runs["feather-order"]["output_tok_s"]


PACED = "--kv-tokens 200000 --model qwen3-8b --attention pat --scheduler-cost off".split()


@newest_is_enough
@pytest.mark.parametrize(("graphs", "groups"), [("on", "5"), ("off", "5"), ("on", "1")][: samples(3, 1)])
def test_paced_prefill_takes_fewer_steps_and_serves_more(tmp_path, graphs, groups):
    flags = ["--groups", groups, "--requests", "300", *PACED, "--prefill-graphs", graphs, "--policies"]
    paced = ab(tmp_path / "paced", *flags, "feather-order,feather-bandit", "--feather-pace", "0.1")["runs"]
    plain = ab(tmp_path / "plain", *flags, "feather-bandit", "--feather-pace", "0")["runs"]["feather-bandit"]
    default = ab(tmp_path / "default", *flags, "feather-bandit")["runs"]["feather-bandit"]
    bandit = paced["feather-bandit"]
    assert bandit["requests"] == 300 and bandit["feather"]["delayed_rounds"] > 100
    assert plain["feather"]["delayed_rounds"] == paced["feather-order"]["feather"]["delayed_rounds"] == 0
    assert bandit["prefills"] < 0.5 * plain["prefills"]
    assert bandit["output_tok_s"] > 1.02 * plain["output_tok_s"]
    assert bandit["e2e_mean"] < 0.9 * plain["e2e_mean"] and bandit["ttft_p99"] < plain["ttft_p99"] + 0.1
    # The default waits until it has seen that requests come often.
    assert 0 < default["feather"]["delayed_rounds"] <= bandit["feather"]["delayed_rounds"]
    assert bandit["prefills"] <= default["prefills"] < plain["prefills"]


@newest_is_enough
def test_without_prefill_graphs_small_prefills_take_longer(tmp_path):
    flags = [*SMALL, "--policies", "fcfs", "--prefill-graphs"]
    on, off = ab(tmp_path / "on", *flags, "on"), ab(tmp_path / "off", *flags, "off")
    assert (on["prefill_graphs"], off["prefill_graphs"]) == ("on", "off")
    host = load_profile("h200").known_host()
    longer = 32 * (host.eager_layer - host.graph_layer)  # the host launches each kernel of each layer
    assert off["runs"]["fcfs"]["ttft_p50"] > on["runs"]["fcfs"]["ttft_p50"] + longer
    # Without a host it makes no difference.
    flags.insert(-1, "--scheduler-cost=off")
    on, off = ab(tmp_path / "free-on", *flags, "on"), ab(tmp_path / "free-off", *flags, "off")
    assert off["runs"]["fcfs"]["ttft_p50"] == on["runs"]["fcfs"]["ttft_p50"] > 0


@newest_is_enough
def test_packed_prefill_shortens_steps_of_many_that_share(tmp_path):
    flags = ["--requests", "1200", "--rate", "3000", "--groups", "5", "--output-tokens", "2", "--attention", "pat"]
    flags += ["--scheduler-cost", "off", "--policies", "fcfs", "--prefill-graphs", "off", "--feather-pat-prefill"]
    off, auto = ab(tmp_path / "off", *flags, "off"), ab(tmp_path / "auto", *flags, "auto")
    assert (off["pat_prefill"], auto["pat_prefill"]) == ("off", "auto")
    off, auto = off["runs"]["fcfs"], auto["runs"]["fcfs"]
    assert 0.85 * off["ttft_mean"] < auto["ttft_mean"] < 0.99 * off["ttft_mean"]


@full_only
def test_where_mixing_costs_a_trained_policy_stops_and_beats_fcfs(tmp_path, capsys):
    """On the paper's card, on the part of the trace that is held out."""
    trace = tmp_path / "trace.jsonl"
    save_trace(shared_prefix(requests=600, rate=100), trace)
    card = ["--profile", "rtx6000ada", "--kv-tokens", "200000", "--feather-max-wait", "600"]
    card += ["--feather-max-overtaking", "inf"]  # there a batch of one group pays more than its turn costs
    policy = tmp_path / "policy.json"
    flags = [str(trace), "--policy", "bandit", "--rounds", "2", "--out", str(policy), *card]
    assert main(["train", *flags]) == 0
    assert "learning curve" in capsys.readouterr().out
    written = json.loads((tmp_path / "policy-training" / "results.json").read_text())
    held_out = written["held_out"]
    assert held_out["feather-bandit trained"]["output_tok_s"] > 1.1 * held_out["fcfs"]["output_tok_s"]
    assert held_out["feather-bandit trained"]["mean_batch"] < held_out["fcfs"]["mean_batch"]
    assert (tmp_path / "policy-training" / "learning_curve.png").exists()
    frozen = ["--feather-policy-file", str(policy), "--feather-explore", "off", "--policies", "feather-bandit"]
    runs = ab(tmp_path / "ab", str(trace), *card, *frozen)["runs"]
    assert runs["feather-bandit"]["stops"] > 0


@newest_is_enough
def test_train_writes_a_policy_that_ab_loads(tmp_path):
    """Row order alone is reported beside it, and is not paced; the clock begins anew with each pass."""
    small = [*SMALL, "--feather-pace", "0.05", "--scheduler-cost", "off", "--rounds", "2", "--slo", "ttft=1,tbt=100"]
    small += ["--server-flags=--prefill-max-requests 4 --max-total-tokens 90000"]
    policy = tmp_path / "policy.json"
    assert main(["train", "--policy", "bandit", *small, "--out", str(policy)]) == 0
    results = json.loads((tmp_path / "policy-training" / "results.json").read_text())
    assert results["slo"] == "ttft=1,tbt=100" and len(results["held_out"]) == 4 and not results["learned"]
    for run in results["held_out"].values():
        assert run["slo_share"] == 1 and run["goodput"] == pytest.approx(30 / run["makespan"])
    settings = results["settings"]
    assert settings["server_flags"] == ["--prefill-max-requests=4"] and settings["kv_tokens"] == 90_000
    trained = json.loads(policy.read_text())["trained"]
    assert trained["profile"] == "h200" and trained["settings"] == settings and trained["options"]["pace"] == 0.05
    assert main(["train", "--policy", "bandit", *small, "--out", str(policy)]) == 2  # it is there already
    frozen = ["--feather-policy-file", str(policy), "--feather-explore", "off", "--policies", "feather-bandit"]
    assert ab(tmp_path / "ab", *SMALL, *frozen)["runs"]["feather-bandit"]["requests"] == 60


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--policies", "fcfs,fifo"], "--policies fcfs,fifo: unknown ['fifo']; choose from"),
        (["--policies", "fcfs,fcfs"], "a policy is named twice"),
        (["--kv-tokens", "0"], "--kv-tokens 0: must be at least 1"),
        (["--kv-tokens", "300"], "needs 436 tokens of KV, --kv-tokens is 300; raise it"),
        pytest.param(
            ["--kv-tokens", "520", "--page-size", "64"],
            "needs 576 tokens of KV in pages of 64, --kv-tokens is 520",
            marks=pages_need_a_gpu,
        ),
        (["--profile", "h100"], "unknown hardware profile 'h100'"),
        (["--requests", "0"], "--requests 0: must be at least 1"),
        (["--slo", "ttft=0"], "--slo 'ttft=0': expected ttft=SECONDS, tbt=MS"),
        (["--slo", ""], "--slo '': expected ttft=SECONDS, tbt=MS"),
        (["--rate-scale", "1,2,1"], "--rate-scale 1,2,1: a rate is given twice"),
        (["--rate-scale", "1,1.0000001"], "--rate-scale 1,1: a rate is given twice"),
        (["--rate-scale", "1,-2"], "rate scale -2: must be a positive number"),
        (["--feather-pace", "-1"], "--feather-pace '-1': expected seconds, 0 or more"),
        (["--feather-max-wait", "nan"], "--feather-max-wait 'nan': expected seconds, 0 or more"),
        (["--feather-max-overtaking", "-1"], "--feather-max-overtaking '-1': expected a number of at least 0, or inf"),
        (["--stream-interval", "0"], "--stream-interval 0: must be at least 1"),
        (["--feather-policy-file", "missing.json"], "missing.json"),
    ],
)
def test_a_mistake_is_one_line_before_anything_long_starts(tmp_path, capsys, flags, says):
    base = ["--prefix-tokens", "400", "--output-tokens", "8", "--out", str(tmp_path / "out")]
    assert main(["ab", *base, *flags]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("feather: error: ") and says in error and "\n" not in error
    assert not (tmp_path / "out" / "results.json").exists()


TRAIN, SUITE = ["train", "--policy", "bandit"], ["suite", "--short", "--cases", "W3"]


@pytest.mark.parametrize("command", [["ab", "--policies", "fcfs,oracle"], ["ab"], TRAIN, SUITE], ids=" ".join)
def test_an_environment_that_keeps_the_plugin_out_ends_it_before_anything_runs(tmp_path, capsys, monkeypatch, command):
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    assert main([*command, "--out", str(tmp_path / "out.json")]) == 2
    assert "SGLANG_PLUGINS='another'" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
    replay_arguments.check_sglang(["fcfs", "k-lpm"])  # SGLang's own need no plugin


@pytest.mark.parametrize("command", [["ab", "--policies", "fcfs"], TRAIN, SUITE], ids=" ".join)
def test_an_environment_that_cuts_answers_ends_it_before_anything_runs(tmp_path, capsys, monkeypatch, command):
    monkeypatch.setenv("SGLANG_MAX_NEW_TOKENS_LIMIT", "50")
    assert main([*command, "--out", str(tmp_path / "out.json")]) == 2
    error = capsys.readouterr().err
    assert "SGLANG_MAX_NEW_TOKENS_LIMIT=50" in error and "--kv-tokens" not in error and error.count("\n") == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@newest_is_enough
def test_results_name_sglangs_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_MAX_NEW_TOKENS_LIMIT", "12")  # the answers are as long: it cuts none
    monkeypatch.setenv("IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD", "16")
    found = ab(tmp_path, *SMALL, "--policies", "fcfs")["environment"]
    assert found["SGLANG_MAX_NEW_TOKENS_LIMIT"] == "12" and found["IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD"] == "16"


@pytest.mark.parametrize(
    ("page_size", "kv_tokens"),
    [(1, 436), *(pytest.param(*pages, marks=pages_need_a_gpu) for pages in ((64, 576), (512, 1536)))],
)
def test_in_the_least_pool_every_request_comes_to_its_end(tmp_path, page_size, kv_tokens):
    """A replay in which SGLang shortens a request ends with an error."""
    sizes = ["--page-size", str(page_size), "--kv-tokens", str(kv_tokens), "--prefix-tokens", "400"]
    small = ["--requests", "3", "--groups", "1", "--output-tokens", "8", "--scheduler-cost", "off", *sizes]
    runs = ab(tmp_path, *small, "--policies", "fcfs")["runs"]
    assert runs["fcfs"]["requests"] == 3 and runs["fcfs"]["mean_batch"] >= 1
    assert shared_prefix(1, 400, output_tokens=8, requests=3).least_pool(page_size) == kv_tokens


@pytest.mark.parametrize("name", ["results.json", "latency.png"])
def test_a_file_that_cannot_be_written_is_noticed_before_anything_long_starts(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setattr(replay_command, "run_jobs", None)
    (tmp_path / name).mkdir()
    assert main(["ab", *SMALL, "--policies", "fcfs", "--out", str(tmp_path)]) == 2
    assert f"cannot write results {tmp_path / name}: it exists and is no regular file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rate", "5"], "--rate: for a generated workload; with a trace use --rate-scale"),
        (["--groups", "3", "--no-sharing"], "--groups and --no-sharing: for a generated workload, not with a trace"),
        (["--prefix-tokens", "8", "--levels", "2", "--output-tokens", "8"], "--output-tokens: for a generated"),
        ([], "no-such-trace.jsonl: no such trace file"),
    ],
)
@pytest.mark.parametrize("command", [["ab"], ["train", "--policy", "bandit"]], ids=" ".join)
def test_a_mistake_about_a_trace(tmp_path, capsys, command, flags, says):
    out = str(tmp_path / "out.json")
    assert main([*command, "no-such-trace.jsonl", *flags, "--out", out]) == 2
    error = capsys.readouterr().err
    assert error.startswith("feather: error: ") and says in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--rate-scale", "1,2"], "--rate-scale 1,2: give one"), (["--slo", "tbt=fast"], "--slo 'tbt=fast': expected")],
)
def test_training_takes_one_rate_and_an_slo(tmp_path, capsys, flags, says):
    assert main(["train", "--policy", "bandit", *flags, "--out", str(tmp_path / "p.json")]) == 2
    assert says in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_mistake_about_an_option_is_found_before_training(tmp_path, monkeypatch, capsys):
    base = ["train", "--policy", "bandit", "--out", str(tmp_path / "p.json")]
    assert main([*base, "--feather-tbt", "0"]) == 2
    assert "--feather-tbt '0': expected milliseconds" in capsys.readouterr().err
    monkeypatch.setenv("FEATHER_OPTIONS", '{"chunk_size": 0}')
    assert main(base) == 2
    assert "FEATHER_OPTIONS: chunk_size=0: expected a whole number" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["ab"], ["train", "--policy", "bandit"]], ids=" ".join)
def test_brackets_in_the_name_of_a_trace_are_text(tmp_path, monkeypatch, capsys, command):
    def stop(*given, **options):
        raise FeatherError("enough")

    trace = tmp_path / "t[red].jsonl"
    save_trace(shared_prefix(requests=10), trace)
    trace.write_text("".join(reversed(trace.read_text().splitlines(keepends=True))))
    for module in (replay_command, replay_train):
        monkeypatch.setattr(module, "run_jobs", stop)
    monkeypatch.setenv("COLUMNS", "400")
    assert main([*command, str(trace), "--out", str(tmp_path / "out.json")]) == 2
    shown = capsys.readouterr().out
    assert "t[red]" in shown.splitlines()[-1]
    assert f"notice: {trace}: 9 of 10" in shown


def test_trace_make_and_inspect(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    make = ["trace", "make", "--groups", "4", "--levels", "2", "--requests", "200", "--prefix-tokens", "800"]
    assert main([*make, "--out", str(path)]) == 0
    capsys.readouterr()
    assert main(["trace", "inspect", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["requests"] == 200 and facts["first_level_groups"] == 4
    # 4 x 200 tokens at the first level, 8 x 600 at the second, 20 of its own per request.
    assert facts["unique_prompt_tokens"] == 4 * 200 + 8 * 600 + 200 * 20
    assert facts["levels_max"] == 2  # the group, the branch within it


def _dawdle(job, tell):
    if job.name == "lpm":
        raise FeatherError(tempfile.mkdtemp())
    time.sleep(600)


def test_who_is_ended_early_leaves_no_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    jobs = [replay_jobs.Job(name, shared_prefix(requests=1), None, {}, {}) for name in ("fcfs", "lpm")]
    logs = tmp_path / "logs"
    logs.mkdir()
    with pytest.raises(FeatherError) as error:
        processes.run_jobs(jobs, 2, logs, Console(quiet=True), _dawdle)
    made = Path(str(error.value))
    assert made.parent.parent == tmp_path and not made.parent.exists()


def _fail(job, tell):
    if job.policy != "fcfs":
        raise RuntimeError(f"Out of memory under {job.policy}\nmore")
    return replay_jobs.replay(job, tell)


@newest_is_enough
def test_a_policy_that_fails_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(replay_command, "replay", _fail)
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["ab", *SMALL, "--policies", "lpm,fcfs", "--out", str(tmp_path / "out")]) == 1
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["runs"]) == ["fcfs"] and list(results["failed"]) == ["lpm"]
    *_, last = capsys.readouterr().out.splitlines()
    for text in (results["failed"]["lpm"], last):
        assert "RuntimeError: Out of memory under lpm" in text and str(tmp_path / "out" / "lpm.log") in text
    assert main(["ab", *SMALL, "--policies", "lpm", "--out", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert "Out of memory under lpm" in error and error.count("\n") == 1
    assert not (tmp_path / "none" / "results.json").exists()


def _break(job, tell):
    from feather_sglang.scheduling.admission.admission import Admission

    def broken(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    Admission.open_round = broken
    return replay_jobs.replay(job, tell)


def test_a_policy_that_fails_has_no_figures(tmp_path):
    """It goes on as fcfs, whose figures would stand under its name."""
    model = StepTimeModel(load_profile("h200"), load_model("qwen3-8b"))
    job = replay_jobs.Job("feather", shared_prefix(1, 40, output_tokens=2, requests=2), model, {"kv_tokens": 4000}, {})
    with pytest.raises(FeatherError, match=r"^the replay under feather failed: .*: RuntimeError\('broken on purpose'"):
        processes.run_jobs([job], 1, tmp_path, Console(quiet=True), _break)


IN_ONE_PROCESS = """
import sys
import feather_sglang.adapter.preload
from feather_sglang.replay import jobs
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.workloads import shared_prefix
model = StepTimeModel(load_profile("h200"), load_model("qwen3-8b"))
job = jobs.Job("fcfs", shared_prefix(1, 40, output_tokens=2, requests=2), model, {"kv_tokens": 4000}, {})
before = set(sys.modules)
served = jobs.replay(job, lambda done: None).latencies
print(len(served), [name for name in set(sys.modules) - before if name.startswith("sglang.srt.models.")])
"""


@newest_is_enough
def test_the_process_that_replays_start_from_has_imported_all_models():
    """SGLang imports them when it builds a scheduler, and every replay would take two seconds longer."""
    ended = subprocess.run([sys.executable, "-c", IN_ONE_PROCESS], capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1:] == ["2 []"], ended.stderr
