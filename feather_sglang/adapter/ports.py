"""A free TCP port for a server that has yet to start."""

import contextlib
import random
import socket

from feather_sglang.errors import FeatherError

# Below the ports that Linux gives to clients, and below those that SGLang draws for itself.
_PORTS = range(12_000, 22_000)


def free_port() -> int:
    """A port on which nobody listens, and which no client is given before the server has it, seconds later.

    Drawn from the operating system's generator: SGLang seeds Python's, so two replays side by side would draw the same.
    """
    draw = random.SystemRandom()
    for _ in range(1_000):
        port = draw.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise FeatherError(f"no free port from {_PORTS.start} to {_PORTS.stop - 1}: end what holds them")
