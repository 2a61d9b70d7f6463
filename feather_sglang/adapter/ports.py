"""A free TCP port for a server that has yet to start."""

import contextlib
import errno
import random
import socket
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from feather_sglang.errors import FeatherError

# Below the ports that Linux gives to clients by default, and below those that SGLang draws for itself.
_PORTS = range(12_000, 22_000)
_CLIENT_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Kept open, so that no other process of ours is given the port before its server listens, half a minute later; the
# oldest go when it has long been up.
_reservations: deque[socket.socket] = deque(maxlen=64)


def free_port() -> int:
    """A port on which nobody listens, which no client is given, and which no other process of ours draws meanwhile.

    Drawn from the operating system's generator: SGLang seeds Python's, so two replays side by side would draw the same.
    """
    draw = random.SystemRandom()
    ports = _candidates()
    for _ in range(1_000):
        port = draw.choice(ports)
        if (reservation := _reserve(port)) is None:
            continue
        if not _in_use(port):
            _reservations.append(reservation)
            return port
        reservation.close()
    raise FeatherError(f"no free port from {ports[0]} to {ports[-1]}: end the processes that use them")


def _candidates() -> Sequence[int]:
    """Ports that this system never gives to a client, where it leaves enough of them."""
    try:
        first, last = map(int, _CLIENT_PORTS.read_text().split())
    except OSError:
        return _PORTS
    for choice in (_PORTS, range(1_024, 65_536)):
        outside = [port for port in choice if not first <= port <= last]
        if len(outside) >= min(1_000, len(choice)):
            return outside
    return _PORTS


def _reserve(port: int) -> socket.socket | None:
    """Hold the port's name among this network namespace's abstract sockets; the kernel frees it with the process."""
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind(f"\0feather-sglang-port-{port}")
    except OSError:
        reservation.close()
        return None
    return reservation


def _in_use(port: int) -> bool:
    """Whether a server could not listen on this port at every address, as torch's store does."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with contextlib.closing(socket.create_server(("", port), family=family)):
                pass
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
    return False
