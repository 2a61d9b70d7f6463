"""A refusal in the scheduler's process ends the server; those of the command line are in tests/sglang."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.cases import ROOMY, newest_only
from server.sglang_server import LAUNCH, flags_for, run_to_end

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("prepared"), newest_only]


def test_pat_without_a_gpu_ends_start_up_with_one_line(model: Path) -> None:
    ended = run_to_end([*LAUNCH, *flags_for(model, "--decode-attention-backend", "pat", *ROOMY)])
    assert ended.returncode != 0
    assert "feather: error: the pat backend needs an NVIDIA GPU, this server runs on the CPU" in ended.stderr
    assert "adapter/pat" not in ended.stderr  # no traceback of ours


def test_flags_that_a_policy_does_not_support_end_start_up_at_once_with_one_line_and_no_traceback(model: Path) -> None:
    ended = run_to_end([*LAUNCH, *flags_for(model, "--schedule-policy", "feather", "--disable-radix-cache", *ROOMY)])
    lines = ended.stderr.strip().splitlines()
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "feather: error: --schedule-policy feather does not support --disable-radix-cache; drop it" in lines[-1]
    assert "Load weight" not in ended.stderr + ended.stdout
