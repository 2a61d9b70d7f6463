"""docs/results.md and README.md say what docs/measured holds of policies and of mixed batches."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs" / "measured"
TEXT = (ROOT / "docs" / "results.md").read_text()
SENTENCES = " ".join(TEXT.split())
README = (ROOT / "README.md").read_text()


def records(name):
    content = json.loads((MEASURED / name).read_text())
    return {(record["server"], record["case"]): record for record in content["records"]}


OLD, FA3, SECOND, PAT, LARGE = (
    records(f"policies_h200{suffix}.json") for suffix in ("", "_fa3", "_fa3_w6", "_pat", "_420k")
)
ALL_FA3, ALL_PAT = (records(f"policies_h200_all_{backend}.json") for backend in ("fa3", "pat"))
FITS_FA3, FITS_PAT = (records(f"policies_h200_fits_{backend}.json") for backend in ("fa3", "pat"))
PAT_W2 = json.loads((MEASURED / "policies_h200_pat_w2.json").read_text())["records"]
MIXING = {
    (record["requests"], record["groups"], record["order"]): record
    for record in json.loads((MEASURED / "mixing_h200.json").read_text())["records"]
}


def tok_s(run, server, case):
    return run[server, case]["overall"]["tok_s"]


def gain(run, server, case, over):
    return tok_s(run, server, case) / tok_s(run, over, case)


def rows(run, case, note=""):
    """The lines of one workload's table that one server gave, but for runs that were cut."""
    lines = []
    for (server, its_case), record in run.items():
        one = record["overall"]
        if its_case != case or one["unfinished"]:
            continue
        backend, _, policy = server.partition("+")
        ratios = [
            f"{gain(run, server, case, over):.2f}x" if over != server and (over, case) in run else ""
            for over in (backend, f"{backend}+dfs-weight")
        ]
        waits = [f"{one['ttft_s'][key]:.1f} s" for key in ("mean", "p99")]
        cells = [
            f"`{backend}`, {policy or 'fcfs'}{note}", f"{one['tok_s']:,.0f}", *ratios, f"{one['cache_hit']:.2f}",
            *waits, f"{record['log']['retractions']}",
        ]  # fmt: skip
        lines.append("|" + "".join(f" {cell} |" if cell else " |" for cell in cells))
    return lines


def admission_rows(run, case):
    """The lines of one workload in the table of all policies: as above, and what admission took."""
    lines = []
    for line, (server, record) in zip(
        rows(run, case, f", {case}"), [(server, one) for (server, its), one in run.items() if its == case], strict=True
    ):
        assert line.startswith(f"| `{server.partition('+')[0]}`")
        took, whole = record["admission"], record["overall"]["seconds"]
        cells = [
            f"{1e3 * took['seconds'] / took['rounds']:.2f}", f"{100 * took['seconds'] / whole:.1f}%",
            f"{took['stops']:,}",
        ]  # fmt: skip
        lines.append(f"{line} {' | '.join(cells)} |")
    return lines


