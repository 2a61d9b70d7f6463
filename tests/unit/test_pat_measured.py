"""docs/pat.md and README.md say what docs/measured holds of real servers."""

import json
import re
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "pat.md").read_text()
README = (ROOT / "README.md").read_text()
TURNS = ("fa3", "flashinfer", "triton")  # the stock backends, each in turn with `pat`


def throughput(name, case):
    """Output tokens/s by server: of the steady window if there is one, else of the whole run."""
    records = json.loads((ROOT / "docs" / "measured" / name).read_text())["records"]
    chosen = [record for record in records if record["case"] == case]
    return {
        record["server"]: (record["steady"] or {}).get("tok_s") if record["steady_case"] else record["overall"]["tok_s"]
        for record in chosen
    }


def table_after(words):
    """The cells of the table behind some words of docs/pat.md, line by line."""
    lines = TEXT[TEXT.index(words) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|")) + 2
    found = takewhile(lambda line: line.startswith("|"), lines[start:])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found]


def turns_case(name):
    if not name.startswith("decode"):
        return name.partition(":")[0]
    batch, groups, tokens = re.fullmatch(r"decode, (\d+) requests, (\d+) groups? x (\d+)K", name).groups()
    return f"decode:{batch},{groups},{tokens}000,128"


def test_pat_in_turn_with_each_stock_backend():
    table = table_after("**In turn with each of SGLang's backends.**")
    assert [turns_case(name) for name, *_ in table] == [
        *("W1", "W2", "W3", "W4"), *(f"decode:500,{groups},1000,128" for groups in (1, 5, 20))
    ]  # fmt: skip
    for name, *cells in table:
        for other, cell in zip(TURNS, cells, strict=True):
            measured = throughput(f"server_h200_turns_{other}.json", turns_case(name))
            ratio = measured["pat"] / measured[other]
            assert cell == f"{measured['pat']:,.0f}, {measured[other]:,.0f}, {ratio:.2f}x"
            assert ratio > 1.02
    w3 = {other: throughput(f"server_h200_turns_{other}.json", "W3") for other in TURNS}
    ahead = [100 * run["pat"] / run[other] - 100 for other, run in w3.items()]
    assert f"by {min(ahead):.0f} to {max(ahead):.0f}%" in TEXT


def test_waits_on_w1():
    p99 = {}
    for other in TURNS:
        content = json.loads((ROOT / "docs" / "measured" / f"server_h200_turns_{other}.json").read_text())
        for record in content["records"]:
            if record["case"] == "W1":
                p99.setdefault(record["server"], []).append(record["overall"]["ttft_s"]["p99"])
    assert (
        f"{min(p99['pat']):.1f} to {max(p99['pat']):.1f} s under `pat`, with flashinfer {p99['flashinfer'][0]:.1f} s, "
        f"fa3 {p99['fa3'][0]:.1f} s, triton {p99['triton'][0]:.1f} s"
    ) in " ".join(TEXT.split())


def test_400_requests_a_second():
    text, waits, rates = " ".join(TEXT.split()), {}, {}
    for other in ("flashinfer", "fa3"):
        content = json.loads((ROOT / "docs" / "measured" / f"server_h200_w5_{other}.json").read_text())
        runs = {record["server"]: record["overall"] for record in content["records"] if record["case"] == "W5"}
        assert all(run["requests"] == run["finished"] == 4000 for run in runs.values())
        rates[other] = [runs[server]["tok_s"] for server in ("pat", other)]
        waits[other] = [runs[server]["ttft_s"]["p99"] for server in ("pat", other)]
    for other, least in (("flashinfer", 2.5), ("fa3", 3)):
        own, stock = rates[other]
        assert f"{other} {stock:,.0f}, **{own / stock:.2f}x**" in text and f"`pat` {own:,.0f}" in text
        assert own / stock > least
    assert (
        f"`pat` {waits['flashinfer'][0]:.0f} and {waits['fa3'][0]:.0f} s, flashinfer {waits['flashinfer'][1]:.0f} s, "
        f"fa3 {waits['fa3'][1]:.0f} s"
    ) in text


def test_two_gpus():
    (cells,) = table_after("**Two GPUs**, `--tp 2`")
    for case, cell in zip(("W1", "W3", "W4", "W5:1200"), cells, strict=True):
        rates = throughput("server_h200_tp2.json", case)
        assert cell == f"{rates['pat']:,.0f}, {rates['fa3']:,.0f}, {rates['pat'] / rates['fa3']:.2f}x"
    records = json.loads((ROOT / "docs" / "measured" / "server_h200_tp2.json").read_text())["records"]
    busy = [
        r["activity"]["busy"] for case in ("W1", "W4") for r in records if (r["server"], r["case"]) == ("pat", case)
    ]
    assert f"busy for {busy[0]:.0f} and {busy[1]:.0f}% of" in TEXT


DECODE_RUNS = ("server_h200_decode.json", "server_h200_decode_flashinfer.json", "server_h200_decode_triton.json")
LATER_RUNS = ("server_h200_alone.json", "server_h200_turns_triton.json")  # what those lack
SERVERS = ("pat", "flashinfer", "fa3", "triton")


def decode_case(name):
    form = r"(\d+) requests(?:, (\d+) groups?)? x (\d+)K(?:, none shared)?"
    batch, groups, tokens = re.fullmatch(form, name).groups()
    return f"decode:{batch},{groups or 0},{tokens}000,{128 if (batch, groups) == ('500', None) else 64}"


def decode_throughput(case):
    """By server; of two runs of one server the later."""
    measured = {}
    for name in DECODE_RUNS:
        measured |= {server: value for server, value in throughput(name, case).items() if value is not None}
    for name in LATER_RUNS:
        measured = {server: value for server, value in throughput(name, case).items() if value is not None} | measured
    return measured


