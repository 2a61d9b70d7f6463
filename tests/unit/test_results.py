"""What docs/results.md and README.md say of policies on real servers is what docs/measured holds."""

import json
import re
from statistics import mean

import pytest
from server_runs import (
    MEASURED,
    POLICIES,
    RESULTS,
    ROOT,
    Ordering,
    Page,
    Run,
    admission_costs,
    label,
    overview,
    percent,
    read,
    span,
    times,
)

PAGE, README, SCHEDULER = Page("docs/results.md"), Page("README.md"), Page("docs/scheduler.md")
FILES = {
    "pat": ("pat_1", "pat_2", "pat_3"),
    "fa3": ("fa3_1", "fa3_2", "fa3_3", "fa3_4", "fa3_5"),
    "flashinfer": ("flashinfer_1", "flashinfer_2", "flashinfer_3", "flashinfer_4"),
}
EARLIER = tuple(
    f"earlier_{name}" for name in ("pat_1", "pat_2", "fa3_1", "fa3_2", "fa3_3", "fa3_4", "flashinfer_1", "flashinfer_2")
)
DEFAULT = (*(name for names in FILES.values() for name in names), *EARLIER)
SWEEPS = ("pat_sweeps", "fa3_sweeps", "fa3_sweeps_unpaced")
ROUNDS = (
    "rounds_fa3_w6", "rounds_fa3_short", "rounds_flashinfer_w4", "rounds_pat_w3", "rounds_pat_w2_1", "rounds_pat_w2_2",
    "rounds_pat_w2_3", "order_200k",
)  # fmt: skip
WHOLE = ("whole_fa3_w5", "whole_pat_w5")
ELSE = (
    "draws_1", "draws_2", "pat_order", "pat_sweeps_before", "hundred", "order", "order_again", "pacing",
    "pacing_no_graphs", "own_fa3_w2", "own_fa3_w6", "own_pat", "evicting_fa3", "small", *ROUNDS, *WHOLE,
)  # fmt: skip
TODAY = {backend: Run(*names) for backend, names in FILES.items()}
RUNS = TODAY | {name: Run(name) for name in (*EARLIER, *SWEEPS, *ELSE)}
EVERY = [*TODAY.values(), *(RUNS[name] for name in EARLIER)]
CASES = ("W1", "W2", "W3", "W4", "W5:1200", "W6", "W7")
ORDERED = ("W1", "W7", "W6")  # what row order alone was measured on
SHARING = ("W1", "W4", "W5:1200", "W7")
BANDIT, DFS, ORDER, LPM, HEURISTIC = "feather-bandit", "dfs-weight", "feather-order", "lpm", "feather-heuristic"
TABLES = {backend: run.lines(sorted(run.cases)) for backend, run in TODAY.items()}
TABLES |= {name: RUNS[name].lines() for name in ("fa3_sweeps", *ELSE) if name not in ("draws_1", "pat_sweeps_before")}
ADMISSION = [
    *((RUNS["pat_sweeps"], f"open:5,{tokens}000,300,100") for tokens in (1, 20)),
    *((TODAY["pat"], case) for case in ("W1", "W5:1200", "W2", "W6")),
]  # prefixes of 1K and 20K; a short queue and a long one; short memory
TABLES |= {
    "admission": admission_costs(ADMISSION),
    "pat_sweeps": RUNS["pat_sweeps"].lines([case for case in RUNS["pat_sweeps"].cases if case.startswith("open:")]),
    "fa3_sweeps_unpaced": RUNS["fa3_sweeps_unpaced"].lines(),
    "second draw": RUNS["pat_sweeps"].lines(["W2@1"]),
    "draws of W6": RUNS["draws_1"].lines(["W6", "W6@1"]),
    "overview": overview(list(TODAY.values()), CASES),
    "overview of earlier runs": overview(EVERY[len(TODAY) :], (*CASES, "W6@1")),
}


def gains(policy, over="fcfs", cases=SHARING, runs=None):
    """Gains of a policy over another in every run that has both."""
    return [
        run.gain(case, policy, over) for run in runs or TODAY.values() for case in cases
        if {(case, policy), (case, over)} <= run.records.keys()
    ]  # fmt: skip


def gains_of_rounds(name, case, policy):
    """A policy's gain over fcfs in each round of a run."""
    run = RUNS[name]
    return [
        one / other
        for one, other in zip(*(run.values(case, one, "overall", "tok_s") for one in (policy, "fcfs")), strict=True)
    ]


def earlier(backend):
    return [run for run in EVERY if run.backend == backend and run is not TODAY[backend]]


def w6_on_fa3():
    """feather-bandit's gains on W6 in single runs, today's first, and in rounds."""
    single = gains(BANDIT, cases=("W6",), runs=[TODAY["fa3"], *earlier("fa3")])
    return single, gains_of_rounds("rounds_fa3_w6", "W6", BANDIT)


def least_to_most(values, digits=2):
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_hold_what_was_measured(name):
    assert "\n".join(TABLES[name]) in RESULTS, "\n" + "\n".join(TABLES[name])


def test_no_other_table_line_names_a_policy():
    cell = re.compile(rf"^\| ([^|]+ \| )?({'|'.join((*POLICIES, 'paced', 'order-off', 'bandit-off'))}) \|")
    found = [line for line in RESULTS.splitlines() if cell.match(line)]
    assert sorted(found) == sorted(line for lines in TABLES.values() for line in lines)


def test_the_overview_lacks_nothing():
    assert len(TABLES["overview"]) == 3 * 7 and not any("| |" in line for line in TABLES["overview"])


def test_what_one_configuration_gave_on_different_gpus():
    apart = {}
    for backend, run in TODAY.items():
        for key in run.records:
            rates = [one.tok_s(*key) for one in (run, *earlier(backend)) if key in one.records]
            apart[(backend, *key)] = 100 * max(rates) / min(rates) - 100
    first, second = sorted(apart, key=apart.get)[:-3:-1]
    assert (first, second) == (("pat", "W4", LPM), ("pat", "W4", DFS))
    PAGE.says(
        f"differed by up to {apart[first]:.0f}% (lpm on W4 with `pat`), dfs-weight there by {apart[second]:.0f}%",
        f"by {max(value for (*_, policy), value in apart.items() if policy == 'fcfs'):.0f}% at most under fcfs",
    )


def test_every_file_is_named_with_its_command_and_no_picture_is_missing():
    for path in MEASURED.glob("policies_h200*.json"):
        assert re.search(rf"bench_server\.py --from [^`]*{path.name}", RESULTS, re.DOTALL), path.name
    assert (MEASURED / "policies_h200_pat.png").name in RESULTS
    assert (MEASURED / "mixing_h200.json").name in RESULTS


@pytest.mark.parametrize("name", [*DEFAULT, *ROUNDS, *WHOLE, "pat_sweeps", "fa3_sweeps", "draws_1", "draws_2"])
def test_these_servers_ran_by_default(name):
    content = read(name)
    started = [server for server in content["servers"].values() if "command" in server]
    assert started and "--feather-pace" not in content["command"]
    for server in started:
        assert "--disable-prefill-cuda-graph" not in server["command"] and server["kv_tokens"] == 200_000
    for (_, policy), records in Run(name).records.items():
        assert name in ROUNDS or len(records) == 1
        assert policy == HEURISTIC or not sum(record["admission"]["stops"] for record in records)


