"""``--feather-tbt`` inside the installed SGLang: decode steps between the chunks of a prompt, and the same tokens."""

import json
from collections import deque
from types import SimpleNamespace

import pytest
from harness import OverlapServer, Server

from feather_sglang.adapter.hooks import installed_version, lacks_pages
from feather_sglang.adapter.scheduler import guard, meters, prefill_limit
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.admission import stand_still
from feather_sglang.scheduling.modes.mode import Mode, Prefill, Ranking
from feather_sglang.scheduling.modes.mode_policy import ModePolicy
from feather_sglang.scheduling.modes.promise import SAFETY

DECODE, FIXED, TOKEN = 0.01, 0.004, 1e-4  # seconds of a decode step; of a prefill step, and of each token in it
BOUND = 0.05
CHUNK = 1024


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Checked after every step, on the clock of a machine that runs one step after the other."""
    monkeypatch.setenv("FEATHER_DEBUG_CHECK", "1")
    for module in (prefill_limit, meters):
        monkeypatch.setattr(module, "FLOOR_TOKENS", 32)
    monkeypatch.setattr(stand_still, "FIRST_TOKENS", 64)
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
    one.now, one.ran, one.gaps = 0.0, [], []
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
        assert scheduler.chunked_prefill_size == CHUNK  # given back before anything runs
        return forward(batch, *args, **kwargs)

    def process_batch_result(batch, *args, **kwargs):
        before = {req.rid: len(req.output_ids) for req in batch.reqs}
        result = process(batch, *args, **kwargs)
        for req in batch.reqs:
            if len(req.output_ids) > before[req.rid]:
                if req.rid in tokened:
                    one.gaps.append(one.now - tokened[req.rid])
                tokened[req.rid] = one.now
        return result

    def result_comes(batch, result):
        comes(batch, result)
        one.now = max(one.now, ends.popleft())

    comes, one.feather.meters.result_comes = one.feather.meters.result_comes, result_comes
    scheduler.run_batch, scheduler.process_batch_result = run_batch, process_batch_result


def tail(number, length=4):
    return [20 + number] * length


def submit_some(one, count=4, outputs=150):
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


@pytest.mark.parametrize("kind", [Server, OverlapServer])
@pytest.mark.parametrize("page_size", [1, 16])
def test_decode_steps_run_between_the_chunks_of_a_prompt(server, kind, page_size):
    if page_size > 1 and lacks_pages(installed_version()):
        pytest.skip("this SGLang allocates pages with a GPU kernel")
    one = server(kind=kind, page_size=page_size)
    bounded = serve_long_prompts(one)
    outputs, gaps = one.outputs(), one.gaps
    assert one.feather.rounds.limit.deferrals > 5
    assert max(gaps) <= BOUND * (1.35 if kind is OverlapServer else 1.15)
    plain = server("null", kind=kind, page_size=page_size)
    unbounded = serve_long_prompts(plain)
    assert max(plain.gaps) > 2 * BOUND and plain.feather.rounds.limit is None
    assert plain.outputs() == outputs  # computed by a real model from KV that is where it should be
    prefill = [tokens for kind, tokens in bounded if kind == "prefill"]
    assert max(prefill) < max(tokens for kind, tokens in unbounded if kind == "prefill")
    # No more tokens are computed than without, but for what is cut to pages.
    assert sum(prefill) <= sum(tokens for kind, tokens in unbounded if kind == "prefill") + 64 * page_size


def promising(folder, prefill, tbt=f"{1e3 * BOUND / SAFETY}"):
    """Options of a server that promises that bound, and always prefills in that way."""
    modes = folder / "modes.json"
    ModePolicy({}, Mode(Ranking.SHARED, prefill)).save(modes)
    return {"slo": f"ttft=100,tbt={tbt}", "modes": str(modes)}


@pytest.mark.parametrize("kind", [Server, OverlapServer])
def test_a_promise_bounds_as_the_flag_does(server, kind, tmp_path):
    one = server("null", kind=kind, told=promising(tmp_path, Prefill.BOUNDED))
    bounded = serve_long_prompts(one)
    flagged = server(kind=kind)
    assert serve_long_prompts(flagged) == bounded
    assert max(one.gaps) <= BOUND * (1.35 if kind is OverlapServer else 1.15)
    assert one.outputs() == flagged.outputs() and sum(one.feather.stats()["modes"].values()) > 5


@pytest.mark.parametrize("kind", [Server, OverlapServer])
def test_stops_without_a_bound_are_rare_enough_for_the_99th_percentile(server, kind, tmp_path):
    one = server("null", kind=kind, told=promising(tmp_path, Prefill.SPACED))
    submit_some(one, outputs=700)
    one.gaps.clear()
    for i in range(40):
        assert one.submit(f"long{i}", [9 + i] * 900 + tail(i), max_new_tokens=2)
        for _ in range(15):
            one.step()
    one.drain()
    one.assert_nothing_left()
    longer = [gap for gap in one.gaps if gap > BOUND * (1.35 if kind is OverlapServer else 1.15)]
    assert 0 < len(longer) <= 0.01 * len(one.gaps)


@pytest.mark.parametrize("kind", [Server, OverlapServer])
def test_a_bound_that_is_relative_to_an_idle_server_comes_from_its_shortest_step(server, kind, tmp_path):
    one = server("null", kind=kind, told=promising(tmp_path, Prefill.BOUNDED, "5x"))
    serve_long_prompts(one)
    still = one.feather.meters.still
    assert still.least_decode_seconds == pytest.approx(DECODE, rel=0.1)
    assert still.bound == pytest.approx(SAFETY * 5 * still.least_decode_seconds)


def test_at_once_is_as_without_a_promise(server, tmp_path):
    one = server("null", told=promising(tmp_path, Prefill.AT_ONCE))
    chunks = [tokens for kind, tokens in serve_long_prompts(one) if kind == "prefill"]
    plain = server("null")
    assert chunks == [tokens for kind, tokens in serve_long_prompts(plain) if kind == "prefill"]


def test_a_prompt_alone_is_computed_in_full_chunks(server):
    one = server()
    assert one.submit("long", [9] * 2500, max_new_tokens=4)
    one.drain()
    assert one.ran[:3] == [("prefill", CHUNK), ("prefill", CHUNK), ("prefill", 2500 - 2 * CHUNK)]
    one.assert_nothing_left()
    assert one.feather.rounds.limit.deferrals == 0


def test_chunks_grow_to_what_the_bound_has_room_for(server):
    one = server()
    submit_some(one)
    ran = len(one.ran)
    assert one.submit("long", [9] * 2500, max_new_tokens=1)
    one.drain()
    chunks = [tokens for kind, tokens in one.ran[ran:] if kind == "prefill"]
    fit = (BOUND - DECODE - FIXED) / TOKEN
    assert all(0.8 * fit <= tokens <= 1.1 * fit for tokens in chunks[2:-1]), chunks


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


def test_where_a_decode_step_alone_is_too_long_prefill_goes_on_in_small_steps(server):
    one = server(tbt=1e3 * DECODE / 2)
    submit_some(one)
    ran = len(one.ran)
    assert one.submit("long", [9] * 500, max_new_tokens=1)
    while one.requests["long"].output_ids == []:
        one.step()
    kinds = [kind for kind, _ in one.ran[ran:]]
    assert kinds == ["prefill", "decode"] * (len(kinds) // 2) + ["prefill"] * (len(kinds) % 2)
    assert {tokens for kind, tokens in one.ran[ran:] if kind == "prefill"} <= {32, 500 % 32}
    one.drain()
    one.assert_nothing_left()


@pytest.mark.parametrize("kind", [Server, OverlapServer])
def test_who_is_aborted_between_two_chunks_leaves_nothing(server, kind):
    one = server(kind=kind)
    submit_some(one, outputs=60)
    assert one.submit("long", [9] * 3000, max_new_tokens=4)
    deferrals = one.feather.rounds.limit.deferrals
    while one.feather.rounds.limit.deferrals < deferrals + 2:
        one.step()
    assert one.scheduler.chunked_req.rid == "long"
    one.abort("long")
    one.drain()
    one.assert_nothing_left()
    assert all(len(tokens) == 60 for rid, tokens in one.outputs().items() if rid != "long")


def count_on_no_output(one):
    """Admission counts on next to no output, so that those who decode fill the pool and some are thrown out."""
    if hasattr(one.scheduler, "new_token_ratio_tracker"):
        one.scheduler.new_token_ratio_tracker.current = 0.01
    else:  # earlier releases
        one.scheduler.new_token_ratio = 0.01


@pytest.mark.parametrize("kind", [Server, OverlapServer])
@pytest.mark.parametrize("decoding", [1, 6])
def test_where_memory_is_full_everybody_is_served(server, kind, decoding):
    """Those who decode fill the pool while a prompt is half computed; nobody is aborted."""
    one = server(tbt=5, kind=kind, max_total_tokens=1200, gather="off", schedule_conservativeness=0.01)
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


def test_a_pause_is_no_time_of_the_steps_before_it(server):
    one = server()
    submit_some(one)
    assert one.submit("long", [9] * 2500, max_new_tokens=1)
    while one.ran[-1][0] == "decode":
        one.step()
    meters = one.feather.meters
    assert meters.fit._added.any()  # its time is known when the next decode step has ended
    meters.resumed()
    assert not meters.fit._added.any()
    one.drain()
    one.assert_nothing_left()


@pytest.mark.parametrize("kind", [Server, OverlapServer])
def test_decode_steps_are_timed_alone_while_prompts_are_computed(server, kind, monkeypatch):
    monkeypatch.setattr(stand_still, "_ALONE_AGAIN", 4)
    one = server(kind=kind)
    fit = one.feather.meters.fit
    waited = fit.waited
    monkeypatch.setattr(fit, "waited", lambda seconds: waited(0.0))  # as if the host were the slower
    ran = [step for step, _ in serve_long_prompts(one)]
    steps = "".join("d" if step == "decode" else "p" for step in ran)
    assert "pddp" in steps or "pdddp" in steps, steps  # else a prefill step follows each of them
    assert one.feather.meters.still.decode_seconds == pytest.approx(DECODE, rel=0.01)


@pytest.mark.parametrize("kind", [Server, OverlapServer])
def test_how_long_it_waits_for_a_gpu_is_measured(server, kind, monkeypatch):
    one, told = server(kind=kind), []
    monkeypatch.setattr(one.feather.meters.fit, "waited", told.append)
    submit_some(one, outputs=3)
    one.drain()
    assert told and set(told) == {None}  # there is no GPU

    class Copied:
        def synchronize(self):
            one.now += 0.02

    def comes(decodes):
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: decodes), reqs=[])
        meters.Meters.result_comes(one.feather.meters, batch, SimpleNamespace(copy_done=Copied()))
        return told[-1]

    monkeypatch.setattr(one.feather.meters, "on_gpu", True)
    assert comes(False) == pytest.approx(0.02)
    # Without overlap nothing else is launched while a decode step runs, so that it waits for each.
    assert comes(True) == (pytest.approx(0.02) if kind is OverlapServer else 0.0)


def test_the_readings_are_the_first_ranks(server, monkeypatch):
    """Another rank, whose own figures say nothing, does what they say."""
    one = server()
    submit_some(one)
    assert one.submit("long", [9] * 2500, max_new_tokens=1)
    one.step()
    stood, told = 0.0, []

    def readings(now, *measured):
        told.append(measured)
        return now, *measured[:-8], FIXED, TOKEN, 0.0, 0.0, CHUNK, stood, DECODE, DECODE

    monkeypatch.setattr(one.feather.meters.agreement, "readings", readings)
    one.feather.meters.still.restart()
    stood = BOUND
    assert one.step().forward_mode.is_decode()
    stood = 0.0
    assert one.step().forward_mode.is_extend()
    assert len(told) == 2  # one broadcast a round, deferred or not
    one.drain()


def test_a_failure_gives_the_chunk_size_back_and_goes_on_as_fcfs(server, monkeypatch):
    one = server()
    submit_some(one, outputs=30)
    counter = guard.failure_counter()
    before = counter._value.get()

    def fail(*args):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(prefill_limit, "chunk_tokens", fail)
    monkeypatch.setenv("FEATHER_DEBUG_CHECK", "0")
    one.scheduler.__dict__.pop("get_next_batch_to_run", None)  # its check would say that feather failed
    ran = len(one.ran)
    assert one.submit("long", [9] * 2500, max_new_tokens=4)
    one.drain()
    assert one.feather.failed and counter._value.get() == before + 1
    assert [tokens for kind, tokens in one.ran[ran:] if kind == "prefill"] == [CHUNK, CHUNK, 2500 - 2 * CHUNK]
    assert all(len(tokens) == (4 if rid == "long" else 30) for rid, tokens in one.outputs().items())


def test_what_it_cannot_go_with_ends_start_up(server):
    with pytest.raises(FeatherError, match=r"^--schedule-policy feather-order leaves admission to SGLang, .*drop it$"):
        server(policy="feather-order")
    with pytest.raises(FeatherError, match=r"^--feather-tbt lets prefill and decode alternate, .*drop one$"):
        server(enable_mixed_chunk=True)
    with pytest.raises(FeatherError, match=r"^--feather-tbt cuts prompts into chunks, .*drop one$"):
        server(chunked_prefill_size=-1)
