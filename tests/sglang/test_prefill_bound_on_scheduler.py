"""``--feather-tbt`` and ``--feather-slo`` inside the installed SGLang: gaps, throughput, and the same tokens."""

import json
import logging
from collections import deque
from dataclasses import replace

import pytest
from harness import OverlapServer, Server
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from effort import newest_is_enough, samples
from feather_sglang.adapter.hooks import installed_version, lacks_pages
from feather_sglang.adapter.scheduler import guard, prefill_limit
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.prefill_bound import prefill_bound
from feather_sglang.scheduling.prefill_bound.prefill_bound import LONGEST
from feather_sglang.scheduling.prefill_bound.promise import SAFETY

DECODE, FIXED, TOKEN = 0.01, 0.004, 1e-4  # seconds of a decode step; of a prefill step, and of each token in it
OWN = DECODE + FIXED  # of a gap, beyond its tokens
BOUND = 0.05
FIT = (BOUND - OWN) / TOKEN  # tokens of a step
CHUNK = 1024


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Checked after every step, on the clock of a machine that runs one step after the other."""
    monkeypatch.setenv("FEATHER_DEBUG_CHECK", "1")
    monkeypatch.setattr(prefill_limit, "FLOOR_TOKENS", 32)
    made = []

    def make(tbt=1e3 * BOUND, policy="feather-bandit", kind=Server, gather="on", told=None, **overrides):
        options = {"tbt": None if tbt == "null" else tbt, "pace": 0, "gather": gather, **(told or {})}
        monkeypatch.setenv("FEATHER_OPTIONS", json.dumps(options))
        one = kind(tmp_path, policy, **{"chunked_prefill_size": CHUNK, **overrides})
        made.append(one)
        run_on_clock(one)
        return one

    yield make
    for one in made:
        one.close()


def run_on_clock(one):
    """A step begins when the one before has ended, and SGLang waits for that when it comes to the result."""
    one.now, one.ran, one.gaps, one.chunk = 0.0, [], [], one.scheduler.chunked_prefill_size
    one.first = {}  # when the first token of a request came
    one.pair = 0.0  # seconds of attention from one token to one before it
    one.feather.clock = lambda: one.now
    scheduler = one.scheduler
    forward, process, ends = scheduler.run_batch, scheduler.process_batch_result, deque()
    end, tokened = 0.0, {}

    def run_batch(batch, *args, **kwargs):
        nonlocal end
        decodes = batch.forward_mode.is_decode()
        new = 0 if decodes else sum(batch.extend_lens)
        lens = () if decodes else zip(batch.extend_lens, batch.prefix_lens, strict=True)
        pairs = sum(tokens * (context + tokens / 2) for tokens, context in lens)
        one.ran.append(("decode", len(batch.reqs)) if decodes else ("prefill", new))
        end = max(end, one.now) + (DECODE if decodes else FIXED + TOKEN * new + one.pair * pairs)
        ends.append(end)
        assert scheduler.chunked_prefill_size == one.chunk  # given back before anything runs
        return forward(batch, *args, **kwargs)

    def process_batch_result(batch, *args, **kwargs):
        before = {req.rid: len(req.output_ids) for req in batch.reqs}
        result = process(batch, *args, **kwargs)
        for req in batch.reqs:
            if len(req.output_ids) > before[req.rid]:
                one.first.setdefault(req.rid, one.now)
                if req.rid in tokened:
                    one.gaps.append(one.now - tokened[req.rid])
                tokened[req.rid] = one.now
        return result

    def step_ending(batch):
        comes(batch)
        one.now = max(one.now, ends.popleft())

    comes, one.feather.meters.step_ending = one.feather.meters.step_ending, step_ending
    scheduler.run_batch, scheduler.process_batch_result = run_batch, process_batch_result


def tail(number, length=4):
    return [20 + number] * length


def submit_some(one, count=4, outputs=150):
    """Some decode; what a token takes is known from a long prompt that was computed alone."""
    assert one.submit("alone", [8] * 1100, max_new_tokens=1)
    one.drain()
    for i in range(count):
        assert one.submit(f"r{i}", [7] * 60 + tail(i), max_new_tokens=outputs)
    while not all(one.requests[f"r{i}"].output_ids for i in range(count)):
        one.step()
    for _ in range(3):  # their decode steps are timed
        one.step()


def serve_long_prompts(one):
    """Long prompts and short ones arrive beside four that decode."""
    submit_some(one)
    one.gaps.clear()
    ran = len(one.ran)
    for i in range(4):
        assert one.submit(f"long{i}", [9 + i] * 900 + tail(i), max_new_tokens=6)
        assert one.submit(f"short{i}", [9 + i] * 40 + tail(50 + i, 20), max_new_tokens=6)
        for _ in range(5):
            one.step()
    one.drain()
    one.assert_nothing_left()
    return one.ran[ran:]


@pytest.mark.parametrize(
    ("kind", "page_size"), [(Server, 1), (OverlapServer, 16), (OverlapServer, 1), (Server, 16)][: samples(4, 2)]
)
def test_decode_steps_run_between_the_chunks_of_a_prompt(server, kind, page_size):
    if page_size > 1 and lacks_pages(installed_version()):
        pytest.skip("this SGLang allocates pages with a GPU kernel")
    one = server(kind=kind, page_size=page_size)
    bounded = serve_long_prompts(one)
    outputs, gaps = one.outputs(), one.gaps
    assert one.feather.rounds.limit.decoded_first > 5
    assert max(gaps) <= BOUND * (1.35 if kind is OverlapServer else 1.15)
    plain = server("null", kind=kind, page_size=page_size)
    unbounded = serve_long_prompts(plain)
    assert max(plain.gaps) > 2 * BOUND and plain.feather.rounds.limit is None
    assert plain.outputs() == outputs  # computed by a real model from KV that is where it should be
    prefill = [tokens for kind, tokens in bounded if kind == "prefill"]
    assert max(prefill) < max(tokens for kind, tokens in unbounded if kind == "prefill")
    # No more tokens are computed than without, but for what is cut to pages.
    assert sum(prefill) <= sum(tokens for kind, tokens in unbounded if kind == "prefill") + 64 * page_size


def promised(seconds=BOUND):
    """Options of a server that promises so much that it aims at this bound."""
    return {"slo": f"ttft=100,tbt={1e3 * seconds / SAFETY}"}


@newest_is_enough
@pytest.mark.parametrize("kind", [Server, OverlapServer])
def test_a_promise_bounds_as_the_flag_does(server, kind):
    one = server("null", kind=kind, told=promised())
    bounded = serve_long_prompts(one)
    flagged = server(kind=kind)
    assert serve_long_prompts(flagged) == bounded
    assert one.outputs() == flagged.outputs() and one.feather.rounds.limit.decoded_first > 5


@newest_is_enough
@pytest.mark.parametrize("kind", [Server, OverlapServer])
def test_a_bound_that_is_relative_to_an_idle_server_comes_from_its_shortest_step(server, kind):
    one = server("null", kind=kind, told={"slo": "ttft=10x,tbt=5x"})
    serve_long_prompts(one)
    least, bound = one.feather.meters.decode.least_seconds, one.feather.rounds.limit.bound
    assert least == pytest.approx(DECODE, rel=0.1)
    assert bound.asked == pytest.approx(SAFETY * 5 * least)
    assert max(one.gaps) <= SAFETY * 5 * DECODE * (1.35 if kind is OverlapServer else 1.15)


@pytest.mark.parametrize("kind", [Server, OverlapServer])
def test_a_burst_on_an_idle_server_waits_until_a_relative_bound_is_known(server, kind):
    one = server("null", kind=kind, told={"slo": "ttft=10x,tbt=5x"})
    for i in range(12):
        assert one.submit(f"long{i}", [9 + i] * 900 + tail(i), max_new_tokens=30)
    one.drain()
    one.assert_nothing_left()
    kinds = [kind for kind, _ in one.ran]
    first = kinds.index("decode")
    assert kinds[:first] == ["prefill"] * first and first <= 2  # one more may be launched before the first result
    assert one.feather.rounds.limit.bound.asked is not None


@pytest.mark.parametrize("kind", [Server, OverlapServer])
def test_what_lies_between_two_decode_steps_is_measured(server, kind):
    one = server(kind=kind)
    serve_long_prompts(one)
    meters = one.feather.meters
    assert meters.own.seconds == pytest.approx(OWN, rel=0.1)
    assert meters.prefill.bare_seconds == pytest.approx(TOKEN, rel=0.1)
    assert meters.decode.step_seconds == pytest.approx(DECODE, rel=0.1)


@pytest.mark.skipif(installed_version() < "0.5.23", reason="sglang has no --prefill-decode-interval before 0.5.23")
def test_decode_steps_that_sglang_spaces_prefill_with_end_a_gap(server):
    one = server(prefill_decode_interval=3)
    submit_some(one)
    ran = len(one.ran)
    for i in range(3):
        assert one.submit(f"long{i}", [9 + i] * 900 + tail(i), max_new_tokens=1)
    one.drain()
    kinds = "".join(kind[0] for kind, _ in one.ran[ran:]).strip("d")
    between = [len(decodes) for decodes in kinds.split("p")[1:-1]]
    assert len(between) > 3 and set(between) == {3}


def test_once_nobody_decodes_any_more_the_chunks_are_full_again(server):
    """The last of them ends between two chunks."""
    one = server()
    submit_some(one, count=1, outputs=7)
    assert one.submit("long", [9] * 3000, max_new_tokens=4)
    one.drain()
    chunks = [tokens for kind, tokens in one.ran[3:] if kind == "prefill"]
    assert chunks[0] < CHUNK / 2 and chunks[-2] == CHUNK and sum(chunks) == 3000, chunks
    one.assert_nothing_left()


def test_a_prompt_alone_is_computed_in_full_chunks(server):
    one = server()
    assert one.submit("long", [9] * 2500, max_new_tokens=4)
    one.drain()
    assert one.ran[:3] == [("prefill", CHUNK), ("prefill", CHUNK), ("prefill", 2500 - 2 * CHUNK)]
    one.assert_nothing_left()
    assert one.feather.rounds.limit.decoded_first == 0


def test_chunks_grow_to_what_the_bound_has_room_for(server):
    one = server()
    submit_some(one)
    ran = len(one.ran)
    assert one.submit("long", [9] * 2500, max_new_tokens=1)
    one.drain()
    chunks = [tokens for kind, tokens in one.ran[ran:] if kind == "prefill"]
    assert len(chunks) > 5 and all(0.8 * FIT <= tokens <= 1.1 * FIT for tokens in chunks[2:-1]), chunks


def beside_a_cached_prefix(server):
    """Some decode, a long prefix is cached, and attention to it takes time."""
    one = server()
    one.pair = 2e-7
    assert one.submit("warm", [9] * 2000, max_new_tokens=1)
    one.drain()
    submit_some(one)
    one.gaps.clear()
    return one


@pytest.mark.parametrize("count", [1, 5])
def test_tokens_after_a_long_context_take_longer_and_are_fewer(server, count):
    """One prompt is cut by its own context, and several share the time that there is."""
    one = beside_a_cached_prefix(server)
    ran = len(one.ran)
    for i in range(count):
        assert one.submit(f"after{i}", [9] * 2000 + tail(i, 600 // count), max_new_tokens=2)
    one.drain()
    one.assert_nothing_left()
    assert max(one.gaps) <= 1.15 * BOUND
    chunks = [tokens for kind, tokens in one.ran[ran:] if kind == "prefill"]
    fit = (BOUND - DECODE - FIXED) / (TOKEN + one.pair * 2000)
    assert sum(chunks) >= 600 and max(chunks) <= 1.2 * fit < 120


def test_prompts_of_unlike_context_share_the_time_that_there_is(server):
    one = beside_a_cached_prefix(server)
    assert one.submit("fresh", [11] * 900, max_new_tokens=2)
    assert one.submit("after", [9] * 2000 + tail(1, 40), max_new_tokens=2)
    one.step()
    took = 40 * (TOKEN + one.pair * 2020)
    fit = (BOUND - DECODE - FIXED - took) / (TOKEN + one.pair * 80)
    assert 40 + 0.8 * fit <= one.ran[-1][1] <= 40 + 1.2 * fit
    assert one.scheduler.chunked_req.rid == "fresh"
    one.drain()
    one.assert_nothing_left()
    assert max(one.gaps) <= 1.15 * BOUND


def test_where_a_decode_step_alone_is_too_long_prefill_takes_half_of_the_time(server):
    one = server(tbt=1e3 * DECODE / 2)
    submit_some(one)
    ran = len(one.ran)
    assert one.submit("long", [9] * 1500, max_new_tokens=1)
    while not one.requests["long"].output_ids:
        one.step()
    kinds, sizes = zip(*one.ran[ran:], strict=True)
    assert kinds == ("prefill", "decode") * (len(kinds) // 2) + ("prefill",)
    chunks = sizes[2:-1:2]  # of the first nobody knew what it would take
    assert len(chunks) > 5 and all(0.8 * OWN / TOKEN < tokens < 1.2 * OWN / TOKEN for tokens in chunks), chunks
    one.drain()
    one.assert_nothing_left()


@pytest.mark.parametrize("kind", [Server, OverlapServer])
def test_who_is_aborted_between_two_chunks_leaves_nothing(server, kind):
    one = server(kind=kind)
    submit_some(one, outputs=60)
    assert one.submit("long", [9] * 3000, max_new_tokens=4)
    before = one.feather.rounds.limit.decoded_first
    while one.feather.rounds.limit.decoded_first < before + 2:
        one.step()
    assert one.scheduler.chunked_req.rid == "long"
    one.abort("long")
    one.drain()
    one.assert_nothing_left()
    assert all(len(tokens) == 60 for rid, tokens in one.outputs().items() if rid[0] == "r")


def count_on_no_output(one):
    """Admission counts on next to no output, so that those who decode fill the pool and some are thrown out."""
    if hasattr(one.scheduler, "new_token_ratio_tracker"):
        one.scheduler.new_token_ratio_tracker.current = 0.01
    else:  # earlier releases
        one.scheduler.new_token_ratio = 0.01


@pytest.mark.parametrize(
    ("kind", "decoding"), [(Server, 1), (OverlapServer, 6), (OverlapServer, 1), (Server, 6)][: samples(4, 2)]
)
def test_where_memory_is_full_everybody_is_served(server, kind, decoding):
    """Those who decode fill the pool while a prompt is half computed; nobody is aborted."""
    memory = {"max_total_tokens": 1200, "chunked_prefill_size": 32}
    one = server(tbt=5, kind=kind, gather="off", schedule_conservativeness=0.01, **memory)
    limit, asked = one.feather.rounds.limit, []
    must_go_on = limit._must_go_on
    limit._must_go_on = lambda batch: asked.append(must_go_on(batch)) or asked[-1]

    def turns(count):
        for _ in range(count):
            count_on_no_output(one)
            one.step()

    for wave in range(2):
        for i in range(decoding):
            # SGLang keeps room for all tokens of those who ignore the end of a text.
            assert one.submit(f"r{wave}{i}", [7 + wave] * 20 + tail(i), max_new_tokens=300, ignore_eos=False)
        turns(12)
        scheduler = one.scheduler
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        assert one.submit(f"long{wave}", [30 + wave] * (free - 8 * decoding - 20), max_new_tokens=20)
        while scheduler.waiting_queue or not all(req.finished() for req in one.requests.values()):
            turns(1)
            assert one.steps < 20_000
    one.assert_nothing_left()
    assert {req.finished_reason.to_json()["type"] for req in one.requests.values()} <= {"length", "stop"}
    assert any(asked) and not all(asked) and sum(req.retraction_count for req in one.requests.values())


def test_a_prompt_that_must_go_on_is_computed_in_whole_steps(server, monkeypatch):
    """Where a decode step would take its memory none comes, and small chunks would gain nothing."""
    one = server()
    submit_some(one)
    monkeypatch.setattr(one.feather.rounds.limit, "_must_go_on", lambda batch: True)
    ran = len(one.ran)
    assert one.submit("long", [9] * 2500, max_new_tokens=1)
    while not one.requests["long"].output_ids:
        one.step()
    kinds, chunks = zip(*one.ran[ran:], strict=True)
    assert set(kinds) == {"prefill"} and all(0.8 * FIT <= tokens <= 1.1 * FIT for tokens in chunks[2:-1]), chunks
    one.drain()
    one.assert_nothing_left()


def test_a_pause_is_no_time_of_the_steps_before_it(server):
    one = server()
    submit_some(one)
    assert one.submit("long", [9] * 2500, max_new_tokens=1)
    while one.ran[-1][0] == "decode":
        one.step()
    one.now += 1000.0
    one.feather.meters.resumed()
    one.drain()
    assert one.feather.meters.own.seconds == pytest.approx(OWN, rel=0.1)
    one.assert_nothing_left()


def test_the_readings_are_the_first_ranks(server, monkeypatch):
    """Another rank, whose own figures say something else, does what they say."""
    one = server()
    submit_some(one)
    assert one.submit("long", [9] * 2500, max_new_tokens=1)
    said, asked = {"bare_seconds": 2 * TOKEN, "own_seconds": 0.02, "pair_tokens": 0.0}, []

    def readings(mine):
        asked.append(mine)
        return replace(mine, **said)

    monkeypatch.setattr(one.feather.meters.agreement, "readings", readings)
    one.step()
    assert one.ran[-1] == ("prefill", int(0.03 / (2 * TOKEN)))
    assert one.step().forward_mode.is_decode()
    said["own_seconds"] = 0.024
    one.step()
    assert one.ran[-1] == ("prefill", int(0.026 / (2 * TOKEN)))
    assert len(asked) == 3  # one broadcast a round, deferred or not
    one.drain()
    one.assert_nothing_left()


@pytest.mark.parametrize("where", ["begin", "open", "allow", "admitted", "end"])
def test_a_failure_gives_the_chunk_size_back_and_goes_on_as_fcfs(server, monkeypatch, where):
    one = server()
    submit_some(one, outputs=30)
    counter = guard.failure_counter()
    before = counter._value.get()

    def fail(*args):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(one.feather.rounds.limit, where, fail)
    monkeypatch.setenv("FEATHER_DEBUG_CHECK", "0")
    one.scheduler.__dict__.pop("get_next_batch_to_run", None)  # its check would say that feather failed
    ran = len(one.ran)
    assert one.submit("long", [9] * 2500, max_new_tokens=4)
    one.drain()
    assert one.feather.failed and counter._value.get() == before + 1
    chunks = [tokens for kind, tokens in one.ran[ran:] if kind == "prefill"]
    assert sum(chunks) == 2500 and chunks[1] == CHUNK  # the first may have been cut by then
    assert where != "begin" or chunks[0] == CHUNK
    expected = {"alone": 1, "long": 4}
    assert {rid: len(tokens) for rid, tokens in one.outputs().items()} == {f"r{i}": 30 for i in range(4)} | expected


def test_what_it_cannot_go_with_ends_start_up(server):
    with pytest.raises(FeatherError, match=r"^--schedule-policy feather-order leaves admission to SGLang, .*drop it$"):
        server(policy="feather-order")
    with pytest.raises(FeatherError, match=r"^--feather-tbt .*--enable-mixed-chunk"):
        server(enable_mixed_chunk=True)
    with pytest.raises(FeatherError, match=r"^--feather-tbt .*--chunked-prefill-size -1"):
        server(chunked_prefill_size=-1)


# What it costs, and what it keeps ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


def some_prompt(number, tokens):
    return [30 + number] * tokens + tail(number)


def serve(folder, tbt, arrivals, kind=Server, **sizes):
    """Serve prompts as (seconds after the one before, tokens, tokens to generate) beside two that decode for long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEATHER_OPTIONS", json.dumps({"tbt": tbt, "pace": 0}))
        patch.setattr(prefill_limit, "FLOOR_TOKENS", 32)
        one = kind(folder, "feather", **sizes)
    try:
        run_on_clock(one)
        submit_some(one, count=2, outputs=60)
        assert one.submit("beside", [9] * 500, max_new_tokens=1)  # what lies between two decode steps is timed
        while not one.requests["beside"].finished():
            one.step()
        one.gaps.clear()
        one.began = due = one.now
        for number, (after, tokens, outputs) in enumerate(arrivals):
            due += after
            while one.now < due:
                one.now = one.now if one.step() is not None else due
            assert one.submit(f"x{number}", some_prompt(number, tokens), max_new_tokens=outputs)
        one.drain()
        one.assert_nothing_left()
        one.in_force = one.feather.stats()["bound_in_force"]
        return one
    finally:
        one.close()


