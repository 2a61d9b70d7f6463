"""SGLang's scheduler where memory is short: no request is retracted, and prefixes that others need stay cached."""

import random

import pytest
from harness import OverlapServer, Server

from effort import newest_is_enough
from feather_sglang.adapter.scheduler.life_cycle import LifeCycle
from feather_sglang.scheduling.policies import make_policy

pytestmark = newest_is_enough

PREFIX, TAIL = 640, 4


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Checked after every step, under a policy that never stops, with `gather` on or off."""
    monkeypatch.setenv("FEATHER_DEBUG_CHECK", "1")

    def make(gather, kind=Server, **overrides):
        monkeypatch.setenv("FEATHER_OPTIONS", f'{{"gather": "{gather}"}}')
        one = kind(tmp_path, "feather-heuristic", **overrides)
        one.feather.admission.policy = make_policy("always-add")
        if gathering := one.feather.admission.state.deferrals.prefix_batching:
            for _ in range(64):
                gathering.arrived(3, met=True)
        return one

    return make


def submit(one, names, outputs, **options):
    """All of group "a" begin with the same tokens."""
    for name in names.split():
        prompt = random.Random(name[0]).choices(range(2, 512), k=PREFIX) + [300 + int(name[1:])] * TAIL
        assert one.submit(name, prompt, max_new_tokens=outputs, **options)


def computed(one):
    return sum(len(req.origin_input_ids) - req.cached_tokens for req in one.requests.values())


def retractions(one):
    return sum(req.retraction_count for req in one.requests.values())


def test_requests_that_grow_together_are_not_thrown_out(server):
    """32 of one prefix need 640 + 32 x 64 tokens in the end, of 1,500; SGLang alone lets in too many."""
    thrown_out = {}
    for gather in ("off", "on"):
        # Of what running requests may still generate SGLang counts a tenth, as it does when all went well for long.
        one = server(gather, max_total_tokens=1500, schedule_conservativeness=0.1 / 0.7)
        if forecast := one.feather.admission.state.forecast:
            forecast.finished(60)
        submit(one, " ".join(f"a{i}" for i in range(32)), 60, ignore_eos=False)
        one.drain()
        assert all(len(req.output_ids) == 60 for req in one.requests.values())
        thrown_out[gather] = retractions(one)
        one.assert_nothing_left()
        one.close()
    assert thrown_out["off"] > 0 and thrown_out["on"] == 0


@pytest.mark.parametrize("kind", [Server, OverlapServer])
def test_where_lengths_are_known_nobody_is_thrown_out(server, kind):
    """Ten prefixes, of which seven fill the pool, and requests of three lengths that come one by one."""
    one = server("on", kind, max_total_tokens=5000, schedule_conservativeness=0.1 / 0.7)
    numbers = random.Random(4)
    while len(one.requests) < 150:
        if numbers.random() < 0.6:
            prompt = random.Random(numbers.randrange(10)).choices(range(2, 512), k=PREFIX)
            prompt += numbers.choices(range(2, 512), k=numbers.randint(3, 20))
            assert one.submit(f"r{len(one.requests)}", prompt, max_new_tokens=numbers.choice([10, 30, 40]))
        one.step()
    one.drain()
    assert retractions(one) == 0 and one.feather.admission.stats()["deferrals"]["kv_budget"] > 0
    one.assert_nothing_left()


def test_a_prefix_that_another_one_joins_is_not_counted_on(server):
    """At a0's end its prefix would be given back, for ten of c to grow; but a1 has it, too, and runs longer."""
    one = server("on", max_total_tokens=1500, schedule_conservativeness=0.1 / 0.7)
    for _ in range(256):
        one.feather.admission.state.forecast.finished(61)
    submit(one, "a0", 20, ignore_eos=False)
    submit(one, "c0", 60, ignore_eos=False)
    for _ in range(3):
        one.step()
    submit(one, "a1 " + " ".join(f"c{i}" for i in range(1, 10)), 60, ignore_eos=False)
    one.drain()
    assert one.outputs().keys() == {"a0", "a1", *(f"c{i}" for i in range(10))}
    assert retractions(one) == 0 and one.feather.admission.stats()["deferrals"]["kv_budget"] > 0
    one.assert_nothing_left()


def test_lengths_are_learnt_from_those_that_finish(server):
    one = server("on", max_total_tokens=1500, schedule_conservativeness=0.1 / 0.7)
    submit(one, "a0 a1", 60, ignore_eos=False)
    one.drain()
    submit(one, " ".join(f"a{i}" for i in range(2, 34)), 60, ignore_eos=False)
    one.drain()
    assert retractions(one) == 0 and one.feather.admission.stats()["deferrals"]["kv_budget"] > 0
    one.assert_nothing_left()


def test_prefixes_that_are_cached_are_served_before_any_is_evicted(server, monkeypatch):
    """Two prefixes are in a pool for three. The third would evict one that two more requests wait for.

    Where memory is short that follows from who evicts, else from what was in the cache when they came.
    """
    prefill, look_up = {}, LifeCycle._look_up
    for gather, looks in (("off", False), ("on", False), ("off", True)):
        monkeypatch.setattr(LifeCycle, "_look_up", look_up if looks else lambda self, req: 0)
        one = server(gather, max_total_tokens=3 * (PREFIX + 40))
        submit(one, "a0 b0", 4)
        one.drain()
        for group in "cd":
            submit(one, " ".join(f"{group}{i}" for i in range(3)), 4)
        submit(one, "a1 a2 b1 b2", 4)
        one.drain()
        prefill[gather, looks] = computed(one)
        one.assert_nothing_left()
        one.close()
    assert prefill["on", False] == 4 * PREFIX + 12 * TAIL == prefill["off", True] < prefill["off", False]


def test_a_request_that_needs_all_of_the_pool_runs_at_last(server):
    one = server("on", max_total_tokens=1500)
    submit(one, "a0 a1", 60)
    one.step()
    prompt = random.Random("long").choices(range(2, 512), k=1300)
    assert one.submit("long", prompt, max_new_tokens=100)
    submit(one, " ".join(f"a{i}" for i in range(2, 12)), 60)
    one.drain()
    assert len(one.requests["long"].output_ids) == 100 and retractions(one) == 0
    one.assert_nothing_left()


def test_a_length_is_known_where_nothing_else_ends_the_request(server):
    one = server("on")
    submit(one, "a0 a2", 60)
    submit(one, "a1", 60, ignore_eos=False)
    one.requests["a2"].sampling_params.stop_strs = ["."]  # refused on the way in, as there is no tokenizer here
    outlooks = [one.feather.admission.state.outlook_of(name) for name in ("a0", "a1", "a2")]
    assert [outlook.fixed for outlook in outlooks] == [True, False, False]
    assert {outlook[:3] for outlook in outlooks} == {(PREFIX + TAIL, 0, 60)}
