"""The cases of a suite: requests, load and memory, as data.

A case of the short form is one that the full form has too, with as many requests as `short` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from feather_sglang.errors import FeatherError
from feather_sglang.replay import traffic
from feather_sglang.replay.traces import Trace, load_trace
from feather_sglang.replay.workloads import WORKLOADS, shared_prefix

KV_TOKENS = 200_000  # what a 48 GB card has left for Qwen3-8B
CONVERSATION, SYNTHETIC = "mooncake_conversation.jsonl", "mooncake_synthetic_first1800.jsonl"
SLICES = "slices of public traces"


@dataclass(frozen=True)
class Case:
    """Requests, and the server that they meet.

    Attributes
    ----------
    kind : the heading that it stands under in the report.
    make : the trace of a seed; None for a slice of a file.
    short : requests of the short form; 0: it has no such case.
    load : times the rate that fcfs sustains; None: as the trace has it.
    file, first, count : of a slice of a public trace; of others `count` is the most requests, 0: all.
    """

    name: str
    kind: str
    make: Callable[..., Trace] | None = None
    kv_tokens: int = KV_TOKENS
    short: int = 0
    load: float | None = None
    file: str = ""
    first: int = 0
    count: int = 0

    @property
    def served(self) -> str:
        """Names what fcfs's capacity is measured of: the requests and the memory, at whatever load."""
        return f"{self.name.partition(',')[0]}, {self.kv_tokens // 1000}K"

    def trace(self, folder: Path | None, seed: int, short: bool) -> Trace | None:
        """Its requests; None where the file is not there."""
        if self.make is not None:
            trace = self.make(seed=seed)
        elif folder is None or not (folder / self.file).is_file():
            return None
        else:
            trace = load_trace(folder / self.file, requests=self.first + self.count).part(self.first, self.count)
            if len(trace.requests) < self.count:
                raise FeatherError(f"{folder / self.file}: ends before request {self.first + self.count} ({self.name})")
        if most := self.short if short else self.count:
            trace = trace.head(most)
        return Trace(self.name, trace.block_size, trace.requests)


def _workload(name: str, short: int) -> Case:
    return Case(name, "shared prefixes, and none", WORKLOADS[name], short=short)


def _sweep(name: str, short: int = 0, **figures: int) -> Case:
    """The paper's workload (section 5.2) with some of its figures changed."""
    return Case(name, "the paper's sweeps", partial(shared_prefix, **figures), short=short)


def _slice(trace: str, first: int, count: int, load: float, kv_tokens: int, short: int) -> Case:
    file = CONVERSATION if trace == "conversation" else SYNTHETIC
    name = f"{trace} {first}, load {load:g}, {kv_tokens // 1000}K"
    return Case(name, SLICES, None, kv_tokens, short, load, file, first, count)


_LOADS, _POOLS = (0.5, 0.8, 1.0, 1.2), (200_000, 500_000, 824_000)
# The short form has each load and each pool once a trace.
_SHORT = {
    ("conversation", 0.5, 200_000),
    ("conversation", 0.8, 824_000),
    ("conversation", 1.0, 500_000),
    ("conversation", 1.2, 200_000),
    ("synthetic", 0.5, 824_000),
    ("synthetic", 0.8, 500_000),
    ("synthetic", 1.0, 200_000),
    ("synthetic", 1.2, 500_000),
}
TODAY = "today's traffic"

CASES: tuple[Case, ...] = (
    _workload("W1", 500),
    _workload("W2", 300),
    _workload("W3", 300),
    _workload("W4", 500),
    _workload("W5", 800),
    _workload("W6", 300),
    _workload("W7", 400),
    _sweep("rate 20", rate=20),
    _sweep("rate 50", 400, rate=50),
    _sweep("rate 200", rate=200),
    _sweep("groups 2", groups=2),
    _sweep("groups 20", groups=20),
    _sweep("groups 50", groups=50),
    _sweep("groups 100", 400, groups=100),
    _sweep("output 20", 500, output_tokens=20),
    _sweep("output 50", output_tokens=50),
    _sweep("output 400", output_tokens=400),
    _sweep("prefix 1K", prefix_tokens=1000),
    _sweep("prefix 10K", prefix_tokens=10_000),
    _sweep("prefix 20K", 300, prefix_tokens=20_000),
    _sweep("levels 2", prefix_tokens=4000, levels=2),
    _sweep("levels 4", 500, prefix_tokens=4000, levels=4),
    *(
        _slice(trace, first, count, load, pool, 200 if (trace, load, pool) in _SHORT else 0)
        for trace, first, count in (("conversation", 7000, 500), ("synthetic", 800, 400))
        for load in _LOADS
        for pool in _POOLS
    ),
    Case("chat", TODAY, partial(traffic.chat, 400, 16.0), short=300),
    Case("agents", TODAY, partial(traffic.agents, 100, 2.0), short=300),
    Case("samples", TODAY, partial(traffic.samples, 64), short=512),
    Case("few-shot", TODAY, partial(traffic.few_shot, requests=2000), short=1000),
)


def patterns(text: str) -> list[str]:
    """What ``--cases`` names, with commas between; a case's own name may have some, too."""
    names, words = {case.name for case in CASES}, [word.strip() for word in text.split(",") if word.strip()]
    found = []
    while words:
        count = next((n for n in range(len(words), 1, -1) if ", ".join(words[:n]) in names), 1)
        found.append(", ".join(words[:count]))
        words = words[count:]
    return found


def chosen(short: bool, patterns: Sequence[str]) -> list[Case]:
    """The cases of a form whose names fit one of the patterns; all without any."""
    cases = [case for case in CASES if case.short or not short]
    for pattern in patterns:
        if not any(fnmatchcase(case.name, pattern) for case in cases):
            raise FeatherError(f"--cases {pattern}: fits none of {', '.join(case.name for case in cases)}")
    return [case for case in cases if not patterns or any(fnmatchcase(case.name, pattern) for pattern in patterns)]
