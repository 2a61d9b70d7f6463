"""``--server-flags`` of a replay without SGLang's parser: flags handed on, taken, refused, or without effect."""

from __future__ import annotations

import argparse

import pytest

from feather_sglang.cli import main
from feather_sglang.compare import ab
from feather_sglang.errors import FeatherError
from feather_sglang.replay import server_flags, train
from feather_sglang.replay.server_flags import ServerFlags, sort_flags, take


def taken(monkeypatch, values, *words):
    """The command's flags after those of a server that change these values were taken."""
    monkeypatch.setattr(server_flags, "_read", lambda words: values)
    parser = argparse.ArgumentParser()
    ab.add_arguments(parser)
    args = parser.parse_args([*words, "--server-flags=--something"])
    return args, take(args, ab.add_arguments)


def test_what_shapes_scheduling_is_handed_on_in_one_spelling_and_order():
    values = {"prefill_decode_interval": 4, "enable_mixed_chunk": True, "radix_eviction_policy_config": {"a": 1}}
    handed = ("--enable-mixed-chunk", "--prefill-decode-interval=4", '--radix-eviction-policy-config={"a": 1}')
    for order in (list(values), list(reversed(values))):
        flags = sort_flags({name: values[name] for name in order})
        assert flags.handed == handed and not flags.notices()
        assert flags.settings() == {"server_flags": list(handed)}
    assert ServerFlags().settings() == {}


@pytest.mark.parametrize(
    ("values", "own"),
    [
        ({"max_total_tokens": 9000, "page_size": 16}, {"kv_tokens": 9000, "page_size": 16}),
        ({"max_running_requests": 64, "chunked_prefill_size": -1}, {"max_running": 64, "chunked_prefill": -1}),
        ({"attention_backend": "fa3"}, {"attention": "fa3"}),
        ({"decode_attention_backend": "pat", "attention_backend": "fa3"}, {"attention": "pat"}),
        ({"disable_prefill_cuda_graph": True}, {"prefill_graphs": "off"}),
        ({"cuda_graph_backend_prefill": "disabled"}, {"prefill_graphs": "off"}),
        ({"feather_gather": False, "feather_max_wait": 9.0}, {"feather_gather": False, "feather_max_wait": 9.0}),
        ({"feather_pace": None}, {"feather_pace": None}),
    ],
)
def test_what_the_replay_has_flags_of_its_own_for_is_taken_as_those(monkeypatch, values, own):
    args, flags = taken(monkeypatch, values)
    assert flags.own == own and {name: getattr(args, name) for name in own} == own
    assert not flags.handed and not flags.without_effect


def test_a_flag_given_twice_with_one_value_is_no_mistake(monkeypatch):
    args, _ = taken(monkeypatch, {"max_total_tokens": 9000}, "--kv-tokens", "9000")
    assert args.kv_tokens == 9000


@pytest.mark.parametrize(
    ("values", "words", "names"),
    [
        ({"max_total_tokens": 9000}, ["--kv-tokens", "8000"], ("--kv-tokens 8000", "9000")),
        ({"attention_backend": "fa3"}, ["--attention", "pat"], ("--attention pat", "fa3")),
        ({"feather_gather": True}, ["--feather-gather", "off"], ("--feather-gather off", "on")),
    ],
)
def test_two_values_for_one_thing_are_one_line(monkeypatch, values, words, names):
    with pytest.raises(FeatherError) as error:
        taken(monkeypatch, values, *words)
    assert all(name in str(error.value) for name in names) and "\n" not in str(error.value)


def test_what_a_command_has_no_flag_for_is_one_line(monkeypatch):
    monkeypatch.setattr(server_flags, "_read", lambda words: {"feather_explore": False})
    with pytest.raises(FeatherError, match="--server-flags: --feather-explore cannot be set here; leave it out"):
        take(argparse.Namespace(server_flags="--something"), train.add_arguments)


def test_what_has_no_effect_is_named_in_one_line():
    values = {"host": "0.0.0.0", "trust_remote_code": True, "mem_fraction_static": 0.9, "dtype": "bfloat16"}
    (line,) = sort_flags(values).notices()
    assert all(flag in line for flag in ("--host", "--trust-remote-code", "--mem-fraction-static", "--dtype"))
    assert "0.9" not in line and "\n" not in line


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("tp_size", 2, "--tp-size=2"),
        ("dp_size", 2, "--dp-size=2"),
        ("pp_size", 2, "--pp-size=2"),
        ("nnodes", 2, "--nnodes=2"),
        ("speculative_algorithm", "EAGLE", "--speculative-algorithm=EAGLE"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode=prefill"),
        ("enable_lora", True, "--enable-lora:"),
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache:"),
        ("quantization", "fp8", "--quantization=fp8"),
        ("kv_cache_dtype", "fp8_e4m3", "--kv-cache-dtype=fp8_e4m3"),
        ("max_queued_requests", 9, "--max-queued-requests=9"),
        ("scheduler_recv_interval", 9, "--scheduler-recv-interval=9"),
        ("disable_cuda_graph", True, "--disable-cuda-graph:"),
        ("schedule_policy", "lpm", "use --policies"),
        ("model_path", "m", "use --model"),
        ("of_the_next_release", 1, "--of-the-next-release=1"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(name, value, says):
    with pytest.raises(FeatherError) as error:
        sort_flags({name: value, "host": "h", "enable_mixed_chunk": True})
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("engine", ["replay", "server"])
def test_words_that_no_shell_takes_are_one_line(tmp_path, capsys, engine):
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    flags = ["--engine", engine, *(["--model", str(tmp_path)] if engine == "server" else [])]
    assert main(["ab", *flags, "--server-flags", "'open", "--out", str(tmp_path / "out")]) == 2
    assert "--server-flags 'open: No closing quotation" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
