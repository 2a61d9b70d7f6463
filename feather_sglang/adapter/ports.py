"""A free TCP port, from the operating system."""

import socket


def free_port() -> int:
    """A port that the operating system gives to nobody else just now.

    SGLang draws ports from the generator that it seeds, so two replays side by side would draw the same.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
