"""Tables of cases on servers: pure functions of a run's JSON file, so that a report needs neither server nor GPU."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from server_records import Record, counted, tok_s

from feather_sglang.compare.server.result import CLIENT_BOUND
from feather_sglang.report.tables import grid

MARKS = {
    "!": f"the client used {CLIENT_BOUND:.0%} of a processor or more: the server may be faster",
    "~": "cut by a time limit: throughput up to the cut",
    "-": "not measured",
    "?": "requests failed, or the batch was never complete",
}


def merged(contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one: a server's further runs count as further rounds.

    Raises
    ------
    ValueError
        Runs of different models, GPUs or releases: their figures must not stand side by side.
    """
    first = contents[0]
    for other in contents[1:]:
        for what, ours, theirs in (
            ("model", first["model"], other["model"]),
            ("GPU", first["machine"]["gpu"], other["machine"]["gpu"]),
            ("SGLang", first["machine"]["versions"].get("sglang"), other["machine"]["versions"].get("sglang")),
        ):
            if ours != theirs:
                raise ValueError(f"the files differ in {what}: {str(ours)[:60]} and {str(theirs)[:60]}")
    whole = {**first, "servers": {}, "records": [], "order": [], "missing": [], "seconds": 0.0}
    for content in contents:
        rounds = {name: max((r["round"] for r in whole["records"] if r["server"] == name), default=0)
                  for name in content["servers"]}  # fmt: skip
        for name, server in content["servers"].items():
            known = whole["servers"].setdefault(name, {**server, "start_seconds": []})
            known["start_seconds"] = known["start_seconds"] + server["start_seconds"]
            known["error"] = known["error"] or server["error"]
        whole["records"] += [{**r, "round": r["round"] + rounds[r["server"]]} for r in content["records"]]
        whole["order"] += content["order"]
        whole["seconds"] += content.get("seconds", 0.0)
        whole["missing"] += content["missing"]
    tried = {f"{record['server']} {record['case']}" for record in whole["records"]}
    whole["missing"] = [text for text in whole["missing"] if text.split(" (round")[0] not in tried]
    return whole


def tpot_ms(record: Record) -> float | None:
    """Mean milliseconds a token and request, of the same time."""
    spread = counted(record).get("tpot_ms")
    return spread["mean"] if spread else None


def marks(record: Record) -> str:
    """The signs of `MARKS` that a measurement deserves."""
    overall = record.get("overall") or {}
    signs = "!" if record.get("client_cpu", 0) >= CLIENT_BOUND else ""
    signs += "~" if overall.get("unfinished") else ""
    return signs + ("?" if overall.get("failed") or (record.get("steady_case") and not record.get("steady")) else "")


def progress(record: Record) -> str:
    """One line about one measurement."""
    head = f"{record['server']} {record['case']}" + (f" (round {record['round']})" if record["round"] > 1 else "")
    if "error" in record:
        return f"{head}: {record['error']}"
    overall, window, server = record["overall"], record.get("steady"), record["log"]
    parts = []
    if window:
        parts.append(f"all run for {window['seconds']:.1f} s")
    elif record["steady_case"]:
        parts.append("never all running")
    parts.append(f"{_number(tok_s(record))} tok/s")
    parts.append(f"TPOT {_spread(counted(record).get('tpot_ms'), 'ms')}")
    parts.append(f"TTFT {_spread(overall['ttft_s'], 's')}")
    parts.append(f"{overall['finished']} of {overall['requests']} in {overall['seconds']:.1f} s")
    if overall["failed"]:
        parts.append(f"{overall['failed']} FAILED: {overall['errors'][0]}")
    parts.append(f"hit {overall['cache_hit'] or 0:.3f}")
    parts.append(f"peak {overall['peak_running']}")
    if server["full_batch_tok_s"]:
        parts.append(f"log {_number(server['full_batch_tok_s'])} tok/s")
    if server["retractions"]:
        parts.append(f"{server['retractions']} retractions")
    parts.append(f"client {record['client_cpu']:.0%}")
    return f"{head}: " + ", ".join(parts) + (f" [{marks(record)}]" if marks(record) else "")