def test_the_table_of_batches_that_only_decode_holds_what_was_measured():
    table = table_after("**Batches that only decode**")
    assert len(table) == 27
    behind = []
    for name, *cells in table:
        measured = decode_throughput(decode_case(name))
        values = [measured[server] for server in SERVERS]
        assert cells[:-1] == [f"{value:,.0f}" for value in values], name
        ratio = measured["pat"] / max(values[1:])
        assert cells[-1] == f"{ratio:.2f}x", name
        if ratio < 1:
            behind.append((name, ratio))
    assert len(behind) == 3 and min(ratio for _, ratio in behind) > 0.94
    assert all(name.startswith("32 requests") for name, _ in behind)
    one = decode_throughput("decode:500,5,5000,64")
    text = " ".join(TEXT.split())
    assert f"is {one['pat'] / one['fa3']:.2f}x as fast as with fa3 and {one['pat'] / one['flashinfer']:.2f}x as" in text
    assert one["pat"] > 3 * one["fa3"] and one["pat"] > 2.5 * one["flashinfer"]


def test_in_turn_with_fa3_again():
    records = json.loads((ROOT / "docs" / "measured" / "server_h200_pair.json").read_text())["records"]
    table = table_after("**In turn with fa3 again**")
    assert len(table) == len({record["case"] for record in records})
    for name, cell in table:
        case = name if name.startswith("W") else decode_case(name)
        if case.startswith("decode:128"):
            case = case.rpartition(",")[0]  # 200 output tokens there
        rates = throughput("server_h200_pair.json", case)
        assert cell == f"{rates['pat']:,.0f}, {rates['fa3']:,.0f}, {rates['pat'] / rates['fa3']:.2f}x", name
        earlier = throughput("server_h200_turns_fa3.json", case) if name.startswith("W") else None
        earlier = earlier or decode_throughput(decode_case(name))
        for server, rate in rates.items():
            if not (server == "pat" and case in ("decode:500,20,5000,64", "decode:500,1,5000,64")):
                assert rate == pytest.approx(earlier[server], rel=0.05), (name, server)
    ratio = throughput("server_h200_pair.json", "decode:500,20,5000,64")["pat"]
    assert f"by {100 * ratio / decode_throughput('decode:500,20,5000,64')['pat'] - 100:.0f}%." in TEXT


def test_readme_says_the_same():
    for case in ("W1", "W3"):
        measured = {}
        for other in TURNS:
            measured |= throughput(f"server_h200_turns_{other}.json", case)
        measured["pat"] = throughput("server_h200_turns_flashinfer.json", case)["pat"]
        said = ", ".join(f"{other} {measured[other]:,.0f}" for other in ("flashinfer", "fa3", "triton"))
        assert f"`pat` {measured['pat']:,.0f} tok/s, {said} |" in README
    one, other = (throughput(f"server_h200_w5_{name}.json", "W5") for name in ("flashinfer", "fa3"))
    assert (
        f"`pat` {one['pat']:,.0f} tok/s, flashinfer {one['flashinfer']:,.0f}; `pat` {other['pat']:,.0f}, "
        f"fa3 {other['fa3']:,.0f} |"
    ) in README
    two = throughput("server_h200_tp2.json", "W5:1200")
    assert f"`pat` {two['pat']:,.0f} tok/s, fa3 {two['fa3']:,.0f} |" in README


def long_case(name):
    pattern = r"(\d+) requests?(?:, (1) group)? x (\d+)K(?:, none shared)?"
    batch, groups, tokens = re.fullmatch(pattern, name).groups()
    return f"decode:{batch},{groups or 0},{tokens}000,256"


def test_few_requests_with_long_contexts():
    records = json.loads((ROOT / "docs" / "measured" / "server_h200_long.json").read_text())["records"]
    table = table_after("**Few requests with long contexts**")
    cases = {record["case"] for record in records if record["server"] == "pat" and record.get("steady")}
    assert sorted(long_case(name) for name, _ in table) == sorted(cases)
    longer = {}
    for name, cell in table:
        rates, steps = {}, {}
        for server in ("pat", "fa3"):
            runs = [one["steady"] for one in records if (one["server"], one["case"]) == (server, long_case(name))]
            twice = name.startswith("1 ") and (server, name.split()[3]) != ("pat", "32K,")  # as pat.md says
            assert len(runs) == 1 + twice
            rates[server] = sum(run["tok_s"] for run in runs) / len(runs)
            steps[server] = int(name.split()[0]) / rates[server] * 1e3  # ms
        assert cell == f"{rates['pat']:,.0f}, {rates['fa3']:,.0f}, {rates['pat'] / rates['fa3']:.2f}x"
        if "none shared" in name:
            kind = "one" if name.startswith("1 ") else "more"
            longer.setdefault(kind, []).append(steps["pat"] - steps["fa3"])
            low, high = {"one": (0.97, 0.98), "more": (1.00, 1.01)}[kind]  # README.md has the former
            assert low <= round(rates["pat"] / rates["fa3"], 2) <= high
    text, most = " ".join(TEXT.split()), max(longer["one"])
    assert f"up to {most:.2f} ms longer, {1e3 * most / 36:.0f} us a layer, with one request" in text
    assert f"level to {max(map(abs, longer['more'])):.2f} ms with 4 or 16" in text
    assert "one request with 8K or 32K tokens and nothing shared does so at 0.97x to 0.98x" in " ".join(README.split())


def test_every_file_is_named():
    for path in (ROOT / "docs" / "measured").glob("server_h200*"):
        assert path.name in TEXT
