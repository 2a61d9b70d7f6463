"""Result files as the performance page reads them: one clear line where something is missing, no figure made up."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from server_cases import bench_case
from server_names import server_of

from feather_sglang.replay.workloads import WORKLOADS

PEERS = ("fa3", "fa3-planned", "flashinfer", "cascade")  # FlashAttention-3, FlashInfer and its cascade
STOCK_POLICIES = ("fcfs", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
FIGURES = ("output_tok_s", "ttft_mean", "ttft_p99", "e2e_mean", "tbt_p99_ms")


class ResultError(ValueError):
    """A result file that is not there, or lacks what the page shows; the message is one line."""


def load(folder: Path, name: str) -> dict[str, Any]:
    """The content of a result file."""
    try:
        content = json.loads((folder / name).read_text())
    except OSError as error:
        raise ResultError(f"{name}: cannot read: {error.strerror}") from None
    except ValueError as error:
        raise ResultError(f"{name}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ResultError(f"{name}: expected an object")
    return content


def get(content: Any, file: str, *keys: str) -> Any:
    """The value under these keys."""
    for place, key in enumerate(keys):
        if not isinstance(content, dict) or content.get(key) is None:
            raise ResultError(f"{file}: no {'.'.join(keys[: place + 1])}")
        content = content[key]
    return content


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers, at least one."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def day(content: dict[str, Any], file: str) -> str:
    """When it was measured, as ``26 Nov 2026``."""
    when = datetime.fromisoformat(get(content, file, "when"))
    return f"{when.day} {when:%b %Y}"


@dataclass(frozen=True)
class TreeTime:
    """One batch under the packed kernel and its best peer, us with a warm L2."""

    name: str
    tree: int
    heads: str
    page_size: int
    ours: float
    best: float
    peer: str
    floor: float
    peers: dict[str, float]

    @property
    def ratio(self) -> float:
        """To the best peer; below 1 the packed kernel is faster."""
        return self.ours / self.best


def trees(folder: Path, file: str) -> list[TreeTime]:
    """The rows of a file of ``bench_decode_kernel.py`` in which both were measured."""
    found = []
    for record in get(load(folder, file), file, "records"):
        systems = get(record, file, "systems")
        us = {name: one["warm_us"] for name, one in systems.items() if "warm_us" in one}
        peers = {name: value for name, value in us.items() if name in PEERS}
        if "feather" not in us or not peers:
            continue
        peer = min(peers, key=lambda name: peers[name])
        place = [get(record, file, key) for key in ("name", "tree", "heads", "page_size")]
        floor = get(record, file, "floor_us")
        found.append(TreeTime(*place, us["feather"], peers[peer], peer, floor, peers))
    if not found:
        raise ResultError(f"{file}: no record has both feather and a peer")
    return found


@dataclass(frozen=True)
class Run:
    """One workload on a server under one policy and attention backend; means over its rounds."""

    case: str
    attention: str
    policy: str
    tok_s: float
    ttft_mean: float
    ttft_p99: float
    e2e_mean: float
    kv_tokens: int

    @property
    def place(self) -> tuple[str, str, str]:
        return self.case, self.attention, self.policy

    def figure(self, name: str) -> float:
        """One of `FIGURES`."""
        return self.tok_s if name == "output_tok_s" else getattr(self, name)


def attention_of(flags: Sequence[str], file: str) -> str:
    """The decode attention backend that a server's flags name."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    for flag in ("--decode-attention-backend", "--attention-backend"):
        if flag in words[:-1]:
            return words[words.index(flag) + 1]
    raise ResultError(f"{file}: the flags of a server name no attention backend: {' '.join(flags)}")


def server_runs(folder: Path, file: str) -> list[Run]:
    """What a file of ``bench_server.py`` measured, failed records left out."""
    content = load(folder, file)
    servers = get(content, file, "servers")
    kv_tokens = next((one["kv_tokens"] for one in servers.values() if "kv_tokens" in one), None)
    if kv_tokens is None:
        raise ResultError(f"{file}: no server has kv_tokens")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in get(content, file, "records"):
        if "error" not in record:
            groups.setdefault((get(record, file, "case"), get(record, file, "server")), []).append(record)
    runs = []
    for (case, name), records in groups.items():
        flags = get(servers, file, name, "flags")
        counted = "steady" if case.startswith("decode:") else "overall"
        records = [record for record in records if record.get(counted)]
        if not records:
            continue  # the batch was never complete
        tok_s = mean(get(record, file, counted, "tok_s") for record in records)
        times = [
            mean(get(record, file, "overall", spread, key) for record in records)
            for spread, key in (("ttft_s", "mean"), ("ttft_s", "p99"), ("e2e_s", "mean"))
        ]
        policy = server_of(name, flags).policy
        runs.append(Run(case, attention_of(flags, file), policy, tok_s, *times, kv_tokens))
    return runs


