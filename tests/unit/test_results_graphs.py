"""What docs/results.md and docs/scheduler.md say of runs with prefill CUDA graphs is what docs/measured holds."""

import json
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs" / "measured"
TEXT = (ROOT / "docs" / "results.md").read_text()
SENTENCES = " ".join(TEXT.split())
SCHEDULER = " ".join((ROOT / "docs" / "scheduler.md").read_text().split())
README_LINES = (ROOT / "README.md").read_text().splitlines()
README = " ".join(" ".join(README_LINES).split())
PAT = ("pat_a", "pat_b", "pat_c", "pat_d", "pat_e", "low", "hundred")
OTHERS = ("flashinfer", "fa3_w6", "fa3_w6_b", "fa3_a", "fa3_b", "fa3_w4")
OWN = ("own_pat", "own_fa3", "own_fa3_w2")
EAGER = "pace"  # without prefill CUDA graphs
CALLED = {"low": "pat low", "hundred": "pat 100", EAGER: "eager"}
CUT = ("pat_d", "W5:1200", "pat+feather-bandit")
HUNDRED = "open:100,5000,600,60"
SLOW, TWENTY_FIVE, TWENTY = "open:5,5000,100,5", "open:5,5000,250,25", "open:20,5000,250,25"


def path(name):
    return MEASURED / f"policies_h200_{'' if name == EAGER else 'graphs_'}{name}.json"


def called(name):
    return CALLED.get(name, name.replace("_", " "))


def read(name):
    """The records of a run by case and server, in the order of its rounds; without the one that was cut off."""
    found = {}
    for record in json.loads(path(name).read_text())["records"]:
        case, server = record["case"], record["server"]
        if (name, case, server) == CUT:
            assert record["overall"]["unfinished"]
            continue
        assert not record["overall"]["unfinished"] and not record["overall"]["failed"]
        if name in ("pat_d", "pat_e") and server == "pat+feather-bandit":
            server = "pat-paced"  # the default there
        found.setdefault((case, server), []).append(record)
    return found


RUNS = {name: read(name) for name in (*PAT, *OTHERS, *OWN, EAGER)}


def figure(name, case, server, *keys):
    """Mean of a figure over the rounds."""

    def pick(record):
        for key in keys:
            record = record[key]
        return record

    return mean(pick(record) for record in RUNS[name][case, server])


def tok_s(name, case, server):
    return figure(name, case, server, "overall", "tok_s")


def gain(name, case, server, over):
    return tok_s(name, case, server) / tok_s(name, case, over)


def percent(name, case, server, over):
    return f"{100 * gain(name, case, server, over) - 100:+.1f}%"


def case_called(case):
    if not case.startswith("open:"):
        return case
    groups, tokens, _, rate = (int(part) for part in case.removeprefix("open:").split(","))
    return f"{groups} x {tokens / 1000:g}K, {rate}/s"


def rows(names):
    lines = []
    for name in names:
        for case, server in RUNS[name]:
            records = RUNS[name][case, server]
            backend = next(one for one in ("fa3", "flashinfer", "pat") if server.startswith(one))
            policy = server.removeprefix(backend)[1:] or "fcfs"
            over = [
                f"{gain(name, case, server, other):.3f}x" if other != server and (case, other) in RUNS[name] else ""
                for other in (backend, f"{backend}+dfs-weight")
            ]
            share = mean(r["admission"]["seconds"] / r["overall"]["seconds"] for r in records)
            cells = [
                called(name), case_called(case), f"`{backend}`, {policy}",
                ", ".join(f"{r['overall']['tok_s']:,.0f}" for r in records), *over,
                f"{figure(name, case, server, 'overall', 'cache_hit'):.2f}",
                *(f"{figure(name, case, server, 'overall', 'ttft_s', key):.2f} s" for key in ("mean", "p99")),
                f"{figure(name, case, server, 'overall', 'e2e_s', 'mean'):.1f} s",
                f"{sum(r['log']['retractions'] for r in records)}", f"{100 * share:.1f}%",
                f"{figure(name, case, server, 'activity', 'busy'):.1f}%",
            ]  # fmt: skip
            lines.append("|" + "".join(f" {cell} |" if cell else " |" for cell in cells))
    return lines


