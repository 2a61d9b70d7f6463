"""docs/kernels.md and kernel_decisions.md say what docs/measured holds; what they claim of peers follows from that."""

import json
import re
from pathlib import Path
from statistics import geometric_mean

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "kernels.md").read_text()
DECISIONS = " ".join((DOCS / "kernel_decisions.md").read_text().split())
README = " ".join((DOCS.parent / "README.md").read_text().split())
HAD_TO_BE = {"32/8": 2.3, "64/8": 2.6, "32/32": 1.40, "16/8": 1.95}  # ahead of every published kernel


def records(name):
    return json.loads((DOCS / "measured" / name).read_text())["records"]


def pat_rows():
    """PAT's 80 rows with either page size."""
    rows = records("decode_h200.json")
    assert len(rows) == 160
    return rows


def mean(of, system, heads, page_size=1, kind="warm_us"):
    """Geometric mean of time over floor over the trees, of the rows with these heads and this page size."""
    rows = [row for row in of if (row["heads"], row["page_size"]) == (heads, page_size)]
    assert len(rows) == 20
    return geometric_mean(row["systems"][system][kind] / row["floor_us"] for row in rows)


@pytest.mark.parametrize("heads", HAD_TO_BE)
def test_the_table_holds_the_measured_means(heads):
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| {heads} | **"))
    said = [float(number) for number in re.findall(r"\d+\.\d+", row)]
    measured = [
        mean(pat_rows(), system, heads, kind=kind)
        for system in ("feather", "fa3-planned", "flashinfer")
        for kind in ("warm_us", "flushed_us")
    ]
    assert said[:6] == [round(value, 2) for value in measured]
    assert said[-2] == HAD_TO_BE[heads] >= said[0]


def test_the_readme_holds_the_ratio_to_peers():
    rows = pat_rows()
    own = mean(rows, "feather", "32/8")
    fa3, flashinfer = (own / mean(rows, peer, "32/8") for peer in ("fa3-planned", "flashinfer"))
    assert f"at 32/8 heads: {fa3:.2f} of FlashAttention-3's time and {flashinfer:.2f} of FlashInfer's" in README


def test_pages_of_32():
    means = [f"{mean(pat_rows(), 'feather', heads, page_size=32):.2f}" for heads in HAD_TO_BE]
    assert f"Page size 32: {', '.join(means)}." in TEXT


def behind_a_peer(rows):
    """The rows that a peer is faster in, by tree, heads and page size: time to the best peer's."""
    behind = {}
    for row in rows:
        times = {name: system["warm_us"] for name, system in row["systems"].items() if "warm_us" in system}
        own = times.pop("feather")
        if own > min(times.values()):
            behind[row["name"], row["heads"], row["page_size"]] = own / min(times.values())
    return behind


def test_no_row_is_slower_than_a_peer():
    assert not behind_a_peer(pat_rows())
    assert "**Slower than a peer**: none of the 160 rows, L2 warm." in TEXT
    unshared = [row for row in pat_rows() if row["name"] in ("256_1024", "256_4096")]
    assert len(unshared) == 16
    ratios = []
    for row in unshared:
        times = {name: system["warm_us"] for name, system in row["systems"].items() if "warm_us" in system}
        ratios.append(times.pop("feather") / min(times.values()))
    assert f"without sharing {min(ratios):.2f} to {max(ratios):.2f} of the better of them" in README


def test_what_time_wins_and_loses_beside_profit():
    rows = [row["systems"] for row in records("decode_h200_strategies.json")]
    ratios = [systems["feather"]["warm_us"] / systems["feather-profit"]["warm_us"] for systems in rows]
    saved, lost = round(100 - 100 * min(ratios)), round(100 * max(ratios) - 100)
    assert f"saves up to {saved}% of a tree's time and loses up to {lost}%" in " ".join(TEXT.split())


def test_the_ablations_are_the_measured_ones():
    said = re.search(r"\| strategy `profit`, `compute`, `optimal`, `naive` \| (.+) \|", TEXT)[1]
    names = ("feather-profit", "feather-compute", "feather-optimal", "feather-naive")
    measured = [mean(records("decode_h200_ablations.json"), name, "32/8") for name in names]
    assert [float(number) for number in said.split(", ")] == [round(value, 2) for value in measured]


