"""Facts about a trace: its load, its lengths, and how much of its prompts is shared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from feather_sglang.replay.batch_sharing import BatchSharing, nodes_of
from feather_sglang.replay.traces import Trace


@dataclass(frozen=True)
class Lengths:
    """Mean and percentiles of a number of tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    largest: int


@dataclass(frozen=True)
class TraceFacts:
    """A trace in figures.

    Attributes
    ----------
    sharing_ratio : share of prompt tokens that a cache of unlimited size would hit.
    first_level_groups : distinct first blocks that at least two requests have; `alone` counts the requests whose
        first block no other has.
    levels_mean, levels_max : prefixes of different reach that a prompt shares with others: 0 for one that shares
        nothing, 1 for a common system prompt, one more for every further branching above it.
    unique_prompt_tokens : prompt tokens that must be computed at least once.
    """

    name: str
    block_size: int
    requests: int
    duration_s: float
    rate: float
    input_tokens: int
    output_tokens: int
    input_length: Lengths
    output_length: Lengths
    sharing_ratio: float
    unique_prompt_tokens: int
    first_level_groups: int
    largest_group: int
    alone: int
    levels_mean: float
    levels_max: int


def describe(trace: Trace) -> TraceFacts:
    """Measure a trace of at least one request."""
    requests = trace.requests
    paths = [request.hash_ids for request in requests]
    inputs = [request.input_length for request in requests]
    outputs = [request.output_length for request in requests]
    unique = BatchSharing.from_paths(paths, trace.block_size, inputs).unique_tokens
    duration = requests[-1].arrival_s - requests[0].arrival_s
    levels = _levels(paths)
    groups = Counter(path[:1] for path in paths)
    shared = [size for size in groups.values() if size > 1]
    return TraceFacts(
        name=trace.name,
        block_size=trace.block_size,
        requests=len(requests),
        duration_s=duration,
        rate=trace.rate,
        input_tokens=sum(inputs),
        output_tokens=sum(outputs),
        input_length=_lengths(inputs),
        output_length=_lengths(outputs),
        sharing_ratio=1 - unique / sum(inputs),
        unique_prompt_tokens=unique,
        first_level_groups=len(shared),
        largest_group=max(shared, default=0),
        alone=len(groups) - len(shared),
        levels_mean=float(np.mean(levels)),
        levels_max=max(levels),
    )


def _lengths(values: Sequence[int]) -> Lengths:
    p50, p90, p99 = (float(p) for p in np.percentile(values, [50, 90, 99]))
    return Lengths(float(np.mean(values)), p50, p90, p99, max(values))


def _levels(paths: Sequence[tuple[int, ...]]) -> list[int]:
    """Count, for each path, the groups of at least two paths that it runs with on its way."""
    walks = nodes_of(paths)
    users = Counter(chain.from_iterable(walks))
    # Users only drop along a path; each number above one is another group that shares so far.
    return [len({users[node] for node in walk if users[node] > 1}) for walk in walks]