def assert_no_slower(one, plain, count):
    """Of the throughput 95% is kept for so many prompts, and 91% when the bound holds again at the end."""
    took = [sorted(when for rid, when in run.first.items() if rid[0] == "x")[count] - run.began for run in (one, plain)]
    assert took[0] <= took[1] / 0.95
    assert one.now - one.began <= 1.1 * (plain.now - plain.began)


LOADS = {"deadline": None, "derandomize": True, "phases": [Phase.generate]}


@newest_is_enough
@settings(max_examples=samples(4, 2), **LOADS)
@given(
    tbt=st.sampled_from([5, 20, 50, 80]),
    kind=st.sampled_from([Server, OverlapServer]),
    prompts=st.lists(st.tuples(st.just(0.0), st.integers(400, 900), st.integers(1, 24)), min_size=40, max_size=40),
    pool=st.integers(2500, 4096),
)
def test_where_more_waits_than_fits_into_memory_no_throughput_is_lost(folder, tbt, kind, prompts, pool):
    sizes = {"max_total_tokens": pool, "chunked_prefill_size": 2048}
    plain, one = (serve(folder, each, prompts, kind, **sizes) for each in (None, tbt))
    assert one.outputs() == plain.outputs()
    assert_no_slower(one, plain, 32)  # the others fit into memory


