"""Hardware profiles: capacity, sources, and files that are refused."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

import feather_sglang.replay
from feather_sglang.errors import FeatherError
from feather_sglang.replay.model_shape import MODELS, load_model
from feather_sglang.replay.profiles import document_of, list_profiles, load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.simulation.host_time import HostTime

PROFILES = Path(feather_sglang.replay.__file__).parent / "profiles"


def test_capacity_follows_memory_and_model():
    assert load_profile("rtx6000ada").kv_tokens(load_model()) == 199_000  # a 48 GB card with an 8B model
    assert load_profile("h200").kv_tokens(load_model()) > 4 * 199_000
    assert load_profile("h200").kv_tokens(MODELS["qwen2.5-0.5b"]) > 9_000_000


@pytest.mark.parametrize("name", list_profiles())
def test_every_parameter_says_where_it_is_from(name):
    profile = load_profile(name)
    document = json.loads((PROFILES / f"{name}.json").read_text())
    count = len(document["parameters"]) + sum(len(k["parameters"]) for k in document["attention"].values())
    count += len(document["host"])
    assert len(profile.sources) == count and all(len(source) > 10 for source in profile.sources.values())
    # The model must never be fitted to what policies achieve in the end: the paper's chapter 5.
    assert not any("figure 5" in source or "table 5" in source for source in profile.sources.values())


def changed(tmp_path, change):
    document = json.loads((PROFILES / "h200.json").read_text())
    change(document)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document))
    return path


def test_a_profile_of_ones_own_is_read_by_path(tmp_path):
    def faster(document):
        document["name"] = "mine"
        document["parameters"]["step_overhead_s"]["value"] = 0.5

    mine = load_profile(changed(tmp_path, faster))
    assert mine.name == "mine" and mine.step_overhead_s == 0.5
    assert StepTimeModel(mine, load_model()).prefill([1], [0]) > 0.5


def test_prefill_graphs_change_the_hosts_time_and_not_the_gpus():
    profile, shape = load_profile("h200"), load_model("qwen3-8b")
    graphs, eager = StepTimeModel(profile, shape), StepTimeModel(profile, shape, prefill_graphs=False)
    assert graphs.prefill_graphs and not eager.prefill_graphs
    assert graphs.prefill([20], [5000]) == eager.prefill([20], [5000])
    host = profile.known_host()
    (before, few), (same, many) = (host.launch(1, True, shape.layers, on) for on in (True, False))
    assert before == same and few < 0.6 * many


def test_a_prefill_without_graphs_takes_the_host_as_long_as_measured_alone():
    """SGLang's benchmark of one batch, which has no scheduler: kernels that are launched one by one, and no queue."""
    profile, shape = load_profile("h200"), load_model("qwen3-8b")
    steps = json.loads((Path(__file__).parents[1] / "data" / "h200_steps.json").read_text())["whole_steps"]
    shortest = min(step["prefill_us"] for step in steps) * 1e-6
    launch = sum(profile.known_host().launch(1, True, shape.layers, False))
    assert shortest <= launch < 4 * shortest  # a server's thread shares its interpreter with others


def test_a_profile_without_a_host_is_read_and_replays_without_one_only(tmp_path):
    mine = load_profile(changed(tmp_path, lambda document: document.pop("host")))
    assert mine.host is None and StepTimeModel(mine, load_model()).prefill([20], [0]) > 0
    says = rf"^profile {mine.name} has no host times: give --scheduler-cost off, or make one with feather calibrate$"
    with pytest.raises(FeatherError, match=says):
        mine.known_host()
    assert load_profile("h200").known_host() == load_profile("h200").host


