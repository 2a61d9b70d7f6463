"""Speculative decoding in the real scheduler, on a CPU: greedy tokens equal those without it, packed or not."""

import itertools
import json
from types import SimpleNamespace

import drafting
import numpy as np
import plain_attention
import pytest
import torch
from harness import CONFIG, OverlapServer, Server
from hypothesis import given
from hypothesis import strategies as st
from plain_attention import STAND_IN, PlainAttention
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from test_model_kinds import change_layers

from effort import FULL, newest_is_enough, samples
from feather_sglang.adapter import failures
from feather_sglang.adapter.attention.lengths import DRAFT_TAIL
from feather_sglang.adapter.attention.metrics import pat_metrics
from feather_sglang.adapter.attention.packed_prefill.metrics import counters
from feather_sglang.adapter.attention.registration import _refuse_contradictions
from feather_sglang.adapter.attention.speculation import chain
from feather_sglang.adapter.hooks import installed_version, lacks_pages
from feather_sglang.adapter.options import VARIABLE
from feather_sglang.errors import FeatherError

DRAFTS = 4
CHAINS = {"speculative_num_steps": DRAFTS - 1, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": DRAFTS}
DRAFTERS = {
    "NGRAM": {"speculative_ngram_max_bfs_breadth": 1, "speculative_num_draft_tokens": DRAFTS},
    "STANDALONE": CHAINS,
    "EAGLE": CHAINS,
}
BY_PAT = {"speculative_draft_attention_backend": "pat"}
ONE_LAYER = {**CONFIG, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The reference instead of the kernel, a look at the slots after every step, and backends for a CPU."""
    monkeypatch.setenv("FEATHER_PAT_REFERENCE", "1")
    monkeypatch.setenv("FEATHER_DEBUG_CHECK", "1")
    plain_attention.install(monkeypatch)
    drafting.install(monkeypatch)
    made = []

    def make(drafter=None, backend="pat", kind=Server, policy="fcfs", **overrides):
        flags = {"attention_backend": STAND_IN, "decode_attention_backend": backend, "max_running_requests": 24}
        if drafter:
            flags |= {"speculative_algorithm": drafter, "speculative_attention_mode": "decode", **DRAFTERS[drafter]}
        if drafter in ("STANDALONE", "EAGLE"):
            folder = tmp_path / drafter
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(CONFIG if drafter == "STANDALONE" else ONE_LAYER))
            flags["speculative_draft_model_path"] = str(folder)
        made.append(kind(tmp_path, policy, **{**flags, **overrides}))
        if drafter in ("STANDALONE", "EAGLE"):  # which may share some with the model
            spread_weights(draft_of(made[-1]).model, noise=0.1)
        spread_weights(runner_of(made[-1]).model)
        return made[-1]

    yield make
    for one in made:
        one.close()


def spread_weights(model, noise=0.0):
    """Weights with which tokens depend on the whole prompt; with noise, a model that is right now and then."""
    generator, other = (torch.Generator().manual_seed(seed) for seed in (5, 6))
    for name, weights in model.named_parameters():
        if "norm" in name:
            weights.data.fill_(1)
        else:
            drawn = torch.randn(weights.shape, generator=generator) * 2 * weights.shape[-1] ** -0.5
            weights.data.copy_(drawn + noise * torch.randn(weights.shape, generator=other) * weights.shape[-1] ** -0.5)


def runner_of(server):
    return server.scheduler.tp_worker.model_runner


def pat_of(server):
    return runner_of(server).feather_pat


def draft_of(server):
    """The draft model's runner."""
    return server.scheduler.draft_worker.draft_worker.draft_runner


def watch_reads(steps):
    """KV tokens that each of pat's steps of a draft model reads, and that its rows see."""
    seen, reach = [], steps.reach

    def watched(number, layer_id, forward_batch):
        reach(number, layer_id, forward_batch)
        if layer_id == steps._first_layer:
            lens = steps.planner.lens[: len(forward_batch.seq_lens)]
            assert (lens == forward_batch.seq_lens + number + 1).all()
            grown = int(lens.sum()) - steps.planner._planned
            seen.append((steps.planner._read + grown, int(lens.sum())))

    steps.reach = watched
    return seen


def submit(server, steps=True, name="r"):
    """Requests of three groups that arrive and end at different times."""
    rng = np.random.default_rng(0)
    prefixes = rng.integers(2, 500, (3, 130)).tolist()
    prompts = [prefixes[i % 3] + rng.integers(2, 500, 5 + i % 7).tolist() for i in range(10)]
    prompts += [prompts[4], prompts[4], prompts[4][:100], [5, 6, 7], [9, 8, 7, 6] * 20]
    for i, prompt in enumerate(prompts):
        assert server.submit(f"{name}{i:02}", prompt, max_new_tokens=6 + (5 * i) % 23)
        if steps and i % 4 == 3:
            server.step()


def tokens_of(server):
    """What each request's client gets: a verify step may make more than were asked for."""
    return {rid: list(req.output_ids)[: req.sampling_params.max_new_tokens] for rid, req in server.requests.items()}


def serve(server):
    """Tokens of requests that come twice: n-grams draft the second time what was answered the first time."""
    for name in ("r", "s"):
        submit(server, name=name)
        server.drain()
    return tokens_of(server)


def steps_saved(server):
    """Tokens that came without a verify step of their own."""
    return sum(len(req.output_ids) - 1 - req.spec_verify_ct for req in server.requests.values())


def tokens_read():
    metrics = pat_metrics()
    return np.array([metrics.attended._value.get(), metrics.read._value.get()])


# In the scheduler -----------------------------------------------------------------------------------------------


@pytest.fixture
def expected(server):
    """The tokens without speculation and without pat."""
    if not _expected:
        _expected.update(serve(server(backend=None)))
    return _expected


_expected = {}


NO_PAT = [("STANDALONE", None)] if FULL else []


@pytest.mark.parametrize("kind", [Server, OverlapServer])
@pytest.mark.parametrize(("drafter", "backend"), [*((drafter, "pat") for drafter in DRAFTERS), *NO_PAT])
def test_the_tokens_without_speculation(server, expected, drafter, backend, kind):
    before = tokens_read()
    one = server(drafter, backend, kind)
    assert serve(one) == expected
    # Few drafts of an EAGLE model whose weights are random are right.
    assert steps_saved(one) > (0 if drafter == "EAGLE" else 0.1 * sum(map(len, expected.values())))
    attended, read = tokens_read() - before
    assert 0 < read < 0.4 * attended if backend else not attended
    one.step()
    one.assert_pools_full()


@pytest.mark.parametrize("kind", [Server, OverlapServer])
@pytest.mark.parametrize("drafter", ["STANDALONE", "EAGLE"])
def test_drafts_by_pat(server, expected, caplog, drafter, kind):
    """The same tokens and the same drafts, from fewer reads."""
    with caplog.at_level("INFO", "feather_sglang"):
        one = server(drafter, kind=kind, **BY_PAT)
    assert f"they are drafted by pat and {STAND_IN}" in caplog.text
    drafts, extensions = draft_of(one).feather_pat, []
    seen = watch_reads(drafts.steps)
    plan = drafts.extension.pat._plan
    drafts.extension.pat._plan = lambda view: extensions.append(len(view.seq_lens)) or plan(view)
    assert serve(one) == expected
    other = server(drafter, kind=kind)
    serve(other)
    assert steps_saved(one) == steps_saved(other) > 0
    assert len(extensions) == len(seen) / (DRAFTS - 2) > 20
    assert sum(read for read, _ in seen) < 0.6 * sum(attended for _, attended in seen)
    one.step()
    one.assert_pools_full()


@newest_is_enough
@pytest.mark.parametrize(
    "overrides",
    [{"page_size": 16}, {"disable_radix_cache": True}, {"policy": "feather"}, {"speculative_num_steps": 1}],
    ids=str,
)
def test_drafts_by_pat_under_other_flags(server, expected, overrides):
    if "page_size" in overrides and lacks_pages(installed_version()):
        pytest.skip("this SGLang allocates pages with a GPU kernel")
    if "speculative_num_steps" in overrides:
        overrides = {**overrides, "speculative_num_draft_tokens": 2}
    one = server("STANDALONE", kind=OverlapServer, **BY_PAT, **overrides)
    drafts = draft_of(one).feather_pat
    assert (drafts.steps is None) == ("speculative_num_steps" in overrides) and drafts.extension  # no decode step then
    assert serve(one) == expected


@newest_is_enough
@pytest.mark.parametrize(
    "overrides", [{"page_size": 16}, {"chunked_prefill_size": 64}, {"disable_radix_cache": True}], ids=str
)
@pytest.mark.parametrize("drafter", ["STANDALONE", "NGRAM"][: samples(2, 1)])
def test_other_memory_and_prefill(server, expected, drafter, overrides):
    if "page_size" in overrides and lacks_pages(installed_version()):
        pytest.skip("this SGLang allocates pages with a GPU kernel")
    one = server(drafter, kind=OverlapServer, **overrides)
    assert serve(one) == expected
    one.step()
    one.assert_pools_full()


@pytest.mark.parametrize(
    ("policy", "drafter", "kind"),
    [
        *itertools.product(["feather"], DRAFTERS, [OverlapServer, Server][: samples(2, 1)]),
        ("feather-order", "STANDALONE", OverlapServer),
    ],
)
def test_under_a_feather_policy(server, expected, monkeypatch, policy, drafter, kind):
    """Rows move, and drafts with them."""
    one = server(drafter, kind=kind, policy=policy)
    meter, counted = one.feather.meters.decode, []
    monkeypatch.setattr(meter, "step", lambda now, tokens, is_decode: counted.append(tokens))
    assert serve(one) == expected
    assert one.feather.rows.permutations > 0
    one.assert_nothing_left()
    if policy == "feather":  # a request's first token comes from its prefill
        assert sum(counted) == sum(len(req.output_ids) - 1 for req in one.requests.values())


@pytest.mark.parametrize("drafter", ["NGRAM", "STANDALONE"])
def test_retractions_and_aborts_while_drafts_are_in_flight(server, expected, monkeypatch, drafter):
    """Now and then the pool looks full, under the overlap scheduler; some requests are given up on the way."""
    one = server(drafter, kind=OverlapServer)
    fits, calls = ScheduleBatch.check_decode_mem, itertools.count()
    submit(one, steps=False)
    with monkeypatch.context() as patch:
        patch.setattr(ScheduleBatch, "check_decode_mem", lambda *a, **k: next(calls) % 4 and fits(*a, **k))
        for name in ("r04", "r07", "r11"):
            for _ in range(3):
                one.step()
            one.abort(name)
        one.drain()
    assert sum(req.retraction_count for req in one.requests.values()) > 3
    given_up = ("r04", "r07", "r11")
    whole = {rid: tokens for rid, tokens in tokens_of(one).items() if rid not in given_up}
    assert whole == {rid: expected[rid] for rid in whole}
    one.step()
    one.assert_pools_full()


def test_a_plan_is_kept_while_few_tokens_are_committed_under_it(server):
    one = server("STANDALONE")
    one.submit("r", list(range(2, 90)), max_new_tokens=60)
    plans, tails = [], []
    while one.step():
        if (plan := pat_of(one).planner.in_force) is not None and plan.n_requests == DRAFTS:
            plans.append(plan.serial)
            lens = pat_of(one).planner.lens[:DRAFTS].numpy()
            tails.append(int((lens - plan.forest.shared_length).max()))
    assert 60 / (DRAFT_TAIL + DRAFTS) < len(set(plans)) < len(plans) / 3
    assert DRAFT_TAIL / 2 < max(tails) <= DRAFT_TAIL + DRAFTS


# Who does what --------------------------------------------------------------------------------------------------


def test_drafts_stay_with_sglangs_own_backend(server, caplog):
    with caplog.at_level("INFO", "feather_sglang"):
        one = server("STANDALONE")
    assert not hasattr(draft_of(one), "feather_pat") and pat_of(one).drafts == DRAFTS
    assert f"pat packs the verification of {DRAFTS} tokens a request; they are drafted by {STAND_IN}" in caplog.text


@newest_is_enough
@pytest.mark.parametrize(
    ("drafter", "overrides"),
    [
        ("NGRAM", {}),
        ("STANDALONE", BY_PAT),
        ("NGRAM", {"speculative_attention_mode": "prefill"}),
        ("STANDALONE", {}),
        ("EAGLE", {}),
    ][: samples(5, 3)],
)
def test_prompts_that_are_packed_too(server, expected, monkeypatch, drafter, overrides):
    before = counters()["packed"]._value.get()
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, '{"pat_prefill": true}')
        one = server(drafter, **overrides)
    assert serve(one) == expected
    assert counters()["packed"]._value.get() > before + 3


@newest_is_enough
def test_drafts_that_the_prefill_backend_verifies(server, expected, caplog):
    before = tokens_read()
    with caplog.at_level("WARNING", "feather_sglang"):
        one = server("STANDALONE", speculative_attention_mode="prefill")
    assert serve(one) == expected and not (tokens_read() - before).any()
    said = [record.message for record in caplog.records if "pat has nothing to do" in record.message]
    assert len(said) == 1 and said[0].endswith("give --speculative-attention-mode decode")


@pytest.mark.parametrize(
    ("drafter", "flags", "says"),
    [
        ("EAGLE", {"speculative_eagle_topk": 2}, "trees of drafts; give --speculative-eagle-topk 1"),
        (
            "NGRAM",
            {"speculative_ngram_max_bfs_breadth": 2},
            "trees of n-grams; give --speculative-ngram-max-bfs-breadth 1",
        ),
    ],
)
def test_trees_are_refused(server, drafter, flags, says):
    with pytest.raises(FeatherError, match=rf"^the pat backend does not support {says} or choose another"):
        server(drafter, **flags)


# Graphs ---------------------------------------------------------------------------------------------------------


def two_rows_that_share(runner, generator):
    """Random KV of the first layer, and the table of slots, in which rows 3 and 7 begin with the same 64."""
    pool, table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    keys, values = pool.get_key_buffer(0), pool.get_value_buffer(0)
    for buffer in (keys, values):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    table[3, :130] = torch.arange(100, 230, dtype=torch.int32)
    table[7, :64] = table[3, :64]
    table[7, 64:150] = torch.arange(300, 386, dtype=torch.int32)
    return keys, values, table


def test_a_replay_with_padding_after_a_capture(server):
    """SGLang's calls around a CUDA graph of a verify step: capture with dummy rows, then replays of two requests."""
    one = server("NGRAM")
    backend, runner = pat_of(one), runner_of(one)
    heads, kv_heads, dim = backend.planner.engines.shape(0)
    backend.init_cuda_graph_state(4, 4 * DRAFTS)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    static, rows = torch.full((4,), fill, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    mode = ForwardMode.TARGET_VERIFY

    def view(**fields):
        ids = torch.zeros(4 * DRAFTS, dtype=torch.int64)
        return SimpleNamespace(forward_mode=mode, seq_lens=static, req_pool_indices=rows, input_ids=ids, **fields)

    backend.init_forward_metadata_out_graph(view(batch_size=4, seq_lens_cpu=static.clone()), in_capture=True)
    backend.init_forward_metadata_in_graph(view())
    captured = backend.planner.lens.data_ptr()
    generator = torch.Generator().manual_seed(1)
    keys, values, table = two_rows_that_share(runner, generator)
    layer = SimpleNamespace(layer_id=0, k_scale=None, v_scale=None)
    lens = torch.tensor([70, 90])
    for accepted in ([1, 4], [3, 1], [4, 4], [2, 4], [4, 1], [4, 4]):
        static[:2], rows[:2] = lens, torch.tensor([3, 7])
        backend._expected = ["x", "y"], np.array([3, 7])
        backend.init_forward_metadata_out_graph(view(batch_size=4, seq_lens_cpu=static.clone()))
        before = table.clone()
        table[3] = 0  # for the next step SGLang gives the row away, through which the other's prefix is read
        backend.init_forward_metadata_in_graph(view())
        assert backend.planner.lens.data_ptr() == captured
        q = torch.randn(4 * DRAFTS, heads * dim, generator=generator)
        out = backend.forward_extend(q, None, None, layer, view(), save_kv_cache=False)
        table.copy_(before)
        for place, row in enumerate((3, 7)):
            slots = table[row, : lens[place] + DRAFTS].long()
            mine = q[place * DRAFTS : (place + 1) * DRAFTS].view(DRAFTS, heads, dim).transpose(0, 1)
            k, v = (x[slots].repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (keys, values))
            seen = torch.ones(DRAFTS, len(slots), dtype=torch.bool).tril(len(slots) - DRAFTS)
            exact = torch.nn.functional.scaled_dot_product_attention(mine, k, v, attn_mask=seen)
            got = out[place * DRAFTS : (place + 1) * DRAFTS].view(DRAFTS, heads, dim).transpose(0, 1)
            assert torch.allclose(got, exact, atol=1e-5)
        lens = lens + torch.tensor(accepted)
    assert (
        backend.planner.in_force.forest.shared_length.min() >= 0 and backend.planner.in_force.n_requests == 4 * DRAFTS
    )


def test_draft_steps_replayed_after_a_capture(server):
    """The same around a graph of all decode steps of a draft model."""
    one = server("STANDALONE", **BY_PAT)
    steps, runner = draft_of(one).feather_pat.steps, draft_of(one)
    heads, kv_heads, dim = steps.planner.engines.shape(0)
    steps.init_cuda_graph_state(4, 4)
    fill = steps.attn_backends[0].get_cuda_graph_seq_len_fill_value()
    static, rows = torch.full((4,), fill, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)

    def view(**fields):
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE, seq_lens=static, req_pool_indices=rows, batch_size=4, **fields
        )

    steps.init_forward_metadata_out_graph(view(seq_lens_cpu=static.clone()), in_capture=True)
    steps.init_forward_metadata_in_graph(view())
    captured = steps.planner.lens.data_ptr()
    generator = torch.Generator().manual_seed(1)
    keys, values, table = two_rows_that_share(runner, generator)
    layer = SimpleNamespace(layer_id=0, k_scale=None, v_scale=None)
    lens, plans = torch.tensor([70, 90]), set()
    for accepted in ([1, 4], [3, 1], [1, 1], [2, 4]):
        static[:2], rows[:2] = lens, torch.tensor([3, 7])
        steps._expected = ["x", "y"], np.array([3, 7])
        steps.init_forward_metadata_out_graph(view(seq_lens_cpu=static.clone()))
        plans.add(steps.planner.in_force.serial)
        before = table.clone()
        table[3] = 0
        steps.init_forward_metadata_in_graph(view())
        q = torch.randn(DRAFTS, 4, heads * dim, generator=generator)
        made = [
            step.forward_decode(q[i], None, None, layer, view(), False) for i, step in enumerate(steps.attn_backends)
        ]
        assert steps.planner.lens.data_ptr() == captured and len(made) == DRAFTS - 2
        table.copy_(before)
        for number, out in enumerate(made):
            for place, row in enumerate((3, 7)):
                slots = table[row, : lens[place] + number + 1].long()
                mine = q[number, place].view(1, heads, dim).transpose(0, 1)
                k, v = (x[slots].repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (keys, values))
                exact = torch.nn.functional.scaled_dot_product_attention(mine, k, v)
                assert torch.allclose(out[place].view(1, heads, dim).transpose(0, 1), exact, atol=1e-5)
        lens = lens + torch.tensor(accepted)
    assert steps.planner.in_force.forest.shared_length[:2].tolist() == [64, 64] and len(plans) < 4


def test_a_draft_models_pass_over_what_was_verified_replayed_after_a_capture(server):
    """SGLang's buffers are those of the largest batch; lengths count the tokens of the step, which pads do not have."""
    one = server("STANDALONE", **BY_PAT)
    extension, runner = draft_of(one).feather_pat.extension, draft_of(one)
    heads, kv_heads, dim = extension.pat.planner.engines.shape(0)
    extension._stock.init_cuda_graph_state = lambda *sizes: None
    extension.init_cuda_graph_state(6, 6 * DRAFTS)
    static, rows = torch.full((6,), 1, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)

    def view(size=4, **fields):
        return SimpleNamespace(
            forward_mode=ForwardMode.DRAFT_EXTEND_V2, seq_lens=static, req_pool_indices=rows, batch_size=size, **fields
        )

    extension.init_forward_metadata_out_graph(view(seq_lens_cpu=static.clone()), in_capture=True)
    extension.init_forward_metadata_in_graph(view(seq_lens_cpu=None))
    generator = torch.Generator().manual_seed(1)
    keys, values, table = two_rows_that_share(runner, generator)
    layer = SimpleNamespace(layer_id=0, k_scale=None, v_scale=None)
    committed = torch.tensor([70, 90])
    for accepted in ([1, 4], [3, 1], [2, 4]):
        static[:2], rows[:2] = committed + DRAFTS, torch.tensor([3, 7])
        extension.pat._expected = ["x", "y"], np.array([3, 7])
        extension.init_forward_metadata_out_graph(view(seq_lens_cpu=static.clone()))
        before = table.clone()
        table[3] = 0
        extension.init_forward_metadata_in_graph(view(seq_lens_cpu=None))
        assert extension.pat.planner.lens[2 * DRAFTS : 4 * DRAFTS].min() > 0
        q = torch.randn(4 * DRAFTS, heads * dim, generator=generator)
        out = extension.forward(q, None, None, layer, view(seq_lens_cpu=None), save_kv_cache=False)
        table.copy_(before)
        assert torch.isfinite(out).all()
        for place, row in enumerate((3, 7)):
            slots = table[row, : committed[place] + DRAFTS].long()
            mine = q[place * DRAFTS : (place + 1) * DRAFTS].view(DRAFTS, heads, dim).transpose(0, 1)
            k, v = (x[slots].repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (keys, values))
            seen = torch.ones(DRAFTS, len(slots), dtype=torch.bool).tril(len(slots) - DRAFTS)
            exact = torch.nn.functional.scaled_dot_product_attention(mine, k, v, attn_mask=seen)
            got = out[place * DRAFTS : (place + 1) * DRAFTS].view(DRAFTS, heads, dim).transpose(0, 1)
            assert torch.allclose(got, exact, atol=1e-5)
        committed = committed + torch.tensor(accepted)
    assert extension.pat.planner.in_force.tokens_read < int(extension.pat.planner.in_force.forest.seq_len.sum())


def test_sglang_captures_graphs_of_that_pass_as_of_its_own_backends(server):
    """It asks for their classes."""
    assert isinstance(draft_of(server("STANDALONE", **BY_PAT)).attn_backend, PlainAttention)


@newest_is_enough
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"decode_attention_backend": "triton"}, "needs --decode-attention-backend pat"),
        ({"speculative_algorithm": None}, "there is no draft model"),
        ({"speculative_algorithm": "NGRAM"}, "there is no draft model"),
    ],
    ids=str,
)
def test_where_pat_cannot_draft(flags, says):
    args = {"attention_backend": None, "decode_attention_backend": "pat", "prefill_attention_backend": None}
    args |= {"speculative_algorithm": "EAGLE", **BY_PAT, **flags}
    with pytest.raises(FeatherError, match=f"^--speculative-draft-attention-backend pat.* {says}"):
        _refuse_contradictions(SimpleNamespace(**args))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_draft_model_that_cannot_be_packed_ends_a_scheduler_with_one_line(server, monkeypatch, caplog, steps):
    """Its second layer has a window; with one step, it has no decode steps."""
    monkeypatch.setitem(globals(), "CONFIG", {**CONFIG, "num_hidden_layers": 2})
    monkeypatch.setattr(failures, "multiprocessing", SimpleNamespace(parent_process=lambda: "a server"))
    change_layers(monkeypatch, {1: {"sliding_window_size": 31}})
    with pytest.raises(SystemExit) as ended:
        server("STANDALONE", **BY_PAT, speculative_num_steps=steps, speculative_num_draft_tokens=steps + 1)
    assert ended.value.code == failures.REFUSED
    assert [record.message for record in caplog.records if record.name == failures.__name__] == [
        "feather: error: --speculative-draft-attention-backend pat: not all layers of the draft model can be packed; "
        "drop it"
    ]


