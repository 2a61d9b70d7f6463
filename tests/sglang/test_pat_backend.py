"""The pat backend in the real scheduler, with the NumPy reference in the kernel's place."""

import argparse
import itertools
import json
import os
import random
from collections import Counter, deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import CONFIG, OverlapServer, Server, runner_of, spread_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt import runtime_context
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import ServerArgs

from feather_kernels.plan import Planner
from feather_kernels.plans.batch_file import LATEST, load_batch
from feather_kernels.plans.explain import explain
from feather_kernels.reference import direct_decode
from feather_sglang.adapter import hooks
from feather_sglang.adapter.attention import backend as pat_backend
from feather_sglang.adapter.attention import facts as pat_facts
from feather_sglang.adapter.attention import limits as pat_limits
from feather_sglang.adapter.attention import record as pat_record
from feather_sglang.adapter.attention import registration as attention
from feather_sglang.adapter.attention.metrics import pat_metrics
from feather_sglang.adapter.attention.rows import CHUNK, Hashes, RowHasher, RowSharing
from feather_sglang.adapter.hooks import installed_version, lacks_pages
from feather_sglang.adapter.options import VARIABLE
from feather_sglang.errors import FeatherError


@pytest.fixture(scope="module")
def environment():
    """The reference instead of the kernel, and after every step a look at the slots themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEATHER_PAT_REFERENCE", "1")
        patch.setenv("FEATHER_DEBUG_CHECK", "1")
        yield patch


def start(folder, policy="fcfs", kind=Server, **overrides):
    """A server whose tokens depend on the whole prompt, which they hardly do with SGLang's dummy weights."""
    one = kind(folder, policy, config={**CONFIG, "num_hidden_layers": 2}, **overrides)
    spread_weights(one)
    return one


@pytest.fixture
def server(tmp_path, environment):
    made = []

    def make(policy="fcfs", **overrides):
        made.append(start(tmp_path, policy, **{"decode_attention_backend": "pat", **overrides}))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def one_rank(monkeypatch):
    """What ``started``'s process groups said while they lived: to 0.5.18 SGLang asks them each time."""
    sizes = SimpleNamespace(attn_cp_size=1, attn_dcp_size=1)
    monkeypatch.setattr(pat_facts, "get_parallel", lambda: sizes)


@pytest.fixture(scope="module")
def started(tmp_path_factory, environment):
    """One server for tests that leave it as it is."""
    one = start(tmp_path_factory.mktemp("started"), decode_attention_backend="pat")
    yield one
    one.close()


def pat_of(server):
    return runner_of(server).feather_pat


def submit_groups(server, steps=True):
    """Requests of three groups that arrive and end at different times; one prompt thrice, one too short to share."""
    rng = np.random.default_rng(0)
    prefixes = rng.integers(2, 500, (3, 130)).tolist()
    prompts = [prefixes[i % 3] + rng.integers(2, 500, 5 + i % 7).tolist() for i in range(12)]
    prompts += [prompts[4], prompts[4], prompts[4][:100], [5, 6, 7]]
    for i, prompt in enumerate(prompts):
        server.submit(f"r{i:02}", prompt, max_new_tokens=6 + (5 * i) % 23, logprobs=1, ignore_eos=steps)
        if steps and i % 4 == 3:
            server.step()


def answers_of(server):
    """Tokens, and their logprobs, which tell of smaller differences."""
    return {
        rid: (list(req.output_ids), list(getattr(req, "logprob", req).output_token_logprobs_val))
        for rid, req in server.requests.items()
    }


def serve(server):
    submit_groups(server)
    server.drain()
    return answers_of(server)


def assert_same(got, expected, tolerance=1e-3):
    assert {rid: tokens for rid, (tokens, _) in got.items()} == {rid: tokens for rid, (tokens, _) in expected.items()}
    for rid, (_, logprobs) in got.items():
        assert logprobs == pytest.approx(expected[rid][1], abs=tolerance)


