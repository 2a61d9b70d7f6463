"""``feather calibrate --from``: recordings that were made from known prices are fitted back to them."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from feather_sglang.adapter.step_log import SIZES, TIMES
from feather_sglang.calibrate import command, recording
from feather_sglang.calibrate.fit_gpu import batches, fit_gpu, slower
from feather_sglang.calibrate.fit_host import fit_host, fit_prices, gpu_seconds
from feather_sglang.calibrate.loads import loads
from feather_sglang.calibrate.recording import FORMAT, Recording, Setting, table
from feather_sglang.cli import main
from feather_sglang.errors import FeatherError
from feather_sglang.replay.model_shape import shape_of
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.simulation.host_time import HostTime

CONFIG = {
    "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 151936,
}  # fmt: skip
SHAPE = shape_of(CONFIG, "qwen3-8b")
BASE = load_profile("h200")
TRUE_HOST = HostTime(
    front_request=6e-4, front_token=4e-7, front_piece=1.5e-4, hop_in=0.0021, hop_out=8e-4,
    turn=1.1e-4, take_request=3e-4, take_token=6e-8, form_decode=4e-4, form_decode_row=2e-6,
    form_prefill=0.0011, form_prefill_row=3e-4, form_waiting=4e-5, launch_decode=0.0015, launch_decode_row=9e-7,
    prepare_prefill=2.5e-4, prepare_prefill_row=5e-6, graph_layer=2e-4, eager_layer=6e-4,
    result_decode=3e-4, result_decode_row=7e-6, result_prefill=6e-4, result_prefill_row=2e-4, stream_piece=1e-4,
)  # fmt: skip
KERNELS = {"fa3": 1.3, "pat": 0.8}  # how much longer they take than the base profile has it
TRUE = replace(
    BASE,
    gemm_flop_per_s=BASE.gemm_flop_per_s / 1.25,
    attention={name: slower(one, KERNELS.get(name, 1.0)) for name, one in BASE.attention.items()},
)
PAT, FA3 = Setting("pat", False), Setting("fa3", True)


class Made:
    """The log of one server whose steps take the times of given prices, within a few percent."""

    def __init__(self, setting, seed=0, noise=0.03, host=TRUE_HOST):
        self.setting, self.host, self.noise = setting, host, noise
        self.rng = np.random.default_rng(seed)
        self.model = StepTimeModel(TRUE, SHAPE, setting.attention, setting.prefill_graphs)
        self.now = self.ready = 100.0
        self.number = 0
        self.decoded = {}  # seconds of the GPU for so many rows of so many tokens that share nothing

    def about(self, seconds):
        return seconds * float(np.exp(self.rng.normal(0, self.noise)))

    def step(self, log, kind, rows, new=(), cached=(), kv=0, came=(), waiting=0, gpu=0.0, first=(), pieces=0):
        """One step, in the order of SGLang's loop without overlap, which is enough for the fit."""
        host, prefill, self.number = self.host, kind == "prefill", self.number + 1
        begin = self.now
        received = begin + self.about(host.receive(len(came), sum(came)))
        formed = received + self.about(host.form(rows, prefill, waiting))
        prepare, layers = host.launch(rows, prefill, SHAPE.layers, self.setting.prefill_graphs)
        forward = formed + self.about(prepare) if prefill else formed + 0.4 * prepare
        launched = forward + self.about(layers) if prefill else formed + self.about(prepare)
        self.ready = max(max(self.ready, forward) + gpu * float(np.exp(self.rng.normal(0, 0.005))), launched)
        end = self.ready + self.about(host.result(rows, prefill, pieces))
        sizes = rows, sum(new), sum(cached), 0.0, kv, len(came), sum(came), waiting, self.setting.prefill_graphs
        log.append(["step", self.number, kind, *sizes, begin, received, formed, formed, forward, launched])
        log.append(["result", self.number, list(first), pieces, launched, self.ready, end])
        self.now = end
        return begin, end

    def prefill(self, log, new, cached, **more):
        gpu = self.model.prefill(new, cached)
        return self.step(log, "prefill", len(new), new, cached, sum(new) + sum(cached), gpu=gpu, **more)

    def steady(self, case, log):
        rows, paths = case.batch, [request.hash_ids for request in case.trace.requests]
        prompt, output = case.trace.requests[0].input_length, case.trace.requests[0].output_length
        sharing = self.model.sharing(paths, case.trace.block_size, [prompt] * rows)
        self.prefill(log, [20] * rows, [prompt - 20] * rows, came=[prompt] * rows, pieces=rows)
        for made in range(1, output):
            lengths = [prompt + made] * rows
            pieces = rows if made % 16 == 0 else 0
            gpu = self.model.decode(lengths, sharing)
            self.step(log, "decode", rows, kv=sum(lengths), gpu=gpu, pieces=pieces)
        return [[0.0, request.input_length, 0.0, 4] for request in case.trace.requests]

    def open(self, case, log, number):
        streams, host = [], self.host
        # A third of a long trace's requests, which is what a test has time for.
        requests = case.trace.requests
        for place, request in enumerate(requests[: max(100, len(requests) // 3)]):
            tokens, rid = request.input_length, f"{number}-{place}"
            sent = self.now - self.about(host.front_request + tokens * host.front_token + host.hop_in)
            log.append(["request", rid, tokens, self.now])
            waiting = int(self.rng.integers(0, 12)) if case.batch > 100 else 0
            _, end = self.prefill(log, [tokens], [0], came=[tokens], waiting=waiting, first=[rid], pieces=1)
            for made in range(1, request.output_length):
                rows = 1 if not waiting else int(self.rng.integers(1, 60))
                gpu = self.apart(tokens, rows)
                self.step(log, "decode", rows, kv=tokens * rows, gpu=gpu, pieces=made % 16 == 0)
            streams.append(
                [sent, tokens, end + self.about(host.front_piece + host.hop_out), 1 + request.output_length // 16]
            )
        return streams

    def apart(self, tokens, rows):
        if (tokens, rows) not in self.decoded:
            sharing = self.model.sharing([()] * rows, 1, [tokens] * rows)
            self.decoded[tokens, rows] = self.model.decode([tokens] * rows, sharing)
        return self.decoded[tokens, rows]

    def run(self, load, number):
        log, begin = [], self.now
        streams = self.steady(load.case, log) if load.case.steady else self.open(load.case, log, number)
        pieces, tokens = sum(one[3] for one in streams), sum(one[1] for one in streams)
        host, seconds = self.host, self.now - begin
        cpu = len(streams) * host.front_request + tokens * host.front_token + pieces * host.front_piece
        named = [
            [f"{number}-{place}", sent, many, first, parts] for place, (sent, many, first, parts) in enumerate(streams)
        ]
        return {
            "load": load.case.name, "held_out": load.held_out, "begin": begin, "end": self.now,
            "front_cpu": self.about(cpu) + 0.01 * seconds, "streams": named, "log": log,
        }  # fmt: skip

    def server(self, chosen):
        runs = [self.run(load, number) for number, load in enumerate(chosen)]
        return {"setting": self.setting._asdict(), "kv_tokens": 700_000, "runs": runs}


def content(*servers, model=CONFIG):
    return {
        "format": FORMAT, "title": "made on no GPU", "machine": {"gpu": "none", "memory_mib": "143771"}, "model": model,
        "servers": list(servers),
    }  # fmt: skip


def fewer(every):
    """A part of the loads, with fewer requests in the mixed ones: what a test has time for."""
    return [load for load in every if "20,2000" not in load.case.name]


@pytest.fixture(scope="module")
def whole():
    every = loads(700_000, 40_000)
    return content(Made(PAT, 1).server(every), Made(FA3, 2).server(fewer(every)))


@pytest.fixture(scope="module")
def brief():
    """A small one, for what is no matter of figures."""
    some = [
        load
        for load in loads(700_000, 40_000)
        if load.case.name.startswith(("decode:16", "open:0,100,", "open:0,1000,"))
    ]
    return content(Made(PAT, 3).server(some), Made(FA3, 4).server(some))


def kept(path, made):
    Recording(made).save(path)
    return path


def folder_of(tmp_path, config=CONFIG):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def calibrate(tmp_path, *flags, config=CONFIG):
    return main(["calibrate", "--model", folder_of(tmp_path, config), "--out", str(tmp_path / "mine.json"), *flags])


# The fit -----------------------------------------------------------------------------------------------------------


def test_prices_are_found_under_noise_and_are_never_below_zero():
    rng = np.random.default_rng(0)
    rows, tokens, nothing = rng.integers(1, 100, 500), rng.integers(0, 5000, 500), rng.integers(0, 9, 500)
    seconds = (0.002 + 3e-5 * rows + 1e-7 * tokens) * np.exp(rng.normal(0, 0.05, 500))
    prices = fit_prices({"step": np.ones(500), "row": rows, "token": tokens, "nothing": nothing}, seconds)
    assert prices["step"] == pytest.approx(0.002, rel=0.05)
    assert prices["row"] == pytest.approx(3e-5, rel=0.05) and prices["token"] == pytest.approx(1e-7, rel=0.1)
    assert 0 <= prices["nothing"] < 2e-5
    assert min(fit_prices({"step": np.ones(500), "row": rows}, 0.01 - 5e-5 * rows).values()) == 0


def test_the_hosts_prices_are_fitted_back(whole):
    host, errors = fit_host(Recording(whole), SHAPE.layers)
    fitted, true = asdict(host), asdict(TRUE_HOST)
    # What a step has few of beside what it has anyway is told least.
    loose = {"take_token": 0.3, "prepare_prefill_row": 0.3, "launch_decode_row": 0.15, "hop_in": 0.15, "hop_out": 0.15}
    off = {name: round(fitted[name] / true[name] - 1, 3) for name in true}
    assert {name: error for name, error in off.items() if abs(error) > loose.get(name, 0.08)} == {}
    kinds = {row["kind"] for row in errors}
    # The prompts that are held out are so long that no launch of theirs can be told from the GPU's time.
    assert kinds == {"fitted on", "held out"} and len(errors) == 9 + 7
    for row in errors:  # those that the fit did not see, too
        assert row["steps"] > 0 and row["predicted"] == pytest.approx(row["seconds"], rel=0.06), row


def test_what_no_server_shows_is_the_bases(brief):
    eager = content(*brief["servers"][:1])
    base = HostTime(graph_layer=5e-4, eager_layer=1.0)
    host, _ = fit_host(Recording(eager), SHAPE.layers, base)
    assert host.graph_layer == 5e-4 and host.eager_layer == pytest.approx(TRUE_HOST.eager_layer, rel=0.05)


def test_the_gpus_rates_are_fitted_back(whole):
    steps = [one for one in Recording(whole).steps() if not one.held_out]
    found = batches(steps)
    assert {(one.attention, one.prefill) for one in found} >= {("pat", False), ("fa3", False), ("pat", True)}
    assert len({one.label for one in found}) == len(found)
    profile, table_ = fit_gpu(BASE, SHAPE, found)
    for row in table_:
        assert row["predicted"] == pytest.approx(row["seconds"], rel=0.06), row
    for name, factor in KERNELS.items():
        before, after = slower(BASE.attention[name], factor), profile.attention[name]
        assert after.dram_bytes_per_s == pytest.approx(before.dram_bytes_per_s, rel=0.05), name
    assert profile.gemm_flop_per_s == pytest.approx(TRUE.gemm_flop_per_s, rel=0.05)
    # A kernel that no server ran stays as it was, and so does what a kernel is.
    assert profile.attention["flashinfer"] == BASE.attention["flashinfer"]
    assert profile.attention["fa3"].processors == BASE.attention["fa3"].processors
    # The other loads' batches are predicted as they were measured, although nothing of them was fitted.
    true, mine = (StepTimeModel(one, SHAPE, "fa3") for one in (TRUE, profile))
    lengths = [3000] * 200
    sharing = true.sharing([(row % 10, 10 + row) for row in range(200)], 2500, lengths)
    assert mine.decode(lengths, sharing) == pytest.approx(true.decode(lengths, sharing), rel=0.06)


def test_a_step_is_the_gpus_from_when_it_was_free():
    """Two steps of 30 ms: the second was launched while the first ran."""
    lines = []
    for number, (forward, ready) in enumerate(((0.002, 0.032), (0.010, 0.062))):
        times = dict.fromkeys(TIMES, forward - 0.001) | {"forward": forward, "launched": forward + 0.001}
        lines.append(["step", number, "decode", *[1] * len(SIZES), *times.values()])
        lines.append(["result", number, [], 0, forward + 0.001, ready, ready + 0.001])
    steps = table(lines)
    assert gpu_seconds(steps) == pytest.approx([0.030, 0.030])


def test_steps_without_a_result_and_other_lines_are_left_out():
    step = ["step", 1, "prefill", *[2] * len(SIZES), *[1.0] * len(TIMES)]
    lines = [["request", "a", 5, 0.5], step, ["result", 1, ["a"], 3, 1.0, 2.0, 3.0], ["step", 2, *step[2:]]]
    found = table(lines)
    assert len(found) == 1
    assert found["prefill"].dtype == bool and found["prefill"][0]
    assert (found["pieces"][0], found["begin_result"][0], found["ready"][0], found["end_result"][0]) == (3, 1, 2, 3)
    assert len(table([])) == 0


# The command -------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_profile_that_a_replay_reads(tmp_path, capsys, whole):
    path = kept(tmp_path / "r.json.gz", whole)
    assert calibrate(tmp_path, "--from", str(path), "--name", "mine") == 0
    profile = load_profile(tmp_path / "mine.json")
    assert profile.name == "mine" and "made on no GPU" in profile.title
    assert profile.known_host().turn == pytest.approx(TRUE_HOST.turn, rel=0.08)
    assert profile.gemm_flop_per_s == pytest.approx(TRUE.gemm_flop_per_s, rel=0.05)
    assert "calibrate" in profile.sources["host.turn"] and profile.sources["attention.fa3.overlap"] != ""
    said = capsys.readouterr().out
    for row in ("receive", "launch decode", "launch prefill, graphs off", "decode:128,16,2000", "after 0, pat"):
        assert row in said


def test_the_same_recording_gives_the_same_profile(tmp_path, capsys, brief):
    path = kept(tmp_path / "r.json.gz", brief)
    texts = []
    for _ in range(2):
        assert calibrate(tmp_path, "--from", str(path)) == 0
        texts.append((tmp_path / "mine.json").read_bytes())
    assert texts[0] == texts[1] and load_profile(tmp_path / "mine.json").name == "mine"


def test_several_files_are_fitted_as_one(tmp_path, brief):
    parts = [content(server) for server in brief["servers"]]
    paths = [kept(tmp_path / f"{number}.gz", part) for number, part in enumerate(parts)]
    together = Recording.load(paths)
    assert together.content["servers"] == brief["servers"]
    assert fit_host(together, SHAPE.layers)[0] == fit_host(Recording(brief), SHAPE.layers)[0]


def test_recordings_of_different_models_are_refused(tmp_path, capsys, brief):
    paths = [kept(tmp_path / "a.gz", brief), kept(tmp_path / "b.gz", {**brief, "model": {**CONFIG, "head_dim": 64}})]
    assert calibrate(tmp_path, "--from", *map(str, paths)) == 2
    assert "these recordings are of different models" in one_line(capsys)
    assert not (tmp_path / "mine.json").exists()


def one_line(capsys):
    error = capsys.readouterr().err
    assert error.startswith("feather: error: ") and error.count("\n") == 1, error
    return error


def middle(data):
    half = len(data) // 2
    return data[:half] + bytes(64) + data[half + 64 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"not gzip",
        lambda data: data[: len(data) // 2],
        middle,
        lambda data: data[:12] + bytes([255] * 64) + data[76:],
        lambda data: gzip.compress(b"{"),
        lambda data: gzip.compress(b"\xff\xfe"),
        lambda data: gzip.compress(b"[]"),
        lambda data: gzip.compress(b'{"format": "another"}'),
    ],
    ids=["empty", "plain", "half", "middle", "deflate", "json", "bytes", "list", "format"],
)
def test_a_damaged_recording_is_one_line(tmp_path, capsys, brief, damage):
    path = kept(tmp_path / "r.json.gz", brief)
    path.write_bytes(damage(path.read_bytes()))
    assert calibrate(tmp_path, "--from", str(path)) == 2
    assert f"--from {path}: " in one_line(capsys) and not (tmp_path / "mine.json").exists()


def test_a_recording_that_is_not_there_is_one_line(tmp_path, capsys):
    assert calibrate(tmp_path, "--from", str(tmp_path / "none.gz")) == 2
    assert "none.gz: No such file" in one_line(capsys)


def test_a_recording_in_which_nothing_was_measured_is_one_line(tmp_path, capsys):
    """Its time was over when the server was up."""
    empty = content({"setting": PAT._asdict(), "kv_tokens": 700_000, "runs": []})
    assert calibrate(tmp_path, "--from", str(kept(tmp_path / "r.gz", empty))) == 2
    one_line(capsys)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Whoever asks is told of a GPU; a server that was started would be a mistake."""
    monkeypatch.setattr(command, "machine", lambda: {"gpu": "NVIDIA H200", "memory_mib": "143771"})
    monkeypatch.setattr(command, "check_sglang", lambda *given: "0.5.23")

    def started(*given):
        raise AssertionError("a server was started")

    monkeypatch.setattr(recording, "Server", started)


@pytest.mark.parametrize("names", ["fa9", "fa3,fa3", "pat,", "fa3 pat"])
def test_a_mistake_about_the_kernels_is_one_line(tmp_path, capsys, on_a_gpu, names):
    assert calibrate(tmp_path, "--attention", names) == 2
    assert f"--attention {names}: " in one_line(capsys) and not (tmp_path / "mine.json").exists()


def test_without_a_gpu_there_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "machine", lambda: {"gpu": None})
    monkeypatch.setattr(command, "check_sglang", lambda *given: "0.5.23")
    assert calibrate(tmp_path) == 2
    said = one_line(capsys)
    assert "measures a GPU" in said and "--from FILE" in said
    assert not (tmp_path / "mine.json").exists()


MIXTURE = {**CONFIG, "num_experts": 128, "num_experts_per_tok": 8}


@pytest.mark.parametrize(
    ("config", "why"),
    [(MIXTURE, "it has num_experts"), ({"vocab_size": 32000}, "it has no num_hidden_layers")],
    ids=["experts", "sizes"],
)
def test_a_model_that_is_no_dense_decoder_is_one_line(tmp_path, capsys, on_a_gpu, brief, config, why):
    assert calibrate(tmp_path, config=config) == 2
    said = one_line(capsys)
    assert why in said and "dense decoders" in said and not (tmp_path / "mine.json").exists()
    path = kept(tmp_path / "r.gz", {**brief, "model": config})
    assert calibrate(tmp_path, "--from", str(path)) == 2
    assert why in one_line(capsys)


def test_a_profile_that_cannot_be_written_is_found_before_anything_is_measured(tmp_path, capsys, on_a_gpu):
    (tmp_path / "mine.json").mkdir()
    assert calibrate(tmp_path) == 2
    assert "cannot write the profile" in one_line(capsys)


def test_the_first_server_launches_its_prompts_one_kernel_after_the_other():
    settings = command.settings_of("pat, fa3", BASE)
    assert settings == [PAT, FA3] and {one.prefill_attention for one in settings} == {"fa3"}
    assert "--disable-prefill-cuda-graph" in PAT.flags and "--disable-prefill-cuda-graph" not in FA3.flags
    with pytest.raises(FeatherError, match="--attention"):
        command.settings_of("triton", BASE)  # which the profile lacks


def test_the_loads_fit_the_server():
    every, few = loads(700_000, 40_000), loads(20_000, 3000)
    assert {load.case.name for load in few} < {load.case.name for load in every}
    assert all(not load.case.steady or load.case.kv_tokens <= 20_000 for load in few)
    assert max(one.input_length + one.output_length for load in few for one in load.case.trace.requests) < 3000
    assert any(load.held_out for load in every) and any(not load.case.steady for load in few)


def without(made, *path):
    """The same recording, a part of it gone."""
    copy = json.loads(json.dumps(made))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return copy


@pytest.mark.parametrize(
    "path", [("model",), ("servers",), ("machine", "memory_mib"), ("servers", 0, "runs"), ("title",)]
)
def test_a_recording_that_lacks_a_part_is_one_line(tmp_path, capsys, brief, path):
    file = kept(tmp_path / "r.gz", without(brief, *path))
    assert calibrate(tmp_path, "--from", str(file)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"feather: error: --from {file}: not a whole recording") and said.count("\n") == 1
    assert not (tmp_path / "mine.json").exists()


def test_a_profile_takes_nobodys_place_and_has_its_ending(tmp_path, capsys, brief):
    file = kept(tmp_path / "r.json", brief)
    before = file.read_bytes()
    flags = ["calibrate", "--model", folder_of(tmp_path), "--from", str(file), "--out"]
    for out, says in ((file, "is one of the recordings of --from"), (tmp_path / "mine", "must end in .json")):
        assert main([*flags, str(out)]) == 2
        assert says in capsys.readouterr().err
    assert file.read_bytes() == before and not (tmp_path / "mine").exists()


def test_the_ways_that_no_lone_prompt_tells_are_the_bases(brief):
    steady = json.loads(json.dumps(brief))
    for server in steady["servers"]:
        server["runs"] = [run for run in server["runs"] if not run["load"].startswith("open:0,")]
    host, _ = fit_host(Recording(steady), SHAPE.layers, HostTime(hop_in=7e-3, hop_out=8e-3))
    assert (host.hop_in, host.hop_out) == (7e-3, 8e-3)


def test_a_profile_without_a_host_is_refused_before_anything_runs(tmp_path, capsys):
    base = str(Path(__file__).parents[1] / "data" / "h200_base.json")
    for words in (["ab", "--out", str(tmp_path / "out")], ["suite", "--short", "--out", str(tmp_path / "out")]):
        assert main([*words, "--profile", base]) == 2
        assert "has no host times: give --scheduler-cost off, or make one" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
