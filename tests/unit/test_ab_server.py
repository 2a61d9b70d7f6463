"""``feather ab --engine server`` without a server: command line, log lines, figures, sglang.bench_serving's file."""

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
from rich.console import Console

from feather_sglang.adapter.options import VARIABLE, FeatherOptions, add_flags
from feather_sglang.cli import main
from feather_sglang.compare import ab as command
from feather_sglang.compare import on_servers as ab
from feather_sglang.compare import policies, rates
from feather_sglang.compare.rates import Rates
from feather_sglang.compare.server import driver as driving
from feather_sglang.compare.server.bench_serving import read_results
from feather_sglang.compare.server.cases import Case, vocabulary_of
from feather_sglang.compare.server.client import Driven
from feather_sglang.compare.server.driver import in_turns
from feather_sglang.compare.server.process import ServerFailed
from feather_sglang.compare.server.result import Admission, decode_steps, notes, summarize, together
from feather_sglang.compare.server.stats import Stream, token_gaps
from feather_sglang.compare.server.watch import Line, read_lines, scheduler_cpu
from feather_sglang.errors import FeatherError
from feather_sglang.replay.traces import Trace, TraceRequest, save_trace
from feather_sglang.replay.workloads import shared_prefix
from feather_sglang.report.summary import RunSummary

LOG = """\
[2026-01-01 00:00:00] Prefill batch, #new-seq: 1, #cached-token: 0, token usage: 0.99, #running-req: 2, #queue-req: 8
[2026-01-01 00:00:00] INFO: 127.0.0.1 - "POST /generate HTTP/1.1" 200 OK
[2026-01-01 00:00:01] Decode batch, #running-req: 12, #token: 3532, token usage: 0.98, gen throughput (token/s): 72.81
[2026-01-01 00:00:01 TP0] Decode batch, #running-req: 3, #full token: 9, full token usage: 0.50, gen throughput: 1.0
"""


def stream(*events, due=0.0, cached=0, finished=True, error=None):
    return Stream(due, 10, due, list(events), cached, finished, error)


def save(trace, path):
    save_trace(trace, path)
    return str(path)


def arguments(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["--engine", "server", *words])


def comparison(args, trace, vocabulary, chosen, *given):
    rates = Rates([one.name for one in chosen], {1.0: trace}, None)
    return ab.Comparison(args, rates, vocabulary, chosen, *given)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    return tmp_path


