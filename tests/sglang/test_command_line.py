"""How the command line of SGLang's servers takes the policies and the flags, and refuses them.

It is parsed as ``python -m sglang.launch_server`` does it, by the same two calls: ``load_plugins``, then
``prepare_server_args``. What happens without the plugin is seen in test_scheduler.py, in a process of its own.
"""

import json
from types import SimpleNamespace

import pytest
from harness import CONFIG
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from feather_sglang.adapter import plugin
from feather_sglang.adapter.options import VARIABLE, FeatherOptions, has_flag
from feather_sglang.adapter.refusals import PAT_FLAGS, POLICY_FLAGS, resolved


@pytest.fixture
def refused(capsys):
    """Parse flags that end start-up; returns the exit status, what was printed, and what was printed as an error."""
    load_plugins()

    def parse(*flags):
        with pytest.raises(SystemExit) as ended:
            prepare_server_args(["--model-path", "/no/such/model", *flags])
        return ended.value.code, *capsys.readouterr()

    return parse


def test_help_lists_the_policies_and_flags(refused):
    status, shown, _ = refused("--help")
    assert status == 0
    for word in ("feather-heuristic", "feather-order", "--feather-policy-file", "--feather-max-wait", "--feather-pace"):
        assert word in shown


def test_a_bad_flag_ends_start_up_with_one_line(refused):
    status, _, error = refused("--schedule-policy", "feather", "--feather-max-wait", "-1")
    assert status == 2
    assert "error: --feather-max-wait '-1': expected seconds, 0 or more" in error


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--attention-backend", "pat", "--decode-attention-backend", "triton"), "drop one of the two"),
        (("--attention-backend", "pat", "--decode-attention-backend", "fa3"), "pat decodes only"),
    ],
)
def test_backends_that_contradict_each_other_end_start_up_with_one_line(flags, says):
    load_plugins()
    with pytest.raises(SystemExit) as ended:
        prepare_server_args(["--model-path", "/no/such/model", *flags]).resolve_once()  # once made, in older releases
    line = str(ended.value)  # Python prints it, and gives status 1
    assert line.startswith("feather: error: --attention-backend pat") and says in line and "\n" not in line


@pytest.mark.parametrize("backend", ["--attention-backend", "--decode-attention-backend"])
def test_one_variable_turns_off_what_the_flags_name(monkeypatch, tmp_path, backend):
    monkeypatch.setenv("FEATHER_DISABLE", "1")
    monkeypatch.setenv(VARIABLE, "")
    load_plugins()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    damaged = tmp_path / "policy.json"
    damaged.write_text("{")
    args = prepare_server_args([
        *("--model-path", str(tmp_path), "--device", "cpu", "--skip-tokenizer-init", "--load-format", "dummy"),
        *("--schedule-policy", "feather", "--feather-policy-file", str(damaged), "--feather-allow-switch"),
        *(backend, "pat", "--feather-pat-prefill", "on", "--prefill-attention-backend", "torch_native"),
    ])  # fmt: skip
    getattr(args, "resolve_once", dict)()  # since 0.5.21
    args.check_server_args()
    assert args.schedule_policy == resolved(args, "schedule_policy") == "fcfs"
    assert "pat" not in {resolved(args, "attention_backend"), resolved(args, "decode_attention_backend")}


# SGLang's --config -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        *((f"feather-gather: {word}", "gather", False) for word in ("off", "Off", "false", "no", "'off'", "'False'")),
        *((f"feather-row-order: {word}", "row_order", True) for word in ("on", "true", "Yes", "'on'", "'TRUE'")),
        *((f"feather-explore: {word}", "explore", False) for word in ("off", "false")),
        *((f"feather-allow-switch: {word}", "allow_switch", True) for word in ("true", "on", "'on'")),
        ("feather-allow-switch: false", "allow_switch", False),
        ("feather-max-wait: 2.5", "max_wait", 2.5),
        ("feather-max-overtaking: .inf", "max_overtaking", float("inf")),
        ("feather-max-wait: '3'", "max_wait", 3.0),
        ("feather-pace: auto", "pace", None),
        ("feather-pace: null", "pace", None),
        ("feather-pace: 0", "pace", 0.0),
        ("feather-tbt: 250", "tbt", 250.0),
        ("feather-tbt: null", "tbt", None),
        ("feather-slo: ttft=2,tbt=50", "slo", "ttft=2,tbt=50"),
        ("feather-slo: null", "slo", None),
        ("feather-policy-file:", "policy_file", None),
        ("feather-pat-beside: triton", "pat_beside", "triton"),
        ("feather-pat-beside:", "pat_beside", None),
        ("feather-pat-prefill: on", "pat_prefill", "on"),
        ("feather-pat-prefill: auto", "pat_prefill", "auto"),
        ("feather-pat-prefill: off", "pat_prefill", "off"),
        ("feather-unproven-gpu: on", "unproven_gpu", True),
        ("feather-record-trace: /tmp", "record_trace", "/tmp"),
        ("feather-record-trace:", "record_trace", None),
    ],
)
def test_every_flag_works_from_a_config_file(monkeypatch, tmp_path, line, name, value):
    monkeypatch.setenv(VARIABLE, json.dumps({"pace": 0.5}) if name == "pace" else "")
    load_plugins()
    file = tmp_path / "server.yaml"
    file.write_text(f"device: cpu\n{line}\n")
    with pytest.raises(Exception, match=r"no/such/model|no such|does not exist|Repo id|resolve"):
        # Flags are parsed before the model is looked for, which there is none of.
        prepare_server_args(["--config", str(file), "--model-path", "/no/such/model"]).resolve_once()
        raise ValueError("no such model")
    assert getattr(FeatherOptions.from_environment(), name) == value


