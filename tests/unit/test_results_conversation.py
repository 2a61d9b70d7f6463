"""docs/results.md says of the conversation trace what docs/measured holds."""

import json
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs" / "measured"
TEXT = (ROOT / "docs" / "results.md").read_text()
SENTENCES = " ".join(TEXT.split())
FILES = {name: json.loads((MEASURED / f"conversation_h200_{name}.json").read_text()) for name in ("fa3", "pat")}
WHOLE = {
    (backend, record["name"]): record
    for backend, run in FILES.items()
    for record in run["records"]
    if not record["counted"]["unfinished"]
}
CUT = {
    (backend, record["name"]): record["counted"]["unfinished"]
    for backend, run in FILES.items()
    for record in run["records"]
    if record["counted"]["unfinished"]
}
BANDIT, FCFS, LPM = ("fa3", "feather-bandit"), ("fa3", "fcfs"), ("fa3", "lpm")
PACKED, PACKED_FCFS = ("pat", "feather-bandit"), ("pat", "fcfs")


def summary(key, name):
    return WHOLE[key]["summary"][name]


def over(key, other, name):
    return summary(key, name) / summary(other, name)


def percent(key, other, name="output_tok_s"):
    return f"{100 * over(key, other, name) - 100:+.1f}%"


def rows():
    lines = []
    for key in (FCFS, LPM, BANDIT, PACKED_FCFS, PACKED):
        one = WHOLE[key]["summary"]
        cells = [
            f"{key[1]}, `{key[0]}`", f"{one['output_tok_s']:.0f}",
            *(f"{one[f'ttft_{name}']:.1f} s" for name in ("mean", "p50", "p99")),
            *(f"{one[f'e2e_{name}']:.1f} s" for name in ("mean", "p99")), f"{one['tbt_p50_ms']:.1f} ms",
            f"{100 * one['cache_hit']:.1f}%", f"{one['max_wait']:.1f} s", f"{100 * one['gpu_busy']:.1f}%",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def said(*parts):
    for part in parts:
        assert part in SENTENCES, part


def test_the_table_holds_what_was_measured():
    assert "\n".join(rows()) in TEXT, "\n" + "\n".join(rows())
    assert set(WHOLE) == {BANDIT, FCFS, LPM, PACKED, PACKED_FCFS}
    assert CUT == {("fa3", "dfs-weight"): 18, ("pat", "lpm"): 32}
    said("dfs-weight on `fa3` was cut with 18 requests open, lpm on `pat` with 32")


def test_the_servers_were_what_the_page_says():
    for backend, run in FILES.items():
        command = run["records"][0]["command"]
        assert "--disable-prefill-cuda-graph" not in command and "--feather-pace 0.0 " in command
        assert "--feather-max-wait 120.0 " in command and "--max-total-tokens 200000 " in command
        assert run["command"].startswith("feather ab conversation_trace.jsonl --engine server ")
        assert f"--attention {backend} " in run["command"] and run["order"][:2] == ["feather-bandit", "fcfs"]
        assert run["workload"]["name"] == "conversation_trace" and run["workload"]["requests"] == 100
    assert FILES["fa3"]["workload"] == FILES["pat"]["workload"]
    assert all(not one["counted"]["failed"] and one["summary"]["requests"] == 100 for one in WHOLE.values())
    for backend in FILES:
        assert f"docs/measured/conversation_h200_{backend}.json" in TEXT


def test_what_is_said_of_the_workload_follows():
    trace = FILES["fa3"]["workload"]["added_from_the_trace"]
    prompts = trace["prompt_tokens"]
    assert len(prompts) == 100
    assert all(one["counted"]["output_tokens"] == trace["output_tokens"] for one in WHOLE.values())
    batch = [summary(key, "mean_batch") for key in WHOLE]
    held = [summary(key, "kv_mean") for key in WHOLE]
    each = [200000 * summary(key, "kv_mean") / summary(key, "mean_batch") for key in WHOLE]
    assert {round(rows) for rows in batch} == {10} and {summary(key, "kv_peak") for key in WHOLE} == {1.0}
    hits = {f"{100 * summary(key, 'cache_hit'):.1f}%" for key in WHOLE}
    assert hits == {"3.3%"}
    said(
        f"{mean(prompts):,.0f} tokens in the mean, {median(prompts):,.0f} at the median, {max(prompts):,} at most; "
        f"{trace['output_tokens']:,} output tokens; all arrive within {trace['seconds']:.0f} s",
        "share almost nothing: 3.3% of the prompts' tokens are found in the cache",
        f"10 requests run at a time in the mean and hold {100 * min(held):.0f} to {100 * max(held):.0f}% of the pool, "
        f"{min(each) / 1e3:.0f},000 to {max(each) / 1e3:.0f},000 tokens each",
        f"{sum(prompts) / 1e6:.2f} million prompt tokens",
    )


def test_what_is_said_of_the_policies_follows():
    p99, longest = ([summary(key, name) for key in (BANDIT, FCFS)] for name in ("ttft_p99", "max_wait"))
    assert over(BANDIT, FCFS, "ttft_mean") < 0.5 and p99[0] > p99[1] and longest[0] > longest[1]
    said(
        f"tok/s is level on `fa3`: feather-bandit {percent(BANDIT, FCFS)} to fcfs, lpm {percent(LPM, FCFS)}",
        f"On `pat` feather-bandit has {percent(PACKED, PACKED_FCFS)}",
        f"is {over(BANDIT, FCFS, 'ttft_mean'):.2f}x fcfs's on `fa3` and {over(PACKED, PACKED_FCFS, 'ttft_mean'):.2f}x "
        f"on `pat`, its median {summary(BANDIT, 'ttft_p50'):.1f} s for {summary(FCFS, 'ttft_p50'):.1f} s; the mean "
        f"E2E is {over(BANDIT, FCFS, 'e2e_mean'):.2f}x and {over(PACKED, PACKED_FCFS, 'e2e_mean'):.2f}x",
        f"p99 of the time to the first token is {p99[0]:.0f} s for {p99[1]:.0f} s on `fa3`, the longest wait "
        f"{longest[0]:.0f} s for {longest[1]:.0f} s",
    )


def test_who_pays_follows():
    prompts = FILES["fa3"]["workload"]["added_from_the_trace"]["prompt_tokens"]
    by_length = sorted(range(100), key=prompts.__getitem__)
    fifths = {
        key: [mean(WHOLE[key]["latencies"][index] for index in by_length[first : first + 20])
              for first in range(0, 100, 20)]
        for key in (BANDIT, FCFS)
    }  # fmt: skip
    ours, theirs = fifths[BANDIT], fifths[FCFS]
    said(
        f"the fifth with the longest prompts takes {ours[-1]:.0f} s for fcfs's {theirs[-1]:.0f} s from arrival to end "
        f"in the mean, the other four {min(ours[:-1]):.0f} to {max(ours[:-1]):.0f} s for {min(theirs[:-1]):.0f} to "
        f"{max(theirs[:-1]):.0f} s"
    )


def test_what_is_said_of_pat_follows():
    fcfs = [summary(key, "output_tok_s") for key in (PACKED_FCFS, FCFS)]
    bandit = [summary(key, "output_tok_s") for key in (PACKED, BANDIT)]
    tbt = [summary(key, "tbt_p50_ms") for key in (PACKED_FCFS, FCFS, PACKED, BANDIT)]
    assert fcfs[0] < fcfs[1] and bandit[0] < bandit[1]
    said(
        f"fcfs has {fcfs[0]:.0f} tok/s with `pat` and {fcfs[1]:.0f} with `fa3`, feather-bandit {bandit[0]:.0f} and "
        f"{bandit[1]:.0f}; the median time per token is {tbt[0]:.1f} ms for {tbt[1]:.1f} ms and {tbt[2]:.1f} ms for "
        f"{tbt[3]:.1f} ms"
    )


def test_sixty_requests_on_one_gpu_follow():
    runs = {
        name: json.loads((MEASURED / f"conversation_h200_sixty_{name}.json").read_text()) for name in ("pat", "fa3")
    }
    for backend, run in runs.items():
        (record,) = run["records"]
        assert record["name"] == "fcfs" and f"--attention {backend} " in run["command"]
        assert "--disable-prefill-cuda-graph" in record["command"] and run["workload"]["requests"] == 60
        assert not record["counted"]["failed"] and not record["counted"]["unfinished"]
    ours, theirs = (runs[name]["records"][0]["summary"] for name in ("pat", "fa3"))
    said(
        f"{ours['output_tok_s']:.0f} tok/s with `pat`, {theirs['output_tok_s']:.0f} with `fa3`, "
        f"{ours['makespan']:.1f} s for {theirs['makespan']:.1f} s until the last token, but "
        f"{ours['tbt_p50_ms']:.1f} ms for {theirs['tbt_p50_ms']:.1f} ms a token at the median and "
        f"{ours['e2e_mean']:.1f} s for {theirs['e2e_mean']:.1f} s from arrival to end in the mean"
    )
