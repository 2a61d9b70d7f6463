"""Runs of real servers in docs/measured, and the lines that docs/results.md has of them."""

import json
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs" / "measured"
RESULTS = (ROOT / "docs" / "results.md").read_text()
POLICIES = (
    "fcfs", "lpm", "dfs-weight", "feather-order", "feather-bandit", "feather-qlearning", "feather-heuristic",
)  # fmt: skip


def read(name):
    return json.loads((MEASURED / f"policies_h200_{name}.json").read_text())


class Run:
    """The records of files by (case, policy), each a list of rounds; what was cut off is left out."""

    def __init__(self, *names):
        self.records = {}
        contents = [read(name) for name in names]
        self.kv_tokens = max(
            server["kv_tokens"] for content in contents for server in content["servers"].values() if "command" in server
        )
        for record in (record for content in contents for record in content["records"]):
            assert not record["overall"]["failed"]
            if not record["overall"]["unfinished"]:
                server = record["server"].replace("-paced", "+paced")
                self.backend, _, policy = (f"pat+{server}" if server.endswith("-off") else server).partition("+")
                self.records.setdefault((record["case"], policy or "fcfs"), []).append(record)

    @property
    def cases(self):
        return list(dict.fromkeys(case for case, _ in self.records))

    def values(self, case, policy, *keys):
        """A figure of every round."""
        found = []
        for record in self.records[case, policy]:
            for key in keys:
                record = record[key]
            found.append(record)
        return found

    def value(self, *where):
        return mean(self.values(*where))

    def tok_s(self, case, policy):
        return self.value(case, policy, "overall", "tok_s")

    def gain(self, case, policy, over="fcfs"):
        return self.tok_s(case, policy) / self.tok_s(case, over)

    def ttft(self, case, policy, key="mean"):
        return self.value(case, policy, "overall", "ttft_s", key)

    def e2e(self, case, policy):
        return self.value(case, policy, "overall", "e2e_s", "mean")

    def hit(self, case, policy):
        return self.value(case, policy, "overall", "cache_hit")

    def busy(self, case, policy):
        return self.value(case, policy, "activity", "busy")

    def retractions(self, case, policy):
        return sum(self.values(case, policy, "log", "retractions"))

    def round_ms(self, case, policy):
        """Processor time of an admission round."""
        return mean(1e3 * one["seconds"] / one["rounds"] for one in self.values(case, policy, "admission"))

    def request_us(self, case, policy):
        """Processor time of admission for each request that was served."""
        return mean(1e6 * r["admission"]["seconds"] / r["overall"]["finished"] for r in self.records[case, policy])

    def share(self, case, policy):
        """Admission's processor time, percent of the run."""
        return mean(
            100 * record["admission"]["seconds"] / record["overall"]["seconds"] for record in self.records[case, policy]
        )

    def lines(self, cases=None):
        """Table lines, a case and a policy each."""
        return [
            self._line(case, policy)
            for wanted in cases or self.cases
            for case, policy in self.records
            if case == wanted
        ]

    def _line(self, case, policy):
        over = [
            f"{self.gain(case, policy, other):.3f}x" if other != policy and (case, other) in self.records else ""
            for other in ("fcfs", "dfs-weight")
        ]
        cells = [
            label(case), policy, ", ".join(f"{rate:,.0f}" for rate in self.values(case, policy, "overall", "tok_s")),
            *over, f"{self.hit(case, policy):.3f}",
            *(f"{value:.2f} s" for value in (self.ttft(case, policy), self.ttft(case, policy, "p99"))),
            f"{self.e2e(case, policy):.2f} s", f"{self.retractions(case, policy)}",
            f"{self.round_ms(case, policy):.1f} ms, {self.share(case, policy):.1f}%", self._activity(case, policy),
        ]  # fmt: skip
        return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)

    def over_fcfs(self, case, policy):
        """A cell of the overview: tok/s of fcfs, another policy's gain over it, nothing if not both ran."""
        if not {(case, policy), (case, "fcfs")} <= self.records.keys():
            return None
        return f"{self.tok_s(case, policy):,.0f}" if policy == "fcfs" else f"{self.gain(case, policy):.3f}x"

    def _activity(self, case, policy):
        if "activity" not in self.records[case, policy][0]:
            return ""
        return ", ".join(f"{self.value(case, policy, 'activity', key):.0f}%" for key in ("busy", "dram"))


