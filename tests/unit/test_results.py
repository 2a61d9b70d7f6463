"""docs/results.md and README.md say what docs/measured holds of policies and of mixed batches."""

import json
import re
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs" / "measured"
TEXT = (ROOT / "docs" / "results.md").read_text()
SENTENCES = " ".join(TEXT.split())
README = (ROOT / "README.md").read_text()


def rounds(name):
    """The records of a run that were not cut, by server and case, in the order of its rounds."""
    found = {}
    for record in json.loads((MEASURED / f"policies_h200_{name}.json").read_text())["records"]:
        if not record["overall"]["unfinished"]:
            found.setdefault((record["server"], record["case"]), []).append(record)
    return found


def records(name):
    """A run's single records."""
    return {key: one for key, (one,) in rounds(name).items()}


ALL_FA3, ALL_PAT, PAT, FLASHINFER = (records(name) for name in ("all_fa3", "all_pat", "pat", "flashinfer"))
FITS_FA3, FITS_PAT = (records(f"fits_{backend}") for backend in ("fa3", "pat"))
SWEEPS, SMALL = records("sweep_fa3") | records("sweep_pat"), records("small")
ORDER, TWICE, GATHER, PAT_W2 = (rounds(name) for name in ("order", "w2", "gather", "pat_w2"))
MIXING = {
    (record["requests"], record["groups"], record["order"]): record
    for record in json.loads((MEASURED / "mixing_h200.json").read_text())["records"]
}


def tok_s(run, server, case):
    return run[server, case]["overall"]["tok_s"]


def gain(run, server, case, over):
    return tok_s(run, server, case) / tok_s(run, over, case)


def percent(run, server, case, over):
    return f"{100 * gain(run, server, case, over) - 100:+.1f}%"


def both(run, server, case, *keys):
    """A figure of every round."""
    found = []
    for record in run[server, case]:
        for key in keys:
            record = record[key]
        found.append(record)
    return found


def gain_of_means(run, server, case, over):
    ours, theirs = (mean(both(run, name, case, "overall", "tok_s")) for name in (server, over))
    return ours / theirs


def table_row(cells):
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def rows(run, case):
    """The lines of one workload: throughput and its ratios, latencies, what admission took, what the GPU did."""
    lines = []
    for (server, its_case), record in run.items():
        if its_case != case:
            continue
        one, took, did = record["overall"], record["admission"], record.get("activity")
        backend, _, policy = server.partition("+")
        ratios = [
            f"{gain(run, server, case, over):.2f}x" if over != server and (over, case) in run else ""
            for over in (backend, f"{backend}+dfs-weight")
        ]
        waits = [f"{one['ttft_s'][key]:.1f} s" for key in ("mean", "p99")]
        cells = [
            f"`{backend}`, {policy or 'fcfs'}, {case}", f"{one['tok_s']:,.0f}", *ratios, f"{one['cache_hit']:.2f}",
            *waits, f"{record['log']['retractions']}", f"{1e3 * took['seconds'] / took['rounds']:.2f}",
            f"{100 * took['seconds'] / one['seconds']:.1f}%", f"{took['stops']:,}",
            *(f"{did[name]:.1f}%" if did else "" for name in ("busy", "dram")),
        ]  # fmt: skip
        lines.append(table_row(cells))
    return lines


def rows_by_round(run, base):
    """The lines of runs in A B B A order: both rounds, the gain of their means over `base`, latency, the GPU."""
    lines = []
    for server, case in run:
        backend, _, policy = server.partition("+")
        rates, p99 = both(run, server, case, "overall", "tok_s"), both(run, server, case, "overall", "ttft_s", "p99")
        ratio = "" if server == base else f"{gain_of_means(run, server, case, base):.3f}x"
        hit = mean(both(run, server, case, "overall", "cache_hit"))
        did = [mean(both(run, server, case, "activity", name)) for name in ("busy", "dram")]
        cells = [
            f"`{backend}`, {policy or 'fcfs'}, {case}", ", ".join(f"{rate:,.0f}" for rate in rates), ratio,
            f"{hit:.2f}", f"{mean(p99):.1f} s", *(f"{value:.1f}%" for value in did),
        ]  # fmt: skip
        lines.append(table_row(cells))
    return lines