class TestCommandLine:
    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (["--jobs", "1"], "--jobs goes with --engine replay"),
            (["--profile", "rtx6000ada"], "--profile goes with --engine replay"),
            (["--prefill-graphs", "off"], "--prefill-graphs goes with --engine replay"),
            (["--feather-slo", "ttft=2"], "--feather-slo 'ttft=2': give both bounds, ttft and tbt"),
            (["--feather-pace", "-1"], "--feather-pace '-1': expected seconds, 0 or more"),
            (["--feather-pace", "inf"], "--feather-pace 'inf': expected seconds, 0 or more"),
            (["--policies", "fcfs,fifo"], "unknown ['fifo']"),
            (["--policies", "fcfs,k-lpm"], "fcfs,k-lpm: no server has k-lpm; leave it out, or use --engine replay"),
            (["--policies", "feather+slo"], "--slo"),
            (["--policies", "feather+slo", "--slo", "ttft=2"], "--slo"),
            (["--attention", "fa3,fa9"], "--attention fa3,fa9: "),
            (["--attention", "fa3,fa3"], "--attention fa3,fa3: "),
            (["--server-flags=--schedule-policy=lpm"], "--schedule-policy is set here; use --policies"),
            (["--server-flags=--admin-api-key secret"], "--admin-api-key is set here"),
            (["--server-flags=--model other"], "--model is set here; use --model"),
            (["--server-flags", "'open"], "--server-flags 'open: No closing quotation"),
            (["--repeat", "0"], "--repeat 0: must be at least 1"),
            (["--stream-interval", "0"], "--stream-interval 0: must be at least 1"),
            (["--time-limit", "0"], "must be more than 0 seconds"),
            (["--max-running", "0"], "--max-running 0: must be at least 1"),
            (["--kv-tokens", "0"], "--kv-tokens 0: must be at least 1"),
            (["--feather-max-wait", "nan"], "--feather-max-wait 'nan': expected seconds, 0 or more"),
            (["--bench-serving", "/no/file"], "--bench-serving /no/file: cannot read: No such file"),
            (["--model", "/no/model"], "--model /no/model: servers need the folder of a model"),
        ],
    )
    def test_a_mistake_is_one_line_before_any_server_starts(self, model, capsys, flags, says):
        out = model / "out"
        assert main(["ab", "--engine", "server", "--model", str(model), "--out", str(out), *flags]) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith("feather: error: ") and says in error and "\n" not in error
        assert not out.exists()

    @pytest.mark.parametrize(("version", "hrrn"), [("0.5.19", []), ("0.5.20", ["hrrn"]), (None, ["hrrn"])])
    def test_by_default_hrrn_is_there_where_sglang_has_it(self, monkeypatch, version, hrrn):
        monkeypatch.setattr(policies, "installed_version", lambda: version)
        rest = ["feather-order", "feather"]
        assert policies.chosen_policies(arguments()) == ["fcfs", "lpm", "dfs-weight", *hrrn, *rest]

    def test_results_that_cannot_be_written_are_found_before_any_server_starts(self, model, capsys):
        base = ["ab", "--engine", "server", "--model", str(model), "--out", str(model / "out"), "--requests", "2"]
        assert main([*base, "--json", str(model / "config.json" / "r.json")]) == 2
        assert "cannot write" in capsys.readouterr().err
        assert main([*base, "--json", str(model)]) == 2
        assert "is a folder" in capsys.readouterr().err

    @pytest.mark.parametrize("engine", ["replay", "server"])
    def test_an_earlier_runs_results_are_not_replaced_unasked(self, model, monkeypatch, capsys, engine):
        def stop(*given, **options):
            raise FeatherError("enough")

        monkeypatch.chdir(model)
        monkeypatch.setattr(ab, "Comparison", stop)
        monkeypatch.setattr(command, "run_jobs", stop)
        base = ["ab", "--engine", engine, "--requests", "2"] + (["--model", str(model)] if engine == "server" else [])
        earlier = model / "feather-ab-results" / "results.json"

        def said(*flags):
            assert main([*base, *flags]) == 2
            return capsys.readouterr().err

        assert "enough" in said()
        earlier.write_text("old")
        instead = "give --overwrite, or another folder by --out"
        assert said() == f"feather: error: feather-ab-results/results.json is an earlier run's: {instead}\n"
        assert earlier.read_text() == "old"
        assert "enough" in said("--overwrite") and "enough" in said("--out", "another")
        (model / "another" / "results.json").write_text("old")
        assert "another/results.json is an earlier run's" in said("--out", "another")
        if engine == "server":
            assert "enough" in said("--json", "r.json")

    def test_a_trace_is_not_generated(self, model, capsys):
        trace = save(Trace("t", 8, [TraceRequest(0, 0.0, 20, 4, (5, 6, 7))]), model / "t.jsonl")
        base = ["ab", trace, "--engine", "server", "--model", str(model), "--out", str(model / "out")]
        assert main([*base, "--rate", "5"]) == 2
        assert "--rate: for a generated workload; with a trace use --rate-scale" in capsys.readouterr().err
        assert not (model / "out").exists()

    def test_brackets_in_a_name_are_text(self, model, monkeypatch, capsys):
        def stop(*given):
            raise FeatherError("enough")

        rows = [TraceRequest(0, 1.0, 4, 4, (5,)), TraceRequest(1, 0.0, 4, 4, (6,))]
        trace = save(Trace("t", 8, rows), model / "t[red].jsonl")
        monkeypatch.setattr(ab, "Comparison", stop)
        monkeypatch.setenv("COLUMNS", "400")
        assert main(["ab", trace, "--engine", "server", "--model", str(model), "--out", str(model / "out")]) == 2
        assert f"notice: {trace}: 1 of 2" in capsys.readouterr().out

    def test_a_server_flag_without_servers_is_a_mistake(self, capsys):
        assert main(["ab", "--repeat", "2"]) == 2
        assert "--repeat goes with --engine server" in capsys.readouterr().err

    def test_a_model_must_say_its_vocabulary(self, model):
        assert vocabulary_of(str(model)) == 300
        (model / "config.json").write_text('{"text_config": {"vocab_size": 12}}')
        assert vocabulary_of(str(model)) == 12
        for small in ("11", "-3"):
            (model / "config.json").write_text(f'{{"vocab_size": {small}}}')
            with pytest.raises(FeatherError, match=f"a vocabulary of {small} tokens is too small"):
                vocabulary_of(str(model))
        for text in ("{", "{}", "[]", '{"vocab_size": Infinity}'):
            (model / "config.json").write_text(text)
            with pytest.raises(FeatherError, match="no vocab_size"):
                vocabulary_of(str(model))

    @pytest.mark.parametrize(
        ("kv_tokens", "info", "needs"),
        [
            (435, {}, "needs 436 tokens, the server takes 435"),
            (520, {"page_size": 64}, "needs 576 tokens, the server takes 520"),
            (9000, {"max_req_input_len": 427}, "needs 428 tokens, the server takes 427"),
            (576, {"page_size": 64, "max_req_input_len": 428}, None),
            (None, {}, None),
        ],
    )
    def test_a_server_must_hold_the_longest_request(self, kv_tokens, info, needs):
        trace, server = shared_prefix(1, 400, output_tokens=8), SimpleNamespace(kv_tokens=kv_tokens, info=info)
        with pytest.raises(FeatherError, match=needs) if needs else contextlib.nullcontext():
            ab.check_room(trace, server)

    def test_the_users_flags_overrule(self):
        args = arguments(
            "--server-flags=--device cpu --feather-row-order off", "--feather-max-wait", "9", "--attention", "pat"
        )
        fcfs, feather = ab.configurations(args, ["fcfs", "feather-order"])
        pat = ["--attention-backend", "fa3", "--decode-attention-backend", "pat"]
        assert list(fcfs.flags) == [*pat, "--device", "cpu", "--feather-row-order", "off", "--schedule-policy", "fcfs"]
        assert feather.name == "feather-order" and [word for word in feather.flags if "row-order" in word] == [
            "--feather-row-order"
        ]
        assert (
            " ".join(feather.flags).count("--feather-max-wait 9.0 --feather-max-overtaking 2.0 --feather-explore on")
            == 1
        )

    def test_a_running_server_is_told_what_a_new_one_gets_as_flags(self):
        args = arguments("--feather-max-wait", "9", "--server-flags=--feather-row-order=off --device cpu")
        fcfs, feather = ab.configurations(args, ["fcfs", "feather"])
        assert fcfs.policy_options == {}
        # Null undoes the policy file of another policy; the order of rows is the user's on all servers.
        told = {"policy_file": None, "seed": 0, "max_wait": 9.0, "explore": True, "gather": True, "pace": None}
        told |= {"max_overtaking": 2.0, "tbt": None, "slo": None, "chunk_size": 64, "max_wait_rounds": 20_000}
        assert feather.policy_options == told

    def test_what_the_variable_says_holds_where_no_flag_says_otherwise(self, monkeypatch, tmp_path):
        monkeypatch.setenv(VARIABLE, '{"chunk_size": 32, "gather": false, "max_overtaking": "inf", "max_wait": 7}')
        args = arguments("--feather-max-wait", "9", "--seed", "3")
        told = policies.options_of(args, ["feather"])["feather"]
        expected = {"chunk_size": 32, "gather": False, "max_overtaking": "inf", "max_wait": 9, "seed": 3}
        assert {name: told[name] for name in expected} == expected
        assert json.loads(json.dumps(told)) == told and FeatherOptions().updated(told) == FeatherOptions(
            chunk_size=32, gather=False, max_overtaking=float("inf"), max_wait=9, seed=3
        )
        (feather,) = ab.configurations(args, ["feather"])
        words = " ".join(feather.flags)
        assert "--feather-gather off" in words and "--feather-max-overtaking inf" in words
        assert "--feather-chunk-size" not in words and "--feather-seed" not in words

    def test_servers_have_what_has_no_flag_in_the_variable(self, model, monkeypatch):
        monkeypatch.setenv(VARIABLE, '{"chunk_size": 32}')
        args = arguments("--model", str(model), "--out", str(model), "--seed", "3")
        trace = Trace("t", 8, [TraceRequest(0, 0.0, 20, 4, (5, 6, 7))])
        chosen = ab.configurations(args, ["fcfs", "feather"])
        comparer = comparison(args, trace, 300, chosen, model / "r.json", Console(quiet=True))
        environment = comparer.driver.terms.environment
        assert FeatherOptions.from_environment(environment) == FeatherOptions(chunk_size=32, seed=3)
        assert comparer.facts["options"] == {"chunk_size": 32, "seed": 3, "max_wait_rounds": 20_000}
        assert json.loads(os.environ[VARIABLE]) == {"chunk_size": 32}

    def test_a_seed_of_the_variable_is_one_line(self, monkeypatch):
        monkeypatch.setenv(VARIABLE, '{"seed": 7}')
        with pytest.raises(FeatherError, match="FEATHER_OPTIONS: seed=7: leave it out here, and give --seed"):
            policies.options_of(arguments(), ["feather"])
        assert policies.options_of(arguments("--seed", "7"), ["feather"])["feather"]["seed"] == 7

    def test_feather_with_a_promise_is_feather_told_the_bounds(self):
        args = arguments("--policies", "feather,feather+slo", "--slo", "mooncake")
        plain, told = ab.configurations(args, policies.chosen_policies(args))
        assert (told.name, told.policy) == ("feather+slo", "feather") and "--feather-slo mooncake" in " ".join(
            told.flags
        )
        assert (
            told.policy_options == {**plain.policy_options, "slo": "mooncake"} and plain.policy_options["slo"] is None
        )

    @pytest.mark.parametrize("word", ["on", "off"])
    def test_whether_prefixes_gather_reaches_servers_new_and_running(self, word):
        fcfs, feather = ab.configurations(arguments("--feather-gather", word), ["fcfs", "feather"])
        assert f"--feather-gather {word}" in " ".join(feather.flags) and "--feather-gather" not in fcfs.flags
        assert feather.policy_options["gather"] is (word == "on")

    def test_a_pace_reaches_servers_new_and_running_but_for_feather_order(self):
        policies = ["fcfs", "feather-order", "feather"]
        fcfs, order, feather = ab.configurations(arguments("--feather-pace", "0.1"), policies)
        assert "--feather-pace 0.1" in " ".join(feather.flags) and feather.policy_options["pace"] == 0.1
        assert (
            "--feather-pace 0.0" in " ".join(order.flags) and order.policy_options["pace"] == 0
        )  # SGLang admits there
        assert "--feather-pace" not in fcfs.flags
        order, feather = ab.configurations(arguments(), policies)[1:]
        assert "--feather-pace" not in feather.flags and feather.policy_options["pace"] is None
        assert "--feather-pace 0.0" in " ".join(order.flags) and order.policy_options["pace"] == 0
        assert ab.configurations(arguments("--feather-pace", "auto"), policies)[2] == feather

    @pytest.mark.parametrize("more", [(), ("--feather-tbt", "40", "--feather-slo", "mooncake")])
    def test_a_server_parses_the_flags_that_it_is_started_with(self, more, monkeypatch):
        parser = argparse.ArgumentParser()
        parser.add_argument("--schedule-policy")
        add_flags(parser)
        for one in ab.configurations(arguments(*more), ["feather", "feather-order", "feather-qlearning"]):
            monkeypatch.setenv(VARIABLE, "")
            _, other = parser.parse_known_args(list(one.flags))
            assert not [word for word in other if word.startswith("--feather")]
            assert FeatherOptions.from_environment().updated(one.policy_options) == FeatherOptions.from_environment()

    def test_every_backend_with_every_policy(self):
        found = ab.configurations(arguments("--attention", "fa3,pat"), ["fcfs", "feather"])
        assert [one.name for one in found] == ["fa3+fcfs", "fa3+feather", "pat+fcfs", "pat+feather"]

    def test_every_other_round_goes_backwards(self):
        chosen = ab.configurations(arguments(), ["fcfs", "lpm"])
        order = [(number, one.name) for number, one in in_turns(chosen, 2)]
        assert order == [(1, "fcfs"), (1, "lpm"), (2, "lpm"), (2, "fcfs")]

    def test_dummy_weights_where_there_are_none(self, model):
        args = arguments("--model", str(model), "--kv-tokens", "900")
        assert " ".join(ab.common_flags(args)).endswith("--max-total-tokens 900 --load-format dummy")
        (model / "model.safetensors").touch()
        assert "dummy" not in ab.common_flags(args)


