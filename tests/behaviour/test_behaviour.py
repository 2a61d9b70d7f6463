"""Decisions and plans equal those in ``reference.json``, in samples; ``record.py`` checks all.

A change that is meant to decide otherwise records anew: ``python tests/behaviour/record.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from record import FORESTS_AT_ONCE, REFERENCE, STRATEGIES, decisions, decisions_of, plans

KNOWN = json.loads(REFERENCE.read_text())


@pytest.mark.parametrize("workload", ("fits", "priorities", "bounded"))
def test_the_default_policy_decides_as_recorded(workload: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("sglang", reason="SGLang is not installed")
    name = decisions_of(workload, "feather-bandit")
    if name not in KNOWN:
        pytest.skip("nothing is recorded on this SGLang")
    run = request.getfixturevalue("preloaded").run_file
    assert decisions(workload, "feather-bandit", run=run) == KNOWN[name]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forests_are_planned_as_recorded(strategy: str) -> None:
    assert plans(strategy, 0, FORESTS_AT_ONCE) == KNOWN[f"plans {strategy} 0"]
