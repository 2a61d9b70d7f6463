"""The recording: servers run the loads, and the step logs of their schedulers go into one file for the fit."""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from feather_sglang import ending
from feather_sglang.adapter.step_log import SIZES, TIMES, VARIABLE
from feather_sglang.calibrate.loads import WARM_UP, Load, loads
from feather_sglang.compare.server.cases import Request, parse_case, probes
from feather_sglang.compare.server.client import allow_open_files, call_all, drive
from feather_sglang.compare.server.config import BACKENDS, NO_PREFILL_GRAPHS, ServerConfig
from feather_sglang.compare.server.process import Server, environment_with, processes_of
from feather_sglang.compare.server.stats import overall
from feather_sglang.errors import FeatherError
from feather_sglang.simulation.clients import STREAM_INTERVAL

FORMAT = "feather-recording"
WAIT_SECONDS = 60.0  # for one load


class Setting(NamedTuple):
    """A server whose steps are logged: its decode attention, and whether prefill runs in CUDA graphs."""

    attention: str
    prefill_graphs: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """Its flags."""
        return (*BACKENDS[self.attention].split(), *(() if self.prefill_graphs else (NO_PREFILL_GRAPHS,)))

    @property
    def prefill_attention(self) -> str:
        """The backend that computes prompts."""
        words = BACKENDS[self.attention].split()
        return words[words.index("--attention-backend") + 1]


# A step of a log: whether it was a prefill, and what was logged of it.
STEP = np.dtype([
    ("prefill", np.bool_),
    *((name, np.float64) for name in (*SIZES, *TIMES, "pieces", "begin_result", "ready", "end_result")),
])  # fmt: skip


class Steps(NamedTuple):
    """The steps of one load, the case of that name, on one server; the table has an entry of `STEP` for each."""

    load: str
    setting: Setting
    held_out: bool
    table: np.ndarray