def test_these_did_not():
    def started(name):
        return [server for server in read(name)["servers"].values() if "command" in server]

    for name in ("fa3_sweeps_unpaced", "order", "small", "pacing_no_graphs"):
        assert all("--disable-prefill-cuda-graph" in server["command"] for server in started(name))
    for name in ("own_fa3_w2", "own_fa3_w6", "own_pat"):
        assert {server["kv_tokens"] for server in started(name)} == {699_117}
        assert not sum(RUNS[name].retractions(*key) for key in RUNS[name].records)
    assert {server["kv_tokens"] for name in ("order", "order_again") for server in started(name)} == {420_000}
    assert not any("--disable-prefill-cuda-graph" in server["command"] for server in started("order_again"))
    PAGE.says("699,117 KV tokens", "420,000 KV tokens")


def test_where_prefixes_exceed_the_pool():
    stock = ("fcfs", LPM, DFS)
    over = {(case, name): [f"{run.gain(case, BANDIT, other):.2f}x" for other in ("fcfs", DFS)]
            for case in ("W2", "W6") for name, run in TODAY.items()}  # fmt: skip
    p99 = {name: [f"{run.ttft('W2', policy, 'p99'):.1f} s" for policy in (BANDIT, DFS)] for name, run in TODAY.items()}
    for run in TODAY.values():
        assert all(max(stock, key=lambda policy: run.tok_s(case, policy)) == DFS for case in ("W2", "W6"))
    assert (
        min(gains(BANDIT, cases=("W2",))) > 1.8
        and min(TODAY[name].gain("W6", BANDIT) for name in ("pat", "flashinfer")) > 1.8
    )
    assert TODAY["fa3"].gain("W2", BANDIT, DFS) > 1.2
    assert all(run.ttft("W2", BANDIT, "p99") < run.ttft("W2", DFS, "p99") for run in TODAY.values())
    w6, rounds = w6_on_fa3()
    assert len(w6) == 3 and len(rounds) == 2 and mean([*w6, *rounds]) > 1.8
    w6 = [f"{gain:.3f}x" for gain in (*w6, mean(rounds))]
    PAGE.says(
        f"| [{over['W2', 'fa3'][1]} dfs-weight](#overview), {p99['fa3'][0]} for {p99['fa3'][1]} |",
        f"| W2 {over['W2', 'fa3'][0]} on `fa3`, {over['W2', 'flashinfer'][0]} on `flashinfer`, {over['W2', 'pat'][0]} "
        f"on `pat`; W6 {w6[0]}, {over['W6', 'flashinfer'][0]} and {over['W6', 'pat'][0]}",
        f"feather-bandit has {over['W2', 'fa3'][0]} fcfs and {over['W2', 'fa3'][1]} dfs-weight, the best stock policy, "
        f"on W2 with `fa3`, p99 of the time to the first token {p99['fa3'][0]} for {p99['fa3'][1]}; with `flashinfer` "
        f"{' and '.join(over['W2', 'flashinfer'])} ({' for '.join(p99['flashinfer'])}), with `pat` "
        f"{' and '.join(over['W2', 'pat'])} ({' for '.join(p99['pat'])}). On W6 it has "
        f"{' and '.join(over['W6', 'fa3'])}, {' and '.join(over['W6', 'flashinfer'])}, "
        f"{' and '.join(over['W6', 'pat'])}.",
        f"had {w6[1]} and {w6[2]} in earlier runs, {w6[3]} in two rounds, ",
        f"**W6 on `fa3` is at the edge of 1.8x**: {w6[0]} here, {w6[1]} and {w6[2]} in earlier runs, {w6[3]} in the "
        "mean of two [rounds]",
    )
    short = [f"{float(gain[:-1]):.2f}x" for gain in w6]
    README.says(f"1.8x fcfs was wanted: {short[0]}, {short[1]}, {short[2]} and {short[3]} on one draw")
    hits = {case: {f"{run.hit(case, BANDIT):.3f}" for run in EVERY if case in run.cases} for case in ("W2", "W6")}
    assert hits == {"W2": {"0.896", "0.890"}, "W6": {"0.963", "0.965"}}
    assert f"{TODAY['pat'].hit('W2', BANDIT):.3f}" == "0.890"
    thrown_out = [run.retractions(case, BANDIT) for run in EVERY for case in ("W2", "W6", "W6@1") if case in run.cases]
    assert len(thrown_out) == 15 and not sum(thrown_out)
    PAGE.says("0.890 with `pat` on W2, 0.963 to 0.965 on W6, and nobody is retracted, in any of these runs")


def test_another_draw_of_w6():
    run, own = RUNS["earlier_fa3_4"], RUNS["own_fa3_w6"]
    rates = [run.tok_s("W6@1", BANDIT), run.tok_s("W6", BANDIT), TODAY["fa3"].tok_s("W6", BANDIT)]
    both = times([run.gain("W6@1", BANDIT), RUNS["rounds_fa3_w6"].gain("W6@1", BANDIT)])
    PAGE.says(
        f"**{both} on another draw**",
        f"On another draw it is {both}: feather-bandit does there what it does on the first, "
        f"{rates[0]:,.0f} for {rates[1]:,.0f} tok/s, but fcfs is faster. That is "
        f"{100 * rates[0] / own.tok_s('W6', BANDIT):.0f} to {100 * rates[2] / own.tok_s('W6', BANDIT):.0f}% of what",
    )
    most = own.tok_s("W6", BANDIT) / RUNS["rounds_fa3_w6"].tok_s("W6@1", "fcfs")
    README.says(f"{both} on another, where the most that its kernel gave would be {most:.2f}x of the latter's fcfs")


