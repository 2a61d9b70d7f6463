"""Prefill by pat in the real scheduler, with the NumPy reference in the kernel's place."""

import itertools
import json
from types import SimpleNamespace

import drafting
import numpy as np
import pytest
from harness import OverlapServer
from plain_attention import PlainAttention
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from test_model_kinds import KINDS, N_GRAMS, assert_same, environment, runner_of, server  # noqa: F401

from feather_kernels.plan import Planner
from feather_sglang.adapter import failures
from feather_sglang.adapter.attention.packed_prefill import backend as pat_prefill
from feather_sglang.adapter.attention.packed_prefill.metrics import counters
from feather_sglang.adapter.hooks import installed_version, lacks_pages
from feather_sglang.adapter.options import VARIABLE
from feather_sglang.attention.packed_prefill.gain import PrefillGain
from feather_sglang.errors import FeatherError


@pytest.fixture
def packed(server, monkeypatch):  # noqa: F811
    """Makes servers whose prefill is packed, too."""

    def make(name="dense", chosen=True, **overrides):
        with monkeypatch.context() as patch:
            patch.setenv(VARIABLE, json.dumps({"pat_prefill": chosen}))
            one = server(name, "pat", **overrides)
        assert hasattr(runner_of(one), "feather_prefill")
        return one

    return make


def serve(server, prefix=130):  # noqa: F811
    """Tokens and logprobs of requests that meet cached prefixes together, in three groups, at different times."""
    rng = np.random.default_rng(0)
    for group in range(3):
        assert server.submit(f"p{group}", rng.integers(2, 500, prefix).tolist(), max_new_tokens=3, logprobs=1)
    server.drain()
    prefixes = [[*req.origin_input_ids, *req.output_ids] for req in server.requests.values()]
    prompts = [prefixes[i % 3] + rng.integers(2, 500, 5 + (7 * i) % 41).tolist() for i in range(15)]
    prompts += [prompts[4], prompts[4] + prompts[5], prompts[4][:100], [5, 6, 7]]
    for i, prompt in enumerate(prompts):
        assert server.submit(f"r{i:02}", prompt, max_new_tokens=3 + (5 * i) % 13, logprobs=1)
        if i in (7, 8, 12):
            server.step()
    server.drain()
    return {
        rid: (list(req.output_ids), list(getattr(req, "logprob", req).output_token_logprobs_val))
        for rid, req in server.requests.items()
    }


def counts():
    """Packed steps, those left to SGLang's backend, and tokens attended to and read by packed ones."""
    return np.array([counters()[name]._value.get() for name in ("packed", "left", "attended", "read")])


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"page_size": 16},
        {"policy": "feather"},
        {"chunked_prefill_size": 64},
        {"chunked_prefill_size": 64, "enable_mixed_chunk": True},
        {"disable_radix_cache": True},
        {"kind": OverlapServer},
        {"kind": OverlapServer, "chunked_prefill_size": 64, "enable_mixed_chunk": True},
    ],
    ids=lambda overrides: "-".join(getattr(key, "__name__", str(key)) for key in overrides) or "plain",
)
def test_the_tokens_of_torch_native_from_fewer_reads(server, packed, overrides):  # noqa: F811
    if overrides.get("page_size") and lacks_pages(installed_version()):
        pytest.skip("this SGLang allocates pages with a GPU kernel")
    expected = serve(server("dense", stock="torch_native"))
    before = counts()
    assert_same(serve(packed(**overrides)), expected)
    steps, left, attended, read = counts() - before
    assert steps > 3 and not left
    assert read < (0.8 if overrides.get("disable_radix_cache") else 0.4) * attended


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("dense", "latent")])
def test_models_whose_layers_differ(server, packed, name):  # noqa: F811
    """Other layers prefill with SGLang's backend in the same step."""
    prefix = KINDS[name].prefix
    expected = serve(server(name), prefix)
    before = counts()
    assert_same(serve(packed(name), prefix), expected)
    steps, left, attended, read = counts() - before
    assert steps > 3 and not left and read < 0.4 * attended


@pytest.mark.parametrize(
    "overrides", [{}, {"chunked_prefill_size": 64, "enable_mixed_chunk": True}, {"page_size": 16}], ids=str
)
@pytest.mark.parametrize(
    ("name", "core"), [("dense", None), ("dense", "python"), ("window pool", None), ("linear", None)]
)
def test_the_radix_tree_knows_what_slots_are_shared(packed, monkeypatch, name, core, overrides):
    """Of two requests that prefill together, by the tree and by their slots."""
    if core:  # else SGLang's own choice
        monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", core)
    if overrides.get("page_size") and (name == "linear" or lacks_pages(installed_version())):
        pytest.skip("SGLang has pages of several tokens here on a GPU only")
    one = packed(name, **overrides)
    flat, known, there = runner_of(one).req_to_token_pool.req_to_token.view(-1), [], []

    def look(paths, committed, row_offset, original=pat_prefill.forest_of_paths):
        forest = original(paths, committed, row_offset)
        for i, j in itertools.combinations(range(len(paths)), 2):
            most = int(min(committed[i], committed[j]))
            mine, theirs = (flat[int(row_offset[k]) : int(row_offset[k]) + most].numpy() for k in (i, j))
            there.append(int((mine == theirs).cumprod().sum()))
            known.append(shared_by(forest, i, j))
        return forest

    def both_ways(tree, requests, original=pat_prefill.cached_paths):
        """As trees say it themselves, and node by node, as older ones are read."""
        said = original(tree, requests)
        if core == "python":
            walked = original(NodeByNode(tree), requests)
            assert [[end for _, end in path] for path in said] == [[end for _, end in path] for path in walked]
        return said

    monkeypatch.setattr(pat_prefill, "forest_of_paths", look)
    monkeypatch.setattr(pat_prefill, "cached_paths", both_ways)
    serve(one)
    assert known == there and np.count_nonzero(known) > 5