def test_what_was_fitted_is_written_with_its_source_and_read_back(tmp_path):
    base = load_profile("h200")
    fa3 = replace(base.attention["fa3"], byte_s=3e-11)
    host = HostTime(turn=1e-4, eager_layer=0.001)
    fitted = replace(base, gemm_flop_per_s=6e14, attention={**base.attention, "fa3": fa3}, host=host)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document_of(base, fitted, "mine", "a GPU", "fit to what I measured")))
    read = load_profile(path)
    assert (read.name, read.title, read.host) == ("mine", "a GPU", host)
    assert read.gemm_flop_per_s == 6e14 and read.attention["fa3"].byte_s == 3e-11
    assert replace(read, name=base.name, title=base.title, sources=base.sources) == fitted
    theirs = {key for key, source in read.sources.items() if source == "fit to what I measured"}
    hosts = {f"host.{field.name}" for field in fields(HostTime)}  # each differs from the base's
    assert theirs == {"parameters.gemm_flop_per_s", "attention.fa3.byte_s"} | hosts
    assert read.sources["attention.pat.part_s"] == base.sources["attention.pat.part_s"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d.pop("format"), "not a hardware profile"),
        (lambda d: d.update(version=9), "version is 9"),
        (lambda d: d.update(name=None), "name and title must be strings"),
        (lambda d: d["parameters"].pop("memory_bytes"), "parameters.memory_bytes: missing"),
        (lambda d: d["parameters"].update(speed=1), "parameters: no such parameter: 'speed'"),
        (lambda d: d["host"].pop("turn"), "host.turn: missing, or not an object"),
        (lambda d: d["host"].update(lunch={}), "host: no such parameter: 'lunch'"),
        (lambda d: d["host"]["turn"].update(value=-1e-6), "host.turn.value: must be a finite number of at least 0"),
        (lambda d: d["host"]["turn"].pop("source"), "host.turn.source: must say"),
        (lambda d: d.update(host=[]), "host: must be an object"),
        (lambda d: d["parameters"]["memory_bytes"].update(value=-1), "parameters.memory_bytes.value: must be"),
        (lambda d: d["parameters"]["memory_bytes"].update(value=float("nan")), "memory_bytes.value: must be"),
        (lambda d: d["parameters"]["memory_bytes"].update(value=True), "memory_bytes.value: must be"),
        (lambda d: d["parameters"]["memory_bytes"].update(value=10**400), "memory_bytes.value: must be"),
        (lambda d: d["parameters"]["memory_share"].update(value=2), "memory_share.value: must be"),
        (lambda d: d["parameters"]["gemm_flop_per_s"].update(value=1e-300), "gemm_flop_per_s.value: must be"),
        (lambda d: d["parameters"]["products_overlap"].update(value=5000), "products_overlap.value: must be"),
        (lambda d: d["attention"]["fa3"]["parameters"]["overlap"].update(value=1e-9), "fa3.overlap.value: must be"),
        (lambda d: d.update(name="\ud800"), "name and title must be strings"),
        (lambda d: d.update(title="two\nlines"), "name and title must be strings"),
        (lambda d: d["attention"].update({"a\nb": d["attention"]["fa3"]}), "names of kernels"),
        (lambda d: d["parameters"]["memory_bytes"].update(value=[1]), "memory_bytes.value: must be"),
        (lambda d: d["parameters"]["memory_bytes"].update(source=1), "memory_bytes.source: must say"),
        (lambda d: d["parameters"]["memory_bytes"].update(source=" "), "memory_bytes.source: must say"),
        (lambda d: d["parameters"]["copy_bytes_per_s"].update(value=0), "copy_bytes_per_s.value: must be"),
        (lambda d: d.update(attention={}), "attention: must be"),
        (lambda d: d["attention"]["fa3"].update(kind="magic"), "attention.fa3.kind: must be one of"),
        (lambda d: d["attention"]["fa3"].update(kind=[]), "attention.fa3.kind: must be one of"),
        (lambda d: d["attention"]["fa3"]["parameters"].pop("overlap"), "attention.fa3.overlap: missing"),
        (lambda d: d["attention"]["fa3"]["parameters"]["overlap"].update(value=0), "fa3.overlap.value: must be"),
    ],
)
def test_a_damaged_profile_is_refused_in_one_line(tmp_path, change, reason):
    path = changed(tmp_path, change)
    with pytest.raises(FeatherError) as caught:
        load_profile(path)
    assert reason in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("extreme", [1e-18, 1e21, 1e13, 32, 0.1])
def test_every_value_that_is_allowed_gives_times(tmp_path, extreme):
    """Whatever one parameter of a profile is, a step takes a finite time."""
    model, parameters = load_model("qwen3-8b"), json.loads(changed(tmp_path, lambda d: None).read_text())["parameters"]
    for name in parameters:
        path = changed(tmp_path, lambda d, name=name: d["parameters"][name].update(value=extreme))
        try:
            profile = load_profile(path)
        except FeatherError:
            continue
        step = StepTimeModel(profile, model, "fa3").prefill([100, 2000], [0, 500])
        assert 0 <= step < float("inf")


def test_what_is_no_profile_is_refused(tmp_path):
    (tmp_path / "text.json").write_text("not json")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(FeatherError, match="choose from h200, rtx6000ada, or give"):
        load_profile("a100")
    for name in ("text.json", "list.json", "deep.json", "none.json"):
        with pytest.raises(FeatherError, match=name):
            load_profile(tmp_path / name)