def test_where_they_fit_nothing_is_lost():
    spans = {name: span(gains(BANDIT, runs=[run])) for name, run in TODAY.items()}
    every = gains(BANDIT, runs=EVERY)
    w3 = {name: gains(BANDIT, cases=("W3",), runs=[TODAY[name], *earlier(name)]) for name in TODAY}
    sweeps = [RUNS["pat_sweeps"].gain(case, BANDIT) for case in RUNS["pat_sweeps"].cases if "open:" in case]
    assert len(every) == 12 + 14 and min(every) > 1
    assert min(gain for name in ("fa3", "flashinfer") for gain in w3[name]) > 0.99 and mean(w3["pat"]) > 1
    rest = [gain for name in ("fa3", "flashinfer") for gain in w3[name]]
    again = percent(RUNS["rounds_pat_w3"].gain("W3", BANDIT))
    assert RUNS["rounds_pat_w3"].gain("W3", BANDIT) > 1 and len(gains_of_rounds("rounds_pat_w3", "W3", BANDIT)) == 4
    PAGE.says(
        f"feather-bandit has {spans['pat']} on `pat`, {spans['fa3']} on `fa3` and {spans['flashinfer']} on "
        "`flashinfer` to fcfs on W1, W4, W5 and W7",
        f"feather-bandit, the default: {span(every)} on W1, W4, W5 and W7 in all runs, {span(sweeps)} in the "
        f"[sweeps](#the-papers-sweeps) on `pat`, {span(rest)} on W3 with `fa3` and `flashinfer`. On W3 with `pat` it "
        f"has {percent(w3['pat'][0])} and {percent(w3['pat'][1])} in single runs, [{again} in the mean of four rounds]",
        f"On W3, where nothing is shared, {span(rest)} with `fa3` and `flashinfer`, {percent(w3['pat'][0])} and "
        f"{percent(w3['pat'][1])} in two runs with `pat`, {again} in the mean of four [rounds]",
    )
    bare = {name: text.replace("+", "") for name, text in spans.items()}
    README.says(f"is ahead of fcfs by {bare['pat']} on `pat`, {bare['fa3']} on `fa3` and {bare['flashinfer']}")
    alike = [
        gain for policy in (BANDIT, "feather-qlearning", HEURISTIC)
        for gain in gains(policy, cases=("W3", "W3@1"), runs=EVERY)
    ]  # fmt: skip
    assert not sum(sum(run.values(case, policy, "admission", "stops")) for run in TODAY.values()
                   for case, policy in run.records if case.startswith("W3"))  # fmt: skip
    PAGE.says(
        f"None of the learned policies nor feather-heuristic stopped on W3, so they admit alike: {span(alike)} in "
        f"{len(alike)} runs on all backends, {percent(mean(alike))} in the mean",
    )
    assert mean(alike) > 1
    README.says(
        f"where nothing is shared it is level (on `pat` {' and '.join(map(percent, w3['pat']))} in two runs, {again} "
        "in the mean of four rounds)"
    )
    first = [TODAY["pat"].ttft("W3", policy) for policy in (BANDIT, "fcfs", "feather-qlearning")]
    peaks = [TODAY["pat"].value("W3", policy, "overall", "peak_running") for policy in (BANDIT, "feather-qlearning")]
    PAGE.says(
        f"{first[0]:.2f} s for {first[1]:.2f} s to the first token, and feather-qlearning, which admits by the same "
        f"rules, {percent(TODAY['pat'].gain('W3', 'feather-qlearning'))} with {first[2]:.2f} s",
        f"at most {peaks[0]:.0f} and {peaks[1]:.0f} requests run",
    )
    longer = [(run.backend, case) for run in TODAY.values() for case in (*SHARING, "W2", "W6")
              if run.ttft(case, BANDIT) > run.ttft(case, "fcfs")]  # fmt: skip
    assert not longer


def test_what_order_brings():
    fa3, before = TODAY["fa3"], RUNS["earlier_fa3_2"]
    gained = {case: [percent(run.gain(case, ORDER)) for run in (fa3, before)] for case in ("W1", "W7", "W4", "W3")}
    dram = [f"{fa3.value('W7', policy, 'activity', 'dram'):.0f}%" for policy in ("fcfs", ORDER)]
    again = {case: percent(RUNS["order_200k"].gain(case, ORDER)) for case in ("W1", "W7")}
    PAGE.says(
        f"with 200,000 {gained['W1'][0]}, {gained['W1'][1]} and {again['W1']} on W1, {gained['W7'][0]}, "
        f"{gained['W7'][1]} and {again['W7']} on W7 in three runs",
        f"{' and '.join(gained['W1'])} on W1, {' and '.join(gained['W7'])} on W7 in this run and an earlier one, where "
        f"fcfs had {fa3.tok_s('W1', 'fcfs'):,.0f} and {before.tok_s('W1', 'fcfs'):,.0f} tok/s on W1, "
        f"{fa3.tok_s('W7', 'fcfs'):,.0f} and {before.tok_s('W7', 'fcfs'):,.0f} on W7, and feather-order nearly the "
        "same",
        f"DRAM is used to {dram[1]} instead of {dram[0]} on W7",
        f"On W4, where all rows share, and W3, where none do, it has {' and '.join(gained['W4'])}, "
        f"{' and '.join(gained['W3'])}.",
    )
    few, many = (
        [
            100 * run.gain(case, ORDER) - 100
            for run in (fa3, before, *(RUNS[name] for name in ("order", "order_again", "order_200k")))
            for case in cases
            if case in run.cases
        ]
        for cases in (("W1",), ("W7",))
    )
    many += [100 * RUNS[name].gain("W6", ORDER) - 100 for name in ("order", "order_again")]
    README.says(
        f"gains {min(few):.0f} to {max(few):.0f}% with 5 groups where memory suffices ({min(many):.0f} to "
        f"{max(many):.0f}% with 20) on `fa3`, and {100 * fa3.gain('W2', ORDER) - 100:.0f}% in one run"
    )
    for case in ("W1", "W7"):
        assert fa3.tok_s(case, ORDER) / before.tok_s(case, ORDER) == pytest.approx(1, abs=0.006)
    flashinfer = {case: percent(TODAY["flashinfer"].gain(case, ORDER)) for case in CASES}
    PAGE.says(
        f"On `flashinfer` it has {flashinfer['W1']} on W1 and {flashinfer['W7']} on W7, {flashinfer['W4']} on W4, "
        "where nothing is permuted and lpm has "
        f"{percent(TODAY['flashinfer'].gain('W4', LPM))}; {percent(RUNS['rounds_flashinfer_w4'].gain('W4', ORDER))} in "
        "the mean of three [rounds]",
    )
    assert RUNS["rounds_flashinfer_w4"].gain("W4", ORDER) > 1


def test_what_order_costs_on_pat():
    run, three = RUNS["pat_order"], [RUNS["pat_order"], RUNS["pat_order"], TODAY["pat"]]
    cases = ("W1", "W5:1200", "W7")
    pair = {case: percent(run.gain(case, ORDER)) for case in cases}
    idle = {case: percent(run.gain(case, "order-off")) for case in cases}
    once = {case: percent(TODAY["pat"].gain(case, ORDER)) for case in cases}
    all_three = [mean(one.gain(case, ORDER) for one in three) for case in cases]
    kernel = [TODAY["pat"].tok_s(case, "fcfs") / TODAY["fa3"].tok_s(case, "fcfs") for case in ("W1", "W4", "W7")]
    learnt = {case: percent(run.gain(case, BANDIT, "bandit-off")) for case in cases}
    assert min(all_three) > 0.99
    PAGE.says(
        f"{least_to_most(kernel)} times `fa3` under fcfs on W1, W4 and W7",
        f"feather-order has {pair['W1']}, {pair['W5:1200']} and {pair['W7']} on W1, W5 and W7, and with "
        f"`--feather-row-order off` (`order-off`), where it is fcfs but for the upkeep of the tree, {idle['W1']}, "
        f"{idle['W5:1200']} and {idle['W7']}",
        f"single runs by default have {once['W1']}, {once['W5:1200']} and {once['W7']}; the mean of all three rounds "
        f"is {percent(all_three[0])}, {percent(all_three[1])} and {percent(all_three[2])}",
        f"For feather-bandit order brings {learnt['W1']}, {learnt['W5:1200']} and {learnt['W7']}",
        f"busy for {run.busy('W5:1200', BANDIT):.0f}% of the time with it and {run.busy('W5:1200', 'bandit-off'):.0f}% "
        f"without, but in the single run by default for {TODAY['pat'].busy('W5:1200', BANDIT):.0f}%, at "
        f"{TODAY['pat'].tok_s('W5:1200', BANDIT):,.0f} tok/s",
        f"feather-order has {percent(all_three[0])}, {percent(all_three[1])} and {percent(all_three[2])} on W1, W5 and "
        "W7 with `pat` in the mean of three rounds, "
        f"{percent(RUNS['whole_pat_w5'].gain('W5', ORDER))} on all of W5; **single runs of it lie down to "
        f"{min(once.values(), key=lambda text: float(text[:-1]))}**",
    )
    README.says(
        f"{percent(all_three[2])} to {percent(all_three[1])} in the mean of three rounds, single runs down to "
        f"{min(once.values(), key=lambda text: float(text[:-1]))}"
    )


