"""Prefixes that wait, together with chunked prefill, retraction, LoRA adapters and cache salts."""

import random

import pytest
import torch
from harness import CONFIG, Server
from sglang.srt.lora.lora_registry import LoRARef
from torch.overrides import TorchFunctionMode

from feather_sglang.adapter.scheduler.life_cycle import LifeCycle
from feather_sglang.adapter.scheduler.rounds import AdmissionRounds
from feather_sglang.scheduling.policies import make_policy

PREFIX, TAIL = 640, 4
TOKEN_SECONDS = 0.002  # of prefill, on the tests' clock


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Checked after every step, on a clock, under a policy that never stops.

    It has seen a load of short outputs in which requests often meet others of their prefix, and has timed prefill.
    """
    monkeypatch.setenv("FEATHER_DEBUG_CHECK", "1")
    made = []

    def make(gather="on", **overrides):
        monkeypatch.setenv("FEATHER_OPTIONS", f'{{"gather": "{gather}"}}')
        one = Server(tmp_path, "feather-heuristic", **overrides)
        made.append(one)
        let_prefixes_matter(one)
        run_on_clock(one)
        one.feather.admission.policy = make_policy("always-add")
        one.feather.meters.prefill.seconds_per_token = TOKEN_SECONDS
        if gathering := one.feather.admission.state.deferrals.prefix_batching:
            for _ in range(64):
                gathering.arrived(3, met=True)
            gathering.finished(3)
        return one

    yield make
    for one in made:
        one.close()


def let_prefixes_matter(one):
    """With SGLang's random weights, what the model says depends on a prompt's last token alone."""
    for name, weight in one.scheduler.tp_worker.model_runner.model.named_parameters():
        if "norm" in name:
            weight.data.fill_(1)
        elif "self_attn" in name:
            weight.data.mul_(1000)


def run_on_clock(one):
    """A decode step takes a second, any other as long as its prompt tokens."""
    one.now = 0.0
    one.feather.clock = lambda: one.now
    forward = one.scheduler.run_batch

    def run_batch(batch, *args, **kwargs):
        one.now += 1.0 if batch.forward_mode.is_decode() else TOKEN_SECONDS * sum(batch.extend_lens)
        return forward(batch, *args, **kwargs)

    one.scheduler.run_batch = run_batch


def prompt(name):
    """Group and number: all of group "a" begin with the same tokens."""
    return random.Random(name[0]).choices(range(2, 512), k=PREFIX) + [300 + int(name[1:].rstrip("xyz"))] * TAIL


def submit(one, names, outputs=3, **options):
    for name in names.split():
        assert one.submit(name, prompt(name), max_new_tokens=outputs, **options)


def run(one, names, **options):
    """Submit and step until all of them decode."""
    submit(one, names, **options)
    while not all(one.requests[name].output_ids for name in names.split()):
        one.step()


def ran(one):
    """Step, and tell whose rows ran."""
    batch = one.step()
    return batch and sorted(req.rid for req in batch.reqs)


def waiting(one):
    return {req.rid for req in one.scheduler.waiting_queue}


def postponed(one):
    return set(one.feather.admission.state.deferrals.batching)


def computed(one):
    """Prompt tokens that were not in the cache."""
    return sum(len(req.origin_input_ids) - req.cached_tokens for req in one.requests.values())


# Chunked prefill and retraction ---------------------------------------------------------------------------------


def test_a_prefix_waits_beside_one_that_is_computed_in_chunks(server):
    """Beside four or five others two requests wait for a third of their prefix; a lone one waits beside ten."""
    one = server(chunked_prefill_size=128, max_total_tokens=2500)
    run(one, "f0 f1 f2 f3", outputs=30)
    submit(one, "a0 a1 b0 b1 b2 c0")
    for _ in range(3):
        assert ran(one) == ["b0"] and one.scheduler.chunked_req.rid == "b0"
        assert {"a0"} <= postponed(one) <= {"a0", "c0"} and waiting(one) == {"a0", "a1", "b1", "b2", "c0"}
    submit(one, "a2")
    while (rows := ran(one)) == ["b0"]:
        assert postponed(one) <= {"c0"}
    assert rows == ["a0", "b0"]
    while one.scheduler.chunked_req is not None:
        assert one.scheduler.chunked_req.rid == "a0" and waiting(one) >= {"a1", "a2", "c0"}
        one.step()
    one.step()
    assert waiting(one) == postponed(one) == {"c0"}
    while waiting(one):
        assert len(one.feather.admission.tree.active) == 10 and one.step() is not None
    assert one.scheduler.chunked_req.rid == "c0" and len(one.feather.admission.tree.active) == 5
    one.drain()
    assert computed(one) == 4 * PREFIX + 11 * TAIL
    one.assert_nothing_left()


@pytest.mark.parametrize("chunk", [128, 8192])
def test_a_batch_without_room_for_a_prefix_is_open_to_one_just_computed(server, chunk):
    one = server(chunked_prefill_size=chunk, max_total_tokens=2000)
    run(one, "f0 f1 f2 f3", outputs=30)
    submit(one, "a0 a1 a2 b0 b1 b2", outputs=9)
    while (rows := ran(one)) == ["a0"]:
        pass
    assert rows == ["a1", "a2"] and waiting(one) == {"b0", "b1", "b2"}
    one.drain()
    assert computed(one) == 3 * PREFIX + 10 * TAIL
    one.assert_nothing_left()


BATCH = [(f"f{i:02}", 50 + 2 * i) for i in range(20)]
WAVES = [(10.0, "d0"), *((10.0 + 6 * i, f"{group}{i}") for i in range(3) for group in "abc")]
FIRST = {"a0", "b0", "c0", "d0"}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What fcfs says to each, all at once, in whole prompts, with memory for all."""
    one = Server(tmp_path_factory.mktemp("fcfs"), "fcfs", max_total_tokens=8000)
    let_prefixes_matter(one)
    for name, outputs in [*BATCH, *((name, 20) for _, name in WAVES)]:
        submit(one, name, outputs)
    one.drain()
    said = one.outputs()
    one.close()
    assert len({tuple(tokens[:20]) for tokens in said.values()}) > 25
    return said