def counts():
    metrics = pat_metrics()
    return np.array([counter._value.get() for counter in (metrics.plans, metrics.kept, metrics.attended, metrics.read)])


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What torch_native answers."""
    one = start(tmp_path_factory.mktemp("native"))
    answers = serve(one)
    one.close()
    return answers


# In the scheduler -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"page_size": 16},
        {"policy": "feather-order"},
        {"chunked_prefill_size": 64, "enable_mixed_chunk": True},
        {"disable_radix_cache": True},
    ],
    ids=lambda overrides: "-".join(map(str, overrides)) or "plain",
)
def test_the_tokens_of_torch_native_from_fewer_reads(server, expected, overrides):
    if overrides.get("page_size") and lacks_pages(installed_version()):
        pytest.skip("this SGLang allocates pages with a GPU kernel")
    before = counts()
    one = server(**overrides)
    assert_same(serve(one), expected)
    plans, kept, attended, read = counts() - before
    assert plans > 0 and kept > 0
    if overrides.get("disable_radix_cache"):
        assert read == attended
    else:
        assert read < 0.8 * attended
    one.step()
    backend = pat_of(one)
    assert backend.planner.in_force.n_requests == 1  # the last request's
    assert len(backend.planner.sharing.trie) <= 1


def test_a_plan_that_does_not_fit_shares_nothing(server, expected, caplog):
    one = server()
    (engine,), before = pat_of(one).planner.engines._engines, pat_metrics().unshared._value.get()
    options = engine.planner.options
    engine.planner = Planner(  # no memory for parts: by naive, sharing anything needs some
        num_qo_heads=options.num_kv_heads * options.group_size, num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim, max_requests=options.max_requests, n_sm=4, max_parts=1, strategy="naive",
    )  # fmt: skip
    assert_same(serve(one), expected)
    assert pat_metrics().unshared._value.get() > before
    said = [record for record in caplog.records if "decodes a batch without sharing" in record.message]
    assert len(said) == 1 and "exceeds the planner's" in said[0].message


def test_bfloat16(server):
    expected = serve(server(decode_attention_backend=None, dtype="bfloat16"))
    got = serve(server(dtype="bfloat16"))
    same = [rid for rid in got if got[rid][0] == expected[rid][0]]
    assert len(same) > 0.7 * len(got)  # near ties of two tokens may fall either way
    assert_same({rid: got[rid] for rid in same}, {rid: expected[rid] for rid in same}, 0.2)


def test_retractions_and_aborts(server, expected):
    before = counts()
    one = server()
    submit_groups(one, steps=False)
    for name in ("r04", "r07"):
        for _ in range(3):
            one.step()
        one.abort(name)
        one.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        assert one.scheduler.running_batch.is_empty()
        one.scheduler.continue_generation(ContinueGenerationReqInput())
    one.drain()
    whole = {rid: answer for rid, answer in answers_of(one).items() if rid not in ("r04", "r07")}
    assert_same(whole, {rid: expected[rid] for rid in whole})
    _, _, attended, read = counts() - before
    assert read < 0.9 * attended


@pytest.mark.parametrize(
    "overrides", [{}, {"chunked_prefill_size": 64}, {"chunked_prefill_size": 64, "enable_mixed_chunk": True}], ids=str
)
def test_in_the_overlap_schedulers_order(server, expected, overrides):
    """Equal prompts are computed side by side, so rows are rewritten while they decode; every step is checked."""
    before = counts()
    one = server(kind=OverlapServer, **overrides)
    assert pat_of(one).planner.sharing._settled_at == 2
    assert_same(serve(one), expected)
    _, _, attended, read = counts() - before
    assert read < 0.8 * attended


def test_requests_retracted_in_the_overlap_schedulers_order(server, monkeypatch):
    """Now and then the pool looks full: those that have just been admitted are retracted while their prefill runs."""
    prompts = [[group] * 100 + [100 + i] * 9 for group in (7, 9) for i in range(8)]
    fits, calls = ScheduleBatch.check_decode_mem, itertools.count()
    answers = {}
    for backend in ("pat", None):
        one = server(kind=OverlapServer, decode_attention_backend=backend)
        with monkeypatch.context() as patch:
            patch.setattr(ScheduleBatch, "check_decode_mem", lambda *a, **k: next(calls) % 3 and fits(*a, **k))
            for i, prompt in enumerate(prompts):
                one.submit(f"r{i}", prompt, max_new_tokens=12)
                one.step()
            one.drain()
        assert sum(req.retraction_count for req in one.requests.values()) > 3
        answers[backend] = one.outputs()
        one.assert_nothing_left()
    assert answers["pat"] == answers[None]


@pytest.mark.parametrize("length", [70, 91, 120])  # shorter than the first, one decode step longer, much longer
def test_an_id_and_a_row_that_are_used_again_are_another_request(server, length):
    # After a flush even the row's generation is the same again, but in 0.5.23.
    draw = random.Random(length)
    later = {rid: draw.choices(range(2, 500), k=length) for rid in "abcdef"}
    one = server()
    for prompts in ({rid: [*[7] * 80, ord(rid)] for rid in later}, later):
        for rid, prompt in prompts.items():
            one.submit(rid, prompt, max_new_tokens=12)
        one.drain()
        one.step()
        assert one.scheduler.flush_cache()
    other = server(decode_attention_backend=None)
    for rid, prompt in later.items():
        other.submit(rid, prompt, max_new_tokens=12)
    other.drain()
    assert one.outputs() == other.outputs()


# Recording ------------------------------------------------------------------------------------------------------


def test_batches_are_recorded_for_explain_plan(server, monkeypatch, tmp_path, caplog):
    folder = tmp_path / "plans"
    folder.mkdir()
    monkeypatch.setenv(VARIABLE, json.dumps({"record_plan": str(folder)}))
    clock = [100.0]
    monkeypatch.setattr(pat_record, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    one = server()
    submit_groups(one)
    file, shared, texts = folder / LATEST, [], set()
    for _ in range(6):
        one.step()
        clock[0] += pat_record.INTERVAL
        one.step()
        texts.add(file.read_text())
        batch, plan = load_batch(file), pat_of(one).planner.in_force
        assert batch.forest.seq_len.tolist() == plan.forest.seq_len.tolist()
        report = explain(batch)
        assert report.same_as_server and report.requests == plan.n_requests and not report.padding
        shared.append(report.plan.pack_requests.count)
    assert max(shared) > 1 and len(texts) > 1
    assert "r0" not in file.read_text() and os.listdir(folder) == [LATEST]

    file.unlink()
    one.abort("r00")  # the next step's plan is a new one, but too early
    one.step()
    assert not file.exists()
    folder.rmdir()
    clock[0] += pat_record.INTERVAL
    one.drain()  # as if nothing were wrong
    said = [entry.message for entry in caplog.records if "no longer recorded" in entry.message]
    assert said == [f"feather: batches are no longer recorded: {file}: No such file or directory"]


def test_rows_of_padding_are_recorded_as_such(one_rank, started, monkeypatch, tmp_path):
    recorder = pat_record.PlanRecorder(tmp_path)
    backend = pat_of(started)
    plan = backend.planner.engines._engines[0].planner.plan(
        RowSharing(torch.zeros(2, 9), np.ones(2), 1).forest(np.ones(1), lengths(5, 1))
    )
    recorder.offer(plan, 1)
    assert load_batch(tmp_path).padding == 1


@pytest.fixture
def four_ranks(one_rank, started, monkeypatch):
    """Says which of them this is; two and two decode the same batches."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(attn_tp_size=2))
    return lambda rank: monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)