def test_every_row_more_than_one_percent_below_fcfs_is_told():
    below = {
        (name, case, policy): percent(run.gain(case, policy))
        for name, run in RUNS.items()
        for case, policy in run.records
        if policy.startswith(("feather", "paced")) and policy != HEURISTIC and (case, "fcfs") in run.records
        and not (case.startswith(("W2", "W6")) and policy == ORDER) and run.gain(case, policy) < 0.99
    }  # fmt: skip
    twenty = "open:5,5000,300,100,20"
    assert below == {
        ("pat", "W1", ORDER): "-2.6%",
        ("pat", "W5:1200", ORDER): "-2.8%",
        ("pat", "W7", ORDER): "-2.6%",
        ("pat", "W3", BANDIT): "-1.9%",
        ("flashinfer", "W4", ORDER): "-2.0%",
        ("earlier_pat_2", "W7", ORDER): "-1.6%",
        ("earlier_pat_2", "W5:1200", ORDER): "-1.1%",
        ("fa3_sweeps", twenty, BANDIT): "-3.1%",
        ("pat_sweeps_before", twenty, BANDIT): "-7.9%",
        ("fa3_sweeps_unpaced", "open:5,1000,300,100", ORDER): "-3.9%",
        ("fa3_sweeps_unpaced", "open:5,1000,300,100", BANDIT): "-1.3%",
        ("pacing_no_graphs", "W4", BANDIT): "-2.7%",
        ("pacing_no_graphs", "W1", BANDIT): "-2.1%",
        ("small", "W1", BANDIT): "-1.6%",
    }
    thousand = [
        percent(RUNS["fa3_sweeps"].gain(case, BANDIT)) for case in ("open:5,1000,300,100", "open:5,1000,300,100@1")
    ]
    w2, w6 = ([percent(run.gain(case, ORDER)) for run in TODAY.values()] for case in ("W2", "W6"))
    short = [percent(RUNS["rounds_fa3_short"].gain(case, BANDIT)) for case in (twenty, f"{twenty}@1")]
    PAGE.says(
        f"{percent(RUNS['pat_sweeps'].gain(twenty, BANDIT))} now; an older build had -7.9% on `pat` in one of three "
        "draws (`policies_h200_pat_sweeps_before.json`) and -3.1% on `fa3`",
        "with 1K prefixes, feather-order -3.9% and feather-bandit -1.3%",
        f"by default {thousand[0]} and {thousand[1]}",
        f"with 20 output tokens on `fa3`, where an older build had -3.1%, {short[0]} and {short[1]} on two draws",
        f"has {w2[0]}, {w2[1]} and {w2[2]} on W2 with `pat`, `fa3` and `flashinfer`, {w6[0]}, {w6[1]} and {w6[2]} on "
        "W6",
    )
    README.says("had -7.9% on one draw of three, and -3.1% on `fa3`", "up to 2.7% slower")


def test_the_other_policies():
    lpm, dfs = (gains(policy) for policy in (LPM, DFS))
    hits = [run.hit("W7", LPM) for run in TODAY.values()]
    (fcfs,) = {f"{run.hit('W7', 'fcfs'):.3f}" for run in TODAY.values()}
    learnt = gains("feather-qlearning", BANDIT, CASES)
    assert len(learnt) == 21
    PAGE.says(
        f"lpm has {span(lpm)} on W1, W4, W5 and W7, as it finds less in the cache on W7, {min(hits):.3f} to "
        f"{max(hits):.3f} for {fcfs}; dfs-weight {span(dfs)}.",
        f"within {100 * max(abs(gain - 1) for gain in learnt):.1f}% of feather-bandit in all rows",
    )


def test_what_pat_had_to_reach():
    every = [TODAY["pat"], *earlier("pat"), RUNS["draws_2"]]
    w1, w5, w2 = (
        [run.tok_s(case, BANDIT) for run in every if (case, BANDIT) in run.records] for case in ("W1", "W5:1200", "W2")
    )
    draws = [RUNS["draws_2"].tok_s(case, BANDIT) for case in RUNS["draws_2"].cases]
    over = [RUNS["draws_2"].gain(case, BANDIT, DFS) for case in RUNS["draws_2"].cases]
    assert len(w2) == 3 and mean(w2) >= 6_000 and min(w1) >= 13_000 and min(w5) >= 18_000
    assert len(draws) == 6 and mean(draws) >= 6_000
    rounds = [rate for number in (1, 2, 3)
              for rate in RUNS[f"rounds_pat_w2_{number}"].values("W2", BANDIT, "overall", "tok_s")]  # fmt: skip
    twelve = [*w2, *rounds]
    assert len(twelve) == 12 and mean(twelve) >= 6_000
    first = f"{mean(twelve):,.0f} in the mean of twelve runs, {min(twelve):,.0f} to {max(twelve):,.0f}"
    whole = RUNS["whole_pat_w5"].tok_s("W5", BANDIT)
    assert whole >= 18_000
    six = f"{mean(draws):,.0f} tok/s in the mean of six draws, {min(draws):,.0f} to {max(draws):,.0f}"
    thrown_out = [RUNS[name].retractions(case, policy) for name in ("draws_1", "draws_2")
                  for case in RUNS[name].cases for policy in (DFS, BANDIT)
                  if name == "draws_2" or case.startswith("W6")]  # fmt: skip
    thrown_out += [RUNS["pat_sweeps"].retractions("W2@1", policy) for policy in (DFS, BANDIT)]
    assert not sum(thrown_out[1::2])
    PAGE.says(
        f"| {w1[0]:,.0f}; [{whole:,.0f} on all of W5](#in-rounds), {w5[0]:,.0f} on its first 1,200 requests",
        f"{min(rounds):,.0f} to {max(rounds):,.0f} tok/s in nine runs, {mean(twelve):,.0f} in the mean with the three "
        "before",
        f"W2's first draw {first}; {mean(draws):,.0f} in the mean of [six "
        f"draws](#draws), {min(draws):,.0f} to {max(draws):,.0f} |",
        f"{six}, which is {mean(over):.2f}x dfs-weight ({min(over):.2f} to {max(over):.2f}); four of the six have more",
        f"{w2[2]:,.0f} here, {w2[0]:,.0f} and {w2[1]:,.0f} in the runs by default",
        f"{min(thrown_out[::2])} to {max(thrown_out[::2])} times under dfs-weight",
    )
    assert sum(rate > 6000 for rate in draws) == 4
    README.says(f"has {first.replace(' in', ' tok/s in', 1)}, and {six}")


