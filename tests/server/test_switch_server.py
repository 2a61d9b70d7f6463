"""A real server whose schedule policy is changed while it runs, by whoever knows its admin key."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from feather_sglang.policy_names import SWITCH_PATH
from server.cases import ROOMY, newest_only
from server.sglang_server import SGLangServer
from server.workload import Request, stream_all

pytestmark = [pytest.mark.timeout(600), newest_only]
KEY = "only-the-admin-knows"


def post(server: SGLangServer, path: str, body: dict[str, Any], key: str | None = KEY) -> tuple[int, Any]:
    """Status and decoded answer of a request with a key, or with none."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status), json.loads(response.read())
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.loads(refusal.read())


def state(server: SGLangServer) -> dict[str, Any]:
    (found,) = server.get("/server_info")["internal_states"]
    return {"reported": found["schedule_policy"], **found["feather"]}


def test_a_policy_is_switched_under_the_admin_key_alone(model: Path, logs: Path, requests: list[Request]) -> None:
    flags = ("--schedule-policy", "fcfs", *ROOMY, "--feather-allow-switch", "--admin-api-key", KEY)
    requests = [request for request in requests if "regex" not in request.body][:20]
    message = {"server_args": {'{"schedule_policy": "lpm"}': 1}}  # what the endpoint sends to the schedulers
    with SGLangServer(model, logs / "switch.txt", *flags) as server:
        for key in (None, "guessed"):
            assert post(server, SWITCH_PATH, {"schedule_policy": "lpm"}, key)[0] == 401
            assert post(server, "/set_internal_state", message, key)[0] == 401
        texts = {}
        for name in ("fcfs", "lpm", "feather", "fcfs"):
            server.wait_until_idle()
            assert post(server, SWITCH_PATH, {"schedule_policy": name}) == (200, {"schedule_policy": name})
            before = state(server)
            assert before["schedule_policy"] == before["reported"] == name and before["rounds"] == 0
            answers = stream_all(server.url, requests)
            texts[name] = {request: answer.text for request, answer in answers.items()}
            assert texts[name] == texts["fcfs"]
            after = state(server)
            assert after["rounds"] > 0 and after["admission_seconds"] > 0

        thread = threading.Thread(target=stream_all, args=(server.url, requests))
        thread.start()
        server.wait_until_busy()
        status, answer = post(server, SWITCH_PATH, {"schedule_policy": "lpm"})
        thread.join(60)
        assert status == 409 and "running or waiting: switch when idle" in answer["error"]
        assert state(server)["schedule_policy"] == "fcfs"
        status, answer = post(server, SWITCH_PATH, {"schedule_policy": "fifo"})
        assert status == 400 and answer["error"].startswith("unknown schedule policy 'fifo'")
        assert "Traceback" not in server.text()
