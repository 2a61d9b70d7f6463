"""How SGLang's own commands and ``sglang.Engine`` take the policies, the flags and the environment variable."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from server.cases import NEWEST, ROOMY
from server.sglang_server import launch_command, server_environment
from server.workload import Answer, Request

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("prepared")]
newest_only = pytest.mark.skipif(metadata.version("sglang") != NEWEST, reason=f"runs on SGLang {NEWEST}")
ENGINE = Path(__file__).with_name("engine_program.py")


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env=server_environment(**environment), timeout=240)


@newest_only
def test_help_lists_the_policies_and_flags() -> None:
    shown = run([sys.executable, "-m", "sglang.launch_server", "--help"])
    assert shown.returncode == 0
    for word in ("feather-heuristic", "feather-order", "--feather-policy-file", "--feather-max-wait", "--feather-seed"):
        assert word in shown.stdout


@newest_only
def test_a_feather_policy_without_the_plugin_ends_start_up(model: Path) -> None:
    ended = run(launch_command(model, "--schedule-policy", "feather", *ROOMY), SGLANG_PLUGINS="none-such")
    assert ended.returncode != 0
    assert "invalid choice: 'feather'" in ended.stderr


@newest_only
def test_a_bad_flag_ends_start_up_with_one_line(model: Path) -> None:
    ended = run(launch_command(model, "--schedule-policy", "feather", "--feather-chunk-size", "0", *ROOMY))
    assert ended.returncode != 0
    assert "argument --feather-chunk-size: '0': expected a whole number of at least 1" in ended.stderr


def test_engine_takes_a_policy_and_its_options(
    model: Path, requests: list[Request], fcfs: list[dict[str, Answer]]
) -> None:
    chosen = [request for request in requests if set(request.body) == {"prompt", "max_tokens", "ignore_eos"}]
    work = json.dumps({"model": str(model), "policy": "feather-bandit", "requests": [r.body for r in chosen]})
    done = run(
        [sys.executable, str(ENGINE), work], FEATHER_OPTIONS='{"chunk_size": 32, "seed": 5}', FEATHER_DEBUG_CHECK="1"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [fcfs[0][request.name].text for request in chosen]
    assert "feather-bandit is active" in done.stderr + done.stdout
