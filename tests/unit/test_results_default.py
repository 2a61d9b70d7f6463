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
NOW = ("default_pat", "default_w6_fa3")
BEFORE = ("default_fa3", "default_flashinfer", "default_sweep_pat", "default_sweep_fa3")  # who evicts did not go last
RUNS = NOW + BEFORE
DRAWS, MEMORY = "draws", "memory_fa3"
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


def rows(names):
    """Backend, case, fcfs, feather-bandit."""
    return [(name.rpartition("_")[2], case, *records) for name in names for case, records in pairs(name).items()]


ROWS = rows(RUNS)


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


def memory_runs():
    """Of each case and server the records that were not cut off."""
    found = {}
    for record in run(MEMORY)["records"]:
        if not record["overall"]["unfinished"]:
            found.setdefault((record["case"], record["server"]), []).append(record)
    return found


def means(case, server):
    return mean(tok_s(record) for record in memory_runs()[case, server])


def memory_line(case, server):
    records = memory_runs()[case, server]
    backend, _, policy = server.partition("+")
    ratios = [f"{means(case, server) / means(case, f'{backend}{over}'):.3f}x" for over in ("", "+dfs-weight")]
    ran = [record["overall"] for record in records]
    cells = [
        case, policy or "fcfs", ", ".join(f"{one['tok_s']:,.0f}" for one in ran), *ratios,
        f"{mean(one['cache_hit'] for one in ran):.3f}",
        *(f"{mean(one['ttft_s'][key] for one in ran):.1f} s" for key in ("mean", "p99")),
        f"{mean(one['e2e_s']['mean'] for one in ran):.1f} s",
        ", ".join(f"{record['log']['retractions']}" for record in records),
        f"{mean(record['activity']['busy'] for record in records):.1f}%",
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
    draws = "\n".join(draw_line(case, *records) for case, records in pairs(DRAWS).items())
    memory = "\n".join(memory_line(*key) for key in memory_runs())
    for names in (NOW, BEFORE):
        table = "\n".join(line(*row) for row in rows(names))
        assert table in TEXT, "\n" + table
    assert memory in TEXT, "\n" + memory
    assert len(re.findall(r"^\| `\w+` \|", TEXT, re.MULTILINE)) == len(ROWS)
    assert draws in TEXT, "\n" + draws


@pytest.mark.parametrize("name", [*RUNS, DRAWS, MEMORY])
def test_the_servers_ran_by_default(name):
    content = run(name)
    (command,) = [server["command"] for server in content["servers"].values() if "command" in server]
    assert "--disable-prefill-cuda-graph" not in command and "--feather-pace" not in content["command"]
    assert {server["kv_tokens"] for server in content["servers"].values() if "command" in server} == {200_000}
    policies = [server.partition("+")[2] for server in content["servers"]]
    others = {DRAWS: ["feather-bandit", "dfs-weight"], MEMORY: ["", "dfs-weight", "feather-bandit"]}
    assert policies == others.get(name, ["", "feather-bandit"])
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
    now, before = (
        {(name, case): gain(*records) for name, case, *records in rows(names) if case.startswith(TWENTY)}
        for names in (NOW, BEFORE)
    )
    below = [(name, case) for name, case, *records in ROWS if gain(*records) < 0.99]
    assert below == [("pat", TWENTY), ("fa3", TWENTY)] and min(now.values()) > 0.99
    assert len(now) == 4 and [key for key, value in before.items() if value < 0.99] == below
    said(
        f"With 20 output tokens {percent(min(now.values()))} to {percent(max(now.values()))} now, on three draws with "
        f"`pat` and one with `fa3`. Before, the first of these draws had {percent(before['pat', TWENTY])} on `pat` and "
        f"{percent(before['fa3', TWENTY])} on `fa3`"
    )
    said(f"had {percent(before['pat', TWENTY])} on one draw of three", where=README)
    thousand = [*of("pat", THOUSAND), *of("fa3", THOUSAND)]
    said(f"With 1K prefixes {percent(min(thousand))} to {percent(max(thousand))}")


def test_what_is_said_of_w2_follows():
    draws = pairs(DRAWS)
    rates = [[tok_s(record) for record in draws[f"W2@{seed}"]] for seed in range(6)]
    bandit, dfs = ([rate[i] for rate in rates] for i in range(2))
    ratios = [a / b for a, b in rates]
    (again,) = [tok_s(bandit) for name, case, _, bandit in rows(NOW) if (name, case) == ("pat", "W2")]
    assert mean(bandit) >= 6000 > again > bandit[0] == min(bandit)
    words = f"{mean(bandit):,.0f} tok/s in the mean of six draws, {min(bandit):,.0f} to {max(bandit):,.0f}"
    assert sum(rate > 6000 for rate in bandit) == 4
    said(
        words,
        f"{mean(bandit) / mean(dfs):.2f}x dfs-weight ({min(ratios):.2f} to {max(ratios):.2f})",
        "four of the six have more than 6,000",
        f"{bandit[0]:,.0f} here and {again:,.0f} on another GPU",
    )
    said(words, f"the draw of the table above has had {bandit[0]:,.0f} and {again:,.0f}", where=README)


def test_what_is_said_where_memory_is_short_follows():
    assert len(memory_runs()["W6", "fa3+feather-bandit"]) == len(memory_runs()["W6", "fa3"]) == 2
    w6, w2 = (
        [means(case, "fa3+feather-bandit") / means(case, over) for over in ("fa3", "fa3+dfs-weight")]
        for case in ("W6", "W2")
    )
    p99 = [
        mean(record["overall"]["ttft_s"]["p99"] for record in memory_runs()["W2", f"fa3+{policy}"])
        for policy in ("feather-bandit", "dfs-weight")
    ]
    ((_, _, fcfs, bandit),) = [row for row in ROWS if row[1] == "W6@1"]
    pat = {case: gain(*records) for name, case, *records in rows(NOW) if name == "pat"}
    assert w6[0] >= 1.8 and w2[0] >= 1.8 and w2[1] >= 1.2 and p99[0] < p99[1]
    said(
        f"W6 {w6[0]:.2f}x fcfs and {w6[1]:.2f}x dfs-weight",
        f"W2 {w2[0]:.2f}x and {w2[1]:.2f}x, with a p99 of the time to the first token of {p99[0]:.1f} s for "
        f"{p99[1]:.1f} s",
        f"on another draw W6 has {gain(fcfs, bandit):.2f}x",
        f"with `pat` W2 has {pat['W2']:.2f}x fcfs and W6 {pat['W6']:.2f}x",
        f"| {w2[1]:.2f}x dfs-weight, {p99[0]:.1f} s for {p99[1]:.1f} s; before",
    )


def test_readme_says_the_same():
    packed = {case: tok_s(bandit) for name, case, _, bandit in rows(NOW) if name == "pat"}
    for case, groups in (("W2", "50 groups x 5K, 50 requests/s"), ("W6", "20 groups x 10K, 100 requests/s")):
        fcfs, dfs, own = (means(case, server) for server in ("fa3", "fa3+dfs-weight", "fa3+feather-bandit"))
        (row,) = (row for row in README.split(" | | ") if row.startswith(groups))
        words = f"fcfs {fcfs:,.0f} tok/s, dfs-weight {dfs:,.0f}, `feather-bandit` {own:,.0f}; with `pat` "
        assert words + f"{packed[case]:,.0f}" in row


def test_every_command_is_there():
    for name in (*RUNS, DRAWS, MEMORY):
        assert re.search(rf"bench_server\.py --from [^`]*policies_h200_{name}\.json", TEXT, re.DOTALL), name
