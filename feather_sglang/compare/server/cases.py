"""Cases: the requests to send to a server and their times, made from replay's workloads.

A case has a name:

- ``open:G,L,REQUESTS,RATE[,N[,LEVELS]]``: requests that arrive one by one; G groups share L tokens each (G = 0: L
  private tokens), in a tree of so many levels (1).
- ``decode:B,G,L[,N]``: a steady batch of B requests in G groups with L shared tokens (G = 0: L private tokens each) and
  20 tokens of their own, all at once after their prefixes were put into the cache.

N is the number of output tokens, 200 where nothing else is said.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from feather_sglang.errors import FeatherError
from feather_sglang.replay.traces import FIRST_TOKEN, VOCABULARY, Trace, TraceRequest
from feather_sglang.replay.workloads import no_sharing, shared_prefix

UNIQUE_TOKENS, OUTPUT_TOKENS = 20, 200


@dataclass(frozen=True)
class Turn:
    """A conversation's turn, whose prompt contains answers that are known only once they have come.

    Attributes
    ----------
    after : place of the request whose answer it waits for, and after whose end its user does think for `think_s`.
    quotes : (place of the request, begin, end): its answer is the prompt's tokens [begin, end).
    """

    after: int
    think_s: float
    tokens: array[int]
    quotes: tuple[tuple[int, int, int], ...]
    output_tokens: int
    stream_interval: int | None

    def body(self, answers: Sequence[Sequence[int]]) -> bytes:
        """The body of its HTTP request, given each request's answer."""
        tokens = self.tokens[:]
        for place, begin, end in self.quotes:
            tokens[begin:end] = array("q", answers[place])
        return generate_body(tokens, self.output_tokens, self.stream_interval)


@dataclass(frozen=True)
class Request:
    """One prompt: when it is due in seconds from the start, its length, and the body of its HTTP request.

    Of a further turn of a conversation the turn says all but the length.
    """

    due: float
    prompt_tokens: int
    body: bytes
    turn: Turn | None = None


@dataclass(frozen=True)
class Case:
    """The requests of one measurement.

    Attributes
    ----------
    trace : the requests with their arrivals.
    prefixes : prompts that are put into the cache first.
    steady : all requests start together, and what counts is the time in which all of them run.
    """

    name: str
    trace: Trace
    prefixes: tuple[TraceRequest, ...] = ()
    steady: bool = False

    @property
    def batch(self) -> int:
        """Requests that run together if the server lets them."""
        return len(self.trace.requests)

    @property
    def kv_tokens(self) -> int:
        """KV tokens that all requests together hold at their end, each prefix counted once."""
        kept = sum(prefix.input_length for prefix in self.prefixes)
        shared = self.prefixes[0].input_length if self.prefixes else 0
        return kept + sum(r.input_length - shared + r.output_length for r in self.trace.requests)

    def requests(self, vocabulary: int, stream_interval: int | None = None) -> list[Request]:
        """Streamed ones if an interval is given: the first token at once, then a piece every so many tokens."""
        made = []
        arrivals = self.trace.arrivals()
        places = {request.request_id: place for place, request in enumerate(self.trace.requests)}
        for request in self.trace.requests:
            tokens = fold(self.trace.tokens(request), vocabulary)
            if request.after is None:
                body = generate_body(tokens, request.output_length, stream_interval)
                made.append(Request(request.arrival_s, len(tokens), body))
                continue
            quotes = tuple((places[one], begin, end) for one, begin, end in arrivals.answers_in(request))
            after = places[request.after]
            turn = Turn(after, request.think_s, tokens, quotes, request.output_length, stream_interval)
            made.append(Request(math.inf, len(tokens), b"", turn))
        return made

    def warm_up(self, vocabulary: int) -> list[Request]:
        """One-token requests whose prompts are the prefixes."""
        made = []
        for prefix in self.prefixes:
            tokens = fold(self.trace.tokens(prefix), vocabulary)
            made.append(Request(0.0, len(tokens), generate_body(tokens, 1)))
        return made