def serve(one, outputs):
    """Beside twenty of one prefix: three waves of one request for each of three others, and a lone one.

    Notes who waited for others and for how long, who was computed in chunks, and who was retracted.
    """
    due, builder = list(WAVES), one.feather.admission
    one.held, one.chunked, one.retracted, most = {}, set(), set(), 0
    for name, length in BATCH:
        submit(one, name, length, ignore_eos=False)
    while due or not all(req.finished() for req in one.requests.values()):
        while due and due[0][0] <= one.now:
            submit(one, due.pop(0)[1], outputs, ignore_eos=False)
        now, rounds = one.now, builder.state.fairness.round
        if one.step() is None:
            one.now += 1.0
        chunked = {one.scheduler.chunked_req.rid} if one.scheduler.chunked_req else set()
        assert chunked <= builder.tree.active and builder.state.deferrals.batching <= waiting(one)
        assert not any(one.requests[name].output_ids for name in builder.state.deferrals.batching)
        one.chunked |= chunked
        one.retracted |= {req.rid for req in one.scheduler.waiting_queue if req.output_ids}
        most = max(most, len(builder.tree.active))
        if builder.state.fairness.round > rounds:
            one.held |= {
                name: now - builder.state.fairness.arrivals[name].time for name in builder.state.deferrals.batching
            }
    one.assert_nothing_left()
    assert max(one.held.values(), default=0) <= most * (PREFIX + TAIL) * TOKEN_SECONDS
    return one.outputs()


def cut(expected, outputs):
    lengths = dict(BATCH)
    return {name: tokens[: lengths.get(name, outputs)] for name, tokens in expected.items()}


def short_of_memory(**more):
    """Room for the batch and one or two prefixes; hardly any is kept for outputs."""
    return {"chunked_prefill_size": 128, "max_total_tokens": 2600, "schedule_conservativeness": 0.01, **more}


