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
DRAWS = ("draws", "draws_last", "draws_even")  # three servers, the last build last
MEMORY = ("memory_fa3", "memory_fa3_last")
TABLES = ("table_pat", "table_fa3", "table_flashinfer")
TABLE_POLICIES = ("fcfs", "lpm", "feather-bandit", "feather-qlearning")
BEFORE_DRAWS = "draws_before"  # another server, an older build
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


def short_runs(names):
    """Of each case and policy the records by server."""
    found = {}
    for name in names:
        for record in run(name)["records"]:
            assert not record["overall"]["unfinished"] and not record["overall"]["failed"]
            policy = record["server"].partition("+")[2] or "fcfs"
            found.setdefault((record["case"], policy), {})[name] = record
    return found


def ratios(runs, case, over, policy="feather-bandit"):
    """One for each server that ran both."""
    others = runs[case, over]
    return [tok_s(record) / tok_s(others[name]) for name, record in runs[case, policy].items() if name in others]


def listed(records, text):
    return ", ".join(text(record) for record in records)


def figures(records):
    """Cells from the cache hit on."""
    return [
        listed(records, lambda r: f"{r['overall']['cache_hit']:.3f}"),
        *(listed(records, lambda r, key=key: f"{r['overall']['ttft_s'][key]:.1f} s") for key in ("mean", "p99")),
        listed(records, lambda r: f"{r['overall']['e2e_s']['mean']:.1f} s"),
        listed(records, lambda r: f"{r['log']['retractions']}"),
        listed(records, lambda r: f"{r['activity']['busy']:.1f}%"),
    ]


def rates_of(records):
    return listed(records, lambda r: f"{tok_s(r):,.0f}")


def times(values):
    return ", ".join(f"{value:.3f}x" for value in values)


def draw_line(case):
    runs = short_runs(DRAWS)
    dfs, bandit = (list(runs[case, policy].values()) for policy in ("dfs-weight", "feather-bandit"))
    cells = [case, rates_of(dfs), rates_of(bandit), times(ratios(runs, case, "dfs-weight")), *figures(bandit)]
    return f"| {' | '.join(cells)} |"


def memory_line(case, policy):
    runs = short_runs(MEMORY)
    records = list(runs[case, policy].values())
    over = [times(ratios(runs, case, other, policy)) for other in ("fcfs", "dfs-weight")]
    return f"| {' | '.join([case, policy, rates_of(records), *over, *figures(records)])} |"


def tables():
    """Backend and case, and the records by policy."""
    found = {}
    for name in TABLES:
        for (case, policy), records in short_runs([name]).items():
            found.setdefault((name.removeprefix("table_"), case), {})[policy] = records[name]
    return found