def test_the_sweeps():
    fa3, pat, slow = RUNS["fa3_sweeps_unpaced"], RUNS["pat_sweeps"], "open:5,5000,250,25"

    def lead(case, policy=BANDIT):
        return f"{fa3.gain(f'open:{case}', policy):.2f}x"

    loaded = [pat.gain(f"open:{case}", BANDIT) for case in ("20,5000,300,100", "1,5000,300,100", "5,5000,300,100,200,2",
                                                            "5,5000,300,100,200,4", "5,20000,300,100")]  # fmt: skip
    first = [[f"{1e3 * pat.ttft(slow, policy, key):.0f}" for key in ("mean", "p50")] for policy in (BANDIT, "fcfs")]
    twenty = [f"{pat.e2e('open:5,5000,300,100,20', policy):.2f} s" for policy in (BANDIT, "fcfs")]
    total = [f"{pat.e2e(slow, policy):.2f} s" for policy in (BANDIT, "fcfs")]
    p99 = [f"{pat.ttft(slow, policy, 'p99'):.2f} s" for policy in (BANDIT, "fcfs")]
    assert max(abs(pat.gain(case, BANDIT) - 1) for case in (slow, "open:5,5000,60,5")) < 0.001
    PAGE.says(
        f"grows with groups ({lead('1,5000,300,100')}, {lead('20,5000,300,100')} with 1 and 20), with shared tokens "
        f"({lead('5,1000,300,100')}, {lead('5,20000,300,100')} with 1K and 20K) and with levels "
        f"({lead('5,5000,300,100,200,2')}, {lead('5,5000,300,100,200,4')} with 2 and 4)",
        f"feather-order has {lead('20,5000,300,100', ORDER)} of that {lead('20,5000,300,100')}",
        f"the lead is {min(loaded):.2f}x to {max(loaded):.2f}x throughout, with 1K prefixes "
        f"{pat.gain('open:5,1000,300,100', BANDIT):.2f}x",
        f"at 25/s the mean E2E is {total[0]} for fcfs's {total[1]}, but the first token comes after {first[0][0]} ms "
        "for "
        f"{first[1][0]} ms in the mean, {first[0][1]} for {first[1][1]} ms at the median, its p99 {p99[0]} for "
        f"{p99[1]}",
        f"The mean E2E is {twenty[0]} for {twenty[1]}",
    )
    sooner = 1 - pat.e2e(slow, BANDIT) / pat.e2e(slow, "fcfs")
    README.says(
        f"{first[0][1]} ms for fcfs's {first[1][1]} at the median, for {100 * sooner:.0f}% less end to end",
    )


def test_a_hundred_groups():
    run, (case,) = RUNS["hundred"], RUNS["hundred"].cases
    waits, p99 = ([f"{run.ttft(case, policy, key):.1f}" for policy in (BANDIT, "fcfs", DFS)] for key in ("mean", "p99"))
    hits = [f"{run.hit(case, policy):.2f}" for policy in (BANDIT, "fcfs", DFS)]
    PAGE.says(
        f"feather-bandit is {run.gain(case, BANDIT):.2f}x fcfs and {run.gain(case, BANDIT, DFS):.2f}x dfs-weight; the "
        "time "
        f"to the first token is {waits[0]} s for {waits[1]} and {waits[2]} s, its p99 {p99[0]} s for {p99[1]} and "
        f"{p99[2]} "
        f"s, the cache hit {hits[0]} for {hits[1]} and {hits[2]}"
    )
    README.says(
        f"fcfs {run.tok_s(case, 'fcfs'):,.0f} tok/s, dfs-weight {run.tok_s(case, DFS):,.0f}, `feather-bandit` with "
        f"`--feather-pace 0` {run.tok_s(case, BANDIT):,.0f}"
    )


def test_order_alone():
    first, second, third = (RUNS[name] for name in ("order", "order_again", "order_200k"))
    alone = [{case: percent(run.gain(case, ORDER)) for case in run.cases} for run in (first, second, third)]
    cases = [(run, case) for run in (first, second) for case in ("W7", "W6", "W1")]
    shorter = [run.ttft(case, "fcfs", "p99") - run.ttft(case, ORDER, "p99") for run, case in cases]
    dram = [ordered / arrived for arrived, ordered in (Ordering(*one).dram for one in cases)]
    rates = [run.values(*key, "overall", "tok_s") for run in (first, second, third) for key in run.records]
    apart = max(max(rounds) / min(rounds) - 1 for rounds in rates)
    PAGE.says(
        f"**{alone[0]['W7']} on W7, {alone[0]['W6']} on W6, {alone[0]['W1']} on W1** on the first GPU, "
        f"**{alone[1]['W7']}, {alone[1]['W6']}, {alone[1]['W1']}** on the second",
        f"[{alone[0]['W1']}, {alone[0]['W7']}, {alone[0]['W6']}](#row-order-alone) in two rounds with 420,000 KV "
        f"tokens on one GPU, **{alone[1]['W1']}, {alone[1]['W7']}, {alone[1]['W6']} on another**",
        f"on the third {alone[2]['W7']} on W7 and {alone[2]['W1']} on W1",
        f"is {min(shorter):.1f} to {max(shorter):.1f} s shorter",
        f"use {min(dram):.2f} to {max(dram):.2f} of the DRAM bandwidth",
        f"lie at most {100 * apart:.1f}% apart",
        "reached by all three on the first GPU, on the second by W7 alone",
    )
    wanted = {"W1": 1.08, "W7": 1.18, "W6": 1.22}
    assert all(first.gain(case, ORDER) > gain for case, gain in wanted.items())
    assert [case for case, gain in wanted.items() if second.gain(case, ORDER) > gain] == ["W7"]


def test_what_disorder_costs_is_clock():
    runs = [(RUNS["order"], ORDERED), (RUNS["order_again"], ORDERED)]
    runs += [(run, ORDERED[:2]) for run in (RUNS["order_200k"], TODAY["fa3"], RUNS["earlier_fa3_2"])]
    found = [Ordering(run, case) for run, cases in runs for case in cases]
    lines = "\n".join(one.line() for one in found)
    assert lines in RESULTS, lines
    w1 = [one for one in found if one.case == "W1"]
    w7 = sorted((one for one in found if one.case == "W7"), key=lambda one: one.ghz[0])
    low, high = ([100 * one.gain - 100 for one in some] for some in (w7[:2], w7[2:]))
    assert all(one.watt[1] == pytest.approx(one.watt[0], rel=0.025) for one in found)  # about the same power
    assert all(one.rest == pytest.approx(1, abs=0.017) for one in w1)
    watts, used = [watt for one in found for watt in one.watt], [one.dram[0] for one in w1]
    PAGE.says(
        f"draws {min(watts):.0f} to {max(watts):.0f} W in the mean",
        f"**Row order raises the clock by {span([one.clock for one in found]).replace('+', '')}**, with about the same "
        f"power; what remains is {span([one.rest for one in found])}",
        f"On W1, where DRAM is used to {min(used):.0f} to {max(used):.0f}%",
        f"On W7 it had {w7[0].ghz[0]:.2f} GHz under fcfs in two runs, and order gained {min(low):.1f} and "
        f"{max(low):.1f}%; in the three others it had {w7[2].ghz[0]:.2f} to {w7[-1].ghz[0]:.2f} GHz, and order gained "
        f"{min(high):.1f} to {max(high):.1f}%",
    )