def test_only_first_ranks_record(four_ranks, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, json.dumps({"record_plan": str(tmp_path)}))
    for rank in range(4):
        four_ranks(rank)
        assert (pat_record.plan_recorder() is not None) == (rank in (0, 2))
    monkeypatch.setenv(VARIABLE, "")
    assert pat_record.plan_recorder() is None


def test_a_folder_to_record_in_that_does_not_exist_ends_start_up(server, monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({"record_plan": "/no/such/folder"}))
    with pytest.raises(FeatherError, match="record_plan='/no/such/folder': no such directory: create it first"):
        server()


# Graphs ---------------------------------------------------------------------------------------------------------


def test_a_replay_with_padding_after_a_capture(one_rank, started):
    """SGLang's calls around a CUDA graph: capture with dummy rows, then a replay of a smaller batch."""
    backend, runner = pat_of(started), runner_of(started)
    heads, _, dim = backend.planner.engines.shape(0)
    backend.init_cuda_graph_state(4, 4)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    static = torch.full((4,), fill, dtype=torch.int64)
    rows = torch.zeros(4, dtype=torch.int64)

    def view(**fields):
        return SimpleNamespace(forward_mode=ForwardMode.DECODE, seq_lens=static, req_pool_indices=rows, **fields)

    backend.init_forward_metadata_out_graph(view(batch_size=4, seq_lens_cpu=static.clone()), in_capture=True)
    backend.init_forward_metadata_in_graph(view())
    captured = backend.planner.lens.data_ptr()

    generator = torch.Generator().manual_seed(1)
    pool, table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    for buffer in (pool.get_key_buffer(0), pool.get_value_buffer(0)):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    kept = table.clone()
    table[3, :70] = table[7, :64].new_tensor(range(100, 170))
    table[7, :64] = table[3, :64]
    table[7, 64:90] = torch.arange(300, 326, dtype=torch.int32)
    q = torch.randn(4, heads * dim, generator=generator)
    layer = SimpleNamespace(layer_id=0, k_scale=None, v_scale=None)
    try:
        for step in range(4):
            lens = torch.tensor([70 - 4 + step, 90 - 4 + step, fill, fill])
            static.copy_(lens)
            rows.copy_(torch.tensor([3, 7, 0, 0]))
            backend._expected = ["x", "y"], np.array([3, 7])
            backend.init_forward_metadata_out_graph(view(batch_size=4, seq_lens_cpu=lens, num_padding=2))
            before = table.clone()
            table[3] = 0  # for the next step SGLang gives the row, through which the other's prefix is read, away
            backend.init_forward_metadata_in_graph(view())  # as a replay would
            out = backend.forward_decode(q, None, None, layer, view())
            table.copy_(before)
            forest = backend.planner.in_force.forest.with_seq_len(lens.numpy().astype(np.int32))
            own_rows = replace(forest, row_offset=rows.numpy() * table.stride(0))
            exact, _ = direct_decode(
                own_rows, q.view(4, heads, dim).numpy(), pool.get_key_buffer(0).numpy(),
                pool.get_value_buffer(0).numpy(), table.view(-1).numpy(), 1, dim**-0.5,
            )  # fmt: skip
            assert torch.allclose(out.view(4, heads, dim), torch.from_numpy(exact).float(), atol=1e-5)
        assert backend.planner.in_force.forest.length.tolist() == [64]
        assert backend.planner.lens.data_ptr() == captured  # where the graph reads
    finally:
        table.copy_(kept)
        backend.planner.sharing.forget()