def label(case):
    """A case in words: ``open:5,1000,300,100,20@1`` is 5 x 1K, 100/s, 20 output tokens, draw 1."""
    case, at, draw = case.partition("@")
    if case.startswith("open:"):
        groups, tokens, _, rate, *rest = (int(part) for part in case.removeprefix("open:").split(","))
        case = f"{groups} x {tokens / 1000:g}K, {rate}/s"
        if rest and rest[0] != 200:
            case += f", {rest[0]} output token{'s' if rest[0] > 1 else ''}"
        if len(rest) > 1:
            case += f", {rest[1]} levels"
    return case + at + draw


def overview(runs, cases):
    """Lines of backends and policies with a cell for each case; several runs of one stand in it together."""
    lines = []
    for backend in dict.fromkeys(run.backend for run in runs):
        for policy in POLICIES:
            found = [
                [cell for run in runs if run.backend == backend and (cell := run.over_fcfs(case, policy))]
                for case in cases
            ]
            if any(found):
                cells = "".join(f" {', '.join(cell)} |" if cell else " |" for cell in found)
                lines.append(f"| `{backend}` | {policy} |{cells}")
    return lines


def admission_costs(columns):
    """Lines of policies: milliseconds a round and microseconds a request for each (run, case)."""
    lines = []
    for policy in POLICIES:
        cells = [
            f" {run.round_ms(case, policy):.1f} ms, {run.request_us(case, policy):,.0f} us |"
            if (case, policy) in run.records else " |"
            for run, case in columns
        ]  # fmt: skip
        lines.append(f"| {policy} |{''.join(cells)}")
    return lines


class Ordering:
    """What row order alone gave in a case: its gain, and figures of the GPU under fcfs and under feather-order."""

    def __init__(self, run, case):
        self.case, self.kv_tokens, self.gain = case, run.kv_tokens, run.gain(case, "feather-order")
        self.ghz, self.watt, self.dram = (
            [run.value(case, policy, *keys) / unit for policy in ("fcfs", "feather-order")]
            for *keys, unit in (
                ("clocks", "sm_mhz", "mean", 1e3),
                ("clocks", "watt", "mean", 1),
                ("activity", "dram", 1),
            )
        )
        self.clock = self.ghz[1] / self.ghz[0]
        self.rest = self.gain / self.clock

    def line(self):
        cells = (
            self.case, f"{self.kv_tokens // 1000}K", f"{self.gain:.3f}x",
            f"{self.ghz[0]:.2f}, {self.ghz[1]:.2f} GHz", f"{self.clock:.3f}x", f"{self.rest:.3f}x",
            f"{self.watt[0]:.0f}, {self.watt[1]:.0f} W", f"{self.dram[0]:.0f}%, {self.dram[1]:.0f}%",
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


def percent(ratio):
    return f"{100 * ratio - 100:+.1f}%"


def span(ratios):
    """The least and the most of some ratios, in percent."""
    low, high = percent(min(ratios)), percent(max(ratios))
    return f"{low[:-1]} to {high}"


def times(ratios):
    return " and ".join(f"{ratio:.2f}x" for ratio in ratios)


class Page:
    """A page's text without its line ends: ``says(part, ...)`` wants every part in it."""

    def __init__(self, path):
        self.text = " ".join((ROOT / path).read_text().split())

    def says(self, *parts):
        for part in parts:
            assert part in self.text, part