@newest_is_enough
@pytest.mark.parametrize("tbt", [50, 20][: samples(2, 1)])
@pytest.mark.parametrize("kind", [Server, OverlapServer])
def test_where_more_waits_than_the_patience_allows_no_throughput_is_lost_until_it_does(folder, tbt, kind):
    """Four seconds of prompts come at once: what is beyond the patience is computed as fast as without a bound."""
    prompts, sizes = [(0.0, 900, 2)] * 44, {"max_total_tokens": 60_000, "chunked_prefill_size": 4096}
    plain, one = (serve(folder, each, prompts, kind, **sizes) for each in (None, tbt))
    assert one.outputs() == plain.outputs()
    assert_no_slower(one, plain, 22)  # the others are computed within the patience
    # Nobody who decodes waits as long as without a bound, or longer than the longest gap: what was known of it at first
    # was a guess from the bound.
    assert max(one.gaps) <= LONGEST * OWN < max(plain.gaps) / 4


@newest_is_enough
@settings(max_examples=samples(6, 3), **LOADS)
@given(
    tbt=st.sampled_from([30, 50, 80]),
    kind=st.sampled_from([Server, OverlapServer]),
    prompts=st.lists(st.tuples(st.floats(0.1, 0.4), st.integers(10, 900), st.integers(1, 20)), min_size=5, max_size=12),
)
def test_under_little_load_all_gaps_are_within_the_bound(folder, tbt, kind, prompts):
    one = serve(folder, tbt, prompts, kind, max_total_tokens=16_000, chunked_prefill_size=2048)
    assert max(one.gaps) <= 1e-3 * tbt * (1.35 if kind is OverlapServer else 1.15)
    assert one.in_force in (None, pytest.approx(1e-3 * tbt))  # None: no prompt came while anybody decoded


