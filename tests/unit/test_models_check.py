"""The GPU check of models without a server: its shapes, its prompts, and the answers that it calls wrong."""

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "checks"))

import check_models as check
import model_shapes
import pat_compare
from pat_compare import Answer

from feather_sglang.adapter.attention import matrix
from feather_sglang.compare.server.process import ServerFailed


def test_shapes_are_of_kinds_that_the_matrix_knows(tmp_path):
    assert {name: shape.kind for name, shape in model_shapes.SHAPES.items()} == {
        name: kind.name for kind in matrix.KINDS for name in kind.gpu_shapes
    }
    for name, shape in model_shapes.SHAPES.items():
        config = json.loads((shape.write(tmp_path / name) / "config.json").read_text())
        text = config.get("text_config", config)
        assert text["vocab_size"] == model_shapes.VOCABULARY
        usual = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        dim = text["kv_lora_rank"] + text["qk_rope_head_dim"] if shape.kind == "latent" else usual
        assert dim in (64, 128, 256, 576) and shape.stock[0] in ("fa3", "triton", "flashinfer")
        assert len(text.get("layer_types", [])) in (0, text["num_hidden_layers"])


def test_prompts_share_prefixes_of_two_lengths():
    made = list(check.prompts().values())
    shared = {pat_compare.common(a, b) for a in made for b in made if a is not b}
    assert {0, 701, 1002} <= shared and len({tuple(prompt) for prompt in made}) == 24


BACKEND_FLAGS = ("--attention-backend", "--decode-attention-backend")


class Servers(check.ShapeCheck):
    """Servers that answer and decode as they are told."""

    def __init__(self, options, logs, rates, answers, down=()):
        super().__init__("llama-3.2-1b", model_shapes.SHAPES["llama-3.2-1b"], options, logs, 100.0)
        self.rates, self.answers, self.down = rates, answers, down

    def launch(self, backend, folder):
        return FakeServer(backend, backend in self.down)

    def ask(self, server, together=True):
        return self.answers[server.name]

    def measured(self, server, backend, case):
        server.counted(case)
        return [self.rates[backend]] if backend in self.rates else []


class FakeServer:
    start_seconds = 1.0

    def __init__(self, name, down):
        self.name, self.down, self.metrics = name, down, {"attended_tokens": 0.0, "read_tokens": 0.0}

    def wait(self, deadline):
        if self.down:
            raise ServerFailed("the server ended with status 1")

    def counted(self, case):
        self.metrics = {"attended_tokens": self.metrics["attended_tokens"] + 100, "read_tokens": 20.0}

    max_running, kv_tokens = 40, 9000

    def flush(self): ...

    def stop(self): ...

    def tail(self, lines):
        return ["out of memory"]


def answers(shift=0.0, token=5):
    return {
        name: Answer((token, i), (-0.5 + shift, -0.5), ({token: -0.5, 9: -2.0}, {i: -0.5, 9: -2.0}))
        for i, name in enumerate(check.prompts())
    }


GOOD = {"fa3": answers(), "triton": answers(0.05), "pat": answers(0.06)}
RATES = {"fa3": 100.0, "triton": 90.0, "pat": 99.0}


@pytest.fixture
def row(tmp_path, monkeypatch):
    monkeypatch.setattr(check.metadata, "entry_points", lambda group: [type("Point", (), {"name": "feather"})])
    monkeypatch.setattr(check, "read_metrics", lambda server: server.metrics)
    options = check.arguments(["--repeat", "1"])

    def make(rates=RATES, given=GOOD, down=()):
        one = Servers(options, tmp_path, rates, given, down)
        one.start()
        one.wait()
        return check.judged(one.run(), 0.02)

    return make


def test_a_right_backend_is_right(row):
    found = row()
    assert not found["problems"] and not found["left_out"] and found["between"] == "fa3 and triton"
    assert check.ratio(found, "private") == pytest.approx(0.99) and found["read"]["shared"] == pytest.approx(0.2)
    assert "right" in check.table([found]) and "0.990x" in check.table([found])


def test_other_stock_backends_are_compared_with(monkeypatch):
    monkeypatch.setattr(check.metadata, "entry_points", lambda group: [type("Point", (), {"name": "feather"})])
    own, named = check.arguments([]), check.arguments(["--stock", "triton,flashinfer"])
    assert check.shape_of(own, "gemma-3-4b") is check.SHAPES["gemma-3-4b"]
    shape = check.shape_of(named, "gemma-3-4b")
    assert (shape.stock, shape.spread) == (("triton", "flashinfer"), ()) and shape.kind == "windows"


def test_other_tokens_and_logprobs_are_wrong(row):
    assert any("another token" in problem for problem in row(given={**GOOD, "pat": answers(token=6)})["problems"])
    assert any("largest difference 0.2" in problem for problem in row(given={**GOOD, "pat": answers(0.2)})["problems"])