def sweep_rows():
    """The lines of the sweeps: fcfs, and to it the others; times to the first token and GPU figures of two policies."""
    lines = []
    for server, case in SWEEPS:
        if "+" in server or (f"{server}+feather-bandit", case) not in SWEEPS:
            continue
        own = f"{server}+feather-bandit"
        others = [f"{gain(SWEEPS, f'{server}+{p}', case, server):.2f}x" for p in
                  ("dfs-weight", "feather-order", "feather-bandit")]  # fmt: skip
        waits = [f"{SWEEPS[name, case]['overall']['ttft_s']['mean']:.2f} s" for name in (server, own)]
        did = [f"{SWEEPS[name, case]['activity'][key]:.0f}%" for key in ("busy", "dram") for name in (server, own)]
        groups, tokens, _, rate, *rest = (int(part) for part in case.removeprefix("open:").split(","))
        output, levels = ([*rest, *(200, 1)[len(rest) :]])[:2]
        what = [f"`{server}`: {rate}/s", f"{groups} x {tokens / 1000:g}K", f"{output}", f"{levels}"]
        fcfs = tok_s(SWEEPS, server, case)
        lines.append(table_row([*what, f"{fcfs:,.0f}", *others, *waits, ", ".join(did[:2]), ", ".join(did[2:])]))
    return lines


def small_rows():
    lines = []
    for case in ("W1", "W2", "W7"):
        for server in ("fa3", "fa3+dfs-weight", "fa3+feather-order", "fa3+feather-bandit"):
            one = SMALL[server, case]
            ratio = "" if server == "fa3" else f"{gain(SMALL, server, case, 'fa3'):.2f}x"
            share = 100 * one["admission"]["seconds"] / one["overall"]["seconds"]
            waits = one["overall"]["ttft_s"]
            cells = [
                f"`fa3`, {server.partition('+')[2] or 'fcfs'}, {case}", f"{tok_s(SMALL, server, case):,.0f}", ratio,
                f"{1e3 * waits['mean']:.0f} ms, {1e3 * waits['p99']:.0f} ms", f"{share:.1f}%",
                f"{one['activity']['busy']:.0f}%",
            ]  # fmt: skip
            lines.append(table_row(cells))
    return lines


def mixing_rows(requests):
    lines = []
    for (count, groups, order), record in MIXING.items():
        if count != requests:
            continue
        cells = [groups.replace("stranger", "1 and a stranger"), order, f"{record['kv_bytes'] / 1e9:.2f}"]
        for name, result in record["systems"].items():
            alone = MIXING[requests, "1", "prefix"]["systems"][name]["warm_us"]
            counters = result["counters"]
            cells.append(f"{result['warm_us']:,.0f} ({result['warm_us'] / alone:.2f}x)")
            cells.append(
                f"{counters['dram_read_bytes'] / 1e9:.2f}, {counters['dram_pct']:.0f}%, {counters['l2_hit_pct']:.0f}%"
            )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