def sample(name):
    return REGISTRY.get_sample_value(f"feather_bound_{name}_seconds")


@newest_is_enough
def test_what_is_asked_and_in_force_is_told(server, monkeypatch, caplog):
    monkeypatch.setattr(prefill_bound, "TOLD_EVERY", 0.5)
    caplog.set_level(logging.INFO, "feather_sglang")
    one = server(max_total_tokens=3000)
    submit_some(one, outputs=400)
    assert one.submit("a0", [9] * 500, max_new_tokens=2)
    while not one.requests["a0"].finished():
        one.step()
    assert sample("asked") == BOUND and sample("in_force") == pytest.approx(BOUND)
    for i in range(12):
        assert one.submit(f"b{i}", some_prompt(i, 900), max_new_tokens=2)
    while one.scheduler.waiting_queue:
        one.step()
    assert sample("asked") == BOUND and sample("in_force") > 2 * BOUND
    for i in range(12):
        assert one.submit(f"c{i}", some_prompt(20 + i, 300), max_new_tokens=2)
        for _ in range(15):
            one.step()
    assert sample("in_force") == pytest.approx(BOUND)
    one.drain()
    lines = [record.getMessage() for record in caplog.records if "between tokens" in record.getMessage()]
    assert [line.partition(" between tokens")[0] for line in lines] == [
        "feather: the load does not allow the bound of 50 ms",
        "feather: the bound of 50 ms",
    ]
    assert lines[1].endswith("between tokens holds again")
    one.feather.metrics.end()  # another policy takes over
    assert sample("asked") == sample("in_force") == 0
