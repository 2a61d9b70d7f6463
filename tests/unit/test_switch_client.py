"""How a client switches the policy of a server: the key, patience while requests are open, and refusals."""

import asyncio
import json
import sys
import threading
from http.server import HTTPServer

import pytest

from answering import Answering
from feather_sglang.compare.server.client import Address, HttpError, call
from feather_sglang.compare.server.config import ServerConfig
from feather_sglang.compare.server.process import Server, ServerFailed
from feather_sglang.scheduling.policy_names import SWITCH_PATH


class Handler(Answering):
    """Answers with the statuses that the test has listed, one after the other."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, self.headers["Authorization"], body))
        self.answer(self.server.statuses.pop(0), b'{"error": "busy"}')

    def do_GET(self):
        self.answer(200, json.dumps({"internal_states": self.server.states}).encode())


@pytest.fixture
def http():
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.seen, server.statuses, server.states = [], [], []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def server(http, tmp_path):
    one = Server(ServerConfig("x", ()), [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", "k")
    one.address = Address(*http.server_address, "k")
    yield one
    one.stop()


def test_the_key_goes_with_every_request(http):
    http.statuses = [200, 200]
    asyncio.run(call(Address(*http.server_address, "secret"), "/a", b"{}"))
    asyncio.run(call(Address(*http.server_address), "/a", b"{}"))
    assert [key for _, key, _ in http.seen] == ["Bearer secret", None]


def test_a_switch_waits_until_the_server_is_idle(http, server):
    http.statuses = [409, 409, 200]
    server.switch("feather", {"max_wait": 9.0})
    assert [path for path, _, _ in http.seen] == [SWITCH_PATH] * 3 and http.seen[0][1] == "Bearer k"
    assert json.loads(http.seen[0][2]) == {"schedule_policy": "feather", "options": {"max_wait": 9.0}}


def test_a_refusal_is_final(http, server):
    http.statuses = [400]
    with pytest.raises(ServerFailed, match=r"no switch to hrrn: HTTP/1\.0 400 Bad Request: "):
        server.switch("hrrn", {})
    http.statuses = [409] * 9
    with pytest.raises(ServerFailed, match="409"):
        server.switch("lpm", {}, timeout=0.15)


def test_an_error_knows_its_status(http):
    http.statuses = [401]
    with pytest.raises(HttpError) as error:
        asyncio.run(call(Address(*http.server_address), "/a", b"{}"))
    assert error.value.status == 401


def test_counters_of_all_replicas(http, server):
    one = {"schedule_policy": "feather", "rounds": 5, "admission_seconds": 0.5, "stops": 2}
    http.states = [{"feather": one}, {"feather": one | {"rounds": 9, "admission_seconds": 0.7}}]
    assert server.counters() == {"schedule_policy": "feather", "rounds": 9, "admission_seconds": 0.7, "stops": 4}
    http.states = [{"feather": one}, {}]
    assert server.counters() is None
