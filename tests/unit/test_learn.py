"""``feather learn``: what the search finds where the worth of every table is known, and what it keeps."""

import json
import math

import pytest

from feather_sglang.cli import main
from feather_sglang.scheduling.modes.mode import DEFAULT, Mode, Prefill, Ranking
from feather_sglang.scheduling.modes.mode_policy import ModePolicy
from feather_sglang.suite import learn
from feather_sglang.suite.cases import CASES, TRAINING, VALIDATION
from feather_sglang.suite.judgement import FLOOR, judgement
from feather_sglang.suite.learn import FIXED, KEPT, Search, visited
from feather_sglang.suite.runner import Suite

CASE_OF = {"idle": "free/none/small", "crowd": "short/most/large"}
GOOD = {
    "free/none/small": Mode(Ranking.SHARED, Prefill.BOUNDED),
    "short/most/large": Mode(Ranking.IN_TIME, Prefill.SPACED),
}


class Known(Search):
    """Every case is in one state all the time; a mode's share there is known."""

    def __init__(self, share):
        self.share, self.asked = share, []
        self.curve, self.base, self.best_fixed = [], {}, []
        self.suite = type("Quiet", (), {"say": lambda self, line: None})()

    def figures(self, policies, names=None):
        found = {}
        for label, policy in policies.items():
            row = {}
            for name in names or CASE_OF:
                state = CASE_OF[name]
                mode = policy.table.get(state, policy.default)
                share, tokens = self.share(name, mode)
                row[name] = {"slo_share": share, "output_tok_s": tokens, "modes": {state: 100}}
            self.asked += [(str(policy.default), len(policy.table), name) for name in row]
            found[label] = row
        return found


def test_each_state_gets_the_mode_that_is_best_there():
    def share(name, mode):
        return (0.9 if mode == GOOD[CASE_OF[name]] else 0.4 if mode == DEFAULT else 0.5), 1000.0

    search = Known(share)
    policy = search.run(sweeps=3)
    assert {state: policy.table.get(state, policy.default) for state in GOOD} == GOOD
    worths = [worth for what, worth in search.curve if "always" not in what]
    assert worths == sorted(worths) and worths[-1] == pytest.approx(math.log(0.9 + FLOOR), abs=1e-3)


@pytest.mark.parametrize(("elsewhere", "kept"), [(0.6, True), (0.51, False), (0.3, False)])
def test_a_table_that_is_not_ahead_on_other_requests_gives_way(elsewhere, kept):
    search = Known(lambda name, mode: (0.9 if mode == GOOD[CASE_OF[name]] else 0.5, 1000.0))
    policy = search.run(sweeps=1)
    others = Known(lambda name, mode: (elsewhere if mode == GOOD[CASE_OF[name]] else 0.5, 1000.0))
    others.cases = dict.fromkeys(CASE_OF)
    assert policy.table
    got = search.kept(policy, others)
    assert (got is policy) is kept
    assert kept or (got.table == {} and got.default == search.best_fixed[0])


def test_what_costs_throughput_must_bring_more_than_it_costs():
    def share(name, mode):
        return (0.6, 1000 * KEPT - 100) if mode.prefill is Prefill.BOUNDED else (0.5, 1000.0)

    policy = Known(share).run(sweeps=1)
    assert policy.default.prefill is not Prefill.BOUNDED


def test_a_search_ends_when_nothing_gains():
    search = Known(lambda name, mode: (0.5, 1000.0))
    assert search.run(sweeps=50).table == {}
    tables = {(default, size) for default, size, _ in search.asked}
    assert len(tables) <= len(FIXED) + len(learn.STOPPING) + 1 + len(CASE_OF) * (learn.RIVALS + len(Prefill))


def test_a_state_is_tried_on_the_cases_that_visit_it():
    search = Known(lambda name, mode: (0.5, 1000.0))
    search.run(sweeps=1)
    tried = [name for _, size, name in search.asked if size]
    assert sorted(tried) == sorted(list(CASE_OF) * (len(search.rivals()) - 1))  # the best fixed one is there already
    assert {mode.prefill for mode in search.rivals()} == set(Prefill)
    figures = {"a": {"modes": {"x": 1, "y": 3}}, "b": {"modes": {"y": 2}}}
    assert visited(figures) == {"x": {"a": 0.25}, "y": {"a": 0.75, "b": 1.0}}