@pytest.mark.parametrize("name", ["n", "n_portable"])
def test_another_n_over_whole_batches(name):
    rows = [list(row["systems"].values()) for row in records(f"decode_h200_{name}.json")]
    assert len(rows) == 80
    ratios = [other["warm_us"] / usual["warm_us"] for usual, other in rows]
    mean_of_all = 100 * geometric_mean(ratios) - 100
    least, most = 100 - 100 * min(ratios), 100 * max(ratios) - 100
    said = {
        "n": f"PAT's 80 take {mean_of_all:.1f}% longer in the mean, up to {most:.0f}%, and "
        f"{sum(ratio < 1 for ratio in ratios)} of them up to {least:.1f}% less",
        "n_portable": f"takes {-mean_of_all:.1f}% less in the mean over the 80 batches, {least:.0f}% at best and "
        f"{most:.0f}% more at worst",
    }
    assert said[name] in " ".join(TEXT.split())


def test_what_a_unit_of_64_tokens_takes_with_another_n():
    printed = (DOCS / "measured" / "tile_times_h200.txt").read_text()
    longer = []
    for m in (64, 128):
        small, large = (float(re.search(rf"hopper m +{m} n +{n} KV +64: ([\d.]+) us", printed)[1]) for n in (32, 64))
        longer.append(f"{100 * small / large - 100:.0f}")
    assert f"with n = 32 a unit of 64 tokens takes {longer[0]} and {longer[1]}% longer" in " ".join(TEXT.split())


def test_batches_as_servers_have_them():
    rows = records("decode_h200_serving.json")
    assert len(rows) == 54
    times = [{name: one["warm_us"] for name, one in row["systems"].items() if "warm_us" in one} for row in rows]
    text = " ".join(TEXT.split())
    for heads in ("32/8", "64/8"):
        of = [(row["floor_us"], us) for row, us in zip(rows, times, strict=True) if row["heads"] == heads]
        said = {}
        for name in ("feather", "feather-balanced", "flashinfer", "fa3-planned"):
            said[name] = f"{geometric_mean(us[name] / floor for floor, us in of):.2f}"
        index = ("32/8", "64/8").index(heads)
        for name, label in (
            ("feather", "this kernel"), ("flashinfer", "FlashInfer"), ("fa3-planned", "FlashAttention-3"),
            ("feather-balanced", "the split `balanced`"),
        ):  # fmt: skip
            assert re.search(rf"{label} ([\d.]+) and ([\d.]+)[,;.]", text).group(index + 1).rstrip(".") == said[name]
    behind = {}
    for row, us in zip(rows, times, strict=True):
        best = min(time for name, time in us.items() if not name.startswith("feather"))
        if us["feather"] > best:
            behind.setdefault(row["name"].partition("_")[0], []).append(us["feather"] / best)
    assert set(behind) == {"20,32"} and len(behind["20,32"]) == 4
    low, high = min(behind["20,32"]), max(behind["20,32"])
    assert "four of the six rows of 32 requests" in text and "in four of six such rows" in README
    assert f"in 20 groups, by {100 * low - 100:.0f} to {100 * high - 100:.0f}%" in text
    assert f"takes {low:.2f} to {high:.2f} of FlashInfer's time" in README
    ratios = [
        us["feather"] / us["feather-balanced"]
        for row, us in zip(rows, times, strict=True)
        if len({(row["systems"][name]["items"], row["systems"][name]["parts"]) for name in us if "feather" in name}) > 1
    ]  # where the plans differ
    saved, added = 100 - 100 * min(ratios), 100 * max(ratios) - 100
    assert f"{saved:.0f}% off one, and adds {added:.0f}% to another (Measured, batches as servers" in DECISIONS