def comparison(records: Sequence[Record], stock: Sequence[str]) -> str:
    """A line a case: for each server tok/s, TPOT and the ratio of tok/s to the best stock server; means of all rounds.

    Parameters
    ----------
    stock : names of the servers that are compared with.
    """
    servers, cases = _in_order(records, "server"), _in_order(records, "case")
    rows = [["case", *(head for name in servers for head in (f"{name} tok/s", "TPOT ms", "x"))]]
    seen = ""
    for case in cases:
        of_case = {name: _measured(records, name, case) for name in servers}
        rates = {name: _mean(map(tok_s, found)) for name, found in of_case.items()}
        best = max((rate for name, rate in rates.items() if name in stock and rate), default=None)
        row = [case]
        for name, found in of_case.items():
            signs = "".join(dict.fromkeys(sign for record in found for sign in marks(record)))
            rate = rates[name]
            tpot = _mean(map(tpot_ms, found))
            ratio = f"{rate / best:.2f}" if rate and best else "-"
            row += [_number(rate) + signs, "-" if tpot is None else f"{tpot:.2f}", ratio]
            seen += signs + ("-" if rate is None else "")
        rows.append(row)
    legend = [f"{sign} {meaning}" for sign, meaning in MARKS.items() if sign in seen]
    return "\n".join([grid(rows), *legend])


def details(records: Sequence[Record]) -> str:
    """A line a case and server: latencies, cache hits, and how far the rounds lie apart."""
    rows = [[
        "case", "server", "TTFT s", "p99", "e2e s", "p99", "TPOT p50", "p99", "hit", "done", "failed", "peak",
        "retracted", "client", "admission ms/round", "of run", "stops", "GPU busy", "SMs", "DRAM", "GHz", "W",
        "rounds +-",
    ]]  # fmt: skip
    for case in _in_order(records, "case"):
        for server in _in_order(records, "server"):
            found = _measured(records, server, case)
            if not found:
                continue
            row = [case, server]
            for name, key in (("ttft_s", "mean"), ("ttft_s", "p99"), ("e2e_s", "mean"), ("e2e_s", "p99")):
                row.append(_figure(_mean((r["overall"][name] or {}).get(key) for r in found), 3))
            for key in ("p50", "p99"):
                row.append(_figure(_mean((counted(r).get("tpot_ms") or {}).get(key) for r in found), 2))
            row.append(_figure(_mean(r["overall"]["cache_hit"] for r in found), 3))
            for key in ("finished", "failed", "peak_running"):
                row.append(_figure(_mean(r["overall"][key] for r in found), 0))
            row.append(_figure(_mean(r["log"]["retractions"] for r in found), 0))
            row.append(f"{max(r['client_cpu'] for r in found):.0%}")
            row += _admission([(a, r["overall"]["seconds"]) for r in found if (a := r.get("admission"))])
            row += _activity([a for r in found if (a := r.get("activity"))])
            row += _clocks([c for r in found if (c := r.get("clocks"))])
            row.append(_apart([rate for r in found if (rate := tok_s(r))]))
            rows.append(row)
    return grid(rows)


def compared_tokens(probes: dict[str, list[list[int]]]) -> str:
    """Tokens of each probe before it first differs from the first server's."""
    if not probes:
        return "no server answered the probes"
    first, *others = probes
    lines = [f"probes: tokens that agree with {first}'s before the first that differs"]
    for name in others:
        pairs = list(zip(probes[first], probes[name], strict=False))
        counts = [agreeing(ours, theirs) for ours, theirs in pairs]
        of = sum(len(ours) for ours, _ in pairs)
        lines.append(f"  {name}: {' '.join(map(str, counts))} (together {sum(counts)} of {of})")
    return "\n".join(lines)


