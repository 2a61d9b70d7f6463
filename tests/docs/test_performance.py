"""The performance pages agree with docs/measured, its gains hold, and the generator hides no loss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "generators"))

import model_names
import perf_kernel
import perf_models
import perf_prefill
import perf_promise
import perf_replay
import perf_servers
import perf_speculation
import performance
from perf_results import ResultError, evicts, geometric_mean, trees

from feather_sglang.adapter.attention import matrix
from feather_sglang.adapter.hooks import SUPPORTED

ROOT = Path(__file__).resolve().parents[2]
DOCS, MEASURED = ROOT / "docs", ROOT / "docs" / "measured"


# What is committed.


def test_what_is_committed_is_what_the_generator_writes() -> None:
    program = DOCS / "generators" / "performance.py"
    checked = subprocess.run([sys.executable, str(program), "--check"], capture_output=True, text=True, cwd=ROOT)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_plot_is_there_and_the_front_page_has_one_a_claim() -> None:
    shown = {}
    for path in performance.pages(MEASURED):
        lines = (ROOT / path).read_text().splitlines()
        shown[path] = [line.split("](")[1].rstrip(")") for line in lines if line.startswith("![")]
        assert all((ROOT / path.parent / plot).is_file() for plot in shown[path]), path
    assert len(shown[Path("docs/performance.md")]) == len(performance.perf_front.CLAIMS) == 4
    drawn = {Path(plot).name for plots in shown.values() for plot in plots}
    assert drawn == {Path(plot).name for plot in performance.perf_plots.PLOTS}


def test_readmes_numbers_are_few_and_name_their_hardware() -> None:
    block = (ROOT / "README.md").read_text().split(performance.START)[1].split(performance.END)[0]
    numbers = [line for line in block.splitlines() if line.startswith("- ")]
    assert 1 <= len(numbers) <= 5 and all("H200" in line for line in numbers)


def test_older_links_to_the_front_page_still_lead_somewhere() -> None:
    page = (DOCS / "performance.md").read_text()
    assert all(f'id="{name}"' in page for name in ("between-tokens-on-servers", "prefill", "policies-on-servers"))


def test_each_model_that_was_run_is_there_by_name_and_has_the_heads_that_ran() -> None:
    named = {one.run: one for models in model_names.FAMILIES.values() for one in models if one.run}
    whole = {name for name, shape in model_names.SHAPES.items() if not shape.cut.startswith("what a rank")}
    assert named.keys() == whole
    for name, one in named.items():
        assert (one.group, one.head_dim) == model_names.heads(model_names.SHAPES[name]), name
        assert one.kind == model_names.SHAPES[name].kind, name


def test_the_checks_decide_how_a_named_model_is_served() -> None:
    by_name = {one.name: model_names.served(one) for models in model_names.FAMILIES.values() for one in models}
    assert by_name["DeepSeek V2-Lite"] == by_name["Kimi K2"] == "all layers"
    assert by_name["Qwen3 8B"] != model_names.REFUSED and by_name["gpt-oss-120b"].startswith("18 of 36")
    odd = model_names.Named("odd", "dense", 32, 8, 80, 4)
    assert model_names.served(odd) == model_names.REFUSED


def test_a_named_model_is_likened_to_the_nearest_that_was_run() -> None:
    assert model_names.nearest(model_names.Named("Gemma 2 9B", "windows", 16, 8, 256, 21, 21)) == "gemma-2-2b"
    assert model_names.nearest(model_names.Named("gpt-oss-120b", "sinks", 64, 8, 64, 18, 18)) == "gpt-oss-20b"


def test_a_gpu_is_served_only_where_something_ran_on_it() -> None:
    served = {row[0]: row[2] for row in model_names.gpu_rows(MEASURED)}
    assert served["H200"] == served["H100"] == "served" and "not run" in served["GH200"]
    assert "--feather-unproven-gpu" in served["A100, A30"]
    assert served["T4"] == model_names.REFUSED


def test_plots_are_light_cards_that_need_no_font_and_no_date() -> None:
    for name in performance.perf_plots.PLOTS:
        drawn = (DOCS / name).read_text()
        assert "<text" not in drawn and "<dc:date" not in drawn and "fill: #ffffff" in drawn.replace("white", "#ffffff")


def test_result_files_are_few_small_and_read() -> None:
    files = [file for file in MEASURED.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 1_000_000
    readers = [*(DOCS / "generators").glob("*.py"), *(ROOT / "tests").rglob("test_*.py"), *(DOCS / "lab").glob("*.md")]
    text = "\n".join(reader.read_text() for reader in readers)
    assert not [file.name for file in files if file.name not in text]


# What is won: a worse figure fails here before anybody reads it on the page.


@pytest.mark.parametrize(("heads", "most"), [("32/8", 0.35), ("64/8", 0.43), ("32/32", 0.30), ("16/8", 0.32)])
def test_the_kernel_beats_its_peers_on_prefix_trees(heads: str, most: float) -> None:
    rows = perf_kernel.of_heads(trees(MEASURED, perf_kernel.PAT), heads)
    assert len(rows) == 20 and geometric_mean(row.ratio for row in rows) < most
    assert max(row.ratio for row in rows if perf_kernel.unshared(row)) < perf_kernel.BEHIND


def test_nowhere_is_the_kernel_far_behind() -> None:
    rows = [row for file in perf_kernel.SETS.values() for row in trees(MEASURED, file)]
    assert max(row.ratio for row in rows) < 1.14
    assert sum(row.ratio > perf_kernel.BEHIND for row in rows) <= 13


def test_the_backend_gains_where_prefixes_are_shared_and_loses_nothing_else() -> None:
    servers = perf_servers.by_backend(MEASURED, list(perf_servers.SERVERS.values()))
    ratios = {
        case: runs["pat"].tok_s / max(run.tok_s for name, run in runs.items() if name != "pat")
        for case, runs in servers.items()
    }
    assert min(ratios[case] for case in ("W1", "W7")) > 2 and min(ratios.values()) > 0.99


@pytest.mark.parametrize(("attention", "evicting", "best"), [("pat", 2.2, 1.15), ("fa3", 1.65, 1.15)])
def test_the_policy_gains_most_where_prefixes_are_evicted_and_loses_nowhere(
    attention: str, evicting: float, best: float
) -> None:
    measured = perf_servers.policies(MEASURED, attention, perf_servers.POLICIES[attention])
    default = measured.names[-1]
    seen = set()
    for case, runs in measured.runs.items():
        stock = max(runs[name].tok_s for name in measured.names[:-1] if name in runs)
        if evicts(case, runs["fcfs"].kv_tokens):
            seen.add(case)
            assert runs[default].tok_s > evicting * runs["fcfs"].tok_s and runs[default].tok_s > best * stock
        assert runs[default].tok_s > perf_servers.SLOWER * stock
        assert runs[default].ttft_p99 < perf_servers.LATER * min(
            runs[name].ttft_p99 for name in measured.names[:-1] if name in runs
        )
    assert seen == {"W2", "W6"} and len(measured.runs) >= 5


def test_headline_tables_and_each_kind_of_model_are_of_the_newest_release() -> None:
    """Beside SGLang's own policies, those for work and for waiting included; what is older is named."""
    newest = SUPPORTED[-1]
    for file in {*perf_servers.SERVERS.values(), *(file for files in perf_servers.POLICIES.values() for file in files)}:
        assert json.loads((MEASURED / file).read_text())["machine"]["versions"]["sglang"] == newest, file
    table = perf_servers.policies(MEASURED, "pat", perf_servers.POLICIES["pat"])
    assert {"fcfs", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first", "feather"} <= set(table.names)
    older = {one.kind for one in perf_models.models(MEASURED)} - {
        one.kind for one in perf_models.models(MEASURED) if one.release == newest
    }
    assert older == {"chunks"}


def test_the_replay_is_near_a_server() -> None:
    """Mean and largest distance of each part; what misses a bar is bounded where it is, so that it gets no worse."""
    found = perf_replay.measured(MEASURED)
    # Launches of so short steps are dearer in the model than on a server: the page names the one such run.
    assert sum("chunks of 512" in pair.options for pair in found) == 1
    parts = perf_replay.split([pair for pair in found if "chunks of 512" not in pair.options])
    assert len(parts["all runs"]) >= 180 and len(parts["SGLang 0.5.23"]) >= 110
    bars = {
        "all runs": {"output_tok_s": (0.04, 0.15), "ttft_p99": (0.13, 1.65), "tbt_p99_ms": (0.18, 0.75)},
        "with a queue": {"output_tok_s": (0.04, 0.15), "ttft_mean": (0.08, 0.30), "ttft_p99": (0.09, 0.46)},
        "SGLang 0.5.23": {"output_tok_s": (0.03, 0.13), "ttft_mean": (0.13, 3.0), "tbt_p99_ms": (0.18, 0.65)},
        "a model that the profile was not fitted to": {"output_tok_s": (0.02, 0.04), "ttft_mean": (0.08, 0.20)},
    }
    for name, figures in bars.items():
        level = geometric_mean(pair.ratio("output_tok_s") for pair in parts[name])
        assert 0.98 <= level <= 1.02
        for figure, (typical, worst) in figures.items():
            assert perf_replay.distance(parts[name], figure) <= typical, (name, figure)
            assert perf_replay.worst(parts[name], figure)[0] <= worst, (name, figure)
    lone = [pair for pair in parts["without a queue"] if pair.release == "0.5.23"]
    # The worst are W1 and W4 at the edge of overload, where a little decides whether a queue forms.
    assert len(lone) >= 20 and perf_replay.distance(lone, "ttft_mean") <= 0.40


def test_the_replay_says_what_a_bound_costs_and_brings_on_a_server() -> None:
    """On the traces, at whose rates single tokens in a stream cost little."""
    found = perf_replay.measured(MEASURED)
    plain = {one.bed: one for one in found if one.policy == "feather" and not one.options}
    bounded = [one for one in found if one.options in ("tbt 50", "tbt 250", "slo mooncake") and one.bed in plain]
    assert len(bounded) >= 9
    for one in bounded:
        without = plain[one.bed]
        cost = one.server["output_tok_s"] / without.server["output_tok_s"]
        assert abs(one.replay["output_tok_s"] / without.replay["output_tok_s"] - cost) < 0.05, (one.case, one.options)
        assert max(one.server["tbt_p99_ms"], one.replay["tbt_p99_ms"]) < 400, (one.case, one.options)
        assert min(without.server["tbt_p99_ms"], without.replay["tbt_p99_ms"]) > 800  # stalls of seconds end


def test_the_replay_has_policies_in_the_order_of_the_servers() -> None:
    found = perf_replay.measured(MEASURED)
    for figure, least, differing in (("output_tok_s", 0.97, 200), ("ttft_mean", 0.93, 240)):
        same, differ = perf_replay.order(found, figure)
        assert differ >= differing and same >= least * differ


def test_the_replay_says_who_gains_as_much_as_a_server_does() -> None:
    """feather to fcfs, by replay and on the server, of every workload and backend."""
    found = perf_replay.measured(MEASURED)
    base = {one.bed: one for one in found if one.policy == "fcfs"}
    gains = [
        one.ratio("output_tok_s") / base[one.bed].ratio("output_tok_s")
        for one in found
        if one.policy.startswith("feather") and not one.options and one.bed in base
    ]
    assert len(gains) >= 19 and max(abs(gain - 1) for gain in gains) < 0.15


def test_on_real_traces_the_mean_is_half_of_arrival_orders() -> None:
    ratios = perf_replay.tail_ratios(MEASURED)["feather"]
    assert geometric_mean(one["TTFT mean to fcfs's"] for one in ratios) < 0.57
    assert geometric_mean(one["TTFT p99 to fcfs's"] for one in ratios) < 1.10
    assert geometric_mean(one["longest wait to fcfs's"] for one in ratios) < 1.25
    assert min(one["tokens/s to SGLang's best"] for one in ratios) > 0.98


def test_models_are_right_and_lose_little_without_sharing() -> None:
    found = perf_models.models(MEASURED)
    ranks = [one for one in found if one.flags == "--tp 2 --dp 2 --enable-dp-attention"]
    assert len(ranks) == 1 and ranks[0].shared.ratio > 1.2 and ranks[0].private.ratio > 1.0
    assert {one.kind for one in found} >= {"dense", "experts", "windows", "sinks", "linear"}
    assert not [one.name for one in found if one.wrong]
    assert min(one.shared.ratio for one in found) > 1
    behind = {(one.name, one.release) for one in found if one.private.ratio < 0.98}
    assert behind == {("llama-3.2-1b", "0.5.23")}  # within what its repetitions spread
    assert all(one.private.ratio + one.private.noise > 1 for one in found if (one.name, one.release) in behind)
    for file in perf_models.FILES:
        rows = json.loads((MEASURED / file).read_text())["rows"]
        problems = {row["shape"] for row in rows if row["problems"] or row["left_out"]}
        assert problems == ({"llama-3.2-1b"} if file == perf_models.MODELS else set())
    assert {kind.name for kind in matrix.KINDS if kind.gpu_shapes} <= set(perf_models.LAYERS)


def test_prefill_gains_where_many_share_a_long_prefix() -> None:
    content = perf_prefill.load(MEASURED, perf_prefill.PREFILL)
    us = {one["case"]: {name: one["systems"][name]["warm_us"] for name in ("pat", "fa3")} for one in content["records"]}
    assert all(us[case]["pat"] < 0.8 * us[case]["fa3"] for case in ("groups-5x5k", "groups-20x10k", "samples-1"))


def test_bounds_between_tokens_end_stalls_for_little_throughput() -> None:
    kept = {"feather, tbt 250": 0.96, "feather, tbt 50": 0.93, "feather, slo mooncake": 0.95}
    for file in perf_promise.FILES:
        for case, runs in perf_promise.measured(MEASURED, file).items():
            plain = runs[perf_promise.PLAIN]
            # The one load that keeps requests waiting for memory from its beginning to its end.
            full = file == perf_promise.SHORT and case == "W6"
            for name in kept.keys() & runs.keys():
                assert runs[name].tok_s > (kept[name] - 0.01 * full) * plain.tok_s, (file, case, name)
            for name in {"feather, tbt 250", "feather, tbt 50"} & runs.keys():
                most = plain.longest_ms / 5 if full else min(450, plain.longest_ms / 6)
                assert runs[name].longest_ms < most, (file, case, name)
            if case.startswith("trace:"):
                assert runs["feather, tbt 250"].tbt_p99_ms <= 300 < plain.tbt_p99_ms
                static = perf_promise.best_static(runs)
                for name in ("feather, tbt 250", *(["feather, tbt 50"] if "synthetic" in case else [])):
                    assert runs[name].goodput > max(4 * plain.goodput, static.goodput if static else 0), (case, name)


def test_a_delay_of_prefill_pays_on_a_server() -> None:
    records = json.loads((MEASURED / perf_promise.SHARED).read_text())["records"]
    found = {(one["case"].partition(":")[0], one["server"]): one["overall"] for one in records}
    burst, plain, none = (found["open", name] for name in ("feather", "fcfs", "feather, pace 0"))
    assert burst["ttft_s"]["p99"] < 0.1 * min(plain["ttft_s"]["p99"], none["ttft_s"]["p99"])
    chat, plain = (found["chat at 30x, the first 260", name] for name in ("feather", "fcfs"))
    # What the first token loses the answer has back many times over.
    lost = chat["ttft_s"]["mean"] - plain["ttft_s"]["mean"]
    assert plain["e2e_s"]["mean"] - chat["e2e_s"]["mean"] > 10 * lost > 0


def test_answers_with_drafts_are_right() -> None:
    """Greedy ones, and those of random requests some of which are given up; drafts by pat, too."""
    rows = json.loads((MEASURED / "speculation_answers_h200.json").read_text())["rows"]
    backends = {(row["drafter"], row["backend"]) for row in rows}
    drafters = ("none", "standalone", "eagle", "ngram")
    assert backends > {(name, "pat") for name in drafters} | {("eagle", "pat, drafts too")}
    for row in rows:
        answers, fates = row["answers"], row["churn"]["fates"]
        assert not (row["problems"] or row["left_out"] or answers["wrong"] or row["churn"]["wrong"]), row["backend"]
        assert answers["spread"]["equal"] + answers["near_ties"] == answers["spread"]["answers"] == 24
        if row["backend"] != "fa3":  # which it is compared with, and whose steps beside NGRAM's drafts are few
            assert fates["equal"] + fates["near tie"] > 100 and min(fates["aborted"], fates["hung up"]) > 20


# The generator, on made-up files.


def kernel_file(ratio: float = 0.5) -> dict[str, Any]:
    machine = {"gpu": "G", "torch": "2", "sgl_kernel": "1", "flashinfer": "1", "when": "2026-01-02 03:04:05",
               "command": "bench_decode_kernel.py --quiet"}  # fmt: skip
    records = [
        {"tree": 1, "name": name, "heads": heads, "page_size": 1, "floor_us": 1.0,
         "systems": {"fa3-planned": {"warm_us": 12.0}, "flashinfer": {"warm_us": 10.0}, "cascade": {"error": "none"},
                     "feather": {"warm_us": 10.0 * ratio}}}
        for heads in perf_kernel.HEADS for name in ("1,8_100,10", "8_100")
    ]  # fmt: skip
    return {"machine": machine, "records": records}


def server_file(backends: dict[str, str], rates: dict[str, dict[str, float]], ttft: float = 2.0) -> dict[str, Any]:
    """Servers by name and flags, tokens a second by case and server."""
    machine = {"gpu": "G", "versions": {"sglang": "0.5.17"}}
    figures = {"ttft_s": {"mean": ttft, "p99": 2 * ttft}, "e2e_s": {"mean": 4 * ttft}}
    records = [
        {"server": server, "case": case, "round": 1, "overall": {"tok_s": rate, **figures}, "steady": {"tok_s": rate}}
        for case, of_case in rates.items()
        for server, rate in of_case.items()
    ]
    servers = {name: {"flags": flags.split(), "kv_tokens": 200_000} for name, flags in backends.items()}
    return {"command": "bench_server.py --model qwen3-8b --case a b c d e", "when": "2026-01-02 03:04:05",
            "machine": machine, "servers": servers, "records": records}  # fmt: skip


def flags_of(backend: str, policy: str = "") -> str:
    decode = "--attention-backend fa3 --decode-attention-backend pat" if backend == "pat" else ""
    return f"{decode or f'--attention-backend {backend}'} {f'--schedule-policy {policy}' if policy else ''}"


def one_backend(backend: str, feather: float = 200.0) -> dict[str, Any]:
    names = {"": "", "+lpm": "lpm", "+feather": "feather"}
    servers = {backend + suffix: flags_of(backend, policy) for suffix, policy in names.items()}
    rates = {backend: 100.0, f"{backend}+lpm": 150.0, f"{backend}+feather": feather}
    return server_file(servers, {case: dict(rates) for case in ("W1", "W2", "W3")})


def model_file() -> dict[str, Any]:
    """A dense model with all layers, and one with fewer experts."""
    machine = {"gpu": "G", "versions": {"sglang": "0.5.17"}}
    shared = {"pat": [110.0, 110.0, 500.0, 110.0], "fa3": [100.0, 102.0], "triton": [90.0]}
    answers = {"wrong": [], "spread": {"largest": 0.25}}
    rows = [
        {"shape": shape, "kind": kind, "cut": cut, "answers": answers, "spread": {"largest": 0.5},
         "all_tok_s": {"shared": shared, "private": {"pat": [101.0, 97.0], "fa3": [100.0]}}}
        for shape, kind, cut in (("small", "dense", ""), ("large", "sinks", "4 of 32 experts"))
    ]  # fmt: skip
    return {"command": "check_models.py --json models.json --repeat 2", "when": "2026-01-02 03:04:05",
            "machine": machine, "rows": rows}  # fmt: skip


def speculation_files() -> dict[str, dict[str, Any]]:
    """A batch of drafts, and a server of two backends."""
    about = {"machine": {"gpu": "G", "versions": {"sglang": "0.5.17"}}, "when": "2026-01-02 03:04:05"}
    verify = {
        "requests": 9,
        "groups": 3,
        "drafts": 4,
        "tokens": 5150,
        "floor_us": 10.0,
        "systems": {name: {"warm_us": us} for name, us in (("pat", 20.0), ("fa3", 80.0), ("flashinfer", 50.0))},
    }
    shared, alone = perf_speculation.CASES.values()
    rows = [
        {"drafter": "eagle", "case": case, "backend": name, "tok_s": rate, "accepted": 2.5}
        for case, name, rate in (
            (shared, "pat", 180.0),
            (shared, "fa3", 100.0),
            (alone, "fa3", 100.0),
            (alone, "pat", 90.0),
        )
    ]
    return {perf_speculation.VERIFY: {"command": "bench_verify.py --json v.json", **about, "records": [verify]},
            perf_speculation.SERVER: {"command": "check_speculation.py", **about, "rows": rows}}  # fmt: skip


def bounds_file() -> dict[str, Any]:
    """One workload without a bound, with each flag, and with two of SGLang's own settings."""
    machine = {"gpu": "G", "versions": {"sglang": "0.5.23"}}
    settings = {"feather": (100.0, 1.0, 5000.0), "feather, interval 4": (98.0, 2.0, 600.0),
                "feather, chunks of 512": (97.0, 1.5, 900.0)}  # fmt: skip
    settings |= {name: (96.0 + number, 3.0, 250.0) for number, name in enumerate(perf_promise.FLAGS)}
    records = [
        {"case": "W2", "server": name, "goodput": goodput,
         "overall": {"tok_s": rate, "tbt_ms": {"p99": 50.0}, "longest_gap_ms": {"p99": longest},
                     "ttft_s": {"mean": 1.0}, "e2e_s": {"mean": 2.0}}}
        for name, (rate, goodput, longest) in settings.items()
    ]  # fmt: skip
    return {"machine": machine, "when": "2026-01-02 03:04:05", "records": [*records, {**records[0], "case": "chat"}]}


def prefill_file() -> dict[str, Any]:
    """A step that gains, and one of requests that share nothing."""
    records = [
        {"case": case, "requests": 3, "rows": 1200, "floor_us": 10.0,
         "systems": {name: {"warm_us": us} for name, us in times.items()} | {"cascade": cascade}}
        for case, times, cascade in (
            ("gains", {"pat": 20.0, "fa3": 40.0, "flashinfer": 25.0}, {"warm_us": 22.0}),
            ("loses", {"pat": 60.0, "fa3": 40.0, "flashinfer": 50.0}, {"error": "nothing shared"}),
        )
    ]  # fmt: skip
    return {"command": "bench_prefill.py --json p.json", "when": "2026-01-02 03:04:05", "machine": {"gpu": "G"},
            "records": records}  # fmt: skip


def times(content: dict[str, Any], which: str) -> dict[str, list[float]]:
    """The repeats of the first model's case."""
    return content["rows"][0]["all_tok_s"][which]


@pytest.fixture
def files() -> dict[str, Any]:
    """Result files by name, as small as the page can be made of."""
    steady = {name: flags_of(name) for name in perf_servers.BACKENDS}
    batch = {"pat": 300.0, "fa3": 100.0, "flashinfer": 110.0, "triton": 90.0}
    made: dict[str, Any] = {name: kernel_file() for name in (*perf_kernel.SETS.values(), perf_kernel.H100)}
    on_fp8 = {name: {"warm_us": us} for name, us in (("feather", 10.0), ("feather-16bit", 16.0), ("triton", 40.0))}
    about = {"machine": kernel_file()["machine"]}
    made[perf_kernel.FP8] = about | {"records": [{"systems": on_fp8, "floor_us": 8.0}]}
    of_sglang: dict[str, Any] = {name: {"warm_us": us} for name, us in (("feather", 12.0), ("trtllm_mha", 80.0))}
    made[perf_kernel.SGLANG] = about | {
        "records": [{"systems": of_sglang | {"hpc_ops": {"error": "none"}}, "floor_us": 8.0}]
    }
    made |= {file: one_backend(name) for name, files in perf_servers.POLICIES.items() for file in files}
    made |= {file: server_file(steady, {"decode:500,5,5000,64": batch}) for file in perf_servers.DECODE}
    made |= {file: server_file(steady, {"W1": batch}) for file in (perf_servers.TWO_GPUS, perf_servers.LONG)}
    made |= {file: one_backend(name) for name, file in zip(("pat", "fa3", "fa3"), perf_servers.LOADS, strict=True)}
    made[perf_models.MODELS] = model_file()
    made |= {file: model_file() for file in perf_models.FILES[1:]}
    made[perf_models.TWO_RANKS]["rows"][1:] = []
    made[perf_models.TWO_RANKS]["rows"][0]["flags"] = "--dp 2 --disable-custom-all-reduce --max-running-requests 9"
    made |= speculation_files()
    made[perf_prefill.PREFILL] = prefill_file()
    gains = {"W1": {"off": 100.0, "on": 120.0}, "W2": {"off": 100.0, "on": 110.0}}
    made[perf_prefill.SERVERS] = server_file(dict.fromkeys(("off", "on"), flags_of("pat")), gains)
    made[perf_prefill.TRACE] = {
        "runs": [{"server": "off", "output_tok_s": 90.0}, {"server": "on", "output_tok_s": 99.0}]
    }
    figures = {"output_tok_s": 110.0, "ttft_mean": 2.0, "ttft_p99": 4.0, "e2e_mean": 8.0, "tbt_p99_ms": 9.0,
               "max_wait": 5.0}  # fmt: skip
    made[perf_replay.REPLAYS] = {
        "command": "c", "sglang": "0.5.23", "profile": "h200",
        "runs": [{"case": case, "attention": backend, "policy": policy, "options": {}, "model": "qwen3-8b",
                  "sglang": "0.5.17", "kv_tokens": 9, "replay": figures,
                  "server": {**figures, "output_tok_s": 100.0}}
                 for backend in perf_servers.SERVERS for case in ("W1", "W2", "W3")
                 for policy in ("fcfs", "lpm", "feather")],
    }  # fmt: skip
    made[perf_replay.TAIL_SERVER] = {
        "slice": "s", "gpu": "G", "versions": {"sglang": "0.5.17"},
        "server": [{"policy": name, **figures} for name in ("fcfs", "feather")],
        "replay": {name: figures for name in ("fcfs", "feather")},
    }  # fmt: skip
    made |= dict.fromkeys(perf_promise.FILES, bounds_file())
    made[perf_replay.TAIL] = {"a": {"rate_scale": 1.0, "fcfs": figures, "hrrn": figures, "feather": figures}}
    return json.loads(json.dumps(made))  # nothing in it is the same object twice


def written(files: dict[str, Any], root: Path) -> Path:
    folder = root / "docs" / "measured"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def rows_with(page: str, *cells: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith("|") and all(cell in line for cell in cells)]


def everything(folder: Path) -> str:
    """All pages of performance, one after the other."""
    return "\n".join(performance.pages(folder).values())


def test_pages_without_losses_list_none(files: dict[str, Any], tmp_path: Path) -> None:
    folder = written(files, tmp_path)
    assert not perf_kernel.losses(folder) and not perf_servers.behind_a_backend(folder)
    page = everything(folder)
    assert not rows_with(page, "|TTFT p99, s|", "W") and "|0 of 8|" in page


def test_a_losing_kernel_row_is_shown(files: dict[str, Any], tmp_path: Path) -> None:
    files["decode_h200_small.json"]["records"][0]["systems"]["feather"]["warm_us"] = 17.0
    page = everything(written(files, tmp_path))
    assert rows_with(page, "`1,8_100,10`", "17.0", "FlashInfer", "1.70")


def test_a_losing_backend_is_shown(files: dict[str, Any], tmp_path: Path) -> None:
    files[perf_servers.LONG]["records"][0]["overall"]["tok_s"] = 77.0
    page = everything(written(files, tmp_path))
    assert rows_with(page, "|77.0|110 (flashinfer)|**0.70**|")


def test_packed_prefill_that_loses_on_a_server_is_shown(files: dict[str, Any], tmp_path: Path) -> None:
    files[perf_prefill.SERVERS]["records"][1]["overall"]["tok_s"] = 80.0
    page = everything(written(files, tmp_path))
    assert rows_with(page, "|W1: ", "s|0.80|") and rows_with(page, "|W2: ", "s|1.10|")


def test_a_model_has_its_row_with_what_was_cut_and_the_best_other_backend(
    files: dict[str, Any], tmp_path: Path
) -> None:
    content = files[perf_models.MODELS]
    content["rows"][1]["all_tok_s"]["shared"] |= {"pat": [110.0], "triton": [220.0]}
    content["rows"][1]["all_tok_s"]["private"]["pat"] = [77.0]
    content["rows"][1]["answers"] = {"wrong": ["another token"], "spread": {"largest": 3.0}}
    page = everything(written(files, tmp_path))
    assert rows_with(page, "|small|whole|full|0.5.17|yes|") and rows_with(page, "|small|0.25|0.50|")
    assert rows_with(page, "|small|110|100 (fa3)|**1.10**|177%|")
    assert rows_with(page, "|small|97.0|100 (fa3)|**0.97**|2%|")
    assert rows_with(page, "|large|4 of 32 experts|windows, full, sinks|0.5.17|**no**|")
    assert rows_with(page, "|large|3.00|0.50|")
    assert rows_with(page, "|large|110|220 (triton)|**0.50**|1%|")
    assert rows_with(page, "|large|77.0|100 (fa3)|**0.77**|0%|")
    assert rows_with(page, "|small<br>`--dp 2`|whole|full|0.5.17|")  # and no flag of room
    assert "\npython benchmarks/checks/check_models.py --repeat 2\n" in page


def test_drafts_have_their_row_and_their_server(files: dict[str, Any], tmp_path: Path) -> None:
    files[perf_speculation.VERIFY]["records"][0]["systems"]["pat"]["warm_us"] = 60.0  # slower than one of both
    page = everything(written(files, tmp_path))
    assert rows_with(page, "9 requests", "5,150", "4 drafts|60|80|50|**1.20**|6.00|")
    assert rows_with(page, "500 requests", "|180|100|**1.80**|") and rows_with(page, "|90.0|100|**0.90**|")


def test_steps_that_lose_packed_are_shown_beside_those_that_gain(files: dict[str, Any], tmp_path: Path) -> None:
    page = everything(written(files, tmp_path))
    assert rows_with(page, "|gains|20|40|25|22|**0.80**|2.00|")
    assert rows_with(page, "|loses|60|40|50|-|**1.50**|6.00|")


def test_replays_that_are_furthest_from_their_server_are_shown(files: dict[str, Any], tmp_path: Path) -> None:
    files[perf_replay.REPLAYS]["runs"][4]["replay"]["output_tok_s"] = 550.0
    page = everything(written(files, tmp_path))
    assert rows_with(page, "|W2: ", "100, 550, 5.50")


def test_a_losing_policy_is_shown(files: dict[str, Any], tmp_path: Path) -> None:
    slow, late = (
        next(record for record in files[perf_servers.SERVERS["fa3"]]["records"]
             if (record["case"], record["server"]) == (case, "fa3+feather"))
        for case in ("W2", "W3")
    )  # fmt: skip
    slow["overall"]["tok_s"] = 75.0
    late["overall"]["ttft_s"]["p99"] = 400.0
    page = everything(written(files, tmp_path))
    assert rows_with(page, "W2", "tokens/s", "|75.0|150|0.50|")
    assert rows_with(page, "W3", "p99", "|400.000|4.000|100.00|")


def test_bounds_stand_beside_the_best_of_the_servers_own_settings(files: dict[str, Any], tmp_path: Path) -> None:
    page = everything(written(files, tmp_path))
    assert rows_with(page, "|no bound|100|1.00|1.0|2.0|") and rows_with(page, "|no bound|5.00|50|1.00|")
    assert rows_with(page, "|`--feather-tbt 250`|96.0|0.96|") and rows_with(page, "|`--feather-tbt 250`|0.25|50|")
    assert rows_with(page, "|SGLang's best: interval 4|98.0|0.98|") and not rows_with(page, "chunks of 512")


def test_a_cache_of_8_bits_is_beside_triton_and_16_bits(files: dict[str, Any], tmp_path: Path) -> None:
    slow = {name: {"warm_us": us} for name, us in (("feather", 40.0), ("feather-16bit", 16.0), ("triton", 40.0))}
    files[perf_kernel.FP8]["records"].append({"systems": slow, "floor_us": 8.0})
    page = everything(written(files, tmp_path))
    assert rows_with(page, "Triton", "|0.50|1.00|2|") and rows_with(page, "16 bits", "|1.25|2.50|2|")


def test_sglangs_backends_that_ran_are_named_with_the_nearest_to_the_floor_first(
    files: dict[str, Any], tmp_path: Path
) -> None:
    assert "|`pat`|1.50|\n|`trtllm_mha`|10.00|" in everything(written(files, tmp_path))


def test_a_replay_that_is_far_off_is_shown(files: dict[str, Any], tmp_path: Path) -> None:
    files[perf_replay.REPLAYS]["runs"][0]["replay"] = {
        "output_tok_s": 500.0, "ttft_mean": 2.0, "ttft_p99": 4.0, "e2e_mean": 8.0, "tbt_p99_ms": 9.0}  # fmt: skip
    page = everything(written(files, tmp_path))
    assert rows_with(page, "|all runs|", ", 400%") and "100, 500, 5.00" in page


@pytest.mark.parametrize(
    ("file", "break_it", "named"),
    [
        ("decode_h200.json", lambda content: content.pop("records"), "records"),
        ("decode_h200_long.json", lambda content: content["records"].clear(), "peer"),
        ("decode_h200_fp8.json", lambda content: content["records"][0]["systems"].pop("triton"), "systems.triton"),
        ("servers_h200_pat.json", lambda content: content["records"][0]["overall"].pop("tok_s"), "overall.tok_s"),
        ("servers_h200_pat.json", lambda content: content["machine"]["versions"].clear(), "versions.sglang"),
        ("server_h200_tp2.json", lambda content: content.pop("when"), "when"),
        ("verify_h200.json", lambda content: content["records"][0]["systems"].pop("fa3"), "systems.fa3"),
        ("prefill_h200.json", lambda content: content["records"][1]["systems"].pop("pat"), "systems.pat"),
        (
            "prefill_server_h200.json",
            lambda content: content["records"].append({"case": "W1", "server": "on"}),
            "overall",
        ),
        ("speculation_h200.json", lambda content: content["rows"].pop(), "no decode:256,0,500,300 of pat"),
        ("models_h200.json", lambda content: content.pop("when"), "when"),
        ("models_h200.json", lambda content: content["rows"].clear(), "rows is empty"),
        ("data_parallel_h200.json", lambda content: content["rows"].clear(), "rows is empty"),
        ("models_h200.json", lambda content: content["rows"][1].pop("answers"), "large: no answers"),
        ("models_h200.json", lambda content: content["rows"][0].update(kind="odd"), "small: kind odd is not among"),
        ("models_h200.json", lambda content: times(content, "shared").pop("pat"), "small, shared: no pat"),
        ("models_h200.json", lambda content: times(content, "private")["fa3"].clear(), "private: no stock"),
        ("replays.json", lambda content: content["runs"][0].pop("server"), "server"),
        ("tail_h200.json", lambda content: content["replay"].clear(), "replay.fcfs"),
        ("tail.json", lambda content: content["a"].pop("hrrn"), "hrrn"),
        ("bounds_h200.json", lambda content: content["records"].pop(3), "W2: no feather, tbt 250"),
        ("bounds_h200_short.json", lambda content: content["records"].pop(0), "W2: no feather"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    file: str, break_it: Any, named: str, files: dict[str, Any], tmp_path: Path
) -> None:
    break_it(files[file])
    folder = written(files, tmp_path)
    with pytest.raises(ResultError) as error:
        everything(folder)
    message = str(error.value)
    assert "\n" not in message and file in message and named in message


def test_writing_again_changes_nothing_and_a_changed_file_is_named(
    files: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(files, tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{performance.START}\nold\n{performance.END}\nafter\n")
    write, check = ["--root", str(tmp_path)], ["--check", "--root", str(tmp_path)]
    assert performance.main(check) == 1 and not (tmp_path / "docs" / "performance.md").exists()
    assert performance.main(write) == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert performance.main(check) == 0
    files["decode_h200.json"]["records"][0]["systems"]["feather"]["warm_us"] = 9.0
    (folder / "decode_h200.json").write_text(json.dumps(files["decode_h200.json"]))
    capsys.readouterr()
    assert performance.main(check) == 1
    named = {line.partition(":")[0] for line in capsys.readouterr().out.splitlines()}
    assert named == {
        "docs/performance.md",
        "docs/performance/kernel.md",
        "docs/performance/kernel.svg",
    }
    (folder / "tail.json").unlink()
    assert performance.main(write) == 1
    said = capsys.readouterr().err
    assert said.startswith("performance: tail.json") and said.count("\n") == 1


def test_a_readme_without_markers_stays_as_it_is() -> None:
    assert performance.with_block("text\n", "numbers") == "text\n"
