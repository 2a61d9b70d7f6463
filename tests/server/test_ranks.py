"""Two tensor-parallel ranks: each runs its own scheduler, and all must form the same batch."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from server.cases import NEWEST, ROOMY
from server.sglang_server import SGLangServer
from server.workload import Answer, Request, stream_all


@pytest.mark.timeout(600)
@pytest.mark.skipif(metadata.version("sglang") != NEWEST, reason=f"runs on SGLang {NEWEST}")
def test_two_ranks_form_the_same_batches(
    model: Path, logs: Path, requests: list[Request], fcfs: list[dict[str, Answer]]
) -> None:
    # Batches that differ between the ranks hang in the next collective operation, or mix the rows of the answers.
    chosen = requests[:40]
    flags = ("--tp", "2", "--schedule-policy", "feather-bandit", *ROOMY)
    environment = {"FEATHER_DEBUG_CHECK": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with SGLangServer(model, logs / "ranks.txt", *flags, **environment) as server:
        answers = stream_all(server.url, chosen)
        server.wait_until_idle()
        log = server.text()
    assert {name: answer.text for name, answer in answers.items()} == {
        request.name: fcfs[0][request.name].text for request in chosen
    }
    assert log.count("feather-bandit is active") == 2
    assert "Traceback" not in log
