"""Runs the cells, each a case under a policy, and keeps the result of each in a file."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from feather_sglang import __version__
from feather_sglang.adapter.environment import sglang_variables
from feather_sglang.file_writing import replace_text
from feather_sglang.replay.arguments import check_fits, suited
from feather_sglang.replay.digests import code_digest, trace_digest
from feather_sglang.replay.jobs import Job, ReplayResult, replay
from feather_sglang.replay.processes import Executor, events
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import Trace
from feather_sglang.scheduling.policy_names import FEATHER, ORACLE, PROMISING, served
from feather_sglang.slo import SLO
from feather_sglang.suite.cases import Case

VERSION = 1
ALL_AT_ONCE = 1e6  # times the rate: how fast fcfs serves when it never waits for arrivals
FIGURES = (
    "output_tok_s", "ttft_mean", "ttft_p99", "tbt_p99_ms", "slo_share", "goodput",
    "slowdown_p50", "slowdown_p99", "max_wait", "cache_hit", "makespan",
)  # fmt: skip


@dataclass(frozen=True)
class Terms:
    """The settings of all cells.

    Attributes
    ----------
    folder : of the public traces; None: their slices are left out.
    scheduler_cost : of a replay; where it is measured, no two runs agree to the last digit.
    server : what a user's server is started with, beside the memory of a case.
    options : what FEATHER_OPTIONS sets for the policies of feather.
    environment : SGLang's variables.
    """

    model: StepTimeModel
    slo: SLO
    sglang: str
    folder: Path | None = None
    seed: int = 0
    short: bool = False
    scheduler_cost: str = "model"
    server: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=sglang_variables)

    def facts(self) -> dict[str, Any]:
        """What the results say of all cells."""
        return {
            "version": VERSION,
            "feather": __version__,
            "code": code_digest(),
            "sglang": self.sglang,
            "python": platform.python_version(),
            "profile": self.model.profile.name,
            "model": self.model.model.name,
            "attention": self.model.attention_name,
            "slo": self.slo.text,
            "seed": self.seed,
            "form": "short" if self.short else "full",
            "scheduler_cost": self.scheduler_cost,
            **({"server": self.server} if self.server else {}),
            **({"options": self.options} if self.options else {}),
            **({"environment": self.environment} if self.environment else {}),
        }


class Cell:
    """A case under a policy: the job that runs it, the file that has its figures, and what these depend on."""

    def __init__(self, case: Case, policy: str, trace: Trace, terms: Terms, folder: Path, capacity: bool) -> None:
        self.case, self.policy, self.trace = case, policy, trace
        name = f"{case.served}, capacity" if capacity else f"{case.name}, {policy}"
        name = re.sub(r"[^a-z0-9.+]+", "-", name.lower())
        self.path = folder / f"{name}.json"
        settings = {"kv_tokens": case.kv_tokens, "scheduler_cost": terms.scheduler_cost, **terms.server}
        settings.pop("prefill_graphs", None)  # the model of step times knows
        told: dict[str, Any] = {"seed": terms.seed, **terms.options}
        if policy == PROMISING:
            policy, told["slo"] = served(policy), terms.slo.text
        options = suited(policy, told) if policy in (*FEATHER, ORACLE) else {}
        self.provenance = {**terms.facts(), "trace": trace_digest(trace), "settings": settings, "options": options}
        self.job = Job(policy, trace, terms.model, settings, options, name, terms.slo)

    def figures(self) -> dict[str, Any] | None:
        """What an earlier run found, if nothing that it depends on has changed."""
        try:
            content = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(content, dict) or content.get("provenance") != self.provenance:
            return None
        return content.get("figures")

    def keep(self, figures: dict[str, Any]) -> None:
        """Write the file."""
        replace_text(self.path, json.dumps({"provenance": self.provenance, "figures": figures}, indent=1), "results")


def figures_of(result: ReplayResult) -> dict[str, Any]:
    """What a cell keeps of a run, to five digits."""
    summary = asdict(result.summary)
    figures: dict[str, Any] = {
        name: None if summary[name] is None else float(f"{summary[name]:.5g}") for name in FIGURES
    }
    return figures


class Suite:
    """The cases under the policies; `say` is called with a line about each case that is left out."""

    def __init__(
        self, cases: Sequence[Case], policies: Sequence[str], terms: Terms, out: Path, say: Callable[[str], None]
    ) -> None:
        self.terms, self.policies, self.say = terms, policies, say
        self.folder, self.logs = out / "cells", out / "logs"
        self.traces: dict[str, Trace] = {}
        self.skipped: list[str] = []
        self.errors: dict[str, str] = {}
        for case in cases:
            trace = case.trace(terms.folder, terms.seed, terms.short)
            if trace is None:
                self.skipped.append(case.name)
            else:
                check_fits(trace, case.kv_tokens, terms.server.get("page_size", 1))
                self.traces[case.name] = trace
        self.cases = [case for case in cases if case.name in self.traces]
        if self.skipped:
            say(f"left out, no such file in --traces: {', '.join(self.skipped)}")
        for place in (self.folder, self.logs):
            place.mkdir(parents=True, exist_ok=True)

    def run(self, at_a_time: int, console: Console, executor: Executor | None = None) -> dict[str, Any]:
        """Run what no earlier run has, in child processes if nothing else is said; all results."""
        self.executor = executor or events
        scales = self.scales(at_a_time, console)
        cells = [
            self.cell(case, policy, scales[case.name])
            for case in self.cases
            if case.name in scales
            for policy in self.policies
        ]
        self.run_cells(cells, "cells", at_a_time, console)
        return self.results(cells)

    def scales(self, at_a_time: int, console: Console) -> dict[str, float]:
        """Times its rate at which each case runs; a case whose capacity could not be found is left out."""
        loaded = [case for case in self.cases if case.load is not None]
        capacity = {case.served: self.cell(case, "fcfs", ALL_AT_ONCE, capacity=True) for case in loaded}
        self.run_cells(list(capacity.values()), "what fcfs sustains", at_a_time, console)
        scales = {}
        for case in self.cases:
            if case.load is None:
                scales[case.name] = 1.0
            elif (figures := capacity[case.served].figures()) is not None:
                last = self.traces[case.name].requests[-1].arrival_s
                scales[case.name] = case.load * last / figures["makespan"]
            else:  # it has failed, and that was said
                self.skipped.append(case.name)
        return scales

    def cell(self, case: Case, policy: str, scale: float, capacity: bool = False) -> Cell:
        """A case under a policy, at so many times its rate."""
        trace = self.traces[case.name]
        trace = trace.scaled(scale) if scale != 1.0 else trace
        return Cell(case, policy, trace, self.terms, self.folder, capacity)

    def run_cells(self, cells: Sequence[Cell], what: str, at_a_time: int, console: Console) -> None:
        """Run those that lack a file; one that fails costs itself alone."""
        missing = {cell.job.name: cell for cell in cells if cell.figures() is None}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        jobs = [cell.job for cell in missing.values()]
        with (
            Progress(*columns, console=console) as progress,
            closing(self.executor(jobs, at_a_time, self.logs, replay)) as heard,
        ):
            bar = progress.add_task(what, total=len(cells), completed=len(cells) - len(missing))
            for name, kind, value in heard:
                if kind in ("start", "progress"):
                    continue
                if kind == "done":
                    missing[name].keep(figures_of(value))
                else:
                    self.errors[name] = reason = str(value).partition("\n")[0][:200].rstrip(".")
                    self.say(f"{name}: {reason}; see {self.logs / f'{name}.log'}")
                progress.advance(bar)

    def results(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """All that is known, as ``suite.json`` has it."""
        cases: dict[str, dict[str, Any]] = {}
        for cell in cells:
            case = cell.case
            entry = cases.setdefault(
                case.name,
                {
                    "kind": case.kind,
                    "requests": len(cell.trace.requests),
                    "rate": round(cell.trace.rate, 4),
                    "load": case.load,
                    "kv_tokens": case.kv_tokens,
                    "policies": {},
                },
            )
            failed = {"error": self.errors.get(cell.job.name, "not run")}
            entry["policies"][cell.policy] = cell.figures() or failed
        return {**self.terms.facts(), "skipped": self.skipped, "cases": cases}
