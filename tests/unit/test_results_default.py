"""What docs/results.md says of servers as they run by default, and of W2's draws, is what docs/measured holds."""

import json
import re
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs" / "measured"
TEXT = (ROOT / "docs" / "results.md").read_text()
SENTENCES = " ".join(TEXT.split())
README = " ".join((ROOT / "README.md").read_text().split())
RUNS = ("default_pat", "default_fa3", "default_flashinfer", "default_sweep_pat", "default_sweep_fa3", "default_w6_fa3")
DRAWS = "draws"
TWENTY, THOUSAND = "open:5,5000,300,100,20", "open:5,1000,300,100"


def run(name):
    return json.loads((MEASURED / f"policies_h200_{name}.json").read_text())


def pairs(name):
    """Of each case the records of the first server and of the second, in the order of the cases."""
    found = {}
    for record in run(name)["records"]:
        assert not record["overall"]["unfinished"] and not record["overall"]["failed"]
        found.setdefault(record["case"], {})[record["server"]] = record
    return {case: tuple(servers.values()) for case, servers in found.items()}


ROWS = [
    (name.rpartition("_")[2], case, *records) for name in RUNS for case, records in pairs(name).items()
]  # backend, case, fcfs, feather-bandit


def tok_s(record):
    return record["overall"]["tok_s"]


def gain(fcfs, bandit):
    return tok_s(bandit) / tok_s(fcfs)


def label(case):
    if not case.startswith("open:"):
        return case
    figures, at, draw = case.removeprefix("open:").partition("@")
    groups, tokens, _, rate, *rest = (int(part) for part in figures.split(","))
    text = f"{groups} x {tokens / 1000:g}K, {rate}/s"
    if rest and rest[0] != 200:
        text += f", {rest[0]} output token{'s' if rest[0] > 1 else ''}"
    if len(rest) > 1:
        text += f", {rest[1]} levels"
    return text + at + draw


