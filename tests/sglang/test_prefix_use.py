"""Requests that cannot use the prefix cache, or leave nothing in it, are not made to wait for it; all others are."""

import inspect
import random

import pytest
import torch
from harness import CONFIG, OverlapServer, Server, tokenized
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    OpenSessionReqInput,
    PauseGenerationReqInput,
    SessionParams,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams

PREFIX, REQUESTS, OUTPUTS = 320, 12, 3
# What a request asks for whose prompt has PREFIX tokens in common with the others' and three of its own.
ALONE = {
    "prompt logprobs": {"return_logprob": True, "logprob_start_len": 0},
    "prompt logprobs from the middle": {"return_logprob": True, "logprob_start_len": 200},
    "no prefill server": {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0, "bootstrap_port": 1},
    "embeddings": {},
    "session": {},
}
FOUND = {"the last prompt logprobs": PREFIX - 10}  # in the cache, where not all of PREFIX
SHARED = {
    "nothing": {},
    "output logprobs": {"return_logprob": True, "logprob_start_len": -1},
    "the last prompt logprobs": {"return_logprob": True, "logprob_start_len": FOUND["the last prompt logprobs"]},
}


def put(one, rid, tokens, new=OUTPUTS, **more):
    params = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    assert more.keys() <= set(inspect.signature(TokenizedGenerateReqInput).parameters)
    one.scheduler.handle_generate_request(tokenized(rid, tokens, params, **more))
    one.requests[rid] = one.scheduler.waiting_queue[-1]
    assert one.requests[rid].rid == rid


def run(one):
    """Prefill steps and prompt tokens computed until nothing waits or runs."""
    steps = tokens = 0
    for _ in range(500):
        batch = one.step()
        if batch is not None and batch.forward_mode.is_extend():
            steps += 1
            tokens += sum(batch.extend_lens)
        elif batch is None and not one.scheduler.waiting_queue:
            assert all(req.finished() for req in one.requests.values())
            return steps, tokens
    pytest.fail("requests still wait or run")


def tokens_of(kind, count):
    return random.Random(kind).choices(range(2, 500), k=count)


def prefills(one, kind):
    """The figures of `run` for requests of one kind that arrive at once."""
    more, prefix = {**ALONE, **SHARED}[kind], tokens_of(kind, PREFIX)
    if kind == "session":
        for n in range(REQUESTS):
            one.scheduler.open_session(
                OpenSessionReqInput(capacity_of_str_len=1000, session_id=f"s{n}", streaming=True)
            )
            put(one, f"{kind} before {n}", prefix[:5], session_params=SessionParams(id=f"s{n}"))
        run(one)
    for n in range(REQUESTS):
        if kind == "session":
            more = {"session_params": SessionParams(id=f"s{n}")}
        elif kind == "embeddings":
            embeddings = PositionalEmbeds(embeds=[torch.zeros(CONFIG["hidden_size"])], positions=[3])
            more = {"positional_embed_overrides": embeddings}
        put(one, f"{kind} {n}", [*prefix, 5 + n, 6, 7], **more)
    return run(one)


@pytest.fixture(scope="module", params=[Server, OverlapServer])
def figures(request, tmp_path_factory):
    """Of every kind, under each policy."""
    found = {}
    for policy in ("fcfs", "feather"):
        one = request.param(
            tmp_path_factory.mktemp("model"),
            policy,
            enable_streaming_session=True,
            max_total_tokens=40_000,
            max_prefill_tokens=16_384,
            chunked_prefill_size=2048,
            max_running_requests=32,
        )
        found[policy] = {kind: prefills(one, kind) for kind in (*SHARED, *ALONE)}
        if policy == "feather":
            assert not one.feather.failed
        one.close()
    return found


@pytest.mark.parametrize("kind", ALONE)
def test_who_cannot_share_a_prefix_does_not_wait_for_it(figures, kind):
    steps, tokens = figures["feather"][kind]
    stock_steps, stock_tokens = figures["fcfs"][kind]
    assert steps == stock_steps and tokens <= 1.01 * stock_tokens


@pytest.mark.parametrize("kind", SHARED)
def test_all_others_wait_for_their_prefix(figures, kind):
    steps, tokens = figures["feather"][kind]
    computed_anyway = PREFIX + 3 - FOUND.get(kind, PREFIX)
    assert steps == 2 and tokens == PREFIX + 3 + (REQUESTS - 1) * computed_anyway


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("FEATHER_DEBUG_CHECK", "1")
    one = Server(tmp_path, "feather", max_total_tokens=20_000, chunked_prefill_size=8192, max_running_requests=32)
    yield one
    one.close()


def test_a_long_part_of_their_own_does_not_keep_requests_from_sharing_the_rest(server):
    """Logprobs of the answers to one long question: the question is computed once, each answer by itself."""
    question = tokens_of("question", 500)
    for n in range(6):
        put(server, f"r{n}", question + tokens_of(n, 200), return_logprob=True, logprob_start_len=500)
    assert run(server) == (2, 500 + 6 * 200)


def test_nobody_waits_behind_a_prefix_that_is_not_kept(server):
    prefix = tokens_of("prefix", PREFIX)
    put(server, "gone", [*prefix, 5, 6, 7], **ALONE["no prefill server"])
    put(server, "kept", [*prefix, 8, 6, 7])
    assert run(server) == (1, 2 * (PREFIX + 3))
    server.assert_nothing_left()


def test_who_is_retracted_still_shares_nothing(server):
    prefix = tokens_of("prefix", PREFIX)
    for n in range(6):
        put(server, f"r{n}", [*prefix, 5 + n, 6, 7], new=8, **ALONE["prompt logprobs"])
    while not all(req.output_ids for req in server.requests.values()):
        server.step()
    server.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    assert len(server.scheduler.waiting_queue) == 6 and server.feather.admission.tree.common_depth("r0", "r1") == 0
    server.scheduler.continue_generation(ContinueGenerationReqInput())
    steps, tokens = run(server)
    assert steps == 1 and tokens > 6 * (PREFIX + 3)
    server.assert_nothing_left()
