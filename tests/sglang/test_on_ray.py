"""Replays on a real Ray cluster of two nodes, one of which is killed on the way."""

import json
import os
import pickle
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from effort import newest_is_enough
from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.cli import main
from feather_sglang.errors import FeatherError
from feather_sglang.replay import on_ray, processes
from feather_sglang.replay.jobs import Job, replay
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.workloads import shared_prefix

pytestmark = newest_is_enough
PATIENCE = 120  # seconds in which a slow machine has imported SGLang
POLICIES = ("fcfs", "lpm", "feather")
SMALL = ["--requests", "60", "--rate", "50", "--prefix-tokens", "400", "--output-tokens", "12", "--groups", "3"]


def marked(mark):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes() and (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one CPU each; its processes have a mark in their environment."""
    from ray.cluster_utils import Cluster

    mark, patch = secrets.token_hex(16), pytest.MonkeyPatch()
    patch.setenv("RAY_TEST_MARK", mark)
    for folder in Path(__file__).parents[:2]:  # where its workers find this file and what it imports
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.mark = mark
    made.second = made.add_node(num_cpus=1)
    yield made
    made.shutdown()
    patch.undo()


def _slow_at_first(folder, job, tell):
    """A replay whose first try on each job waits to be killed with its node."""
    tries = folder / f"{job.name}.tries"
    with tries.open("a") as stream:
        stream.write(f"{os.getpid()}\n")
    if len(tries.read_text().splitlines()) == 1:
        tell(1)
        time.sleep(3)
    return replay(job, tell)


def jobs():
    model = StepTimeModel(load_profile("h200"), load_model("qwen3-8b"))
    trace = shared_prefix(requests=60, groups=3, prefix_tokens=400, output_tokens=12, rate=50.0)
    options = {**FeatherOptions().of_policy(), "policy_file": None}
    return [Job(name, trace, model, {"kv_tokens": 100_000}, options) for name in POLICIES]


def test_a_node_that_dies_costs_its_tasks_only_and_results_are_the_same(cluster, tmp_path):
    local = processes.run_jobs(jobs(), 2, tmp_path, Console(quiet=True))
    logs = tmp_path / "logs"
    logs.mkdir()
    begun, killed, on_cluster = time.monotonic(), False, {}
    work = on_ray.partial(_slow_at_first, tmp_path)
    for event in on_ray.executor_of(cluster.address)(jobs(), 2, logs, work):
        assert event.kind in ("start", "progress", "done"), event
        if event.kind == "done":
            on_cluster[event.job] = event.value
        started = len(list(tmp_path.glob("*.tries")))
        if started == 2 and not killed:
            cluster.remove_node(cluster.second, allow_graceful=False)
            killed = True
    assert killed and time.monotonic() - begun < 2 * PATIENCE
    tries = [len(file.read_text().splitlines()) for file in tmp_path.glob("*.tries")]
    assert len(tries) == len(POLICIES) < sum(tries)  # somebody was tried again
    assert {name: pickle.dumps(on_cluster[name]) for name in POLICIES} == {
        name: pickle.dumps(result) for name, result in local.items()
    }
    assert all((logs / f"{name}.log").exists() for name in POLICIES)


def test_a_comparison_says_the_same_as_on_this_machine(cluster, tmp_path):
    flags = ["ab", *SMALL, "--policies", "feather"]
    assert main([*flags, "--out", str(tmp_path / "local")]) == 0
    assert main([*flags, "--ray", cluster.address, "--out", str(tmp_path / "ray")]) == 0
    local, ray = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("local", "ray"))
    del local["command"], ray["command"]
    assert json.dumps(local) == json.dumps(ray)


def test_ctrl_c_ends_the_command_and_its_tasks(cluster, tmp_path):
    command = [sys.executable, "-m", "feather_sglang.cli", "ab", "--policies", "fcfs,lpm", "--requests", "20000"]
    command += ["--output-tokens", "400", "--ray", cluster.address, "--out", str(tmp_path / "out")]
    before = set(marked(cluster.mark))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE
    log = tmp_path / "out" / "fcfs.log"
    while len(set(marked(cluster.mark)) - before) < 5:  # the command, a worker, who forks there, and its replay
        assert process.poll() is None and time.monotonic() < deadline, log.read_text() if log.exists() else ""
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE)[1] == "feather: interrupted\n"
    assert process.returncode == 130
    deadline = time.monotonic() + 20
    while [pid for pid in set(marked(cluster.mark)) - before if b"forkserver" in cmdline(pid)]:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def cmdline(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_without_a_cluster_or_without_ray_it_is_one_line(monkeypatch, tmp_path):
    run = on_ray.executor_of("127.0.0.1:1")
    with pytest.raises(FeatherError, match=r"^--ray 127\.0\.0\.1:1: no such cluster: .*"):
        list(run([], 1, tmp_path, replay))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FeatherError, match=r"Ray is not installed: pip install 'feather-sglang\[ray\]'"):
        on_ray.executor_of("auto")