MIXED = {"enable_mixed_chunk": True, "schedule_conservativeness": 1.0}  # with less SGLang itself may end for lack of it


@pytest.mark.parametrize("limits", [{}, MIXED], ids=["chunks", "mixed chunks"])
def test_prompts_in_chunks_are_seldom_computed_again_and_answered_the_same(server, expected, limits):
    one = server(**short_of_memory(**limits))
    assert serve(one, 2) == cut(expected, 2)
    assert one.held.keys() >= FIRST and one.chunked >= {"f00", *FIRST} and not one.retracted
    assert computed(one) < 6 * PREFIX + 30 * TAIL


def test_without_gathering_they_often_are(server, expected, monkeypatch):
    monkeypatch.setattr(LifeCycle, "_look_up", lambda self, req: 0)  # nor by what was cached when they came
    one = server("off", **short_of_memory())
    assert serve(one, 2) == cut(expected, 2)
    assert computed(one) > 6 * PREFIX + 30 * TAIL and not one.held


def test_where_requests_are_retracted_all_are_answered_the_same(server, expected):
    one = server(**short_of_memory(max_total_tokens=2500))
    assert serve(one, 20) == expected
    assert one.retracted and one.held.keys() >= FIRST and one.chunked >= {"f00", *FIRST}


@pytest.mark.parametrize("chunk", [1024, 128])
def test_a_chunk_is_timed(server, chunk):
    one = server(chunked_prefill_size=chunk)
    one.feather.meters.prefill.seconds_per_token = None
    run(one, "f0")
    assert one.submit("long", [5] * 2500, max_new_tokens=1)
    one.drain()
    assert one.feather.meters.prefill.seconds_per_token == pytest.approx(TOKEN_SECONDS)


# LoRA adapters and cache salts ----------------------------------------------------------------------------------