def feather_policy(runs: Iterable[Run]) -> str:
    """The name under which the default policy was measured."""
    names = {run.policy for run in runs}
    for name in ("feather", "feather-bandit"):
        if name in names:
            return name
    raise ResultError(f"no run under feather, only {', '.join(sorted(names)) or 'none at all'}")


def evicts(case: str, kv_tokens: int) -> bool:
    """Whether the prefixes of a workload fill the KV pool or exceed it."""
    workload = WORKLOADS.get(case.partition(":")[0].partition("@")[0])
    keywords = getattr(workload, "keywords", {})
    return keywords.get("groups", 0) * keywords.get("prefix_tokens", 0) >= kv_tokens


def described(case: str) -> str:
    """A workload as it is read aloud: groups and the tokens of their prefixes, requests a second."""
    name, _, rest = case.partition(":")
    if name == "open":
        groups, tokens, _, rate, *more = map(int, rest.partition("@")[0].split(","))
        output = f", {more[0]} output tokens" if more else ""
        levels = f", {more[1]} levels of prefixes" if len(more) > 1 else ""
        return f"{prefixes(groups, tokens)}, {rate} requests/s{output}{levels}"
    keywords = WORKLOADS[name.partition("@")[0]].keywords
    tokens = keywords.get("prefix_tokens") or keywords["prompt_tokens"]
    return f"{prefixes(keywords.get('groups', 0), tokens)}, {keywords['rate']} requests/s"


def prefixes(groups: int, tokens: int) -> str:
    """Groups of requests and the tokens that those of a group share; without groups nothing is shared."""
    if not groups:
        return f"nothing shared, {tokens:,} tokens a prompt"
    return f"{groups} {'groups' if groups > 1 else 'group'} \u00d7 {tokens:,} tokens"


def requests(case: str) -> int:
    """How many requests a workload has."""
    return len(bench_case(case).trace.requests)


@dataclass(frozen=True)
class Pair:
    """One workload measured on a server and replayed."""

    case: str
    attention: str
    policy: str
    options: str
    model: str
    release: str  # of SGLang on the server
    bed: str  # what runs have in common that differ in the policy and its options alone
    server: dict[str, float]
    replay: dict[str, float]

    def ratio(self, figure: str) -> float:
        """Replay over server."""
        return self.replay[figure] / self.server[figure]


def pairs(folder: Path, replays: str, tail: str) -> list[Pair]:
    """Everything that was measured both ways."""
    found = []
    for run in get(load(folder, replays), replays, "runs"):
        server, replay = ({name: get(run, replays, side, name) for name in FIGURES} for side in ("server", "replay"))
        policy, attention, case, model, release, options = (
            get(run, replays, key) for key in ("policy", "attention", "case", "model", "sglang", "options")
        )
        place = ("case", "attention", "model", "sglang", "kv_tokens", "prefill_graphs", "stream_interval")
        bed = " ".join(str(run.get(key)) for key in place)
        settings = run.get("settings", {})
        own = [f"chunks of {settings['chunked_prefill']}"] if "chunked_prefill" in settings else []
        own += [f"interval {settings['server_flags'][-1]}"] if "server_flags" in settings else []
        said = ", ".join([*(f"{name} {value}" for name, value in options.items()), *own])
        found.append(Pair(case, attention, policy, said, model, release, bed, server, replay))
    content = load(folder, tail)
    release = get(content, tail, "versions", "sglang")
    for policy in dict.fromkeys(get(run, tail, "policy") for run in get(content, tail, "server")):
        rows = [run for run in content["server"] if run["policy"] == policy]
        seen = get(content, tail, "replay", policy)
        measured = {name: mean(get(run, tail, name) for run in rows) for name in FIGURES}
        replay = {name: get(seen, tail, name) for name in FIGURES}
        found.append(Pair("conversation", "pat", policy, "", "qwen3-8b", release, "conversation", measured, replay))
    return found
