"""What a replay is handed, as it sees them: a workload, and a model of a server's steps. ``replay`` makes both."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol


class Request(Protocol):
    """One request of a workload."""

    @property
    def request_id(self) -> int:
        """Its place in the trace."""
        ...

    @property
    def input_length(self) -> int:
        """Tokens of the prompt."""
        ...

    @property
    def output_length(self) -> int:
        """Tokens of the answer."""
        ...

    @property
    def hash_ids(self) -> tuple[int, ...]:
        """The blocks of the prompt."""
        ...


class Workload(Protocol):
    """Requests whose prompts share blocks."""

    @property
    def requests(self) -> Sequence[Request]:
        """In order of arrival."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
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

    def prefill(
        self,
        extend_lens: Sequence[int],
        prefix_lens: Sequence[int],
        paths: Sequence[tuple[int, ...]] | None = None,
        block_size: int = 1,
    ) -> float:
        """Of a prefill step."""
        ...

    def sharing(self, paths: Sequence[tuple[int, ...]], block_size: int, lengths: Sequence[int]) -> Any:
        """What the rows of a batch share, for ``decode``."""

    def decode(self, seq_lens: Any, sharing: Any) -> float:
        """Of a decode step."""
        ...