def test_a_traces_prompts_share_what_its_hash_ids_share():
    rows = [TraceRequest(0, 0.0, 20, 4, (5, 6, 7)), TraceRequest(1, 0.5, 20, 4, (5, 6, 8))]
    for vocabulary in (100_000, 260):
        made = Case("t", Trace("t", 8, rows)).requests(vocabulary, 16)
        one, other = (json.loads(request.body)["input_ids"] for request in made)
        assert one[:16] == other[:16] and one[16:] != other[16:] and len(one) == 20
        assert [request.due for request in made] == [0.0, 0.5]


class TestWatch:
    def test_log_lines(self):
        assert read_lines(LOG, 10.0, 13.0) == [
            Line(11.0, False, 2, 0.99), Line(12.0, True, 12, 0.98), Line(13.0, True, 3, 0.5),
        ]  # fmt: skip
        assert read_lines("", 1.0, 2.0) == []

    def test_processor_time_of_one_groups_schedulers_alone(self):
        wait = ["-c", "import time; time.sleep(60)"]
        scheduler = ["sglang::scheduler_TP0", *wait]
        with contextlib.ExitStack() as ended:

            def start(words: list[str], group: int) -> int:
                process = subprocess.Popen(words, executable=sys.executable, process_group=group)
                ended.callback(process.wait)
                ended.callback(process.kill)
                return process.pid

            one = start(scheduler, 0)
            start(["sglang::detokenizer", *wait], one)
            other = start(scheduler, 0)
            deadline = time.monotonic() + 30
            while not (scheduler_cpu(one) and scheduler_cpu(other)):
                assert time.monotonic() < deadline
            assert list(scheduler_cpu(one)) == [one] and list(scheduler_cpu(other)) == [other]