def test_every_option_with_a_flag_is_among_them():
    (mark,) = test_every_flag_works_from_a_config_file.pytestmark
    assert {case[1] for case in mark.args[1]} == set(filter(has_flag, FeatherOptions.__dataclass_fields__))


def test_a_mistake_in_a_config_file_ends_start_up_with_one_line(refused, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("feather-gather: maybe\n")
    status, _, error = refused("--config", str(file))
    assert status == 2 and "error: --feather-gather 'maybe': expected on or off" in error


# What flags alone tell -------------------------------------------------------------------------------------------


def arguments(**changed):
    """Of a server, as SGLang hands them to its own check."""
    plain = dict.fromkeys(
        ("enable_dp_attention", "disable_radix_cache", "enable_mixed_chunk", "enable_two_batch_overlap",
         "enable_pdmux", "enable_hisparse", "enable_deterministic_inference", "enable_priority_scheduling"), False,
    )  # fmt: skip
    plain |= {"schedule_policy": "fcfs", "attention_backend": None, "decode_attention_backend": None, "pp_size": 1}
    plain |= {"device": "cuda", "disaggregation_mode": "null", "speculative_algorithm": None, "dllm_algorithm": None}
    return SimpleNamespace(**(plain | changed))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"schedule_policy": "feather", "disable_radix_cache": True}, "does not support --disable-radix-cache"),
        ({"schedule_policy": "feather", "pp_size": 2}, "does not support --pp-size above 1"),
        ({"schedule_policy": "feather", "disaggregation_mode": "decode"}, "does not support --disaggregation-mode;"),
        ({"schedule_policy": "feather", "dllm_algorithm": "LowConfidence"}, "does not support --dllm-algorithm;"),
        (
            {"schedule_policy": "feather", "enable_dp_attention": True, "attn_cp_size": 2},
            "does not support data-parallel attention with --attn-cp-size above 1;",
        ),
        (
            {"schedule_policy": "feather", "attn_cp_size": 2, "_resolved_overrides": [("sglang", {"attn_dp_size": 2})]},
            "does not support data-parallel attention with --attn-cp-size above 1;",
        ),
        (
            {"schedule_policy": "feather", "speculative_algorithm": "DFLASH"},
            "does not support --speculative-algorithm DFLASH",
        ),
        ({"decode_attention_backend": "pat", "device": "cpu"}, "needs an NVIDIA GPU"),
        ({"decode_attention_backend": "pat", "enable_pdmux": True}, "does not support --enable-pdmux"),
        ({"decode_attention_backend": "pat", "pp_size": 2}, "does not support --pp-size above 1;"),
        ({"decode_attention_backend": "pat", "disaggregation_mode": "decode"}, "support --disaggregation-mode; drop"),
        ({"decode_attention_backend": "pat", "dllm_algorithm": "x"}, "does not support --dllm-algorithm;"),
        ({"decode_attention_backend": "pat", "enable_two_batch_overlap": True}, "support --enable-two-batch-overlap;"),
        ({"decode_attention_backend": "pat", "enable_hisparse": True}, "does not support --enable-hisparse;"),
        (
            {"attention_backend": "pat", "enable_deterministic_inference": True},
            "--enable-deterministic-inference",
        ),
        (
            {"decode_attention_backend": "pat", "enable_dp_attention": True, "speculative_algorithm": "EAGLE"},
            "does not support data-parallel attention with speculative decoding;",
        ),
        (
            {"attention_backend": "pat", "attn_dp_size": 2, "speculative_algorithm": "EAGLE"},
            "does not support data-parallel attention with speculative decoding;",
        ),
        (
            {"attention_backend": "pat", "speculative_algorithm": "EAGLE", "enable_multi_layer_eagle": True},
            "does not support --enable-multi-layer-eagle;",
        ),
        ({"attention_backend": "pat", "enable_page_major_kv_layout": True}, "support --enable-page-major-kv-layout;"),
        (
            {"decode_attention_backend": "pat", "enable_unified_memory": True, "enable_page_major_kv_layout": True},
            "does not support --enable-unified-memory;",  # which has set the other
        ),
        (
            {"decode_attention_backend": "pat", "speculative_algorithm": "DFLASH"},
            "does not support --speculative-algorithm DFLASH;",
        ),
        (  # as SGLang calls it where the draft model is one of Gemma 4's assistants
            {
                "decode_attention_backend": "pat",
                "speculative_algorithm": "NEXTN",
                "_resolved_overrides": [("sglang", {"speculative_algorithm": "FROZEN_KV_MTP"})],
            },
            "does not support --speculative-algorithm FROZEN_KV_MTP;",
        ),
        (
            {"decode_attention_backend": "pat", "speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4},
            "does not support trees of drafts; give --speculative-eagle-topk 1 or choose another --decode-",
        ),
        (
            {"attention_backend": "pat", "speculative_algorithm": "ngram", "speculative_ngram_max_bfs_breadth": 10},
            "does not support trees of n-grams; give --speculative-ngram-max-bfs-breadth 1 or choose another --decode-",
        ),
        (
            {"decode_attention_backend": "pat", "speculative_algorithm": "EAGLE3", "speculative_adaptive": True},
            "does not support --speculative-adaptive;",
        ),
    ],
)
def test_what_flags_alone_tell_is_refused_before_sglang_checks_them(monkeypatch, changed, says):
    """That is before a model is loaded: SGLang's own check is not reached."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv("FEATHER_PAT_REFERENCE", raising=False)
    monkeypatch.setattr("feather_sglang.adapter.failures._command_line", True)
    with pytest.raises(SystemExit) as ended:
        plugin.check_server_args(lambda args: pytest.fail("SGLang went on"), arguments(**changed))
    assert str(ended.value).startswith("feather: error: ") and says in str(ended.value)


@pytest.mark.parametrize("backend", ["fa3", "pat"])
def test_prefill_by_pat_needs_pat_without_prefill_graphs(monkeypatch, backend):
    monkeypatch.setenv(VARIABLE, '{"pat_prefill": true}')
    monkeypatch.setattr("feather_sglang.adapter.failures._command_line", True)
    says = {"fa3": "give --decode-attention-backend pat, too", "pat": "add --disable-prefill-cuda-graph or"}[backend]
    for graphs in ("breakable", "disabled"):
        config = SimpleNamespace(prefill=SimpleNamespace(backend=graphs))
        args = arguments(decode_attention_backend=backend, cuda_graph_config=config)
        if (backend, graphs) == ("pat", "disabled"):
            assert plugin.check_server_args(lambda args: "checked", args) == "checked"
        else:
            with pytest.raises(SystemExit, match=says):
                plugin.check_server_args(lambda args: pytest.fail("SGLang went on"), args)
    args = arguments(decode_attention_backend="pat", enable_dp_attention=True)
    with pytest.raises(SystemExit, match="pat backend does not support --feather-pat-prefill under data-parallel"):
        plugin.check_server_args(lambda args: pytest.fail("SGLang went on"), args)


def test_every_row_of_the_tables_is_among_them():
    """But for those of an option, which are above."""
    (mark,) = test_what_flags_alone_tell_is_refused_before_sglang_checks_them.pytestmark
    refused = {PAT_FLAGS: set(), POLICY_FLAGS: set()}
    for changed, _ in mark.args[1]:
        table = POLICY_FLAGS if "schedule_policy" in changed else PAT_FLAGS
        refused[table] |= {limit.title for limit in table if limit.holds(arguments(**changed))}
    for table, titles in refused.items():
        assert titles == {limit.title for limit in table if "--feather-" not in limit.title}


def test_other_flags_are_left_to_sglang(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    chains = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}
    passed = (
        arguments(schedule_policy="feather"), arguments(disable_radix_cache=True), arguments(device="cpu"),
        arguments(decode_attention_backend="pat", **chains), arguments(schedule_policy="feather", attn_dp_size=2),
        arguments(decode_attention_backend="pat", enable_dp_attention=True, schedule_policy="feather"),
        arguments(decode_attention_backend="pat", _resolved_overrides=[("sglang", chains)]),
    )  # fmt: skip
    assert [plugin.check_server_args(lambda args: "checked", args) for args in passed] == ["checked"] * 7
