"""The driver of cases without servers: the order of starts, the requests of each, and the cost of a failure."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import server_driver as bench
from server_cases import Misfit
from server_names import parse_server

from feather_sglang.compare.server import driver as driving
from feather_sglang.compare.server.cases import parse_case
from feather_sglang.compare.server.client import Driven
from feather_sglang.compare.server.driver import Driver, Terms
from feather_sglang.compare.server.process import ServerFailed
from feather_sglang.compare.server.result import summarize
from feather_sglang.compare.server.stats import Stream

ROOT = Path(__file__).parents[2]
CASES = [parse_case(text) for text in ("open:1,40,2,50,4", "open:2,40,2,50,4")]


class World:
    """Servers that note what is done with them, and a listener that notes what it is told."""

    def __init__(self):
        self.did, self.told, self.problems = [], [], {}

    def server(self, configuration, command, log, key, environment):
        """Stands for ``Server``."""
        return Server(self, configuration, command, key)

    def happens(self, *what):
        self.did.append(" ".join(what))
        if problem := self.problems.pop(self.did[-1], None):
            raise problem

    def starting(self, configuration):
        self.told.append(f"starting {configuration.name}")

    def up(self, server, answers):
        self.told.append(f"{server.configuration.name} is up")

    def left_out(self, server, reason):
        self.told.append(f"{server.configuration.name} is left out: {reason}")


class Server:
    """Notes what is done with it."""

    def __init__(self, world, configuration, command, key):
        self.world, self.configuration, self.name = world, configuration, configuration.name
        self.command, self.start_seconds, self.kv_tokens, self.max_running, self.address = command, 1.0, 9, 9, None
        world.happens("start", self.name, *configuration.flags)

    def wait(self, deadline):
        self.world.happens("wait", self.name)

    def flush(self):
        self.world.happens("flush", self.name)

    def printed_bytes(self):
        return 0

    def printed(self, offset):
        return ""

    def switch(self, policy, options):
        self.world.happens("switch", self.name, policy, *(f"{key}={value}" for key, value in options.items()))

    def stop(self):
        self.world.happens("stop", self.name)


@pytest.fixture
def world(monkeypatch):
    made = World()

    def measure(server, name, case, *given):
        made.happens("run", name, case.name[:6])
        driven = Driven([Stream(0.0, 10, 0.0, [(1.0, 1), (2.0, 5)], 0, True)], 3.0, 0.1, False)
        return summarize(
            name, driven, SimpleNamespace(lines=[], scheduler_seconds=None, retractions=0, fell_back=False)
        ), driven

    monkeypatch.setattr(driving, "Server", made.server)
    monkeypatch.setattr(driving, "measure", measure)
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(Driver, "ask_probes", lambda self, server: made.happens("probe", server.name) or [])
    return made


def driver(world, tmp_path, *servers, check=lambda case, server: None, **terms):
    configurations = [parse_server(server) for server in servers]
    told = {name: getattr(world, name) for name in ("starting", "up", "left_out")}
    found = bench.BenchTerms([], 300, tmp_path, check, **told, **terms)
    return bench.BenchDriver(configurations, CASES, found)


def test_servers_that_are_up_together_take_turns_case_by_case(world, tmp_path):
    results = driver(world, tmp_path, "a=", "b=", "c=", together=2).run()
    begun = ["start a", "start b", "wait a", "probe a", "wait b", "probe b"]
    each = ["flush a", "run a {}", "flush b", "run b {}"]
    first = [word.format(case) for case in ("open:1", "open:2") for word in each]
    assert world.did[: len(begun) + len(first)] == begun + first
    assert sorted(world.did[len(begun) + len(first) :][:2]) == ["stop a", "stop b"]
    assert world.did[-7:] == ["wait c", "probe c", "flush c", "run c open:1", "flush c", "run c open:2", "stop c"]
    assert [(one.name, one.case, one.round) for one in results] == [
        (name, case.name, 1) for names in ("ab", "c") for case in CASES for name in names
    ]


def test_a_server_stays_up_over_the_turn_of_a_round(world, tmp_path):
    driver(world, tmp_path, "a=", "b=", rounds=2).run()
    assert [word for word in world.did if word.split()[0] in ("start", "stop")] == [
        *("start a", "stop a", "start b", "stop b"),
        *("start a", "stop a"),
    ]


def test_a_switched_server_starts_without_what_a_switch_sets(world, tmp_path):
    paced = "paced=--attention-backend fa3 --schedule-policy feather --feather-pace 0.1"
    driver(world, tmp_path, "fa3+lpm", paced, switching=True, key="k").run()
    assert [word for word in world.did if not word.startswith(("wait", "probe"))] == [
        "start fa3+lpm --attention-backend fa3",
        *("flush fa3+lpm", "switch fa3+lpm lpm", "run fa3+lpm open:1"),
        *("flush fa3+lpm", "switch fa3+lpm feather pace=0.1", "run paced open:1"),
        *("flush fa3+lpm", "switch fa3+lpm lpm", "run fa3+lpm open:2"),
        *("flush fa3+lpm", "switch fa3+lpm feather pace=0.1", "run paced open:2"),
        "stop fa3+lpm",
    ]


@pytest.mark.parametrize(("where", "runs"), [("wait a", 0), ("flush a", 1), ("run a open:1", 1)])
def test_a_server_that_fails_is_left_out(world, tmp_path, where, runs):
    world.problems = {where: ServerFailed("gone")}
    one = driver(world, tmp_path, "a=", "b=", rounds=2)
    results = one.run()
    assert [result.error for result in results if result.name == "a"] == ["gone"] * runs
    assert [result.error for result in results if result.name == "b"] == [None] * 4
    assert world.told.count("a is left out: gone") == 1 == world.told.count("starting a")
    assert len(one.missing()) == 4 - runs and world.did.count("stop a") == 1


def test_a_request_without_an_answer_and_a_case_that_does_not_fit_cost_their_run_alone(world, tmp_path):
    def check(case, server):
        if case is CASES[1]:
            raise Misfit("does not fit")

    world.problems = {"run a open:1": TimeoutError()}
    results = driver(world, tmp_path, "a=", check=check, rounds=2).run()
    assert [one.error for one in results] == [
        *("the server did not answer in time", "does not fit"),
        *(None, "does not fit"),
    ]
    assert "a is left out" not in " ".join(world.told)


def test_afresh_a_failure_costs_its_run_alone(world, tmp_path):
    world.problems = {"wait a": ServerFailed("not up")}
    terms = Terms([], 300, tmp_path, lambda case, server: None, rounds=2)
    one = Driver([parse_server("a="), parse_server("b=")], CASES[:1], terms)
    results = one.run()
    assert [(result.name, result.error) for result in results] == [
        ("a", "not up"),
        ("b", None),
        ("b", None),
        ("a", None),
    ]
    assert world.did.count("start a") == world.did.count("stop a") == 2 and not one.missing()


def test_what_no_time_is_left_for_is_missing(world, tmp_path):
    one = driver(world, tmp_path, "a=", "b=", time_limit=driving.LEAST_RUN)
    assert one.run() == [] and world.did == []
    assert [(number, server.name, case.name) for number, server, case in one.missing()] == [
        (1, name, case.name) for name in "ab" for case in CASES
    ]


@pytest.mark.parametrize("flags", [[], ["--one-server"]], ids=["kept", "switched"])
def test_the_benchmark_from_its_command_line_to_its_file(tmp_path, flags):
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    paths = [ROOT / "tests/data/fake_server", ROOT, ROOT / "kernels"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "FAKE_PID": str(tmp_path / "pid")}
    command = [sys.executable, str(ROOT / "benchmarks/bench_server.py"), "--model", str(tmp_path), *flags]
    command += ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png"), "--logs", str(tmp_path)]
    command += ["--server", "fa3", "--server", "fa3+feather", "--case", "open:2,40,20,200,8", "decode:4,2,40,8"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    content = json.loads((tmp_path / "r.json").read_text())
    assert (done.returncode, content["missing"]) == (0, []), done.stdout + done.stderr
    assert content["order"] == (["fa3"] if flags else ["fa3", "fa3+feather"])
    assert {(one["server"], one["case"], one["overall"]["finished"]) for one in content["records"]} == {
        (name, case, count)
        for name in ("fa3", "fa3+feather")
        for case, count in (("open:2,40,20,200,8", 20), ("decode:4,2,40,8", 4))
    }
    key = "KEY" if flags else None
    assert ("--admin-api-key KEY" in content["servers"]["fa3"]["command"]) == (key is not None)
    assert "--disable-prefill-cuda-graph" not in content["servers"]["fa3"]["command"]
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    again = [sys.executable, str(ROOT / "benchmarks/bench_server.py"), "--from", str(tmp_path / "r.json")]
    shown = subprocess.run(again, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0 and shown.stdout.strip() in done.stdout