def agreeing(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def report(content: dict[str, Any]) -> str:
    """Everything that a run printed at its end."""
    records, servers = content["records"], content["servers"]
    parts = []
    if any("error" not in record for record in records):
        stock = [name for name, server in servers.items() if server["stock"]]
        parts += [comparison(records, stock), details(records)]
    if content.get("compare_tokens"):
        parts.append(compared_tokens({name: server["probes"] for name, server in servers.items() if server["probes"]}))
    problems = [f"{name}: {server['error']}" for name, server in servers.items() if server["error"]]
    problems += [f"{record['server']} {record['case']}: {record['error']}" for record in records if "error" in record]
    if problems:
        parts.append("problems:\n  " + "\n  ".join(problems))
    if content["missing"]:
        parts.append(f"missing: {len(content['missing'])} measurements\n  " + "\n  ".join(content["missing"]))
    starts = ", ".join(
        f"{name} {' '.join(f'{seconds:.0f} s' for seconds in server['start_seconds'])}"
        for name, server in servers.items()
        if server["start_seconds"]
    )
    machine = content["machine"]
    parts.append(
        f"{machine['gpu'] or 'no GPU'}, SGLang {machine['versions'].get('sglang')}; order: "
        f"{' '.join(content['order']) or 'nothing started'}; up after: {starts or '-'}; "
        f"{content.get('seconds', 0):.0f} s in all"
    )
    return "\n\n".join(parts)


def rates(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Output tokens a second by server and case, the mean of all rounds that were not cut; 0 where there is none."""
    whole = [record for record in records if not (record.get("overall") or {}).get("unfinished")]
    servers, cases = _in_order(whole, "server"), _in_order(whole, "case")
    return {
        server: {case: _mean(map(tok_s, _measured(whole, server, case))) or 0.0 for case in cases} for server in servers
    }


def _measured(records: Sequence[Record], server: str, case: str) -> list[Record]:
    return [r for r in records if r["server"] == server and r["case"] == case and "error" not in r]


def _in_order(records: Sequence[Record], key: str) -> list[str]:
    return list(dict.fromkeys(record[key] for record in records))


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _number(value: float | None) -> str:
    """Whole numbers where they say enough, as a slow machine's do not."""
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _spread(spread: dict[str, float] | None, unit: str) -> str:
    return f"{spread['mean']:.4g} {unit} (p99 {spread['p99']:.4g})" if spread else "-"


def _admission(counts: Sequence[tuple[dict[str, Any], float]]) -> list[str]:
    """Processor time of an admission round, and of admission in a run's seconds; decisions to stop in all rounds."""
    rounds = sum(count["rounds"] for count, _ in counts)
    if not rounds:
        return ["-", "-", "-"]
    spent = sum(count["seconds"] for count, _ in counts)
    share = spent / sum(seconds for _, seconds in counts)
    return [f"{1e3 * spent / rounds:.3f}", f"{share:.1%}", f"{sum(count['stops'] for count, _ in counts):,}"]


def _activity(found: Sequence[dict[str, Any]]) -> list[str]:
    """Percent of the time that anything ran on the GPU, of its multiprocessors, and of its DRAM's bandwidth."""
    means = [_mean(activity.get(name) for activity in found) for name in ("busy", "sm", "dram")]
    return ["-" if mean is None else f"{mean:.1f}%" for mean in means]


def _clocks(found: Sequence[dict[str, Any]]) -> list[str]:
    """What the multiprocessors' clock was in the mean, in GHz, and what the GPU drew, in watts."""
    mhz, watt = (_mean(clocks[name]["mean"] for clocks in found) for name in ("sm_mhz", "watt"))
    return ["-" if mhz is None else f"{mhz / 1e3:.2f}", _figure(watt, 0)]


def _apart(values: Sequence[float]) -> str:
    """Half the distance of the extremes, of their mean."""
    return f"{(max(values) - min(values)) / 2 / mean(values):.1%}" if len(values) > 1 else ""