def test_the_judgement_compares_with_the_fixed_mode_that_is_best_there():
    shares = {"learnt": (0.6, 0.5), "shared, spaced": (0.5, 0.5), "shared, at-once": (0.1, 0.9)}

    class Passes:
        cases = dict.fromkeys(["a", "b"])

        def figures(self, policies):
            return {
                label: {
                    name: {"slo_share": share, "output_tok_s": 1000.0 * share, "modes": {}}
                    for name, share in zip("ab", shares[label], strict=True)
                }
                for label in policies
            }

    fixed = [Mode(Ranking.SHARED, Prefill.SPACED), DEFAULT]
    judged = judgement(Passes(), ModePolicy({"free/none/small": DEFAULT}, DEFAULT), fixed)
    assert judged["best_fixed"] == "shared, spaced" and judged["worst"] == 0
    assert judged["gain"] == pytest.approx(math.sqrt((0.6 + FLOOR) / (0.5 + FLOOR)) - 1)
    shares["shared, at-once"] = (0.9, 0.9)  # the last where it was trained
    judged = judgement(Passes(), ModePolicy({"free/none/small": DEFAULT}, DEFAULT), fixed)
    assert judged["best_fixed"] == "shared, at-once" and judged["worst"] == pytest.approx(0.55 / 0.95 - 1)


def test_a_judgement_is_shown_again_as_it_was(monkeypatch, tmp_path, capsys):
    FakeReplays(monkeypatch)
    assert main(["learn", "--attention", "pat", "--sweeps", "1", "--out", str(tmp_path / "modes.json")]) == 0
    file, page = tmp_path / "modes-training" / "held_out.json", tmp_path / "page.md"
    capsys.readouterr()
    assert main(["learn", "--show", str(file), "--page", str(page)]) == 0
    assert "held out: +0.0%" in capsys.readouterr().out
    judged = json.loads(file.read_text())
    text = page.read_text()
    assert all(f"|{name}|" in text for name in judged["cases"]) and f"|{judged['default']}|" in text
    file.write_text("{}")
    assert main(["learn", "--show", str(file)]) == 2
    assert "no judgement of feather learn" in capsys.readouterr().err


def test_nothing_is_learnt_from_what_is_judged():
    held_out = {
        (case.file, number) for case in CASES if case.file for number in range(case.first, case.first + case.count)
    }
    used = {
        (case.file, number)
        for case in (*TRAINING, *VALIDATION)
        if case.file
        for number in range(case.first, case.first + case.count)
    }
    assert used and not used & held_out
    made = {repr(case.make) for case in CASES if case.make} & {repr(case.make) for case in TRAINING if case.make}
    assert not made


class FakeReplays:
    """Counts replays; what they find depends on the mode file that they were given."""

    def __init__(self, monkeypatch):
        self.jobs = []
        monkeypatch.setattr(Suite, "scales", lambda suite, *more: {case.name: 1.0 for case in suite.cases})
        monkeypatch.setattr(Suite, "run_cells", self.run_cells)

    def run_cells(self, cells, *more):
        for cell in cells:
            if cell.figures() is None:
                self.jobs.append(cell.job)
                spaced = "spaced" in str(ModePolicy.load(cell.job.options["modes"]).default)
                cell.keep({"slo_share": 0.5 + 0.2 * spaced, "output_tok_s": 900.0, "modes": {"free/none/small": 7}})


def test_an_interrupted_search_goes_on_where_it_was(monkeypatch, tmp_path, capsys):
    replays = FakeReplays(monkeypatch)
    command = ["learn", "--attention", "pat", "--sweeps", "1", "--out", str(tmp_path / "modes.json")]
    assert main(command) == 0
    first, text = len(replays.jobs), (tmp_path / "modes.json").read_text()
    assert first > 100 and all(job.options["slo"] == "mooncake" for job in replays.jobs)
    lost = sorted((tmp_path / "modes-training" / "cells").iterdir())[:3]
    for file in lost:
        file.unlink()
    assert main(command) == 0
    assert len(replays.jobs) == first + len(lost)
    assert (tmp_path / "modes.json").read_text() == text
    policy = ModePolicy.load(tmp_path / "modes.json")
    assert policy.default.prefill is Prefill.SPACED
    assert policy.provenance["seed"] == 1 and set(policy.provenance["traces"]) == {
        case.name for case in TRAINING if case.make
    }
    assert "held out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--out", "modes.txt"], "must be a .json file"),
        (["--slo", "ttft=2"], "give both bounds"),
        (["--traces", "none"], "none: no such folder"),
        (["--sweeps", "0"], "give at least 1"),
    ],
)
def test_mistakes_are_one_line(flags, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["learn", *flags]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error and "\n" not in error
