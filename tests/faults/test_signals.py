"""A server that is told to end, or whose scheduler is killed, under load: it ends, its clients hear of it, and the next
one on its port answers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from server.cases import ROOMY
from server.sglang_server import SGLangServer
from server.tiny_model import write_model

FLAGS = ("--schedule-policy", "feather", *ROOMY)
END = 60  # seconds, of a machine that does something else beside
REQUESTS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def members(leader):
    """Processes of the group that a server leads: their ids, and how much memory each has."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "status").read_text()
            if os.getpgid(int(folder.name)) == leader:
                found[int(folder.name)] = int(status.partition("RssAnon:")[2].split()[0])
        except (OSError, IndexError):  # it has ended, or is a zombie, which has no memory
            continue
    return found


class Load:
    """Clients, each of which notes the end of its request: an answer, or an error."""

    def __init__(self, server, tokens):
        self.ends = []
        body = b'{"text": "%s", "sampling_params": {"max_new_tokens": %d, "ignore_eos": true}}'
        self._threads = [
            threading.Thread(target=self._ask, args=(server.url, body % (b"alpha beta " * (5 + i % 3), tokens)))
            for i in range(REQUESTS)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, url, body):
        request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=END) as response:
                response.read()
                self.ends.append("answer")
        except (OSError, urllib.error.HTTPError) as error:
            self.ends.append(type(error).__name__)

    def wait(self):
        for thread in self._threads:
            thread.join(END)
        assert len(self.ends) == REQUESTS, f"{REQUESTS - len(self.ends)} clients still wait"
        return self.ends


def wait_for_end(server):
    deadline = time.monotonic() + END
    while left := members(server._process.pid):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL of the scheduler"])
def test_it_ends_and_the_next_one_serves(model, tmp_path, preloaded, how):
    term = how == "SIGTERM"
    with SGLangServer(model, tmp_path / "first.txt", *FLAGS, start=preloaded) as server:
        load = Load(server, 8 if term else 400)
        server.wait_until_busy()
        if term:  # SGLang serves whom it has accepted, and ends
            os.kill(server._process.pid, signal.SIGTERM)
        else:
            memory = members(server._process.pid)
            scheduler = max(memory, key=memory.__getitem__)  # the model and its KV are there
            os.kill(scheduler, signal.SIGKILL)
        ends = load.wait()
        wait_for_end(server)
        assert ("answer" in ends) if term else set(ends) != {"answer"}
        assert "goes on as fcfs" not in server.text()
    if term:
        return
    with SGLangServer(model, tmp_path / "second.txt", *FLAGS, start=preloaded) as server:
        assert set(Load(server, 8).wait()) == {"answer"}
        server.wait_until_idle()
        server.post("/flush_cache", {})
        assert server.load() == (0, 0, 0)