def test_in_rounds():
    w6, short, w5, w5_fa3 = (
        RUNS[name] for name in ("rounds_fa3_w6", "rounds_fa3_short", "whole_pat_w5", "whole_fa3_w5")
    )
    single, rounds = w6_on_fa3()
    rates = {policy: w6.values("W6@1", policy, "overall", "tok_s") for policy in (BANDIT, "fcfs")}
    apart = [
        max(found) / min(found) - 1
        for name in ("rounds_pat_w3", "rounds_flashinfer_w4")
        for key in RUNS[name].records
        for found in [RUNS[name].values(*key, "overall", "tok_s")]
    ]
    cases = short.cases
    e2e = [f"{short.e2e(case, BANDIT):.2f} s for {short.e2e(case, 'fcfs'):.2f} s" for case in cases]
    assert min(short.gain(case, BANDIT) for case in cases) > 1
    PAGE.says(
        f"has {w6.gain('W6', BANDIT):.3f}x, with the three single runs {mean([*single, *rounds]):.3f}x in the mean of "
        "all five",
        f"gives {rates[BANDIT][0]:,.0f} and {rates[BANDIT][1]:,.0f} tok/s, {w6.gain('W6@1', BANDIT):.2f}x fcfs's "
        f"{rates['fcfs'][0]:,.0f} and {rates['fcfs'][1]:,.0f}",
        f"1.8x would be {1.8 * mean(rates['fcfs']):,.0f} tok/s",
        f"this attention kernel gives W6 {RUNS['own_fa3_w6'].tok_s('W6', BANDIT):,.0f}",
        f"feather-order {percent(RUNS['rounds_pat_w3'].gain('W3', ORDER))} in the mean of four rounds, on W4 with "
        f"`flashinfer` feather-order {percent(RUNS['rounds_flashinfer_w4'].gain('W4', ORDER))} in the mean of three. "
        f"Rounds of one policy lie up to {100 * max(apart):.1f}% apart there",
        f"feather-bandit has {' and '.join(percent(short.gain(case, BANDIT)) for case in cases)} on two draws, for an "
        f"older build's -3.1%; the mean E2E is {' and '.join(e2e)}",
        f"feather-bandit has {percent(w5.gain('W5', BANDIT))}, {w5.tok_s('W5', BANDIT):,.0f} tok/s, feather-qlearning "
        f"{percent(w5.gain('W5', 'feather-qlearning'))}, feather-order {percent(w5.gain('W5', ORDER))} and dfs-weight "
        f"{percent(w5.gain('W5', DFS))}, whose rounds take {w5.round_ms('W5', DFS):.0f} ms each. On `fa3` "
        f"feather-order has {percent(w5_fa3.gain('W5', ORDER))}, feather-bandit {percent(w5_fa3.gain('W5', BANDIT))}",
    )
    assert not sum(w6.retractions(case, BANDIT) for case in w6.cases)


def test_pacing():
    on, off = RUNS["pacing"], RUNS["pacing_no_graphs"]
    paced = [percent(on.gain(case, "paced")) for case in ("W4", "W1")]
    paced += [percent(off.gain(case, "paced")) for case in ("W4", "W1", "W5:1200", "W7")]
    alone = [percent(on.gain(case, BANDIT)) for case in ("W4", "W1")]
    alone += [percent(off.gain(case, BANDIT)) for case in ("W4", "W1", "W5:1200", "W7")]
    busy = [f"{on.busy(case, policy):.0f}%" for policy in (BANDIT, "paced") for case in ("W4", "W1")]
    fast, slow, twenty = "open:5,5000,250,25", "open:5,5000,100,5", "open:20,5000,250,25"
    policies = ("paced", BANDIT, "fcfs")

    def all_three(case, what, digits=2, factor=1.0):
        return [f"{factor * what(case, policy):.{digits}f}" for policy in policies]

    total = {case: all_three(case, on.e2e) for case in (fast, slow, twenty)}
    first = all_three(fast, on.ttft, 0, 1e3)
    half = all_three(fast, lambda case, policy: on.ttft(case, policy, "p50"), 0, 1e3)
    p99 = all_three(fast, lambda case, policy: on.ttft(case, policy, "p99"))
    wide, low = all_three(twenty, on.ttft), all_three(slow, on.ttft, 0, 1e3)
    assert max(abs(on.gain(case, policy) - 1) for case in (fast, slow, twenty) for policy in policies) < 0.001
    PAGE.says(
        f"{paced[0]} on W4 and {paced[1]} on W1 with prefill graphs, {paced[2]}, {paced[3]}, {paced[4]} and "
        f"{paced[5]} on "
        f"W4, W1, W5 and W7 without. Without pacing it has {alone[0]} and {alone[1]}, {alone[2]}, {alone[3]}, "
        f"{alone[4]} "
        f"and {alone[5]}",
        f"busy for {busy[0]} and {busy[1]} of W4 and W1, paced for {busy[2]} and {busy[3]}",
        f"on W1 from {on.ttft('W1', BANDIT):.2f} s to {on.ttft('W1', 'paced'):.2f} s",
        f"at 25/s the mean E2E is {total[fast][0]} s for {total[fast][1]} s without pacing and {total[fast][2]} s "
        "under "
        f"fcfs; the time to the first token is {first[0]} ms for {first[1]} and {first[2]} ms in the mean, {half[0]} "
        "ms "
        f"for {half[1]} and {half[2]} ms at the median, {p99[0]} s for {p99[1]} and {p99[2]} s at p99",
        f"With 20 groups E2E is {total[twenty][0]} s for {total[twenty][1]} and {total[twenty][2]} s, the time to the "
        f"first token {wide[0]} s for {wide[1]} and {wide[2]} s",
        f"At 5/s E2E is level ({total[slow][0]} s for {total[slow][1]} and {total[slow][2]} s), the time to the first "
        f"token {low[0]} ms for {low[1]} and {low[2]} ms",
    )
    same = [on.gain(case, "paced", BANDIT) for case in ("W4", "W1")]
    eager = {case: percent(off.gain(case, "paced", BANDIT)) for case in ("W5:1200", "W1", "W4", "W7")}
    bare = [[f"{off.ttft(fast, policy, key) * (1e3 if key == 'mean' else 1):.{0 if key == 'mean' else 2}f}"
             for policy in ("paced", BANDIT)] for key in ("mean", "p99")]  # fmt: skip
    without = [f"{off.e2e(fast, policy):.2f}" for policy in ("paced", BANDIT)]
    SCHEDULER.says(
        f"{percent(same[0])} on W4 and {percent(same[1])} on W1",
        f"{eager['W5:1200']} on W5, {eager['W1']}, {eager['W4']} and {eager['W7']} on W1, W4 and W7",
        f"at 25 requests/s {first[0]} ms for {first[1]} ms, its p99 {p99[0]} s for {p99[1]} s, E2E {total[fast][0]} s "
        "for "
        f"{total[fast][1]} s (without prefill graphs {bare[0][0]} ms for {bare[0][1]} ms, {bare[1][0]} s for "
        f"{bare[1][1]} "
        f"s, {without[0]} s for {without[1]} s); at 5/s {low[0]} ms for {low[1]} ms and E2E level",
        f"{half[0]} ms for {half[1]} ms at 25 requests/s",
    )