def test_a_replay_for_other_ranks_has_no_rows_of_requests_that_have_left(one_rank, started):
    """Under data-parallel attention: a step of three requests turns into a prefill, then this rank has none."""
    backend = pat_of(started)
    backend.init_cuda_graph_state(4, 4)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, reqs=list("abc"), req_pool_indices_cpu=torch.tensor([1, 2, 3])
    )
    rows, ones = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    replay = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, actual_forward_mode=ForwardMode.IDLE, seq_lens=ones, seq_lens_cpu=ones,
        req_pool_indices=rows,
    )  # fmt: skip
    backend.notice(batch)
    backend.notice(SimpleNamespace(forward_mode=ForwardMode.IDLE))
    backend.init_forward_metadata_out_graph(replay)
    assert backend.planner.in_force.n_requests == 2 and backend.planner.in_force.forest.n_nodes == 0
    assert backend.planner.in_force.forest.seq_len.tolist() == [1, 1]
    backend.planner.sharing.forget()


def test_sglang_may_write_to_the_table_once_a_replay_has_begun(one_rank, started):
    if hasattr(pat_backend.base_attn_backend, "SharedReadEnds"):
        ends = runner_of(started).attn_backend.shared_read_ends(ForwardMode.DECODE)
        assert ends is pat_backend.base_attn_backend.SharedReadEnds.PRE_REPLAY
    else:
        assert os.environ.get("SGLANG_FORCE_COARSE_WAR_BARRIER", "0") == "0"


# Rows -----------------------------------------------------------------------------------------------------------


def sharing_of(table, settled_at):
    generation = np.ones(len(table), np.int64)
    return RowSharing(table, generation, settled_at), generation


