"""The servers that the tests of this folder start: one policy each, in one setting each."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from effort import on_newest
from server.sglang_server import SGLangServer
from server.workload import Answer, Request, stream_all

KEY = "only-the-admin-knows"
ROOMY = ("--max-total-tokens", "8192", "--max-running-requests", "32")
# Estimating one token of output a request admits far too many, so the KV pool runs full and SGLang retracts.
TIGHT = ("--max-total-tokens", "3600", "--max-running-requests", "32")
OVERCOMMIT = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1"}
# Until 0.5.18 SGLang loses the first log probability of a request that it retracts while the request's prefill is in
# flight: it streams the request without a token, but counts one log probability as sent (its pull request 26510).
LOSES_FIRST_LOGPROB = metadata.version("sglang") in ("0.5.17", "0.5.18")
# Decoding as the packed kernel does it, in NumPy.
PAT = ("--decode-attention-backend", "pat", "--enable-metrics")
REFERENCE = {"FEATHER_PAT_REFERENCE": "1"}


@dataclass(frozen=True)
class Case:
    """One server: a policy, and a setting that takes it through another part of a request's life."""

    policy: str
    flags: tuple[str, ...] = ROOMY
    environment: dict[str, str] = field(default_factory=dict)
    serve: bool = False  # start it with `sglang serve`
    retracts: bool = False
    priorities: bool = False
    pat: bool = False
    switches: bool = False
    records: bool = False  # its requests, into `FeatherServer.recorded`


# feather-bandit, which is feather by another name, serves on two ranks and in sglang.Engine; feather-order serves after
# a switch.
_NEWEST = {
    "plain": Case(
        "feather",
        (*ROOMY, "--feather-allow-switch", "--admin-api-key", KEY, "--enable-metrics"),
        switches=True,
        records=True,
    ),
    "chunks-priorities": Case(
        "feather-heuristic",
        (
            *(*ROOMY, *PAT, "--chunked-prefill-size", "256", "--disable-overlap-schedule", "--page-size", "16"),
            "--enable-priority-scheduling",
        ),
        REFERENCE,
        serve=True,
        priorities=True,
        pat=True,
    ),
    "retraction": Case(
        "feather-qlearning", (*TIGHT, *PAT, "--feather-pat-prefill"), OVERCOMMIT | REFERENCE, retracts=True, pat=True
    ),
}
# What differs in an older release is where the policies and pat are hooked in: one server of both, with a full pool.
_OLDER = {
    "pat-retraction": Case("feather", (*TIGHT, *PAT), OVERCOMMIT | REFERENCE, retracts=True, pat=True),
}
CASES = _NEWEST if on_newest() else _OLDER


@dataclass
class FeatherServer:
    """A running server and the case that it was started for."""

    case: Case
    server: SGLangServer
    recorded: Path

    def answers(self, requests: list[Request], **options: Any) -> dict[str, Answer]:
        """Stream all requests, with three levels of priority where the server knows priorities."""
        if self.case.priorities:
            requests = [
                Request(request.name, {**request.body, "priority": 20 * (index % 3)})
                for index, request in enumerate(requests)
            ]
        return stream_all(self.server.url, requests, **options)