def large_rows():
    """The lines of the table with 420,000 tokens: the workloads side by side."""
    lines = []
    for server in ("fa3", "fa3+feather-order", "fa3+feather-bandit"):
        cells = [f"`fa3`, {server.partition('+')[2] or 'fcfs'}"]
        for case in ("W1", "W6", "W3"):
            ratio = f" ({100 * gain(LARGE, server, case, 'fa3') - 100:+.1f}%)" if server != "fa3" else ""
            one = LARGE[server, case]
            waits = one["overall"]["ttft_s"]
            cells += [
                f"{tok_s(LARGE, server, case):,.0f}{ratio}", f"{one['log']['full_batch_tok_s']:,.0f}",
                f"{waits['mean']:.1f} s, {waits['p99']:.1f} s",
            ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
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
    "W2": rows(FA3, "W2") + rows(PAT, "W2"),
    "W6": rows(FA3, "W6") + rows(SECOND, "W6", ", second server") + rows(PAT, "W6"),
    "prefixes fit": [line for case in ("W1", "W7", "W5:1200", "W3") for line in admission_rows(FITS_FA3, case)]
    + [line for case in ("W1", "W7", "W5:1200", "W4", "W3") for line in admission_rows(FITS_PAT, case)],
    "W2 again": admission_rows(FITS_FA3, "W2") + admission_rows(FITS_PAT, "W2"),
    "all policies": admission_rows(ALL_FA3, "W2") + admission_rows(ALL_FA3, "W6") + admission_rows(ALL_PAT, "W2"),
    "420,000 tokens": large_rows(),
    "mixing": mixing_rows(500),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_hold_what_was_measured(name):
    assert "\n".join(TABLES[name]) in TEXT, "\n" + "\n".join(TABLES[name])


def test_no_other_table_line_names_a_server():
    assert sorted(line for line in TEXT.splitlines() if line.startswith("| `")) == sorted(
        line for name, lines in TABLES.items() if name != "mixing" for line in lines
    )


def test_what_is_said_of_short_memory_follows():
    w2 = {policy: gain(FA3, "fa3+feather-bandit", "W2", f"fa3{policy}") for policy in ("", "+dfs-weight")}
    p99 = [FA3[f"fa3+{policy}", "W2"]["overall"]["ttft_s"]["p99"] for policy in ("feather-bandit", "dfs-weight")]
    stock = tok_s(FA3, "fa3", "W2")
    assert max(("fa3", "fa3+lpm", "fa3+dfs-weight"), key=lambda server: tok_s(FA3, server, "W2")) == "fa3+dfs-weight"
    for part in (
        f"feather-bandit has {tok_s(FA3, 'fa3+feather-bandit', 'W2'):,.0f} tok/s, {w2['+dfs-weight']:.2f}x dfs-weight",
        f"and {w2['']:.2f}x fcfs; p99 of the time to the first token {p99[0]:.1f} s instead of {p99[1]:.1f} s",
        f"feather-qlearning: {gain(FA3, 'fa3+feather-qlearning', 'W2', 'fa3+dfs-weight'):.2f}x",
        f"an earlier run had {tok_s(OLD, 'fa3+feather-bandit', 'W2'):,.0f} tok/s",
        f"{tok_s(PAT, 'pat+feather-bandit', 'W2'):,.0f} tok/s, "
        f"{gain(PAT, 'pat+feather-bandit', 'W2', 'pat+dfs-weight'):.2f}x dfs-weight on `pat` and "
        f"{gain(PAT, 'pat+feather-bandit', 'W2', 'pat'):.2f}x fcfs on `pat`",
        f"with the kernel, {tok_s(PAT, 'pat+feather-bandit', 'W2') / stock:.2f}x stock",
        f"earlier server it is {tok_s(PAT, 'pat+feather-bandit', 'W2') / tok_s(OLD, 'pat+dfs-weight', 'W2'):.2f}x",
        f"{tok_s(PAT, 'pat+dfs-weight', 'W2'):,.0f} and, on an earlier server, "
        f"{tok_s(OLD, 'pat+dfs-weight', 'W2'):,.0f} tok/s, on a later one "
        f"{tok_s(ALL_PAT, 'pat+dfs-weight', 'W2'):,.0f}",
        f"6,000 tok/s on W2 with `pat`: it is {tok_s(PAT, 'pat+feather-bandit', 'W2'):,.0f}",
        f"so on W2 it has nothing to gain: {100 * gain(FA3, 'fa3+feather-order', 'W2', 'fa3') - 100:.1f}%",
        f"On W6 {100 * gain(FA3, 'fa3+feather-order', 'W6', 'fa3') - 100:+.0f}%",
        f"batch at {FA3['fa3+feather-order', 'W6']['log']['peak_running']} rows",
    ):
        assert part in SENTENCES, part
    again = [max(a, b) / min(a, b) - 1 for a, b in same_configuration()]
    assert f"differed by up to {100 * max(again):.0f}%" in SENTENCES


def same_configuration():
    """What policies whose code did not change, feather-order among them, gave on two servers."""
    for run, other in ((FA3, OLD), (PAT, OLD), (FA3, SECOND), (ALL_FA3, FA3), (ALL_FA3, SECOND), (ALL_PAT, PAT)):
        for (server, case), record in run.items():
            if (server, case) in other and "bandit" not in server and not record["overall"]["unfinished"]:
                yield tok_s(run, server, case), tok_s(other, server, case)


def test_what_is_said_of_w6_follows():
    bandit, dfs = (SECOND[f"fa3+{policy}", "W6"] for policy in ("feather-bandit", "dfs-weight"))
    p99 = [one["overall"]["ttft_s"]["p99"] for one in (bandit, dfs)]
    packed = "pat+feather-bandit"
    for part in (
        f"{gain(SECOND, 'fa3+feather-bandit', 'W6', 'fa3+dfs-weight'):.2f}x dfs-weight on `fa3`, at the same p99 of "
        f"the time to the first token ({p99[0]:.1f} s, {p99[1]:.1f} s)",
        f"more retractions ({bandit['log']['retractions']}, {dfs['log']['retractions']})",
        f"On `pat` {gain(PAT, packed, 'W6', 'pat+dfs-weight'):.2f}x dfs-weight and "
        f"{gain(PAT, packed, 'W6', 'pat'):.2f}x",
        f"with the kernel, {tok_s(PAT, packed, 'W6') / tok_s(FA3, 'fa3', 'W6'):.2f}x stock",
        f"after {FA3['fa3+feather-bandit', 'W6']['overall']['finished']} of 600 requests",
    ):
        assert part in SENTENCES, part
    assert ("fa3+feather-qlearning", "W6") not in FA3


def test_what_is_said_of_all_policies_follows():
    dfs = {case: gain(ALL_FA3, "fa3+feather-bandit", case, "fa3+dfs-weight") for case in ("W2", "W6")}
    p99 = {key: one["overall"]["ttft_s"]["p99"] for key, one in ALL_FA3.items()}
    heuristic = {case: gain(ALL_FA3, "fa3+feather-heuristic", case, "fa3+dfs-weight") for case in ("W2", "W6")}
    ms = {key: 1e3 * one["admission"]["seconds"] / one["admission"]["rounds"] for key, one in ALL_FA3.items()}
    bandit, other, stock = "fa3+feather-bandit", "fa3+dfs-weight", "fa3"
    assert all(one["admission"]["stops"] == 0 for key, one in (ALL_FA3 | ALL_PAT).items() if "heuristic" not in key[0])
    for part in (
        f"feather-bandit {dfs['W2']:.2f}x dfs-weight and {gain(ALL_FA3, bandit, 'W2', stock):.2f}x fcfs, p99 of the "
        f"time to the first token {p99[bandit, 'W2']:.1f} s for {p99[other, 'W2']:.1f} s",
        f"W6: {dfs['W6']:.2f}x, with p99 {p99[bandit, 'W6']:.1f} s for {p99[other, 'W6']:.1f} s",
        f"On `pat` W2 is {gain(ALL_PAT, 'pat+feather-bandit', 'W2', 'pat+dfs-weight'):.2f}x dfs-weight, at "
        f"{tok_s(ALL_PAT, 'pat+feather-bandit', 'W2'):,.0f} tok/s",
        f"{heuristic['W2']:.2f}x dfs-weight on W2, {heuristic['W6']:.2f}x on W6",
        f"({ALL_FA3['fa3+feather-heuristic', 'W2']['admission']['stops']:,} times), so "
        f"{ALL_FA3['fa3+feather-heuristic', 'W2']['log']['peak_running']} requests run where "
        f"{ALL_FA3[bandit, 'W2']['log']['peak_running']} could",
        f"{ms[bandit, 'W2']:.1f} ms a round for {ms[other, 'W2']:.1f} ms on W2, {ms[bandit, 'W6']:.1f} for "
        f"{ms[other, 'W6']:.1f} on W6",
        f"fcfs takes {ms[stock, 'W2']:.1f} and {ms[stock, 'W6']:.1f} ms",
    ):
        assert part in SENTENCES, part


def percent(run, server, case, over):
    return f"{100 * gain(run, server, case, over) - 100:+.1f}%"


def test_what_is_said_where_prefixes_fit_follows():
    order, bandit, dfs = "fa3+feather-order", "fa3+feather-bandit", "fa3+dfs-weight"
    p99 = {server: FITS_FA3[server, "W7"]["overall"]["ttft_s"]["p99"] for server in ("fa3", bandit)}
    packed = {
        policy: [100 * gain(FITS_PAT, f"pat+{policy}", case, "pat") - 100
                 for case in ("W1", "W7", "W5:1200", "W4", "W3")]
        for policy in ("feather-order", "feather-bandit", "dfs-weight")
    }  # fmt: skip
    low, high = ({policy: f"{pick(values):+.1f}%" for policy, values in packed.items()} for pick in (min, max))
    assert sum(value < -1 for policy in ("feather-order", "feather-bandit") for value in packed[policy]) == 1
    kernel = [tok_s(FITS_PAT, "pat", case) / tok_s(FITS_FA3, "fa3", case) for case in ("W1", "W7", "W5:1200")]
    for part in (
        f"{percent(FITS_FA3, order, 'W1', 'fa3')} on W1, {percent(FITS_FA3, order, 'W7', 'fa3')} on W7, "
        f"{percent(FITS_FA3, order, 'W5:1200', 'fa3')} on W5",
        f"{percent(FITS_FA3, bandit, 'W1', 'fa3')}, {percent(FITS_FA3, bandit, 'W7', 'fa3')} and "
        f"{percent(FITS_FA3, bandit, 'W5:1200', 'fa3')}",
        f"{gain(FITS_FA3, bandit, 'W1', dfs):.2f}x, {gain(FITS_FA3, bandit, 'W7', dfs):.2f}x and "
        f"{gain(FITS_FA3, bandit, 'W5:1200', dfs):.2f}x dfs-weight",
        f"W7 {p99[bandit]:.1f} s instead of {p99['fa3']:.1f} s",
        f"by {percent(FITS_FA3, order, 'W3', 'fa3')} and {percent(FITS_FA3, bandit, 'W3', 'fa3')} on `fa3`",
        f"between {low['feather-bandit']} and {high['feather-bandit']}, feather-order between {low['feather-order']} "
        f"and {high['feather-order']}, dfs-weight between {low['dfs-weight']} and {high['dfs-weight']}",
        f"{percent(FITS_PAT, 'pat+feather-order', 'W5:1200', 'pat')} on W5",
        f"{min(kernel):.1f} to {max(kernel):.1f} times",
    ):
        assert part in SENTENCES, part


def test_what_is_said_of_w2_again_follows():
    p99 = [FITS_FA3[f"fa3+{policy}", "W2"]["overall"]["ttft_s"]["p99"] for policy in ("feather-bandit", "dfs-weight")]
    rounds = [record["overall"]["tok_s"] for record in PAT_W2]
    earlier = [tok_s(run, "pat+feather-bandit", "W2") for run in (PAT, ALL_PAT, FITS_PAT)]
    for part in (
        f"{gain(FITS_FA3, 'fa3+feather-bandit', 'W2', 'fa3+dfs-weight'):.2f}x dfs-weight and "
        f"{gain(FITS_FA3, 'fa3+feather-bandit', 'W2', 'fa3'):.2f}x fcfs, p99 {p99[0]:.1f} s for {p99[1]:.1f} s",
        f"{earlier[2]:,.0f} here, and {rounds[0]:,.0f}, {rounds[1]:,.0f} and {rounds[2]:,.0f} in three rounds",
        f"six runs lie between {min(earlier + rounds):,.0f} and {max(earlier + rounds):,.0f}",
    ):
        assert part in SENTENCES, part


def test_what_is_said_of_order_with_memory_to_spare_follows():
    order = {case: 100 * gain(LARGE, "fa3+feather-order", case, "fa3") - 100 for case in ("W1", "W3", "W6")}
    bandit = {case: 100 * gain(LARGE, "fa3+feather-bandit", case, "fa3") - 100 for case in ("W1", "W3", "W6")}
    full = {key: one["log"]["full_batch_tok_s"] for key, one in LARGE.items()}
    later = [LARGE[server, "W1"]["overall"]["ttft_s"]["p99"] for server in ("fa3+feather-order", "fa3")]
    assert later[0] - later[1] == pytest.approx(1, abs=0.1)
    for part in (
        f"**W6: {order['W6']:+.1f}%**",
        f"full batch are {100 * full['fa3+feather-order', 'W6'] / full['fa3', 'W6'] - 100:.0f}% faster",
        f"**W1: {order['W1']:+.1f}%**",
        f"({full['fa3', 'W1']:,.0f} to {full['fa3+feather-order', 'W1']:,.0f} tok/s, "
        f"{100 * full['fa3+feather-order', 'W1'] / full['fa3', 'W1'] - 100:.0f}%)",
        f"no loss** ({order['W3']:+.1f}%, feather-bandit {bandit['W3']:+.1f}%)",
        f"{bandit['W1']:+.1f}% on W1, {bandit['W6']:+.1f}% on W6",
    ):
        assert part in SENTENCES, part


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
    for run, case, policy in ((FITS_FA3, "W7", "feather-order"), (FA3, "W2", "feather-bandit")):
        fcfs, dfs, own = (round(tok_s(run, server, case)) for server in ("fa3", "fa3+dfs-weight", f"fa3+{policy}"))
        packed = tok_s(FITS_PAT, "pat", case) if case == "W7" else tok_s(PAT, "pat+feather-bandit", case)
        assert f"fcfs {fcfs:,} tok/s, dfs-weight {dfs:,}, `{policy}` {own:,}; with `pat` {packed:,.0f}" in README
    dfs, own = (tok_s(SECOND, f"fa3+{policy}", "W6") for policy in ("dfs-weight", "feather-bandit"))
    packed = tok_s(PAT, "pat+feather-bandit", "W6")
    fcfs = tok_s(FA3, "fa3", "W6")
    assert (
        f"fcfs {fcfs:,.0f} tok/s, dfs-weight {dfs:,.0f}, `feather-bandit` {own:,.0f}; with `pat` {packed:,.0f}"
        in README
    )


def test_every_file_is_named_and_no_picture_is_missing():
    for path in MEASURED.glob("policies_h200*"):
        assert path.name in TEXT
    assert (MEASURED / "mixing_h200.json").name in TEXT
