"""On the real scheduler no request is passed by more than the bounds, whatever happens to the requests."""

import random
import secrets
from collections import Counter

import pytest
from harness import Server
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from effort import newest_is_enough
from feather_sglang.adapter.scheduler import prefill_limit
from feather_sglang.scheduling.admission import deferrals, overtaking, rules
from oracles.overtaken import Witness

pytestmark = newest_is_enough

ALLOWANCE = 32  # as small as the prompts are
CLASSES = {
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": True,
    "priority_scheduling_preemption_threshold": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


def small_figures(patch):
    """What the product takes for little is little here."""
    patch.setattr(overtaking, "ALLOWANCE", float(ALLOWANCE))
    patch.setattr(deferrals, "_LEAST_SHARED_TOKENS", 40)
    patch.setattr(prefill_limit, "FLOOR_TOKENS", 16)
    patch.setattr(deferrals, "LEAST_TOKENS", 64)
    for rule in (rules.Batching, rules.EvictsLast):
        patch.setattr(rule, "least_tokens", 64)


def watched(folder, seed, share, gather, classes, tbt="null"):
    """A server with a pool for a few requests, in a time of its own, and a witness of its admission."""
    with pytest.MonkeyPatch.context() as patch:
        options = f'"chunk_size": 16, "max_overtaking": {share}, "gather": "{gather}", "tbt": {tbt}'
        patch.setenv("FEATHER_OPTIONS", f"{{{options}}}")
        patch.setattr(secrets, "randbits", random.Random(seed).getrandbits)
        flags = CLASSES if classes > 1 else {}
        sizes = {"max_total_tokens": 900, "chunked_prefill_size": 128, "max_running_requests": 10}
        server = Server(folder, "feather", schedule_conservativeness=0.02, **sizes, **flags)
    scheduler, time = server.scheduler, [5000.0]
    server.feather.clock = lambda: time[0]

    def run_batch(batch, *args, original=scheduler.run_batch, **named):
        computed = sum(batch.extend_lens or ()) if not batch.forward_mode.is_decode() else 0
        time[0] += 2e-3 + 2e-5 * computed + 1e-8 * computed * computed
        return original(batch, *args, **named)

    scheduler.run_batch = run_batch
    return server, Witness(server.feather.admission, ALLOWANCE)


def some_prompt(rng, born):
    """Some share a long beginning, some are long and alone, most are short."""
    group = rng.randrange(3)
    tail = rng.choice([rng.randint(1, 20), rng.randint(1, 20), rng.randint(100, 350)])
    return [2 + group] * rng.choice([0, 0, 64, 200]) + [20 + born % 400] * tail


def step(server, witness):
    """A turn of the scheduler, which counts on next to no output, so that it throws out requests again and again."""
    scheduler = server.scheduler
    if hasattr(scheduler, "new_token_ratio_tracker"):
        scheduler.new_token_ratio_tracker.current = 0.01
    else:  # earlier releases
        scheduler.new_token_ratio = 0.01
    batch = server.step()
    assert not server.feather.failed
    witness.check()
    assert not witness.disorder, witness.disorder[:3]
    return batch


SEEN: Counter[str] = Counter()


# What SGLang does to requests is seen in few examples; the rules alone are tried in many, without it.
@settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    seed=st.integers(0, 2**16),
    share=st.sampled_from([0.0, 0.5, 2.0]),
    gather=st.sampled_from(["on", "off"]),
    classes=st.sampled_from([1, 3]),
    tbt=st.sampled_from(["null", 4, 8]),
)
def test_whatever_happens_nobody_is_passed_by_more_than_the_bounds(folder, seed, share, gather, classes, tbt):
    rng, born, chunked = random.Random(seed), 0, 0
    with pytest.MonkeyPatch.context() as patch:
        small_figures(patch)
        server, witness = watched(folder, seed, share, gather, classes, tbt)
        try:
            for _ in range(200):
                event = rng.random()
                if event < 0.35 and len(server.scheduler.waiting_queue) < 30:
                    priority = rng.randrange(classes) if classes > 1 else None
                    length = rng.choice([1, 8, 60, 150])
                    tokens = some_prompt(rng, born)
                    server.submit(f"r{born}", tokens, length, priority, ignore_eos=rng.random() < 0.3)
                    born += 1
                elif event < 0.4 and born:
                    server.abort(f"r{rng.randrange(born)}")
                else:
                    step(server, witness)
                    chunked += server.scheduler.chunked_req is not None
            while step(server, witness) is not None or server.scheduler.waiting_queue:
                assert server.steps < 3000
            server.assert_nothing_left()
            limit = server.feather.rounds.limit
            SEEN.update(decoded_first=0 if limit is None else limit.decoded_first)
            SEEN.update(chunked=chunked, passed=witness.passed, bounded=witness.bounded, retracted=witness.retracted)
        finally:
            server.close()


def test_all_of_it_happened():
    if SEEN:  # else this test runs alone
        assert min(SEEN[what] for what in ("decoded_first", "chunked", "passed", "bounded", "retracted")) > 0, SEEN


def test_a_request_is_judged_by_what_it_will_take(folder):
    """Also when it comes back with what it has generated, which is computed again as its prompt is."""
    server, witness = watched(folder, seed=0, share=2.0, gather="off", classes=1)
    builder, judged = server.feather.admission, {}
    check, admit = builder.check, builder.state.overtaking.admit

    def note_judged(proposal):
        name = proposal.request_id
        judged[name] = builder.state.work.of(proposal.missing, witness.tokens[name])
        return check(proposal)

    def note_admitted(name, work):
        took[name, len(took)] = judged[name], work
        admit(name, work)

    builder.check, builder.state.overtaking.admit, took = note_judged, note_admitted, {}
    try:
        for i in range(8):
            server.submit(f"r{i}", [2 + i % 2] * 100 + [20 + i] * 8, 120, ignore_eos=False)
        while server.step() is not None or server.scheduler.waiting_queue:
            assert server.steps < 3000
        assert witness.retracted
        assert [(name, *both) for name, both in took.items() if both[0] != pytest.approx(both[1])] == []
    finally:
        server.close()