def test_few_requests():
    rows = records("decode_h200_small.json")
    assert len(rows) == 144
    behind, short = {}, 0
    for row in rows:
        times = {name: one["warm_us"] for name, one in row["systems"].items()}
        best = min(time for name, time in times.items() if not name.startswith("feather"))
        behind.setdefault(int(row["name"].split("_")[0].split(",")[1]), []).append(times["feather"] / best)
        short += times["feather"] > best and "_300," in row["name"]
    for requests, ratios in behind.items():
        mean_ratio = geometric_mean(ratios)
        slower = sum(ratio > 1 for ratio in ratios)
        line = f"| {requests} | {mean_ratio:.2f} | {max(ratios):.2f} | {min(ratios):.2f} | {slower} |"
        assert line in TEXT, line
    assert f"**Behind a peer in {sum(ratio > 1 for some in behind.values() for ratio in some)} of 144 rows**" in TEXT
    alone = [row["systems"]["feather-query"]["warm_us"] / row["systems"]["feather"]["warm_us"] for row in rows]
    best_of_both = geometric_mean(min(1, ratio) for ratio in alone)
    text = " ".join(TEXT.split())
    assert (
        f"faster than `time` in {sum(ratio < 1 for ratio in alone)} of these rows, by up to "
        f"{100 - 100 * min(alone):.0f}%" in text
    )
    assert f"in every row would take {100 - 100 * best_of_both:.0f}% off" in text
    (dealt,) = (row for row in rows if (row["name"], row["heads"]) == ("32,48_6000,60", "32/32"))
    assert f"(`32,48_6000,60` at 32/32: 1,072 us before, {dealt['systems']['feather']['warm_us']:.0f} now)" in DECISIONS
    assert f"of 144 rows**, {short} of them with prompts of 300 tokens" in text


def test_what_builds_gained_over_those_before():
    """By heads in the mean, then the best and the worst row."""
    heads = "at 32/8, 64/8, 16/8 and 32/32"
    dealt = (
        f"beside larger tiles {{}}, {{}}, {{}} and {{}}% off ten trees of two to four levels {heads}, {{}}% off one, "
    )
    slots = f"takes {{}}, {{}}, {{}} and {{}}% off sixteen trees {heads}, {{}}% off one, "
    for file, before, count, sentence in (
        ("decode_h200_dealt.json", "feather-popped", 40, dealt + "and add {}% to another"),
        ("decode_h200_builds.json", "feather-before", 64, slots + "and adds {}% to another"),
        ("decode_h200_queries.json", "feather-before", 64, "it " + slots + "and adds {}% to another"),
        ("decode_h200_parts.json", "feather-before", 64, "it " + slots + "and adds {}% to another"),
        ("decode_h200_ahead.json", "feather-before", 64, "it all " + slots + "and adds {}% to another"),
        ("decode_h200_lines.json", "feather-before", 64, "it all " + slots + "and adds {}% to another"),
    ):
        rows = records(file)
        assert len(rows) == count
        ratios = {}
        for row in rows:
            now, then = (row["systems"][name]["warm_us"] for name in ("feather", before))
            ratios.setdefault(row["heads"], []).append(now / then)
        saved = [100 - 100 * geometric_mean(ratios[of]) for of in ("32/8", "64/8", "16/8", "32/32")]
        every = [100 * ratio for some in ratios.values() for ratio in some]
        figures = [f"{value:.0f}" for value in (*saved, 100 - min(every), max(every) - 100)]
        assert sentence.format(*figures) in DECISIONS


def test_an_h100():
    rows = records("decode_h100.json")
    assert len(rows) == 80
    systems = ("feather", "fa3-planned", "flashinfer")
    for heads in HAD_TO_BE:
        cells = " | ".join(f"{mean(rows, system, heads):.2f}" for system in systems)
        assert f"\n| {heads} | {cells} |\n" in TEXT
    behind = behind_a_peer(rows)
    assert set(behind) == {("256_1024", "64/8", 1), ("256_4096", "64/8", 1), ("256_4096", "32/32", 1)}
    fa3, flashinfer = (mean(rows, "feather", "32/8") / mean(rows, peer, "32/8") for peer in systems[1:])
    assert f"on an H100, with an older build, {fa3:.2f} and {flashinfer:.2f}" in README
    most = round(100 * max(behind.values()) - 100)
    assert f"Behind a peer in 3 of 80 rows, by up to {most}%, all without sharing" in " ".join(TEXT.split())