def watched(lines=(), cpu=None, retractions=0):
    """What a ``Watch`` has in the end."""
    return SimpleNamespace(lines=list(lines), scheduler_seconds=cpu, retractions=retractions, fell_back=False)


class TestFigures:
    LINES = read_lines(LOG, 0.0, 3.0)

    def run(self, *streams, lines=LINES, cpu=0.5):
        return summarize("a", Driven(list(streams), 6.0, 0.2, False), watched(lines, cpu, 3))

    def test_by_hand(self):
        seen = self.run(stream((1.0, 1), (3.0, 11), due=0.5, cached=5), stream((2.0, 1), (5.0, 11)))
        one = seen.summary
        assert one.output_tok_s == pytest.approx(22 / 5) and one.makespan == 5
        assert (one.ttft_mean, one.max_wait, one.e2e_p50) == (1.25, 2.0, 3.75)
        assert one.tbt_mean_ms == pytest.approx(250) and one.tbt_p99_ms == pytest.approx(300)
        assert one.mean_batch == pytest.approx((12 * 2 + 3 * 1) / 3)  # by time
        assert one.kv_mean == pytest.approx((0.98 * 2 + 0.5) / 3) and one.kv_peak == 0.99
        assert (one.cache_hit, one.scheduler_share, one.retractions, one.stops) == (0.25, 0.1, 3, None)
        assert seen.latencies == [2.5, 5.0]

    def test_admission(self):
        before = {"rounds": 4, "admission_seconds": 0.5, "stops": 1, "schedule_policy": "feather"}
        after = {"rounds": 24, "admission_seconds": 0.6, "stops": 3, "schedule_policy": "feather"}
        admission = Admission.between(before, after)
        assert (admission.rounds, admission.stops) == (20, 2) and admission.seconds == pytest.approx(0.1)
        driven = Driven([stream((1.0, 1), (2.0, 11))], 2.0, 0.2, False)
        one = summarize("a", driven, watched(cpu=0.5), None, admission).summary
        assert one.admission_share == pytest.approx(0.05) and one.admission_us == pytest.approx(5000) and one.stops == 2
        one = summarize("a", driven, watched(cpu=0.5), None, Admission(0, 0.0, 0)).summary
        assert (one.admission_share, one.admission_us, one.stops) == (0.0, None, 0)
        assert Admission.between(None, after) is Admission.between(before, None) is None

    def test_what_the_gpu_did(self):
        driven = Driven([stream((1.0, 1), (2.0, 11))], 2.0, 0.2, False)
        clocks = {"samples": 9, "sm_mhz": {"mean": 1720.0, "min": 1260.0}, "watt": {"mean": 690.5, "min": 300.0}}
        gpu = SimpleNamespace(activity={"busy": 99.0, "dram": 21.0}, clocks=clocks)
        one = summarize("a", driven, watched(cpu=0.5), gpu).summary
        assert (one.gpu_busy, one.dram_use, one.sm_ghz, one.watt) == (0.99, 0.21, 1.72, 690.5)

    def test_what_was_not_seen_is_none(self):
        one = self.run(stream((1.0, 1)), lines=[], cpu=None).summary
        assert (one.admission_share, one.admission_us, one.stops) == (None,) * 3
        assert (one.gpu_busy, one.dram_use, one.sm_ghz, one.watt) == (None,) * 4
        assert (one.mean_batch, one.kv_mean, one.kv_peak, one.retractions, one.scheduler_share) == (None,) * 5
        assert one.tbt_mean_ms is None and one.ttft_mean == 1.0

    def test_a_request_that_still_waits_counts_for_the_longest_wait(self):
        one = self.run(stream((1.0, 1), (2.0, 2)), stream(due=1.5, finished=False)).summary
        assert one.max_wait == 4.5 and one.ttft_mean == 1.0

    def test_tokens_of_a_piece_share_its_time(self):
        gaps = token_gaps([stream((1.0, 1), (3.0, 5), (3.5, 5), (4.0, 6)), stream()])
        assert gaps.tolist() == [0.5, 0.5, 0.5, 0.5, 0.5]

    def test_steps_before_the_beginning_are_left_out(self):
        assert [step.rows for step in decode_steps(self.LINES, 2.5)] == [3]

    def test_rounds_are_averaged(self):
        first, second = RunSummary("a", 4, 10.0, max_wait=1.0, cache_hit=0.5), RunSummary("a", 4, 20.0, max_wait=3.0)
        both = together([first, second])
        assert (both.output_tok_s, both.max_wait, both.cache_hit, both.requests) == (15.0, 3.0, None, 4)

    def test_what_a_reader_must_know(self):
        counted = {"requests": 4, "failed": 1, "unfinished": 2, "errors": ["gone"]}
        record = {"name": "a", "round": 1, "counted": counted, "fell_back": True, "client_cpu": 0.9, "steps": []}
        record["summary"] = {"output_tok_s": 10.0}
        lines = notes([record, record | {"round": 2}, {"name": "b", "round": 1, "error": "did not start"}])
        assert len(lines) == 12 and lines[-1] == "output tok/s by round: a 10, 10"
        assert "b (round 1): not measured: did not start" in lines
        assert [word in lines[i] for i, word in enumerate(("fcfs", "1 of 4", "2 requests", "90%", "0 lines"))] == [
            True
        ] * 5