def lengths(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(("settled_at", "safe"), [(2, True), (1, False)])
def test_slots_that_a_row_gives_up_are_not_shared_with_their_next_owner(settled_at, safe):
    # Rows 1 and 2 have one prompt. Row 2 computed it too, so after its first decode step its slots are replaced by
    # those of row 1 and freed, and request c gets them for a prompt of its own.
    table = torch.zeros(4, 200, dtype=torch.int32)
    table[1, :64], table[2, :64] = torch.arange(64), torch.arange(64, 128)
    sharing, _ = sharing_of(table, settled_at)
    sharing.observe(["a"], np.array([1]), lengths(70))
    sharing.observe(["a", "b"], np.array([1, 2]), lengths(71, 70))
    table[3, :64], table[2, :64] = table[2, :64].clone(), table[1, :64]
    now = lengths(72, 71, 70)
    for step in range(3):
        sharing.observe(["a", "b", "c"], np.array([1, 2, 3]), now + step)
    forest = sharing.forest(np.array([1, 2, 3]), now + 2)
    if safe:
        assert forest.request_node.tolist() == [0, 0, -1]
        sharing.check(forest, now + 2)
    else:
        with pytest.raises(AssertionError, match="does not share"):
            sharing.check(forest, now + 2)


def test_whole_chunks_before_the_token_of_this_step_are_shared():
    table = torch.arange(600, dtype=torch.int32).view(2, 300).clone()
    table[1] = table[0]
    for tokens, shared in ((CHUNK, 0), (CHUNK + 1, 1), (3 * CHUNK, 2), (3 * CHUNK + 1, 3)):
        sharing, _ = sharing_of(table, 1)
        sharing.observe(["a", "b"], np.array([0, 1]), lengths(tokens, tokens + 5))
        forest = sharing.forest(np.array([0, 1]), lengths(tokens, tokens + 5))
        assert forest.shared_length.tolist() == [shared * CHUNK] * 2


@pytest.mark.parametrize(
    ("rids", "generation", "tokens", "shared"),
    [
        (["a", "b"], 1, 102, 96),  # the same requests: nothing is hashed again
        (["a", "c"], 1, 102, 0),
        (["a", "b"], 2, 102, 0),
        (["a", "b"], 1, 100, 0),  # it has not grown
    ],
)
def test_other_requests_in_the_same_rows(rids, generation, tokens, shared):
    table = torch.zeros(3, 200, dtype=torch.int32)
    sharing, generations = sharing_of(table, 1)
    rows = np.array([1, 2])
    assert sharing.observe(["a", "b"], rows, lengths(100, 100))
    assert not sharing.observe(["a", "b"], rows, lengths(101, 101))
    assert sharing.forest(rows, lengths(101, 101)).shared_length.tolist() == [96, 96]
    table[2], generations[2] = 7, generation
    now = lengths(102, tokens)
    assert sharing.observe(rids, rows, now) == (shared == 0)
    assert sharing.forest(rows, now).shared_length.tolist() == [shared] * 2


def test_requests_that_leave_or_change_places():
    sharing, _ = sharing_of(torch.zeros(4, 200, dtype=torch.int32), 1)
    rows, now = np.array([1, 2, 3]), lengths(100, 80, 60)
    sharing.observe(["a", "b", "c"], rows, now)
    assert sharing.observe(["c", "a", "b"], rows[[2, 0, 1]], now[[2, 0, 1]] + 1)
    forest = sharing.forest(rows[[2, 0, 1]], now[[2, 0, 1]] + 1)
    assert forest.shared_length.tolist() == [32, 64, 64] and forest.row_offset.tolist() == [600, 200, 400]
    assert sharing.observe(["a"], rows[:1], now[:1] + 2)
    assert len(sharing.trie) == 1 and sharing.forest(rows[:1], now[:1]).n_nodes == 0
    assert sharing.observe(["a", "b"], rows[:2], now[:2] + 3)
    assert sharing.forest(rows[:2], now[:2] + 3).shared_length.tolist() == [64, 64]
    sharing.forget()
    assert len(sharing.trie) == 0


def test_beams_share_nothing():
    sharing, _ = sharing_of(torch.zeros(3, 200, dtype=torch.int32), 1)
    for step in range(3):
        assert sharing.observe(["a"], np.array([1, 2]), lengths(100, 100) + step)
        assert sharing.forest(np.array([1, 2]), lengths(100, 100)).n_nodes == 0
    assert sharing.forest(np.array([1, 2]), lengths(100, 100)).row_offset.tolist() == [200, 400]


def test_hashes_do_not_pile_up_while_there_are_beams():
    sharing, _ = sharing_of(torch.zeros(4, 200, dtype=torch.int32), 1)
    for step in range(5):
        sharing.prefill(np.array([3]), np.array([64]))
        sharing.observe(["a"], np.array([1, 2]), lengths(100, 100) + step)
        assert not sharing._pending


def test_hashes_that_arrive_late(monkeypatch):
    table = torch.zeros(4, 200, dtype=torch.int32)
    sharing, _ = sharing_of(table, 1)
    arrived = []
    monkeypatch.setattr("feather_sglang.adapter.attention.rows.Hashes.ready", lambda self: bool(arrived))
    rows = np.array([1, 2])
    assert sharing.observe(["a", "b"], rows, lengths(100, 100))
    assert sharing.forest(rows, lengths(100, 100)).n_nodes == 0
    assert sharing.observe(["a", "c"], np.array([1, 3]), lengths(101, 90))  # b leaves before its hashes are there
    assert not sharing.observe(["a", "c"], np.array([1, 3]), lengths(102, 91))
    arrived.append(True)
    assert sharing.observe(["a", "c"], np.array([1, 3]), lengths(103, 92))
    assert sharing.forest(np.array([1, 3]), lengths(103, 92)).shared_length.tolist() == [64, 64]
    assert 2 not in sharing.trie


def test_what_prefill_found_in_the_cache_is_shared_from_the_first_step_on():
    table = torch.arange(4 * 300, dtype=torch.int32).view(4, 300).clone()
    table[2, :100] = table[1, :100]
    table[3] = table[2]  # also what it computed, which may still be replaced
    sharing, _ = sharing_of(table, 2)
    rows, now = np.array([1, 2, 3]), lengths(131, 131, 131)
    sharing.prefill(rows, np.array([70, 100, 100]))
    shared = []
    for step in range(3):
        sharing.observe(list("abc"), rows, now + step)
        forest = sharing.forest(rows, now + step)
        sharing.check(forest, now + step)
        shared.append(forest.shared_length.tolist())
    assert shared == [[64, 96, 96], [96, 128, 128], [96, 128, 128]]


def test_what_prefill_found_comes_too_late(monkeypatch):
    """All hashes arrive at once: those of the whole rows count."""
    arrived = []
    monkeypatch.setattr(Hashes, "ready", lambda self: bool(arrived))
    sharing, _ = sharing_of(torch.zeros(3, 200, dtype=torch.int32), 2)
    rows, now = np.array([1, 2]), lengths(102, 102)
    sharing.prefill(rows, np.array([70, 70]))
    for step in range(3):
        sharing.observe(["a", "b"], rows, now + step)
    assert sharing.forest(rows, now + 2).n_nodes == 0
    arrived.append(True)
    sharing.observe(["a", "b"], rows, now + 3)
    assert sharing.forest(rows, now + 3).shared_length.tolist() == [96, 96]


def test_rows_known_to_the_last_chunk_are_not_hashed_again(monkeypatch):
    submitted = []
    submit = RowHasher.submit
    monkeypatch.setattr(
        RowHasher, "submit", lambda self, rows, chunks: submitted.append(rows.tolist()) or submit(self, rows, chunks)
    )
    sharing, _ = sharing_of(torch.zeros(4, 200, dtype=torch.int32), 2)
    rows, now = np.array([1, 2, 3]), lengths(102, 102, 140)
    sharing.prefill(rows, np.array([100, 100, 100]))
    for step in range(4):
        sharing.observe(list("abc"), rows, now + step)
    assert submitted == [[1, 2, 3], [3]] and sharing.forest(rows, now + 3).shared_length.tolist() == [96] * 3


@pytest.mark.parametrize("late", [False, True])
def test_what_was_found_for_the_owner_before_is_forgotten(monkeypatch, late):
    arrived = [True]
    monkeypatch.setattr("feather_sglang.adapter.attention.rows.Hashes.ready", lambda self: arrived[-1])
    sharing, _ = sharing_of(torch.zeros(4, 200, dtype=torch.int32), 2)
    arrived.append(not late)
    sharing.prefill(np.array([1, 2]), np.array([100, 100]))
    sharing.observe(["x"], np.array([3]), lengths(50))  # the two are never seen to decode
    sharing.prefill(np.array([1, 2]), np.array([0, 0]))
    arrived.append(True)
    sharing.observe(["x", "a", "b"], np.array([3, 1, 2]), lengths(51, 102, 102))
    assert sharing.forest(np.array([3, 1, 2]), lengths(51, 102, 102)).n_nodes == 0
    assert 1 not in sharing.trie and 2 not in sharing.trie


class Rows:
    """A server's rows in miniature: slots by the chunk, a prefix cache, results that are processed a step late.

    A prompt is a string, a chunk its letter. What a request computed is entered into the cache by the step after its
    prefill's: where another was first, the row's slots are replaced by the cache's and freed.
    """

    def __init__(self, choose):
        self.choose = choose
        self.table = torch.zeros(8, 16 * CHUNK, dtype=torch.int32)
        self.sharing, self.generation = sharing_of(self.table, 2)
        self.free = deque(range(1, 30))
        self.cache, self.users, self.rows = {}, Counter(), deque(range(1, 8))
        self.running, self.prefilled, self.names = {}, [], itertools.count()

    def write(self, row, place, slots):
        chunk = torch.arange(CHUNK, dtype=torch.int32) + slots * CHUNK
        self.table[row, place * CHUNK : (place + 1) * CHUNK] = chunk

    def prefill(self, prompts):
        """A batch: each finds what is in the cache now, and computes the rest into its own slots, while they last."""
        batch = []
        for prompt in prompts[: len(self.rows)]:
            if len(self.free) + sum(not self.users[p] for p in self.cache) < len(prompt):
                break
            row, own = self.rows.popleft(), {}
            found = next((n for n in range(len(prompt) - 1, 0, -1) if prompt[:n] in self.cache), 0)
            for place in range(len(prompt)):
                prefix = prompt[: place + 1]
                if place < found:
                    self.users[prefix] += 1
                else:
                    own[place] = self.take()
                self.write(row, place, self.cache[prefix] if place < found else own[place])
            batch.append((f"r{next(self.names)}", row, prompt, own, found))
        self.sharing.prefill(
            np.array([row for _, row, *_ in batch], np.int64), np.array([one[-1] * CHUNK for one in batch], np.int64)
        )
        return batch

    def take(self):
        while not self.free:
            leaves = [
                p for p in self.cache if not self.users[p] and not any(q != p and q[: len(p)] == p for q in self.cache)
            ]
            self.free.append(self.cache.pop(self.choose(sorted(leaves))))
        return self.free.pop() if self.choose([True, False]) else self.free.popleft()

    def enter(self, batch):
        """The result of a prefill: what it computed goes into the cache."""
        for _, row, prompt, own, found in batch:
            for place in range(found, len(prompt)):
                prefix = prompt[: place + 1]
                if prefix in self.cache:
                    self.free.append(own[place])
                    self.write(row, place, self.cache[prefix])
                else:
                    self.cache[prefix] = own[place]
                self.users[prefix] += 1

    def end(self, name):
        row, prompt, _ = self.running.pop(name)
        for place in range(len(prompt)):
            self.users[prompt[: place + 1]] -= 1
        self.generation[row] += 1
        self.rows.append(row)

    def decode(self):
        names = sorted(self.running, key=lambda name: self.running[name][0])
        rows = np.array([self.running[name][0] for name in names], np.int64)
        now = lengths(*(self.running[name][2] for name in names))
        for name in names:
            self.running[name][2] += 1
        self.sharing.observe(names, rows, now)
        forest = self.sharing.forest(rows, now)
        self.sharing.check(forest, now)
        return dict(zip(names, (forest.shared_length // CHUNK).tolist(), strict=True))


@given(st.data())
@settings(max_examples=60)
def test_nobody_shares_what_is_not_theirs(data):
    """Whatever joins and leaves, however late hashes arrive: every step's plan is checked slot by slot."""
    choose = lambda options: data.draw(st.sampled_from(options))  # noqa: E731
    one = Rows(choose)
    prompts = ["a", "ab", "abc", "abcd", "abce", "x", "xy", "xyz", "abcdefgh", "abcdefgk"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hashes, "ready", lambda self: choose([True, True, False]))
        for _ in range(data.draw(st.integers(4, 14))):
            batch = one.prefill(data.draw(st.lists(st.sampled_from(prompts), min_size=1, max_size=4)))
            late = choose([True, False])  # under the overlap scheduler a decode step comes before the result
            if not late:
                one.enter(batch)
            one.running |= {name: [row, prompt, len(prompt) * CHUNK + 1] for name, row, prompt, *_ in batch}
            one.decode()
            if late:
                one.enter(batch)
            for _ in range(data.draw(st.integers(0, 2))):
                one.decode()
            for name in [name for name in one.running if choose([True, False])]:
                one.end(name)
            if one.running:
                one.decode()


def test_a_server_in_miniature_shares_what_was_cached_at_once():
    one = Rows(lambda options: options[0])
    batch = one.prefill(["abcx"])
    one.enter(batch)
    one.running |= {name: [row, prompt, len(prompt) * CHUNK + 1] for name, row, prompt, *_ in batch}
    assert one.decode() == {"r0": 0}
    batch = one.prefill(["abcy", "abcz", "abcz"])
    one.running |= {name: [row, prompt, len(prompt) * CHUNK + 1] for name, row, prompt, *_ in batch}
    assert one.decode() == {"r0": 3, "r1": 3, "r2": 3, "r3": 3}
    one.enter(batch)
    assert one.decode() == {"r0": 3, "r1": 3, "r2": 4, "r3": 4}


def test_one_step_hashes_so_much_and_no_more(monkeypatch):
    monkeypatch.setattr("feather_sglang.adapter.attention.rows.MAX_SLOTS", 8 * CHUNK)
    sharing, _ = sharing_of(torch.zeros(6, 400, dtype=torch.int32), 1)
    rows, now = np.arange(1, 6), lengths(300, 70, 70, 140, 70)
    rids = list("abcde")
    joined = []
    for step in range(4):
        sharing.observe(rids, rows, now + step)
        joined.append(len(sharing.trie))
    assert joined == [3, 4, 5, 5]


@pytest.mark.parametrize(
    ("flags", "shared"),
    [
        ({}, 128),
        ({"page_size": 64}, 128),
        ({"chunked_prefill_size": 4096, "enable_mixed_chunk": True}, 0),
        ({"disable_radix_cache": True}, 0),
    ],
)
def test_a_servers_requests_share_what_was_cached_from_their_first_step_on(server, flags, shared):
    """As under the overlap scheduler, where the first step's rows are not final. Not in a batch of both kinds."""
    if "page_size" in flags and lacks_pages(installed_version()):
        pytest.skip("this SGLang allocates pages with a GPU kernel")
    one = server(**flags)
    pat_of(one).planner.sharing._settled_at = 2
    prefix = [7] * 150
    one.submit("a", [*prefix, 8], max_new_tokens=20)
    for _ in range(4):
        one.step()
    for name, token in (("b", 9), ("c", 10)):
        one.submit(name, [*prefix, token], max_new_tokens=20)
    while len((batch := one.step()).reqs) < 3 or not batch.forward_mode.is_decode():
        pass
    assert pat_of(one).planner.in_force.forest.shared_length.tolist() == [shared] * 3
    one.drain()


def test_a_page_that_the_cache_holds_in_part_is_not_its_own(server, monkeypatch):
    backend, seen = pat_of(server()), []
    monkeypatch.setattr(backend, "_page", 64)
    sharing = backend.planner.sharing
    monkeypatch.setattr(sharing, "prefill", lambda rows, cached: seen.append((rows.tolist(), cached.tolist())))
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND, req_pool_indices_cpu=torch.tensor([1, 2, 3]), prefix_lens=[127, 128, 0],
        reqs=["a", "b", "c"], decoding_reqs=None,
    )  # fmt: skip
    backend.notice(batch)
    assert seen == [([1, 2, 3], [64, 128, 0])]
    batch.decoding_reqs = batch.reqs  # whose rows are not the cache's, and may not be final yet
    backend.notice(batch)
    assert len(seen) == 1


# Start-up -------------------------------------------------------------------------------------------------------


def test_attention_backend_pat_leaves_prefill_to_sglang(server, monkeypatch):
    # SGLang's own default on this CPU may want what the CPU does not have.
    seen = []
    one = server(attention_backend="pat", decode_attention_backend=None, prefill_attention_backend="torch_native")
    backend = runner_of(one).attn_backend
    named = backend.prefill_attention_backend_str, backend.decode_attention_backend_str
    assert named == ("torch_native", "pat")
    args = SimpleNamespace(attention_backend="pat", decode_attention_backend=None, prefill_attention_backend=None)
    attention.resolve(lambda args: seen.append((args.attention_backend, args.decode_attention_backend)), args)
    assert seen == [(None, None)] and (args.attention_backend, args.decode_attention_backend) == (None, "pat")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"prefill_attention_backend": "pat"}, "pat decodes only"),
        ({"attention_backend": "pat", "decode_attention_backend": "triton"}, "drop one of the two"),
    ],
)
def test_flags_that_contradict_each_other(server, flags, says):
    with pytest.raises(FeatherError, match=says):
        server(**flags)


