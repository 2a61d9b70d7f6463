"""The inputs of a simulation: a workload, and a model of a server's steps. ``replay`` makes both."""

from __future__ import annotations

from array import array
from typing import Any, Protocol

Request = Any  # ``request_id``, ``input_length``, ``output_length``, ``hash_ids``: its prompt's blocks


class Workload(Protocol):
    """Requests in order of arrival, whose prompts share blocks."""

    @property
    def requests(self) -> Any:
        """The first to come first."""

    @property
    def block_size(self) -> int:
        """Tokens."""
        ...

    def arrivals(self) -> Any:
        """When its requests come, for one run."""

    def tokens(self, request: Any) -> array[int]:
        """The prompt of a request."""
        ...


class StepTimes(Protocol):
    """Seconds of the GPU's steps; its profile has the host's prices."""

    model: Any
    profile: Any
    prefill_graphs: bool

    def prefill(self, *lengths: Any) -> float:
        """Of a prefill step."""
        ...

    def sharing(self, *paths: Any) -> Any:
        """What the rows of a batch share, for ``decode``."""

    def decode(self, seq_lens: Any, sharing: Any) -> float:
        """Of a decode step."""
        ...
