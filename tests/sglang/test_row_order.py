"""Prefix row order in the real scheduler: every per-row state moves with its request."""

from itertools import pairwise

import pytest
from harness import Server


@pytest.fixture
def run(tmp_path):
    """Serve one workload under a policy; returns what each request got, and the scheduler's figures."""

    def run(policy, **overrides):
        server = Server(tmp_path, policy, **overrides)
        rows = []
        for i in range(18):
            group = (i * 7) % 3
            options = {"max_new_tokens": 6 + i % 5}
            if i % 2:
                options["frequency_penalty"] = 0.3 + i / 20
            if i % 3 == 0:
                options["presence_penalty"] = 0.2 + i / 30
            if i % 4 == 1:
                options["logprobs"] = 1 + i % 3
            if i % 5 == 0:
                options["logit_bias"] = {str(40 + i): 3.0}
            server.submit(f"r{i:02}", [3 + group] * 120 + [30 + i] * 6, **options)
            server.step()  # arrivals between steps: the batch grows out of order
        while True:
            batch = server.step()
            if batch is None:
                break
            if batch.forward_mode.is_decode():
                rows.append([int(req.rid[1:]) * 7 % 3 for req in batch.reqs])
        got = {
            rid: (list(req.output_ids), req.logprob.output_token_logprobs_val if hasattr(req, "logprob") else None)
            for rid, req in server.requests.items()
        }
        tops = {
            rid: [len(top) for top in (getattr(req, "output_top_logprobs_idx", None) or [])]
            for rid, req in server.requests.items()
        }
        server.assert_nothing_left()
        figures = server.feather.stats() if hasattr(server.scheduler, "feather") else None
        server.close()
        return got, tops, rows, figures

    return run


def runs(groups):
    """Number of maximal runs of equal neighbours."""
    return sum(a != b for a, b in pairwise(groups)) + 1


def test_outputs_are_those_of_arrival_order_and_rows_are_grouped(run):
    expected, expected_tops, arrival_rows, _ = run("fcfs")
    assert any(runs(groups) > len(set(groups)) for groups in arrival_rows)  # fcfs leaves them mixed
    got, tops, rows, figures = run("feather-order")
    assert {rid: tokens for rid, (tokens, _) in got.items()} == {rid: tokens for rid, (tokens, _) in expected.items()}
    assert tops == expected_tops
    assert rows and all(runs(groups) == len(set(groups)) for groups in rows)
    assert figures["permutations"] > 0


def test_a_batch_is_permuted_only_when_its_composition_changed(run):
    _, _, rows, figures = run("feather-order")
    changes = sum(len(a) != len(b) for a, b in pairwise(rows)) + 18
    assert figures["permutations"] <= changes < len(rows) + 18
    assert figures["permutation_seconds"] < 0.5


def test_off_leaves_arrival_order(run, monkeypatch):
    monkeypatch.setenv("FEATHER_OPTIONS", '{"row_order": false}')
    _, _, rows, figures = run("feather-order")
    assert figures["permutations"] == 0
    assert any(runs(groups) > len(set(groups)) for groups in rows)