class TestComparison:
    def comparison(self, model, *flags):
        args = arguments("--model", str(model), "--out", str(model / "out"), *flags)
        rows = [TraceRequest(0, 0.0, 20, 4, (5,))]
        chosen = ab.configurations(args, ["fcfs", "lpm"])
        console = Console(record=True, width=100, file=open(os.devnull, "w"))
        return comparison(args, Trace("t", 20, rows), 300, chosen, model / "r.json", console)

    def test_results_come_as_they_are_measured_and_name_what_is_missing(self, model, monkeypatch):
        one = self.comparison(model, "--repeat", "2")
        runs = []

        def measured(configuration, case, result):
            result.server["log"] = str(model / "config.json")
            runs.append(configuration.name)
            if runs == ["fcfs", "lpm"]:
                raise ServerFailed("the server ended with status 1")
            if len(runs) == 3:
                monkeypatch.setattr(one.driver, "remaining", lambda: 0.0)
            if len(runs) > 1:
                assert json.loads(one.target.read_text())["order"] == runs[:-1]
            driven = Driven([stream((1.0, 1), (2.0, 5))], 3.0, 0.1, False)
            found = summarize(configuration.name, driven, watched())
            return dataclasses.replace(found, case=case.name, round=result.round)

        monkeypatch.setattr(one.driver, "measured", measured)
        for plot in ("throughput", "batch_size", "latency"):  # test_report.py draws them
            monkeypatch.setattr(rates.plots, plot, lambda *given: None)
        one.driver.run()
        content = json.loads(one.target.read_text())
        assert content["order"] == runs == ["fcfs", "lpm", "lpm"] and content["missing"] == ["fcfs (round 2)"]
        assert content["records"][1]["error"].startswith("the server ended with status 1; its log ends with: ")
        assert one.report([RunSummary("other", 1, 9.0)]) == 1
        text = one.console.export_text()
        assert "one after the other: fcfs lpm lpm\n" in text and "fcfs (round 2)" in text
        assert "lpm (round 1): not measured" in text and "other: by sglang.bench_serving" in text

    def test_nothing_measured_is_one_line(self, model):
        one = self.comparison(model)
        one.records = [{"name": "fcfs", "round": 1, "error": "did not start"}]
        with pytest.raises(FeatherError, match="nothing was measured: did not start"):
            one.report([])


