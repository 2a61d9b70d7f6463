"""Refusals end a real server; those of the command line, one by one, are in tests/sglang."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from effort import newest_is_enough
from preloaded import Preloaded
from server.cases import ROOMY
from server.sglang_server import LAUNCH, flags_for, run_to_end, server_environment

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("prepared"), newest_is_enough]


def test_flags_that_a_policy_does_not_support_end_start_up_at_once_with_one_line_and_no_traceback(model: Path) -> None:
    ended = run_to_end([*LAUNCH, *flags_for(model, "--schedule-policy", "feather", "--disable-radix-cache", *ROOMY)])
    lines = ended.stderr.strip().splitlines()
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "feather: error: --schedule-policy feather does not support --disable-radix-cache; drop it" in lines[-1]
    assert "Load weight" not in ended.stderr + ended.stdout


def test_what_only_the_scheduler_can_refuse_ends_the_server_without_a_traceback(
    model: Path, tmp_path: Path, preloaded: Preloaded
) -> None:
    wide = shutil.copytree(model, tmp_path / "wide")
    config = json.loads((wide / "config.json").read_text())
    config |= {"hidden_size": 256, "num_attention_heads": 256, "num_key_value_heads": 1}
    (wide / "config.json").write_text(json.dumps(config))
    flags = flags_for(wide, "--decode-attention-backend", "pat", "--load-format", "dummy", *ROOMY)
    _, errors = preloaded.printed([*LAUNCH[1:], *flags], server_environment(FEATHER_PAT_REFERENCE="1"))
    lines = errors.strip().splitlines()
    assert "Traceback" not in errors
    assert lines[-1].startswith("feather: error: the server cannot start")
    reason = "feather: error: the pat backend can pack no layer of this model (more than 128 query heads to a KV head)"
    assert len([line for line in lines if reason in line]) == 1