def line(backend, case, fcfs, bandit):
    ran = [record["overall"] for record in (fcfs, bandit)]
    cells = [
        f"`{backend}`", label(case), ", ".join(f"{one['tok_s']:,.0f}" for one in ran), f"{gain(fcfs, bandit):.3f}x",
        *(", ".join(f"{one[name][key]:.2f} s" for one in ran)
          for name, key in (("ttft_s", "mean"), ("ttft_s", "p99"), ("e2e_s", "mean"))),
        ", ".join(f"{record['activity']['busy']:.0f}%" for record in (fcfs, bandit)),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def draw_line(case, bandit, dfs):
    cells = [
        case, f"{tok_s(dfs):,.0f}", f"{tok_s(bandit):,.0f}", f"{tok_s(bandit) / tok_s(dfs):.3f}x",
        *(", ".join(f"{r['overall']['cache_hit']:.2f}" for r in (dfs, bandit)),
          ", ".join(f"{r['overall']['ttft_s']['p99']:.1f} s" for r in (dfs, bandit))),
        f"{bandit['activity']['busy']:.1f}%",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def said(*parts, where=SENTENCES):
    for part in parts:
        assert part in where, part


def percent(ratio):
    return f"{100 * ratio - 100:+.1f}%"


def of(backend, *cases):
    """Gains over fcfs, of all draws."""
    return [gain(*records) for name, case, *records in ROWS if name == backend and case.partition("@")[0] in cases]


BACKENDS = ("pat", "fa3", "flashinfer")
SHARING = ("W1", "W4", "W5:1200", "W7")
FITTING = ("W3", *SHARING)


def test_the_tables_hold_what_was_measured():
    table = "\n".join(line(*row) for row in ROWS)
    draws = "\n".join(draw_line(case, *records) for case, records in pairs(DRAWS).items())
    assert table in TEXT, "\n" + table
    assert len(re.findall(r"^\| `\w+` \|", TEXT, re.MULTILINE)) == len(ROWS)
    assert draws in TEXT, "\n" + draws


@pytest.mark.parametrize("name", [*RUNS, DRAWS])
def test_the_servers_ran_by_default(name):
    content = run(name)
    (command,) = [server["command"] for server in content["servers"].values() if "command" in server]
    assert "--disable-prefill-cuda-graph" not in command and "--feather-pace" not in content["command"]
    assert {server["kv_tokens"] for server in content["servers"].values() if "command" in server} == {200_000}
    policies = [server.partition("+")[2] for server in content["servers"]]
    assert policies == (["feather-bandit", "dfs-weight"] if name == DRAWS else ["", "feather-bandit"])
    said(f"docs/measured/policies_h200_{name}.json")


def test_where_memory_suffices_nothing_is_lost():
    fitting = [row for row in ROWS if row[1].partition("@")[0] in FITTING]
    wanted = {(backend, case) for backend in BACKENDS for case in FITTING} - {("fa3", "W5:1200")}
    assert {(backend, case.partition("@")[0]) for backend, case, *_ in fitting} == wanted
    least = min(gain(*row[2:]) for row in fitting)
    assert least > 0.99
    w3 = [ratio for backend in BACKENDS for ratio in of(backend, "W3")]
    gains = {backend: of(backend, *SHARING) for backend in BACKENDS}
    ranges = [f"{percent(min(g))[:-1]} to {percent(max(g))} on `{backend}`" for backend, g in gains.items()]
    longer = max(
        bandit["overall"]["e2e_s"]["mean"] / fcfs["overall"]["e2e_s"]["mean"]
        for _, case, fcfs, bandit in ROWS
        if case.startswith("W3")
    )
    said(f"There the mean E2E is up to {100 * longer - 100:.0f}% longer")
    bare = [text.replace("+", "") for text in ranges]
    said(f"as it is by default is ahead of fcfs by {bare[0]}, {bare[1]} and {bare[2]}", where=README)
    said(f"{', '.join(ranges)}; on W3, where nothing is shared, {percent(min(w3))} to {percent(max(w3))}")


def test_short_runs_are_told():
    twenty = {(name, case): gain(*records) for name, case, *records in ROWS if case.startswith(TWENTY)}
    losing = {key: value for key, value in twenty.items() if value < 0.99}
    below = {(name, case) for name, case, *records in ROWS if gain(*records) < 0.99}
    assert set(losing) == below == {("pat", TWENTY), ("fa3", TWENTY)}
    others = [percent(twenty[key]) for key in (("pat", f"{TWENTY}@1"), ("pat", f"{TWENTY}@2"), ("fa3", f"{TWENTY}@1"))]
    (first,) = [records for name, case, *records in ROWS if (name, case) == ("pat", TWENTY)]
    ends = [record["overall"]["seconds"] for record in first]
    means = [record["overall"]["e2e_s"]["mean"] for record in first]
    said(
        f"**20 output tokens lose on one draw of three**: {percent(losing['pat', TWENTY])} on `pat` and "
        f"{percent(losing['fa3', TWENTY])} on `fa3`; the others {others[0]}, {others[1]} and {others[2]}",
        f"the first ends after {ends[1]:.1f} s for {ends[0]:.1f} s",
        f"the mean E2E is {means[1]:.2f} s for {means[0]:.2f} s",
    )
    said(f"lost {percent(losing['pat', TWENTY])[1:]} on one draw of three", where=README)
    thousand = [*of("pat", THOUSAND), *of("fa3", THOUSAND)]
    said(f"With 1K prefixes {percent(min(thousand))} to {percent(max(thousand))}")


def test_what_is_said_of_w2_follows():
    rates = [[tok_s(record) for record in records] for records in pairs(DRAWS).values()]
    bandit, dfs = ([rate[i] for rate in rates] for i in range(2))
    ratios = [a / b for a, b in rates]
    assert len(rates) == 6 and list(pairs(DRAWS)) == [f"W2@{seed}" for seed in range(6)]
    assert mean(bandit) >= 6000 > bandit[0] == min(bandit)
    words = f"{mean(bandit):,.0f} tok/s in the mean of six draws, {min(bandit):,.0f} to {max(bandit):,.0f}"
    assert sum(rate > 6000 for rate in bandit) == 4
    said(
        words,
        f"{mean(bandit) / mean(dfs):.2f}x dfs-weight ({min(ratios):.2f} to {max(ratios):.2f})",
        "four of the six have more than 6,000",
    )
    said(words, where=README)


def test_what_is_said_of_w6_follows():
    ((_, _, fcfs, bandit),) = [row for row in ROWS if row[1] == "W6@1"]
    said(f"and on another draw {gain(fcfs, bandit):.2f}x", f"W6 on `fa3` has {gain(fcfs, bandit):.2f}x on another draw")


def test_every_command_is_there():
    for name in (*RUNS, DRAWS):
        assert re.search(rf"bench_server\.py --from [^`]*policies_h200_{name}\.json", TEXT, re.DOTALL), name