def test_metrics_are_those_of_first_ranks(four_ranks):
    """SGLang adds up the metrics of all processes, and some ranks decode the same batches."""
    for rank in range(4):
        four_ranks(rank)
        assert (pat_metrics() is not None) == (rank in (0, 2))


def test_the_flags_offer_pat_for_decoding_only(one_rank, started):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    choices = {action.dest: action.choices for action in parser._actions}
    assert "pat" in choices["attention_backend"] and "pat" in choices["decode_attention_backend"]
    assert "pat" not in choices["prefill_attention_backend"]


def test_no_gpu_ends_start_up(server, monkeypatch):
    monkeypatch.delenv("FEATHER_PAT_REFERENCE")
    with pytest.raises(FeatherError, match="needs an NVIDIA GPU"):
        server()


def test_a_gpu_that_nothing_was_run_on_is_served_where_a_flag_asks_for_it(monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    runner = SimpleNamespace(device="cuda")
    with pytest.raises(FeatherError, match=r"was not run on a GPU of compute capability 8\.9"):
        pat_facts.uses_reference(runner)
    monkeypatch.setenv(VARIABLE, '{"unproven_gpu": true}')
    assert not pat_facts.uses_reference(runner)
    (record,) = caplog.records
    assert "8.9" in record.getMessage() and "\n" not in record.getMessage()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert not pat_facts.uses_reference(runner)
    assert len(caplog.records) == 1


def test_an_sglang_that_does_not_fit_ends_start_up(server, monkeypatch):
    monkeypatch.setattr(hooks, "mismatches", lambda part: [f"{part}: gone"])
    with pytest.raises(FeatherError, match="does not fit --decode-attention-backend pat: pat: gone"):
        server()


def test_a_hook_that_did_not_work_ends_start_up(one_rank, started):
    runner = SimpleNamespace(server_args=SimpleNamespace(attention_backend="pat", prefill_attention_backend=None))
    with pytest.raises(FeatherError, match="SGLang would prefill with pat"):
        attention.create_backend(runner)


@pytest.mark.parametrize(
    ("where", "name", "value", "says"),
    [
        ("model_config", "is_encoder_decoder", True, "encoder-decoder models"),
        (
            "",
            "kv_cache_dtype",
            torch.float8_e5m2,
            "a KV cache of float8_e5m2 under a model in float32 .--kv-cache-dtype: auto or fp8_e4m3.",
        ),
        ("", "token_to_kv_pool", SimpleNamespace(), "the KV cache SimpleNamespace"),
        ("server_args", "pp_size", 2, "--pp-size above 1"),
        ("server_args", "enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
        ("server_args", "enable_pdmux", True, "--enable-pdmux"),
        ("server_args", "disaggregation_mode", "decode", "--disaggregation-mode"),
    ],
)
def test_what_it_cannot_serve_is_named(one_rank, started, where, name, value, says):
    runner = runner_of(started)
    fields = {
        field: getattr(runner, field)
        for field in ("model", "model_config", "server_args", "token_to_kv_pool", "kv_cache_dtype", "dtype", "device")
    }
    fields["req_to_token_pool"] = None  # nothing is built
    if where:
        fields[where] = Changed(fields[where], name, value)
    else:
        fields[name] = value
    with pytest.raises(FeatherError, match=f"^the pat backend does not support {says}.*: choose another|{says}; drop"):
        pat_backend.backend_of(SimpleNamespace(**fields))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("sliding_window_size", 128, "sliding windows"),
        ("is_cross_attention", True, "cross attention"),
        ("attn_type", AttentionType.ENCODER_ONLY, "attention of type encoder_"),
        ("v_head_dim", 8, "values of 8 beside keys of 16"),
        ("tp_q_head_num", 129, "more than 128 query heads"),
        ("xai_temperature_len", 3, "attention temperature"),
        ("pos_encoding_mode", "ALIBI", "positional encoding ALIBI in attention"),
    ],
)
def test_layers_that_it_cannot_pack_are_left_to_another(one_rank, started, monkeypatch, name, value, says):
    runner = runner_of(started)
    layers = [module for module in runner.model.modules() if isinstance(module, pat_facts.RadixAttention)]
    monkeypatch.setattr(layers[0], name, value)
    packed = pat_limits.packed_layers(pat_facts.facts_of(runner, reference=True))
    assert [layer.layer_id for layer in packed] == [1]
    monkeypatch.setattr(layers[1], name, value)
    with pytest.raises(FeatherError, match=f"can pack no layer of this model .*{says}"):
        pat_limits.packed_layers(pat_facts.facts_of(runner, reference=True))


class Changed:
    """An object with one attribute that differs."""

    def __init__(self, original, name, value):
        self._original = original
        setattr(self, name, value)

    def __getattr__(self, name):
        return getattr(self._original, name)


def test_the_kernels_head_dims(one_rank, started):
    with pytest.raises(FeatherError, match=r"head_dim 16 \(only 64, 128, 256\)"):
        pat_limits.packed_layers(pat_facts.facts_of(runner_of(started), reference=False))


def test_arguments_of_attention_that_it_does_not_know(one_rank, started):
    layer = SimpleNamespace(layer_id=0)
    with pytest.raises(FeatherError, match="does not support rotary in attention"):
        pat_of(started).forward_decode(None, None, None, layer, None, rotary=torch.ones(2))
