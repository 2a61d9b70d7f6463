"""The support matrix agrees with the checks, and the tests that it names exist."""

import ast
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from feather_kernels.build import HEAD_DIMS
from feather_kernels.paths import SHARED_KB
from feather_kernels.tiles import built_tiles
from feather_sglang.adapter.attention import limits, matrix
from feather_sglang.adapter.attention.limits import LayerFacts, ModelFacts
from feather_sglang.adapter.attention.model_file import read_model
from feather_sglang.adapter.refusals import PAT_FLAGS, Limit
from feather_sglang.cli import main
from feather_sglang.errors import FeatherError

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs" / "generators"), str(ROOT / "benchmarks" / "checks")]

from model_names import FAMILIES  # noqa: E402
from model_shapes import SHAPES  # noqa: E402

LAYER = LayerFacts(0, 32, 8, 128, 128, 0.088)


def test_every_test_that_is_named_exists():
    shown = [row[-1] for title, heads, rows in matrix.tables() if heads[-1] == "shown by" for row in rows if row[-1]]
    assert len(shown) > 20
    for text in shown:
        file, _, function = text.partition("[")[0].partition("::")
        if function:
            tree = ast.parse((ROOT / file).read_text())
            assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, text
        else:
            assert (ROOT / re.search(r"\S+\.py", text)[0]).is_file(), text
    assert set(matrix.SUPPORTED) == {
        file.stem.removeprefix("cpu-") for file in (ROOT / "requirements").glob("cpu-*.txt")
    }


def test_a_limit_that_is_added_is_in_the_matrix(monkeypatch):
    limit = Limit("layers of {0.head_dim} on Mondays", lambda layer: layer.head_dim == 128, "Mondays")
    monkeypatch.setattr(matrix, "LAYER_LIMITS", (*matrix.LAYER_LIMITS, limit))
    assert dict(matrix.limit_rows())["Mondays"] not in (None, "refuses the model")
    monkeypatch.setattr(limits, "LAYER_LIMITS", (limit,))
    with pytest.raises(FeatherError, match=r"can pack no layer of this model \(layers of 128 on Mondays\)"):
        matrix.kind_rows()


def test_a_mode_that_the_checks_refuse_is_not_called_served(monkeypatch):
    monkeypatch.setattr(matrix, "PAT_FLAGS", (*PAT_FLAGS, Limit("--tp", lambda args: getattr(args, "tp_size", 1) > 1)))
    with pytest.raises(FeatherError, match="says that tensor parallelism is served, and the checks refuse --tp"):
        matrix.mode_rows()


def test_a_gpu_that_nothing_has_run_on_is_not_called_served():
    rows = {capability: served for capability, served, _ in matrix.gpu_rows()}
    assert rows["9.0"] == "yes" and rows["7.5"] == "no"
    others = {rows[one] for one in ("8.0", "8.6", "8.9", "10.0", "12.0")}
    assert len(others) == 1 and not others & {"yes", "no"}


def test_a_gpu_that_nothing_has_run_on_is_served_only_to_those_who_ask():
    limits.refuse_capability(9, 0)
    for capability in ((8, 0), (8, 9), (12, 0)):
        with pytest.raises(FeatherError, match="--feather-unproven-gpu on"):
            limits.refuse_capability(*capability)
        limits.refuse_capability(*capability, unproven=True)
        assert f"{SHARED_KB[10 * capability[0] + capability[1]]} KB" in limits.what_was_run(*capability)
    with pytest.raises(FeatherError, match=r"this GPU has 7\.5$"):
        limits.refuse_capability(7, 5, unproven=True)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"pool": "DSATokenToKVPool"}, "the KV cache DSATokenToKVPool: choose another"),
        (
            {"pool": "MLATokenToKVPool", "kv_dtype": "float8_e4m3fn"},
            r"latents in float8_e4m3fn \(--kv-cache-dtype: auto\)",
        ),
        (
            {"layers": (replace(LAYER, kv_heads=1, head_dim=288, v_head_dim=256, latent=True),)},
            r"latents of 256 in 288 values",
        ),
        (
            {"pool": "HybridLinearKVPool", "speculative": True},
            "speculative decoding of a model with linear attention: choose another",
        ),
        ({"full_pool": "UnifiedMHATokenToKVPool"}, r"the KV cache UnifiedMHATokenToKVPool \(nhd\)"),
        ({"layout": "hnd"}, r"the KV cache MHATokenToKVPool \(hnd\)"),
        ({"kv_dtype": "float8_e5m2"}, r"float8_e5m2 under a model in bfloat16 \(--kv-cache-dtype: auto or fp8_e4m3\)"),
        ({"attn_cp_size": 2}, "context parallelism"),
        ({"encoder_decoder": True}, "encoder-decoder models"),
        ({"layers": ()}, "no attention layer"),
        ({"layers": (LAYER, replace(LAYER, window=9))}, "several kinds of attention that read the KV of one layer"),
    ],
)
def test_models_that_are_refused(changed, says):
    assert limits.packed_layers(ModelFacts((LAYER,))) == (LAYER,)
    assert limits.packed_layers(ModelFacts((LAYER,), kv_dtype="float8_e4m3fn")) == (LAYER,)
    with pytest.raises(FeatherError, match=says):
        limits.packed_layers(ModelFacts(**{"layers": (LAYER,), **changed}))


@pytest.mark.parametrize(
    "model", [one for models in FAMILIES.values() for one in models if one.run], ids=lambda m: m.run
)
def test_a_configuration_tells_what_the_page_of_models_says(tmp_path, model):
    """Layers may have been left out of the shape that was run, in equal parts."""
    found, expected = read_model(str(SHAPES[model.run].write(tmp_path))), model.facts()
    assert {layer.shape for layer in found.layers} == {layer.shape for layer in expected.layers}
    packed, said = (len(limits.packed_layers(facts)) / len(facts.layers) for facts in (found, expected))
    assert packed == said
    left, expected_left = (set(map(limits.left_to_another, facts.layers)) for facts in (found, expected))
    assert left == expected_left


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_query_heads_to_a_kv_head(head_dim):
    """As many as a tile holds, or as were checked."""
    most = limits.MAX_GROUP[head_dim]
    assert most == {64: 128, 128: 128, 256: 64}[head_dim] <= built_tiles("hopper", head_dim)[-1][0]
    layer = replace(LAYER, q_heads=2 * most, kv_heads=2, head_dim=head_dim, v_head_dim=head_dim)
    assert limits.left_to_another(layer) is None
    wider = replace(layer, q_heads=2 * (most + 1))
    assert limits.left_to_another(wider) == f"more than {most} query heads to a KV head"


@pytest.mark.parametrize("as_json", [False, True])
def test_doctor_prints_it(capsys, as_json):
    assert main(["doctor", "--matrix", *["--json"] * as_json]) == 0
    out = capsys.readouterr().out
    if as_json:
        kinds = json.loads(out)["Model kinds"]
        assert {kind["kind"] for kind in kinds} == {kind.name for kind in matrix.KINDS}
    else:
        lines = out.splitlines()
        for _, heads, rows in matrix.tables():
            assert all(any(all(cell in line for cell in row) for line in lines) for row in (heads, *rows))


def test_a_narrow_terminal_shows_all_of_a_tests_name(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor", "--matrix"]) == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "\u2026" not in out and max(map(len, out.splitlines())) <= 80