class NodeByNode:
    """A radix tree without a fast lookup, so that its nodes are read one by one."""

    def __init__(self, tree):
        self.resolve_node_handle = tree.resolve_node_handle


def shared_by(forest, i, j):
    """Tokens at the beginning of two requests that one node or several cover."""
    ends = [set(), set()]
    for found, request in zip(ends, (i, j), strict=True):
        node = int(forest.request_node[request])
        while node >= 0:
            found.add((node, int(forest.node_end[node])))
            node = int(forest.parent[node])
    return max((end for _, end in ends[0] & ends[1]), default=0)


def test_auto_packs_what_it_predicts_to_gain_by(server, packed, monkeypatch, caplog):  # noqa: F811
    caplog.set_level("INFO")
    expected, before = serve(server("dense")), counts()
    one, declined = packed(chosen="auto"), counters()["declined"]._value
    was = declined.get()
    with monkeypatch.context() as patch:
        patch.setattr(pat_prefill, "cached_paths", None)  # nothing is looked up: layers so small gain nothing
        assert_same(serve(one), expected)
    assert declined.get() - was > 3 and not (counts() - before).any()
    assert pace_of(one) == 1 and "packs a first prefill" not in caplog.text
    plan_time(one).pace = 2.0
    assert one.submit("more", [5] * 40, max_new_tokens=1)
    one.drain()
    assert 1.99 < pace_of(one) < 2  # who plans nothing learns nothing of its host
    monkeypatch.setattr(PrefillGain, "may_pay", lambda *lengths: True)
    monkeypatch.setattr(PrefillGain, "pays", lambda gain, forest, counts: forest.n_nodes > 0)
    was, one = declined.get(), packed(chosen="auto")
    assert_same(serve(one), expected)
    steps, left, *_ = counts() - before
    assert steps > 1 and not left and declined.get() - was > 0
    assert pace_of(one) != 1 and caplog.text.count("packs a first prefill") == 1


def plan_time(server):  # noqa: F811
    """What plans took on this host, as it was learned."""
    return runner_of(server).feather_prefill._gain.plan_time


def pace_of(server):  # noqa: F811
    return plan_time(server).pace


# What is left to SGLang -------------------------------------------------------------------------------------------


def test_off_nothing_stands_before_sglangs_prefill_backend(server):  # noqa: F811
    runner = runner_of(server("dense", "pat"))
    assert type(runner.attn_backend.prefill_backend).__name__ == "PlainAttention"
    assert not hasattr(runner, "feather_prefill")


def test_a_step_of_more_tokens_than_were_reckoned_with(server, packed, monkeypatch, caplog):  # noqa: F811
    monkeypatch.setattr(pat_prefill, "MAX_ROWS", 150)
    expected = serve(server("dense"))
    before = counts()
    assert_same(serve(packed()), expected)
    steps, left, *_ = counts() - before
    assert steps > 1 and left > 1
    said = [record.message for record in caplog.records if "to SGLang's backend" in record.message]
    assert len(said) == 1 and "150" in said[0]


def test_a_plan_that_does_not_fit(server, packed, caplog):  # noqa: F811
    expected = serve(server("windows"))
    one = packed("windows")
    (engine,), before = runner_of(one).feather_prefill._engines._engines, counts()
    options = engine.planner.options
    engine.planner = Planner(  # by naive, sharing anything needs parts
        options.num_qo_heads, options.num_kv_heads, options.head_dim, max_requests=options.max_requests, n_sm=4,
        max_parts=1, strategy="naive",
    )  # fmt: skip
    assert_same(serve(one), expected)
    assert (counts() - before)[1] > 1
    assert len([record for record in caplog.records if "exceeds the planner's" in record.message]) == 1