def table_line(backend, case, records):
    ran = [records[policy] for policy in TABLE_POLICIES if policy in records]
    fcfs = tok_s(records["fcfs"])
    cells = [
        f"{case} on `{backend}`", rates_of(ran), times(tok_s(record) / fcfs for record in ran[1:]),
        *(listed(ran, lambda r, name=name, key=key: f"{r['overall'][name][key]:.2f} s")
          for name, key in (("ttft_s", "mean"), ("ttft_s", "p99"), ("e2e_s", "mean"))),
        listed(ran, lambda r: f"{r['overall']['cache_hit']:.3f}"), listed(ran, lambda r: f"{r['log']['retractions']}"),
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
    draws = "\n".join(draw_line(case) for case, policy in short_runs(DRAWS) if policy == "dfs-weight")
    memory = "\n".join(memory_line(*key) for key in short_runs(MEMORY))
    for names in (NOW, BEFORE):
        table = "\n".join(line(*row) for row in rows(names))
        assert table in TEXT, "\n" + table
    assert memory in TEXT, "\n" + memory
    assert len(re.findall(r"^\| `\w+` \|", TEXT, re.MULTILINE)) == len(ROWS)
    assert draws in TEXT, "\n" + draws
    full = "\n".join(table_line(*key, records) for key, records in tables().items())
    assert full in TEXT, "\n" + full


@pytest.mark.parametrize("name", [*RUNS, *DRAWS, *MEMORY, *TABLES])
def test_the_servers_ran_by_default(name):
    content = run(name)
    (command,) = [server["command"] for server in content["servers"].values() if "command" in server]
    assert "--disable-prefill-cuda-graph" not in command and "--feather-pace" not in content["command"]
    assert {server["kv_tokens"] for server in content["servers"].values() if "command" in server} == {200_000}
    policies = {server.partition("+")[2] for server in content["servers"]}
    others = {one: {"dfs-weight", "feather-bandit"} for one in DRAWS}
    others |= {one: {"", *TABLE_POLICIES[1:]} for one in TABLES}
    others[MEMORY[0]] = {"", "dfs-weight", "feather-bandit"}
    assert policies == others.get(name, {"", "feather-bandit"})
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
    fits = {r["server"]: r["overall"]["e2e_s"]["mean"] for r in run("fits_pat")["records"] if r["case"] == "W3"}
    now = [record["overall"]["e2e_s"]["mean"] for record in pairs("default_pat")["W3"]]
    said(
        f"There the mean E2E is up to {100 * longer - 100:.0f}% longer, but that is no policy's doing: ",
        f"on `pat` fcfs has had {now[0]:.2f} s and {fits['pat']:.2f} s, feather-bandit {now[1]:.2f} s and "
        f"[{fits['pat+feather-bandit']:.2f} s]",
    )
    bare = [text.replace("+", "") for text in ranges]
    said(f"as it is by default is ahead of fcfs by {bare[0]}, {bare[1]} and {bare[2]}", where=README)
    said(f"{', '.join(ranges)}; on W3, where nothing is shared, {percent(min(w3))} to {percent(max(w3))}")


def test_what_is_said_of_all_policies_where_prefixes_fit_follows():
    found = tables()
    fitting = {key: records for key, records in found.items() if key[1] != "W2"}
    assert fitting.keys() == {(backend, case) for backend in BACKENDS for case in ("W1", "W3", "W7", "W5:1200")}
    missing = [key for key, records in found.items() if records.keys() != set(TABLE_POLICIES)]
    assert missing == [("fa3", "W3")] and found["fa3", "W3"].keys() == set(TABLE_POLICIES[:3])
    to_best = {
        key: tok_s(records["feather-bandit"]) / max(tok_s(records["fcfs"]), tok_s(records["lpm"]))
        for key, records in fitting.items()
    }
    shared = [f"{percent(min(of))} to {percent(max(of))} on `{backend}`" for backend in BACKENDS
              if (of := [ratio for (b, case), ratio in to_best.items() if b == backend and case != "W3"])]  # fmt: skip
    alone = [ratio for (_, case), ratio in to_best.items() if case == "W3"]
    lpm = [tok_s(records["lpm"]) / tok_s(records["fcfs"]) for records in fitting.values()]
    learnt = [tok_s(r["feather-qlearning"]) / tok_s(r["feather-bandit"]) for r in found.values() if len(r) == 4]
    assert min(to_best.values()) > 0.99 and min(alone) < 1
    said(
        f"to the better of fcfs and lpm feather-bandit has {', '.join(shared)}; on W3 {percent(min(alone))} to "
        f"{percent(max(alone))}",
        f"lpm lies between {percent(min(lpm))} and {percent(max(lpm))} of fcfs",
        f"feather-qlearning within {100 * max(abs(ratio - 1) for ratio in learnt):.1f}% of feather-bandit",
    )
    stops = {r["admission"]["stops"] for rows in found.values() for p, r in rows.items() if p.startswith("feather")}
    assert stops == {0}
    w1, w5 = (tok_s(found["pat", case]["feather-bandit"]) for case in ("W1", "W5:1200"))
    said(f"[by default](#by-default) {w1:,.0f} on W1 and {w5:,.0f} on the first 1,200 of W5")


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
    runs, cases = short_runs(DRAWS), ["W2", *(f"W2@{seed}" for seed in range(1, 6))]
    rates = {name: [tok_s(runs[case, "feather-bandit"][name]) for case in cases] for name in DRAWS}
    over = [ratio for case in cases for ratio in ratios(runs, case, "dfs-weight")]
    (again,) = [tok_s(bandit) for name, case, _, bandit in rows(NOW) if (name, case) == ("pat", "W2")]
    last = tok_s(tables()["pat", "W2"]["feather-bandit"])
    every = [rate for name in DRAWS for rate in rates[name]]
    means = [f"{mean(rates[name]):,.0f}" for name in DRAWS]
    first = [rates[name][0] for name in DRAWS]
    above = [sum(rate > 6000 for rate in rates[name]) for name in DRAWS]
    assert min(mean(rates[name]) for name in DRAWS) >= 6000 > max(*first, again, last)
    words = (
        f"{means[0]}, {means[1]} and {means[2]} tok/s in the mean of six draws, {min(every):,.0f} to {max(every):,.0f}"
    )
    said(
        words,
        f"{mean(over):.2f}x dfs-weight ({min(over):.2f} to {max(over):.2f})",
        f"{above[0]}, {above[1]} and {above[2]} of the six have more than 6,000",
        f"{first[0]:,.0f}, {first[1]:,.0f} and {first[2]:,.0f} here, {again:,.0f} and {last:,.0f} on other servers",
    )
    low, high = min(*first, again, last), max(*first, again, last)
    said(words, f"the draw of the table above has had {low:,.0f} to {high:,.0f}", where=README)
    runs = short_runs([*DRAWS, BEFORE_DRAWS])
    cases += ["W6", "W6@1"]
    thrown_out = [
        sum(ran[name]["log"]["retractions"] for case in cases if name in (ran := runs[case, "feather-bandit"]))
        for name in (BEFORE_DRAWS, *DRAWS)
    ]
    w2 = runs["W2", "feather-bandit"][BEFORE_DRAWS]
    assert thrown_out[2:] == [0, 0]
    said(
        f"requests retracted in the eight runs are {thrown_out[1]} and none, in the six of the third none",
        f"these eight runs of feather-bandit had {thrown_out[0]} retractions, "
        f"{w2['log']['retractions']} of them in the first, which had {tok_s(w2):,.0f} tok/s",
    )


def test_what_is_said_where_memory_is_short_follows():
    runs = short_runs(MEMORY)
    fcfs = {case: ratios(runs, case, "fcfs") for case in ("W6", "W2", "W6@1")}
    dfs = {case: ratios(runs, case, "dfs-weight")[0] for case in ("W6", "W2", "W6@1")}
    p99 = [runs["W2", policy][MEMORY[0]]["overall"]["ttft_s"]["p99"] for policy in ("feather-bandit", "dfs-weight")]
    assert min(fcfs["W6"] + fcfs["W2"]) >= 1.8 and dfs["W2"] >= 1.2 and p99[0] < p99[1]
    own = {case: tok_s(runs[case, "feather-bandit"][MEMORY[1]]) for case in fcfs}
    pat = {case: gain(*records) for name, case, *records in rows(NOW) if name == "pat"}
    text = {case: " and ".join(f"{ratio:.2f}x" for ratio in fcfs[case]) for case in fcfs}
    said(
        f"W6 {text['W6']} fcfs, {dfs['W6']:.2f}x dfs-weight",
        f"W2 {text['W2']}, and {dfs['W2']:.2f}x with a p99 of the time to the first token of {p99[0]:.1f} s for "
        f"{p99[1]:.1f} s",
        f"on another draw W6 has {text['W6@1']}",
        f"{own['W6']:,.0f} and {own['W6@1']:,.0f} tok/s in the last build",
        f"with `pat` W2 has {pat['W2']:.2f}x fcfs and W6 {pat['W6']:.2f}x",
        f"| {dfs['W2']:.2f}x dfs-weight, {p99[0]:.1f} s for {p99[1]:.1f} s; before",
    )
    assert not any(runs[case, "feather-bandit"][MEMORY[1]]["log"]["retractions"] for case in fcfs)


def test_readme_says_the_same():
    runs, packed = short_runs(MEMORY), short_runs(DRAWS)
    for case, groups in (("W2", "50 groups x 5K, 50 requests/s"), ("W6", "20 groups x 10K, 100 requests/s")):
        fcfs, dfs, own = (tok_s(runs[case, policy][MEMORY[0]]) for policy in ("fcfs", "dfs-weight", "feather-bandit"))
        (row,) = (row for row in README.split(" | | ") if row.startswith(groups))
        words = f"fcfs {fcfs:,.0f} tok/s, dfs-weight {dfs:,.0f}, `feather-bandit` {own:,.0f}; with `pat` "
        assert words + f"{tok_s(packed[case, 'feather-bandit'][DRAWS[1]]):,.0f}" in row


def test_every_command_is_there():
    for name in (*RUNS, *DRAWS, BEFORE_DRAWS, *MEMORY, *TABLES):
        assert re.search(rf"bench_server\.py --from [^`]*policies_h200_{name}\.json", TEXT, re.DOTALL), name