class Verifying:
    """A backend's verify steps without a scheduler: requests on rows of the table, and attention by SDPA beside it."""

    def __init__(self, server, seed):
        self.backend, runner = pat_of(server), runner_of(server)
        self.heads, self.kv_heads, self.dim = self.backend.planner.engines.shape(0)
        self.backend.init_cuda_graph_state(8, 8 * DRAFTS)
        self.rng, self.draw = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.pool, self.table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
        self.generation = runner.req_to_token_pool.req_generation.numpy()
        for buffer in (self.pool.get_key_buffer(0), self.pool.get_value_buffer(0)):
            buffer.copy_(torch.randn(buffer.shape, generator=self.draw))
        self.prefixes = self.rng.permutation(np.arange(1, 1001)).reshape(2, 500)
        self.requests, self.names = {}, itertools.count()  # row: [name, committed]

    def join(self):
        row = int(self.rng.choice([row for row in range(1, 8) if row not in self.requests]))
        shared, own = int(self.rng.integers(0, 300)), int(self.rng.integers(1, 40))
        self.table[row, :shared] = torch.from_numpy(self.prefixes[self.rng.integers(2), :shared])
        private = np.arange(1001 + row * 400, 1401 + row * 400)
        self.table[row, shared : shared + 400] = torch.from_numpy(private)
        self.backend.planner.sharing.prefill(np.array([row]), np.array([shared]))
        self.requests[row] = [f"r{next(self.names)}", shared + own]

    def leave(self):
        row = int(self.rng.choice(list(self.requests)))
        del self.requests[row]
        self.generation[row] += 1

    def step(self, padding, graph):
        rows = list(self.requests)
        lens = torch.tensor([self.requests[row][1] for row in rows] + [1] * padding)
        places = torch.tensor(rows + [0] * padding)
        view = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            req_pool_indices=places,
            input_ids=torch.zeros(len(lens) * DRAFTS),
        )
        self.backend._expected = [self.requests[row][0] for row in rows], np.array(rows)
        if graph:
            self.backend.init_forward_metadata_out_graph(view)
            self.backend.init_forward_metadata_in_graph(view)
        else:
            self.backend.init_forward_metadata(view)
        q = torch.randn(len(lens) * DRAFTS, self.heads * self.dim, generator=self.draw)
        layer = SimpleNamespace(layer_id=0, k_scale=None, v_scale=None)
        out = self.backend.forward_extend(q, None, None, layer, view, save_kv_cache=False)
        for place, row in enumerate(rows):
            mine = slice(place * DRAFTS, (place + 1) * DRAFTS)
            assert torch.allclose(out[mine], self.exact(q[mine], row), atol=1e-5), (row, self.requests[row])
            self.requests[row][1] += int(self.rng.integers(1, DRAFTS + 1))

    def exact(self, q, row):
        committed = self.requests[row][1]
        slots, group = self.table[row, : committed + DRAFTS].long(), self.heads // self.kv_heads
        caches = self.pool.get_key_buffer(0), self.pool.get_value_buffer(0)
        k, v = (cache[slots].repeat_interleave(group, 1).transpose(0, 1) for cache in caches)
        seen = torch.ones(DRAFTS, len(slots), dtype=torch.bool).tril(committed)
        q = q.view(DRAFTS, self.heads, self.dim).transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return out.transpose(0, 1).reshape(DRAFTS, -1)


