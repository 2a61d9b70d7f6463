"""A kernel that does not load, and one that fails while it serves, end the server with one line.

A CPU has no kernel to launch: the reference in its place is what fails. Plans that fail are in test_under_load.py.
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.test_signals import REQUESTS, Load, wait_for_end
from feather_kernels import PlanError, build
from feather_kernels.reference_engine import ReferenceEngine
from feather_sglang.adapter import failures
from feather_sglang.adapter.attention.engines import Engines
from server.cases import PAT, REFERENCE, ROOMY
from server.sglang_server import SGLangServer
from server.tiny_model import write_model

BROKEN = (sys.executable, str(Path(__file__).with_name("broken_kernel_server.py")))
PARENT = 4711


@pytest.fixture
def in_a_server(monkeypatch):
    """This process is a server's scheduler; what is sent to which process."""
    sent = []
    monkeypatch.setenv("FEATHER_PAT_REFERENCE", "1")
    monkeypatch.setattr(
        failures, "multiprocessing", SimpleNamespace(parent_process=lambda: SimpleNamespace(pid=PARENT))
    )
    monkeypatch.setattr(failures.os, "kill", lambda *args: sent.append(args))
    return sent


def lines(caplog):
    """What feather said of its end; none of it has a traceback."""
    found = [record for record in caplog.records if record.name == failures.__name__ and record.levelno > logging.DEBUG]
    assert not any(record.exc_info for record in found)
    return [record.getMessage() for record in found]


@pytest.mark.parametrize("what", ["the planner", "a kernel"])
def test_a_library_that_does_not_load_ends_the_start(server, in_a_server, monkeypatch, tmp_path, caplog, what):
    kernel = build.Configuration("float16", 64, 90)
    damaged = tmp_path / (build.planner_file() if what == "the planner" else kernel.prebuilt)
    damaged.write_bytes(b"\x7fELF and nothing that follows")
    if what == "a kernel":
        build.load_planner()
        monkeypatch.setattr(ReferenceEngine, "load", lambda *_: build.load_kernel("float16", 64, 90))
    else:
        build.load_planner.cache_clear()
    monkeypatch.setenv("FEATHER_KERNELS_PREBUILT", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        server(decode_attention_backend="pat")
    (line,) = lines(caplog)
    assert ended.value.code == failures.REFUSED and not in_a_server
    assert f"error: the pat backend cannot start: cannot load {damaged}: " in line and "\n" not in line


@pytest.mark.parametrize("what", ["a launch", "every plan"])
def test_what_fails_in_a_step_ends_the_scheduler(server, in_a_server, monkeypatch, caplog, what):
    one = server(decode_attention_backend="pat")
    place, name, error, says = {
        "a launch": (ReferenceEngine, "run", RuntimeError("no room\nat"), "failed in layer 0: no room"),
        "every plan": (Engines, "plan", PlanError("no room"), "without sharing either: no room"),
    }[what]

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(place, name, fail)
    one.submit("a", [2] * 100, max_new_tokens=4)
    with pytest.raises(SystemExit) as ended:
        one.drain()
    (line,) = lines(caplog)
    assert ended.value.code == failures.REFUSED and in_a_server == [(PARENT, signal.SIGQUIT)]
    assert says in line and "\n" not in line


@pytest.mark.timeout(400)
def test_a_kernel_that_fails_under_load_ends_the_server_with_one_line(tmp_path):
    model = write_model(tmp_path / "model")
    flags = ("--schedule-policy", "feather", *PAT, *ROOMY)
    with SGLangServer(model, tmp_path / "server.txt", *flags, start=BROKEN, **REFERENCE) as server:
        ends = Load(server, 40).wait()
        assert len(ends) == REQUESTS and "answer" not in ends
        wait_for_end(server)
        text = server.text()
    says = "feather: error: the pat backend's kernel failed in layer "
    assert text.count(says) == 1 and "an illegal memory access was encountered; the server ends" in text
    assert "Traceback" not in text and "goes on as fcfs" not in text