def test_memory_for_everything():
    w2, w6, pat = RUNS["own_fa3_w2"], RUNS["own_fa3_w6"], RUNS["own_pat"]
    short = RUNS["evicting_fa3"].values("W6", "fcfs", "overall", "tok_s")
    over = [w6.tok_s("W6", policy) / mean(short) for policy in (BANDIT, ORDER)]
    rates = [w2.tok_s("W2", policy) for policy in (BANDIT, ORDER, "fcfs", DFS)]
    own = [run.tok_s("W2", BANDIT) for run in (TODAY["fa3"], RUNS["earlier_fa3_1"])]
    waits = [pat.ttft(case, BANDIT) / pat.ttft(case, "fcfs") for case in ("W2", "W6")]
    share = least_to_most([rate / rates[0] for rate in own])
    PAGE.says(
        f"feather-bandit gives {w6.tok_s('W6', BANDIT):,.0f} tok/s, feather-order {w6.tok_s('W6', ORDER):,.0f}. That "
        "is "
        f"{times(over)} what fcfs had with 200,000 tokens in another run ({short[0]:,.0f} and {short[1]:,.0f})",
        f"{over[0]:.2f}x is what `fa3` gives W6 [with memory for everything]",
        f"On `fa3` feather-bandit gives {rates[0]:,.0f} tok/s, feather-order {rates[1]:,.0f}, fcfs {rates[2]:,.0f} and "
        f"dfs-weight {rates[3]:,.0f}; with 200,000 tokens feather-bandit has {own[0]:,.0f} and {own[1]:,.0f}, {share} "
        "of "
        f"that. On `pat` it gives {pat.tok_s('W2', BANDIT):,.0f}.",
        f"gains {percent(pat.gain('W2', BANDIT))[1:]} and {percent(pat.gain('W6', BANDIT))[1:]} on W2 and W6 with "
        "`pat`",
        f"the mean time to the first token is {waits[0]:.2f}x and {waits[1]:.2f}x",
    )


def test_who_goes_last():
    before, after = RUNS["evicting_fa3"], [TODAY["fa3"], RUNS["earlier_fa3_1"], RUNS["earlier_fa3_4"]]
    assert not sum(run.retractions("W6", BANDIT) for run in after)
    over = [run.gain("W6", BANDIT) for run in after]
    gained = f"between {min(over):.2f}x and {max(over):.2f}x"
    hits = least_to_most([run.hit("W6", BANDIT) for run in after], 3)
    PAGE.says(
        f"feather-bandit had {before.gain('W6', BANDIT):.2f}x fcfs and {before.retractions('W6', BANDIT)} retractions "
        f"in its two rounds, with hits of {before.hit('W6', BANDIT):.3f} in the mean; with the rules {gained}, none, "
        f"and {hits}"
    )
    SCHEDULER.says(f"W6 on `fa3` from {before.gain('W6', BANDIT):.2f}x to {gained} fcfs")


def test_prefixes_that_wait():
    on, off = (
        [record["overall"] for record in read("gather")["records"] if record["server"] == server]
        for server in ("fa3+feather-bandit", "nogather")
    )
    rates = [[one["tok_s"] for one in found] for found in (on, off)]
    p99 = [mean(one["ttft_s"]["p99"] for one in found) for found in (on, off)]
    PAGE.says(
        f"{rates[0][0]:,.0f} and {rates[0][1]:,.0f} tok/s with, {rates[1][0]:,.0f} and {rates[1][1]:,.0f} without; "
        f"{percent(mean(rates[0]) / mean(rates[1]))} in the mean",
        f"with a p99 of {p99[0]:.1f} s for {p99[1]:.1f} s",
    )


def test_stopping():
    run = TODAY["fa3"]
    over = [run.gain(case, HEURISTIC, DFS) for case in ("W2", "W6")]
    stops = sum(one["stops"] for one in run.values("W2", HEURISTIC, "admission"))
    peaks = [run.value("W2", policy, "overall", "peak_running") for policy in (HEURISTIC, BANDIT)]
    behind = {name: [f"{one.gain(case, HEURISTIC):.2f}x" for case in ("W2", "W7")] for name, one in TODAY.items()}
    homogeneous = gains(HEURISTIC, cases=("W4",))
    PAGE.says(
        f"{over[0]:.2f}x dfs-weight on W2, {over[1]:.2f}x on W6",
        f"stops instead ({stops:,} times), so {peaks[0]:.0f} requests run where {peaks[1]:.0f} could",
        f"to fcfs {', '.join(found[0] for found in behind.values())} on W2 and "
        f"{', '.join(found[1] for found in behind.values())} on W7 with `pat`, `fa3` and `flashinfer`",
        f"On W4, with one group, it never stops and has {span(homogeneous)}",
    )
    on_w7 = [one.gain("W7", HEURISTIC) for one in TODAY.values()]
    README.says(f"{min(on_w7):.2f}x to {max(on_w7):.2f}x with 20 groups and {behind['fa3'][0]} where prefixes exceed")


def test_the_small_model():
    run = RUNS["small"]
    waits = [1e3 * run.ttft("W2", policy, "p99") for policy in (BANDIT, "fcfs", DFS)]
    shares = [f"{run.share('W1', policy):.1f}%" for policy in (BANDIT, "fcfs", DFS)]
    assert all(abs(run.gain(case, policy) - 1) < 0.021 for case, policy in run.records)
    PAGE.says(
        f"is {waits[0]:.0f} ms instead of {waits[1]:.0f} ms (dfs-weight {waits[2]:.0f} ms)",
        f"feather-bandit's {percent(run.gain('W1', BANDIT))} on W1 is what admission takes more of the run "
        f"({shares[0]} for "
        f"{shares[1]}); dfs-weight, with {shares[2]}, has {percent(run.gain('W1', DFS))} too",
    )


