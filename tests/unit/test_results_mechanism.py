"""What docs/results.md says of mixed batches and of row order, by hardware counters, is what docs/measured holds."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs" / "measured"
TEXT = (ROOT / "docs" / "results.md").read_text()
SENTENCES = " ".join(TEXT.split())
MIXING = {
    (record["requests"], record["groups"], record["order"]): record
    for record in json.loads((MEASURED / "mixing_h200.json").read_text())["records"]
}


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


def test_the_table_holds_what_was_measured():
    assert "\n".join(mixing_rows(500)) in TEXT, "\n" + "\n".join(mixing_rows(500))


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