def test_long_contexts():
    rows = records("decode_h200_long.json")
    assert len(rows) == 72
    batches = {}
    for row in rows:
        times = {name: one["warm_us"] for name, one in row["systems"].items() if "warm_us" in one}
        best = min(time for name, time in times.items() if not name.startswith("feather"))
        nodes = row["name"].partition("_")[0].split(",")
        batch = nodes[-1] + ", one prompt" * (len(nodes) > 1)
        batches.setdefault(batch, []).append((times["feather"] / best, times["feather"] / times["feather:fan_in=0"]))
    assert len(batches) == 8
    for batch, ratios in batches.items():
        to_best, to_plain = zip(*ratios, strict=True)
        mean_ratio, mean_plain = geometric_mean(to_best), geometric_mean(to_plain)
        slower = sum(ratio > 1 for ratio in to_best)
        line = f"| {batch} | {mean_ratio:.2f} | {max(to_best):.2f} | {min(to_best):.2f} | {slower} | {mean_plain:.2f} |"
        assert line in TEXT and len(ratios) == 9, line
    behind = sum(ratio > 1 for some in batches.values() for ratio, _ in some)
    assert f"**Behind a peer in {behind} of 72 rows**" in TEXT
    worst = {"alone": 0.0, "one prompt": 0.0}
    for batch, ratios in batches.items():
        kind = batch.partition(", ")[2] or "alone"
        worst[kind] = max(worst[kind], *(ratio for ratio, _ in ratios))
    alone, shared = (round(100 * ratio - 100) for ratio in worst.values())
    text = " ".join(TEXT.split())
    assert f"by up to {alone}% where nothing is shared" in text
    assert f"one request of 2,000 tokens alone up to {alone}% more" in README
    assert f"With a prompt the largest gap, {shared}%, is 16 requests" in text
    short, long = (
        next(row["systems"] for row in rows if (row["name"], row["heads"]) == (name, "32/8"))
        for name in ("1_2000", "1_32000")
    )
    peers = ("fa3-planned", "flashinfer")
    said = [[one["feather"]["warm_us"], min(one[name]["warm_us"] for name in peers)] for one in (short, long)]
    (a, b), (c, d) = ([round(us) for us in pair] for pair in said)
    assert f"one request of 2,000 tokens takes {a} for {b} us, with 32,000 tokens {c} for {d}" in text
    plain = long["feather:fan_in=0"]
    assert f"32,000 tokens had {plain['parts']} of them" in DECISIONS
    own_us, plain_us = long["feather"]["warm_us"], plain["warm_us"]
    assert f"it takes {own_us:.0f} us for {plain_us:.0f}" in DECISIONS and 0.31 < own_us / plain_us < 0.35


def ratios_of_cells(file):
    """(time to the best peer's, tree, heads) of every row, whose cell is in the text."""
    ratios = []
    for row in records(file):
        times = {name: one["warm_us"] for name, one in row["systems"].items()}
        own = times.pop("feather")
        assert f" {own:.0f} ({own / row['floor_us']:.2f}x) / {min(times.values()):.0f} " in TEXT
        ratios.append((own / min(times.values()), row["name"], row["heads"]))
    return ratios


def test_long_among_short():
    ratios = [ratio for ratio, *_ in ratios_of_cells("decode_h200_mixed.json")]
    assert len(ratios) == 33
    assert said_of_all(ratios) in TEXT


def said_of_all(ratios):
    behind, most = sum(ratio > 1 for ratio in ratios), 100 * max(ratios) - 100
    return (
        f"{geometric_mean(ratios):.2f} of the best peer's time in the mean, and behind it in {behind} of {len(ratios)} "
        f"rows, by up to {most:.1f}%"
    )


def test_unlike_lengths():
    ratios = ratios_of_cells("decode_h200_unlike.json")
    assert len(ratios) == 57
    assert said_of_all([ratio for ratio, *_ in ratios]) in TEXT


def test_what_teams_that_ask_gain():
    rows = records("decode_h200_asked.json")
    ratios, unlike = {}, {}
    for row in rows:
        now, then = (row["systems"][name]["warm_us"] for name in ("feather", "feather-before"))
        kind = row["set"] if row["set"] in ("unlike", "mixed") else "others"
        ratios.setdefault(kind, []).append(100 * now / then)
        if kind == "unlike":
            unlike.setdefault(row["heads"], []).append(100 * now / then)
    assert [len(ratios[kind]) for kind in ("unlike", "mixed", "others")] == [76, 44, 284]
    saved = [f"{100 - geometric_mean(unlike[of]):.0f}" for of in ("32/8", "64/8", "16/8", "32/32")]
    most, least = (f"{abs(100 - of(ratios['unlike'])):.0f}" for of in (min, max))
    best, worst = (f"{abs(100 - of(ratios['others'])):.0f}" for of in (min, max))
    assert (
        f"takes {saved[0]}, {saved[1]}, {saved[2]} and {saved[3]}% off 19 batches of unlike lengths at 32/8, 64/8, "
        f"16/8 and 32/32, {most}% off one, and adds {least}% to another; "
        f"{100 - geometric_mean(ratios['mixed']):.0f}% off eleven of long among short; and nothing in the mean off 71 "
        f"others, of which one takes {best}% less and one {worst}% more" in DECISIONS
    )
    assert abs(100 - geometric_mean(ratios["others"])) < 0.5


