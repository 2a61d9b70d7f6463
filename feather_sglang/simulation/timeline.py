"""The clocks of a replayed server: its front end, its scheduler's thread and its GPU, each one thing at a time."""

from __future__ import annotations

from feather_sglang.simulation.host_time import HostTime


class Timeline:
    """Virtual time, in seconds since the trace began.

    The GPU computes steps in the order of their launches while the scheduler goes on; who needs a step's result waits
    for it.

    Attributes
    ----------
    now : the scheduler's clock.
    gpu : when the GPU has computed all that was launched.
    gpu_busy : seconds that it has computed.
    """

    def __init__(self, host: HostTime) -> None:
        self.host = host
        self.restart()

    def restart(self) -> None:
        """Begin again at 0, with nothing to do."""
        self.now = self.gpu = self.gpu_busy = 0.0
        self._front = 0.0  # when the front end has done all that it was given

    def spend(self, seconds: float) -> None:
        """The scheduler works."""
        self.now += seconds

    def wait(self, moment: float) -> None:
        """The scheduler waits until then."""
        self.now = max(self.now, moment)

    def launch(self, prepare: float, launch: float, compute: float) -> float:
        """The scheduler launches a step; returns when the GPU has computed it.

        Parameters
        ----------
        prepare : seconds before the first of its kernels.
        launch : seconds from then on until the last is launched.
        compute : seconds that the GPU takes once it is free.
        """
        self.now += prepare
        start = max(self.now, self.gpu)
        self.now += launch
        self.gpu = max(start + compute, self.now)
        self.gpu_busy += compute
        return self.gpu

    def arrive(self, due: float, tokens: int) -> float:
        """A client sends a prompt of so many tokens; returns when it is at the scheduler's door."""
        host = self.host
        done = self._in_front(due, host.front_request + tokens * host.front_token)
        return done + host.hop_in

    def answer(self) -> float:
        """The scheduler has sent a piece of an answer; returns when its client has it."""
        return self._in_front(self.now, self.host.front_piece) + self.host.hop_out

    def _in_front(self, moment: float, seconds: float) -> float:
        self._front = max(self._front, moment) + seconds
        return self._front
