"""``feather learn``: search the modes that keep an SLO best, and judge them on traffic that they have not seen.

A pass replays the training cases under one table of modes; what it is worth is the mean over the cases. First every
mode by itself, then, state by state, whether another mode does better there. A table that is not ahead on other
requests gives way to the best mode by itself. Each replay's figures are a file named by what it depends on, so a search
that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import check_target, replace_text
from feather_sglang.replay.arguments import add_slo, check_sglang
from feather_sglang.replay.jobs import make_folder, replay
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel, load_model
from feather_sglang.scheduling.modes.load import KEYS
from feather_sglang.scheduling.modes.mode import DEFAULT, Mode, Prefill, Ranking
from feather_sglang.scheduling.modes.mode_policy import ModePolicy
from feather_sglang.scheduling.modes.promise import Promise
from feather_sglang.slo import parse
from feather_sglang.suite.cases import TRAINING, VALIDATION, chosen
from feather_sglang.suite.judgement import FLOOR, Judge, judgement, mean, page, read, table
from feather_sglang.suite.runner import Cell, Suite, Terms

# Every way to prefill with the rankings that gain most, and every other ranking with one of them.
FIXED = (
    *(Mode(*pair) for pair in product((Ranking.SHARED, Ranking.IN_TIME), Prefill)),
    *(Mode(ranking, Prefill.SPACED) for ranking in (Ranking.RATIO, Ranking.SHORTEST, Ranking.OLDEST)),
)
STOPPING = (Mode(Ranking.SHARED, Prefill.AT_ONCE, 32),)
RIVALS = 3  # modes tried in a state beside the best of each way to prefill: the best by themselves
VISITED = 0.02  # of a case's rounds, from which on a state is looked at
GAIN = 0.002  # of the mean, from which on another mode is taken
AHEAD = 0.03  # of goodput, at least, to the best fixed mode on requests that a table was not searched on
LOSS = 0.02  # of goodput, at most, to the best fixed mode on any case
KEPT = 0.97  # of the tokens a second without any bound that may not be lost
WEIGHT = 4.0  # what each share lost beyond that costs, in shares of goodput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``feather learn``."""
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder with Mooncake's files, see the guide")
    add_slo(parser, "mooncake")
    parser.add_argument("--profile", default="h200", help="hardware profile (%(default)s)")
    parser.add_argument("--model", default="qwen3-8b", help="model whose steps are timed (%(default)s)")
    parser.add_argument("--attention", default="pat", help="decode kernel of the profile (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the generated workloads (%(default)s)")
    parser.add_argument("--sweeps", type=int, default=2, metavar="N", help="most sweeps over the states (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="replays at a time (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("modes.json"), help="policy file to write (%(default)s)")
    parser.add_argument("--show", type=Path, metavar="FILE", help="run nothing, report this judgement")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the judgement as Markdown too")


def run(args: argparse.Namespace) -> int:
    """Search, write the policy file, judge it on the suite's cases; 1 where it loses to the best fixed mode."""
    console = Console(highlight=False)
    judged = read(args.show) if args.show else search(args, console)
    console.print(table(judged))
    if args.page:
        command = f"feather learn --show {args.show or held_out_file(args.out)} --page {args.page}"
        replace_text(args.page, page(judged, command), "page")
    return int(judged["worst"] < -LOSS or judged["gain"] < 0)


def held_out_file(out: Path) -> Path:
    """Where the judgement of a policy file goes."""
    return out.parent / f"{out.stem}-training" / "held_out.json"


def search(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Search and judge as the flags say; both files are written."""
    if args.out.suffix != ".json":
        raise FeatherError(f"--out {args.out}: must be a .json file, the policy file to write")
    if min(args.jobs, args.sweeps) < 1:
        raise FeatherError("--jobs and --sweeps: give at least 1")
    if args.traces is not None and not args.traces.is_dir():
        raise FeatherError(f"--traces {args.traces}: no such folder")
    slo = parse(args.slo)
    Promise(slo)  # both bounds are there
    check_target(args.out, "policy file")
    model = StepTimeModel(load_profile(args.profile), load_model(args.model), args.attention)
    folder = make_folder(held_out_file(args.out).parent)
    terms = Terms(model, slo, check_sglang(), args.traces, args.seed)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    found = Search(Suite(TRAINING, [], terms, folder, say), args.jobs, console)
    policy = found.run(args.sweeps)
    if policy.table:
        other = Suite(VALIDATION, [], replace(terms, seed=args.seed + 1), folder, say)
        policy = found.kept(policy, Passes(other, args.jobs, console))
    policy.provenance = found.provenance()
    policy.rivals = found.to_try(policy.default)
    policy.save(args.out)
    say(f"wrote {args.out}; judging it on cases that it has not seen")
    held_out = Suite(chosen(True, ()), [], Terms(model, slo, terms.sglang, args.traces, 0, True), folder, say)
    judged = judgement(Passes(held_out, args.jobs, console), policy, found.best_fixed)
    judged = {**held_out.terms.facts(), "curve": found.curve, "validation": found.validation, **judged}
    replace_text(held_out_file(args.out), json.dumps(judged, separators=(",", ":")) + "\n", "results")
    return judged


class Passes:
    """Replays of all cases of a suite under tables of modes; what was replayed before is read."""

    def __init__(self, suite: Suite, at_a_time: int, console: Console) -> None:
        self.suite, self.at_a_time, self.console = suite, at_a_time, console
        self.scales = suite.scales(at_a_time, console)
        self.cases = {case.name: case for case in suite.cases if case.name in self.scales}
        self.files = suite.folder.parent / "tables"
        self.files.mkdir(exist_ok=True)

    def figures(self, policies: Mapping[str, ModePolicy], names: list[str] | None = None) -> dict[str, dict[str, Any]]:
        """Figures of each case (all, or those of these names) under each policy: by label, then by case."""
        cells = {
            label: {name: self.cell(policy, name) for name in names or self.cases} for label, policy in policies.items()
        }
        every = [cell for row in cells.values() for cell in row.values()]
        self.suite.run_cells(every, "replays", self.at_a_time, self.console, replay)
        return {
            label: {name: one for name, cell in row.items() if (one := cell.figures()) is not None}
            for label, row in cells.items()
        }

    def cell(self, policy: ModePolicy, name: str) -> Cell:
        """A case under a table, which is kept in a file named by its content."""
        content = policy.document() | {"rivals": [], "provenance": {}}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]
        path = (self.files / f"{digest}.json").absolute()
        if not path.exists():
            # A table of all states, so that the replay counts its rounds in each.
            ModePolicy(dict.fromkeys(KEYS, policy.default) | policy.table, policy.default).save(path)
        return self.suite.cell(self.cases[name], f"modes {digest}", self.scales[name], modes=path)


class Search(Passes):
    """The search for a table."""

    def __init__(self, suite: Suite, at_a_time: int, console: Console) -> None:
        super().__init__(suite, at_a_time, console)
        self.best_fixed: list[Mode] = []
        self.curve: list[tuple[str, float]] = []
        self.validation = ""  # what other requests said of the table
        self.base: dict[str, Any] = {}

    def worth(self, figures: Mapping[str, Any]) -> dict[str, float]:
        """Of each case: log of the share within the bounds, less what is lost of tokens a second."""
        found = {}
        for name, one in figures.items():
            lost = max(0.0, KEPT - one["output_tok_s"] / self.base[name]["output_tok_s"])
            found[name] = math.log(one["slo_share"] + FLOOR) - WEIGHT * lost
        return found

    def run(self, sweeps: int) -> ModePolicy:
        """Return the best table found."""
        modes = {str(mode): mode for mode in (*FIXED, *STOPPING)}
        every = self.figures({label: ModePolicy({}, mode) for label, mode in modes.items()})
        self.base = every[str(DEFAULT)]
        worth = {mode: mean(self.worth(every[label])) for label, mode in modes.items()}
        self.best_fixed = sorted(worth, key=worth.__getitem__, reverse=True)
        for mode in self.best_fixed:
            self.tell(f"{mode}, always", worth[mode])
        policy = ModePolicy({}, self.best_fixed[0])
        figures = every[str(self.best_fixed[0])]
        for _ in range(sweeps):
            better, figures = self.sweep(policy, figures)
            if better.table == policy.table:
                break
            policy = better
        return policy

    def sweep(self, policy: ModePolicy, figures: dict[str, Any]) -> tuple[ModePolicy, dict[str, Any]]:
        """Try other modes in each state that is visited, most visited first."""
        shares = visited(figures)
        for key in sorted(shares, key=lambda state: -sum(shares[state].values())):
            names = [name for name, share in shares[key].items() if share >= VISITED]
            now = policy.table.get(key, policy.default)
            rivals = [mode for mode in self.rivals() if mode != now]
            if not names or not rivals:
                continue
            tables = {str(mode): ModePolicy({**policy.table, key: mode}, policy.default) for mode in rivals}
            own = self.worth(figures)
            found = self.figures(tables, names)
            gains = {
                label: sum(worth - own[name] for name, worth in self.worth(one).items()) / len(own)
                for label, one in found.items()
            }
            label = max(gains, key=gains.__getitem__)
            if gains[label] >= GAIN:
                policy = tables[label]
                figures = figures | found[label]
                self.tell(f"{key}: {label}", mean(self.worth(figures)))
        return policy, figures

    def kept(self, policy: ModePolicy, others: Judge) -> ModePolicy:
        """The table if it is ahead on requests that it was not searched on, too; else the best fixed mode."""
        best = self.best_fixed[0]
        found = judgement(others, policy, [best])
        ahead = found["gain"] >= AHEAD and found["worst"] >= -LOSS
        word = "kept" if ahead else "dropped"
        self.validation = f"on other requests the table is {found['gain']:+.1%} to {best}: {word}"
        self.suite.say(self.validation)
        return policy if ahead else ModePolicy({}, best)

    def rivals(self) -> list[Mode]:
        """The best modes by themselves, and of each way to prefill the best."""
        best = {mode.prefill: mode for mode in reversed(self.best_fixed)}
        return list(dict.fromkeys([*self.best_fixed[:RIVALS], *best.values()]))

    def to_try(self, usual: Mode) -> tuple[Mode, ...]:
        """The rivals of a mode on a server, the best first; those that prefill otherwise, and differ more, before."""
        others = [mode for mode in self.best_fixed if mode in self.rivals() and mode != usual]
        return tuple(sorted(others, key=lambda mode: mode.prefill is usual.prefill))

    def tell(self, what: str, worth: float) -> None:
        """Keep a point of the learning curve."""
        self.curve.append((what, round(worth, 4)))
        self.suite.say(f"{worth:8.4f}  {what}")

    def provenance(self) -> dict[str, Any]:
        """What the policy file says of its making."""
        traces = {name: self.cell(ModePolicy({}, DEFAULT), name).provenance["trace"] for name in self.cases}
        return {**self.suite.terms.facts(), "traces": traces, "curve": self.curve, "validation": self.validation}


def visited(figures: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """By state and case, the share of the rounds in it."""
    shares: dict[str, dict[str, float]] = {}
    for name, one in figures.items():
        rounds = sum(one["modes"].values())
        for key, count in one["modes"].items():
            shares.setdefault(key, {})[name] = count / rounds
    return shares