def parse_case(text: str, seed: int = 0) -> Case:
    """Make the case of that name, with a seed of prompts and arrivals; ``ValueError`` if there is no such case."""
    kind, _, rest = text.partition(":")
    if kind == "decode":
        return _decode(text, *whole_numbers(text, rest, 3, [OUTPUT_TOKENS]))
    if kind != "open":
        raise ValueError(f"{text}: no such case; open:... or decode:...")
    groups, tokens, requests, rate, output, levels = whole_numbers(text, rest, 4, [OUTPUT_TOKENS, 1])
    if groups:
        make = partial(shared_prefix, groups, tokens, levels=levels)
    elif levels == 1:
        make = partial(no_sharing, tokens)
    else:
        raise ValueError(f"{text}: levels need groups that share them")
    return Case(text, make(output_tokens=output, rate=rate, requests=requests, seed=seed))


def probes() -> Case:
    """Prompts that are the same in every run: they warm a server up, and their tokens can be compared."""
    return _decode("probes", batch=8, groups=2, shared=300, output=32)


def fold(tokens: array[int], vocabulary: int) -> array[int]:
    """Map made tokens into a smaller vocabulary; one that is large enough leaves them as they are."""
    if vocabulary >= VOCABULARY:
        return tokens
    kinds = vocabulary - FIRST_TOKEN
    if kinds < 2:
        raise FeatherError(
            f"a vocabulary of {vocabulary} tokens is too small: give a model with {FIRST_TOKEN + 2} or more"
        )
    return array("q", ((np.asarray(tokens) - FIRST_TOKEN) % kinds + FIRST_TOKEN).tobytes())


def vocabulary_of(model: str) -> int:
    """How many tokens the model in that folder knows; ``FeatherError`` where it does not say."""
    path = Path(model) / "config.json"
    if not path.is_file():
        raise FeatherError(f"--model {model}: servers need the folder of a model; there is no {path}")
    try:
        config = json.loads(path.read_bytes())
        vocabulary = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise FeatherError(f"{path}: not the configuration of a language model: no vocab_size") from None
    fold(array("q"), vocabulary)  # refuses one that is too small
    return vocabulary


def generate_body(tokens: Sequence[int], output_tokens: int, stream_interval: int | None = None) -> bytes:
    """Body of SGLang's ``/generate``: greedy, exactly `output_tokens`; streamed where an interval is given."""
    streaming = f', "stream_interval": {stream_interval}}}, "stream": true' if stream_interval else "}"
    return (
        f'{{"input_ids": [{",".join(map(str, tokens))}], "sampling_params": {{"max_new_tokens": {output_tokens}, '
        f'"ignore_eos": true, "temperature": 0{streaming}}}'
    ).encode()


def _decode(name: str, batch: int, groups: int, shared: int, output: int) -> Case:
    """The groups take turns, as requests of many users would, so that a group's rows are not adjacent."""
    groups = groups or batch
    if batch < 1 or groups > batch or shared < UNIQUE_TOKENS or output < 2:
        raise ValueError(
            f"{name}: give at least one request, at most as many groups, at least {UNIQUE_TOKENS} shared tokens and 2 "
            "output tokens"
        )
    requests = [TraceRequest(i, 0.0, shared + UNIQUE_TOKENS, output, (i % groups, groups + i)) for i in range(batch)]
    prefixes = tuple(TraceRequest(group, 0.0, shared, 1, (group,)) for group in range(groups))
    return Case(name, Trace(name, shared, requests), prefixes, steady=True)


def whole_numbers(name: str, text: str, least: int, defaults: Sequence[int] = ()) -> list[int]:
    """Comma-separated whole numbers: `least` of them, and as many more as there are defaults for."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    given = len(numbers) - least
    if not 0 <= given <= len(defaults) or any(number < 0 for number in numbers):
        counts = f"{least} to {least + len(defaults)}" if defaults else f"{least}"
        raise ValueError(f"{name}: give {counts} whole numbers after ':'")
    return numbers + list(defaults[given:])
