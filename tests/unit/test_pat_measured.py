"""docs/pat.md and README.md say what docs/measured holds of real servers."""

import json
import re
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "pat.md").read_text()
README = (ROOT / "README.md").read_text()
CASES = {
    "decode, 128 requests, 5 groups x 5K": "decode:128,5,5000,100",
    "decode, 32 requests, 5 groups x 5K": "decode:32,5,5000,100",
    "decode, 150 requests x 1K, none shared": "decode:150,0,1000,100",
    "decode, 500 requests, 5 groups x 5K": "decode:500,5,5000,120",
    "decode, 500 requests x 1K, none shared": "decode:500,0,1000,120",
    "W1": "W1",
    "W3": "W3",
    "W5": "W5:1200",
}


def throughput(name, case):
    """Output tokens/s by server: of the steady window if there is one, else of the whole run."""
    records = json.loads((ROOT / "docs" / "measured" / name).read_text())["records"]
    chosen = [record for record in records if record["case"] == case]
    return {
        record["server"]: (record["steady"] or {}).get("tok_s") if record["steady_case"] else record["overall"]["tok_s"]
        for record in chosen
    }


def rows(after):
    """The table behind a line of docs/pat.md: the first cell and the others, in words."""
    lines = TEXT[TEXT.index(after) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        yield CASES[first if first in CASES else first.split(":")[0]], cells


def number(cell):
    found = re.match(r"([\d,]+)", cell)
    return int(found[1].replace(",", "")) if found else None


@pytest.mark.parametrize(
    ("after", "name", "servers"),
    [
        ("200,000 KV tokens, as on a card", "server_h200.json", ("pat", "flashinfer", "fa3")),
        ("620,000 KV tokens, in a second run", "server_h200_large_pool.json", ("pat", "fa3")),
    ],
)
def test_the_tables_hold_what_was_measured(after, name, servers):
    table = list(rows(after))
    assert len(table) == {3: 6, 2: 3}[len(servers)]
    for case, cells in table:
        measured = throughput(name, case)
        assert [number(cell) for cell in cells[:-1]] == [
            None if measured[server] is None else round(measured[server]) for server in servers
        ]
        stock = [measured[server] for server in servers[1:] if measured[server] is not None]
        assert cells[-1] == (f"{measured['pat'] / max(stock):.2f}x" if stock else "")


@pytest.mark.parametrize("name", ["server_h200.json", "server_h200_large_pool.json"])
def test_pat_is_ahead_of_every_stock_backend_that_was_measured(name):
    for case in CASES.values():
        measured = {server: value for server, value in throughput(name, case).items() if value is not None}
        assert all(measured["pat"] > value for server, value in measured.items() if server != "pat")


DECODE_RUNS = ("server_h200_decode.json", "server_h200_decode_flashinfer.json", "server_h200_decode_triton.json")
SERVERS = ("pat", "flashinfer", "fa3", "triton")


def decode_case(name):
    form = r"(\d+) requests(?:, (\d+) groups?)? x (\d+)K(?:, none shared)?"
    batch, groups, tokens = re.fullmatch(form, name).groups()
    return f"decode:{batch},{groups or 0},{tokens}000,64"


def decode_throughput(case):
    """By server; of two runs of one server the later."""
    measured = {}
    for name in DECODE_RUNS:
        measured |= {server: value for server, value in throughput(name, case).items() if value is not None}
    return measured


def test_the_table_of_batches_that_only_decode_holds_what_was_measured():
    lines = TEXT[TEXT.index("**Batches that only decode**") :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|")) + 2
    table = list(takewhile(lambda line: line.startswith("|"), lines[start:]))
    assert len(table) == 29
    behind = []
    for line in table:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        measured = decode_throughput(decode_case(name))
        values = [measured.get(server) for server in SERVERS]
        assert cells[:-1] == [f"{value:,.0f}" if value else "" for value in values], name
        stock = [value for value in values[1:] if value]
        assert cells[-1] == (f"{measured['pat'] / max(stock):.2f}x" if stock and values[0] else ""), name
        if stock and values[0] and measured["pat"] < max(stock):
            behind.append((name, measured["pat"] / max(stock)))
    assert len(behind) == 3 and min(ratio for _, ratio in behind) > 0.94
    assert all(name.startswith("32 requests") for name, _ in behind)
    one = decode_throughput("decode:500,5,5000,64")
    text = " ".join(TEXT.split())
    assert f"is {one['pat'] / one['fa3']:.2f}x as fast as with fa3 and {one['pat'] / one['flashinfer']:.2f}x as" in text
    assert one["pat"] > 3 * one["fa3"] and one["pat"] > 2.5 * one["flashinfer"]


def test_two_servers_in_turn():
    records = json.loads((ROOT / "docs" / "measured" / "server_h200_pair.json").read_text())["records"]
    lines = TEXT[TEXT.index("**In turn, on one GPU.**") :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|")) + 2
    table = list(takewhile(lambda line: line.startswith("|"), lines[start:]))
    told = {}
    for line in table:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        batch = decode_case(name).rpartition(",")[0]
        rates = {
            record["server"]: record["steady"]["tok_s"]
            for record in records
            if record["case"].startswith(f"{batch},") and record["round"] == 1 and record["steady"]
        }
        told[batch] = rates
        ratio = f"{rates['pat'] / rates['fa3']:.2f}x" if len(rates) == 2 else ""
        assert cells == [*(f"{rates[server]:,.0f}" if server in rates else "" for server in ("pat", "fa3")), ratio]
    measured = {record["case"].rpartition(",")[0] for record in records if record["steady"]}
    assert set(told) == measured
    for batch, rates in told.items():
        alone = decode_throughput(f"{batch},64")
        for server, rate in rates.items():
            if server in alone and not (server == "pat" and batch in ("decode:500,20,5000", "decode:500,1,5000")):
                assert rate == pytest.approx(alone[server], rel=0.07)


def test_readme_says_the_same():
    for case, servers in (("W1", 3), ("W3", 3), ("W5:1200", 2)):
        pat, *others = list(throughput("server_h200.json", case).items())[:servers]
        said = ", ".join(f"{server} {round(value):,}" for server, value in others)
        assert f"`pat` {round(pat[1]):,} tok/s, {said} |" in README


def test_one_group_in_a_run_of_its_own():
    measured = throughput("server_h200_one_group.json", "W4")
    ratio = measured["pat"] / measured["fa3"]
    text = " ".join(TEXT.split())
    assert f"`pat` {measured['pat']:,.0f} tok/s, fa3 {measured['fa3']:,.0f}, {ratio:.2f}x" in text
    (decode,) = throughput("server_h200_one_group.json", "decode:128,5,5000,100").values()
    assert f"5 groups x 5K at {decode:,.0f} tok/s" in text
