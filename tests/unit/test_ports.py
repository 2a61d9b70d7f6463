"""Ports for servers that have yet to start."""

import random
import socket
from pathlib import Path

import pytest

from feather_sglang.adapter import ports
from feather_sglang.adapter.ports import free_port
from feather_sglang.errors import FeatherError


def test_no_client_is_given_it_in_the_meantime():
    first, _last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if first <= 22_000:
        pytest.skip(f"this system gives its clients ports from {first} on")
    assert all(1_024 <= free_port() < first for _ in range(100))


def test_two_processes_with_one_seed_differ():
    drawn = []
    for _ in range(2):
        random.seed(0)
        drawn.append([free_port() for _ in range(8)])
    assert drawn[0] != drawn[1]


def test_a_port_in_use_is_passed_over(monkeypatch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
        port = server.getsockname()[1]
        monkeypatch.setattr(ports, "_PORTS", range(port, port + 1))
        with pytest.raises(FeatherError, match=f"no free port from {port} to {port}"):
            free_port()
    assert free_port() == port