def test_what_unlike_lengths_took_before():
    rows = records("decode_h200_unlike_before.json")
    unlike, others = {}, []
    for row in rows:
        now, then = (row["systems"][name]["warm_us"] for name in ("feather", "feather-before"))
        some = unlike.setdefault(row["heads"], []) if "~" in row["name"] else others
        some.append(100 * now / then)
    assert {len(ratios) for ratios in unlike.values()} == {19} and len(others) == 156
    saved = [f"{100 - geometric_mean(unlike[of]):.0f}" for of in ("32/8", "64/8", "16/8", "32/32")]
    every = [ratio for ratios in unlike.values() for ratio in ratios]
    assert (
        f"takes {saved[0]}, {saved[1]}, {saved[2]} and {saved[3]}% off 19 batches of unlike lengths at 32/8, 64/8, "
        f"16/8 and 32/32, {100 - min(every):.0f}% off one, and adds {max(every) - 100:.0f}% to another" in DECISIONS
    )
    assert f"0 to 1% less in the mean, {100 - min(others):.0f}% off one, and {max(others) - 100:.0f}% more" in DECISIONS
    assert 0 < 100 - geometric_mean(others) < 0.5


def test_between_the_products_of_a_layer(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS.parent / "benchmarks"))
    from bench_decode_layer import report

    assert f"\n{report({'records': records('layer_h200.json')})}\n" in TEXT
    now, before = (
        {row["name"]: row["systems"] for row in records(name)} for name in ("layer_h200.json", "layer_h200_before.json")
    )
    above = [own["feather"]["layer"] - own["feather"]["warm"] for own in now.values()]
    code = [own["feather"]["layer"] - own["feather"]["code"] for own in now.values()]
    text = " ".join(TEXT.split())
    assert f"`layer` is {min(above):.0f} to {max(above):.0f} us above `warm`" in text
    assert f"a run takes {min(above):.0f} to {max(above):.0f} us longer than back to back" in DECISIONS
    assert f"and up to {max(code):.0f} us of that is gone" in text
    one, eight = ([times[name]["feather"]["layer"] for times in (now, before)] for name in ("1_2000", "1_8000"))
    peers = [now[name]["fa3-planned"]["layer"] for name in ("1_2000", "1_8000")]
    assert f"2,000 tokens {one[0]:.1f} for {peers[0]:.1f} us, 8,000 {eight[0]:.1f} for {peers[1]:.1f}" in text
    assert f"In the build before (`layer_h200_before.json`) it was {one[1]:.1f} and {eight[1]:.1f} us" in text
    assert 0.5 < one[0] - one[1] < 1.05 and 0.5 < eight[0] - eight[1] < 1.05
    assert "That teams ask for units costs up to 1 us of it again" in DECISIONS


def test_the_counters_are_the_measured_ones(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS.parent / "benchmarks"))
    import profile_decode_kernel as profile

    lines = []
    for number in (2, 3, 10, 13, 20):
        text = (DOCS / "measured" / f"counters_h200_tree_{number}.csv").read_text()
        tree, heads = re.search(rf"tree {number} \(([\d,_]+)\), (\d+/\d+) heads, page size 1, feather", text).groups()
        names, values = (re.split(r"\s{2,}", line.strip()) for line in profile.parse(text).splitlines())
        # The kernel's name and the number of its launches touch when the name is long.
        found = dict(zip(reversed(names), reversed(values), strict=False))
        cells = (f"{float(found['us']):.0f}", found["DRAM %"], found["L2 hit %"], found["SM %"])
        lines.append(f"| `{tree}` at {heads} | {' | '.join(cells)} |")
    assert "\n".join(lines) in TEXT, "\n" + "\n".join(lines)