def test_a_slow_backend_is_wrong(row):
    assert row(RATES | {"pat": 97.0})["problems"] == ["without sharing 0.970 of the best stock backend's tokens/s"]


def test_a_client_that_is_held_up_once_does_not_count(tmp_path, monkeypatch):
    """It sees twice the tokens in half the time; of four repeats the second smallest counts."""
    monkeypatch.setattr(check, "read_metrics", lambda server: server.metrics)
    monkeypatch.setattr(check.metadata, "entry_points", lambda group: [type("Point", (), {"name": "feather"})])
    one = Servers(check.arguments(["--repeat", "4"]), tmp_path, RATES, GOOD)
    seen = iter(range(100))
    one.measured = lambda server, backend, case: [RATES[backend] * (1 + (next(seen) % 12 == 1))]
    one.start()
    one.wait()
    one.time(one.up)
    assert one.row["tok_s"] == {"shared": RATES, "private": RATES}
    assert max(map(max, one.row["all_tok_s"]["private"].values())) == 180


def test_a_batch_that_never_ran_is_said(row):
    problems = row({"fa3": 100.0, "triton": 90.0})["problems"]
    assert "private: pat never ran all 64 requests at once; it says that it runs 40, with 9000 KV tokens" in problems


def test_answers_that_are_all_the_same_show_nothing(row):
    same = {name: dict.fromkeys(answers(), next(iter(answers().values()))) for name in GOOD}
    assert any("nothing is shown" in problem for problem in row(given=same)["problems"])


def test_a_server_that_does_not_come_up_is_left_out(row, capsys, monkeypatch):
    found = row(given=GOOD | {"pat": answers()}, down=("triton",))
    assert not found["problems"] and found["left_out"] == {"triton": "the server ended with status 1"}
    assert found["between"] == "fa3 at once and one by one" and "out of memory" in capsys.readouterr().out
    monkeypatch.setattr(FakeServer, "tail", lambda server, lines: ["x", "ImportError: no hpc here ", "[rank 0] ended"])
    left_out = row(given=GOOD, down=("triton",))["left_out"]
    assert left_out == {"triton": "the server ended with status 1: ImportError: no hpc here"}
    found = row(down=("pat",))
    assert "answers" not in found and math.isnan(check.ratio(found, "private"))
    assert "not run" in check.table([found])


def test_answers_that_repeat_their_prompts_last_token_show_nothing(row):
    stuck = {name: one._replace(tokens=one.tokens[:1] * len(one.tokens)) for name, one in answers().items()}
    problems = row(given=dict.fromkeys(GOOD, stuck))["problems"]
    assert any("one token over and over: nothing is shown" in problem for problem in problems)


def test_a_model_of_short_steps_decodes_for_longer_than_its_servers_pause(monkeypatch):
    monkeypatch.setattr(check.metadata, "entry_points", lambda group: [type("Point", (), {"name": "feather"})])
    options = check.arguments([])
    tokens = {
        name: {
            request.output_length for case in check.cases_of(options, shape).values() for request in case.trace.requests
        }
        for name, shape in check.SHAPES.items()
    }
    assert tokens.pop("llama-3.2-1b") == {1200} and all(found == {192} for found in tokens.values())


@pytest.mark.parametrize("stock", ["fa3,triton,trtllm_mha,hpc_ops", "hpc_ops,fa3,trtllm_mha,triton"])
def test_a_backend_that_only_decodes_prefills_as_pat_does(monkeypatch, tmp_path, stock):
    monkeypatch.setattr(check, "Server", lambda configuration, *arguments, **others: configuration.flags)
    monkeypatch.setattr(check.metadata, "entry_points", lambda group: [type("Point", (), {"name": "feather"})])
    options = check.arguments(["--shapes", "qwen2.5-7b", "--stock", stock])
    one = check.ShapeCheck("qwen2.5-7b", check.shape_of(options, "qwen2.5-7b"), options, tmp_path, 9.0)
    one.start()
    backends = {
        name: [flags[flags.index(flag) + 1] if flag in flags else None for flag in BACKEND_FLAGS]
        for name, flags in one.servers.items()
    }
    assert backends == {
        "fa3": ["fa3", None], "triton": ["triton", None],
        **{name: ["fa3", name] for name in ("trtllm_mha", "hpc_ops", "pat")},
    }  # fmt: skip


def test_somebody_must_prefill(capsys):
    with pytest.raises(SystemExit):
        check.arguments(["--stock", "trtllm_mha,hpc_ops"])
    assert "--stock trtllm_mha,hpc_ops: name one that prefills, too" in capsys.readouterr().err