def test_only_tokens_that_see_those_before_them_are_packed():
    def batch(**changed):
        plain = {"forward_mode": ForwardMode.EXTEND, "multi_item_delimiter_indices": None, "mm_inputs": [None, None]}
        return SimpleNamespace(**(plain | changed))

    assert pat_prefill._is_plain(batch()) and pat_prefill._is_plain(batch(forward_mode=ForwardMode.MIXED))
    assert pat_prefill._is_plain(batch(mm_inputs=None))
    for mode in set(ForwardMode) - {ForwardMode.EXTEND, ForwardMode.MIXED}:
        assert not pat_prefill._is_plain(batch(forward_mode=mode))
    assert not pat_prefill._is_plain(batch(mm_inputs=[None, "an image"]))
    assert not pat_prefill._is_plain(batch(multi_item_delimiter_indices=[1]))


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [({}, 2048), ({"chunked_prefill_size": -1}, 9000), ({"chunked_prefill_size": None}, 9000),
     ({"chunked_prefill_size": 65536}, pat_prefill.MAX_ROWS)],
)  # fmt: skip
def test_memory_is_for_the_tokens_of_sglangs_largest_step(arguments, rows):
    plain = {"chunked_prefill_size": 2048, "max_prefill_tokens": 9000}
    assert pat_prefill.rows_of(SimpleNamespace(**(plain | arguments))) == rows


def test_latent_attention_is_refused(packed):
    with pytest.raises(FeatherError, match=r"^--feather-pat-prefill is not for latent attention, .*; leave it out$"):
        packed("latent")


def test_prefill_graphs_are_refused(packed):
    with pytest.raises(FeatherError, match=r"--feather-pat-prefill in prefill .*; add --disable-prefill-cuda-graph or"):
        packed(disable_cuda_graph=False, cuda_graph_backend_prefill="breakable")


def test_engines_that_cannot_be_made_end_a_scheduler_with_one_line(packed, monkeypatch, caplog):
    def fail(*args):
        raise FeatherError("no room")

    monkeypatch.setattr(failures, "multiprocessing", SimpleNamespace(parent_process=lambda: "a server"))
    monkeypatch.setattr(pat_prefill, "rows_of", fail)
    with pytest.raises(SystemExit) as ended:
        packed()
    assert ended.value.code == failures.REFUSED and "feather: error: no room" in caplog.text


def test_what_sglang_asks_of_its_own_backend_it_gets(packed):
    hybrid = runner_of(packed("windows")).attn_backend
    assert isinstance(hybrid.prefill_backend, PlainAttention)  # else tokens of an image would not see each other
    assert hybrid.prefill_backend.support_triton() is False
    assert hybrid.prefill_backend.calls is hybrid.prefill_backend._stock.calls


def test_no_plan_outlives_its_step(packed):
    """Whoever comes next, such as a graph that is captured."""
    one = packed()
    prefill = runner_of(one).feather_prefill
    one.submit("r", [5, 6, 7] * 9, max_new_tokens=1)
    one.step()
    assert prefill.packs
    asked = []
    prefill._stock = SimpleNamespace(
        init_forward_metadata=lambda batch: asked.append("eager"),
        init_forward_metadata_out_graph=lambda batch, in_capture: asked.append(("graph", in_capture)),
        forward_extend=lambda q, k, v, layer, batch: asked.append("extend"),
    )
    prefill.init_forward_metadata_out_graph(None, in_capture=True)
    assert not prefill.packs
    plain = {"forward_mode": ForwardMode.EXTEND, "multi_item_delimiter_indices": None, "mm_inputs": None}
    batch = SimpleNamespace(**plain, rids=["r"])
    prefill.init_forward_metadata(batch)  # a dummy
    prefill.expect(None, SimpleNamespace(**plain, rids=["r"]))
    prefill.init_forward_metadata(batch)  # another than was announced
    prefill.forward_extend(None, None, None, SimpleNamespace(layer_id=0), batch)
    assert asked == [("graph", True), "eager", "eager", "extend"] and not prefill.packs


# In the scheduler -------------------------------------------------------------------------------------------------


def test_requests_that_are_retracted(server, packed, monkeypatch):  # noqa: F811
    """Now and then the pool looks full."""
    fits, answers = ScheduleBatch.check_decode_mem, {}
    for make in (server, packed):
        one, calls = make("sinks"), itertools.count()
        with monkeypatch.context() as patch:
            patch.setattr(ScheduleBatch, "check_decode_mem", lambda *a, n=calls, **k: next(n) % 4 and fits(*a, **k))
            answers[make] = serve(one)
        assert sum(req.retraction_count for req in one.requests.values()) > 3
    assert_same(answers[packed], answers[server])


def test_beside_drafts_that_are_verified(server, packed, monkeypatch):  # noqa: F811
    drafting.install(monkeypatch)
    expected = serve(server("window pool"))
    before = counts()
    for rid, (tokens, _) in serve(packed("window pool", **N_GRAMS)).items():  # which may be too many
        assert tokens[: len(expected[rid][0])] == expected[rid][0]
    assert (counts() - before)[0] > 2


def test_a_kv_cache_in_fp8(server, packed):  # noqa: F811
    expected = serve(server("sinks", kv_cache_dtype="fp8_e4m3"))
    assert_same(serve(packed("sinks", kv_cache_dtype="fp8_e4m3")), expected)
