"""Built-in workloads: prompts with shared prefixes or without, in a Poisson process (paper, section 5.2)."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from functools import partial
from itertools import count

import numpy as np

from feather_sglang.errors import FeatherError
from feather_sglang.replay.traces import LONGEST, Trace, TraceRequest


def shared_prefix(
    groups: int = 5,
    prefix_tokens: int = 5000,
    unique_tokens: int = 20,
    output_tokens: int = 200,
    rate: float = 100.0,
    requests: int = 1000,
    levels: int = 1,
    seed: int = 0,
    jitter: float = 0.0,
) -> Trace:
    """Make the paper's workload: each request opens with one of `groups` prefixes and ends with tokens of its own.

    Parameters
    ----------
    groups : prefixes that have nothing in common; each request draws one.
    prefix_tokens : tokens from the start of a prompt to the end of what it can share, whatever `levels` is.
    levels : depth of the tree within a group (paper, figure 3.7): 1, 2, 4, ... branches at successive levels; every
        level but the last is a quarter of the prefix long (an equal part of it above four levels).
    rate : requests per second, on average.
    jitter : 0 to 1; unique and output lengths are drawn evenly from (1 - jitter) to (1 + jitter) times their figure.
    """
    check_within("groups", groups, 1)
    check_within("prefix_tokens", prefix_tokens, 1, LONGEST // 4)
    check_within("levels", levels, 1, 16)
    parts = 1 if levels == 1 else max(4, levels)
    if prefix_tokens % parts:
        raise FeatherError(f"prefix_tokens {prefix_tokens}: must be a multiple of {parts} for {levels} levels")
    block_size = prefix_tokens // parts
    last_level = parts - levels + 1  # blocks in the deepest level

    draw = generator(seed)
    arrivals = poisson(draw, rate, requests)
    group = draw.integers(groups, size=requests)
    leaf = draw.integers(2 ** (levels - 1), size=requests)
    unique = _lengths(draw, "unique_tokens", unique_tokens, jitter, requests, least=0)
    output = _lengths(draw, "output_tokens", output_tokens, jitter, requests, least=1)

    fresh = count()
    blocks: dict[tuple[int, ...], int] = {}  # (group, level, branch, block within the level) -> hash id
    made = []
    for i in range(requests):
        path = []
        for level in range(levels):
            branch = int(leaf[i]) >> (levels - 1 - level)
            for block in range(last_level if level == levels - 1 else 1):
                key = (int(group[i]), level, branch, block)
                if key not in blocks:
                    blocks[key] = next(fresh)
                path.append(blocks[key])
        path += [next(fresh) for _ in range(-(-int(unique[i]) // block_size))]
        made.append(TraceRequest(i, arrivals[i], prefix_tokens + int(unique[i]), int(output[i]), tuple(path)))
    name = f"{groups} groups x {prefix_tokens} tokens" + (f", {levels} levels" if levels > 1 else "")
    return Trace(name, block_size, made)


def no_sharing(
    prompt_tokens: int = 1000,
    output_tokens: int = 200,
    rate: float = 100.0,
    requests: int = 1000,
    seed: int = 0,
    jitter: float = 0.0,
) -> Trace:
    """Make a workload in which no two prompts share a block (paper, section 5.3.7)."""
    draw = generator(seed)
    arrivals = poisson(draw, rate, requests)
    prompt = _lengths(draw, "prompt_tokens", prompt_tokens, jitter, requests, least=1)
    output = _lengths(draw, "output_tokens", output_tokens, jitter, requests, least=1)
    block_size = int(prompt.max())
    made = [TraceRequest(i, arrivals[i], int(prompt[i]), int(output[i]), (i,)) for i in range(requests)]
    return Trace(f"no sharing, {prompt_tokens} tokens", block_size, made)


# The project's own.
WORKLOADS: dict[str, Callable[..., Trace]] = {
    "W1": partial(shared_prefix, groups=5, prefix_tokens=5000, requests=1000, rate=100),
    "W2": partial(shared_prefix, groups=50, prefix_tokens=5000, requests=500, rate=50),
    "W3": partial(no_sharing, prompt_tokens=1000, requests=300, rate=50),
    "W4": partial(shared_prefix, groups=1, prefix_tokens=5000, requests=1000, rate=100),
    "W5": partial(shared_prefix, groups=5, prefix_tokens=5000, requests=4000, rate=400),
    "W6": partial(shared_prefix, groups=20, prefix_tokens=10000, requests=600, rate=100),
    "W7": partial(shared_prefix, groups=20, prefix_tokens=5000, requests=800, rate=100),
}


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the flags that describe a generated workload, the paper's by default."""
    parser.add_argument("--groups", type=int, default=5, help="groups of requests that share a prefix (%(default)s)")
    parser.add_argument(
        "--prefix-tokens", type=int, default=5000, help="shared tokens of a prompt, all levels together (%(default)s)"
    )
    parser.add_argument("--levels", type=int, default=1, help="levels of the prefix tree within a group (%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=200, help="tokens of an answer (%(default)s)")
    parser.add_argument(
        "--rate", type=float, default=100.0, help="requests per second, a Poisson process (%(default)s)"
    )
    parser.add_argument("--no-sharing", action="store_true", help="generate prompts that share nothing")


def made(args: argparse.Namespace, requests: int) -> Trace:
    """The workload of the flags, as far as the command has some for its figures."""
    make = no_sharing if args.no_sharing else shared_prefix
    figures = {name: getattr(args, name) for name in inspect.signature(make).parameters if hasattr(args, name)}
    return make(**figures | {"requests": requests})


def generator(seed: int) -> np.random.Generator:
    """The random numbers of a workload."""
    check_within("seed", seed, 0, 2**63)
    return np.random.default_rng(seed)


def poisson(draw: np.random.Generator, rate: float, requests: int) -> list[float]:
    """Return arrival times of a Poisson process in seconds, to the microsecond, the first at 0."""
    check_within("requests", requests, 1)
    if not 1e-6 <= rate <= 1e9:  # false for NaN too
        raise FeatherError(f"rate {rate:g}: must lie between 1e-6 and 1e9 requests per second")
    gaps = draw.exponential(1 / rate, size=requests)
    gaps[0] = 0.0
    return [round(float(t), 6) for t in np.cumsum(gaps)]


def _lengths(draw: np.random.Generator, name: str, mean: int, jitter: float, requests: int, least: int) -> np.ndarray:
    check_within(name, mean, least, LONGEST // 4)
    if not 0 <= jitter <= 1:
        raise FeatherError(f"jitter {jitter:g}: must lie between 0 and 1")
    spread = int(mean * jitter)
    return np.maximum(draw.integers(mean - spread, mean + spread + 1, size=requests), least)


def check_within(name: str, value: int, least: int, most: int = 10_000_000) -> None:
    """Raise ``FeatherError`` for a figure of a workload that cannot be."""
    if not least <= value <= most:
        raise FeatherError(f"{name} {value}: must lie between {least} and {most}")