TABLES = {
    "200,000 KV tokens": rows(PAT + OTHERS),
    "the H200's own": rows(OWN),
    "without prefill CUDA graphs": rows((EAGER,)),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_hold_what_was_measured(name):
    assert "\n".join(TABLES[name]) in TEXT, "\n" + "\n".join(TABLES[name])


def test_no_other_table_line_names_a_run():
    starts = tuple(f"| {called(name)} |" for name in RUNS)
    assert sorted(line for line in TEXT.splitlines() if line.startswith(starts)) == sorted(
        line for lines in TABLES.values() for line in lines
    )


def said(*parts, where=SENTENCES):
    for part in parts:
        assert part in where, part


def test_the_servers_were_what_the_page_says():
    for name in RUNS:
        run = json.loads(path(name).read_text())
        started = [one for one in run["servers"].values() if "command" in one]  # the others were switched to
        assert {"--disable-prefill-cuda-graph" in one["command"] for one in started} == {name == EAGER}
        tokens = {one["kv_tokens"] for one in started}
        assert tokens == {699117 if name in OWN else 200000}
        assert ("pat-paced" not in run["servers"]) or "--feather-pace 0.1'" in run["command"]


BANDIT, PACED, ORDER = "pat+feather-bandit", "pat-paced", "pat+feather-order"
FLASH = "flashinfer"
OLD = (("pat_a", "W1"), ("pat_b", "W1"), ("pat_a", "W5:1200"), ("pat_b", "W5:1200"), ("pat_a", "W7"))
NEW = (("low", "W1"), ("low", "W4"))
LATEST = (("pat_e", "W1"), ("pat_e", "W5:1200"), ("pat_e", "W7"))
FITTING = (*OLD, ("pat_c", "W4"), *NEW)
LOW = (SLOW, TWENTY_FIVE, TWENTY)
EAGER_CASES = ("W4", "W1", "W5:1200", "W7")


def busy(servers, runs):
    found = [figure(name, case, server, "activity", "busy") for name, case in runs for server in servers]
    return f"{min(found):.0f} to {max(found):.0f}%"


def wait(name, case, server, key="mean"):
    return figure(name, case, server, "overall", "ttft_s", key)


def e2e(name, case, server):
    return figure(name, case, server, "overall", "e2e_s", "mean")


def ms(seconds):
    return f"{1e3 * seconds:.0f}"


def test_what_is_said_of_no_pacing_follows():
    alone = {run: percent(*run, BANDIT, "pat") for run in FITTING}
    w1, w5 = ([alone[name, case] for name in names if (name, case) in alone]
              for case, names in (("W1", ("pat_a", "pat_b", "low")), ("W5:1200", ("pat_a", "pat_b"))))  # fmt: skip
    said(
        f"to fcfs {w1[0]}, {w1[1]} and {w1[2]} on W1, {w5[0]} and {w5[1]} on W5, {alone['pat_a', 'W7']} on W7, "
        f"{alone['pat_c', 'W4']} and {alone['low', 'W4']} on W4",
        f"the GPU is busy for {busy([BANDIT], FITTING)[:-1]}% of these runs, under fcfs for {busy(['pat'], FITTING)}",
        f"The {alone['pat_c', 'W4']} is an older run",
    )
    assert min(gain(*run, BANDIT, "pat") for run in FITTING) == gain("pat_c", "W4", BANDIT, "pat")


def test_what_is_said_of_pacing_follows():
    paced = {run: percent(*run, PACED, "pat") for run in FITTING}
    both = {run: percent(*run, PACED, BANDIT) for run in FITTING}
    latest = [100 * gain(*run, PACED, "pat") - 100 for run in (*OLD, *NEW, *LATEST)]
    w1, w5, w7 = (percent(*run, PACED, "pat") for run in LATEST)
    peaks = [max(r["overall"]["peak_running"] for r in RUNS["low"]["W4", server]) for server in (PACED, "pat")]
    for found, start in ((paced, "to fcfs"), (both, "To the same policy without pacing it is")):
        said(
            f"{start} {found['pat_a', 'W1']}, {found['pat_b', 'W1']} and {found['low', 'W1']} on W1, "
            f"{found['pat_a', 'W5:1200']} and {found['pat_b', 'W5:1200']} on W5, {found['pat_a', 'W7']} on W7, "
            f"{found['low', 'W4']} on W4"
        )
    said(
        f"it gains {min(latest):.1f} to {max(latest):.1f}%**",
        f'"pat e" {w1} on W1, {w5} on W5 and {w7} on W7. The GPU is busy for {busy([PACED], (*OLD, *NEW, *LATEST))}',
        f"on W6 {percent('pat_c', 'W6', PACED, BANDIT)}, on W2 {percent('pat_a', 'W2', PACED, BANDIT)} and "
        f"{percent('pat_b', 'W2', PACED, BANDIT)}; W3 is level with fcfs ({percent('pat_c', 'W3', PACED, 'pat')})",
        f"on W1 from {wait('pat_a', 'W1', BANDIT):.2f} s to {wait('pat_a', 'W1', PACED):.2f} s",
        f"on W4 {peaks[0]} at most for fcfs's {peaks[1]}, with a mean E2E of {e2e('low', 'W4', PACED):.1f} s for "
        f"{e2e('low', 'W4', 'pat'):.1f} s",
        f'In the older run on W4, "pat c", paced was {paced["pat_c", "W4"][1:]} below fcfs',
    )


def test_what_is_said_of_pacing_at_low_load_follows():
    servers = (PACED, BANDIT, "pat")
    apart = max(abs(gain("low", case, server, "pat") - 1) for case in LOW for server in servers)
    mean25, p50 = ([ms(wait("low", TWENTY_FIVE, server, key)) for server in servers] for key in ("mean", "p50"))
    p99 = [f"{wait('low', TWENTY_FIVE, server, 'p99'):.2f}" for server in servers]
    total = {case: [f"{e2e('low', case, server):.2f}" for server in servers] for case in LOW}
    twenty = [f"{wait('low', TWENTY, server):.2f}" for server in servers]
    slow = [ms(wait("low", SLOW, server)) for server in servers]
    stops = {key: sum(r["admission"]["stops"] for r in found) for key, found in RUNS["low"].items()}
    assert {key: count for key, count in stops.items() if count} == {(TWENTY_FIVE, BANDIT): 128}
    assert {len(RUNS["low"][case, PACED]) for case in LOW[1:]} == {1} and len(RUNS["low"][SLOW, PACED]) == 2
    assert apart < 0.001
    said(
        "tok/s is what arrives, alike to within 0.1%",
        f"With 5 groups at 25/s the mean E2E is {total[TWENTY_FIVE][0]} s for {total[TWENTY_FIVE][1]} s without "
        f"pacing and {total[TWENTY_FIVE][2]} s under fcfs; the time to the first token is {mean25[0]} ms for "
        f"{mean25[1]} and {mean25[2]} ms in the mean, {p50[0]} ms for {p50[1]} and {p50[2]} ms at the median, "
        f"{p99[0]} s for {p99[1]} and {p99[2]} s at p99",
        "the policy without pacing decided 128 times to stop in that run",
        f"With 20 groups E2E is {total[TWENTY][0]} s for {total[TWENTY][1]} and {total[TWENTY][2]} s, the time to the "
        f"first token {twenty[0]} s for {twenty[1]} and {twenty[2]} s",
        f"At 5/s E2E is level ({total[SLOW][0]} s for {total[SLOW][1]} and {total[SLOW][2]} s), the time to the first "
        f"token {slow[0]} ms for {slow[1]} and {slow[2]} ms",
    )


def test_what_is_said_without_prefill_graphs_follows():
    paced = [percent(EAGER, case, PACED, "pat") for case in EAGER_CASES]
    alone = [percent(EAGER, case, BANDIT, "pat") for case in EAGER_CASES]
    both = [percent(EAGER, case, PACED, BANDIT) for case in EAGER_CASES]
    servers = (PACED, BANDIT, "pat")
    total = [f"{e2e(EAGER, TWENTY_FIVE, server):.2f}" for server in servers]
    first = [ms(wait(EAGER, TWENTY_FIVE, server)) for server in servers]
    p99 = [f"{wait(EAGER, TWENTY_FIVE, server, 'p99'):.2f}" for server in servers]
    apart = max(abs(gain(EAGER, TWENTY_FIVE, server, "pat") - 1) for server in servers)
    waits = [f"{wait(EAGER, 'W1', server):.2f}" for server in servers]
    runs = [(EAGER, case) for case in ("W4", "W1", "W7")]
    assert not sum(r["admission"]["stops"] for found in RUNS[EAGER].values() for r in found)
    assert apart < 0.001
    said(
        f"Paced, feather-bandit has {paced[0]} on W4, {paced[1]} on W1, {paced[2]} on W5 and {paced[3]} on W7 to fcfs; "
        f"without pacing {alone[0]}, {alone[1]}, {alone[2]} and {alone[3]}",
        f"on W4, W1 and W7 the GPU is busy for {busy([PACED], runs)[:-1]}%, without pacing for "
        f"{busy([BANDIT], runs)[:-1]}%, under fcfs for {busy(['pat'], runs)}",
        f"on W1 it is {waits[0]} s for {waits[1]} s and {waits[2]} s",
        f"At 25/s tok/s is alike to within 0.1%, the mean E2E {total[0]} s for {total[1]} s without pacing and "
        f"{total[2]} s under fcfs",
        f"On W5 paced is {both[2]} to unpaced",
        f"at 25/s is {first[0]} ms in the mean for {first[1]} ms and fcfs's {first[2]} ms (p99 {p99[0]} s for "
        f"{p99[1]} and {p99[2]} s)",
    )


def test_rows_below_fcfs():
    """Where memory suffices: our policies more than 1% below fcfs, all of them told."""
    below = {}
    for name, run in RUNS.items():
        for case, server in run:
            backend = server.partition("+")[0].removesuffix("-paced")
            known = case in ("W1", "W3", "W4", "W5:1200", "W7", *LOW) and (case, backend) in run
            if known and server != backend and "dfs" not in server and gain(name, case, server, backend) < 0.99:
                below[name, case, server] = percent(name, case, server, backend)
    assert below == {
        ("pat_a", "W5:1200", BANDIT): "-1.2%",
        ("pat_a", "W7", BANDIT): "-1.4%",
        ("pat_b", "W1", BANDIT): "-2.4%",
        ("pat_b", "W5:1200", ORDER): "-1.5%",
        ("pat_c", "W4", BANDIT): "-3.2%",
        ("pat_c", "W4", PACED): "-1.5%",
        ("fa3_b", "W4", "fa3+feather-order"): "-3.8%",
        ("fa3_b", "W4", "fa3-paced"): "-3.8%",
        (FLASH, "W4", "flashinfer+feather-bandit"): "-1.5%",
        (EAGER, "W4", BANDIT): "-2.7%",
        (EAGER, "W1", BANDIT): "-2.1%",
    }
    on = [100 * gain(*run, PACED, "pat") - 100 for run in (*OLD, *NEW, *LATEST)]
    off = [100 * gain(EAGER, case, PACED, "pat") - 100 for case in EAGER_CASES]
    said(
        f"paced, the default since, feather-bandit on `pat` has {min(on):+.1f} to {max(on):+.1f}% with prefill CUDA "
        f"graphs and {min(off):+.1f} to {max(off):+.1f}% without on W1, W4, W5 and W7, "
        f"{percent('pat_c', 'W3', PACED, 'pat')} on W3, and is level at 5/s and 25/s; an older run on W4 had "
        f"{below['pat_c', 'W4', PACED]}",
        f"on `fa3` W4 has {percent('fa3_w4', 'W4', 'fa3-paced', 'fa3')} paced in two rounds and "
        f"{below['fa3_b', 'W4', 'fa3-paced']} in a single run, feather-order "
        f"{percent('fa3_w4', 'W4', 'fa3+feather-order', 'fa3')} and {below['fa3_b', 'W4', 'fa3+feather-order']}",
        f"feather-bandit on `pat` has down to {below['pat_c', 'W4', BANDIT]} with prefill CUDA graphs and "
        f"{below[EAGER, 'W4', BANDIT]} without, and {below[FLASH, 'W4', 'flashinfer+feather-bandit']} on W4 with "
        f"`flashinfer`; feather-order {below['pat_b', 'W5:1200', ORDER]} on W5 with `pat`",
    )


def test_what_is_said_of_flashinfer_follows():
    w6 = [gain(FLASH, "W6", "flashinfer+feather-bandit", over) for over in (FLASH, "flashinfer+dfs-weight")]
    p99 = [wait(FLASH, "W6", f"flashinfer+{policy}", "p99") for policy in ("feather-bandit", "dfs-weight")]
    bandit, order = (
        [percent(FLASH, case, f"flashinfer+{policy}", FLASH) for case in ("W4", "W3", "W5:1200")]
        for policy in ("feather-bandit", "feather-order")
    )
    said(
        f"W6 {w6[0]:.2f}x fcfs and {w6[1]:.2f}x dfs-weight, p99 of the time to the first token {p99[0]:.1f} s for "
        f"{p99[1]:.1f} s",
        f"feather-bandit **loses {bandit[0][1:]} on W4**, where feather-order has {order[0]}; on W3 they have "
        f"{bandit[1]} and {order[1]}, on W5 {bandit[2]} and {order[2]}",
        f"3.08x on `pat`, {w6[0]:.2f}x on `flashinfer`",
    )


def test_what_is_said_of_a_hundred_groups_follows():
    servers = (BANDIT, "pat+dfs-weight", "pat")
    waits, p99 = ([f"{wait('hundred', HUNDRED, server, key):.1f}" for server in servers] for key in ("mean", "p99"))
    hits = [f"{figure('hundred', HUNDRED, server, 'overall', 'cache_hit'):.2f}" for server in servers]
    said(
        f"feather-bandit is {gain('hundred', HUNDRED, BANDIT, 'pat'):.2f}x fcfs and "
        f"{gain('hundred', HUNDRED, BANDIT, 'pat+dfs-weight'):.2f}x dfs-weight "
        f"({tok_s('hundred', HUNDRED, BANDIT):,.0f} tok/s); the time to the first token is {waits[0]} s for "
        f"{waits[2]} and {waits[1]} s, its p99 {p99[0]} s for {p99[2]} and {p99[1]} s, the cache hit {hits[0]} for "
        f"{hits[2]} and {hits[1]}"
    )


def test_what_is_said_of_w4_on_fa3_follows():
    servers = ("fa3+feather-order", "fa3+feather-bandit", "fa3-paced")
    twice, single = ([percent(name, "W4", server, "fa3") for server in servers] for name in ("fa3_w4", "fa3_b"))
    said(
        f"feather-order {twice[0]}, feather-bandit {twice[1]}, paced {twice[2]} to fcfs; in single runs on another GPU "
        f"{single[0]}, {single[1]} and {single[2]}"
    )
    idle = [100 - figure("fa3_b", "W4", server, "activity", "busy") for server in (servers[0], servers[2])]
    assert [round(value) for value in idle] == [5, 5]


def test_what_is_said_of_short_memory_follows():
    runs = [(name, PACED) for name in ("pat_a", "pat_b", "pat_d", "pat_e")]
    runs += [("pat_a", BANDIT), ("pat_b", BANDIT)]
    assert tok_s("pat_d", "W2", PACED) == min(tok_s(name, "W2", server) for name, server in runs)
    rates = [tok_s(name, "W2", server) for name, server in runs]
    busies = [figure(name, "W2", server, "activity", "busy") for name, server in runs]
    w6 = [gain("fa3_w6", "W6", "fa3+feather-bandit", over) for over in ("fa3", "fa3+dfs-weight")]
    said(
        f"{min(rates):,.0f} to {max(rates):,.0f} tok/s in six runs. The GPU is busy for {min(busies):.1f} to "
        f"{max(busies):.1f}% of them",
        f"{min(rates):,.0f} to {max(rates):,.0f} in six with prefill CUDA graphs; "
        f"{tok_s('own_pat', 'W2', BANDIT):,.0f} with memory for everything",
        f"**W6, `fa3`: {w6[0]:.2f}x fcfs** in two rounds, {w6[1]:.2f}x dfs-weight",
    )


def test_what_is_said_of_the_further_run_of_w6_on_fa3_follows():
    servers = ("fa3+feather-bandit", "fa3+feather-qlearning", "fa3+lpm")
    assert ("W6", "fa3") not in RUNS["fa3_w6_b"]  # so the ratios are to another GPU's
    rates = [tok_s("fa3_w6_b", "W6", server) for server in servers]
    over = [rate / tok_s("fa3_w6", "W6", "fa3") for rate in rates]
    said(
        f"feather-bandit has {rates[0]:,.0f} tok/s, feather-qlearning {rates[1]:,.0f}, lpm {rates[2]:,.0f}: "
        f"{over[0]:.2f}x, {over[1]:.2f}x and {over[2]:.2f}x *the other GPU's* fcfs",
        f"`fa3` has {gain('fa3_w6', 'W6', servers[0], 'fa3'):.2f}x and, to another GPU's fcfs, {over[0]:.2f}x",
    )


def test_what_is_said_of_memory_for_everything_follows():
    rates = [tok_s("own_fa3", "W6", server) for server in ("fa3+feather-bandit", "fa3+feather-order")]
    short = tok_s("fa3_w6", "W6", "fa3")
    gains = [percent("own_pat", case, BANDIT, "pat") for case in ("W2", "W6")]
    waits = [
        figure("own_pat", case, BANDIT, "overall", "ttft_s", "mean")
        / figure("own_pat", case, "pat", "overall", "ttft_s", "mean")
        for case in ("W2", "W6")
    ]
    assert not sum(r["log"]["retractions"] for name in OWN for records in RUNS[name].values() for r in records)
    said(
        "699,117 KV tokens",
        f"feather-bandit gives {rates[0]:,.0f} tok/s, feather-order {rates[1]:,.0f}. That is "
        f"{rates[0] / short:.2f}x and {rates[1] / short:.2f}x what fcfs had",
        f"{rates[0] / short:.2f}x is what `fa3` gives W6 with",
        f"with `pat` it is {gain('pat_c', 'W6', BANDIT, 'pat'):.2f}x at 200,000 tokens",
        f"With memory for everything it is {tok_s('own_pat', 'W2', BANDIT):,.0f} tok/s",
        f"gains {gains[0][1:]} and {gains[1][1:]} on W2 and W6 with `pat`",
        f"the mean time to the first token is {waits[0]:.2f}x and {waits[1]:.2f}x",
    )


def test_what_is_said_of_w2_on_fa3_with_memory_for_everything_follows():
    servers = ("fa3+feather-bandit", "fa3+feather-order", "fa3", "fa3+dfs-weight")
    rates = [tok_s("own_fa3_w2", "W2", server) for server in servers]
    over = [rate / rates[2] for rate in rates]
    short = [
        record["overall"]["tok_s"]
        for name in ("all_fa3", "w2", "gather", "graphs_fa3_b")
        for record in json.loads((MEASURED / f"policies_h200_{name}.json").read_text())["records"]
        if (record["server"], record["case"]) == ("fa3+feather-bandit", "W2")
    ]
    assert len(short) == 6
    said(
        f"With memory for everything feather-bandit gives {rates[0]:,.0f} tok/s, feather-order {rates[1]:,.0f}, fcfs "
        f"{rates[2]:,.0f} and dfs-weight {rates[3]:,.0f}: order is worth {over[1]:.2f}x, feather-bandit "
        f"{over[0]:.2f}x, dfs-weight {over[3]:.2f}x",
        f"between {min(short):,.0f} and {max(short):,.0f} in six runs, {min(short) / rates[0]:.2f} to "
        f"{max(short) / rates[0]:.2f} of that",
    )


def test_the_page_on_pacing_says_the_same():
    gains = [100 * gain(*run, PACED, BANDIT) - 100 for run in FITTING]
    scarce = (("pat_a", "W2"), ("pat_b", "W2"), ("pat_c", "W6"), ("pat_c", "W3"))
    assert all(gain(*run, PACED, BANDIT) > 0.999 for run in scarce)
    longer = {}
    for run in (*FITTING, *scarce):
        alone, paced = (f"{wait(*run, server):.2f}" for server in (BANDIT, PACED))
        if float(paced) > float(alone):
            longer[run] = paced, alone
    assert list(longer) == [("pat_a", "W2")]
    paced, alone = longer["pat_a", "W2"]
    eager = {case: 100 * gain(EAGER, case, PACED, BANDIT) - 100 for case in EAGER_CASES}
    most = [eager[case] for case in ("W1", "W4", "W7")]
    said(
        f"{min(gains):+.1f} to {max(gains):+.1f}% tok/s where memory suffices",
        f"no longer in any such pair but one, W2 ({paced} s for {alone} s)",
        f"{eager['W5:1200']:+.1f}% on W5, {min(most):+.1f} to {max(most):+.1f}% on W1, W4 and W7",
        where=SCHEDULER,
    )


def test_the_page_on_pacing_says_the_same_of_low_load():
    def found(name, case):
        """Paced and not: TTFT mean, its p99, E2E."""
        servers = (PACED, BANDIT)
        return (
            [ms(wait(name, case, server)) for server in servers],
            [f"{wait(name, case, server, 'p99'):.2f}" for server in servers],
            [f"{e2e(name, case, server):.2f}" for server in servers],
        )

    (first, p99, total), (first_off, p99_off, total_off) = found("low", TWENTY_FIVE), found(EAGER, TWENTY_FIVE)
    slow, _, level = found("low", SLOW)
    assert level[0] == level[1]
    said(
        f"at 25 requests/s {first[0]} ms for {first[1]} ms, its p99 {p99[0]} s for {p99[1]} s, E2E {total[0]} s for "
        f"{total[1]} s (without prefill graphs {first_off[0]} ms for {first_off[1]} ms, {p99_off[0]} s for "
        f"{p99_off[1]} s, {total_off[0]} s for {total_off[1]} s); at 5/s {slow[0]} ms for {slow[1]} ms and E2E level",
        " ms for ".join(ms(wait("low", TWENTY_FIVE, server, "p50")) for server in (PACED, BANDIT))
        + " ms at 25 requests",
        where=SCHEDULER,
    )


def test_the_readme_says_the_same():
    for case, workload in (("W1", "5 groups x 5K, 100 requests/s, `pat`, prefill CUDA graphs"), ("W4", "1 group x 5K")):
        fcfs, alone, paced = (f"{tok_s('low', case, server):,.0f}" for server in ("pat", BANDIT, PACED))
        line = next(line for line in README_LINES if line.startswith(f"| {workload}"))
        assert f"| fcfs {fcfs} tok/s, `feather-bandit` {paced}, with `--feather-pace 0` {alone} |" in line
    hundred = [f"{tok_s('hundred', HUNDRED, server):,.0f}" for server in ("pat", "pat+dfs-weight", BANDIT)]
    paced = [100 * gain(*run, PACED, "pat") - 100 for run in FITTING]
    worst = paced.pop(FITTING.index(("pat_c", "W4")))
    first = [ms(wait("low", TWENTY_FIVE, server, "p50")) for server in (PACED, "pat")]
    sooner = 1 - e2e("low", TWENTY_FIVE, PACED) / e2e("low", TWENTY_FIVE, "pat")
    said(
        f"| fcfs {hundred[0]} tok/s, dfs-weight {hundred[1]}, `feather-bandit` with `--feather-pace 0` {hundred[2]} |",
        f"{first[0]} ms for fcfs's {first[1]} at the median, for {100 * sooner:.0f}% less end to end",
        f"up to {-min(100 * gain(*run, BANDIT, 'pat') - 100 for run in FITTING):.1f}% slower than fcfs on `pat`",
        f"and {-100 * gain('flashinfer', 'W4', 'flashinfer+feather-bandit', 'flashinfer') + 100:.1f}% on `flashinfer`",
        f"with it {min(paced):.1f} to {max(paced):.1f}% faster on `pat`, but for one older run ({worst:.1f}%)",
        where=README,
    )


def test_how_fast_the_replay_is_with_prefill_graphs():
    page = (ROOT / "docs" / "step_time.md").read_text()
    w1 = sorted(tok_s(name, "W1", "pat") for name in ("pat_a", "pat_b"))
    w4 = sorted(record["overall"]["tok_s"] for record in RUNS["pat_c"]["W4", "pat"])
    w7 = tok_s("pat_a", "W7", "pat")
    fast = [
        round(100 * replay / rate - 100)
        for replay, rates in ((15554, w1), (15694, w4), (13903, [w7]))
        for rate in rates
    ]
    for replay, workload in (("15,554", "W1"), ("15,694", "W4"), ("13,903", "W7")):
        assert any(
            line.startswith(f"| {workload}:") and "| fcfs |" in line and replay in line for line in page.splitlines()
        )
    assert fast[0] == fast[1]
    said(
        f"under fcfs {w1[0]:,.0f} and {w1[1]:,.0f} tok/s on W1, where the replay is {fast[0]}% fast, {w4[0]:,.0f} and "
        f"{w4[1]:,.0f} on W4 ({fast[3]:+d} and {fast[2]:+d}%), {w7:,.0f} on W7 ({fast[4]:+d}%)",
        where=" ".join(page.split()),
    )
