"""Short forms of ``dev.py soak`` and ``dev.py ranks``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import ranks, soak
from server.sglang_server import server_environment


@pytest.mark.timeout(400)
def test_requests_come_and_go_and_are_aborted(tmp_path, preloaded):
    """Without adapters: for those a server needs a start of its own, as SGLang pins memory for them."""
    found, wrong = soak.soak(tmp_path, tmp_path / "server.txt", 150, start=preloaded, adapters=False)
    assert wrong == []
    assert found.aborted > 20 and found.complete > 90


@pytest.mark.timeout(400)
def test_two_ranks_form_the_same_batches(preloaded):
    paths = os.pathsep.join(sys.path[:20])
    command = [str(Path(ranks.__file__)), "--rounds", "120"]
    printed, errors = preloaded.run_file(command, server_environment(PYTHONPATH=paths))
    assert "120 rounds of two ranks, the same" in printed, errors[-3000:]