def test_what_admission_costs():
    def ms(policy, *cases):
        return least_to_most([run.round_ms(case, policy) for case in cases for run in TODAY.values()], 1)

    costs = {
        policy: [run.request_us(case, policy) / run.request_us(case, "fcfs") for run, case in ADMISSION]
        for policy in (DFS, ORDER, BANDIT)
    }
    w2 = [TODAY["pat"].values("W2", policy, "admission", "rounds")[0] for policy in (BANDIT, "fcfs", HEURISTIC)]
    (short, _), (long, _), *_ = ADMISSION
    assert short is long  # prefixes of 1K and of 20K on one server
    for policy in ("fcfs", DFS, ORDER, BANDIT):
        assert short.request_us(ADMISSION[1][1], policy) < short.request_us(ADMISSION[0][1], policy)
    PAGE.says(
        f"dfs-weight takes {least_to_most(costs[DFS], 1)} times fcfs's time, feather-order "
        f"{least_to_most(costs[ORDER], 1)} times",
        f"feather-bandit {least_to_most(costs[BANDIT][:4] + costs[BANDIT][5:], 1)} times, but {costs[BANDIT][4]:.1f} "
        f"times on W2, where it opens {w2[0]} rounds for fcfs's {w2[1]}",
        f"feather-heuristic, whose STOP leaves the batch open, opens {w2[2]:,} there",
    )
    idle = [f"{100 - RUNS[name].busy('W2', policy):.1f}%" for policy in (BANDIT, DFS) for name in ("fa3", "pat")]
    PAGE.says(
        f"feather-bandit takes {ms(BANDIT, 'W2')} ms a round on W2 for dfs-weight's {ms(DFS, 'W2')} ms, "
        f"{ms(BANDIT, 'W6')} on W6 for {ms(DFS, 'W6')}",
        f"fcfs takes {ms('fcfs', 'W2', 'W6')} ms",
        f"is {idle[0]} of W2 under feather-bandit on `fa3` and {idle[1]} on `pat`, for {idle[2]} and {idle[3]} under "
        "dfs-weight",
    )


def test_dram_in_whole_runs():
    fa3, pat, order = TODAY["fa3"], TODAY["pat"], RUNS["order"]

    def used(run, case, policy):
        return f"{run.value(case, policy, 'activity', 'dram'):.0f}%"

    PAGE.says(
        f"on W2 fcfs uses {used(fa3, 'W2', 'fcfs')} of the bandwidth, dfs-weight {used(fa3, 'W2', DFS)}, "
        "feather-bandit "
        f"{used(fa3, 'W2', BANDIT)}",
        f"arrival order uses {used(order, 'W6', 'fcfs')}, prefix order {used(order, 'W6', ORDER)}",
        f"on W2 feather-bandit uses {used(pat, 'W2', BANDIT)}, dfs-weight {used(pat, 'W2', DFS)}, lpm "
        f"{used(pat, 'W2', LPM)}",
    )


def test_the_readmes_table():
    lines = {
        "20 groups x 5K, 100 requests/s": "W7",
        "50 groups x 5K, 50 requests/s": "W2",
        "20 groups x 10K, 100 requests/s": "W6",
    }
    rows = (ROOT / "README.md").read_text().splitlines()
    for start, case in lines.items():
        (row,) = (row for row in rows if row.startswith(f"| {start}"))
        for run in (TODAY["fa3"], TODAY["pat"]):
            figures = [f"{run.tok_s(case, policy):,.0f}" for policy in ("fcfs", DFS, BANDIT)]
            words = f"`{run.backend}`: fcfs {figures[0]}, dfs-weight {figures[1]}, `feather-bandit` {figures[2]}"
            assert words in row, words
    for start, case in (("5 groups x 5K, 100 requests/s", "W1"), ("1 group x 5K", "W4")):
        (row,) = (row for row in rows if row.startswith(f"| {start}"))
        run = TODAY["pat"]
        assert f"`pat`: fcfs {run.tok_s(case, 'fcfs'):,.0f}, `feather-bandit` {run.tok_s(case, BANDIT):,.0f}" in row
    fa3, pat = (
        [f"{RUNS[name].tok_s('W5', policy):,.0f}" for policy in policies]
        for name, policies in (("whole_fa3_w5", ("fcfs", BANDIT)), ("whole_pat_w5", ("fcfs", DFS, BANDIT)))
    )
    (row,) = (row for row in rows if row.startswith("| the same at 400") and "dfs-weight" in row)
    assert f"`fa3`: fcfs {fa3[0]}, `feather-bandit` {fa3[1]}; `pat`: fcfs {pat[0]}, dfs-weight {pat[1]}, " in row
    assert f"`feather-bandit` {pat[2]} |" in row


def test_every_run_is_on_one_kind_of_chip_and_release():
    for path in MEASURED.glob("policies_h200*.json"):
        machine = json.loads(path.read_text())["machine"]
        assert (machine["gpu"], machine["versions"]["sglang"]) == ("NVIDIA H200", "0.5.17")


def test_cases_in_words():
    assert label("open:5,1000,300,100,20@1") == "5 x 1K, 100/s, 20 output tokens@1"
    assert label("open:5,5000,300,100,200,4") == "5 x 5K, 100/s, 4 levels" and label("W5:1200") == "W5:1200"


def test_the_page_on_step_times_has_the_servers_figures():
    """Beside what the replay says, which is quoted; its command stands below the table."""
    page, policies, off = (ROOT / "docs" / "step_time.md").read_text(), ("fcfs", DFS, ORDER, BANDIT), {}
    run, cases = TODAY["pat"], ("W1", "W2", "W3", "W4", "W6", "W7")
    for case in cases:
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {case}: ") and " / " in line)
        for policy, cell in zip(policies, line.split(" | ")[1:], strict=True):
            server, replay, said = re.fullmatch(r"([\d,]+) / ([\d,]+) \((.\d+)%\)(?: \|)?", cell).groups()
            assert server == f"{run.tok_s(case, policy):,.0f}"
            off[case, policy] = 100 * int(replay.replace(",", "")) / run.tok_s(case, policy) - 100
            assert said == f"{off[case, policy]:+.0f}"
    others = [value for (_, policy), value in off.items() if policy != DFS]
    dfs = [value for (_, policy), value in off.items() if policy == DFS]
    clocks = [run.value(case, policy, "clocks", "sm_mhz", "mean") / 1e3 for case in cases for policy in policies]
    short = [(run.hit(case, DFS), run.retractions(case, DFS), run.round_ms(case, DFS)) for case in ("W6", "W7")]
    Page("docs/step_time.md").says(
        f"between {-min(others):.0f}% below and {max(others):.0f}% above the servers but for dfs-weight",
        f"up to {100 - 100 * run.gain('W1', DFS):.0f}% apart (dfs-weight on W1)",
        f"{min(clocks):.2f} to {max(clocks):.2f} GHz in the mean of these runs",
        f"dfs-weight is predicted {min(dfs):.0f} to {max(dfs):.0f}% too fast",
        f"{short[0][0]:.3f} of the prompt tokens on W6, in the replay 0.946; on W7 {short[1][0]:.3f} and 0.959",
        f"what its admission costs, {short[0][2]:.0f} and {short[1][2]:.0f} ms a round",
        f"had to retract requests {short[0][1]} and {short[1][1]} times",
    )
