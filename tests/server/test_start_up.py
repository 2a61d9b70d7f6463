"""How SGLang's own commands take the policies and the flags, and refuse them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from server.cases import ROOMY, newest_only
from server.sglang_server import launch_command, run_to_end

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("prepared"), newest_only]


def test_help_lists_the_policies_and_flags() -> None:
    shown = run_to_end([sys.executable, "-m", "sglang.launch_server", "--help"])
    assert shown.returncode == 0
    for word in ("feather-heuristic", "feather-order", "--feather-policy-file", "--feather-max-wait", "--feather-seed"):
        assert word in shown.stdout


def test_a_feather_policy_without_the_plugin_ends_start_up(model: Path) -> None:
    ended = run_to_end(launch_command(model, "--schedule-policy", "feather", *ROOMY), SGLANG_PLUGINS="none-such")
    assert ended.returncode != 0
    assert "invalid choice: 'feather'" in ended.stderr


def test_a_bad_flag_ends_start_up_with_one_line(model: Path) -> None:
    ended = run_to_end(launch_command(model, "--schedule-policy", "feather", "--feather-chunk-size", "0", *ROOMY))
    assert ended.returncode != 0
    assert "argument --feather-chunk-size: '0': expected a whole number of at least 1" in ended.stderr


def test_pat_without_a_gpu_ends_start_up_with_one_line(model: Path) -> None:
    ended = run_to_end(launch_command(model, "--decode-attention-backend", "pat", *ROOMY))
    assert ended.returncode != 0
    assert "feather: error: the pat backend needs an NVIDIA GPU, this server runs on the CPU" in ended.stderr
    assert "adapter/pat" not in ended.stderr  # no traceback of ours
