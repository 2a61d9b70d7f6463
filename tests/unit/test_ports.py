"""Ports for servers that have yet to start."""

import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from feather_sglang.adapter import ports
from feather_sglang.adapter.ports import free_port
from feather_sglang.errors import FeatherError


def only(monkeypatch, port):
    """Let no other port be drawn."""
    monkeypatch.setattr(ports, "_PORTS", range(port, port + 1))
    monkeypatch.setattr(ports, "_CLIENT_PORTS", Path("/proc/none"))


def test_no_client_is_given_it_in_the_meantime():
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if first <= 2_024 and last >= 64_535:
        pytest.skip(f"this system gives its clients ports from {first} to {last}")
    assert all(port >= 1_024 and not first <= port <= last for port in (free_port() for _ in range(100)))


@pytest.mark.parametrize(
    ("clients", "lowest", "highest"),
    [
        ("32768\t60999\n", 12_000, 21_999),
        ("16000\t65535\n", 12_000, 15_999),
        ("10000\t65535\n", 1_024, 9_999),
        ("1024\t65535\n", 12_000, 21_999),  # none is left: the usual ones, of which a client may have any
    ],
)
def test_a_system_that_gives_its_clients_other_ports(tmp_path, monkeypatch, clients, lowest, highest):
    monkeypatch.setattr(ports, "_CLIENT_PORTS", tmp_path / "range")
    (tmp_path / "range").write_text(clients)
    assert all(lowest <= free_port() <= highest for _ in range(50))


def test_two_processes_with_one_seed_differ():
    drawn = []
    for _ in range(2):
        random.seed(0)
        drawn.append([free_port() for _ in range(8)])
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "0.0.0.0"])
def test_a_port_in_use_at_any_address_is_passed_over(monkeypatch, address):
    port = free_port()  # none that a client is given once it is free again
    ports._reservations.clear()
    only(monkeypatch, port)
    with socket.create_server((address, port)):
        with pytest.raises(FeatherError, match=f"no free port from {port} to {port}"):
            free_port()
    assert free_port() == port


def test_a_port_that_another_process_drew_is_passed_over_until_it_ends(monkeypatch):
    program = "from feather_sglang.adapter.ports import free_port; print(free_port(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as other:
        port = int(other.stdout.readline())
        only(monkeypatch, port)
        with pytest.raises(FeatherError, match="no free port"):
            free_port()
        other.communicate("\n")
    assert free_port() == port


def test_a_port_is_not_drawn_twice(monkeypatch):
    port = free_port()
    only(monkeypatch, port)
    with pytest.raises(FeatherError, match="no free port"):
        free_port()