TABLES = {
    "prefixes exceed the pool": rows(ALL_FA3, "W2") + rows(ALL_FA3, "W6") + rows(FLASHINFER, "W2")
    + rows(ALL_PAT, "W2") + rows(PAT, "W6"),
    "W2 twice": rows_by_round(TWICE, "fa3+dfs-weight"),
    "prefixes fit": [line for case in ("W1", "W7", "W5:1200", "W3") for line in rows(FITS_FA3, case)]
    + [line for case in ("W1", "W7") for line in rows(FLASHINFER, case)]
    + [line for case in ("W1", "W7", "W5:1200", "W4", "W3") for line in rows(FITS_PAT, case)],
    "row order": rows_by_round(ORDER, "fa3"),
    "sweeps": sweep_rows(),
    "a small model": small_rows(),
    "mixing": mixing_rows(500),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_hold_what_was_measured(name):
    assert "\n".join(TABLES[name]) in TEXT, "\n" + "\n".join(TABLES[name])


def test_no_other_table_line_names_a_server():
    servers = re.compile(r"\| `(fa3|pat|flashinfer)`(?! \|)")  # with a column for the backend: test_results_default.py
    assert sorted(line for line in TEXT.splitlines() if servers.match(line)) == sorted(
        line for name, lines in TABLES.items() if name != "mixing" for line in lines
    )


def said(*parts):
    for part in parts:
        assert part in SENTENCES, part


def p99(run, server, case):
    return run[server, case]["overall"]["ttft_s"]["p99"]


def busy(record):
    return record["activity"]["busy"]


BANDIT, DFS = "fa3+feather-bandit", "fa3+dfs-weight"


def test_what_we_were_after_and_what_was_measured():
    waits = [mean(both(TWICE, server, "W2", "overall", "ttft_s", "p99")) for server in (BANDIT, DFS)]
    twice = gain_of_means(TWICE, BANDIT, "W2", "fa3")
    order = [100 * gain_of_means(ORDER, "fa3+feather-order", case, "fa3") - 100 for case in ("W1", "W7", "W6")]
    stock = ("fa3", "fa3+lpm", DFS)
    assert max(stock, key=lambda server: tok_s(ALL_FA3, server, "W2")) == DFS
    said(
        f"{gain_of_means(TWICE, BANDIT, 'W2', DFS):.2f}x dfs-weight, {waits[0]:.1f} s for {waits[1]:.1f} s",
        f"W2 {twice:.2f}x on `fa3`, {gain(FLASHINFER, 'flashinfer+feather-bandit', 'W2', 'flashinfer'):.2f}x on "
        f"`flashinfer`, {gain(ALL_PAT, 'pat+feather-bandit', 'W2', 'pat'):.2f}x on `pat`; W6 "
        f"{gain(ALL_FA3, BANDIT, 'W6', 'fa3'):.2f}x on `fa3`, "
        f"{gain(PAT, 'pat+feather-bandit', 'W6', 'pat'):.2f}x on `pat`",
        f"{order[0]:+.1f}%, {order[1]:+.1f}%, {order[2]:+.1f}% with 420,000 KV tokens",
        f"{percent(FITS_FA3, 'fa3+feather-order', 'W1', 'fa3')} and "
        f"{percent(FITS_FA3, 'fa3+feather-order', 'W7', 'fa3')} on W1 and W7",
    )
    assert twice > 1.8 and waits[0] < waits[1] and order[0] > 8 and order[1] > 18 and order[2] > 22


def test_rows_below_fcfs():
    """Where memory suffices: our policies more than 1% below fcfs, all of them told."""
    below = {
        (server, case): 100 * gain(run, server, case, server.partition("+")[0]) - 100
        for run in (FITS_FA3, FITS_PAT, FLASHINFER, SWEEPS, SMALL)
        for server, case in run
        if "+feather" in server and gain(run, server, case, server.partition("+")[0]) < 0.99
        and not (run is not SMALL and case == "W2")
    }  # fmt: skip
    assert {key: f"{value:.1f}%" for key, value in below.items()} == {
        ("pat+feather-order", "W5:1200"): "-3.0%",
        ("fa3+feather-order", "open:5,1000,300,100"): "-3.9%",
        ("fa3+feather-bandit", "open:5,1000,300,100"): "-1.3%",
        ("pat+feather-bandit", "open:5,5000,300,100,20"): "-3.3%",
        ("fa3+feather-bandit", "W1"): "-1.6%",
    }
    said(
        "feather-order's -3.0% on W5 with `pat`", "there are four more rows",
        "with 1K prefixes feather-order -3.9%, dfs-weight -2.9% and feather-bandit -1.3%",
        "with 20 output tokens on `pat` feather-bandit -3.3%",
        f"feather-bandit's -1.6% on W1 is what admission takes more of the run (6.2% for 4.4%); dfs-weight, with 8.3%, "
        f"has {percent(SMALL, 'fa3+dfs-weight', 'W1', 'fa3')} too",
    )  # fmt: skip


def test_how_far_runs_lie_apart():
    within = [
        max(rates) / min(rates) - 1
        for run in (ORDER, TWICE)
        for server, case in run
        for rates in [both(run, server, case, "overall", "tok_s")]
    ]
    said(f"lay at most {100 * max(within):.1f}% apart")
    rates = {}
    for run in (ALL_FA3, ALL_PAT, FITS_FA3, FITS_PAT, PAT):
        for (server, case), record in run.items():
            rates.setdefault((server, case), []).append(record["overall"]["tok_s"])
    for run in (TWICE, PAT_W2):
        for server, case in run:
            rates.setdefault((server, case), []).extend(both(run, server, case, "overall", "tok_s"))
    worst = max(max(found) / min(found) - 1 for found in rates.values())
    said(f"different servers differed by up to {100 * worst:.0f}%")
    packed = rates["pat+feather-bandit", "W2"]
    assert len(packed) == 6
    said(
        f"six runs lie between {min(packed):,.0f} and {max(packed):,.0f} tok/s",
        f"before, {min(packed):,.0f} to {max(packed):,.0f} in six runs",
        f"the latest run ({tok_s(PAT, 'pat+feather-bandit', 'W2'):,.0f} tok/s) the GPU was idle for "
        f"{100 - busy(PAT['pat+feather-bandit', 'W2']):.1f}% of the time, under dfs-weight for "
        f"{100 - busy(PAT['pat+dfs-weight', 'W2']):.1f}%",
    )


def test_what_is_said_of_short_memory_follows():
    flash, packed = "flashinfer+feather-bandit", "pat+feather-bandit"
    heuristic = {case: gain(ALL_FA3, "fa3+feather-heuristic", case, DFS) for case in ("W2", "W6")}
    every = [
        one for run in (ALL_FA3, ALL_PAT, PAT, FLASHINFER) for key, one in run.items() if "heuristic" not in key[0]
    ]
    assert all(one["admission"]["stops"] == 0 for one in every)
    on, off = (both(GATHER, server, "W2", "overall", "tok_s") for server in (BANDIT, "nogather"))
    waits = [mean(both(GATHER, server, "W2", "overall", "ttft_s", "p99")) for server in (BANDIT, "nogather")]
    assert (max(on) - min(on)) / 2 / mean(on) == pytest.approx(mean(on) / mean(off) - 1, abs=0.005)
    said(
        f"feather-bandit is {gain_of_means(TWICE, BANDIT, 'W2', DFS):.2f}x dfs-weight, the best stock policy, and "
        f"{gain_of_means(TWICE, BANDIT, 'W2', 'fa3'):.2f}x fcfs",
        f"another GPU gave {gain(ALL_FA3, BANDIT, 'W2', DFS):.2f}x and {gain(ALL_FA3, BANDIT, 'W2', 'fa3'):.2f}x",
        f"{gain(FLASHINFER, flash, 'W2', 'flashinfer+dfs-weight'):.2f}x dfs-weight and "
        f"{gain(FLASHINFER, flash, 'W2', 'flashinfer'):.2f}x fcfs, p99 {p99(FLASHINFER, flash, 'W2'):.1f} s for "
        f"{p99(FLASHINFER, 'flashinfer+dfs-weight', 'W2'):.1f} s",
        f"{gain(ALL_PAT, packed, 'W2', 'pat+dfs-weight'):.2f}x dfs-weight and "
        f"{gain(ALL_PAT, packed, 'W2', 'pat'):.2f}x fcfs",
        f"and {tok_s(ALL_PAT, packed, 'W2') / tok_s(ALL_FA3, 'fa3', 'W2'):.2f}x stock",
        f"{gain(ALL_FA3, BANDIT, 'W6', DFS):.2f}x dfs-weight on `fa3`, p99 {p99(ALL_FA3, BANDIT, 'W6'):.1f} s for "
        f"{p99(ALL_FA3, DFS, 'W6'):.1f} s; {gain(ALL_FA3, BANDIT, 'W6', 'fa3'):.2f}x fcfs",
        f"On `pat` {gain(PAT, packed, 'W6', 'pat+dfs-weight'):.2f}x dfs-weight and "
        f"{gain(PAT, packed, 'W6', 'pat'):.2f}x fcfs; with the kernel "
        f"{tok_s(PAT, packed, 'W6') / tok_s(ALL_FA3, 'fa3', 'W6'):.2f}x stock",
        f"{on[0]:,.0f} and {on[1]:,.0f} tok/s with, {off[0]:,.0f} and {off[1]:,.0f} without; "
        f"{100 * mean(on) / mean(off) - 100:+.1f}% in the mean",
        f"p99 of {waits[0]:.1f} s for {waits[1]:.1f} s",
        f"{heuristic['W2']:.2f}x dfs-weight on W2, {heuristic['W6']:.2f}x on W6",
        f"({ALL_FA3['fa3+feather-heuristic', 'W2']['admission']['stops']:,} times), so "
        f"{ALL_FA3['fa3+feather-heuristic', 'W2']['log']['peak_running']} requests run where "
        f"{ALL_FA3[BANDIT, 'W2']['log']['peak_running']} could",
    )


def test_what_is_said_where_prefixes_fit_follows():
    order = "fa3+feather-order"
    packed = {
        policy: [100 * gain(FITS_PAT, f"pat+{policy}", case, "pat") - 100
                 for case in ("W1", "W7", "W5:1200", "W4", "W3")]
        for policy in ("feather-order", "feather-bandit", "dfs-weight")
    }  # fmt: skip
    low, high = ({policy: f"{pick(values):+.1f}%" for policy, values in packed.items()} for pick in (min, max))
    assert sum(value < -1 for policy in ("feather-order", "feather-bandit") for value in packed[policy]) == 1
    kernel = [tok_s(FITS_PAT, "pat", case) / tok_s(FITS_FA3, "fa3", case) for case in ("W1", "W7", "W5:1200")]
    flash = [
        percent(FLASHINFER, f"flashinfer+{policy}", case, "flashinfer")
        for policy in ("feather-order", "feather-bandit")
        for case in ("W1", "W7")
    ]
    said(
        f"{percent(FITS_FA3, order, 'W1', 'fa3')} on W1, {percent(FITS_FA3, order, 'W7', 'fa3')} on W7, "
        f"{percent(FITS_FA3, order, 'W5:1200', 'fa3')} on W5",
        f"{percent(FITS_FA3, BANDIT, 'W1', 'fa3')}, {percent(FITS_FA3, BANDIT, 'W7', 'fa3')} and "
        f"{percent(FITS_FA3, BANDIT, 'W5:1200', 'fa3')}",
        f"{gain(FITS_FA3, BANDIT, 'W1', DFS):.2f}x, {gain(FITS_FA3, BANDIT, 'W7', DFS):.2f}x and "
        f"{gain(FITS_FA3, BANDIT, 'W5:1200', DFS):.2f}x dfs-weight",
        f"W7 {p99(FITS_FA3, BANDIT, 'W7'):.1f} s instead of {p99(FITS_FA3, 'fa3', 'W7'):.1f} s",
        f"feather-order {flash[0]} and {flash[1]} on W1 and W7, feather-bandit {flash[2]} and {flash[3]}",
        f"by {percent(FITS_FA3, order, 'W3', 'fa3')} and {percent(FITS_FA3, BANDIT, 'W3', 'fa3')} on `fa3`",
        f"between {low['feather-bandit']} and {high['feather-bandit']}, feather-order between {low['feather-order']} "
        f"and {high['feather-order']}, dfs-weight between {low['dfs-weight']} and {high['dfs-weight']}",
        f"{percent(FITS_PAT, 'pat+feather-order', 'W5:1200', 'pat')} on W5",
        f"{min(kernel):.1f} to {max(kernel):.1f} times",
    )


def test_what_is_said_of_order_alone_follows():
    gains, shorter, dram = {}, [], []
    for case in ("W7", "W6", "W1"):
        gains[case] = 100 * gain_of_means(ORDER, "fa3+feather-order", case, "fa3") - 100
        waits, used = (
            [mean(both(ORDER, server, case, *keys)) for server in ("fa3", "fa3+feather-order")]
            for keys in (("overall", "ttft_s", "p99"), ("activity", "dram"))
        )
        shorter.append(waits[0] - waits[1])
        dram.append(used[1] / used[0])
    said(
        f"**{gains['W7']:+.1f}% on W7, {gains['W6']:+.1f}% on W6, {gains['W1']:+.1f}% on W1**",
        f"is {min(shorter):.1f} to {max(shorter):.1f} s shorter",
        f"use {min(dram):.2f} to {max(dram):.2f} of the bandwidth",
    )


def test_what_is_said_of_the_sweeps_follows():
    def lead(backend, case, policy="feather-bandit"):
        return f"{gain(SWEEPS, f'{backend}+{policy}', f'open:{case}', backend):.2f}x"

    def wait(server, case):
        return SWEEPS[server, f"open:{case}"]["overall"]["ttft_s"]["mean"]

    tpot = [
        SWEEPS[server, "open:5,5000,300,100,20"]["overall"]["tpot_ms"]["mean"]
        for server in ("fa3+feather-order", "fa3")
    ]
    idle = [
        busy(SWEEPS[server, case])
        for backend, case in (("fa3", "open:5,1000,300,100"), ("pat", "open:5,5000,300,100,20"))
        for server in (backend, f"{backend}+feather-bandit")
    ]
    said(
        f"grows with groups ({lead('fa3', '1,5000,300,100')}, {lead('fa3', '20,5000,300,100')} with 1 and 20), with "
        f"shared tokens ({lead('fa3', '5,1000,300,100')}, {lead('fa3', '5,20000,300,100')} with 1K and 20K) and with "
        f"levels ({lead('fa3', '5,5000,300,100,200,2')}, {lead('fa3', '5,5000,300,100,200,4')} with 2 and 4)",
        f"feather-order has {lead('fa3', '20,5000,300,100', 'feather-order')} of that",
        f"{lead('pat', '5,5000,300,100,200,4')} with 4 levels, {lead('pat', '20,5000,300,100')} with 20 groups, "
        f"{lead('pat', '5,20000,300,100')} with 20K",
        f"busy {min(idle):.0f} to {max(idle):.0f}% of the time",
        f"time per token is {tpot[0]:.0f} ms, fcfs's {tpot[1]:.0f} ms",
    )
    for server, case in SWEEPS:
        if server.endswith("+feather-bandit"):
            backend, case = server.partition("+")[0], case.removeprefix("open:")
            shorter = wait(server, case) / wait(backend, case)
            assert shorter < 1 or case.endswith(",5") or case == "5,1000,300,100"
            assert shorter <= 0.5 or not (case.startswith("20,") or case.endswith((",200,2", ",200,4")))


def test_what_is_said_of_the_small_model_follows():
    waits = {server: 1e3 * p99(SMALL, server, "W2") for server in ("fa3", DFS, BANDIT)}
    assert all(abs(gain(SMALL, server, case, "fa3") - 1) < 0.021 for server, case in SMALL)
    said(f"is {waits[BANDIT]:.0f} ms instead of {waits['fa3']:.0f} ms (dfs-weight {waits[DFS]:.0f} ms)")


def test_what_is_said_of_admission_follows():
    ms = {key: 1e3 * one["admission"]["seconds"] / one["admission"]["rounds"] for key, one in ALL_FA3.items()}
    idle = {policy: 100 - mean(both(TWICE, f"fa3{policy}", "W2", "activity", "busy"))
            for policy in ("", "+dfs-weight", "+feather-bandit")}  # fmt: skip
    other = [
        100 - busy(run[f"{backend}+{policy}", "W2"])
        for run, backend in ((PAT, "pat"), (FLASHINFER, "flashinfer"))
        for policy in ("feather-bandit", "dfs-weight")
    ]
    said(
        f"feather-bandit {ms[BANDIT, 'W2']:.1f} ms a round for dfs-weight's {ms[DFS, 'W2']:.1f} ms on W2 with `fa3`, "
        f"{ms[BANDIT, 'W6']:.1f} for {ms[DFS, 'W6']:.1f} on W6",
        f"fcfs takes {ms['fa3', 'W2']:.1f} and {ms['fa3', 'W6']:.1f} ms",
        f"is {idle['+feather-bandit']:.1f}% of W2 under feather-bandit on `fa3`, for {idle['+dfs-weight']:.1f}% under "
        f"dfs-weight and {idle['']:.1f}% under fcfs; {other[0]:.1f}% on `pat`, for {other[1]:.1f}%; {other[2]:.1f}% on "
        f"`flashinfer`, for {other[3]:.1f}%",
    )


def test_what_is_said_of_dram_in_whole_runs_follows():
    w2 = [mean(both(TWICE, server, "W2", "activity", "dram")) for server in ("fa3", DFS, BANDIT)]
    w6 = [mean(both(ORDER, server, "W6", "activity", "dram")) for server in ("fa3", "fa3+feather-order")]
    packed = [PAT[f"pat+{policy}", "W2"]["activity"]["dram"] for policy in ("feather-bandit", "dfs-weight", "lpm")]
    said(
        f"on W2 fcfs uses {w2[0]:.0f}% of the bandwidth, dfs-weight {w2[1]:.0f}%, feather-bandit {w2[2]:.0f}%",
        f"arrival order uses {w6[0]:.0f}%, prefix order {w6[1]:.0f}%",
        f"on W2 feather-bandit uses {packed[0]:.0f}%, dfs-weight {packed[1]:.0f}%, lpm {packed[2]:.0f}%",
    )


def times(system, above, below, key="warm_us"):
    """A figure of one batch over that of another."""
    one, other = (MIXING[batch]["systems"][system] for batch in (above, below))
    return one[key] / other[key] if key in one else one["counters"][key] / other["counters"][key]


def test_what_is_said_of_the_mechanism_follows():
    read = "dram_read_bytes"
    alone, stranger = (500, "1", "prefix"), (500, "stranger", "arrival")
    prefix, dealt, arrival = ((500, "20", order) for order in ("prefix", "interleaved", "arrival"))
    few = {key: (128, *batch[1:]) for key, batch in (("alone", alone), ("prefix", prefix), ("stranger", stranger))}
    unique = MIXING[prefix]["kv_bytes"] / MIXING[alone]["kv_bytes"]
    assert times("fa3", prefix, alone, read) == pytest.approx(unique, abs=0.01)
    faster = {
        rows: [one["systems"]["fa3"]["warm_us"] / one["systems"]["feather"]["warm_us"] for key, one in MIXING.items()
               if key[0] == rows]
        for rows in (128, 500)
    }  # fmt: skip
    pct = {batch: one["systems"]["fa3"]["counters"]["dram_pct"] for batch, one in MIXING.items() if batch[0] == 500}
    slowest = max((batch for batch in pct), key=lambda batch: MIXING[batch]["systems"]["fa3"]["warm_us"])
    assert pct[slowest] == max(pct.values())
    for part in (
        f"20 groups in prefix order take {times('fa3', prefix, alone):.2f}x the time of one group, and "
        f"{times('fa3', prefix, alone, read):.2f}x its DRAM bytes",
        f"Arrival order adds {times('fa3', arrival, prefix):.2f}x in time and "
        f"{times('fa3', arrival, prefix, read):.2f}x in DRAM bytes, "
        f"dealing the groups in turn {times('fa3', dealt, prefix):.2f}x and "
        f"{times('fa3', dealt, prefix, read):.2f}x",
        f"With 128 requests: {times('fa3', few['prefix'], few['alone']):.2f}x by mixing, "
        f"{times('fa3', (128, '20', 'arrival'), few['prefix']):.2f}x and "
        f"{times('fa3', (128, '20', 'interleaved'), few['prefix']):.2f}x by order",
        f"among 499 takes {times('fa3', stranger, alone):.2f}x the time of the group alone",
        f"mixing {times('flashinfer', prefix, alone):.2f}x, arrival order "
        f"{times('flashinfer', arrival, prefix):.2f}x more",
        f"least from order ({times('feather', arrival, prefix):.2f}x) and pays for mixing: "
        f"{times('feather', prefix, alone):.2f}x for 20 groups, "
        f"{times('feather', stranger, alone):.2f}x for one stranger",
        f"unique KV is its cost ({unique:.2f}x here)",
        f"With 128 requests 20 groups take {times('feather', few['prefix'], few['alone']):.2f}x, a stranger "
        f"{times('feather', few['stranger'], few['alone']):.2f}x",
        f"still {min(faster[500]):.1f} to {max(faster[500]):.1f} times as fast",
        f"{min(faster[128]):.1f} to {max(faster[128]):.1f} times with 128 requests",
        f"`fa3` uses {pct[alone]:.0f}% of DRAM's peak with one group, {pct[arrival]:.0f}% with 20 in arrival order. "
        f"The slowest row has the highest figure, {pct[slowest]:.0f}%",
        f"in arrival order {times('fa3', (500, '5', 'arrival'), alone):.2f}x at 5 groups, "
        f"{times('fa3', arrival, alone):.2f}x at 20",
    ):
        assert part in SENTENCES, part


def test_readme_says_the_same():
    fcfs, dfs, own = (tok_s(FITS_FA3, server, "W7") for server in ("fa3", DFS, "fa3+feather-order"))
    assert (
        f"fcfs {fcfs:,.0f} tok/s, dfs-weight {dfs:,.0f}, `feather-order` {own:,.0f}; with `pat` "
        f"{tok_s(FITS_PAT, 'pat', 'W7'):,.0f}"
    ) in README


def test_every_file_is_named_and_no_picture_is_missing():
    for path in MEASURED.glob("policies_h200*"):
        assert path.name in TEXT
    assert (MEASURED / "mixing_h200.json").name in TEXT
