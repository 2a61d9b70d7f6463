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
    first = throughput("server_h200.json", "W5:1200")
    later = throughput("policies_h200_fits_pat.json", "W5:1200") | throughput("policies_h200_fits_fa3.json", "W5:1200")
    assert (
        f"`pat` {first['pat']:,.0f} tok/s, flashinfer {first['flashinfer']:,.0f}, "
        f"{first['pat'] / first['flashinfer']:.2f}x, one after the other in an earlier run; `pat` {later['pat']:,.0f} "
        f"and fa3 {later['fa3']:,.0f}, {later['pat'] / later['fa3']:.2f}x"
    ) in " ".join(TEXT.split())


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


def test_two_servers_in_turn():
    records = json.loads((ROOT / "docs" / "measured" / "server_h200_pair.json").read_text())["records"]
    told = {}
    for name, *cells in table_after("**Batches in turn with fa3**"):
        batch = decode_case(name).rpartition(",")[0]
        rates = {
            record["server"]: record["steady"]["tok_s"]
            for record in records
            if record["case"].startswith(f"{batch},") and record["round"] == 1 and record["steady"]
        }
        told[batch] = rates
        assert cells == [f"{rates['pat']:,.0f}", f"{rates['fa3']:,.0f}", f"{rates['pat'] / rates['fa3']:.2f}x"]
    # 500 requests with prefixes of 1K did not run as a whole on both; a later run has them.
    measured = {record["case"].rpartition(",")[0] for record in records if record["steady"]}
    measured = {batch for batch in measured if not (batch.startswith("decode:500") and batch.endswith(",1000"))}
    assert set(told) == measured
    for batch, rates in told.items():
        alone = decode_throughput(f"{batch},64")
        for server, rate in rates.items():
            if server in alone and not (server == "pat" and batch in ("decode:500,20,5000", "decode:500,1,5000")):
                assert rate == pytest.approx(alone[server], rel=0.07)


def test_readme_says_the_same():
    for case in ("W1", "W3"):
        measured = {}
        for other in TURNS:
            measured |= throughput(f"server_h200_turns_{other}.json", case)
        measured["pat"] = throughput("server_h200_turns_flashinfer.json", case)["pat"]
        said = ", ".join(f"{other} {measured[other]:,.0f}" for other in ("flashinfer", "fa3", "triton"))
        assert f"`pat` {measured['pat']:,.0f} tok/s, {said} |" in README
    measured = throughput("server_h200.json", "W5:1200")
    assert f"`pat` {measured['pat']:,.0f} tok/s, flashinfer {measured['flashinfer']:,.0f} |" in README


def test_every_file_is_named():
    for path in (ROOT / "docs" / "measured").glob("server_h200*"):
        assert path.name in TEXT