class Unpinned(TorchFunctionMode):
    """SGLang's LoRA layers pin what they keep in host memory, which torch refuses without a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.pin_memory:
            return args[0]
        return function(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


@pytest.fixture
def lora_server(server):
    """With three adapters in memory, of which so many may be in one batch; none counts as one."""

    def make(gather="on", at_a_time=4, **overrides):
        one = server(
            gather,
            enable_lora=True,
            max_lora_rank=2,
            lora_target_modules=["o_proj"],
            lora_backend="torch_native",
            max_loras_per_batch=at_a_time,
            **overrides,
        )
        numbers = torch.Generator().manual_seed(0)
        width = CONFIG["hidden_size"]
        for adapter in "xyz":
            weights = {
                f"base_model.model.model.layers.{layer}.self_attn.o_proj.{side}.weight": torch.randn(
                    shape, generator=numbers
                )
                for layer in range(CONFIG["num_hidden_layers"])
                for side, shape in (("lora_A", (2, width)), ("lora_B", (width, 2)))
            }
            loaded = one.scheduler.tp_worker.model_runner.load_lora_adapter_from_tensors(
                LoRARef(adapter, adapter, "from the test", False),
                weights,
                {"r": 2, "lora_alpha": 4, "peft_type": "LORA", "target_modules": ["o_proj"]},
            )
            assert loaded.success, loaded.error_message
        return one

    with Unpinned():
        yield make


@pytest.fixture(params=["lora_id", "extra_key"])
def key(request):
    """What keeps requests of equal prompts from sharing their KV."""
    return request.param


def test_a_prefix_under_another_key_is_another_prefix(server, lora_server, key):
    """Beside four others three of one prefix are enough, and beside seven five."""
    one = (lora_server if key == "lora_id" else server)(max_total_tokens=2400)
    run(one, "f0 f1 f2 f3", outputs=30)
    submit(one, "a0x a1x", **{key: "x"})
    submit(one, "a0y", **{key: "y"})
    submit(one, "c0")
    one.step()
    assert waiting(one) == {"a0x", "a1x", "a0y", "c0"} and postponed(one) == {"a0x", "a0y", "c0"}
    submit(one, "a2x", outputs=20, **{key: "x"})
    assert ran(one) == ["a0x"] and ran(one) == ["a1x", "a2x"]
    one.step()
    assert waiting(one) == postponed(one) == {"a0y", "c0"}  # it runs, but not under y
    submit(one, "a1y a2y a3y a4y", **{key: "y"})
    assert ran(one) == ["a0y"] and ran(one) == ["a1y", "a2y", "a3y", "a4y"]
    one.drain()
    assert computed(one) == 4 * PREFIX + 13 * TAIL
    said = one.outputs()
    assert (said["a0x"] == said["a0y"]) == (key == "extra_key")
    one.assert_nothing_left()


def test_who_waits_keeps_no_other_adapter_out_of_the_batch(lora_server):
    one = lora_server(at_a_time=2, max_total_tokens=2400)
    run(one, "f0 f1 f2 f3", outputs=30)  # under none, which counts as one
    submit(one, "a0x a1x", lora_id="x")
    submit(one, "a1y a2y a3y a4y a5y", lora_id="y")
    assert ran(one) == ["a1y"] and postponed(one) >= {"a0x"}
    assert ran(one) == ["a2y", "a3y", "a4y", "a5y"] and waiting(one) == {"a0x", "a1x"}
    one.drain()
    one.assert_nothing_left()


def test_nobody_waits_for_a_prefix_that_is_computed_under_another_key(server, lora_server, key):
    one = (lora_server if key == "lora_id" else server)(chunked_prefill_size=256, max_total_tokens=2400)
    run(one, "f0 f1 f2 f3", outputs=30)
    for name in "xy":
        submit(one, f"a0{name} a1{name} a2{name}", outputs=9, **{key: name})
    submit(one, "c0")
    assert [ran(one) for _ in range(3)] == [["a0x"], ["a0x"], ["a0x", "a0y"]]
    assert waiting(one) == {"a1x", "a2x", "a1y", "a2y", "c0"}
    while waiting(one) > {"c0"}:
        one.step()
    assert postponed(one) == {"c0"}
    one.drain()
    assert computed(one) == 4 * PREFIX + 11 * TAIL
    one.assert_nothing_left()


@pytest.mark.parametrize("on_host", [0, 400, 640])
def test_what_a_hierarchical_cache_has_on_the_host_is_not_computed(server, monkeypatch, on_host):
    one = server(max_total_tokens=3000)
    run(one, "f0 f1 f2 f3", outputs=30)
    submit(one, "e0 b0 c0 a0")
    judge = AdmissionRounds.judge

    def with_host(rounds, req):
        # SGLang loads it within add_one_req; here there is no such cache, so it must not try.
        req.host_hit_length = on_host if req.rid == "e0" else 0
        try:
            return judge(rounds, req)
        finally:
            req.host_hit_length = 0

    monkeypatch.setattr(AdmissionRounds, "judge", with_host)
    one.step()
    assert postponed(one) == ({"b0", "c0", "a0"} if on_host else {"e0", "b0", "c0", "a0"})


def test_adapters_in_a_batch_stay_within_their_limit(lora_server):
    """No adapter counts as one. Whoever finds no place for another does not hold up those behind."""
    said = {}
    for gather in ("off", "on"):
        one = lora_server(gather, at_a_time=2, max_total_tokens=3000)
        run(one, "f0 f1 f2 f3", outputs=30)
        submit(one, "e0x", lora_id="x")
        submit(one, "b0y b1y b2y", lora_id="y")
        submit(one, "c0z", lora_id="z")
        submit(one, "a0x a1x a2x", lora_id="x")
        # Who waits for its prefix takes no adapter's place: the next one's adapter fits.
        assert ran(one) == (["a0x", "e0x"] if gather == "off" else ["b0y"])
        assert postponed(one) == (set() if gather == "off" else {"e0x"})
        while one.scheduler.waiting_queue:
            one.step()
            rows = [*one.scheduler.running_batch.reqs, *one.scheduler.last_batch.reqs]
            assert len({req.lora_id for req in rows if not req.finished()}) <= 2
        one.drain()
        one.assert_nothing_left()
        said[gather] = one.outputs()
    assert said["on"] == said["off"]