@newest_is_enough
def test_whoever_joins_leaves_and_whatever_is_accepted(server):
    """Random batches, in graphs and without, against attention with a mask; every node's slots are compared, too."""
    one = server("NGRAM")
    for seed in range(12):
        verifying = Verifying(one, seed)
        for _ in range(25):
            if verifying.requests and (len(verifying.requests) == 7 or verifying.rng.random() < 0.2):
                verifying.leave()
            while not verifying.requests or (len(verifying.requests) < 7 and verifying.rng.random() < 0.5):
                verifying.join()
            graph = bool(verifying.rng.random() < 0.7)
            verifying.step(int(verifying.rng.integers(0, 9 - len(verifying.requests))) if graph else 0, graph)
            if max(committed for _, committed in verifying.requests.values()) > 420:
                break
        verifying.backend.planner.sharing.forget()
        plan = verifying.backend.planner.in_force
        assert plan.tokens_read < plan.forest.seq_len.sum()


def test_a_step_of_another_width_is_refused(server):
    view = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        seq_lens=torch.ones(2),
        input_ids=torch.zeros(6),
        req_pool_indices=torch.zeros(2),
    )
    with pytest.raises(RuntimeError, match="pat: 6 drafts of 2 requests, 4 of each are expected"):
        pat_of(server("NGRAM")).init_forward_metadata_out_graph(view)


# Chains ---------------------------------------------------------------------------------------------------------


@newest_is_enough
@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=4))
def test_trees_of_n_grams_become_chains(drawn):
    """Parents are drawn: draft i + 1 has one of those before it."""
    trees, drafts = len(drawn), 5
    mask = np.zeros((trees, drafts, drafts), np.uint8)
    for tree, parents in enumerate(drawn):
        mask[tree, 0, 0] = 1
        for draft, parent in enumerate(parents, start=1):
            mask[tree, draft] = mask[tree, parent % draft]
            mask[tree, draft, draft] = 1
    tokens = np.arange(trees * drafts, dtype=np.int64) * 10
    chained, causal = chain(tokens, mask.reshape(-1), trees)
    assert chained.dtype == tokens.dtype and causal.dtype == mask.dtype and causal.shape == (mask.size,)
    assert (causal.reshape(mask.shape) == np.tri(drafts, dtype=bool)).all()
    for tree, row in enumerate(chained.reshape(trees, drafts).tolist()):
        own = tokens[tree * drafts : (tree + 1) * drafts].tolist()
        paths = [[own[i] for i in np.flatnonzero(one)] for one in mask[tree]]
        longest = max(map(len, paths))
        assert sorted(row) == own and row[:longest] in paths