@dataclass(frozen=True)
class Recording:
    """A recording; ``content`` is the content of its file."""

    content: dict[str, Any]

    @classmethod
    def load(cls, paths: Sequence[Path]) -> Recording:
        """Read files of ``save``, of one kind of machine and one model, as one; a mistake raises ``FeatherError``."""
        first, *others = [cls._read(path) for path in paths]
        for other in others:
            if other["model"] != first["model"]:
                raise FeatherError("--from: these recordings are of different models; fit each alone")
            first["servers"] += other["servers"]
        return cls(first)

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        try:
            content = json.loads(gzip.decompress(path.read_bytes()))
        except OSError as error:
            raise FeatherError(f"--from {path}: {error.strerror or 'not a recording'}") from None
        except (ValueError, EOFError, RecursionError, zlib.error) as error:
            raise FeatherError(f"--from {path}: not a recording: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise FeatherError(f"--from {path}: not a recording of `feather calibrate`")
        return content

    def save(self, path: Path) -> None:
        """Write it, compressed."""
        path.write_bytes(gzip.compress(json.dumps(self.content).encode(), 6))

    def runs(self) -> Iterator[tuple[Setting, dict[str, Any]]]:
        """Each load that was sent to each server, and what came of it."""
        for server in self.content["servers"]:
            for run in server["runs"]:
                yield Setting(**server["setting"]), run

    def steps(self) -> list[Steps]:
        """The steps of every load."""
        return [
            Steps(run["load"], setting, run["held_out"], table(run["log"]))
            for setting, run in self.runs()
            if any(line[0] == "result" for line in run["log"])
        ]


def table(log: Sequence[Sequence[Any]]) -> np.ndarray:
    """The steps in the lines of a log; a step whose result is missing is left out."""
    results = {line[1]: line[3:] for line in log if line[0] == "result"}
    steps = [line for line in log if line[0] == "step" and line[1] in results]
    return np.array([(line[2] == "prefill", *line[3:], *results[line[1]]) for line in steps], STEP)


def record(
    model: str,
    settings: Sequence[Setting],
    vocabulary: int,
    common: Sequence[str],
    logs: Path,
    deadline: float,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Start a server for each setting, one after the other, and send it the loads.

    Parameters
    ----------
    common : flags of all servers.
    logs : folder for what they print.
    deadline : on ``time.monotonic()``; what is left then is not sent.
    """
    allow_open_files(2000)
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, *common]
    servers = []
    for setting in settings:
        name = f"{setting.attention}-graphs-{'on' if setting.prefill_graphs else 'off'}"
        say(f"starting {name}")
        with tempfile.TemporaryDirectory() as folder:
            environment = environment_with({VARIABLE: folder})
            config = ServerConfig(name, setting.flags)
            with Server(config, command, logs / f"{name}.log", environment=environment) as server:
                server.wait(deadline)
                say(f"{name} is up after {server.start_seconds:.0f} s")
                _warm(server, vocabulary)
                context = int(server.info.get("max_req_input_len") or server.info.get("context_length") or 1 << 20)
                runs = [
                    _send(server, load, number, vocabulary, say)
                    for number, load in enumerate(loads(server.kv_tokens or 0, context))
                    if time.monotonic() < deadline - 10
                ]
                time.sleep(1.0)  # the log is flushed when the scheduler has nothing to do
                lines = _read(Path(folder))
        for run in runs:
            run["log"] = [line for line in lines if run["begin"] <= _moment(line) <= run["end"]]
        servers.append({"setting": setting._asdict(), "kv_tokens": server.kv_tokens, "runs": runs})
    return servers


def _warm(server: Server, vocabulary: int) -> None:
    ending.run(call_all(server.address, probes().requests(vocabulary), 120.0))
    requests = parse_case(WARM_UP).requests(vocabulary, STREAM_INTERVAL)
    ending.run(drive(server.address, requests, WAIT_SECONDS, alive=server.alive))


def _send(server: Server, load: Load, number: int, vocabulary: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Send one load; what clients saw of it."""
    case = load.case
    server.flush()
    if case.prefixes:
        ending.run(call_all(server.address, case.warm_up(vocabulary), WAIT_SECONDS))
    requests = [
        Request(request.due, request.prompt_tokens, request.body[:-1] + f', "rid": "{number}-{place}"}}'.encode())
        for place, request in enumerate(case.requests(vocabulary, STREAM_INTERVAL))
    ]
    spent, begin = front_cpu(server.group), time.monotonic()
    driven = ending.run(drive(server.address, requests, WAIT_SECONDS, case.steady, server.alive))
    end = time.monotonic()
    figures = overall(driven.streams, driven.end)
    if figures["finished"] < len(requests):
        raise FeatherError(f"{case.name}: {figures['finished']} of {len(requests)} requests finished: see the log")
    say(f"{case.name}: {figures['tok_s']:,.0f} tok/s, mean TTFT {figures['ttft_s']['mean']:.3f} s")
    return {
        "load": case.name,
        "held_out": load.held_out,
        "begin": begin,
        "end": end,
        "front_cpu": front_cpu(server.group) - spent,
        "streams": [
            [f"{number}-{place}", one.sent, one.prompt_tokens, one.span[0], len(one.events)]
            for place, one in enumerate(driven.streams)
        ],
    }


def front_cpu(group: int) -> float:
    """Processor seconds of a server's processes but for its schedulers'."""
    return sum(one.cpu_seconds for one in processes_of(group) if not one.schedules)


def _read(folder: Path) -> list[list[Any]]:
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise FeatherError(f"the server wrote no step log: is the plugin active there ({VARIABLE})?")
    # Rank 0's, where there are several; the last line may be half-written.
    return [json.loads(line) for line in files[0].read_text().splitlines() if line.endswith("]")]


def _moment(line: Sequence[Any]) -> float:
    """When a line was written: its last time, but for a step's."""
    return float(line[-1])