class Started:
    """Stands for a server; notes what is done with it."""

    made: ClassVar[list] = []  # (log's name, what was done)
    refused = 0  # which of all switches is refused

    def __init__(self, configuration, command, log, key, environment):
        log.write_text("Error: an old one\n")
        self.configuration = configuration
        self.command, self.log, self.done = [*command, *configuration.flags], log, []
        self.start_seconds, self.kv_tokens, self.max_running, self.info, self.address = 9.0, 500, 8, {}, None
        assert command[command.index("--admin-api-key") + 1] == key
        self.made.append((log.stem, self.done))

    def wait(self, deadline):
        pass

    def flush(self):
        self.done.append("flush")

    def switch(self, policy, options):
        self.done.append(f"switch {policy}")
        if sum(word.startswith("switch") for _, done in self.made for word in done) == self.refused:
            raise ServerFailed(f"no switch to {policy}: HTTP/1.1 400 Bad Request")

    def printed_bytes(self):
        return self.log.stat().st_size

    def stop(self):
        self.done.append("stop")


class TestServers:
    def run(self, model, monkeypatch, *flags, policies=("fcfs", "lpm")):
        monkeypatch.setattr(Started, "made", [])
        monkeypatch.setattr(driving, "Server", Started)
        args = arguments("--model", str(model), "--out", str(model / "out"), *flags)
        chosen = ab.configurations(args, list(policies))
        console = Console(record=True, width=100, file=open(os.devnull, "w"))
        trace = Trace("t", 20, [TraceRequest(0, 0.0, 20, 4, (5,))])
        one = comparison(args, trace, 300, chosen, model / "r", console)
        monkeypatch.setattr(one.driver, "warm_up", lambda server: server.done.append("warm up"))

        def measure(server, name, *given):
            server.done.append(f"run {name}")
            driven = Driven([stream((1.0, 1), (2.0, 5))], 3.0, 0.1, False)
            return summarize(name, driven, watched()), driven

        monkeypatch.setattr(driving, "measure", measure)
        one.driver.run()
        return one

    def test_each_run_has_a_server_of_its_own(self, model, monkeypatch):
        one = self.run(model, monkeypatch, "--repeat", "2")
        assert [name for name, _ in Started.made] == ["fcfs.1", "lpm.1", "lpm.2", "fcfs.2"]
        assert all(done[0] == "warm up" and done[-1] == "stop" and len(done) == 3 for _, done in Started.made)
        assert one.servers() == "servers were started one after the other"

    def test_one_server_is_switched_between_runs(self, model, monkeypatch):
        one = self.run(model, monkeypatch, "--repeat", "2", "--one-server", policies=("fcfs", "feather"))
        ((name, done),) = Started.made
        rest = ["flush", "switch {}", "warm up", "run {}"]
        switched = [word.format(policy) for policy in ("feather", "feather", "fcfs") for word in rest]
        assert name == "fcfs.1" and done == ["warm up", "run fcfs", *switched, "stop"]
        assert one.servers() == "one server; the policy was switched between runs and the cache emptied"
        assert (
            one.driver.terms.key not in json.dumps(one.records) and "--admin-api-key KEY" in one.records[0]["command"]
        )
        assert [record.get("switched", False) for record in one.records] == [False, True, True, True]

    def test_a_server_goes_on_only_with_its_own_attention_backend(self, model, monkeypatch):
        one = self.run(model, monkeypatch, "--repeat", "2", "--one-server", "--attention", "fa3,pat")
        assert [name for name, _ in Started.made] == ["fa3+fcfs.1", "pat+fcfs.1", "fa3+lpm.2"]
        assert Started.made[1][1].count("switch lpm") == 2 and one.servers().startswith(
            "3 servers, one after the other"
        )
        assert one.order() == [*(names := ["fa3+fcfs", "fa3+lpm", "pat+fcfs", "pat+lpm"]), *names[::-1]]

    def test_a_switch_that_fails_costs_its_own_run(self, model, monkeypatch):
        monkeypatch.setattr(Started, "refused", 2)
        one = self.run(model, monkeypatch, "--repeat", "3", "--one-server")
        failed = [record for record in one.records if "error" in record]
        assert [(record["name"], record["round"]) for record in failed] == [("lpm", 2)]
        assert failed[0]["error"].startswith("no switch to lpm") and "an old one" not in failed[0]["error"]
        assert [name for name, _ in Started.made] == ["fcfs.1", "fcfs.2"]


