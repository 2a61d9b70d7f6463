"""The JSON file of ``bench_server.py``, kept whole after every measurement, and the lines that it prints meanwhile."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from server_driver import BenchDriver, BenchTerms
from server_report import progress

from feather_sglang.compare.server.cases import Case
from feather_sglang.compare.server.config import ServerConfig, shown
from feather_sglang.compare.server.machine import PACKAGES, machine
from feather_sglang.compare.server.process import Server
from feather_sglang.compare.server.result import RunResult
from feather_sglang.file_writing import replace_text

_VERSIONS = """
import json, sys
from importlib import metadata
found = {"python": sys.version.split()[0]}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class BenchFile:
    """The results so far of a run of cases on servers.

    Parameters
    ----------
    path : where it is written; None: nowhere.
    facts : what the file says of the whole run, besides what is seen here.
    python : the servers' interpreter.
    """

    def __init__(
        self,
        configurations: Sequence[ServerConfig],
        cases: Sequence[Case],
        terms: BenchTerms,
        path: Path | None,
        facts: dict[str, Any],
        python: str,
    ) -> None:
        told = {name: getattr(self, name) for name in ("say", "done", "starting", "up", "left_out")}
        self.path, self.terms = path, replace(terms, **told)
        self.driver = BenchDriver(configurations, cases, self.terms)
        self.steady = {case.name: case.steady for case in cases}
        self.content: dict[str, Any] = {
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "when": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": machine_of(python),
            **facts,
            "servers": {
                one.name: {
                    "flags": list(one.flags),
                    "stock": stock(one),
                    "start_seconds": [],
                    "error": None,
                    "probes": [],
                }
                for one in configurations
            },
            "order": [],
            "records": [],
            "missing": [],
        }

    def run(self) -> None:
        """Measure all that time allows; the file is whole afterwards."""
        try:
            self.driver.run()
        finally:
            self.write()

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"[{self.driver.elapsed():5.0f} s] {text}", flush=True)

    def starting(self, configuration: ServerConfig) -> None:
        """Note the order of the starts."""
        self.content["order"].append(configuration.name)

    def up(self, server: Server, answers: Sequence[Any]) -> None:
        """Note its sizes, and its first answers to the probes for comparison."""
        entry = self.content["servers"][server.configuration.name]
        entry["start_seconds"].append(server.start_seconds)
        entry["command"] = shown(server.command, self.terms.key)
        entry |= {"kv_tokens": server.kv_tokens, "max_running": server.max_running}
        entry["probes"] = entry["probes"] or [answer["output_ids"] for answer in answers]

    def left_out(self, server: Server, reason: str) -> None:
        """Show the end of its log."""
        name, lines = server.configuration.name, server.tail()
        self.content["servers"][name] |= {"error": reason, "log_end": lines}
        self.say(f"{name} is left out: {reason}; the end of {server.log}:\n    " + "\n    ".join(lines))
        self.write()

    def done(self, result: RunResult) -> None:
        """Add its record."""
        record = self.record(result)
        self.content["records"].append(record)
        self.say(progress(record))
        self.write()

    def record(self, result: RunResult) -> dict[str, Any]:
        """A run as the file has it."""
        record: dict[str, Any] = {
            "server": result.name,
            "case": result.case,
            "round": result.round,
            "steady_case": self.steady[result.case],
        }
        if result.error is not None:
            record["error"] = result.error
        else:
            record |= {
                "overall": result.counted,
                "admission": result.admission and result.admission._asdict(),
                "steady": result.server["steady"],
                "log": result.server["log"],
                "client_cpu": result.client_cpu,
                "held": result.server["held"],
                "clocks": result.clocks,
                "activity": result.activity,
                "seconds": result.server["seconds"],
            }
        return record | {"elapsed": round(self.driver.elapsed(), 1)}

    def write(self) -> None:
        """Replace the file; whoever reads it sees the old one or the new one."""
        self.content["missing"] = [
            f"{configuration.name} {case.name}" + (f" (round {number})" if number > 1 else "")
            for number, configuration, case in self.driver.missing()
        ]
        self.content["seconds"] = round(self.driver.elapsed(), 1)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.path, json.dumps(self.content, indent=1) + "\n", "results")


def machine_of(python: str) -> dict[str, Any]:
    """The machine, with the versions that `python` would import."""
    if python == sys.executable:
        return machine()
    found = subprocess.run([python, "-c", _VERSIONS, *PACKAGES], capture_output=True, text=True, check=True)
    return machine() | {"versions": json.loads(found.stdout)}


def stock(configuration: ServerConfig) -> bool:
    """Whether nothing of this project decides how it runs."""
    words = [word for flag in configuration.flags for word in flag.split("=", 1)]
    return not any(word == "pat" or word.startswith(("feather", "--feather")) for word in words)
