"""docs/results.md and README.md say what docs/measured holds of policies on real servers."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "results.md").read_text()
README = (ROOT / "README.md").read_text()
RECORDS = json.loads((ROOT / "docs" / "measured" / "policies_h200.json").read_text())["records"]
MEASURED = {(record["server"], record["case"]): record["overall"] for record in RECORDS}


def tok_s(server, case):
    return MEASURED[server, case]["tok_s"]


def figures(server, case):
    """A row's cells of one workload."""
    backend = server.partition("+")[0]
    one = MEASURED[server, case]
    ratio = f"{one['tok_s'] / tok_s(backend, case):.2f}x" if server != backend else ""
    waits = f"{one['ttft_s']['mean']:.1f} s, {one['ttft_s']['p99']:.1f} s"
    hit = [f"{one['cache_hit']:.2f}"] if case == "W2" else []
    return [f"{one['tok_s']:,.0f}", ratio, *hit, waits]


def test_the_table_holds_what_was_measured():
    servers = dict.fromkeys(server for server, _ in MEASURED)
    rows = [line for line in TEXT.splitlines() if line.startswith("| `")]
    assert len(rows) == len(servers) == 7
    for row, server in zip(rows, servers, strict=True):
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        backend, _, policy = server.partition("+")
        assert name == f"`{backend}`, {policy or 'fcfs'}"
        assert cells == figures(server, "W2") + figures(server, "W7")


def test_what_is_said_of_it_follows():
    text = " ".join(TEXT.split())
    assert f"feather-bandit is {tok_s('fa3+feather-bandit', 'W2') / tok_s('fa3+dfs-weight', 'W2'):.2f}x ahead" in text
    p99 = [MEASURED[server, "W2"]["ttft_s"]["p99"] for server in ("fa3+feather-bandit", "fa3+dfs-weight")]
    assert f"of {p99[0] / p99[1]:.2f} of its own" in text
    assert f"with `pat` it is {tok_s('pat+feather-bandit', 'W2') / tok_s('pat+dfs-weight', 'W2'):.2f}x" in text
    assert tok_s("fa3+feather-order", "W7") == max(tok_s(s, c) for s, c in MEASURED if c == "W7" and s[:3] == "fa3")
    assert f"the rest is the kernel, {tok_s('pat', 'W7') / tok_s('fa3', 'W7'):.1f}x" in text


def test_readme_says_the_same():
    for case, policy in (("W7", "feather-order"), ("W2", "feather-bandit")):
        fcfs, dfs, own = (round(tok_s(server, case)) for server in ("fa3", "fa3+dfs-weight", f"fa3+{policy}"))
        packed = round(tok_s("pat" if case == "W7" else "pat+feather-bandit", case))
        assert f"fcfs {fcfs:,} tok/s, dfs-weight {dfs:,}, `{policy}` {own:,}; with `pat` {packed:,}" in README