ROW = {
    "tag": None, "completed": 5, "duration": 2.0, "output_throughput": 50.0, "mean_ttft_ms": 100.0,
    "p99_ttft_ms": 900.0, "mean_itl_ms": 20.0, "mean_e2e_latency_ms": float("nan"),
}  # fmt: skip


class TestBenchServing:
    def read(self, tmp_path, *rows):
        path = tmp_path / "stock.jsonl"
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return read_results(path)

    def test_a_run(self, tmp_path):
        (one,) = self.read(tmp_path, ROW, "")
        assert (one.policy, one.requests, one.output_tok_s, one.makespan) == ("stock", 5, 50.0, 2.0)
        assert (one.ttft_mean, one.ttft_p99, one.tbt_mean_ms) == (0.1, 0.9, 20.0)
        assert (one.e2e_mean, one.cache_hit, one.max_wait, one.mean_batch) == (None,) * 4

    def test_what_its_options_add(self, tmp_path):
        more = {"tag": "x", "ttfts": [0.1, 0.7], "cache_report": {"cache_hit_rate_pct": 25.0}}
        first, second = self.read(tmp_path, ROW | more, ROW | more)
        assert (first.policy, first.max_wait, first.cache_hit, second.policy) == ("x", 0.7, 0.25, "x #2")

    def test_a_number_beyond_all_floats_is_as_good_as_none(self, tmp_path):
        (one,) = self.read(tmp_path, ROW | {"duration": 10**400})
        assert one.makespan is None

    def test_without_streaming_it_saw_no_tokens(self, tmp_path):
        (one,) = self.read(tmp_path, ROW | {"mean_itl_ms": 0.0})
        assert one.ttft_mean is None and one.tbt_mean_ms is None

    @pytest.mark.parametrize(
        "row",
        [
            *("{", "[" * 200_000, "[]", "{}", '{"output_throughput": true}', ""),
            *({**ROW, "ttfts": waits} for waits in ([None], 3, ["a"], [10**400])), {**ROW, "cache_report": [1]},
            {**ROW, "output_throughput": 10**400},
        ],
        ids=range(12),
    )  # fmt: skip
    def test_another_file_is_refused(self, tmp_path, row):
        with pytest.raises(FeatherError, match=r"stock\.jsonl"):
            self.read(tmp_path, row)
